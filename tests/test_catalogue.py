"""The Chinese catalogue keeps up with the English it translates."""

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

import brimful
from brimful import languages
from brimful.errors import BrimfulError
from tests.source_templates import normalized, raised_in, templates_in

SOURCE = Path(brimful.__file__).parent
FILES = sorted(
    (file for file in resources.files("brimful.languages").joinpath("zh").iterdir() if file.name.endswith(".toml")),
    key=lambda file: file.name,
)
COMPOSED = {
    "processes outside this container hold {bytes:,}",
    "processes that are not visible from here hold {bytes:,}",
    "{method!r} failed on a probe batch of {size} at {file!r}:{line:,}: {error!s}",
    "{count:,} of {rows:,} responses",
    *(f"{layout} {precision}" for layout in ("padded", "packed") for precision in ("fp32", "bf16", "fp16")),
    *(f"{{layout}} {{precision!r}} {words}" for words in ("compiled", "checkpointed", "checkpointed {which!r}")),
    *(f"{{layout}} {{precision!r}} compiled {words}" for words in ("checkpointed", "checkpointed {which!r}")),
    "{count:,} chosen texts",
    "{count:,} rejected texts",
    "{count:,} loader worker reads rows {rows!s}",
    "{count:,} loader workers read rows {rows!s}",
    "this process reads rows {rows!s}",
    "{first}, or {second}; as a last resort --backend gloo, which is slower",
    "set {variable} (NCCL then shares host memory as older versions do)",
    "set {variable} (no direct copies between GPUs, which an IOMMU can break)",
    "Try: more {epochs!r}, or a smaller {batch!r}",
    "The NPU",
    "{card} ran out of memory for a tensor of {factors} = {size}",
    "the fp32 logits",
    "the bf16 or fp16 logits",
    "an {dtype} activation of a feed-forward layer",
    "a {dtype} activation of a feed-forward layer",
    "Memory access fault by GPU",
    "{count:,} over-long",
    "{datasets} × {encoders} × {methods} × {seeds} = {runs}",
    "{grid}, {known:,} already finished",
    "{count:,} methods in {settings:,} settings",
    "Try: repair them, starting with {first!a}",
    "Try: repair that row, or drop such rows with max_bad=0.01",
    "{file!s}, line {line:,}: not JSON: {error!s} at character {place:,}",
}
"""Made of parts that the source joins where `source_templates` does not see it."""
PLACEHOLDER = re.compile(r"\{(\w+)(?:[:!][^}]*)?\}")


def entries(file) -> dict[str, str]:
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    return {english: chinese for table in tables.values() for english, chinese in table.items()}


def kinds(error: type[BrimfulError]) -> list[type[BrimfulError]]:
    return [error, *(kind for below in error.__subclasses__() for kind in kinds(below))]


by_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


@by_file
def test_every_english_template_is_in_the_source(file):
    """Whoever changes an English sentence changes its key as well, or the sentence is no longer translated."""
    texts = "\n".join(templates_in(SOURCE))
    lost = [english for english in entries(file) if _fixed_text(english) not in texts and english not in COMPOSED]
    assert not lost, f"{file.name} translates what the source no longer says: {lost}"


def _fixed_text(template: str) -> str:
    """Without placeholders at either end: they may stand for a whole sentence around a part."""
    return normalized(template).removeprefix("{}").removesuffix("{}").strip()


@by_file
def test_both_sides_have_the_same_placeholders(file):
    for english, chinese in entries(file).items():
        assert set(PLACEHOLDER.findall(chinese)) == set(PLACEHOLDER.findall(english)), english


@by_file
def test_no_translation_is_empty(file):
    assert all(chinese.strip() for chinese in entries(file).values())


def test_an_english_template_has_one_translation():
    """A second one in another file would replace the first everywhere."""
    seen: dict[str, set[str]] = {}
    for file in FILES:
        for english, chinese in entries(file).items():
            seen.setdefault(english, set()).add(chinese)
    assert not {english: both for english, both in seen.items() if len(both) > 1}


def test_every_code_has_a_meaning_in_chinese():
    codes = {kind.code for kind in kinds(BrimfulError)}
    assert codes <= set(languages._catalogue())


def test_a_missing_sentence_is_noticed(tmp_path):
    """The test above can fail: a sentence that was changed in the source is not found there."""
    (tmp_path / "view.py").write_text("def show(rows):\n    return f\"{rows} row{'s' * (rows != 1)} fit\"\n")
    texts = templates_in(tmp_path)
    assert _fixed_text("{rows:,} rows fit") in "\n".join(texts)
    assert _fixed_text("{rows:,} rows do fit") not in "\n".join(texts)


def test_keys_that_differ_by_their_placeholders_alone_have_one_translation():
    """As patterns only one of them ever matches, so it must not matter which."""
    translations: dict[str, set[str]] = {}
    for file in FILES:
        for english, chinese in entries(file).items():
            translations.setdefault(normalized(english), set()).add(normalized(chinese))
    assert {key: found for key, found in translations.items() if len(found) > 1} == {}


NOT_WORDS = re.compile(
    r"`[^`]*`|Hugging Face hub|(?:brimful|torchrun|accelerate launch)(?: (?:-{0,2}[\w./-]+|'[^']*'))*"
)
ENGLISH = re.compile(r"[A-Za-z']{2,} [A-Za-z']{2,} [A-Za-z']{2,}")
INTERNAL = {"result rows have no columns {}; add them to SCHEMA"}
"""For those who work on Brimful."""


def test_every_message_that_is_raised_has_a_translation(chinese):
    """By the source: of each `raise`, some form of its message, with values that a template may want, is Chinese throughout."""
    lost = {place: texts for place, texts in raised_in(SOURCE, "BrimfulError") if not any(map(_is_chinese, texts))}
    assert not {place: texts[0] for place, texts in lost.items() if texts[0] not in INTERNAL}


def _is_chinese(text: str) -> bool:
    text = re.sub(r"\. \{\}$", ". Try: other data.", text)  # advice that is made elsewhere
    text = re.sub(r" \{\}(?=[a-z])", " ", text)  # a phrase that may be empty
    filled = (text.replace("{}", value) for value in ("7", "rows.json", "20 GiB", "2 rows"))
    return any(not ENGLISH.search(NOT_WORDS.sub("", languages.translate(one))) for one in filled)


@pytest.fixture
def chinese():
    languages.set_language("zh")
    yield
    languages.set_language(None)
