"""Rows of a step cut into micro-batches that fit, and dealt to processes. Every row comes once; only where is decided.

A micro-batch is padded to the longest of its rows in every length, so rows alike in *all* their lengths belong together.

1. order   The rows are halved again and again, each time across the length and at the place that saves most padding.
           The parts, one after the other, are an order in which neighbours are alike in every length.
2. runs    That order is cut into the best runs that fit, which end where halving saved most or where memory is full.

256 real rows of source and target, as few micro-batches as memory allows: 35 % padding in 4, 27 % in 8, 19 % in 16, where
sorting by target leaves 49, 38 and 29 %. That takes the memory model, which is slow, about 100 questions. Rows of one
length come in the fewest micro-batches there can be.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from brimful.task import Shape

Ints = NDArray[np.int64]

LEAF = 8
"""So few rows are halved further only if that might pay for a micro-batch: down to 4 gained 0.1 % of padding."""
MOST_LEAVES = 256
"""However many rows there are, they are halved into about so many parts, which keeps 4,096 below a tenth of a second."""
CUTS = 32
"""Runs may end at so many of the places where halving saved most, and at two more for each micro-batch needed."""


class Cost(Protocol):
    """What so many rows of a padded shape cost, never less for more or longer rows. `whole`: they are the whole step."""

    def __call__(self, rows: int, shape: Shape, /, *, whole: bool = False) -> float: ...


def split_by_memory(
    shapes: Sequence[Shape], cost: Cost, budget: float, *, max_rows: int | None = None, overhead: float | None = None
) -> list[list[int]]:
    """Partition rows into micro-batches over all their lengths: indices, ascending, the costliest micro-batch first.

    Each costs no more than the budget and has no more than `max_rows` rows; a row that alone exceeds the budget comes alone.
    `overhead` is what a further micro-batch costs, in rows × padded lengths, and the sum of both is minimised; without
    it, the fewest micro-batches come first and the padding second.
    """
    if not shapes:
        return []
    lengths = np.array(shapes, dtype=np.int64)
    rows = np.argsort(-lengths.sum(axis=1), kind="stable")  # the longest first; from here on, rows are places in this
    lengths, count = lengths[rows], len(rows)
    room = _Room(cost, budget, count if max_rows is None else max_rows)
    whole = count <= room.most and cost(count, _shape(lengths), whole=True) <= budget
    groups = [np.arange(count)]
    if not whole or overhead is not None:
        in_one = float(_work(count, lengths.max(axis=0)))
        price = 1 + in_one if overhead is None else overhead  # a micro-batch dearer than any padding: the fewest
        alone = _too_large(lengths, groups[0], room)
        found = _groups(lengths, np.setdiff1d(groups[0], alone), room, price)
        total = sum(price + float(_work(len(group), lengths[group].max(axis=0))) for group in found)
        if not whole or (total < price + in_one and not alone):
            groups = [*found, *(np.array([row]) for row in alone)]
    return _costliest_first([(_shape(lengths[group]), sorted(rows[group].tolist())) for group in groups], cost)


def _groups(lengths: Ints, rows: Ints, room: "_Room", price: float) -> list[Ints]:
    """Rows that each fit alone, in groups that fit."""
    if not len(rows):
        return []
    lengths = lengths[rows]
    order, gains = order_by_similarity(lengths, price)
    ordered = lengths[order]
    forward, backward = _filled(ordered, room), len(rows) - np.array(_filled(ordered[::-1], room))
    worth_it = max(CUTS + 2 * len(forward), int(np.count_nonzero(2 * gains > price)))
    natural = np.argsort(-gains, kind="stable")[:worth_it]
    runs = _runs(ordered, np.unique([*forward, *backward, *natural]), room, price)
    return [rows[group] for group in _evened(lengths, [order[start:end] for start, end in runs])]


class _Room:
    """Whether so many rows fit at a padded shape. What was asked before bounds what need not be asked."""

    def __init__(self, cost: Cost, budget: float, most: int) -> None:
        self.cost, self.budget, self.most = cost, budget, most
        self._known: dict[Shape, tuple[int, int]] = {}  # by shape: so many rows fit, so many do not

    def fits(self, rows: int, padded: Ints) -> bool:
        shape = tuple(padded.tolist())
        low, high = self._known.get(shape, (0, self.most + 1))
        if low < rows < high:
            low, high = (rows, high) if self.cost(rows, shape) <= self.budget else (low, rows)
            self._known[shape] = (low, high)
        return rows <= low

    def largest(self, padded: Ints, guess: int) -> int:
        """The most rows that fit, n of them padded to `padded[n - 1]`; one does. A good guess takes three questions."""
        low, high, stride = 1, len(padded) + 1, 1
        while high - low > 1:
            guess = min(max(guess, low + 1), high - 1)
            if self.fits(guess, padded[guess - 1]):
                low, guess = guess, min(guess + stride, (guess + high) // 2)
            else:
                high, guess = guess, max(guess - stride, (guess + low) // 2)
            stride *= 3
        return low


def _work(rows: int | Ints, padded: Ints) -> Ints:
    """Rows × padded lengths. A row without lengths is work too."""
    work: Ints = rows * np.maximum(1, padded.sum(axis=-1))
    return work


def _shape(lengths: Ints) -> Shape:
    """What these rows are padded to."""
    return tuple(lengths.max(axis=0).tolist())


def _too_large(lengths: Ints, rows: Ints, room: _Room) -> list[int]:
    """Rows that do not fit alone. Usually one question: would a row as long as the longest in everything fit?"""
    if room.fits(1, lengths[rows].max(axis=0)):
        return []
    if len(rows) == 1:
        return [int(rows[0])]
    half = len(rows) // 2
    return _too_large(lengths, rows[:half], room) + _too_large(lengths, rows[half:], room)


def order_by_similarity(lengths: Ints, price: float, leaf: int | None = None) -> tuple[Ints, Ints]:
    """The rows with those alike in all lengths side by side, and for each what cutting before it saved.

    Parts of `leaf` rows that cost less than `price` are not ordered further.
    """
    leaf = max(LEAF, len(lengths) // MOST_LEAVES) if leaf is None else leaf
    order: list[int] = []
    gains = np.zeros(len(lengths), dtype=np.int64)
    parts = [(np.arange(len(lengths)), 0)]
    while parts:
        rows, gain = parts.pop()
        part = lengths[rows]
        if (len(rows) <= leaf and _work(len(rows), part.max(axis=0)) <= price) or (part == part[0]).all():
            gains[len(order)] = gain
            order.extend(rows.tolist())
        else:
            saved, longer = _halved(part)
            parts += [(rows[~longer], saved), (rows[longer], gain)]
    return np.array(order), gains


def _halved(lengths: Ints) -> tuple[int, NDArray[np.bool_]]:
    """The cut in two, across one length, that saves most padding: how much, and which rows are the longer ones."""
    count = len(lengths)
    sorted_by = np.argsort(-lengths, axis=0, kind="stable")
    by_axis = lengths[sorted_by]  # place, length sorted by, length
    before = np.maximum.accumulate(by_axis, axis=0)
    after = np.maximum.accumulate(by_axis[::-1], axis=0)[::-1]
    first = np.arange(1, count)[:, None]
    work = first * before[:-1].sum(axis=2) + (count - first) * after[1:].sum(axis=2)
    place, axis = divmod(int(work.argmin()), lengths.shape[1])
    longer = np.zeros(count, dtype=np.bool_)
    longer[sorted_by[: place + 1, axis]] = True
    return count * int(before[-1, 0].sum()) - int(work[place, axis]), longer


def _filled(ordered: Ints, room: _Room) -> list[int]:
    """Where runs end when each takes all that fits: the fewest runs this order can be cut into."""
    ends, full = [0], 0
    while ends[-1] < len(ordered):
        padded = np.maximum.accumulate(ordered[ends[-1] : ends[-1] + room.most], axis=0)
        work = _work(np.arange(1, len(padded) + 1), padded)
        guess = int(np.searchsorted(work, full, side="right"))  # memory goes with work: full at about the same work
        rows = room.largest(padded, guess)
        ends.append(ends[-1] + rows)
        full = int(work[rows - 1])
    return ends


def _runs(ordered: Ints, cuts: Ints, room: _Room, price: float) -> Iterable[tuple[int, int]]:
    """The runs between these cuts that fit, at the least price and work in all: dynamic programming."""
    atoms = np.maximum.reduceat(ordered, cuts[:-1], axis=0)
    best, came_from = np.full(len(cuts), np.inf), np.zeros(len(cuts), dtype=np.int64)
    best[0], end = 0, 0
    for start in range(len(atoms)):
        padded, rows = np.maximum.accumulate(atoms[start:], axis=0), cuts[start + 1 :] - cuts[start]
        end = max(end, start + 1)  # part of a run that fits, fits: the end never moves back
        while end < len(atoms) and room.fits(int(rows[end - start]), padded[end - start]):
            end += 1
        total = best[start] + price + _work(rows[: end - start], padded[: end - start])
        better = np.flatnonzero(total < best[start + 1 : end + 1])
        best[start + 1 + better], came_from[start + 1 + better] = total[better], start
    ends = [len(atoms)]
    while ends[-1]:
        ends.append(int(came_from[ends[-1]]))
    return pairwise(cuts[ends[::-1]].tolist())


def _evened(lengths: Ints, groups: list[Ints]) -> list[Ints]:
    """Groups padded to the same shape share their rows evenly: 25 + 25 peaks lower than 34 + 16."""
    alike: dict[Shape, list[Ints]] = {}
    for group in groups:
        alike.setdefault(_shape(lengths[group]), []).append(group)
    return [part for same in alike.values() for part in np.array_split(np.concatenate(same), len(same))]


def _costliest_first(groups: list[tuple[Shape, list[int]]], cost: Cost) -> list[list[int]]:
    """The caching allocator then has its final size at once: simulated, 15.9 GB reserved instead of 17.4."""
    sized = [(-cost(len(rows), shape), -len(rows) * sum(shape), rows) for shape, rows in groups]
    return [rows for _, _, rows in sorted(sized)]


def without_single_rows(groups: list[list[int]]) -> list[list[int]]:
    """The same rows with nobody alone: BatchNorm cannot average over a single row."""
    lone = [group[0] for group in groups if len(group) == 1]
    rest = [group for group in groups if len(group) > 1]
    pairs = [lone[place : place + 2] for place in range(0, len(lone), 2)]
    if pairs and len(pairs[-1]) == 1 and (pairs[:-1] or rest):
        odd = pairs.pop()
        smallest = min([*rest, *pairs], key=len)
        smallest.extend(odd)
    return [sorted(group) for group in (*rest, *pairs)]


def deal(rows: int, processes: int) -> tuple[int, ...]:
    """So many rows over so many processes, as even as can be: 250 over 3 is 84, 83, 83."""
    share, left = divmod(rows, processes)
    return tuple(share + (index < left) for index in range(processes))


def deal_rows(
    work: Sequence[float], speeds: Sequence[float], barred: Collection[tuple[int, int]] = ()
) -> list[list[int]]:
    """Which rows each process takes, so that all finish at about the same time.

    The longest row comes first, each goes to the process that would be done with it first. Rows of equal work come in
    runs, so that tensors can be sliced. `barred` holds (row, process) where the row alone does not fit the process; a
    row barred everywhere is dealt as if it were not, for the step to report.
    """
    if not barred and len(set(work)) <= 1:
        return _dealt_in_runs(len(work), speeds)
    dealt: list[list[int]] = [[] for _ in speeds]
    loads, closed = [0.0] * len(speeds), frozenset(barred)
    for row in sorted(range(len(work)), key=lambda row: -work[row]):
        allowed = [process for process in range(len(speeds)) if (row, process) not in closed] or range(len(speeds))
        process = min(allowed, key=lambda process: (loads[process] + work[row]) / speeds[process])
        dealt[process].append(row)
        loads[process] += work[row]
    return [sorted(rows) for rows in dealt]


def _dealt_in_runs(rows: int, speeds: Sequence[float]) -> list[list[int]]:
    """Counts in proportion to the speeds; what is left over goes to the largest remainders."""
    shares = [rows * speed / sum(speeds) for speed in speeds]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(speeds)), key=lambda process: counts[process] - shares[process])
    for process in by_remainder[: rows - sum(counts)]:
        counts[process] += 1
    return [list(range(start, end)) for start, end in pairwise(np.cumsum([0, *counts]).tolist())]
