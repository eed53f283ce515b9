"""How the rows of a micro-batch are laid out: padded side by side, or packed end to end.

    padded   7 3 9 1        packed   7 3 9 1 4 1 8 8 2 1 · ·        three rows of 4, 2 and 4 tokens;
             4 1 · ·                                                a dot is computed for nothing
             8 8 2 1

A micro-batch of n rows is described by n and one shape, such that n × shape is what the model computes: the longest row
when rows are padded, the mean row when they are packed. Everything that predicts, splits or retries works in rows and
shapes, so it serves both layouts. 256 random chat rows (mean 22+96 tokens) compute 1.84 times their tokens when padded in
four micro-batches, and 1.02 times when packed.

Packing needs a task that defines `Task.pack` and a model that keeps rows apart, which `planning.exactness` proves.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from brimful.memory.split import Cost, padded_shape, split_by_memory
from brimful.packing.sequence import Boundaries, Positions
from brimful.task import Shape, Task
from brimful.units import show_rows

LayoutName = Literal["padded", "packed"]

SMALLEST_FILL = 64
"""A packed sequence is a multiple of this many tokens."""
SIGNIFICANT_BITS = 5
"""Sizes have at most this many significant bits: 16 sizes between one power of two and the next, 2 % of fill on average.
Few sizes let the allocator reuse its blocks."""


class Layout(ABC):
    """Splits rows into micro-batches, and turns the rows of one into a batch."""

    name: LayoutName

    @abstractmethod
    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """The one shape that describes a micro-batch of rows of these shapes."""

    @abstractmethod
    def positions(self, shapes: Sequence[Shape]) -> int:
        """What the model computes for a micro-batch of rows of these shapes: their lengths, with padding or fill."""

    @abstractmethod
    def split(
        self, shapes: Sequence[Shape], cost: Cost, budget: float, *, max_rows: int | None = None, overhead: float | None = None
    ) -> list[list[int]]:  # fmt: skip
        """Partition rows into micro-batches within the budget: their indices, ascending, the costliest first."""

    @abstractmethod
    def collate(self, task: Task, rows: Sequence[Any]) -> Any:
        """These rows as one batch."""

    @abstractmethod
    def dummy(self, task: Task, rows: int, shape: Shape) -> Any:
        """A batch of `rows` rows of this shape, for probing."""

    def example(self, task: Task, rows: int, shape: Shape) -> Any:
        """A batch with the tensors of a usual one: `dummy`, of fewer rows if these do not fit a fixed size."""
        return self.dummy(task, rows, shape)

    @abstractmethod
    def show(self, rows: int, shape: Shape) -> str:
        """The size of a micro-batch, for messages."""


class PaddedLayout(Layout):
    """Rows side by side, padded to the longest. Rows alike in their lengths share a micro-batch."""

    name: LayoutName = "padded"

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return padded_shape(shapes)

    def positions(self, shapes: Sequence[Shape]) -> int:
        return len(shapes) * sum(padded_shape(shapes))

    def split(
        self, shapes: Sequence[Shape], cost: Cost, budget: float, *, max_rows: int | None = None, overhead: float | None = None
    ) -> list[list[int]]:  # fmt: skip
        return split_by_memory(shapes, cost, budget, max_rows=max_rows, overhead=overhead)

    def collate(self, task: Task, rows: Sequence[Any]) -> Any:
        return task.collate(rows)

    def dummy(self, task: Task, rows: int, shape: Shape) -> Any:
        return task.dummy(rows, shape)

    def show(self, rows: int, shape: Shape) -> str:
        """`8 rows of 256+256`."""
        return show_rows(rows) + (f" of {'+'.join(map(str, shape))}" if shape else "")


@dataclass(frozen=True)
class FixedSize:
    """A size that packed micro-batches are filled up to, so that all have the same tensors (`graphs.py`)."""

    tokens: Shape
    rows: int
    """At most."""
    trained: float = 1.0
    """The share of the tokens that are trained, at most, where the batch says which are (`Positions`)."""

    @property
    def shape(self) -> Shape:
        """The mean row of as many rows as it holds; rounded up."""
        return tuple(-(-size // self.rows) for size in self.tokens)

    def holds(self, shapes: Sequence[Shape]) -> bool:
        totals = (sum(lengths) for lengths in zip(*shapes, strict=True))
        return len(shapes) <= self.rows and all(map(int.__le__, totals, self.tokens))


class PackedLayout(Layout):
    """Rows end to end. Any rows share a micro-batch, so micro-batches are few and equally full."""

    name: LayoutName = "packed"

    def __init__(self, fixed: FixedSize | None = None) -> None:
        self.fixed = fixed
        """The size of every micro-batch that fits into it. A larger one has its own."""

    def sizes(self, shapes: Sequence[Shape]) -> Shape:
        """By length, the tokens of a sequence that holds rows of these shapes."""
        return self.fixed.tokens if self.fixed is not None and self.fixed.holds(shapes) else packed_sizes(shapes)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """The mean row, with its share of the fill; rounded up."""
        return tuple(-(-size // len(shapes)) for size in self.sizes(shapes))

    def positions(self, shapes: Sequence[Shape]) -> int:
        return sum(self.sizes(shapes))

    def split(
        self, shapes: Sequence[Shape], cost: Cost, budget: float, *, max_rows: int | None = None, overhead: float | None = None
    ) -> list[list[int]]:  # fmt: skip
        """The fewest micro-batches that fit, with about as many tokens in each. A row too large alone comes alone."""
        every, most = list(range(len(shapes))), len(shapes) if max_rows is None else max_rows

        def price(rows: Sequence[int], *, whole: bool = False) -> float:
            chosen = [shapes[row] for row in rows]
            if self.fixed is not None and not self.fixed.holds(chosen):
                return math.inf
            return cost(len(rows), self.shape(chosen), whole=whole)

        if not every or (len(every) <= most and price(every, whole=True) <= budget):
            return [every] if every else []
        price_alone = {shape: price([row]) for row, shape in enumerate(shapes)}
        alone = [row for row in every if price_alone[shapes[row]] > budget]
        rest = [row for row in every if not price_alone[shapes[row]] > budget]

        def groups_of(parts: int) -> list[list[int]] | None:
            groups = _evenly(rest, shapes, parts, most)
            return None if any(price(group) > budget for group in groups) else groups

        groups = _fewest(groups_of, max(2 - len(alone), -(-len(rest) // most), 1), len(rest))
        return sorted([*groups, *([row] for row in alone)], key=lambda group: -price(group))

    def collate(self, task: Task, rows: Sequence[Any]) -> Any:
        shapes = [tuple(task.shape(row)) for row in rows]
        return self._pack(task, rows, shapes, self.sizes(shapes))

    def dummy(self, task: Task, rows: int, shape: Shape, *, trained: float = 1.0) -> Any:
        """Without fill unless the size is fixed, so that a probe measures exactly these tokens. `trained`: no more than this
        share of them is trained, where the batch says which are."""
        tokens = tuple(rows * length for length in shape)
        return self._pack(task, [task.dummy_row(shape)] * rows, [shape] * rows, tokens, trained)

    def example(self, task: Task, rows: int, shape: Shape) -> Any:
        if self.fixed is not None:
            fits = (size // length for size, length in zip(self.fixed.tokens, shape, strict=True) if length)
            rows = max(1, min(rows, self.fixed.rows, *fits))
        return self.dummy(task, rows, shape, trained=1.0 if self.fixed is None else self.fixed.trained)

    def _pack(
        self, task: Task, rows: Sequence[Any], shapes: Sequence[Shape], tokens: Shape, trained: float = 1.0
    ) -> Any:
        fixed = self.fixed if self.fixed is not None and self.fixed.holds(shapes) else None
        batch = task.pack(rows, tokens if fixed is None else fixed.tokens)
        if isinstance(batch, Mapping) and trained < 1:
            batch = {name: one.first(trained) if isinstance(one, Positions) else one for name, one in batch.items()}
        if isinstance(batch, Mapping) and fixed is not None:
            batch = {name: _with_room(value, len(rows), fixed) for name, value in batch.items()}
        return batch

    def show(self, rows: int, shape: Shape) -> str:
        """`16 rows with 320+896 tokens`."""
        return f"{show_rows(rows)} with {'+'.join(f'{rows * length:,}' for length in shape)} tokens"


PADDED: Layout = PaddedLayout()
PACKED = PackedLayout()
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (PADDED, PACKED)}


def packed_sizes(shapes: Sequence[Shape]) -> Shape:
    """By length, the tokens of a sequence that holds rows of these shapes, filled up.

    >>> packed_sizes([(4, 100), (2, 900), (4, 30)])
    (64, 1088)
    """
    return tuple(_filled(sum(lengths)) for lengths in zip(*shapes, strict=True))


def _with_room(value: Any, rows: int, fixed: FixedSize) -> Any:
    """What tells the tokens and the rows of a sequence apart, of `rows` rows, in the size that all micro-batches have. A row may be
    several in the sequence, as both replies of a preference pair are."""
    if isinstance(value, Boundaries):
        return value.with_room(fixed.rows * -(-value.rows // rows))
    return value.with_room(fixed.trained) if isinstance(value, Positions) else value


def trained_share(batch: Any) -> float:
    """The share of the tokens that are trained, where a packed batch says which are; else 1."""
    chosen = [one for one in batch.values() if isinstance(one, Positions)] if isinstance(batch, Mapping) else []
    return max((one.chosen / one.size for one in chosen), default=1.0)


def _filled(tokens: int) -> int:
    unit = max(SMALLEST_FILL, 1 << max(0, (tokens - 1).bit_length() - SIGNIFICANT_BITS))
    return max(1, -(-tokens // unit)) * unit


def _fewest(groups_of: Callable[[int], list[list[int]] | None], least: int, most: int) -> list[list[int]]:
    """The groups of the fewest parts that fit, at least `least`; `most` parts do.

    Found in widening strides, then in halves. That is the least number because one part more never makes the fullest part of
    `_evenly` fuller: in order, no load but the new one becomes larger, and a row is added to the smallest in both. One part more
    each time took 4.3 s for 4,096 rows in 511 parts.
    """
    over, fits, found = least - 1, least, groups_of(least)
    while found is None:
        over, fits = fits, min(2 * fits - least + 2, most)
        found = groups_of(fits)
    while fits - over > 1:
        middle = (over + fits) // 2
        groups = groups_of(middle)
        over, fits, found = (middle, fits, found) if groups is None else (over, middle, groups)
    return found


def _evenly(rows: list[int], shapes: Sequence[Shape], parts: int, most: int) -> list[list[int]]:
    """The longest row first, each to the part with the fewest tokens among those with less than `most` rows."""
    groups: list[list[int]] = [[] for _ in range(min(parts, len(rows)))]
    loads = [(0, number) for number in range(len(groups))]
    for row in sorted(rows, key=lambda row: -sum(shapes[row])):
        load, number = heapq.heappop(loads)
        groups[number].append(row)
        if len(groups[number]) < most:
            heapq.heappush(loads, (load + 1 + sum(shapes[row]), number))
    return [sorted(group) for group in groups]
