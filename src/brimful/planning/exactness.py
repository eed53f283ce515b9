"""May a batch of this task be cut? Told by running one batch whole and in halves, and comparing.

A loss that looks across rows (in-batch negatives, all pairs) gives another value for two halves than for the whole. At
small random weights the difference can be as little as 1e-8 (all pairs with β = 0.1), so the comparison runs in float64
and with doubled weights, which makes rows differ more; float32 serves only where the model's code insists on it. Where
the training forward is random (dropout) it cannot be compared with itself, and evaluation mode is used; BatchNorm hides
there and is found by its class.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from brimful.errors import TaskError
from brimful.memory.context import StepContext, split_batch, to_device
from brimful.memory.snapshot import Buffers
from brimful.task import loss_terms, rows_of

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Relative difference of whole and halves that rounding may cause, by the least precision used on the way; 2e-2 below."""


class NothingCounted(TaskError):
    """These rows have nothing to compare: all their labels are masked."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether a cut gives the same result, and the sentence that says so."""

    looks_across_rows: bool
    batch_norm: bool
    sentence: str

    @property
    def exact(self) -> bool:
        return not self.looks_across_rows and not self.batch_norm


def check_exactness(rig: StepContext, batch: Any, halves: Sequence[Any] | None = None) -> Exactness:
    """Compare a small batch with its two halves. Changes neither weights nor buffers.

    Halves that were collated for themselves have their own padding, and show a model that looks at it.
    """
    norms = [name for name, part in rig.model.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    across, difference = _in_best_precision(rig, [batch, *(halves or split_batch(batch, rows_of(batch) // 2))], bool(norms))
    if across:
        return Exactness(True, bool(norms), (
            f"the loss looks across rows{' or at their padding' if halves else ''}: a batch of {rows_of(batch)} and its two halves differ by "
            f"{f'{difference:.0%}' if difference > 0.01 else f'a relative {difference:.0e}'}, so cutting a step changes what "
            "is trained"
        ))  # fmt: skip
    if norms:
        which = f"{norms[0]!r}" + (f" and {len(norms) - 1} more" if len(norms) > 1 else "")
        return Exactness(
            False,
            True,
            f"BatchNorm ({which}) averages over the micro-batch, so its statistics are those of the cut and not of the global batch",
        )
    return Exactness(False, False, "a batch and its two halves give the same loss")


def _in_best_precision(rig: StepContext, parts: list[Any], has_norms: bool) -> tuple[bool, float]:
    parts = [to_device(part, rig.device) for part in parts]
    buffers = Buffers(rig.model)
    try:
        with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
            try:
                with _in_float64(rig.model, doubled=True):
                    across, difference = _compare(rig, [_as_float64(part) for part in parts], has_norms)
                if math.isfinite(difference):
                    return across, difference
                with _in_float64(rig.model):
                    return _compare(rig, [_as_float64(part) for part in parts], has_norms)
            except (RuntimeError, TypeError):  # code that mixes in float32 of its own, or a device without float64
                return _compare(rig, parts, has_norms)
    finally:
        buffers.restore()


def _compare(rig: StepContext, parts: list[Any], has_norms: bool) -> tuple[bool, float]:
    if not has_norms and not _drops_out(rig.model):
        with _mode(rig.model, training=True):
            if _value(rig, parts[:1]) == _value(rig, parts[:1]):
                return _differs(rig, parts)
    with _mode(rig.model, training=False):
        return _differs(rig, parts)


def _drops_out(model: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in model.modules())


def _differs(rig: StepContext, parts: list[Any]) -> tuple[bool, float]:
    whole, halves = _value(rig, parts[:1]), _value(rig, parts[1:])
    difference = abs(halves.mean - whole.mean) / max(abs(whole.mean), abs(halves.mean), 1e-12)
    if whole.count == halves.count and abs(halves.mean - 2 * whole.mean) <= TOLERANCE.get(whole.dtype, 2e-2) * abs(
        halves.mean
    ):
        raise TaskError(
            f"task {rig.task.name}: Loss.sum seems to be a mean, since two halves of a batch add up to twice the whole; give the "
            "sum, as from reduction='sum', or multiply the mean by the count"
        )
    return difference > TOLERANCE.get(whole.dtype, 2e-2) or whole.count != halves.count, difference


@dataclass(frozen=True, slots=True)
class _Value:
    mean: float
    count: float
    dtype: torch.dtype


def _value(rig: StepContext, parts: Any) -> _Value:
    """The mean over everything counted in these parts, and how much that was; of several terms, the sum of both."""
    with _Precisions() as precisions:
        losses = [
            loss_terms(rig.task, rig.task.loss(rig.model, part), model=rig.model, batch=part, needs_grad=False)
            for part in parts
        ]
    counts = {name: sum(float(terms[name].count) for terms in losses) for name in losses[0]}
    if any(count == 0 for count in counts.values()):
        raise NothingCounted(
            f"task {rig.task.name}: its loss counted nothing on a batch of {sum(map(rows_of, parts))} rows"
        )
    mean = sum(sum(float(terms[name].sum) for terms in losses) / count for name, count in counts.items())
    return _Value(mean, sum(counts.values()), precisions.least(next(iter(losses[0].values())).sum.dtype))


class _Precisions(TorchDispatchMode):
    """Which precisions the code used, whatever its weights have: T5 norms in float32 also when all else is float64."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self._seen.add(out.dtype)
        return out

    def least(self, own: torch.dtype) -> torch.dtype:
        return max({own, *self._seen}, key=lambda dtype: torch.finfo(dtype).eps)


def _as_float64(batch: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)


@contextmanager
def _in_float64(model: nn.Module, *, doubled: bool = False) -> Iterator[None]:
    """Weights and buffers swapped for wider copies, then swapped back: every reference to them stays valid."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    before = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            factor = 2 if doubled and isinstance(tensor, nn.Parameter) else 1
            tensor.data = tensor.data.double() * factor
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in modes:
            module.training = was
