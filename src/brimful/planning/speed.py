"""Which of the splits that fit is the fastest.

A step of 250 rows in micro-batches of at most 30 takes nine of them, and 28 rows each do as well as 30: only 250/9,
250/18, 250/36 … are worth timing. The largest is often not the fastest, because a CPU's caches prefer smaller ones and
a full GPU gains nothing. So timing starts at half of the largest size and goes up only while speed does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from brimful.units import show_rate, show_rows

SAME_SPEED = 0.02
"""Speeds this close count as equal."""
STILL_RISING = 1.25
"""More rows would clearly pay, noise aside, if the largest size is this much faster than half of it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One way to split the step, timed."""

    rows: int
    accumulation: int
    rows_per_s: float
    seconds: float
    """Of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The chosen split among all that were timed, largest first."""

    chosen: Timing
    timed: tuple[Timing, ...]

    @property
    def rising(self) -> bool:
        """Whether a micro-batch larger than the largest would still be faster."""
        if len(self.timed) < 2:
            return True  # nothing smaller to compare with
        return self.timed[0].rows_per_s > STILL_RISING * self.timed[1].rows_per_s

    @property
    def reason(self) -> str:
        others = [timing for timing in self.timed if timing is not self.chosen]
        rate = f"{show_rate(self.chosen.rows_per_s)} rows/s"
        if not others:
            return f"{rate}, the only size to choose from"
        fastest = self.chosen.rows_per_s == max(timing.rows_per_s for timing in self.timed)
        verdict = "fastest" if fastest else f"within {SAME_SPEED:.0%} of the fastest, with less memory"
        compared = ", ".join(f"{show_rate(timing.rows_per_s)} with {show_rows(timing.rows)}" for timing in others)
        return f"{verdict}: {rate} ({compared})"


def micro_rows(step_rows: int, accumulation: int) -> int:
    """Rows of the largest of this many equal micro-batches."""
    return -(-step_rows // accumulation)


def find_fastest(
    step_rows: int, largest: int, seconds: Callable[[int], float], once_s: float, *, least: int = 1, only: bool = False,
    in_time: Callable[[int], bool] = lambda rows: True,
) -> Speed:  # fmt: skip
    """Time half of the largest size, go up while speed grows, and look below if it does not.

    `seconds(rows)` times one micro-batch and `once_s` is the optimizer's time. No size below `least` is tried, and
    after the first none that `in_time` refuses; `only` times the largest alone.
    """

    def timing(rows: int, accumulation: int) -> Timing:
        took = seconds(rows)
        return Timing(rows, accumulation, step_rows / (accumulation * took + once_s), took)

    fewest = micro_rows(step_rows, largest)
    if only:
        single = timing(largest, fewest)
        return Speed(single, (single,))
    splits = [(micro_rows(step_rows, fewest), fewest)]
    while micro_rows(step_rows, accumulation := 2 * splits[-1][1]) >= least and splits[-1][0] > 1:
        splits.append((micro_rows(step_rows, accumulation), accumulation))
    at = min(1, len(splits) - 1)
    timed = {at: timing(*splits[at])}
    for direction in (-1, +1):
        while _is_faster(timed, at) and 0 <= at + direction < len(splits) and in_time(splits[at + direction][0]):
            at += direction
            timed[at] = timing(*splits[at])
        if len(timed) > 2:
            break
        at = max(timed)
    best = max(t.rows_per_s for t in timed.values())
    chosen = min((t for t in timed.values() if t.rows_per_s >= (1 - SAME_SPEED) * best), key=lambda t: t.rows)
    return Speed(chosen, tuple(timed[index] for index in sorted(timed)))


def _is_faster(timed: dict[int, Timing], at: int) -> bool:
    """Whether the size timed last beats all others by more than noise."""
    others = [t.rows_per_s for index, t in timed.items() if index != at]
    return all(timed[at].rows_per_s > (1 + SAME_SPEED) * other for other in others)
