"""Lengths counted while rows pass by: percentiles and bars from 64 Ki counters, whatever the number of rows.

Exact up to 65,535 characters or tokens. Longer ones are counted by the thousand: their percentiles are rounded up to the
next 1,024, but never above the longest, which is exact.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

_EXACT = 65_536
_ROUND = 1_024
_BARS = 10
_ROUND_STEPS = (1, 2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Rows with a length of at least `start` and less than `end`; the last bin has no end."""

    start: int
    end: int | None
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long the texts of one side are."""

    rows: int
    mean: float
    p50: int
    p90: int
    p99: int
    max: int
    bins: tuple[Bin, ...]

    def to_json(self) -> dict[str, Any]:
        bins = [{"from": one.start, "to": one.end, "rows": one.rows} for one in self.bins]
        return {"rows": self.rows, "mean": round(self.mean, 2), "p50": self.p50, "p90": self.p90, "p99": self.p99, "max": self.max, "bins": bins}  # fmt: skip


class Histogram:
    """Takes lengths in, gives `Lengths` out."""

    def __init__(self) -> None:
        self._counts = np.zeros(_EXACT, dtype=np.int64)
        self._long: Counter[int] = Counter()
        self._sum = self._max = 0

    def add(self, lengths: npt.NDArray[np.int64]) -> None:
        """Some more rows."""
        if not len(lengths):
            return
        short = lengths[lengths < _EXACT]
        self._counts += np.bincount(short, minlength=_EXACT)
        if len(short) < len(lengths):
            self._long.update((-(-lengths[lengths >= _EXACT] // _ROUND) * _ROUND).tolist())
        self._sum += int(lengths.sum())
        self._max = max(self._max, int(lengths.max()))

    def lengths(self) -> Lengths | None:
        """What was counted; None where no row was."""
        sizes = np.concatenate([np.flatnonzero(self._counts), sorted(self._long)]).astype(np.int64).clip(max=self._max)
        counts = np.concatenate([self._counts[self._counts > 0], [self._long[size] for size in sorted(self._long)]])
        counts = counts.astype(np.int64)
        rows = int(counts.sum())
        if not rows:
            return None
        below = np.cumsum(counts)
        p50, p90, p99 = (_percentile(sizes, below, rows, share) for share in (50, 90, 99))
        bins = _bins(sizes, counts, p99, self._max)
        return Lengths(rows=rows, mean=self._sum / rows, p50=p50, p90=p90, p99=p99, max=self._max, bins=bins)


def _percentile(sizes: npt.NDArray[np.int64], below: npt.NDArray[np.int64], rows: int, share: int) -> int:
    """The smallest length that at least `share` percent of the rows do not exceed."""
    return int(sizes[np.searchsorted(below, -(-rows * share // 100))])


def _bins(sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], p99: int, longest: int) -> tuple[Bin, ...]:
    """Ten bars of a round width from the shortest to the 99th percentile, and one for all that is longer."""
    shortest = int(sizes[0])
    width = _round_width((p99 - shortest) / _BARS)
    last = (p99 // width + 1) * width
    edges = np.arange(shortest // width * width, last + 1, width)
    rows = np.histogram(sizes, bins=edges, weights=counts)[0].astype(np.int64).tolist()
    rows[-1] -= int(counts[sizes == last].sum())  # numpy counts the last edge in
    found = [
        Bin(start=start, end=end, rows=one) for (start, end), one in zip(pairwise(edges.tolist()), rows, strict=True)
    ]
    rest = int(counts[sizes >= last].sum())
    return (*found, Bin(start=last, end=None, rows=rest)) if longest >= last else tuple(found)


def _round_width(about: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 …"""
    power = 1
    while True:
        for step in _ROUND_STEPS:
            if step * power >= about:
                return step * power
        power *= 10
