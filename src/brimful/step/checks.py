"""What the stepper checks: model and optimizer at the start, whether rows may be split, and how shapes vary.

A gradient wrapper such as DDP reduces inside backward, where an out-of-memory error on one rank would leave the others
waiting, so wrappers are removed and the stepper reduces once, after all ranks agreed. SyncBatchNorm and sharded weights
communicate inside the forward, and an optimizer that steps inside backward changes weights before a retry could begin:
these are refused.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from brimful.errors import InexactSplit, TaskError, UnsupportedModel, kind_of
from brimful.memory.context import StepContext, tensors_of
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import RandomState
from brimful.planning.exactness import Exactness, NothingCounted, batch_norm_reason, check_exactness
from brimful.planning.plan import Plan
from brimful.step.distributed import Share
from brimful.step.result import Events
from brimful.task import check_weights, not_finite

SPLIT_CHECK_ROWS = 4
"""Rows that the exactness check runs at once. More would raise the peak of a small step."""
SPLIT_CHECK_LOOKED_AT = 64
"""Rows of a step whose labels are looked at to choose those."""
SPLIT_CHECK_TRIES = 3
"""Steps that try the exactness check if it runs out of memory, or if their rows would not show a wrong count."""
MANY_SHAPES = 16
"""More shapes than this are not the last batch of an epoch, or smaller micro-batches after an error."""

_STEPS_IN_BACKWARD = ("LayerWiseDummyOptimizer",)
_SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def unwrap(model: nn.Module) -> tuple[nn.Module, str | None]:
    """The model inside a DDP or DataParallel wrapper, and the name of the wrapper."""
    if not isinstance(model, nn.Module):
        raise TaskError(f"the model is {kind_of(model)}. Try: a torch.nn.Module.")
    name = None
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        name = type(model).__name__
        model.register_forward_pre_hook(_refuse_wrapper)
        model = model.module
    return model, name


def _refuse_wrapper(module: nn.Module, args: Any) -> None:
    if module.training and torch.is_grad_enabled():
        raise UnsupportedModel(
            f"the loss calls the {type(module).__name__} wrapper, which reduces gradients inside backward. "
            "Try: call the model that is passed to the loss."
        )


def check_plan(plan: Any) -> Plan | None:
    if plan is not None and not isinstance(plan, Plan):
        raise TaskError(f"plan= is {kind_of(plan)}, not a brimful.Plan. Try: Plan.load(path).")
    return plan


def check_model(model: nn.Module) -> None:
    check_weights(model)
    if any(param.is_meta for param in model.parameters()):
        raise TaskError("the model is on the meta device, where it has no weights. Try: build it on a real device.")
    kinds = {base.__name__ for part in model.modules() for base in type(part).__mro__}
    sharded = next((name for name in _SHARDED if name in kinds), None)
    if sharded or any(type(param).__name__ == "DTensor" for param in model.parameters()):
        raise UnsupportedModel(
            f"{sharded or 'DTensor'} gathers weights inside the forward, so one rank cannot repeat a step alone. "
            "Try: the plain model on each rank."
        )
    wrapper = next((name for name in ("DistributedDataParallel", "DataParallel") if name in kinds), None)
    if wrapper:
        raise UnsupportedModel(
            f"a {wrapper} wrapper inside the model cannot be removed (under torch.compile, or as a part). "
            "Try: the model without it."
        )
    if "SyncBatchNorm" in kinds:
        parts = ((name, type(part).__mro__) for name, part in model.named_modules())
        where = next(name for name, bases in parts if "SyncBatchNorm" in {base.__name__ for base in bases})
        raise UnsupportedModel(
            f"SyncBatchNorm ({where!r}) communicates inside the forward, so one rank cannot repeat a step alone. "
            "Try: BatchNorm, GroupNorm or LayerNorm."
        )
    for name, part in model.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise UnsupportedModel(
                f"{type(part).__name__}(max_norm={part.max_norm}) ({name!r}) changes its weight inside the forward, which a "
                "retry cannot undo and other ranks do not see. "
                "Try: max_norm=None, and scale its rows after the optimizer's step."
            )
    if not any(param.requires_grad for param in model.parameters()):
        raise TaskError(
            "no parameter of the model requires a gradient. Try: param.requires_grad_(True) for those that should learn."
        )
    if broken := not_finite(model):
        raise TaskError(f"the model has NaN or inf in {broken} before training. Try: load intact weights.")


def check_optimizer(model: nn.Module, optimizer: Any) -> Optimizer:
    """The torch optimizer, without Accelerate's wrapper."""
    name = type(optimizer).__name__
    if name == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    in_backward = any(hasattr(param, "_in_backward_optimizers") for param in model.parameters())
    if in_backward or any(base.__name__ in _STEPS_IN_BACKWARD for base in type(optimizer).__mro__):
        raise UnsupportedModel(
            f"{name} steps inside backward, so weights would change before a retry. "
            "Try: an optimizer that steps after backward."
        )
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedModel(f"the optimizer is {kind_of(optimizer)}. Try: a torch.optim.Optimizer.")
    trainable = [param for param in model.parameters() if param.requires_grad]
    stepped = _stepped_params(optimizer)
    if trainable and not any(param in stepped for param in trainable):
        raise TaskError(
            "the optimizer steps none of the model's trainable parameters. "
            "Try: make it from model.parameters() after the model has been moved or copied."
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedModel(
            f"{name} calls the loss several times in one step, which cannot be split. Try: another optimizer."
        )
    return optimizer


def not_stepped(model: nn.Module, optimizer: Optimizer) -> str:
    """Names of trainable parameters that the optimizer does not step; empty if there are none."""
    stepped = _stepped_params(optimizer)
    names = [name for name, param in model.named_parameters() if param.requires_grad and param not in stepped]
    return "" if not names else f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _stepped_params(optimizer: Optimizer) -> set[nn.Parameter]:
    return {param for group in optimizer.param_groups for param in group["params"]}


def param_versions(model: nn.Module) -> dict[str, int]:
    """torch's count of in-place changes of each parameter."""
    return {name: param._version for name, param in model.named_parameters()}


def check_after_backward(model: nn.Module, optimizer: Optimizer, versions: dict[str, int]) -> None:
    """After the first backward: did it change weights, or leave no gradients?"""
    for name, param in model.named_parameters():
        if param._version != versions[name]:
            raise UnsupportedModel(
                f"{name!r} changed during backward: {type(optimizer).__name__} or a hook steps inside it. "
                "Try: an optimizer that steps after backward."
            )
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise UnsupportedModel(
                f"{name!r} has a sparse gradient, which cannot be summed exactly. Try: Embedding(sparse=False)."
            )
    if all(param.grad is None for param in model.parameters()):
        raise TaskError(
            "backward left no gradient on any parameter. "
            "Try: a loss that depends on the model, and no hook that removes gradients inside backward."
        )


class SplitCheck:
    """Whether a step may be split, checked with a few real rows at the first step rather than hours later.

    A plan of the same task has checked it. Rows are collated whole and in halves, so that a model that looks at padding
    shows as well as a loss that compares rows. If collating is random, no two batches are equal, and one is sliced.
    """

    def __init__(self, context: StepContext, events: Events, *, checked: bool, allow_inexact: bool) -> None:
        self._context, self._events, self._allow_inexact = context, events, allow_inexact
        self._tries_left = 0 if checked else SPLIT_CHECK_TRIES
        self._exactness: Exactness | None = None
        """What is known so far; None if nothing is, or if a plan knows it."""
        self._noted = ""
        """The last reason that was noted for a split."""

    def examine(self, step: int, share: Share) -> None:
        """Compare a few rows of this step with their halves, unless that is done."""
        rows = max(share.rows.groups or [share.indices], key=len)
        if self._tries_left == 0 or len(rows) < 2:
            return
        try:
            checked = self._attempt(share, rows)
        except NothingCounted:  # the next step's rows may count something
            self._exactness = self._exactness or _unknown("the labels of the rows to compare are all masked")
            return
        if isinstance(checked, OutOfMemory):
            self._tries_left -= 1
            if self._exactness is None:
                self._compare_losses(step, share, rows)
            return
        exactness, conclusive = checked
        self._tries_left = 0 if conclusive or not exactness.exact else self._tries_left - 1
        self._report(step, exactness)

    def _compare_losses(self, step: int, share: Share, rows: list[int]) -> None:
        """Without gradients, where memory ran out with them. A loss that compares rows shows here too."""
        note = "memory ran out while checking whether a step may be split"
        try:
            checked = self._attempt(share, rows, gradients=False)
        except NothingCounted:
            raise
        except Exception:  # a loss that computes gradients of its own cannot be run without
            checked = OutOfMemory("")
        if isinstance(checked, OutOfMemory):
            problem = "memory ran out while a few rows were compared with their two halves"
            self._exactness = _unknown(batch_norm_reason(self._context.model) or problem)
            self._events.add("note", step, note)
            return
        self._events.add("note", step, f"{note}, so only losses were compared and no gradients")
        self._report(step, checked[0])

    def _attempt(
        self, share: Share, rows: list[int], *, gradients: bool = True
    ) -> tuple[Exactness, bool] | OutOfMemory:
        random_state = RandomState(self._context.device)
        try:
            return attempt(lambda: self._compare(share, rows, gradients), self._context.device)
        finally:
            random_state.restore()

    def _report(self, step: int, exactness: Exactness) -> None:
        self._exactness = exactness
        if exactness.unequal_rows:
            fix = "return brimful.Loss(sum, count), or the whole output of a Hugging Face model, for the exact mean"
            self._events.add("note", step, f"{exactness.reason}; {fix}", warn=True)
        elif not exactness.comparable:
            kept = (
                "The check called the loss several times, which changed what it keeps in a closure or a global variable"
            )
            self._events.add("note", step, f"{exactness.reason}. {kept}, if anything.", warn=True)
        elif not exactness.exact:
            self._events.add(
                "note", step, f"{exactness.reason}; this does not matter while a step is not split", warn=True
            )

    def _compare(self, share: Share, rows: list[int], gradients: bool) -> tuple[Exactness, bool]:
        """The second is whether these rows would show a count that is not what the mean runs over."""
        groups, conclusive = _rows_to_compare(share, rows)
        for group in groups:
            exactness = _compare_with_halves(self._context, share, group, gradients)
            if not exactness.exact or exactness.unequal_rows:
                break
        return exactness, conclusive

    def before_split(self, step: int, parts: int) -> None:
        """A step is about to run in this many parts, on this rank or on several. Refuses a loss that compares rows."""
        if parts < 2 or self._exactness is None or self._noted == self._exactness.reason:
            return
        exactness = self._exactness
        if exactness.looks_across_rows and not self._allow_inexact:
            raise InexactSplit(
                f"step {step} has to be split into {parts}, but {exactness.reason}. "
                f"Try: {exactness.remedy}more memory so that it runs whole, or allow_inexact=True."
            )
        self._noted = exactness.reason
        if exactness.random:
            self._events.add("note", step, f"a split step is the same in distribution, since {exactness.reason}")
        if not exactness.exact:
            self._events.add("note", step, f"the step is split although {exactness.reason}", warn=True, inexact=True)


def _unknown(reason: str) -> Exactness:
    return Exactness(comparable=False, reason=reason)


def _rows_to_compare(share: Share, rows: list[int]) -> tuple[list[list[int]], bool]:
    """Rows of different lengths, but of the shorter half, since they run in full precision; and whether they are conclusive.

    A causal model leaves the first label of a row out of its mean. A count that includes it is wrong only for rows whose
    first label is not masked, so those are sought. Where labels are not known by their name, twice as many rows are taken.
    """
    some = _spread(rows, SPLIT_CHECK_LOOKED_AT)
    labels = dict(zip(some, _labels(share, some), strict=False))
    some.sort(key=lambda row: (sum(share.rows.shapes[row]), int(labels[row].sum()) if labels else 0))
    short = some[: max(2 * SPLIT_CHECK_ROWS, len(some) // 2)]
    if not labels and len(short) >= 2 * SPLIT_CHECK_ROWS:
        spread = _spread(short, 2 * SPLIT_CHECK_ROWS)
        return [spread[::2], spread[1::2]], True
    if not labels:
        return [_spread(short, SPLIT_CHECK_ROWS)], True
    unmasked = [row for row in some if labels[row][0]]
    short = [row for row in short if not labels[row][0]] + unmasked[: len(short)]
    return [_spread(short, SPLIT_CHECK_ROWS)], bool(unmasked)


def _labels(share: Share, rows: list[int]) -> list[torch.Tensor]:
    """Which labels of these rows are not masked, where batches name them as Hugging Face does; else empty."""
    labels: list[torch.Tensor] = []
    for start in range(0, len(rows), SPLIT_CHECK_ROWS):
        part = rows[start : start + SPLIT_CHECK_ROWS]
        batch = share.rows.batch(part)
        found = batch.get("labels") if hasattr(batch, "get") else None
        if not isinstance(found, torch.Tensor) or found.ndim != 2 or len(found) != len(part) or not found.shape[1]:
            return []
        labels += (found != -100).cpu().unbind()
    return labels


def _spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items, evenly spaced, with the first and the last."""
    count = min(count, len(items))
    return [items[place * (len(items) - 1) // max(1, count - 1)] for place in range(count)]


def _compare_with_halves(context: StepContext, share: Share, rows: list[int], gradients: bool) -> Exactness:
    whole, half = share.rows.batch(rows), len(rows) // 2
    if not share.rows.collates:
        return check_exactness(context, whole, gradients=gradients)
    again = tensors_of(share.rows.batch(rows))
    if not all(torch.equal(one, other) for one, other in zip(tensors_of(whole), again, strict=True)):
        return check_exactness(context, whole, gradients=gradients)
    halves = [share.rows.batch(rows[:half]), share.rows.batch(rows[half:])]
    return check_exactness(context, whole, halves, name=f"{len(rows)} rows", gradients=gradients)


class ShapeCounter:
    """Counts the shapes of micro-batches, and switches cuDNN's attention off once they are many.

    cuDNN prepares for every new shape, about 0.1 s and 5 MB of host RAM, but is the faster one while all batches are alike.
    A task that knows the lengths of its rows decides before training; here it shows only as batches come.
    """

    def __init__(self, context: StepContext, events: Events, *, keep_cudnn: bool) -> None:
        """`keep_cudnn`: the user set cuDNN's attention."""
        self._context, self._events = context, events
        self._counting = context.device.type == "cuda" and not keep_cudnn
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        self.many = False
        """Whether attention was switched off for it."""

    def record(self, step: int, batch: Any) -> Any:
        """Returns the batch, so that the caller need not hold a second reference to it."""
        if self._counting and self._context.cudnn_attention:
            self._shapes.add(tuple(tuple(tensor.shape) for tensor in tensors_of(batch)))
            if len(self._shapes) > MANY_SHAPES:
                self.switch_off()
                self._events.add(
                    "note",
                    step,
                    f"cuDNN's attention is now off, since batches came in {len(self._shapes)} shapes and each new one takes "
                    "about 0.1 s and 5 MB of host RAM",
                )
        return batch

    def switch_off(self) -> None:
        """For many shapes seen now, or before a checkpoint."""
        if self._counting:
            self.many, self._context.cudnn_attention = True, False
