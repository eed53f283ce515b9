"""Rows on their way through Hugging Face's Trainer: uncollated, with their lengths, until a whole step of them is together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader

from brimful.errors import BadOption
from brimful.plan.plan import Plan
from brimful.task import Shape


class Lengths:
    """The lengths of a row: those of its columns, a column left out that is as long as one before it in every row."""

    def __init__(self, taken: Sequence[str] | None, shape: Callable[[Any], Shape] | None, plan: Plan | None) -> None:
        self._taken, self._shape, self._plan = taken, shape, plan
        self._columns: list[Any] | None = None

    def of(self, row: Any) -> Shape:
        if self._shape is not None:
            return tuple(self._shape(row))
        sizes = self._sizes(row)
        return tuple(sizes.get(column, 0) for column in self._columns or sizes)

    def settle(self, rows: Any) -> None:
        """Once, on the rows of the first step; the cut's limits would mean something else if columns changed later."""
        if self._columns is not None or self._shape is not None or not isinstance(rows, list):
            return
        sizes = [self._sizes(row) for row in rows]
        seen: dict[tuple[int, ...], Any] = {}
        for column in dict.fromkeys(column for one in sizes for column in one):
            seen.setdefault(tuple(one.get(column, 0) for one in sizes), column)
        self._columns = list(seen.values())
        plan = self._plan
        if plan is not None and len(plan.shape) != len(self._columns):
            found = ", ".join(map(str, self._columns)) or "none"
            raise BadOption(
                f"the plan knows rows by {len(plan.shape)} lengths, these rows have {len(self._columns)} ({found}): pass "
                "exact(…, plan=plan, shape=task.shape) with the task that was fitted"
            )

    def _sizes(self, row: Any) -> dict[Any, int]:
        if isinstance(row, Mapping):
            values = {key: value for key, value in row.items() if self._taken is None or key in self._taken}
        else:
            values = dict(enumerate(row)) if isinstance(row, (list, tuple)) else {0: row}
        sizes = {key: size_of(value) for key, value in values.items()}
        return {key: size for key, size in sizes.items() if size is not None}


class HeldRows:
    """Rows of the dataset on their way through Trainer: accelerate moves no part of them to the device."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __contains__(self, name: object) -> bool:
        return False  # Trainer looks for labels, to count them


class Later:
    """A loader's collate function that leaves collating to the stepper."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> HeldRows:
        return HeldRows(rows)


def collate_later(loader: Any) -> Callable[[list[Any]], Any]:
    """Make the loader hand over rows, and return what it collated them with; a loader that cannot is left as it is."""
    inner = getattr(loader, "base_dataloader", loader)  # inside accelerate's
    if isinstance(loader, DataLoaderDispatcher) or not isinstance(inner, DataLoader) or not inner._auto_collation:
        return list
    if not isinstance(inner.collate_fn, Later):  # your own loader may come a second time
        inner.collate_fn = Later(inner.collate_fn)
    return inner.collate_fn.collate


def joined(held: list[Any]) -> Any:
    """What the requests of one step brought, as one list of rows; or as one batch, where the loader collates."""
    if all(isinstance(one, HeldRows) for one in held):
        return [row for one in held for row in one.rows]
    return held[0] if len(held) == 1 else _concatenated(held)


def _concatenated(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Mapping):
        kind: Any = type(first)
        return kind({key: _concatenated([batch[key] for batch in batches]) for key in first})
    if isinstance(first, torch.Tensor) and first.ndim and len({batch.shape[1:] for batch in batches}) == 1:
        return torch.cat(batches)
    raise BadOption(
        "the train dataloader collates by itself, and the batches of one step cannot be joined: set "
        "gradient_accumulation_steps=1 with the whole step as per_device_train_batch_size, pad to one length, or use a "
        "torch DataLoader over rows"
    )


def size_of(value: Any) -> int | None:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(np.prod(value.shape)) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple, str)) else None
