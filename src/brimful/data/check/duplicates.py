"""Rows that came before, found by their hashes: 8 bytes a row, 80 MB for ten million.

A row's hash is 64 bits of Python's own over each side without its outer spaces. Two different rows share one with a chance
of 3 in a million over ten million rows. Counting sorts a sixteenth of the hashes at a time, so that the end needs no
second copy of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.data.read.raw import Lines

_BUCKETS = 16
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]


def row_hashes(sides: Sequence[pa.Array]) -> Hashes:
    """One hash for each row of these columns."""
    total = np.zeros(len(sides[0]), dtype=np.uint64)
    for side in sides:
        hashes = np.fromiter(map(hash, side.cast(pa.binary()).to_pylist()), dtype=np.int64, count=len(side))
        total = (total ^ hashes.view(np.uint64)) * _FACTOR
        total ^= total >> np.uint64(29)
    return total


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The rows of a chunk: their hashes and where they stand."""

    hashes: Hashes
    file: str
    first_line: int
    lines: Lines | None
    """None where the lines follow each other, as they nearly always do."""


class Duplicates:
    """Collects the rows of a pass and says at its end how many came before."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []

    def add(self, hashes: Hashes, file: str, lines: Lines) -> None:
        """The usable rows of a chunk."""
        if len(hashes):
            follow = len(lines) == 1 or bool((np.diff(lines) == 1).all())
            self._stretches.append(_Stretch(hashes, file, int(lines[0]), None if follow else lines))

    def count(self, places: int) -> tuple[int, list[tuple[str, int]]]:
        """How many rows came before, and file and line of the first of them."""
        total, first = 0, np.zeros(0, dtype=np.int64)
        for bucket in range(_BUCKETS):
            found = self._again(bucket)
            total += len(found)
            first = np.sort(np.concatenate([first, found]))[:places]
        return total, [self._place(int(row)) for row in first]

    def _again(self, bucket: int) -> Lines:
        """The rows of a bucket, counted over the pass, that came before."""
        hashes, rows, before = [], [], 0
        for stretch in self._stretches:
            mine = np.flatnonzero(stretch.hashes >> np.uint64(60) == bucket)
            hashes.append(stretch.hashes[mine])
            rows.append(mine + before)
            before += len(stretch.hashes)
        if not hashes:
            return np.zeros(0, dtype=np.int64)
        all_hashes, all_rows = np.concatenate(hashes), np.concatenate(rows)
        order = np.argsort(all_hashes, kind="stable")
        again = all_hashes[order][1:] == all_hashes[order][:-1]
        found: Lines = all_rows[order[1:][again]]
        return found

    def _place(self, row: int) -> tuple[str, int]:
        for stretch in self._stretches:
            if row < len(stretch.hashes):
                return stretch.file, stretch.first_line + row if stretch.lines is None else int(stretch.lines[row])
            row -= len(stretch.hashes)
        raise IndexError(row)
