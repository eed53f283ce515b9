"""The report in Chinese: every sentence of it, and the page says so."""

import ast
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

import brimful.cli.report
import brimful.report.page
from brimful.languages import set_language
from brimful.report.page.report import Report
from brimful.report.run_record import RunRecord

from .rich_runs import rich_run
from .test_report import Page

SOURCES = [*Path(brimful.report.page.__file__).parent.glob("*.py"), Path(brimful.cli.report.__file__)]
NAMES = r"brimful|sft|NVIDIA GeForce RTX|chat|eval|compare|watch|train|why|run|resume|rows|jsonl|parquet|json|padded|bf16|adamw|cosine|box|GiB|MiB|KiB|min|OOM|GPU|MFU|kWh|Wh|token|NaN|events|plans|seed|data|task|folder|host|version|report|dev"
"""Names, units and commands, which stay as they are."""


@pytest.fixture(autouse=True)
def _chinese():
    set_language("zh")
    yield
    set_language(None)


def catalogue() -> dict[str, str]:
    text = resources.files("brimful.languages").joinpath("zh/report.toml").read_text(encoding="utf-8")
    return {english: chinese for table in tomllib.loads(text).values() for english, chinese in table.items()}


def templates() -> set[str]:
    """Of every `tr("…")` in the source."""
    calls = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {
        node.args[0].value
        for node in calls
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tr"
    }


def test_every_template_of_the_report_is_in_its_catalogue():
    assert templates() - catalogue().keys() == set()


def test_both_sides_have_the_same_placeholders():
    for english, chinese in catalogue().items():
        assert set(re.findall(r"\{(\w+)", chinese)) == set(re.findall(r"\{(\w+)", english)), english


def english_left(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]{3,} [A-Za-z]{3,}", re.sub(rf"\b(?:{NAMES})\b", "", text))


@pytest.fixture
def chinese_run(tmp_path):
    """What a plan and events say is in other catalogues, so here it is Chinese already."""
    choices = [
        {
            "name": "微批",
            "requested": None,
            "effective": 43,
            "reason": "最快",
            "source": "measured",
            "basis": "measured",
        }
    ]
    return rich_run(
        tmp_path / "a", ooms=[], plan_values={"choices": choices, "not_tried": []}, end="failed",
        more=[{"event": "oom", "step": 7, "sentence": "显存不足"}, {"event": "note", "step": 8, "sentence": "注意", "level": "warning"}],
    )  # fmt: skip


def test_no_english_sentence_is_left_on_the_page(chinese_run):
    lines = (chinese_run / "events.jsonl").read_text(encoding="utf-8").replace('"trained 300 steps"', '"训练失败"')
    (chinese_run / "events.jsonl").write_text(lines, encoding="utf-8")
    for runs in ([RunRecord(chinese_run)], [RunRecord(chinese_run), RunRecord(chinese_run)]):
        shown = Report(runs)
        page = Page(shown.html())
        labels = " ".join(attrs.get("aria-label") or "" for _, attrs in page.tags)
        assert english_left(f"{page.text} {labels}") == []
        assert english_left(shown.markdown()) == []


def test_no_english_sentence_is_left_of_an_empty_run(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"")
    assert english_left(Page(Report([RunRecord(tmp_path)]).html()).text.replace(tmp_path.name, "")) == []


def test_the_page_says_its_language(chinese_run):
    assert '<html lang="zh-CN">' in Report([RunRecord(chinese_run)]).html()
    set_language("en")
    assert '<html lang="en">' in Report([RunRecord(chinese_run)]).html()


def test_the_markdown_is_punctuated_as_chinese_is(chinese_run):
    text = Report([RunRecord(chinese_run)]).markdown()
    assert "（31–85 %）：" in text and "76,800 行）" in text
    assert not re.search(r"[\u4e00-\u9fff](?:[,:.] | \()", text)
