"""What a step that can be redone takes: wrappers come off, and what cannot work is refused by name before it starts.

A gradient wrapper reduces inside backward, where an out-of-memory error on one process would leave the others waiting
for ever; the stepper reduces by itself, once, after everybody agreed. SyncBatchNorm and sharded weights talk to other
processes inside the forward, and an optimizer that steps inside backward has changed weights before a retry could begin.
"""

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from brimful.errors import InexactSplit, TaskError, UnsupportedModel
from brimful.memory.context import StepContext, tensors_of
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import RandomState
from brimful.planning.exactness import Exactness, NothingCounted, check_exactness
from brimful.planning.plan import Plan
from brimful.step.distributed import Share
from brimful.step.interface import Events

# Batches that come in ever new shapes, noticed as they come.
#
# Where a task knows its rows' lengths, its plan keeps attention off cuDNN's kernels from the beginning (`memory.opened`). A
# loss handed to a stepper, or another trainer's loop, says nothing of lengths, and cuDNN is the faster one where all batches
# are alike. So it stays until they are seen not to be.


MANY = 16
"""So many shapes are no accident of an epoch's last batch or of a finer cut."""


class Shapes:
    """The shapes that micro-batches have had so far."""

    def __init__(self, rig: StepContext, events: Events, *, asked: bool) -> None:
        """`asked`: cuDNN's attention was asked for, so it stays."""
        self._rig, self._events = rig, events
        self._watching = rig.device.type == "cuda" and not asked
        self._seen: set[tuple[tuple[int, ...], ...]] = set()
        self.many = False
        """Whether they were found to be many: belongs into a checkpoint."""

    def noted(self, step: int, batch: Any) -> Any:
        """The batch, as it is. Whoever runs it holds the only reference to it."""
        if self._watching and self._rig.cudnn_attention:
            self._seen.add(tuple(tuple(tensor.shape) for tensor in tensors_of(batch)))
            if len(self._seen) > MANY:
                self.switch_off()
                self._events.add(
                    "note",
                    step,
                    f"batches have come in {len(self._seen)} shapes: attention is kept off cuDNN's kernels from here on, which take "
                    "about 0.1 s and 5 MB of host RAM for every new one",
                )
        return batch

    def switch_off(self) -> None:
        """As found now, or before a checkpoint."""
        if self._watching:
            self.many, self._rig.cudnn_attention = True, False


# May these rows be cut? Looked at with a few real ones at the first step, so that no run finds out hours later.
#
# A plan's fit has asked already. Rows are collated whole and in halves, so a model that looks at padding is found as well as
# a loss that looks across rows; where the collate draws random numbers, no two batches are alike and one is sliced.


SOME_ROWS = 4
"""So many rows are compared with their halves."""
CHECKS = 3
"""So many steps try, where the comparison itself runs out of memory."""


class Cuttable:
    """Knows whether a step may be cut, and says so once."""

    def __init__(self, rig: StepContext, events: Events, *, known: bool, allow_inexact: bool) -> None:
        self._rig, self._events, self._allow_inexact = rig, events, allow_inexact
        self._left = 0 if known else CHECKS
        self._found: Exactness | None = None
        self._told = False

    def look(self, step: int, share: Share) -> None:
        """Compare a few rows of this step, unless that has been done."""
        some = max(share.rows.groups or [share.indices], key=len)[:SOME_ROWS]
        if self._left == 0 or len(some) < 2:
            return
        random_state = RandomState(self._rig.device)
        try:
            found = attempt(lambda: _compare(self._rig, share, some), self._rig.device)
        except NothingCounted:
            return  # the next step's rows may have something
        finally:
            random_state.restore()
        if isinstance(found, OutOfMemory):
            self._left -= 1
            self._events.add("note", step, "whether a step may be cut could not be checked: memory ran out")
            return
        self._left, self._found = 0, found
        if not found.exact:
            self._events.add("note", step, f"{found.sentence}; as long as a step runs whole, that does not matter")

    def check(self, step: int, parts: int) -> None:
        """A step is about to be cut, or shared by processes. Refuses a loss that looks across rows."""
        if parts < 2 or self._told or self._found is None or self._found.exact:
            return
        if self._found.looks_across_rows and not self._allow_inexact:
            raise InexactSplit(
                f"{self._found.sentence}; step {step} would be cut into {parts}: give it the memory to run whole, or say "
                "allow_inexact=True"
            )
        self._told = True
        self._events.add("note", step, f"the step is cut although {self._found.sentence}", inexact=True)


def _compare(rig: StepContext, share: Share, some: list[int]) -> Exactness:
    whole, half = share.rows.batch(some), len(some) // 2
    if not share.rows.collates:
        return check_exactness(rig, whole)
    again = tensors_of(share.rows.batch(some))
    if not all(torch.equal(one, other) for one, other in zip(tensors_of(whole), again, strict=True)):
        return check_exactness(rig, whole)
    return check_exactness(rig, whole, [share.rows.batch(some[:half]), share.rows.batch(some[half:])])


_STEPS_IN_BACKWARD = ("LayerWiseDummyOptimizer",)
_SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def unwrap(model: nn.Module) -> tuple[nn.Module, str | None]:
    """The model inside a DDP or DataParallel wrapper, and the wrapper's name if there was one."""
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"Stepper(model, optimizer, task_or_loss): the model is a {type(model).__name__}, not a torch.nn.Module"
        )
    name = None
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        name = type(model).__name__
        model.register_forward_pre_hook(_refuse_wrapper)
        model = model.module
    return model, name


def check_plan(plan: Any) -> Plan | None:
    if plan is not None and not isinstance(plan, Plan):
        raise TaskError(f"the plan is a {type(plan).__name__}, not a brimful.Plan: Plan.load(path) reads one")
    return plan


def check_model(model: nn.Module) -> None:
    if any(param.is_meta for param in model.parameters()):
        raise TaskError("the model is on the meta device, where it has no weights: build it on a real one")
    kinds = {base.__name__ for part in model.modules() for base in type(part).__mro__}
    sharded = next((name for name in _SHARDED if name in kinds), None)
    if sharded or any(type(param).__name__ == "DTensor" for param in model.parameters()):
        raise UnsupportedModel(
            f"{sharded or 'DTensor'}: sharded weights are gathered inside the forward, so a step of them cannot be redone by one "
            "process alone; use the plain model on each process"
        )
    inside = next((name for name in ("DistributedDataParallel", "DataParallel") if name in kinds), None)
    if inside:
        raise UnsupportedModel(
            f"a {inside} wrapper lies inside the model, where it cannot be taken off (under torch.compile, or as a part); give the "
            "stepper the model without it"
        )
    if "SyncBatchNorm" in kinds:
        parts = ((name, type(part).__mro__) for name, part in model.named_modules())
        where = next(name for name, bases in parts if "SyncBatchNorm" in {base.__name__ for base in bases})
        raise UnsupportedModel(
            f"SyncBatchNorm ({where!r}) talks to the other processes inside the forward, where one that runs out of memory would "
            "leave them waiting for ever; use BatchNorm, GroupNorm or LayerNorm"
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise TaskError("no parameter of the model requires a gradient: there is nothing to train")


def check_optimizer(model: nn.Module, optimizer: Any) -> Optimizer:
    """The torch optimizer itself, out of Accelerate's wrapper."""
    name = type(optimizer).__name__
    if name == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    inside = any(hasattr(param, "_in_backward_optimizers") for param in model.parameters())
    if inside or any(base.__name__ in _STEPS_IN_BACKWARD for base in type(optimizer).__mro__):
        raise UnsupportedModel(
            f"{name} steps inside backward, one layer at a time: weights would have changed before a retry could begin; use an "
            "optimizer that steps after backward"
        )
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedModel(f"the optimizer is a {name}, not a torch.optim.Optimizer")
    trained = [param for param in model.parameters() if param.requires_grad]
    stepped = _stepped(optimizer)
    if trained and not any(param in stepped for param in trained):
        raise TaskError(
            "the optimizer steps none of the model's trainable parameters: make it after the model has been moved or copied, from "
            "model.parameters()"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedModel(
            f"{name} calls the loss several times within one step, which cannot be cut; use another optimizer"
        )
    return optimizer


def not_stepped(model: nn.Module, optimizer: Optimizer) -> str:
    """Trainable parameters that the optimizer does not know, as words; empty where there are none."""
    stepped = _stepped(optimizer)
    names = [name for name, param in model.named_parameters() if param.requires_grad and param not in stepped]
    return "" if not names else f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _stepped(optimizer: Optimizer) -> set[nn.Parameter]:
    return {param for group in optimizer.param_groups for param in group["params"]}


def check_after_backward(model: nn.Module, optimizer: Optimizer, versions: dict[str, int]) -> None:
    """After the first backward ever: did something change the weights, or take the gradients away?"""
    for name, param in model.named_parameters():
        if param._version != versions[name]:
            raise UnsupportedModel(
                f"{name!r} changed during backward: {type(optimizer).__name__} or a hook steps inside backward, before a retry "
                "could begin; use an optimizer that steps after backward"
            )
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise UnsupportedModel(
                f"{name!r} has a sparse gradient, which cannot be summed exactly; use Embedding(sparse=False)"
            )
    if all(param.grad is None for param in model.parameters()):
        raise TaskError(
            "backward left no gradient on any parameter of the model: the loss does not depend on it, or a hook takes the "
            "gradients away (an optimizer that steps inside backward)"
        )


def versions_of(model: nn.Module) -> dict[str, int]:
    return {name: param._version for name, param in model.named_parameters()}


def _refuse_wrapper(module: nn.Module, args: Any) -> None:
    if module.training and torch.is_grad_enabled():
        raise UnsupportedModel(
            f"the loss calls the {type(module).__name__} wrapper, which reduces gradients inside backward; call the model that "
            "the loss is given"
        )
