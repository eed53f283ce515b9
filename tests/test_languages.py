"""Sentences are looked up in one catalogue; what it lacks stays English."""

import pytest

from brimful import languages
from brimful.languages import language, set_language, tr, translate

CATALOGUE = {
    "{rows} rows per step": "每步 {rows} 行",
    "fastest: {rate} rows/s ({other} with {rows} rows)": "最快：每秒 {rate} 行（{rows} 行时为 {other}）",
    "set in {origin}": "来自 {origin}",
    "recipe {name}": "配方 {name}",
    "as requested": "按要求",
}


@pytest.fixture(autouse=True)
def _chinese(monkeypatch):
    monkeypatch.setattr(languages, "_catalogue", lambda: CATALOGUE)
    languages._templates.cache_clear()
    languages._translated.cache_clear()
    set_language("zh")
    yield
    set_language(None)
    languages._templates.cache_clear()
    languages._translated.cache_clear()


def test_a_template_is_filled_in():
    assert tr("{rows} rows per step", rows=256) == "每步 256 行"


def test_numbers_are_written_as_in_english(monkeypatch):
    """The Chinese need not repeat `:,`; without it a page had `1920 行` beside `3,072`."""
    monkeypatch.undo()
    assert languages._with_formats("{rows:,} rows of {file!s}", "{file} 的 {rows} 行") == "{file} 的 {rows:,} 行"
    assert "1,920" in tr("{rows:,} rows", rows=1920)


def test_an_unknown_template_stays_english():
    assert tr("{rows} rows ran", rows=3) == "3 rows ran"


def test_a_finished_sentence_is_recognised_by_its_template():
    assert translate("fastest: 672 rows/s (598 with 32 rows)") == "最快：每秒 672 行（32 行时为 598）"


def test_the_parts_of_a_sentence_are_translated_too():
    assert translate("set in recipe small; as requested") == "来自 配方 small；按要求"


def test_english_is_returned_as_it_is():
    set_language("en")
    assert translate("as requested") == "as requested"
    assert tr("as requested") == "as requested"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [("LANG", "zh_CN.UTF-8", "zh"), ("LANG", "de_DE.UTF-8", "en"), ("BRIMFUL_LANG", "zh", "zh")],
)
def test_the_environment_decides_unless_a_language_is_set(monkeypatch, variable, value, expected):
    for name in ("BRIMFUL_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    set_language(None)
    monkeypatch.setenv(variable, value)
    assert language() == expected


def test_the_catalogue_that_ships_can_be_read():
    assert dict(languages._entries())


def translations(monkeypatch, **catalogue):
    monkeypatch.setattr(languages, "_catalogue", lambda: catalogue)
    languages._templates.cache_clear()
    languages._translated.cache_clear()


def test_a_figure_matches_no_words(monkeypatch):
    translations(monkeypatch, **{"{rows:,} rows": "{rows} 行"})
    assert translate("1,024 rows") == "1,024 行"
    assert translate("many rows") == "many rows"


def test_a_figure_may_have_a_unit(monkeypatch):
    translations(monkeypatch, **{"took {time:,}": "用时 {time}"})
    assert translate("took 3 min 20 s") == "用时 3 min 20 s"


def test_what_is_kept_is_not_translated(monkeypatch):
    translations(monkeypatch, **{"read {path!s}": "已读{path}", "is {zone}": "为{zone}", "safe": "安全"})
    assert translate("read safe") == "已读 safe"
    assert translate("is safe") == "为安全"


def test_chinese_and_other_characters_are_set_apart(monkeypatch):
    translations(monkeypatch, **{"{device} is {zone!r}": "{device}是{zone}", "the CPU": "处理器"})
    assert translate("cuda:0 is full") == "cuda:0 是 full"
    assert translate("the CPU is full") == "处理器是 full"


def test_half_a_sentence_is_not_translated(monkeypatch):
    translations(monkeypatch, **{"because {reason}": "因为{reason}", "it fits": "放得下"})
    assert translate("because it fits") == "因为放得下"
    assert translate("because nobody has said so") == "because nobody has said so"


def test_a_sentence_that_is_not_known_leaves_the_others_translated(monkeypatch):
    translations(monkeypatch, **{"it fits": "放得下"})
    assert translate("it fits. Nobody has said so. It fits") == "放得下。Nobody has said so. It fits"


def test_a_comma_in_parentheses_is_not_one_of_the_sentence(monkeypatch):
    translations(monkeypatch, **{"fast": "快", "{rate:,} with {rows:,} rows": "{rows} 行时 {rate}"})
    assert translate("fast (9 with 2 rows, 8 with 1 rows)") == "快（2 行时 9，1 行时 8）"


def test_a_count_that_is_filled_in_is_translated():
    assert tr("{rows} rows per step", rows="256 rows") == "每步 256 rows 行"
    assert tr("set in {origin}", origin="3 rows per step") == "来自 每步 3 行"


def test_a_text_without_letters_is_returned_as_it_is():
    assert translate("–") == "–" and translate("") == ""
