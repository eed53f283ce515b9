"""The rows of one step, and any of them as a batch.

A **list of rows** is collated per micro-batch, so each micro-batch is padded to its own longest row. A **batch** (a
tensor, or any tree of tensors with one first dimension) is sliced, and with it every list of that length in it, such as a
column of texts. A list means rows, with one exception: without a task or a `collate`, `[inputs, targets]` as a DataLoader
returns it is a batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from brimful.data.reader import StepRows
from brimful.errors import TaskError, kind_of
from brimful.memory.layout import PADDED, Layout
from brimful.task import Shape, Task

MAX_BATCH_TENSORS = 4
"""A list of up to this many tensors of one shape is a batch of inputs and targets. A longer list is rows."""


class Rows(Protocol):
    """The rows of a step on this rank, or of the whole step."""

    shapes: list[Shape]
    layout: Layout
    groups: list[list[int]] | None
    """Micro-batches that a loader made. They may be split further but not joined. None: split as you like."""
    collates: bool
    """Whether `batch` collates again on every call, rather than slicing a batch."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Any:
        """These rows as one batch, on the device they came on."""

    def lay_out(self, layout: Layout) -> None:
        """Make batches in this layout from now on."""


def as_rows(value: Any, task: Task, shape: Shape, *, list_is_rows: bool, layout: Layout = PADDED) -> Rows:
    """The argument of `Stepper.step`. `shape` is for rows whose task does not define theirs."""
    if isinstance(value, StepRows):
        return LoadedRows(value, task, layout)
    if isinstance(value, list) and (list_is_rows or _looks_like_rows(value)):
        return ListedRows(value, task, shape, layout)
    if layout is not PADDED:
        raise TaskError(
            f"the plan packs rows, and this step was given {kind_of(value)}. Try: pass a list of rows, or layout='padded'."
        )
    return BatchRows(value, task, shape)


class LoadedRows:
    """Micro-batches that a `Loader` read and split. A collated row has the length it is padded to."""

    def __init__(self, step: StepRows, task: Task, layout: Layout = PADDED) -> None:
        self.groups: list[list[int]] | None = step.groups
        self.layout = layout
        self.shapes: list[Shape] = [()] * len(step)
        self.collates = not step.collated
        self._parts: list[Rows] = [
            BatchRows(part, task, shape) if step.collated else ListedRows(part, task, shape, layout)
            for part, shape in zip(step.parts, step.shapes, strict=True)
        ]
        self._packed = {} if step.packed is None else dict(zip(map(tuple, step.groups), step.packed, strict=True))
        self._position = dict[int, tuple[int, int]]()
        """By row, the number of its part and its index there."""
        for number, (group, part) in enumerate(zip(step.groups, self._parts, strict=True)):
            for index, row in enumerate(group):
                self.shapes[row], self._position[row] = part.shapes[index], (number, index)
        self._packed_layout = layout
        if self.collates and len(step.groups) == 1:
            self.groups = None  # the loader did not split: any split will do

    def __len__(self) -> int:
        return len(self.shapes)

    def batch(self, indices: Sequence[int]) -> Any:
        packed = self._packed.get(tuple(indices))
        if packed is not None and self.layout is self._packed_layout:
            return packed
        numbers = {self._position[index][0] for index in indices}
        assert len(numbers) == 1, "rows of two micro-batches cannot be joined"
        return self._parts[numbers.pop()].batch([self._position[index][1] for index in indices])

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout
        for part in self._parts:
            part.lay_out(layout)


class ListedRows:
    """A list of rows, collated per micro-batch."""

    groups: list[list[int]] | None = None
    collates = True

    def __init__(self, rows: list[Any], task: Task, shape: Shape, layout: Layout = PADDED) -> None:
        if not rows:
            raise TaskError("the list of rows for this step is empty. Try: at least one row.")
        self._rows, self._task, self.layout = rows, task, layout
        has_shape = type(task).shape is not Task.shape
        self.shapes = [_shape_of(task, row) for row in rows] if has_shape else [shape] * len(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int]) -> Any:
        return self.layout.collate(self._task, [self._rows[index] for index in indices])

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout


class BatchRows:
    """A collated batch, sliced along its first dimension."""

    groups: list[list[int]] | None = None
    collates = False
    layout = PADDED

    def __init__(self, batch: Any, task: Task, shape: Shape) -> None:
        if not isinstance(batch, (torch.Tensor, np.ndarray, Mapping, list, tuple)):
            raise TaskError(
                f"a step takes a list of rows or a batch of tensors, and this is {kind_of(batch)}. "
                "Try: pass one batch of your loader."
            )
        sizes: dict[str, int] = {}
        _measure(batch, "", sizes)
        if len(set(sizes.values())) != 1 or not _has_tensor(batch):
            parts = ", ".join(f"{name or 'the batch'} has {size}" for name, size in sizes.items()) or "there are none"
            raise TaskError(
                f"a batch can be split only if all its tensors have the same first dimension; {parts} (task {task.name}). "
                "Try: pass such a batch, or a list of rows and collate=."
            )
        self._batch, self._rows = batch, next(iter(sizes.values()))
        if self._rows == 0:
            raise TaskError(
                "the batch for this step has no rows, since its first dimension is 0. Try: at least one row."
            )
        self.shapes = [shape] * self._rows

    def __len__(self) -> int:
        return self._rows

    def batch(self, indices: Sequence[int]) -> Any:
        if len(indices) == self._rows:
            return self._batch
        first, last = indices[0], indices[-1]
        contiguous = last - first + 1 == len(indices)
        return _take(self._batch, slice(first, last + 1) if contiguous else list(indices), self._rows)

    def lay_out(self, layout: Layout) -> None:
        """They are padded already."""


def _looks_like_rows(value: list[Any]) -> bool:
    if not value or len({type(item) for item in value}) > 1:
        return not value
    if not isinstance(value[0], torch.Tensor):
        return True
    return len(value) > MAX_BATCH_TENSORS and len({(item.shape, item.dtype) for item in value}) == 1


def _shape_of(task: Task, row: Any) -> Shape:
    shape = task.shape(row)
    if not isinstance(shape, (tuple, list)):
        raise TaskError(
            f"shape(row) of task {task.name} returned {shape!r}. Try: return a tuple of lengths, such as ({shape!r},)."
        )
    return tuple(shape)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return True
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_tensor, value))


def _measure(value: Any, path: str, sizes: dict[str, int]) -> None:
    """Add the first dimension of every tensor and the length of every list of texts to `sizes`, by path."""
    texts = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    if texts or (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim):
        sizes[path] = len(value)
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):  # Hugging Face's BatchEncoding is one
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    for key, part in items:
        _measure(part, f"{path}[{key!r}]", sizes)


def _take(value: Any, selection: Any, rows: int) -> Any:
    """The selected rows of every tensor and of every plain list with one item per row."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[selection] if value.ndim else value
    if isinstance(value, Mapping):
        taken = {key: _take(part, selection, rows) for key, part in value.items()}
        kind: Any = type(value)
        try:
            return kind(taken)
        except TypeError:  # a defaultdict
            return taken
    if not isinstance(value, (list, tuple)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*(_take(part, selection, rows) for part in value))
    if len(value) == rows and not _has_tensor(value):
        return value[selection] if isinstance(selection, slice) else type(value)(value[index] for index in selection)
    return type(value)(_take(part, selection, rows) for part in value)
