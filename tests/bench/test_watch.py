"""The bench of `brimful watch` compares watched windows with their neighbours."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import watch  # noqa: E402


def test_the_ratio_is_that_of_watched_steps_over_the_others():
    windows, times = [], []
    for number in range(6):
        begin, watched = 10.0 * number, bool(number % 2)
        windows.append(watch.Window(begin, begin + 10, watched=watched, cpu_s=0.2, written_bytes=1000))
        took = 0.12 if watched else 0.10
        times += [(begin + 2.5 + took * step, took) for step in range(20)]
        times += [(begin + 0.5, 9.0)]  # while Python starts
    steps, ratio, noise, view = watch.figures(windows, times)
    assert (steps["step_s_watched"], steps["step_s_not_watched"]) == (0.12, 0.10)
    assert ratio["ratio_watched"] == pytest.approx(1.2) and noise["ratio_not_watched"] == 1.0
    assert view["view_cpu_share"] == pytest.approx(0.02) and view["bytes_per_s"] == pytest.approx(100)
