"""Pieces of SVG that every page is drawn with."""

import math
import re

import numpy as np
import pytest

from brimful.charts import Frame, between, extremes, line, log_ticks, ticks


def test_no_peak_is_lost_when_points_are_left_out():
    values = np.full(100_000, 5.0)
    values[54_321], values[12_345] = 900.0, -3.0
    kept = extremes(np.arange(100_000.0), values, 250)
    assert len(kept) <= 2 * 250 + 2
    assert {54_321, 12_345, 0, 99_999} <= set(kept.tolist())


def test_few_points_are_all_kept():
    assert extremes(np.arange(10.0), np.arange(10.0), 5).tolist() == list(range(10))


def test_a_gap_stays_when_points_are_left_out():
    values = np.ones(10_000)
    values[4000:4100] = math.nan
    kept = extremes(np.arange(10_000.0), values, 100)
    assert np.isnan(values[kept]).any()


@pytest.mark.parametrize(
    ("low", "high", "names"),
    [
        (-2, 2, ["0.01", "0.1", "1", "10", "100"]),
        (0, 1, ["1", "2", "5", "10"]),
        (math.log10(2.1), math.log10(2.9), ["2.2", "2.4", "2.6", "2.8"]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_round_numbers(low, high, names):
    assert [name for _, name in log_ticks(low, high, most=5)] == names


def test_whole_ticks_have_no_decimals():
    assert [name for _, name in ticks(0, 100, most=4)] == ["0", "25", "50", "75", "100"]


def test_an_area_is_closed_and_has_both_edges():
    frame = Frame(x=(0, 1), y=(0, 10), width=100, height=100, left=0, right=0, top=0, bottom=0)
    drawn = between(frame, [0, 1], [0, 0], [5, 5], "area c0")
    assert re.search(r' d="M0 50[^"]*z"', drawn)


def test_a_value_far_outside_is_drawn_far_outside():
    frame = Frame(x=(0, 1), y=(0, 1), width=100, height=100, left=0, right=0, top=0, bottom=0)
    assert "nan" not in line(frame, [0.0, 1.0], [0.0, 1e30], "line").lower()
