"""From the numbers of a step's rows to micro-batches: read, cut, collated. Runs in a worker, or in the process itself.

What a row becomes must not depend on who reads it: a data set that draws random numbers (a crop, a mask) is given a seed
for each sample of the stream, so the same sample gives the same row with any number of workers and processes and after
any resume. A token store draws none, and is spared the 15 µs a row.

Rows are collated where they are read, except those of a token store: they are handed over as they are stored, 60 kB a
step instead of 700, and collated by the process that trains in half a millisecond. A worker then feeds three times as
many rows.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from brimful.data.batches import Ints, Lengths, Step
from brimful.data.store import Store
from brimful.errors import BrimfulError, TaskError, in_one_line
from brimful.task import Shape, Task, rows_of

Cut = Callable[[list[Shape]], list[list[int]]]
"""Rows of these shapes as micro-batches: `Plan.split`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """One process's rows of a step, cut and collated ahead. A `Stepper` takes it as it takes a list of rows."""

    start: int
    """Samples of the stream before this step."""
    step_rows: int
    """Rows of the step over all processes."""
    indices: Ints
    """Which rows of the data set these are; `groups` counts in them."""
    groups: list[list[int]]
    """The proposed micro-batches. A stepper short of memory cuts each of them further, and never joins two."""
    shapes: list[Shape]
    """By group, what its rows are padded to."""
    parts: list[Any]
    """By group, the collated batch; the list of its rows where a batch could not be sliced."""
    collated: bool

    def __len__(self) -> int:
        return len(self.indices)

    def pin_memory(self) -> "StepRows":
        """The same in page-locked memory, which a card copies from while it computes. torch's pinning thread calls it."""
        return replace(self, parts=[_pinned(part) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What a worker hands over in place of rows that raised: an exception would arrive as a page of traceback."""

    sentence: str


class Reader:
    """Makes `StepRows` of a `Step`; a map-style data set of steps, as torch's workers want it."""

    def __init__(
        self, dataset: Any, task: Task, cut: Cut | None, lengths: Lengths | None, *, step_rows: int, seed: int
    ) -> None:
        self.dataset, self.task, self._cut, self._seed = dataset, task, cut, seed
        self._step_rows = step_rows
        tells = lengths is not None and lengths(np.zeros(1, dtype=np.int64)).shape[1] == len(task.worst_shape)
        self._lengths = lengths if tells else None
        self.stored = isinstance(dataset, Store)
        self._sliceable: bool | None = None

    def __getitem__(self, step: Step) -> "StepRows | Unreadable":
        """As a worker reads: its own random state may be changed."""
        try:
            rows = self._read(step)
            return rows if self.stored else self.collated(rows)
        except BrimfulError as error:
            return Unreadable(str(error))
        except Exception as error:
            return Unreadable(f"task {self.task.name}: rows could not be collated: {in_one_line(error)}")

    def _read(self, step: Step) -> StepRows:
        indices = step.rows[step.mine]
        rows = self._rows(indices, step)
        shapes = self._shapes(indices, rows)
        groups = self._cut(shapes) if self._cut is not None and rows else [list(range(len(rows)))] if rows else []
        parts = [[rows[place] for place in group] for group in groups]
        return StepRows(
            start=step.start,
            step_rows=self._step_rows,
            indices=indices,
            groups=groups,
            shapes=[
                tuple(max(shapes[place][axis] for place in group) for axis in range(len(shapes[0]))) for group in groups
            ],
            parts=parts,
            collated=False,
        )

    def _rows(self, indices: Ints, step: Step) -> list[Any]:
        if self.stored:
            rows: list[Any] = self.dataset.__getitems__(indices)
            return rows
        return [self._row(int(index), step.start + int(place)) for index, place in zip(indices, step.mine, strict=True)]

    def _row(self, index: int, sample: int) -> Any:
        seed_all(self._seed, sample)
        try:
            return self.dataset[index]
        except BrimfulError:
            raise
        except Exception as error:
            raise TaskError(f"row {index} of the data set cannot be read: {in_one_line(error)}") from error

    def _shapes(self, indices: Ints, rows: Sequence[Any]) -> list[Shape]:
        if self._lengths is not None:
            return [tuple(lengths) for lengths in self._lengths(indices).tolist()]
        return [tuple(self.task.shape(row)) for row in rows]

    def collated(self, rows: StepRows) -> StepRows:
        """As batches if those can be sliced later, else as they are. Without a plan to cut by, the step decides."""
        if self._sliceable is False or self._cut is None:
            return rows
        seed_all(self._seed, rows.start)  # for a collate that masks at random
        batches = [self.task.collate(part) for part in rows.parts]
        if self._sliceable is None and batches:
            self._sliceable = _has_rows(batches[0], len(rows.parts[0]))
        return replace(rows, parts=batches, collated=True) if self._sliceable else rows


def seed_all(seed: int, number: int) -> None:
    """Python's, NumPy's and torch's generators of the CPU, from a seed and a number."""
    mixed = np.random.SeedSequence([seed % 2**64, number]).generate_state(1, np.uint64).item()
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.default_generator.manual_seed(mixed % 2**63)


def _has_rows(batch: Any, rows: int) -> bool:
    try:
        return rows_of(batch) == rows
    except TaskError:
        return False


def _pinned(part: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(part)
