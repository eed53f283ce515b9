"""Time limits and hours of the day, with a clock of our own and real time zones."""

import math
import os
import time
from datetime import datetime

import pytest

from brimful.errors import BadOption
from brimful.training.stop import Clock, Window, parse_duration, show_time

NIGHT = Window.parse("21:00-09:00")


@pytest.fixture
def berlin(monkeypatch):
    """Clocks go forward on 29 March 2026 at 2:00, and back on 25 October at 3:00."""
    monkeypatch.setenv("TZ", "Europe/Berlin" if os.path.exists("/usr/share/zoneinfo/Europe/Berlin") else "CET-1CEST,M3.5.0,M10.5.0/3")  # fmt: skip # noqa: PTH110
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str, *, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(fold=fold).timestamp()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h", 28800), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("2d", 172800), ("1.5h", 5400), (" 1H 30M ", 5400)],
)
def test_a_duration_is_read_as_people_write_it(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "8", "h", "30m1h", "1h1h", "-1h", "8 hours", "1e3s", "0h0m"])
def test_what_is_no_duration_names_the_flag(text):
    with pytest.raises(BadOption, match="^--time-limit "):
        parse_duration(text)


@pytest.mark.parametrize(
    ("window", "clock", "is_open"),
    [
        ("09:00-17:30", "09:00", True),
        ("09:00-17:30", "17:29", True),
        ("09:00-17:30", "17:30", False),
        ("09:00-17:30", "08:59", False),
        ("21:00-09:00", "23:59", True),
        ("21:00-09:00", "00:00", True),
        ("21:00-09:00", "09:00", False),
        ("12-13, 22:00–6:00", "12:30", True),
        ("12-13, 22:00–6:00", "13:30", False),
        ("12-13, 22:00–6:00", "05:59", True),
        ("18:00-24:00", "23:59", True),
        ("18:00-24:00", "00:00", False),
    ],
)
def test_a_window_is_open_from_its_first_moment_to_before_its_last(window, clock, is_open):
    assert Window.parse(window).is_open(at(f"2026-01-31 {clock}")) == is_open


@pytest.mark.parametrize(
    "text", ["", "21:00", "25:00-09:00", "21:60-09:00", "9-17,", "24:00-09:00", "9:00-24:30", "x-y"]
)
def test_what_is_no_window_names_the_flag(text):
    with pytest.raises(BadOption, match="^--window .* is not a span of hours"):
        Window.parse(text)


@pytest.mark.parametrize("text", ["09:00-09:00", "0-24"])
def test_a_window_that_ends_when_it_begins_is_refused(text):
    with pytest.raises(BadOption, match="ends when it begins"):
        Window.parse(text)


def test_a_window_tells_when_it_opens_and_when_it_closes():
    assert (NIGHT.opens_in_s(at("2026-01-31 20:00")), NIGHT.closes_in_s(at("2026-01-31 20:00"))) == (3600, 0)
    assert (NIGHT.opens_in_s(at("2026-01-31 22:00")), NIGHT.closes_in_s(at("2026-01-31 22:00"))) == (0, 11 * 3600)
    assert NIGHT.closes_in_s(at("2026-01-31 08:30")) == 1800


def test_hours_that_touch_are_one_window():
    window = Window.parse("9-12,12-14")
    assert window.closes_in_s(at("2026-01-31 11:00")) == 3 * 3600
    assert Window.parse("0-12,12-24").closes_in_s(at("2026-01-31 11:00")) == math.inf


def test_the_night_in_which_clocks_change_ends_at_the_time_written(berlin):
    assert NIGHT.closes_in_s(at("2026-03-28 21:00")) == 11 * 3600
    assert NIGHT.closes_in_s(at("2026-10-24 21:00")) == 13 * 3600
    assert NIGHT.opens_in_s(at("2026-10-24 20:00")) == 3600


def test_in_the_hour_that_comes_twice_the_next_limit_is_found(berlin):
    window = Window.parse("21:00-02:30")
    assert window.closes_in_s(at("2026-10-25 02:10", fold=0)) == 20 * 60
    assert window.closes_in_s(at("2026-10-25 02:10", fold=1)) == 20 * 60
    assert window.opens_in_s(at("2026-10-25 02:40", fold=1)) > 18 * 3600


@pytest.mark.parametrize("clock", ["01:59", "03:00", "03:10", "04:00"])
def test_a_limit_in_the_hour_that_is_skipped_is_passed_when_the_clock_is_behind_it(berlin, clock):
    now = at(f"2026-03-29 {clock}")
    assert Window.parse("02:30-05:00").is_open(now) == (clock > "02:30")
    assert Window.parse("21:00-02:30").is_open(now) == (clock < "02:30")
    assert Window.parse("02:30-05:00").opens_in_s(now) <= 3600 + 31 * 60


def test_a_clock_without_limits_never_stops():
    assert Clock().why_stop() is None


def test_the_time_limit_counts_from_the_start_and_not_while_the_box_sleeps():
    elapsed, now = [100.0], [0.0]
    clock = Clock(3600.0, now=lambda: now[0], elapsed=lambda: elapsed[0])
    elapsed[0], now[0] = 3699.0, 1e6
    assert clock.why_stop() is None
    assert clock.why_stop(needs_s=1.0) == "time-limit"
    elapsed[0] = 3700.0
    assert clock.why_stop() == "time-limit"


def test_a_window_stops_the_run_when_it_shuts_or_in_time_for_the_save():
    now = [at("2026-01-31 08:59:00")]
    clock = Clock(None, NIGHT, now=lambda: now[0])
    assert clock.why_stop() is None
    assert clock.why_stop(needs_s=60) == "window"
    now[0] += 60
    assert clock.why_stop() == "window"


def test_a_time_is_shown_with_its_day_where_that_is_another():
    now = at("2026-01-31 20:00")
    assert (show_time(now + 3600, now), show_time(now + 13 * 3600, now)) == ("21:00", "Sun 09:00")
