"""The fastest way to cut a step, among the sizes that fit.

A step of 250 rows in micro-batches of at most 30 takes nine of them, so 28 rows each do as well as 30: only 250/9,
250/18, 250/36 … are worth timing. The largest is often not the fastest: a CPU's caches prefer smaller ones, and a GPU
that is full gains nothing. So the climb starts at half of the largest and goes up only while speed does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from brimful.units import show_rate, show_rows

SAME_SPEED = 0.02
"""Speeds this close are the same."""
START_AT = 1
"""How often the largest size is halved for the first one that is timed."""
STILL_RISING = 1.25
"""The largest size is this much faster than half of it where more rows would clearly pay, noise aside."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One way to cut the step, timed."""

    rows: int
    accumulation: int
    rows_per_s: float
    seconds: float
    """Of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The chosen cut among all that were timed, largest first."""

    chosen: Timing
    timed: tuple[Timing, ...]

    @property
    def rising(self) -> bool:
        """Whether a larger micro-batch than the largest would still have paid."""
        if len(self.timed) < 2:
            return True  # nothing smaller to compare with
        return self.timed[0].rows_per_s > STILL_RISING * self.timed[1].rows_per_s

    @property
    def reason(self) -> str:
        others = [t for t in self.timed if t is not self.chosen]
        said = ", ".join(f"{show_rows(t.rows)} {show_rate(t.rows_per_s)}" for t in others)
        if not others:
            return f"{show_rate(self.chosen.rows_per_s)} rows/s, the only size there is to choose"
        best = max(t.rows_per_s for t in self.timed)
        verdict = (
            "fastest" if self.chosen.rows_per_s == best else f"within {SAME_SPEED:.0%} of the fastest, with less memory"
        )
        return f"{verdict}: {show_rate(self.chosen.rows_per_s)} rows/s, against {said}"


def micro_rows(step_rows: int, accumulation: int) -> int:
    """Rows of the largest of so many equal micro-batches."""
    return -(-step_rows // accumulation)


def find_fastest(
    step_rows: int, largest: int, seconds: Callable[[int], float], once_s: float, *, least: int = 1, only: bool = False
) -> Speed:
    """Climb from half of the largest size as long as speed grows; where it does not, look below.

    `seconds(rows)` times one micro-batch, `once_s` is what the optimizer takes; no size below `least` is tried; `only` times the
    largest alone.
    """

    def timing(rows: int, accumulation: int) -> Timing:
        took = seconds(rows)
        return Timing(rows, accumulation, step_rows / (accumulation * took + once_s), took)

    fewest = micro_rows(step_rows, largest)
    if only:
        only_one = timing(largest, fewest)
        return Speed(only_one, (only_one,))
    cuts = _halvings(step_rows, fewest, least)
    at = min(START_AT, len(cuts) - 1)
    timed = {at: timing(*cuts[at])}
    for direction in (-1, +1):
        while _grows(timed, at) and 0 <= at + direction < len(cuts):
            at += direction
            timed[at] = timing(*cuts[at])
        if len(timed) > 2:
            break
        at = max(timed)
    best = max(t.rows_per_s for t in timed.values())
    chosen = min((t for t in timed.values() if t.rows_per_s >= (1 - SAME_SPEED) * best), key=lambda t: t.rows)
    return Speed(chosen, tuple(timed[index] for index in sorted(timed)))


def _halvings(step_rows: int, fewest: int, least: int) -> list[tuple[int, int]]:
    """(rows, accumulation) for the fewest micro-batches, twice as many, four times as many …, down to the least rows."""
    cuts = [(micro_rows(step_rows, fewest), fewest)]
    while micro_rows(step_rows, accumulation := 2 * cuts[-1][1]) >= least and cuts[-1][0] > 1:
        cuts.append((micro_rows(step_rows, accumulation), accumulation))
    return cuts


def _grows(timed: dict[int, Timing], at: int) -> bool:
    """Whether the size timed last beats all others by more than noise."""
    others = [t.rows_per_s for index, t in timed.items() if index != at]
    return all(timed[at].rows_per_s > (1 + SAME_SPEED) * other for other in others)
