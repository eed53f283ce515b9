"""Does splitting a batch of this task change its result? Found by running one batch whole and in halves.

A loss that looks across rows (in-batch negatives, all pairs) differs between a batch and its halves. At small random
weights the difference can be as little as 1e-8 (all pairs with β = 0.1), so the comparison runs in float64 and with
doubled weights, which makes rows differ more; float32 is used only if the model's code insists on it. A forward with
dropout cannot be compared with itself, so it runs in evaluation mode. BatchNorm does not show there and is found by its
class.

A loss that draws random numbers (the noise of diffusion) differs from itself, which says nothing about its rows. So the
batch is first compared with itself, and a random loss with its halves under the same draws for every row.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.errors import TaskError
from brimful.memory.context import StepContext, split_batch, tensors_of, to_device
from brimful.memory.snapshot import Attributes, Buffers
from brimful.task import Dataset, loss_terms, map_tensors, rows_of, weighted_by_rows

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Relative difference that rounding may cause, by the lowest precision that was used; 2e-2 for lower ones."""
LOOKED_AT = 256
"""Rows of the data among which those to compare are chosen."""
DRAWS = frozenset({
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal_", "uniform_", "random_", "bernoulli_",
    "exponential_", "log_normal_", "cauchy_", "geometric_",
})  # fmt: skip
"""torch's operations whose numbers depend on nothing but the generator. Others, such as `multinomial`, see the rows."""


class NothingCounted(TaskError):
    """These rows cannot be compared, because all their labels are masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Whether a split gives the same result, and why."""

    looks_across_rows: bool = False
    batch_norm: bool = False
    unequal_rows: bool = False
    """The loss is a plain mean in which rows count differently, so weighting micro-batches by their rows changes it."""
    random: bool = False
    """The loss draws random numbers and looks at rows one by one: a split is the same in distribution."""
    comparable: bool = True
    """False if the same batch gives another loss each time, so that nothing is known."""
    reason: str

    @property
    def exact(self) -> bool:
        """The same result from a split, or the same in distribution where the loss is random."""
        return not self.looks_across_rows and not self.batch_norm and self.comparable


def check_exactness(context: StepContext, batch: Any, halves: Sequence[Any] | None = None) -> Exactness:
    """Compare a small batch with its two halves. Weights, buffers, and attributes of model and task stay as they are.

    What the code keeps in global variables or closures cannot be restored. The caller restores random state.

    Halves that were collated by themselves have their own padding, and show a model that looks at padding.
    """
    norms = [name for name, part in context.model.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    parts = [batch, *(halves or split_batch(batch, rows_of(batch) // 2))]
    result = _in_best_precision(context, parts, bool(norms))
    share = f"{result.difference:.0%}" if result.difference > 0.01 else f"{result.difference:.0e} (relative)"
    if not result.comparable:
        reason = (
            f"the same {rows_of(batch)} rows give another loss at each call, so halves cannot be compared with them"
        )
        return Exactness(comparable=False, batch_norm=bool(norms), reason=reason)
    if result.unequal_rows:
        reason = f"the loss is a plain mean weighted by rows, and a batch and its two halves differ by {share}"
        return Exactness(unequal_rows=True, batch_norm=bool(norms), reason=reason)
    if result.differs:
        other = ", or is a sum instead of a mean" if result.like_sum else " or at their padding" if halves else ""
        reason = f"the loss looks across rows{other}: {rows_of(batch)} rows and their two halves differ by {share}"
        return Exactness(looks_across_rows=True, batch_norm=bool(norms), reason=reason)
    if norms:
        more = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
        reason = f"BatchNorm ({norms[0]!r}{more}) averages over the micro-batch instead of the global batch"
        return Exactness(batch_norm=True, reason=reason)
    mean = "; the loss is a plain mean, weighted by rows" if result.plain_mean else ""
    if result.random:
        reason = (
            f"the loss draws random numbers; if they are the same, so is the loss of a batch and its two halves{mean}"
        )
        return Exactness(random=True, reason=reason)
    return Exactness(reason=f"a batch and its two halves give the same loss{mean}")


def check_rows(context: StepContext, rows: Dataset, count: int) -> Exactness:
    """The same for real rows of different lengths. The shorter ones are collated apart from the longer ones."""
    task, every = context.task, max(1, len(rows) // LOOKED_AT)
    some = sorted((rows[index] for index in range(0, len(rows), every)), key=lambda row: sum(task.shape(row)))
    some = some[: max(count, len(some) // 2)]  # in float64 the longest rows could take more memory than the step
    count = min(count, len(some))
    some = [some[place * (len(some) - 1) // (count - 1)] for place in range(count)]
    whole, half = task.collate(some), count // 2
    if not all(map(torch.equal, tensors_of(whole), tensors_of(task.collate(some)))):
        return check_exactness(context, whole)  # this collate draws random numbers: slices of one batch are compared
    return check_exactness(context, whole, [task.collate(some[:half]), task.collate(some[half:])])


@dataclass(frozen=True, slots=True)
class _Result:
    """A batch compared with its halves."""

    differs: bool
    difference: float
    plain_mean: bool
    unequal_rows: bool = False
    like_sum: bool = False
    """A plain number whose two halves add up to the whole."""
    random: bool = False
    comparable: bool = True


def _in_best_precision(context: StepContext, parts: list[Any], has_norms: bool) -> _Result:
    parts = [to_device(part, context.device) for part in parts]
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        try:
            with _put_back(context), _in_float64(context.model, doubled=True):
                result = _compare(context, [_as_float64(part) for part in parts], has_norms)
            if math.isfinite(result.difference):
                return result
            with _put_back(context), _in_float64(context.model):
                return _compare(context, [_as_float64(part) for part in parts], has_norms)
        except (RuntimeError, TypeError):  # code that mixes in float32 of its own, or a device without float64
            with _put_back(context):
                return _compare(context, parts, has_norms)


@contextmanager
def _put_back(context: StepContext) -> Iterator[None]:
    """Buffers and attributes are afterwards as before: a table that a forward caches has the precision of the check."""
    model = context.model
    buffers, attributes = Buffers(model), Attributes(context.task, *model.modules(), excluding=model.buffers())
    try:
        yield
    finally:
        attributes.restore()
        buffers.restore()


def _compare(context: StepContext, parts: list[Any], has_norms: bool) -> _Result:
    if not has_norms and not _has_dropout(context.model):
        with _mode(context.model, training=True):
            if _value(context, parts[:1]) == _value(context, parts[:1]):
                return _difference(context, parts)
    with _mode(context.model, training=False):
        if _value(context, parts[:1]) == _value(context, parts[:1]):
            return _difference(context, parts)
        draws = _SameDraws()
        try:
            one, other = _value(context, parts[:1], draws), _value(context, parts[:1], draws)
            difference = _relative(one, other)
            if difference > _tolerance(one):
                return _Result(False, difference, one.plain_mean, comparable=False)
            return replace(_difference(context, parts, draws), random=draws.used)
        except NothingCounted:
            if not draws.used:
                raise
            # Every row drew the same mask, which happened to cover nothing or all of them.
            return _Result(False, 0.0, False, comparable=False)


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in model.modules())


def _difference(context: StepContext, parts: list[Any], draws: "_SameDraws | None" = None) -> _Result:
    whole, halves = _value(context, parts[:1], draws), _value(context, parts[1:], draws)
    difference = _relative(whole, halves)
    tolerance, same_count = _tolerance(whole), whole.count == halves.count
    if same_count and abs(halves.mean - 2 * whole.mean) <= tolerance * abs(halves.mean):
        raise TaskError(
            f"task {context.task.name}: Loss.sum seems to be a mean, since two halves of a batch add up to twice the "
            "whole. Try: return the sum, as with reduction='sum', or (mean, count)."
        )
    if difference <= tolerance and same_count:
        return _Result(False, difference, whole.plain_mean)
    unequal = whole.plain_mean and _is_weighted_mean(context, parts[0], 10 * tolerance, draws)
    like_sum = whole.plain_mean and abs(whole.mean - 2 * halves.mean) <= tolerance * abs(whole.mean)
    return _Result(not unequal, difference, whole.plain_mean, unequal, like_sum)


def _is_weighted_mean(context: StepContext, batch: Any, tolerance: float, draws: "_SameDraws | None") -> bool:
    """Whether the loss is a mean of its rows with some weights, such as their tokens, so that no row sees another.

    Of three groups of rows, the means of two pairs give the weights, and those must give the mean of all three.
    """
    count = rows_of(batch)
    if count < 3:
        return False

    def mean(first: int, last: int) -> float:
        start, end = (count * third // 3 for third in (first, last))
        part = map_tensors(batch, lambda tensor: tensor[start:end] if tensor.ndim else tensor)
        return _value(context, [part], draws).mean

    def weight(own: float, other: float, both: float) -> float:
        """The weight of a group relative to another, from the mean of both."""
        return (both - other) / (own - both) if own != both else -1.0

    a, b, c = mean(0, 1), mean(1, 2), mean(2, 3)
    of_a, of_c = weight(a, b, mean(0, 2)), weight(c, b, mean(1, 3))
    if of_a <= 0 or of_c <= 0:
        return False
    predicted, actual = (of_a * a + b + of_c * c) / (of_a + 1 + of_c), mean(0, 3)
    return abs(predicted - actual) <= tolerance * max(abs(predicted), abs(actual))


@dataclass(frozen=True, slots=True)
class _Value:
    mean: float
    count: float
    dtype: torch.dtype
    plain_mean: bool


def _relative(one: _Value, other: _Value) -> float:
    return abs(other.mean - one.mean) / max(abs(one.mean), abs(other.mean), 1e-12)


def _tolerance(value: _Value) -> float:
    return TOLERANCE.get(value.dtype, 2e-2)


def _value(context: StepContext, parts: list[Any], draws: "_SameDraws | None" = None) -> _Value:
    """The mean over everything counted in these parts, and the count; of several terms, the sum of both."""
    task, model = context.task, context.model
    with _Precisions() as precisions:
        values = []
        for part in parts:
            with draws or nullcontext():
                values.append(task.loss(model, part))
        pairs = list(zip(values, parts, strict=True))
        losses = [loss_terms(task, value, model=model, batch=part, needs_grad=False) for value, part in pairs]
    counts = {name: sum(float(terms[name].count) for terms in losses) for name in losses[0]}
    if any(count == 0 for count in counts.values()):
        raise NothingCounted(f"task {task.name}: loss() counted nothing in {sum(map(rows_of, parts))} rows.")
    mean = sum(sum(float(terms[name].sum) for terms in losses) / count for name, count in counts.items())
    plain_mean = weighted_by_rows(values[0], model=model, batch=parts[0])
    return _Value(mean, sum(counts.values()), precisions.least(next(iter(losses[0].values())).sum.dtype), plain_mean)


class _Precisions(TorchDispatchMode):
    """Which precisions the code used: T5 normalises in float32 even if all its weights are float64."""

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


class _SameDraws(TorchDispatchMode):
    """Gives all rows the same random numbers, in a batch as in its halves.

    Of the n-th draw in the first loss, one number is kept for each place of the last dimension, and the n-th draw in
    every loss repeats them. A draw of one dimension repeats a single number, since that dimension may be the rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[list[Any], torch.Tensor]] = []
        self._next = 0

    @property
    def used(self) -> bool:
        return bool(self._kept)

    def __enter__(self) -> "_SameDraws":
        self._next = 0
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in DRAWS or out.numel() == 0:
            return out
        bounds = [arg for arg in args if isinstance(arg, (int, float))]
        width = out.shape[-1] if out.ndim > 1 else 1
        if self._next == len(self._kept):
            self._kept.append((bounds, out.reshape(-1)[:width].clone()))
        kept_bounds, kept = self._kept[self._next]
        self._next += 1
        if bounds != kept_bounds:  # such as the index of another row, which must stay below the number of rows
            return out
        return out.copy_(kept[torch.arange(width, device=kept.device) % len(kept)])


def _as_float64(batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


@contextmanager
def _in_float64(model: nn.Module, *, doubled: bool = False) -> Iterator[None]:
    """Swap weights and buffers for wider copies and back. Every reference to them stays valid."""
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
