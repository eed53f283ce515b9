"""From the row numbers of a step to micro-batches: read, split, collated. Runs in a worker, or in the process itself.

A row must not depend on who reads it. For a dataset that draws random numbers (a crop, a mask) the generators are seeded
for each sample of the stream, so the same sample gives the same row with any number of workers and processes and after any
resume. A token store draws none, so its rows are not seeded, which would take 15 µs each.

Rows are collated where they are read, except those of a token store. They are passed on as stored, 60 kB per step instead of
700, and collated in half a millisecond by the process that trains, so a worker feeds three times as many rows.
"""

import io
import pickle
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from brimful.data.batches import Ints, Lengths, SampledStep
from brimful.data.store import Store
from brimful.errors import BrimfulError, TaskError, in_one_line, user_line
from brimful.memory.layout import PADDED, Layout
from brimful.memory.oom import is_oom
from brimful.task import Shape, Task, failed_method, failure, shared_rows

Split = Callable[[list[Shape]], list[list[int]]]
"""Splits rows of these shapes into micro-batches: `Plan.split`."""
ALIGNED_BYTES = 64
"""Between the tensors of a packed step, so that a view of any dtype may begin there."""
MOST_GAPS = 8
"""A view with larger gaps than this in its memory is not packed, since the gaps are copied too."""


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
    packed: list[Any] | None = None
    """By group, its rows in one packed batch, which cannot be sliced: `parts` still has them as rows."""
    real_positions: int | None = None
    """The rows' own lengths, added up; None if neither dataset nor task tells them."""
    positions: int | None = None
    """What the model computes for them in these groups, padding or fill included."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def batches(self) -> list[Any]:
        """What goes to the device, if no group is split further."""
        return self.parts if self.packed is None else self.packed

    def pin_memory(self) -> "StepRows":
        """The same in page-locked memory, which a GPU copies from while it computes. torch's pinning thread calls it."""
        from torch.utils.data._utils.pin_memory import pin_memory

        batches = [pin_memory(batch) for batch in self.batches]
        return replace(self, parts=batches) if self.packed is None else replace(self, packed=batches)


@dataclass(frozen=True, slots=True)
class ReadError:
    """What a worker sends instead of rows that raised an error. An exception would arrive as a page of traceback."""

    message: str
    traceback: str | None
    """If the user's own code raised it."""
    exhausted: bool = False
    """Host RAM or open files ran out, so the same rows may be read once the other readers have ended."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A `StepRows` on its way from a worker, all its tensors in one piece of shared memory.

    torch passes on each tensor as an open file of its own: 1,500 for a step of 500 rows with three tensors, where 1,024 is
    the usual limit. An object that cannot be pickled is an error here; torch would lose it in a thread and wait for ever.
    """

    content: bytes
    memory: torch.Tensor

    @classmethod
    def pack(cls, rows: StepRows) -> "PackedStep":
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(rows)
        memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(max(1, packer.end)))
        for start, tensor in packer.tensors:
            span = _span(tensor)
            _view(memory, start, tensor.dtype, span).copy_(tensor.as_strided((span,), (1,)))
        return cls(file.getvalue(), memory)

    def unpack(self) -> StepRows:
        """Its tensors are views of the memory, which lives as long as one of them."""
        rows: StepRows = _Unpacker(self.content, self.memory).load()
        return rows

    def pin_memory(self) -> "PackedStep":
        """torch's pinning thread calls it."""
        return PackedStep(self.content, self.memory.pin_memory())


class _Packer(ForkingPickler):
    """Pickles all but plain tensors, which are collected. torch pickles other tensors (sparse, a column of a large table)."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, torch.Tensor]] = []
        """With the place where each begins."""
        self.end = 0

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return None
        start, span = self.end, _span(value)
        self.tensors.append((start, value))
        self.end = start + -(-span * value.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
        return start, value.dtype, span, tuple(value.shape), value.stride()


class _Unpacker(pickle.Unpickler):
    def __init__(self, content: bytes, memory: torch.Tensor) -> None:
        super().__init__(io.BytesIO(content))
        self._memory = memory

    def persistent_load(self, place: Any) -> torch.Tensor:
        start, dtype, span, shape, stride = place
        return _view(self._memory, start, dtype, span).as_strided(shape, stride)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be passed on by copying its memory, gaps included."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    if tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False
    return _span(tensor) <= MOST_GAPS * tensor.numel()


def _span(tensor: torch.Tensor) -> int:
    """Elements of memory from its first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _view(memory: torch.Tensor, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    return memory[start : start + count * dtype.itemsize].view(dtype)


def is_exhausted(error: BaseException) -> bool:
    """Whether host RAM or open files ran out; files in the words of the kernel, of torch and of Python's sockets."""
    text = f"{error} {error.__cause__}"
    return is_oom(error) or any(sign in text for sign in ("Too many open files", "items of ancdata"))


def pack(rows: "StepRows | ReadError") -> "PackedStep | ReadError":
    """Pack a step in the worker, as the last thing before it is sent."""
    if isinstance(rows, ReadError):
        return rows
    try:
        return PackedStep.pack(rows)
    except Exception as error:
        problem = f"a worker cannot pass on its rows ({in_one_line(error).rstrip('. ')})."
        if is_exhausted(error):
            return ReadError(problem, None, True)
        return ReadError(f"{problem} Try: workers=0, or rows that can be pickled.", None)


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
            return ReadError(
                str(error), None if error.__cause__ is None else traceback.format_exc(), is_exhausted(error)
            )
        except Exception as error:
            message = failure(self.task, error, failed_method(self.task, error) or "collate")
            return ReadError(message, traceback.format_exc(), is_exhausted(error))

    def collate(self, rows: StepRows) -> StepRows:
        """As batches if those can be sliced later, else as lists of rows. Without a plan to split by, the step decides.

        Packed batches are kept together with their rows, so that a step short of memory can pack again.
        """
        if self._sliceable is False or self._split is None:
            return rows
        seed_all(self._seed, rows.start)  # for a collate that masks at random
        batches = [self._layout.collate(self.task, part) for part in rows.parts]
        if self._layout is not PADDED:
            return replace(rows, packed=batches)
        if self._sliceable is None and batches:
            self._sliceable = shared_rows(batches[0]) == len(rows.parts[0])
        return replace(rows, parts=batches, collated=True) if self._sliceable else rows

    def _read(self, step: SampledStep) -> StepRows:
        indices = step.rows[step.mine]
        if self.from_store:
            rows = self.dataset.__getitems__(indices)
        else:
            rows = [self._row(int(n), step.start + int(place)) for n, place in zip(indices, step.mine, strict=True)]
        shapes = self._shapes(indices, rows)
        groups = self._split(shapes) if self._split is not None and rows else [list(range(len(rows)))] if rows else []
        by_group = [[shapes[place] for place in group] for group in groups]
        known = self._lengths is not None or self.task.has_shape
        return StepRows(
            start=step.start,
            step_rows=self._step_rows,
            indices=indices,
            groups=groups,
            shapes=[self._layout.shape(group) for group in by_group],
            parts=[[rows[place] for place in group] for group in groups],
            collated=False,
            real_positions=sum(map(sum, shapes)) if known else None,
            positions=sum(self._layout.positions(group) for group in by_group),
        )

    def _row(self, index: int, sample: int) -> Any:
        seed_all(self._seed, sample)
        try:
            return self.dataset[index]
        except BrimfulError:
            raise
        except Exception as error:
            why = "host RAM ran out" if is_oom(error) else in_one_line(error)
            raise TaskError(f"row {index} of the dataset cannot be read{user_line(error)} ({why}).") from error

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
