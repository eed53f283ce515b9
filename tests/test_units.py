"""Sizes are read as the letters say and printed as people read them."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.errors import BadOption
from brimful.units import GiB, KiB, MiB, TiB, parse_bytes, show_bytes, show_rate, show_seconds

sizes = st.integers(1, 999 * TiB)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * GiB),
        ("20GB", 20 * 10**9),
        ("20g", 20 * GiB),
        ("512 MiB", 512 * MiB),
        ("1.5g", 3 * GiB // 2),
        ("3kb", 3000),
        ("3 KIB", 3 * KiB),
        ("2T", 2 * TiB),
        ("  7 b ", 7),
        ("2000000000", 2_000_000_000),
        (2_000_000_000, 2_000_000_000),
        (2e9, 2_000_000_000),
    ],
)
def test_a_size_is_what_its_letters_say(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "20 XiB", "-5GiB", "1,5GiB", "20 GiB free", "nan", "all", -5, math.inf, math.nan], ids=repr
)
def test_what_is_not_a_size_is_refused_with_flag_text_and_examples(text):
    with pytest.raises(BadOption) as refused:
        parse_bytes(text, flag="--memory-limit")
    assert str(refused.value) == f"--memory-limit: {text!r} is not a size. Try: 20GiB, 512MiB or 2000000000."


@pytest.mark.parametrize("text", ["0", 0, "0GiB", "0.4"])
def test_nothing_is_not_a_size(text):
    with pytest.raises(BadOption) as refused:
        parse_bytes(text, flag="--host-limit")
    assert str(refused.value) == f"--host-limit: {text!r} must be greater than 0. Try: 20GiB."


@given(sizes)
@settings(deadline=None)
def test_a_bare_number_is_bytes(size):
    assert parse_bytes(size) == parse_bytes(str(size)) == size


@given(sizes, st.sampled_from(["kib", "mib", "gib"]))
@settings(deadline=None)
def test_a_binary_unit_multiplies(count, unit):
    factor = {"kib": KiB, "mib": MiB, "gib": GiB}[unit]
    assert parse_bytes(f"{count // factor + 1}{unit}") == (count // factor + 1) * factor


@given(st.floats(1, 1e20))
@settings(deadline=None)
def test_a_float_of_any_size_is_a_number_of_bytes(size):
    assert parse_bytes(size) == int(size)


@given(sizes)
@settings(deadline=None)
def test_what_is_shown_can_be_read_back_to_half_a_percent(size):
    assert abs(parse_bytes(show_bytes(size)) - size) <= 0.005 * size + 1  # and the byte that whole numbers lose


@given(sizes, sizes)
@settings(deadline=None)
def test_more_bytes_never_read_as_fewer(one, other):
    few, many = sorted((one, other))
    assert parse_bytes(show_bytes(few)) <= parse_bytes(show_bytes(many))


@given(st.integers(-999 * TiB, 999 * TiB))
@settings(deadline=None)
def test_at_most_four_figures_are_shown(size):
    assert re.fullmatch(r"-?(\d{1,4}|\d{1,3}\.\d|\d{1,2}\.\d\d) ([KMGT]i)?B", show_bytes(size))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (512 * MiB, "512 MiB"),
        (19.97 * GiB, "19.97 GiB"),
        (20 * GiB, "20 GiB"),
        (100 * GiB, "100 GiB"),
        (139.8 * GiB, "139.8 GiB"),
        (1023.6 * MiB, "1024 MiB"),
        (1.5 * TiB, "1.5 TiB"),
        (-3 * GiB, "-3 GiB"),
        (None, "unknown"),
    ],
)
def test_bytes_as_people_read_them(size, text):
    assert show_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00092, "0.92 ms"),
        (0.052, "52 ms"),
        (0.418, "0.42 s"),
        (12.5, "12.5 s"),
        (60, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (None, "unknown"),
    ],
)
def test_seconds_as_people_read_them(seconds, text):
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.5, "0.5"), (8.47, "8.47"), (99.96, "100"), (1284.4, "1,284"), (12_900_000, "12,900,000"), (None, "unknown")],
)
def test_rates_have_three_figures_and_from_a_hundred_on_no_fraction(rate, text):
    assert show_rate(rate) == text
