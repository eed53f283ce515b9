"""Switches on a model that trade time for memory. They attach to the model, so every task gets them.

Gradient checkpointing keeps a block's input instead of its activations and runs the block again in backward: two thirds
of the memory saved on T5 for roughly half the speed at equal rows. It is offered by the task's own hook, else by the
model's own method (every Hugging Face model), else over repeated blocks of a ModuleList or Sequential.

cuDNN's attention is left out where rows have lengths: it pays for every new shape, in time and host RAM (`memory.opened`).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brimful.memory.context import StepContext, to_device
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import Buffers, RandomState
from brimful.planning.plan import Choice
from brimful.planning.target import Lever3
from brimful.task import Shape, Task
from brimful.units import show_bytes

# What freezing weights saves, as one of the plan's choices: gradients and optimizer state counted, activations measured.
#
# A frozen part needs no gradient, and no optimizer state; where nothing below it trains, it also keeps no activations for
# the backward. The last is measured: the same small forward once as the model is and once with every weight trainable, the
# difference in what autograd holds, in proportion to the rows of a micro-batch.


ROWS = 2
"""A single row is refused by BatchNorm."""


def frozen_choice(rig: StepContext, shape: Shape, micro_batch: int) -> Choice | None:
    """None where every weight trains."""
    frozen = [param for param in rig.model.parameters() if not param.requires_grad]
    if not frozen:
        return None
    weights = sum(param.numel() for param in rig.model.parameters())
    count = sum(param.numel() for param in frozen)
    gradients = sum(param.nbytes for param in frozen)
    state = _state_bytes(rig, frozen)
    held = _activations_saved(rig, frozen, shape)
    said = f"saves {show_bytes(gradients)} of gradients and {show_bytes(state)} of optimizer state (counted)"
    if held is not None:
        at = "+".join(map(str, shape))
        said += f", and {show_bytes(held * micro_batch)} of activations at {micro_batch} rows of {at} (predicted from {ROWS} and {2 * ROWS})"
    return Choice(
        name="frozen", requested=None, effective=f"{count / weights:.0%} of the weights", reason=said, basis="measured"
    )


def _state_bytes(rig: StepContext, frozen: list[nn.Parameter]) -> int:
    """What the optimizer would hold for them, by what it holds for each trained weight."""
    state = [value for one in rig.optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    trained = sum(param.numel() for param in rig.model.parameters() if param.requires_grad)
    return round(sum(value.nbytes for value in state) / max(1, trained) * sum(param.numel() for param in frozen))


def _activations_saved(rig: StepContext, frozen: list[nn.Parameter], shape: Shape) -> float | None:
    """Bytes a row; None where the forward cannot be run so."""
    random_state, buffers = RandomState(rig.device), Buffers(rig.model)

    def both() -> float:
        as_it_is = [_held_bytes(rig, shape, rows) for rows in (ROWS, 2 * ROWS)]
        for param in frozen:
            param.requires_grad_(True)
        saved = [_held_bytes(rig, shape, rows) - held for rows, held in zip((ROWS, 2 * ROWS), as_it_is, strict=True)]
        return (
            saved[1] - saved[0]
        ) / ROWS  # what does not grow with the rows, autocast's copies of weights, is no activation

    try:
        outcome = attempt(both, rig.device)
    except Exception:  # weights of whole numbers, say: they cannot train at all
        return None
    finally:
        for param in frozen:
            param.requires_grad_(False)
        buffers.restore()
        random_state.restore()
    return None if isinstance(outcome, OutOfMemory) else max(0.0, outcome)


def _held_bytes(rig: StepContext, shape: Shape, rows: int) -> int:
    """What autograd keeps from the forward to the backward, weights aside."""
    kept: dict[int, int] = {}
    weights = {param.untyped_storage().data_ptr() for param in rig.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output packed as itself would keep its own graph alive for ever

    batch = to_device(rig.task.dummy(rows, shape), rig.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), rig.forward_context():
        held = rig.task.loss(rig.model, batch)
    total = sum(kept.values())
    del held
    return total


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
Switch = Callable[[bool], Any]


@dataclass(frozen=True, slots=True)
class Lever:
    """A switch, or the reason why there is none; `how` says whose it is."""

    switch: Switch | None
    how: str
    already_on: bool = False
    """The model came with it on; it stays so."""

    @property
    def offered(self) -> bool:
        return self.switch is not None

    @contextmanager
    def set(self, on: bool) -> Iterator[None]:
        """On inside the block if asked, off after it."""
        if not on or self.switch is None:
            yield
            return
        self.switch(True)
        try:
            yield
        finally:
            self.switch(False)


def cudnn_attention(asked: Lever3, device: torch.device, shape: Shape) -> tuple[Literal["on", "off"], str]:
    """Whether attention may take cuDNN's kernels, and why."""
    if asked != "auto":
        return asked, "as asked for"
    if device.type != "cuda":
        return "on", "left to torch"
    if not shape:
        return "on", "left to torch: all rows have one shape"
    return "off", "rows differ in length, and it takes about 0.1 s and 5 MB of host RAM for every new shape"


def checkpointing(task: Task, model: nn.Module) -> Lever:
    """How gradient checkpointing is switched on this model."""
    if type(task).checkpointing is not Task.checkpointing and task.checkpointing(model, False):
        return Lever(lambda on: task.checkpointing(model, on), "the task's own hook")
    if getattr(model, "is_gradient_checkpointing", False):
        return Lever(None, "the model came with it on", already_on=True)
    if getattr(model, "supports_gradient_checkpointing", False):
        return Lever(functools.partial(_hugging_face, model), "the model's own method")
    blocks = repeated_blocks(model)
    if not blocks:
        return Lever(
            None, "not offered: the model has no method for it and no repeated blocks in a ModuleList or Sequential"
        )
    if any(isinstance(part, _BATCH_NORMS) for block in blocks for part in block.modules()):
        return Lever(None, "not offered: its blocks hold BatchNorm, whose running statistics would be updated twice")
    return Lever(functools.partial(_wrap, blocks), f"over {len(blocks)} repeated blocks")


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Children of one class, with weights, that follow each other in a container; outermost containers first."""
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        alike: dict[type, list[nn.Module]] = {}
        for child in container:
            if any(True for _ in child.children()) and any(True for _ in child.parameters()):
                alike.setdefault(type(child), []).append(child)
        found = max(alike.values(), key=len, default=[])
        if len(found) >= 2:
            nested = {id(part) for block in found for part in block.modules()}
            return found + [b for b in _siblings(model, type(found[0])) if id(b) not in nested]
    return []


def _siblings(model: nn.Module, kind: type) -> list[nn.Module]:
    """Blocks of the same class in the model's other containers (a decoder's beside an encoder's)."""
    containers = [c for c in model.modules() if isinstance(c, (nn.ModuleList, nn.Sequential))]
    return [child for container in containers for child in container if type(child) is kind]


def _hugging_face(model: Any, on: bool) -> None:
    """The model's method also makes its embeddings' output require gradients, and leaves it so when switched off again.

    Only the old, re-entrant way needs that; it would make a frozen encoder keep its activations (+26 % on T5 tiny).
    """
    if on:
        before = getattr(model, "_require_grads_hooks", None)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if not before:
            model.disable_input_require_grads()
    else:
        model.gradient_checkpointing_disable()


def _wrap(blocks: list[nn.Module], on: bool) -> None:
    for block in blocks:
        if on:
            block.forward = functools.partial(_checkpointed, block, block.forward)
        else:
            del block.forward  # the instance's wrapper goes, the class's method is back


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not block.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
