"""The rows of one step, whatever they came as, and any subset of them as a batch.

A **list of rows** is collated per micro-batch, so each is padded to its own longest row. A **batch** (a tensor, or any
tree of tensors with one first dimension) is sliced, and with it every list of that length in it: a column of texts or file
names. A list is taken for rows, with one exception: without a task or a `collate` of the user's,
`[inputs, targets]` as a DataLoader gives it is a batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from brimful.data.reader import StepRows
from brimful.errors import TaskError
from brimful.task import Shape, Task

A_FEW = 4
"""Up to so many tensors of one shape in a list are a batch of inputs and targets; more of them are rows."""


class Rows(Protocol):
    """What a step is made of."""

    shapes: list[Shape]
    groups: list[list[int]] | None
    """Micro-batches that a loader made ahead; they may be cut further and not be joined. None: any cut will do."""
    collates: bool
    """Whether a batch is made of its rows anew each time, or sliced from one that is there."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Any:
        """These rows as one batch, on the host or wherever they were given."""


def as_rows(given: Any, task: Task, shape: Shape, *, is_rows: bool) -> Rows:
    """What the user handed to a step. `shape` serves for rows that do not tell theirs; `is_rows`: a list is always rows."""
    if isinstance(given, StepRows):
        return Ahead(given, task)
    if isinstance(given, list) and (is_rows or _looks_like_rows(given)):
        return Listed(given, task, shape)
    return Batch(given, task, shape)


class Ahead:
    """Micro-batches that a `Loader` read and cut. Collated, a row is as long as what it is padded to."""

    def __init__(self, given: StepRows, task: Task) -> None:
        self.groups: list[list[int]] | None = given.groups
        self.step_rows = given.step_rows
        self.shapes: list[Shape] = [()] * len(given)
        self._place = dict[int, tuple[int, int]]()
        self.collates = not given.collated
        kind = Batch if given.collated else Listed
        self._parts = [kind(part, task, shape) for part, shape in zip(given.parts, given.shapes, strict=True)]
        for number, (group, part) in enumerate(zip(given.groups, self._parts, strict=True)):
            for position, row in enumerate(group):
                self.shapes[row], self._place[row] = part.shapes[position], (number, position)
        if self.collates and len(given.groups) == 1:
            self.groups = None  # nobody has cut: any cut will do

    def __len__(self) -> int:
        return len(self.shapes)

    def batch(self, indices: Sequence[int]) -> Any:
        numbers = {self._place[index][0] for index in indices}
        assert len(numbers) == 1, "rows of two micro-batches cannot be joined"
        return self._parts[numbers.pop()].batch([self._place[index][1] for index in indices])


class Listed:
    """A list of rows, collated per micro-batch."""

    groups: list[list[int]] | None = None
    collates = True

    def __init__(self, rows: list[Any], task: Task, shape: Shape) -> None:
        if not rows:
            raise TaskError("a step was given no rows: its list is empty")
        self._rows, self._task = rows, task
        tells = type(task).shape is not Task.shape
        self.shapes = [_shape_of(task, row) for row in rows] if tells else [shape] * len(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int]) -> Any:
        return self._task.collate([self._rows[index] for index in indices])


class Batch:
    """A batch that is there already, sliced along its first dimension."""

    groups: list[list[int]] | None = None
    collates = False

    def __init__(self, batch: Any, task: Task, shape: Shape) -> None:
        if not isinstance(batch, (torch.Tensor, np.ndarray, Mapping, list, tuple)):
            raise TaskError(
                f"task {task.name}: a step takes a list of rows, or a batch of tensors; this is a {type(batch).__name__}, which cannot "
                "be cut: give it one batch of your loader at a time"
            )
        sizes: dict[str, int] = {}
        _measure(batch, "", sizes)
        if len(set(sizes.values())) != 1 or not _has_tensor(batch):
            found = ", ".join(f"{name or 'the batch'} has {size}" for name, size in sizes.items()) or "there are none"
            raise TaskError(
                f"task {task.name}: a batch cannot be cut unless all its tensors share their first dimension; here {found}: give "
                "such a batch, or a list of rows and a collate"
            )
        self._batch, self._rows = batch, next(iter(sizes.values()))
        if self._rows == 0:
            raise TaskError("a step was given no rows: its batch has a first dimension of 0")
        self.shapes = [shape] * self._rows

    def __len__(self) -> int:
        return self._rows

    def batch(self, indices: Sequence[int]) -> Any:
        first, last = indices[0], indices[-1]
        whole = len(indices) == self._rows
        run: Any = slice(first, last + 1) if last - first + 1 == len(indices) else list(indices)
        return self._batch if whole else _take(self._batch, run, self._rows)


def _looks_like_rows(given: list[Any]) -> bool:
    if not given or len({type(item) for item in given}) > 1:
        return not given
    if not isinstance(given[0], torch.Tensor):
        return True
    return len(given) > A_FEW and len({(item.shape, item.dtype) for item in given}) == 1


def _shape_of(task: Task, row: Any) -> Shape:
    shape = task.shape(row)
    if not isinstance(shape, (tuple, list)):
        raise TaskError(
            f"task {task.name}: shape(row) returned {shape!r}; return a tuple of lengths, such as ({shape!r},)"
        )
    return tuple(shape)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a container with their keys."""
    if isinstance(value, Mapping):  # Hugging Face's BatchEncoding is one
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


def _is_column(value: Any, rows: int) -> bool:
    """As many things as there are rows, and no tensor in any of them."""
    plain = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    return plain and len(value) == rows and not _has_tensor(value)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return True
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_tensor, value))


def _measure(value: Any, path: str, sizes: dict[str, int]) -> None:
    texts = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    if texts or (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim):
        sizes[path] = len(value)
    for key, part in _parts(value):
        _measure(part, f"{path}[{key!r}]", sizes)


def _take(value: Any, run: Any, rows: int) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[run] if value.ndim else value
    if _is_column(value, rows):
        return value[run] if isinstance(run, slice) else type(value)(value[index] for index in run)
    if isinstance(value, Mapping):
        return _like(value, {key: _take(part, run, rows) for key, part in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_take(part, run, rows) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_take(part, run, rows) for part in value)
    return value


def _like(given: Mapping[Any, Any], taken: dict[Any, Any]) -> Any:
    """A mapping of the same kind, where it can be made from a plain one."""
    kind: Any = type(given)
    try:
        return kind(taken)
    except TypeError:  # a defaultdict
        return taken
