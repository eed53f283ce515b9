"""From the row numbers of a step to micro-batches: read, split, collated. Runs in a worker, or in the process itself.

A row must not depend on who reads it. For a dataset that draws random numbers (a crop, a mask) the generators are seeded
for each sample of the stream, so the same sample gives the same row with any number of workers and processes and after any
resume. A token store draws none, and is spared the 15 µs per row.

Rows are collated where they are read, except those of a token store. They are passed on as stored, 60 kB per step instead of
700, and collated in half a millisecond by the process that trains, so a worker feeds three times as many rows.
"""

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from brimful.data.batches import Ints, Lengths, SampledStep
from brimful.data.store import Store
from brimful.errors import BrimfulError, TaskError, in_one_line, user_line
from brimful.memory.layout import PADDED, Layout
from brimful.task import Shape, Task, failed_method, failure, rows_of

Split = Callable[[list[Shape]], list[list[int]]]
"""Splits rows of these shapes into micro-batches: `Plan.split`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """One rank's rows of a step, read, split and collated ahead. A `Stepper` takes it like a list of rows."""

    start: int
    """Samples of the stream before this step."""
    step_rows: int
    """Rows of the step over all ranks."""
    indices: Ints
    """Which rows of the dataset these are; `groups` are positions in them."""
    groups: list[list[int]]
    """The proposed micro-batches. A stepper short of memory splits each of them further, and never joins two."""
    shapes: list[Shape]
    """By group, the shape its rows are padded to."""
    parts: list[Any]
    """By group, the collated batch; the list of its rows where a batch could not be sliced."""
    collated: bool

    def __len__(self) -> int:
        return len(self.indices)

    def pin_memory(self) -> "StepRows":
        """The same in page-locked memory, which a GPU copies from while it computes. torch's pinning thread calls it."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, parts=[pin_memory(part) for part in self.parts])


@dataclass(frozen=True, slots=True)
class ReadError:
    """What a worker passes on in place of rows that raised: an exception would arrive as a page of traceback."""

    message: str
    traceback: str | None
    """If the user's own code raised it."""


class WorkerTraceback(Exception):
    """The traceback of a worker, shown as the cause of the error that it led to here."""


class StepReader:
    """A map-style dataset of steps, for torch's workers: `reader[SampledStep]` is its `StepRows`."""

    def __init__(
        self, dataset: Any, task: Task, split: Split | None, lengths: Lengths | None, *, step_rows: int, seed: int,
        layout: Layout = PADDED,
    ) -> None:  # fmt: skip
        self.dataset, self.task, self._split, self._seed, self._layout = dataset, task, split, seed, layout
        self._step_rows = step_rows
        known = lengths is not None and lengths(np.zeros(1, dtype=np.int64)).shape[1] == len(task.worst_shape)
        self._lengths = lengths if known else None
        self.from_store = isinstance(dataset, Store)
        self._sliceable: bool | None = None

    def __getitem__(self, step: SampledStep) -> "StepRows | ReadError":
        """Seeds the global generators, as a worker may."""
        try:
            rows = self._read(step)
            return rows if self.from_store else self.collate(rows)
        except BrimfulError as error:
            return ReadError(str(error), None if error.__cause__ is None else traceback.format_exc())
        except Exception as error:
            message = failure(self.task, error, failed_method(self.task, error) or "collate")
            return ReadError(message, traceback.format_exc())

    def collate(self, rows: StepRows) -> StepRows:
        """As batches if those can be sliced later, else as lists of rows. Without a plan to split by, the step decides."""
        if self._sliceable is False or self._split is None or self._layout is not PADDED:
            return rows
        seed_all(self._seed, rows.start)  # for a collate that masks at random
        batches = [self.task.collate(part) for part in rows.parts]
        if self._sliceable is None and batches:
            self._sliceable = _has_rows(batches[0], len(rows.parts[0]))
        return replace(rows, parts=batches, collated=True) if self._sliceable else rows

    def _read(self, step: SampledStep) -> StepRows:
        indices = step.rows[step.mine]
        if self.from_store:
            rows = self.dataset.__getitems__(indices)
        else:
            rows = [self._row(int(n), step.start + int(place)) for n, place in zip(indices, step.mine, strict=True)]
        shapes = self._shapes(indices, rows)
        groups = self._split(shapes) if self._split is not None and rows else [list(range(len(rows)))] if rows else []
        return StepRows(
            start=step.start,
            step_rows=self._step_rows,
            indices=indices,
            groups=groups,
            shapes=[self._layout.shape([shapes[place] for place in group]) for group in groups],
            parts=[[rows[place] for place in group] for group in groups],
            collated=False,
        )

    def _row(self, index: int, sample: int) -> Any:
        seed_all(self._seed, sample)
        try:
            return self.dataset[index]
        except BrimfulError:
            raise
        except Exception as error:
            raise TaskError(
                f"row {index} of the dataset cannot be read{user_line(error)} ({in_one_line(error)})."
            ) from error

    def _shapes(self, indices: Ints, rows: Sequence[Any]) -> list[Shape]:
        if self._lengths is not None:
            return [tuple(lengths) for lengths in self._lengths(indices).tolist()]
        return [tuple(self.task.shape(row)) for row in rows]


def seed_all(seed: int, number: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators from a seed and a number."""
    mixed = np.random.SeedSequence([seed % 2**64, number]).generate_state(1, np.uint64).item()
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.default_generator.manual_seed(mixed % 2**63)


def _has_rows(batch: Any, rows: int) -> bool:
    try:
        return rows_of(batch) == rows
    except TaskError:
        return False
