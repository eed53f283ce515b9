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

from brimful.errors import TaskError, Unsuited
from brimful.plan.plan import Plan

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
        raise Unsuited(
            f"{sharded or 'DTensor'}: sharded weights are gathered inside the forward, so a step of them cannot be redone by one "
            "process alone; use the plain model on each process"
        )
    inside = next((name for name in ("DistributedDataParallel", "DataParallel") if name in kinds), None)
    if inside:
        raise Unsuited(
            f"a {inside} wrapper lies inside the model, where it cannot be taken off (under torch.compile, or as a part); give the "
            "stepper the model without it"
        )
    if "SyncBatchNorm" in kinds:
        parts = ((name, type(part).__mro__) for name, part in model.named_modules())
        where = next(name for name, bases in parts if "SyncBatchNorm" in {base.__name__ for base in bases})
        raise Unsuited(
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
        raise Unsuited(
            f"{name} steps inside backward, one layer at a time: weights would have changed before a retry could begin; use an "
            "optimizer that steps after backward"
        )
    if not isinstance(optimizer, Optimizer):
        raise Unsuited(f"the optimizer is a {name}, not a torch.optim.Optimizer")
    trained = [param for param in model.parameters() if param.requires_grad]
    stepped = _stepped(optimizer)
    if trained and not any(param in stepped for param in trained):
        raise TaskError(
            "the optimizer steps none of the model's trainable parameters: make it after the model has been moved or copied, from "
            "model.parameters()"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Unsuited(
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
            raise Unsuited(
                f"{name!r} changed during backward: {type(optimizer).__name__} or a hook steps inside backward, before a retry "
                "could begin; use an optimizer that steps after backward"
            )
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise Unsuited(
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
        raise Unsuited(
            f"the loss calls the {type(module).__name__} wrapper, which reduces gradients inside backward; call the model that "
            "the loss is given"
        )
