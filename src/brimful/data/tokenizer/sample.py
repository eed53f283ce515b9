"""A uniform sample of rows that fits the RAM, taken in one pass, the same whenever the files and the seed are.

Each row's number is hashed with the seed; the rows with the smallest hashes make up the sample, as many as fit, and those
with the largest are held out to measure on. No total has to be known beforehand, and the result does not depend on how
the rows come in chunks. What lies between the two ends is dropped as soon as it is known to: the sample takes about 3
bytes a character while it is read.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

LONGEST_TEXT = 100_000
"""Characters of one text that are used: a book in one row must not fill the sample alone."""
HELD_OUT_CHARACTERS = 1_000_000
"""Held out at most, about 5,000 rows of chat; of a small data set one character in 50."""
HELD_OUT_SHARE = 1 / 50
_SLACK = 1.5
"""How far what is kept may exceed what is needed before it is cut back: a cut copies all of it."""

_LARGEST = np.uint64(2**64 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The rows to train on and those to measure on, a column a side, and what they were taken from."""

    rows: pa.Table
    held_out: pa.Table
    rows_seen: int
    characters_seen: int
    rows_cut: int
    """Rows with a text that is longer than what is used of it."""


class Sampler:
    """Takes all rows in their order and keeps those of the sample."""

    def __init__(self, *, characters: int, seed: int) -> None:
        self.budget, self.seed = characters, seed
        self.rows_seen = self.characters_seen = self.rows_cut = 0
        self._parts: list[_Kept] = []
        # Hashes of the first rows, from either end, that do not fit. So far all do.
        self._low, self._high = _LARGEST, np.uint64(0)

    def add(self, rows: pa.RecordBatch) -> None:
        """The next rows: one string column a side."""
        hashes = row_hashes(self.rows_seen, rows.num_rows, self.seed)
        self.rows_seen += rows.num_rows
        lengths = [np.asarray(pc.utf8_length(side), dtype=np.int64) for side in rows.columns]
        self.characters_seen += int(sum(length.sum() for length in lengths))
        self.rows_cut += int((np.max(lengths, axis=0) > LONGEST_TEXT).sum())
        wanted = (hashes < self._low) | (hashes > self._high)
        kept = rows.filter(pa.array(wanted))
        texts = [pc.utf8_slice_codeunits(pc.cast(side, pa.large_string()), 0, LONGEST_TEXT) for side in kept.columns]
        table = pa.table(texts, names=rows.schema.names)
        self._parts.append(_Kept(hashes[wanted], _characters(table), table))
        if sum(int(part.characters.sum()) for part in self._parts) > _SLACK * (self.budget + HELD_OUT_CHARACTERS):
            self._cut_back()

    def finish(self) -> Sample:
        """All rows were added."""
        kept = _Kept.joined(self._parts)
        share = int(min(HELD_OUT_CHARACTERS, self.characters_seen * HELD_OUT_SHARE))
        held_out = _prefix(kept.characters[::-1], share)
        training = kept.head(len(kept.hashes) - held_out)
        training = training.head(int(np.searchsorted(training.hashes, self._low)))
        training = training.head(_prefix(training.characters, self.budget))
        apart = pa.array(range(len(kept.hashes) - held_out, len(kept.hashes)), pa.int64())
        return Sample(  # rows are copied out where a slice would keep all others in memory
            rows=training.rows, held_out=kept.rows.take(apart), rows_seen=self.rows_seen,
            characters_seen=self.characters_seen, rows_cut=self.rows_cut,
        )  # fmt: skip

    def _cut_back(self) -> None:
        """Keep what can still be in the sample or held out: both ends only shrink while more rows come."""
        kept = _Kept.joined(self._parts)
        low, high = _prefix(kept.characters, self.budget), _prefix(kept.characters[::-1], HELD_OUT_CHARACTERS)
        if low + high >= len(kept.hashes):
            self._parts = [kept]
            return
        self._low, self._high = kept.hashes[low], kept.hashes[-1 - high]
        self._parts = [kept.head(low), kept.tail(high)]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Rows with their hashes and lengths."""

    hashes: npt.NDArray[np.uint64]
    characters: npt.NDArray[np.int64]
    rows: pa.Table

    @classmethod
    def joined(cls, parts: "list[_Kept]") -> "_Kept":
        """All of them, by ascending hash."""
        hashes = np.concatenate([part.hashes for part in parts])
        order = np.argsort(hashes)
        rows = pa.concat_tables([part.rows for part in parts]).combine_chunks()
        return cls(
            hashes[order], np.concatenate([part.characters for part in parts])[order], rows.take(pa.array(order))
        )

    def head(self, count: int) -> "_Kept":
        return _Kept(self.hashes[:count], self.characters[:count], self.rows.slice(0, count))

    def tail(self, count: int) -> "_Kept":
        begin = len(self.hashes) - count
        return _Kept(self.hashes[begin:], self.characters[begin:], self.rows.slice(begin))


def row_hashes(first: int, count: int, seed: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each row's number: splitmix64, a bijection, so no two rows share one."""
    start = np.uint64(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
    with np.errstate(over="ignore"):
        bits = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _characters(rows: pa.RecordBatch | pa.Table) -> npt.NDArray[np.int64]:
    """Of each row, on all sides."""
    lengths = np.zeros(rows.num_rows, dtype=np.int64)
    for side in rows.columns:
        lengths += np.asarray(pc.utf8_length(side), dtype=np.int64)
    return lengths


def _prefix(characters: npt.NDArray[np.int64], budget: int) -> int:
    """How many of the first rows stay within so many characters."""
    return int(np.searchsorted(np.cumsum(characters), budget, side="right"))
