"""Does splitting a batch of this task change its result? Found by running one batch whole and in halves.

Gradients and buffers are compared, in training mode: the loss alone does not show a power iteration that runs once in
every forward, or a hook that clamps gradients. A loss that looks across rows (in-batch negatives, all pairs) can differ by
as little as 1e-8 at small random weights, so the comparison runs in float64 and with doubled weights, which makes rows
differ more; float32 is used only if the model's code insists on it. BatchNorm is found by its class and runs in
evaluation mode, since it would hide everything else.

Dropout, and a loss that draws random numbers (the noise of diffusion), differ from themselves, which says nothing about
rows. So every run is given the same draws for every row. Where that does not help, evaluation mode is tried.

Copies of all weights in float64 take 64 GB of an 8B model. Where they would take more than half of what is free, the weights
stay in their own precision, rows are few and short, and the tolerances are those of that precision.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.errors import TaskError
from brimful.machine.host import Host
from brimful.memory.context import StepContext, attention_kernels, split_batch, tensors_of, to_device
from brimful.memory.layout import PACKED, FixedSize, PackedLayout
from brimful.memory.meter import allocated_bytes, available_bytes
from brimful.memory.oom import is_oom
from brimful.memory.snapshot import Attributes, Buffers
from brimful.packing.attention import has_kernels, without_kernels
from brimful.task import (
    SAME_COUNT,
    Dataset,
    Task,
    check_counts,
    loss_terms,
    map_tensors,
    rows_of,
    shared_rows,
    weighted_by_rows,
)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Relative difference that rounding may cause, by the lowest precision that was used; 2e-2 for lower ones."""
GRADIENT_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""The same for gradients and buffers; 0.1 for lower precisions."""
PACKING_TOLERANCE, ROUNDED_PACKING_TOLERANCE = 1e-3, 0.05
"""Relative difference between packed rows and the same rows alone that rounding may cause, in fp32 and in half precision. A leak
is 0.1 and more."""
KERNEL_TOLERANCE, KERNEL_LEAK_TOLERANCE = 0.2, 0.01
"""Between the kernels and torch's own operations, both in half precision: eight families of two layers differ by 0.003 to 0.03. And
between packed rows and the same rows alone, both with the kernels and in sequences of one size, which leaves nothing but the rounding
of the gradients' sums: at most 0.002 in eight families, with 2 or 16 layers. Where each row sees one token of the row before it, GPT-2
as initialised differs by 0.03 and all others by more; in full attention to that row, by 0.03 and more."""
COPIES_SHARE, ROWS_SHARE = 0.5, 0.4
"""What copies of the weights, and the activations of rows, may take of the memory that is free."""
LOOKED_AT = 256
"""Rows of the data among which those to compare are chosen."""
PROJECTED = 1 << 22
"""Elements of a gradient that are projected at once."""
DRAWS = frozenset({
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal_", "uniform_", "random_", "bernoulli_",
    "exponential_", "log_normal_", "cauchy_", "geometric_",
})  # fmt: skip
"""torch's operations whose numbers depend on nothing but the generator. Others, such as `multinomial`, see the rows."""
WRONG_COUNT = "return the output of model(**batch), or count labels[:, 1:] if the model shifts labels, "
"""For a mean over something else than its count, which is mostly that of a Hugging Face causal model."""


class NothingCounted(TaskError):
    """These rows cannot be compared, because all their labels are masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Whether a split gives the same result, and why."""

    looks_across_rows: bool = False
    batch_norm: bool = False
    depends_on_split: bool = False
    """The forward changes something that the next one uses, or hooks change parts of a gradient."""
    unequal_rows: bool = False
    """The loss is a mean in which rows do not count as micro-batches are weighted, so a split changes it."""
    random: bool = False
    """The loss draws random numbers and looks at rows one by one: a split is the same in distribution."""
    comparable: bool = True
    """False if the same batch gives another loss each time, so that nothing is known."""
    reason: str
    remedy: str = ""
    """The likely mistake in the user's loss, as the start of a list of things to try; empty if none is known."""

    @property
    def exact(self) -> bool:
        """The same result from a split, or the same in distribution where the loss is random."""
        return not (self.looks_across_rows or self.batch_norm or self.depends_on_split) and self.comparable


def check_exactness(
    context: StepContext,
    batch: Any,
    halves: Sequence[Any] | None = None,
    *,
    name: str | None = None,
    gradients: bool = True,
) -> Exactness:
    """Compare a small batch with its two halves. Weights, buffers, and attributes of model and task stay as they are.

    What the code keeps in global variables or closures cannot be restored. The caller restores random state.

    Halves that were collated by themselves have their own padding, and show a model that looks at padding. `name` is how
    the reason calls the rows. Without `gradients` only losses and buffers are compared, in the precision of the weights, which takes
    next to no memory beside them.
    """
    norms = _batch_norms(context.model)
    rows = name or f"{rows_of(batch)} rows"
    parts = [batch, *(halves or split_batch(batch, rows_of(batch) // 2))]
    result = _in_best_precision(context, parts, [part for _, part in norms], gradients=gradients)
    share = _share(result.difference)
    if not result.comparable:
        reason = f"the same {rows} give another loss at each call, so halves cannot be compared with them"
        if math.isnan(result.difference):
            reason = f"the loss of {rows} is NaN or inf, so halves cannot be compared with them"
        return Exactness(comparable=False, batch_norm=bool(norms), reason=reason)
    if result.unequal_rows and result.plain_mean:
        reason = f"the loss is a plain mean weighted by rows, and {rows} and their two halves differ by {share}"
        return Exactness(unequal_rows=True, batch_norm=bool(norms), reason=reason)
    if result.unequal_rows:
        cause = "the loss looks across rows, or its mean runs over something else than its count"
        reason = f"{cause}: {rows} and their two halves differ by {share}"
        return Exactness(looks_across_rows=True, batch_norm=bool(norms), reason=reason, remedy=WRONG_COUNT)
    if result.differs:
        other = ", or is a sum instead of a mean" if result.like_sum else " or at their padding" if halves else ""
        reason = f"the loss looks across rows{other}: {rows} and their two halves differ by {share}"
        return Exactness(looks_across_rows=True, batch_norm=bool(norms), reason=reason)
    if norms:
        return Exactness(batch_norm=True, reason=batch_norm_reason(context.model))
    if change := result.change or _hook_after_accumulation(context):
        return Exactness(depends_on_split=True, reason=change)
    mean = "; the loss is a plain mean, weighted by rows" if result.plain_mean else ""
    if result.random:
        reason = (
            f"the loss draws random numbers; if they are the same, so is the loss of {rows} and their two halves{mean}"
        )
        return Exactness(random=True, reason=reason)
    return Exactness(reason=f"{rows} and their two halves give the same {result.compared}{mean}")


def batch_norm_reason(model: nn.Module) -> str:
    """What a split changes in a model with BatchNorm; empty for others."""
    norms = _batch_norms(model)
    if not norms:
        return ""
    more = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
    return f"BatchNorm ({norms[0][0]!r}{more}) averages over the micro-batch instead of the global batch"


def _batch_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [part for part in model.named_modules() if isinstance(part[1], nn.modules.batchnorm._BatchNorm)]


def check_rows(context: StepContext, rows: Dataset, count: int, most_tokens: int | None = None) -> Exactness:
    """The same for real rows of different lengths. The shorter ones are collated apart from the longer ones."""
    task, some = context.task, rows_to_compare(context.task, rows, count, most_tokens)
    count = len(some)
    lengths = ["+".join(map(str, task.shape(row))) for row in (some[0], some[-1])] if task.has_shape else []
    name = f"{count} rows of the data" + (f" (lengths {lengths[0]} to {lengths[1]})" if any(lengths) else "")
    whole, half = task.collate(some), count // 2
    if not all(map(torch.equal, tensors_of(whole), tensors_of(task.collate(some)))):
        # this collate draws random numbers: slices of one batch are compared
        return check_exactness(context, whole, name=name)
    return check_exactness(context, whole, [task.collate(some[:half]), task.collate(some[half:])], name=name)


def rows_to_compare(task: Task, rows: Dataset, count: int, most_tokens: int | None = None) -> list[Any]:
    """Up to `count` rows of different lengths, the shortest first; not the longest, which may not fit in full precision.

    Padded side by side they have at most `most_tokens`, if two rows of the data do.
    """
    count = min(count, len(rows))
    looked_at = min(LOOKED_AT, len(rows)) if task.has_shape else count
    some = [rows[place * (len(rows) - 1) // max(1, looked_at - 1)] for place in range(looked_at)]
    some = sorted(some, key=lambda row: sum(task.shape(row))) if task.has_shape else some
    some = some[: max(count, len(some) // 2)]
    if most_tokens is not None and task.has_shape:
        count = min(count, max(2, most_tokens // max(1, sum(task.shape(some[0])))))
        fitting = [row for row in some if count * sum(task.shape(row)) <= most_tokens]
        some = fitting if len(fitting) >= count else some[:count]
    return [some[place * (len(some) - 1) // max(1, count - 1)] for place in range(count)]


def check_dummy(context: StepContext, batch: Any) -> Exactness:
    """The same for a batch of `task.dummy`, whose rows are all equally long. Labels, if it has any, are made to differ.

    Without data it is unknown whether lengths differ, so a mean that is wrong only then is warned about and not refused.
    """
    count, has_lengths = rows_of(batch), bool(context.task.worst_shape)
    equal = check_exactness(context, batch, name=f"{count} dummy rows{', all equally long,' if has_lengths else ''}")
    masked = _with_unequal_labels(batch)
    if masked is None or not equal.exact or equal.unequal_rows:
        return equal
    try:
        unequal = check_exactness(context, masked, name=f"{count} dummy rows with unequal numbers of labels")
    except Exception as error:
        if is_oom(error):
            raise
        return equal  # a loss that knows no masked labels
    if unequal.looks_across_rows:
        reason = f"{equal.reason}, but where rows have unequal numbers of labels {unequal.reason}"
        return Exactness(unequal_rows=True, reason=reason)
    return unequal


def check_packing(context: StepContext, rows: Sequence[Any]) -> str:
    """Why these rows must not be packed; empty if packed they have the loss and the gradient that each has alone.

    Runs in the precision of the weights, without dropout, and in at least fp32 if there is room for that. In full precision that is
    attention without the kernels, so the proof is of task and model.
    """
    task, model = context.task, context.model
    half = any(param.dtype in (torch.bfloat16, torch.float16) for param in model.parameters())
    widened = (
        _copied_weights(context, torch.float32) if half and _copies_fit(context, torch.float32) else nullcontext()
    )  # bf16 differs by 1 % after rounding alone
    with _put_back(context), widened, _mode(model, [], training=False), attention_kernels(cudnn=False):
        packed = _sum_and_gradient(context, [PACKED.collate(task, rows)])
        alone = _sum_and_gradient(context, (task.collate([row]) for row in rows))
    if packed.count != alone.count:
        return f"packed, {len(rows)} rows count {packed.count:g} instead of {alone.count:g}"
    apart = _apart(packed, alone)
    rounded = {packed.precision, alone.precision} & {torch.bfloat16, torch.float16}  # weights of 4 bits compute in bf16
    if apart <= (ROUNDED_PACKING_TOLERANCE if rounded else PACKING_TOLERANCE):
        return ""
    return f"packed rows see each other: {len(rows)} of them and the same rows alone differ by {_share(apart)}"


def check_kernels(context: StepContext, rows: Sequence[Any]) -> str:
    """Why the kernels for packed rows must not be used with this model on this card; empty if they run, keep rows apart, and give the
    loss and the gradient of torch's own operations. Without dropout, in the precision of training; also empty where there are none.
    """
    weights = (param.dtype for param in context.params if param.is_floating_point())
    if not has_kernels(context.device, context.autocast or next(weights, torch.float32)):
        return ""
    task, forward = context.task, context.forward_context
    layout = PackedLayout(FixedSize(PACKED.sizes([tuple(task.shape(row)) for row in rows]), len(rows)))
    with _put_back(context), _mode(context.model, [], training=False), attention_kernels(cudnn=False):
        found = _sum_and_gradient(context, [layout.collate(task, rows)], forward)
        alone = _sum_and_gradient(context, (layout.collate(task, [row]) for row in rows), forward)
        with without_kernels():
            plain = _sum_and_gradient(context, [layout.collate(task, rows)], forward)
    if (apart := _apart(found, plain)) > KERNEL_TOLERANCE:
        return f"the kernels for packed rows differ by {_share(apart)} from torch's own operations"
    if (apart := _apart(found, alone)) > KERNEL_LEAK_TOLERANCE:
        return f"with the kernels packed rows see each other: {len(rows)} of them and the same rows alone differ by {_share(apart)}"
    return ""


def _apart(packed: "_SumAndGradient", other: "_SumAndGradient") -> float:
    """The relative difference of losses or of gradients, whichever is larger; infinite if one of them is no number."""
    apart = abs(packed.total - other.total) / max(abs(other.total), 1e-12)
    if packed.gradient is not None and other.gradient is not None:
        norm = math.sqrt(float(packed.gradient[1].sum()))  # that of one batch: squares of several do not add up
        apart = max(apart, float((packed.gradient[0] - other.gradient[0]).norm()) / max(norm, 1e-12))
    return apart if math.isfinite(apart) else math.inf


@dataclass(frozen=True, slots=True)
class _SumAndGradient:
    total: float
    count: float
    gradient: torch.Tensor | None
    """As `_Projection` reads it: gradients of all weights, three times, would not fit beside the optimizer's state."""
    precision: torch.dtype
    """The lowest that was used."""


def _sum_and_gradient(
    context: StepContext, batches: Iterable[Any], forward: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> _SumAndGradient:
    """Of the loss over these batches, as a sum. The loss is computed inside `forward()`."""
    task, model, projection, precisions = context.task, context.model, _Projection(context.params), _Precisions()
    total, count = 0.0, 0.0
    for batch in batches:
        batch = to_device(batch, context.device)
        with precisions, forward():
            terms = loss_terms(task, task.loss(model, batch), model=model, batch=batch).values()
            summed = torch.stack([term.sum for term in terms]).sum()
        total, count = total + float(summed.detach()), count + sum(float(term.count) for term in terms)
        projection.add(summed)
        dtype = summed.dtype
        del terms, summed
    return _SumAndGradient(total, count, projection.read(), precisions.least(dtype))


def tokens_that_fit(context: StepContext, token_bytes: float) -> int:
    """Tokens of rows that the checks above have room for. In a training step, each takes `token_bytes` of activations."""
    wide = torch.float64 if _copies_fit(context, torch.float64) and not _is_quantized(context) else torch.float32
    wider = wide.itemsize / (context.autocast or torch.float32).itemsize
    return int(ROWS_SHARE * _room_bytes(context.device) / (wider * token_bytes))


def _room_bytes(device: torch.device) -> int:
    """What may still be allocated; where that is unknown, half of the RAM that is available."""
    available = available_bytes(device)
    if available is None:
        return Host.detect().ram_available_bytes // 2
    return max(0, available - (allocated_bytes(device) or 0))


def _copies_fit(context: StepContext, dtype: torch.dtype | None = None) -> bool:
    """Whether there is room for `_copied_weights`."""
    copies = sum(one.numel() * (dtype or one.dtype).itemsize for one in _float_tensors(context))
    return copies <= COPIES_SHARE * _room_bytes(context.device)


def _is_quantized(context: StepContext) -> bool:
    """Whether layers hold whole numbers, as in 4 or 8 bits. They compute in half precision, so that a float64 around them only
    takes time: the head of an 8B model alone 16 TFLOP a pass."""
    return any(param.dtype in (torch.uint8, torch.int8) for param in context.model.parameters())


def _with_unequal_labels(batch: Any) -> Any:
    """The batch with some labels of its later rows masked, as in Hugging Face's; None if it has no labels to mask."""
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim < 2 or labels.shape[1] < 4:
        return None
    masked = labels.clone()
    for row in range(len(labels)):
        masked[row, labels.shape[1] - row * labels.shape[1] // (2 * len(labels)) :] = -100
    return type(batch)({**batch, "labels": masked})


def _hook_after_accumulation(context: StepContext) -> str:
    """The check does not run these: an optimizer may step in them."""
    names = {param: name for name, param in context.model.named_parameters()}
    hooked = [names.get(param, "") for param in context.params if getattr(param, "_post_accumulate_grad_hooks", None)]
    if not hooked:
        return ""
    return f"a hook on {hooked[0]!r} runs after every micro-batch and sees part of the gradient"


def _share(difference: float) -> str:
    if not math.isfinite(difference):
        return "nan"
    return f"{difference:.0%}" if difference > 0.01 else f"{difference:.0e} (relative)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A batch compared with its halves."""

    differs: bool = False
    difference: float = 0.0
    plain_mean: bool = False
    unequal_rows: bool = False
    """Rows do not see each other, but count for something else than the loss says."""
    like_sum: bool = False
    """A plain number whose two halves add up to the whole."""
    change: str = ""
    """What a split changes although rows do not see each other."""
    compared: str = "gradients"
    random: bool = False
    comparable: bool = True


def _in_best_precision(context: StepContext, parts: list[Any], norms: list[nn.Module], *, gradients: bool) -> _Result:
    parts = [to_device(part, context.device) for part in parts]
    with torch.set_grad_enabled(gradients), torch.backends.cudnn.flags(allow_tf32=False):
        if not gradients:
            return _compare(context, parts, norms)
        widens = _copies_fit(context, torch.float64) and not _is_quantized(context)
        for factor in (2, 1) if widens else ():
            try:
                with _copied_weights(context, torch.float64, factor):
                    result = _compare(context, [_as_float64(part) for part in parts], norms)
            except (
                RuntimeError,
                TypeError,
            ) as error:  # code that mixes in float32 of its own, or a device without float64
                if is_oom(error):
                    raise
                break
            if math.isfinite(result.difference):
                return result
        with _copied_weights(context) if _copies_fit(context) else nullcontext():
            return _compare(context, parts, norms)


@contextmanager
def _put_back(context: StepContext) -> Iterator[None]:
    """Buffers and attributes are afterwards as before: a table that a forward caches has the precision of the check."""
    model = context.model
    elsewhere = (*model.buffers(), *model.parameters())  # 8-bit layers have their weight as an attribute, too
    buffers, attributes = Buffers(model), Attributes(context.task, *model.modules(), excluding=elsewhere)
    try:
        yield
    finally:
        attributes.restore()
        buffers.restore()


def _compare(context: StepContext, parts: list[Any], norms: list[nn.Module]) -> _Result:
    whole = parts[:1]
    with _put_back(context), _mode(context.model, norms, training=False):
        random = _losses(context, whole) != _losses(context, whole)
    for training in (True, False):
        draws = _SameDraws()
        with _mode(context.model, norms, training=training):
            try:
                one, other = _value(context, whole, draws), _value(context, whole, draws)
                if not math.isfinite(one.mean):  # of doubled weights, perhaps
                    return _Result(comparable=False, difference=math.nan)
                if one.agrees(other):
                    return replace(_difference(context, parts, draws), random=random and draws.used)
            except NothingCounted:
                if not draws.used:
                    raise
                # Every row drew the same mask, which happened to cover nothing or all of them.
                return _Result(comparable=False)
    return _Result(comparable=False)


def _difference(context: StepContext, parts: list[Any], draws: "_SameDraws") -> _Result:
    whole = _value(context, parts[:1], draws)
    halves = _value(context, parts[1:], draws, counts=whole.counts)
    same_count = whole.counted_as(halves)
    doubled = whole.mean != 0 and abs(halves.mean - 2 * whole.mean) <= whole.tolerance * abs(halves.mean)
    if same_count and doubled:  # a loss of 0, of a margin that is kept, is twice itself
        raise TaskError(
            f"task {context.task.name}: Loss.sum seems to be a mean, since two halves of a batch add up to twice the "
            "whole. Try: return the sum, as with reduction='sum', or (mean, count)."
        )
    compared = "loss" if whole.gradients is None else "gradients"
    result = _Result(difference=whole.loss_difference(halves), plain_mean=whole.plain_mean, compared=compared)
    changed = whole.changed_buffers(halves)
    if same_count and whole.agrees(halves) and not changed:
        return result
    if not draws.used and whole.agrees(halves) and not same_count:  # divided by the same counts, they are the same
        added = ", ".join(f"{halves.counts.get(name, 0.0):g}" for name in whole.counts)
        counted = ", ".join(f"{count:g}" for count in whole.counts.values())
        raise TaskError(
            f"task {context.task.name}: Loss.count does not add up, since it is {counted} for a batch and {added} for its two halves. "
            "Try: return the number of rows or tokens that Loss.sum runs over."
        )
    apart = _value(context, parts[1:], draws, counts=whole.counts, apart=True)
    same_loss = whole.counted_as(apart) and whole.agrees(apart, gradients=False)
    same = same_loss and whole.agrees(apart)
    difference = max(result.difference, whole.gradient_difference(halves))
    if same or (same_loss and _agree_without_hooks(context, parts, draws)):
        if not same:
            change = f"hooks on gradients see those of a micro-batch, and two halves differ from the whole by {_share(difference)}"
        elif changed:
            effect = (
                "" if whole.agrees(halves) else f", and so two halves differ from the whole by {_share(difference)}"
            )
            change = f"each forward changes the buffer {changed[0]!r}{effect}"
        else:
            change = (
                f"a forward depends on earlier ones, so that two halves differ from the whole by {_share(difference)}"
            )
        return replace(result, difference=difference, change=change)
    # At random weights all tokens have nearly the same loss, so that a wrong mean may show in its gradient alone.
    unequal = _is_weighted_mean(context, parts[0], draws, gradients=same_loss)
    if (
        unequal and not whole.plain_mean and shared_rows(parts[0])
    ):  # slices have the padding of the whole, unlike halves that were collated apart
        slices = [*split_batch(parts[0], rows_of(parts[0]) // 2)]
        unequal = not whole.agrees(_value(context, slices, draws, counts=whole.counts, apart=True), gradients=same_loss)
    like_sum = whole.plain_mean and abs(whole.mean - 2 * halves.mean) <= whole.tolerance * abs(whole.mean)
    difference = difference if same_loss else result.difference
    return replace(result, difference=difference, differs=not unequal, unequal_rows=unequal, like_sum=like_sum)


def _agree_without_hooks(context: StepContext, parts: list[Any], draws: "_SameDraws") -> bool:
    """Whether a batch and its halves have the same gradients once the user's hooks on gradients are taken away."""
    owners = [*context.params, *context.model.modules()]
    names = ("_backward_hooks", "_backward_pre_hooks")
    tables: list[Any] = [table for owner in owners for name in names if (table := getattr(owner, name, None))]
    copies = [dict(table) for table in tables]
    if not tables:
        return False
    try:
        for table in tables:
            table.clear()  # in place: autograd holds these very dictionaries
        whole = _value(context, parts[:1], draws)
        return whole.agrees(_value(context, parts[1:], draws, counts=whole.counts, apart=True))
    finally:
        for table, copy in zip(tables, copies, strict=True):
            table.update(copy)


def _is_weighted_mean(context: StepContext, batch: Any, draws: "_SameDraws", *, gradients: bool) -> bool:
    """Whether the loss is a mean of its rows with some weights, such as their tokens, so that no row sees another.

    Of three groups of rows, the means of two pairs give the weights, and those must give the mean of all three.
    `gradients`: of the gradients instead of the losses.
    """
    count = shared_rows(batch)
    if count is None or count < 3:
        return False  # a batch that cannot be sliced

    def mean(first: int, last: int) -> torch.Tensor:
        start, end = (count * third // 3 for third in (first, last))
        part = map_tensors(batch, lambda tensor: tensor[start:end] if tensor.ndim else tensor)
        value = _value(context, [part], draws)
        tolerances.append(value.gradient_tolerance if gradients else 10 * value.tolerance)
        projected = value.gradients[0] if gradients and value.gradients is not None else None
        return torch.tensor([value.mean], dtype=torch.float64) if projected is None else projected

    def weight(own: torch.Tensor, other: torch.Tensor, both: torch.Tensor) -> float:
        """The weight of a group relative to another, from the mean of both."""
        apart = own - both
        return float((both - other) @ apart / (apart @ apart)) if apart.any() else -1.0

    tolerances: list[float] = []
    try:
        a, b, c = mean(0, 1), mean(1, 2), mean(2, 3)
        of_a, of_c = weight(a, b, mean(0, 2)), weight(c, b, mean(1, 3))
    except RuntimeError as error:
        if is_oom(error):
            raise
        return False  # a loss that takes rows in pairs, such as DPO's
    if of_a <= 0 or of_c <= 0:
        return False
    predicted, actual = (of_a * a + b + of_c * c) / (of_a + 1 + of_c), mean(0, 3)
    return float((predicted - actual).norm()) <= max(tolerances) * max(float(predicted.norm()), float(actual.norm()))


@dataclass(slots=True)
class _Value:
    """What some parts of a batch give together."""

    mean: float = 0.0
    """Over everything counted; of several terms, the sum of their means."""
    counts: dict[str, float] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    plain_mean: bool = False
    gradients: torch.Tensor | None = None
    """For each parameter a projection of its gradient and the square of its norm. None if there is no graph."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """As the last forward left them."""

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(self.dtype, 2e-2)

    @property
    def gradient_tolerance(self) -> float:
        return GRADIENT_TOLERANCE.get(self.dtype, 0.1)

    def agrees(self, other: "_Value", *, gradients: bool = True) -> bool:
        """Up to rounding."""
        if not self.loss_difference(other) <= self.tolerance:
            return False
        return not gradients or self.gradient_difference(other) <= self.gradient_tolerance

    def counted_as(self, other: "_Value") -> bool:
        """The same counts, up to rounding."""
        counts = self.counts.keys() | other.counts.keys()
        return all(
            math.isclose(self.counts.get(name, 0.0), other.counts.get(name, 0.0), rel_tol=SAME_COUNT) for name in counts
        )

    def loss_difference(self, other: "_Value") -> float:
        return abs(other.mean - self.mean) / max(abs(self.mean), abs(other.mean), 1e-12)

    def gradient_difference(self, other: "_Value") -> float:
        if self.gradients is None or other.gradients is None:
            return 0.0
        norm = math.sqrt(float(self.gradients[1].sum()))
        return float((self.gradients[0] - other.gradients[0]).norm()) / max(norm, 1e-12)

    def changed_buffers(self, other: "_Value") -> list[str]:
        tolerance = self.gradient_tolerance

        def same(one: torch.Tensor, two: torch.Tensor | None) -> bool:
            if two is None or one.shape != two.shape or one.dtype != two.dtype:
                return False
            return (
                torch.allclose(one, two, tolerance, 1e-12, True) if one.is_floating_point() else torch.equal(one, two)
            )

        return [name for name, buffer in self.buffers.items() if not same(buffer, other.buffers.get(name))]


def _value(
    context: StepContext,
    parts: list[Any],
    draws: "_SameDraws",
    *,
    counts: dict[str, float] | None = None,
    apart: bool = False,
) -> _Value:
    """Forward and backward of these parts, of which nothing stays.

    `counts` are what sums are divided by: those of the whole batch. `apart` runs every part as if it were the first.
    """
    value, model, projection = _Value(), context.model, _Projection(context.params)
    with _put_back(context):
        for part in parts:
            with _put_back(context) if apart else nullcontext(), draws:
                with _Precisions() as precisions:
                    returned = context.task.loss(model, part)
                    terms = loss_terms(context.task, returned, model=model, batch=part, needs_grad=False)
                if counts is None:
                    check_counts(context.task, terms, part)
                own = {name: float(term.count) for name, term in terms.items()}
                divisors = counts or own
                if any(count == 0 for count in divisors.values()):
                    raise NothingCounted(f"task {context.task.name}: loss() counted nothing in the rows to compare.")
                means = [term.sum.reshape(()) / divisors.get(name, 1.0) for name, term in terms.items()]
                projection.add(torch.stack(means).sum())
            value.mean += sum(float(mean.detach()) for mean in means)
            value.counts = {name: value.counts.get(name, 0.0) + count for name, count in own.items()}
            value.dtype = precisions.least(means[0].dtype)
            value.plain_mean = weighted_by_rows(returned, model=model, batch=part)
            del returned, terms, means
        value.gradients = projection.read()
        value.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return value


def _losses(context: StepContext, parts: list[Any]) -> list[float]:
    """The losses of these parts, one after the other. With gradients, since a loss may compute its own: a penalty, or forces."""
    values = [(context.task.loss(context.model, part), part) for part in parts]
    terms = [
        loss_terms(context.task, value, model=context.model, batch=part, needs_grad=False) for value, part in values
    ]
    return [float(term.sum.detach()) for one in terms for term in one.values()]


class _Projection:
    """Adds up gradients as one number for each parameter, their product with a fixed vector, so that none is held.

    Those of a user's hooks are what is added. Hooks that run after accumulation do not run, and `grad` stays as it is.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._sums: torch.Tensor | None = None

    def add(self, loss: torch.Tensor) -> None:
        if not loss.requires_grad:
            return
        sums: dict[int, torch.Tensor] = {}

        def hook(index: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
            def project(grad: torch.Tensor) -> torch.Tensor | None:
                sums[index] = _projected(grad)
                return None if grad.is_sparse else grad.new_zeros(()).expand_as(grad)  # frees the gradient

            return project

        handles = [param.register_hook(hook(index)) for index, param in enumerate(self._params)]
        try:
            torch.autograd.grad(loss, self._params, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            return  # checkpoints that cannot do this: only losses are compared
        finally:
            for handle in handles:
                handle.remove()
        if not sums:  # all parameters are inside such checkpoints
            return
        none = torch.zeros(2, dtype=torch.float64)
        table = torch.stack([sums[index].cpu() if index in sums else none for index in range(len(self._params))], 1)
        self._sums = table if self._sums is None else self._sums + table

    def read(self) -> torch.Tensor | None:
        return self._sums


def _projected(grad: torch.Tensor) -> torch.Tensor:
    """The product of a gradient with a fixed vector, and the square of its norm."""
    widest = torch.float32 if grad.device.type == "mps" else torch.float64
    flat = (grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1)
    vector = torch.arange(min(len(flat), PROJECTED), device=grad.device, dtype=widest).mul_(0.7548776662).cos_()
    total, square = torch.zeros((), dtype=widest, device=grad.device), torch.zeros((), dtype=widest, device=grad.device)
    for number, piece in enumerate(flat.split(PROJECTED)):
        piece = piece.to(widest)
        total += math.cos(number) * torch.dot(piece, vector[: len(piece)])
        square += torch.dot(piece, piece)
    return (
        torch.stack([total, square]).double()
        if widest is torch.float64
        else torch.stack([total, square]).cpu().double()
    )


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
        if func.overloadpacket.__name__ == "native_dropout":  # what torch uses on GPUs
            return self._dropout(*args)
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
        repeated = kept[torch.arange(width, device=kept.device) % len(kept)]
        return out.copy_(repeated if out.ndim else repeated[0])

    def _dropout(self, x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
        if not train or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        kept = self.__torch_dispatch__(torch.ops.aten.bernoulli_.float, (), (torch.empty_like(x), 1 - p))  # as any draw
        return x * kept / (1 - p if p < 1 else 1.0), kept.bool()


def _as_float64(batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


@contextmanager
def _copied_weights(context: StepContext, dtype: torch.dtype | None = None, factor: int = 1) -> Iterator[None]:
    """Swap weights and buffers for copies, wider and multiplied by a factor, and back. References to them stay valid.

    A forward may change its weights in place, as `Embedding(max_norm=…)` does.
    """
    tensors = _float_tensors(context)
    before = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            copied = tensor.data.to(dtype or tensor.dtype, copy=True)
            tensor.data = copied.mul_(factor) if factor != 1 and isinstance(tensor, nn.Parameter) else copied
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def _float_tensors(context: StepContext) -> list[torch.Tensor]:
    return [one for one in (*context.params, *context.model.buffers()) if one.is_floating_point()]


@contextmanager
def _mode(model: nn.Module, norms: list[nn.Module], *, training: bool) -> Iterator[None]:
    """Training or evaluation mode, the latter for `norms` in any case."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for module, was in modes:
            module.training = was
