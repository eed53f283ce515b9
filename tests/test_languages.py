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
    set_language("zh")
    yield
    set_language(None)
    languages._templates.cache_clear()


def test_a_template_is_filled_in():
    assert tr("{rows} rows per step", rows=256) == "每步 256 行"


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
