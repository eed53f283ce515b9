"""The options of clean, the memory they allow, and normalized texts."""

import unicodedata

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.data.clean.prepare import MAX_INDENT, CleanOptions, MemoryShares, normalize
from brimful.errors import BadOption
from brimful.units import GiB, MiB

# ── Options ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"near": 0.4}, "near=0.4"),
        ({"near": 1.1}, "near=1.1"),
        ({"max_bad": -0.1}, "max_bad=-0.1"),
        ({"max_bad": 2}, "max_bad=2"),
        ({"valid": -1}, "valid=-1"),
        ({"valid": 1.5}, "valid=1.5 must be a share below 1"),
        ({"test": float("nan")}, "test=nan"),
        ({"valid": 0.6, "test": 0.4}, "valid=0.6 and test=0.4 leave no row"),
        ({"min_chars": 0}, "min_chars=0"),
        ({"max_chars": "12,x"}, "max_chars='12,x'"),
        ({"max_tokens": 5}, "Try: tokenizer="),
        ({"tokenizer": "here"}, "Try: max_tokens="),
        ({"seed": -1}, "seed=-1"),
        ({"host_limit": "100MiB"}, "host_limit='100MiB' is too small"),
        ({"host_limit": "much"}, "host_limit=: 'much' is not a size"),
    ],
    ids=str,
)
def test_a_value_that_cannot_work_is_named_with_its_flag(options, message):
    with pytest.raises(BadOption) as raised:
        CleanOptions(**options)
    assert message in str(raised.value)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(BadOption, match=r"max_chars=0.* near=2.* valid=1.5.* host_limit=1.* seed=-1"):
        CleanOptions(max_chars=0, near=2, valid=1.5, host_limit=1, seed=-1)


@pytest.mark.parametrize("options", [{}, {"valid": 0, "test": 0}, {"valid": 1}, {"valid": 5000, "test": 0.5}, {"near": None}, {"near": 1}, {"max_chars": "10,20"}, {"min_chars": 3}, {"host_limit": "384MiB"}], ids=str)  # fmt: skip
def test_a_value_that_can_work_is_taken(options):
    taken = CleanOptions(**options)
    assert {name: getattr(taken, name) for name in options} == options


def test_memory_and_split_do_not_decide_whether_work_is_resumed():
    one = CleanOptions(host_limit="2GiB", max_bad=0.5, overwrite=True, valid=3, test=4)
    assert one.key() == CleanOptions().key()
    for other in ({"seed": 1}, {"near": None}, {"min_chars": 1}, {"max_chars": 1}, {"max_tokens": 1, "tokenizer": "x"}):
        assert CleanOptions(**other).key() != CleanOptions().key()


@pytest.mark.parametrize("limit", [384 * MiB, GiB, 16 * GiB])
def test_what_is_planned_to_be_held_at_once_fits_the_limit(limit):
    for cores in (1, 2, 64):
        memory = MemoryShares.within(limit, cores)
        chunks = (2 * memory.threads + 1) * 40 * MiB
        assert 3 * memory.segment_bytes + chunks < limit
        assert 6 * memory.bucket_bytes < limit and memory.duckdb_bytes < limit
        assert 1 <= memory.threads <= cores


# ── Normalization ─────────────────────────────────────────────────────────────────────────────────────────────────────

NASTY = " \t\n\r\v\f\x00\x1f\x85\u2028\u200b\u200c\u200d\u200e\ufeff\u00ad\u3000\u00a0！!。….·-=_*~≠\u0338\u0301e™👨👩️🏴\U000e0067\U000e007fبﹰक्㊗"


def one(text):
    return normalize(pa.array([text])).to_pylist()[0]


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


@settings(max_examples=40)
@given(st.lists(st.text(st.one_of(st.sampled_from(NASTY), st.characters(codec="utf-8")), max_size=30), max_size=5))
def test_a_second_time_changes_nothing(texts):
    once = normalize(pa.array(texts, pa.string()))
    assert normalize(once).equals(once)


@pytest.mark.parametrize("around", ["{}", "e{}\u0301", "{}\u200d{} {} {}{}{}{}"])
def test_a_second_time_changes_nothing_for_any_character(around):
    letters = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    once = normalize(pa.array([around.replace("{}", letter) for letter in letters]))
    changed = pc.not_equal(normalize(once), once).to_pylist()
    assert [ascii(letter) for letter, hit in zip(letters, changed, strict=True) if hit] == []


@settings(max_examples=40)
@given(st.lists(st.text(st.sampled_from(NASTY), max_size=20), min_size=1, max_size=8), st.data())
def test_a_text_does_not_depend_on_its_neighbours(texts, data):
    start = data.draw(st.integers(0, len(texts) - 1))
    sliced = pa.array(texts, pa.string()).slice(start)
    assert normalize(sliced).to_pylist() == [one(text) for text in texts[start:]]
