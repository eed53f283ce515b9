"""Which rows an optimizer step holds, and which of them this process takes.

    stream ─► step: the next `global_batch` samples ─► dealt to the processes by work and speed ─► this process's rows

Memory never enters here: the same seed gives the same steps on any machine, cut in any way. Where a run stands is a
count of samples, so it goes on exactly there under another plan, with more workers, or on fewer processes.

`window:N` mixes differently: the rows of N steps are brought into an order in which neighbours are alike in all their
lengths, that order is cut into runs of an eighth of a step, and every step is made of eight runs drawn at random from all
over the window. Padding falls from 27 to 6 % on real chat rows (256 a step, 8 micro-batches, N = 50), and each step still
holds short and long rows. What changes is that rows of like length come together more often than chance would have it.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brimful.errors import BadOption
from brimful.memory.split import deal, deal_rows, order_by_similarity

# The order in which rows come: one endless stream of seeded permutations, computed and never kept.
#
# Sample number `n` of a data set of `rows` is row `permutation(n // rows)[n % rows]`: every row once per pass, each pass in
# an order of its own. Where a run stands is one number, whatever the plan, the processes or the workers; a shuffled list of
# ten million indices would take 80 MB in every process instead.
#
# The permutation is a Feistel network over the smallest power of two that holds the rows: each round changes one half of
# the bits by a hash of the other half, which can be undone, so no two numbers meet. Numbers that land beyond the rows are
# sent through again until they do not (fewer than two rounds on average). A block of 4,096 samples takes 2 ms, most of it
# once for any number, so blocks are computed and the last two kept.


Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]

BLOCK = 4096
"""Samples that are computed together."""
ROUNDS = 16
"""Half-rounds. The orders of 4 to 6 rows are then equally likely as far as 18 chi-square tests tell; with 8 they are not."""
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Stream:
    """An endless sequence of row numbers, addressed by sample."""

    def __init__(self, rows: int, seed: int) -> None:
        if rows < 1:
            raise ValueError("a stream needs at least one row")
        self.rows, self.seed = rows, seed
        bits = max(2, (rows - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._blocks: dict[int, Ints] = {}
        self._low_mask, self._high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << (bits - bits // 2)) - 1)

    def take(self, start: int, count: int) -> Ints:
        """The rows of samples `start` to `start + count`, in order."""
        first, last = start // BLOCK, max(start, start + count - 1) // BLOCK
        taken = np.concatenate([self._block(number) for number in range(first, last + 1)])
        return taken[start - first * BLOCK :][:count]

    def _block(self, number: int) -> Ints:
        if number not in self._blocks:
            kept = [(n, block) for n, block in self._blocks.items() if n == number - 1]
            self._blocks = dict([*kept, (number, self._computed(number * BLOCK))])
        return self._blocks[number]

    def _computed(self, start: int) -> Ints:
        samples = np.arange(start, start + BLOCK, dtype=np.int64)
        passes, places = np.divmod(samples, self.rows)
        taken = np.empty(BLOCK, dtype=np.int64)
        for number in np.unique(passes):
            here = passes == number
            taken[here] = self._permuted(places[here].astype(np.uint64), self._keys(int(number)))
        return taken

    def _keys(self, number: int) -> _Words:
        """One key a round, from the seed and the number of the pass."""
        base = _hash(np.array([self.seed % 2**64, (number + _GOLDEN) % 2**64], dtype=np.uint64))
        turns = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        return _hash((base[:1] ^ base[1:]) + turns)[:, None]

    def _permuted(self, places: _Words, keys: _Words) -> _Words:
        result = self._network(places, keys)
        outside = np.flatnonzero(result >= self.rows)
        while len(outside):
            result[outside] = self._network(result[outside], keys)
            outside = outside[result[outside] >= self.rows]
        return result

    def _network(self, places: _Words, keys: _Words) -> _Words:
        high, low = places >> self._low_bits, places & self._low_mask
        for turn, key in enumerate(keys):
            if turn % 2:
                low = low ^ (_hash(high + key) & self._low_mask)
            else:
                high = high ^ (_hash(low + key) & self._high_mask)
        return (high << self._low_bits) | low


def _hash(words: _Words) -> _Words:
    """SplitMix64's finaliser: every bit of the input reaches every bit of the output."""
    words = (words ^ (words >> np.uint64(30))) * _MIX1
    words = (words ^ (words >> np.uint64(27))) * _MIX2
    return words ^ (words >> np.uint64(31))


RUNS = 8
"""Runs of like rows that a step of a window is made of."""

Lengths = Callable[[Ints], Ints]
"""The lengths of these rows, one line a row: `Store.shapes`, or `array.__getitem__`."""
Barred = Callable[[Ints], Collection[tuple[int, int]]]
"""Of these lengths, (row, process) where the row alone does not fit the process's memory."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What a step's rows are drawn from: the stream as it comes, or a window of so many steps sorted by length."""

    window: int = 1

    @classmethod
    def parse(cls, text: str | None) -> "Mix":
        """`window:50`; None and `none` draw every step at random."""
        if text is None or text == "none":
            return cls()
        match = re.fullmatch(r"window:([1-9]\d*)", text)
        if match is None:
            raise BadOption(
                f"--mix {text}: write none, or window:N with the number of steps to sort over, such as window:50"
            )
        return cls(int(match[1]))

    @property
    def sentence(self) -> str:
        """What it means for the training, for plans and reports."""
        if self.window == 1:
            return "every step holds rows drawn at random"
        return (
            f"rows are sorted by length over windows of {self.window} steps, so rows of like length come together more often "
            "than at random; every row still comes once a pass"
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step's rows."""

    start: int
    """Samples of the stream before this step (with a window: before as many steps as went before it)."""
    rows: Ints
    """All of them, the same on every process."""
    mine: Ints
    """Positions in `rows` that this process takes, ascending."""


class Batches:
    """Steps of exactly `global_batch` rows, addressed by the samples that went before."""

    def __init__(
        self,
        rows: int,
        global_batch: int,
        *,
        seed: int = 0,
        mix: Mix | None = None,
        lengths: Lengths | None = None,
        rank: int = 0,
        speeds: Sequence[float] = (1.0,),
        barred: Barred | None = None,
    ) -> None:
        """`speeds` has one entry for each process; without `lengths` all rows count as alike."""
        mix = mix or Mix()
        problems = [
            f"--global-batch {global_batch}: give a whole number of at least 1" if global_batch < 1 else "",
            "there are no rows to draw from" if rows < 1 else "",
            f"--mix window:{mix.window}: the data set does not tell its rows' lengths; pack it into a token store, or give lengths="
            if mix.window > 1 and lengths is None
            else "",
            f"--global-batch {global_batch}: {len(speeds)} processes need at least a row each"
            if global_batch < len(speeds)
            else "",
        ]
        if any(problems):
            raise BadOption("; ".join(filter(None, problems)))
        self.stream, self.global_batch, self.mix = Stream(rows, seed), global_batch, mix
        self.lengths, self.rank, self.speeds, self.barred = lengths, rank, tuple(speeds), barred
        self.origin = 0
        """The sample at which windows begin to be counted."""
        self._window: tuple[int, Ints] | None = None

    def step(self, start: int) -> Step:
        """The step before which `start` samples were taken."""
        rows = self.stream.take(start, self.global_batch) if self.mix.window == 1 else self._from_window(start)
        return Step(start, rows, self._mine(rows))

    def state(self, start: int) -> dict[str, Any]:
        """Where a run stands that took `start` samples."""
        return {
            "samples": start,
            "origin": self.origin,
            "rows": self.stream.rows,
            "seed": self.stream.seed,
            "global_batch": self.global_batch,
            "window": self.mix.window,
        }

    def resume(self, state: dict[str, Any]) -> int:
        """Take up a run's position: the samples it took. Refuses another data set, seed, or a change inside a window."""
        same = [("rows of the data set", "rows", self.stream.rows), ("--seed", "seed", self.stream.seed)]
        changed = [f"{name} ({state[key]} before, {now} now)" for name, key, now in same if state[key] != now]
        if changed:
            raise BadOption(f"the run cannot go on where it was with other {' and '.join(changed)}")
        samples = int(state["samples"])
        before, now = (state["global_batch"], state["window"]), (self.global_batch, self.mix.window)
        inside = (samples - state["origin"]) % (before[0] * before[1])
        if before != now and inside:
            left = before[1] - inside // before[0]
            raise BadOption(
                f"the run stopped inside a window of {before[1]} steps of {before[0]} rows: keep --global-batch {before[0]} --mix "
                f"window:{before[1]} for {left} more step{'s' * (left > 1)}, and change them then"
            )
        self.origin = state["origin"] if before == now else samples
        return samples

    def _mine(self, rows: Ints) -> Ints:
        processes = len(self.speeds)
        if processes == 1:
            return np.arange(len(rows))
        lengths = np.zeros((len(rows), 1), dtype=np.int64) if self.lengths is None else self.lengths(rows)
        barred = self.barred(lengths) if self.barred else ()
        dealt = deal_rows((1.0 + lengths.sum(axis=1)).tolist(), self.speeds, barred)
        return np.array(dealt[self.rank], dtype=np.int64)

    def _from_window(self, start: int) -> Ints:
        size = self.global_batch * self.mix.window
        number, inside = divmod(start - self.origin, size)
        if self._window is None or self._window[0] != number:
            self._window = (number, self._sorted(self.origin + number * size, size))
        rows: Ints = self._window[1][inside // self.global_batch]
        return rows

    def _sorted(self, start: int, size: int) -> Ints:
        """The window's rows, one line a step: eight runs of like rows each, from random places."""
        assert self.lengths is not None
        rows = self.stream.take(start, size)
        counts = [count for count in deal(self.global_batch, RUNS) if count]
        order, _ = order_by_similarity(self.lengths(rows), math.inf, max(1, counts[0] // 2))
        ends = np.cumsum(counts * self.mix.window)[:-1]
        runs = np.split(rows[order], ends)
        draw = np.random.Generator(np.random.Philox(key=[self.stream.seed % 2**64, start % 2**64]))
        slots = [draw.permutation(self.mix.window) for _ in counts]
        return np.stack(
            [
                np.concatenate([runs[slot[step] * len(counts) + place] for place, slot in enumerate(slots)])
                for step in range(self.mix.window)
            ]
        )
