"""Bars, sparklines and charts of characters."""

import math

import pytest
from rich.cells import cell_len

from brimful.report.watch.watch_canvas import (
    ASCII,
    UNICODE,
    Mark,
    Range,
    curve_range,
    glyphs_for,
    line_chart,
    memory_bar,
    progress_bar,
    resample,
    sparkline,
    stacked_bar,
)


def test_a_memory_bar_has_ours_left_others_right_and_the_gap_between():
    assert memory_bar(10, 0.5, 0.2, mark=None, style="").plain == "█████░░░▒▒"


def test_a_memory_bar_marks_the_plan():
    assert memory_bar(10, 0.5, 0.0, mark=0.8, style="").plain == "█████░░░│░"


@pytest.mark.parametrize(("ours", "others"), [(1.7, 0.5), (0.9, 0.9), (math.nan, math.inf), (0.0, 0.0)])
def test_a_memory_bar_is_never_longer_than_its_cells(ours, others):
    assert cell_len(memory_bar(12, ours, others, mark=3.0, style="").plain) == 12


def test_a_small_part_of_a_stacked_bar_is_seen():
    assert stacked_bar(10, [0.98, 0.01, 0.0, 0.01], ["", "", "", ""]).plain == "████████▓░"


def test_the_parts_of_a_stacked_bar_fill_it():
    assert len(stacked_bar(33, [1 / 3, 1 / 3, 1 / 6, 1 / 6], ["", "", "", ""]).plain) == 33


def test_a_progress_bar_is_full_only_at_the_end():
    assert progress_bar(10, 0.999, "").plain == "━━━━━━━━━─" and progress_bar(10, 1.0, "").plain == "━━━━━━━━━━"


def test_resampling_takes_means():
    assert resample([(0, 1.0), (1, 3.0), (2, 5.0), (3, 7.0)], 2) == [2.0, 6.0]


def test_points_far_apart_are_joined_by_straight_lines():
    assert resample([(0, 0.0), (4, 4.0)], 5) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_is_not_a_number_leaves_a_gap():
    assert resample([(0, 1.0), (1, math.nan), (2, 1.0)], 3) == [1.0, None, 1.0]


def test_a_sparkline_goes_from_the_lowest_to_the_highest_block():
    assert sparkline([(n, float(n)) for n in range(8)], 8, Range(0, 7)) == "▁▂▃▄▅▆▇█"


def test_a_sparkline_of_few_points_is_as_long_as_they_are():
    assert sparkline([(0, 1.0), (1, 2.0)], 6, Range(1, 2)) == "▁█    "


def test_a_sparkline_without_points_is_empty():
    assert sparkline([], 3, Range(0, 1)) == "   "


def test_the_high_beginning_of_a_falling_curve_is_cut_off():
    points = [(n, 2.0 + 8.0 * 0.5**n) for n in range(100)]
    low, high = curve_range(points)
    assert low == pytest.approx(2.0, abs=1e-6) and high < 2.1


def test_a_curve_that_falls_steadily_is_shown_whole():
    assert curve_range([(n, 100.0 - n) for n in range(100)]) == (1.0, 100.0)


def test_a_chart_joins_neighbours_without_holes():
    chart = line_chart([(0, 0.0), (1, 1.0)], 1, 3, Range(0, 1))
    assert all(line.plain != " " for line in chart)


def test_a_rising_line_ends_at_the_top_right():
    chart = line_chart([(n, float(n)) for n in range(40)], 20, 5, Range(0, 39))
    assert chart[0].plain[-1] != " " and chart[-1].plain[0] != " " and chart[0].plain[0] == " "


def test_a_chart_has_lines_for_limits_and_marks_for_events():
    chart = line_chart(
        [(0, 0.0), (9, 0.0)], 10, 3, Range(0, 1), references=[(1.0, "red")], marks=[Mark(5, 1.0, "▼", "")]
    )
    assert chart[0].plain == "┈┈┈┈┈▼┈┈┈┈"


def test_a_chart_of_nothing_is_blank():
    assert [line.plain for line in line_chart([], 4, 2, Range(0, 1))] == ["    ", "    "]


def test_charts_and_bars_can_be_drawn_in_ascii():
    points = [(n, math.sin(n / 5)) for n in range(60)]
    drawn = [
        *(line.plain for line in line_chart(points, 30, 4, Range(-1, 1), references=[(0.0, "")], marks=[Mark(9, 0, ASCII.event, "")], glyphs=ASCII)),
        memory_bar(20, 0.5, 0.2, mark=0.7, style="", glyphs=ASCII).plain, stacked_bar(20, [0.5, 0.2, 0.2, 0.1], [""] * 4, ASCII).plain,
        progress_bar(20, 0.4, "", ASCII).plain, sparkline(points, 20, Range(-1, 1), ASCII), ASCII.text("a · b – c… 71 °C → × ↑"),
    ]  # fmt: skip
    assert all(line.isascii() for line in drawn)


@pytest.mark.parametrize(
    ("encoding", "environment", "expected"),
    [
        ("utf-8", {"LANG": "en_US.UTF-8", "TERM": "xterm-256color"}, UNICODE),
        ("utf-8", {}, UNICODE),
        ("utf-8", {"LC_ALL": "C"}, ASCII),
        ("utf-8", {"LANG": "zh_CN.UTF-8", "TERM": "linux"}, ASCII),
        ("ascii", {"LANG": "en_US.UTF-8"}, ASCII),
        ("latin-1", {}, ASCII),
        ("gbk", {"LANG": "zh_CN.GBK"}, ASCII),
        (None, {}, ASCII),
    ],
)
def test_the_output_decides_what_is_drawn_with(encoding, environment, expected):
    assert glyphs_for(encoding, environment) is expected
