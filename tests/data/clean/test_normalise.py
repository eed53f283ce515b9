"""Normalised texts: what goes, what stays, and that a second time changes nothing."""

import unicodedata

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.data.clean.similarity import MAX_INDENT, normalise

NASTY = " \t\n\r\v\f\x00\x1f\x85\u2028\u200b\u200c\u200d\u200e\ufeff\u00ad\u3000\u00a0！!。….·-=_*~≠\u0338\u0301e™👨👩️🏴\U000e0067\U000e007fبﹰक्㊗"


def one(text):
    return normalise(pa.array([text])).to_pylist()[0]


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("ＡＢＣ１２３，！", "ABC123,!"),
        ("a\u200bb\ufeffc\u200ed\u202ee\u2060f\u00adg", "abcdefg"),
        ("a\x00b\x07c\x7fd\x9fe", "abcde"),
        ("a\r\nb\rc\u2028d\x0be", "a\nb\nc\nd\ne"),
        ("好！！！！！！！", "好!!!"),
        ("嗯。。。。。。", "嗯。。。"),
        ("等等………………", "等等..."),
        ("a----b====c____d****e~~~~f", "a---b===c___d***e~~~f"),
        ("wow!!!", "wow!!!"),
        ("a  b\t\tc \t d", "a b c d"),
        ("a\tb", "a\tb"),
        ("a   \n\n\n   \n\nb", "a\n\nb"),
        ("  \u3000hello\u00a0 world \n", "hello world"),
        ("e\u200b\u0301", "é"),
        (" \u200b\ufeff\u3000\r\n", ""),
    ],
    ids=ascii,
)
def test_noise_goes(text, becomes):
    assert one(text) == becomes


@pytest.mark.parametrize(
    "text",
    [
        'The quick brown fox, 1,234.50 times; (really?) "yes" - it\'s fine!',
        "def f(x):\n    if x:\n        return g(x)\n\n    return ((((1))))",
        "###### heading\n\n````\ncode\n````",
        "👨\u200d👩\u200d👧 and 🏳️\u200d🌈 and ❤️\u200d🔥",
        "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
        "می\u200cخواهم, क्\u200dष",
        "中文没有空格。",
    ],
    ids=ascii,
)
def test_meaning_stays(text):
    assert one(text) == text


@pytest.mark.parametrize(
    "text", ["a\u200db", "\u200d👨", "👨\u200d", "👨\u200d\u200d👩", "中\u200c文", "\U000e0067x"], ids=ascii
)
def test_a_joiner_that_joins_nothing_goes(text):
    assert not any(unicodedata.category(letter) == "Cf" for letter in one(text))


def test_an_endless_indentation_is_cut():
    assert one("a\n" + " " * 500 + "b") == "a\n" + " " * MAX_INDENT + "b"


@given(st.lists(st.text(st.one_of(st.sampled_from(NASTY), st.characters(codec="utf-8")), max_size=30), max_size=5))
def test_a_second_time_changes_nothing(texts):
    once = normalise(pa.array(texts, pa.string()))
    assert normalise(once).equals(once)


@pytest.mark.parametrize("around", ["{}", "e{}\u0301", "{}\u200d{} {} {}{}{}{}"])
def test_a_second_time_changes_nothing_for_any_character(around):
    letters = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    once = normalise(pa.array([around.replace("{}", letter) for letter in letters]))
    changed = pc.not_equal(normalise(once), once).to_pylist()
    assert [ascii(letter) for letter, hit in zip(letters, changed, strict=True) if hit] == []


@given(st.lists(st.text(st.sampled_from(NASTY), max_size=20), min_size=1, max_size=8), st.data())
def test_a_text_does_not_depend_on_its_neighbours(texts, data):
    start = data.draw(st.integers(0, len(texts) - 1))
    sliced = pa.array(texts, pa.string()).slice(start)
    assert normalise(sliced).to_pylist() == [one(text) for text in texts[start:]]
