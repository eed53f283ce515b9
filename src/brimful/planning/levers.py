"""Switches that trade time for memory. They act on the model, so every task has them.

Gradient checkpointing keeps the input of a block instead of its activations and runs the block again in backward: on T5
it saves two thirds of the memory for roughly half the speed at equal rows. It is switched by the task's own hook, else
by the model's own method (every Hugging Face model), else over repeated blocks of a ModuleList or Sequential. The latter two
can also leave out blocks: every second one saves about half as much and costs about half as much. On an accelerator the inputs
of all blocks can lie in host RAM until backward wants them (`offload`), for models whose rows do not fit otherwise.

Compiled blocks run the many small operations of a block as a few large ones, and keep less for backward: a packed step of
256 chat rows took 15 GiB with T5 base, where plain blocks ran out of 20. The result is kept on disk.

cuDNN's attention is off where rows have lengths, because it prepares every new shape (see `memory.context`). What
frozen weights save is one more choice of the plan: gradients and optimizer state are counted, activations measured.

bf16 weights, which only the user can choose, halve weights, gradients and the state of AdamW: 8 bytes per weight instead of 16.
"""

import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brimful.memory.context import StepContext, to_device
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import Buffers, RandomState
from brimful.packing.compiled import compiled
from brimful.planning.plan import Choice
from brimful.planning.plan_options import AutoOnOff, Checkpointed, Weights
from brimful.task import Shape, Task
from brimful.units import show_bytes


class HostCopies:
    """Keeps what autograd saves in host RAM until backward wants it, pinned where there is a GPU, and counts it."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()
        """Bytes of the copies that were held at once, when they were most."""
        self._held: dict[int, int] = {}
        self._pinned = torch.cuda.is_available()

    def run(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a checkpointed block. Its inputs are all that checkpointing saves."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return block(*args, **kwargs)

    def bytes_at(self, share: float) -> int:
        """What copies of this share of the sizes take. torch gives pinned memory out in powers of two."""
        scaled = [math.ceil(size * share) for size in self.sizes]
        return sum(1 << (size - 1).bit_length() if self._pinned and size else size for size in scaled)

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        pinned = self._pinned and not tensor.is_sparse
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned)
        copied.copy_(tensor)
        self._held[id(copied)] = copied.nbytes
        weakref.finalize(copied, self._held.pop, id(copied))
        if sum(self._held.values()) > sum(self.sizes):
            self.sizes = tuple(self._held.values())
        return tensor.device, copied

    def _unpack(self, saved: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, copied = saved
        return copied.to(device, non_blocking=self._pinned)


OFFLOAD = -1
EVERY: dict[Checkpointed, int] = {"off": 0, "every-3": 3, "every-2": 2, "on": 1, "offload": OFFLOAD}
"""How a lever is set for each setting of checkpointing, from the least to the most memory saved."""
DTYPES: dict[Weights, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
FROZEN_ROWS = 2
"""Rows with which the activations of frozen weights are measured, and twice as many. BatchNorm refuses a single row."""


@dataclass(frozen=True, slots=True)
class Lever:
    """A switch, or the reason why there is none."""

    switch: Callable[[int], Any] | None
    """Called with 0 for off, 1 for on, n for every n-th block, `OFFLOAD` for all with their inputs in host RAM."""
    reason: str
    """What switches it, or why nothing does."""
    already_on: bool = False
    """The model came with it on. It stays so."""
    blocks: int = 0
    """Blocks that can be switched one by one; 0 if all or none are."""
    offloads: bool = False
    """Whether the inputs of blocks can lie in host RAM."""
    copies: HostCopies = field(default_factory=HostCopies)
    """Those inputs."""

    @property
    def available(self) -> bool:
        return self.switch is not None

    @property
    def settings(self) -> tuple[Checkpointed, ...]:
        """Those possible, from the least to the most blocks. In between there are at least two blocks that run again."""
        if not self.available:
            return ("on",) if self.already_on else ("off",)
        return tuple(
            one
            for one in get_args(Checkpointed)
            if (self.offloads if one == "offload" else EVERY[one] < max(2, self.blocks))
        )

    @property
    def between(self) -> tuple[Checkpointed, ...]:
        """The settings of some blocks, from the least to the most."""
        return tuple(one for one in self.settings if EVERY[one] > 1)

    def share(self, setting: Checkpointed) -> float:
        """Of the blocks, how many run again."""
        every = EVERY[setting]
        return len(range(0, self.blocks, every)) / self.blocks if every > 1 else float(abs(every))

    @contextmanager
    def set(self, every: int) -> Iterator[None]:
        """On in the block if wanted (of every n-th block), off after it."""
        if not every or self.switch is None:
            yield
            return
        self.switch(every)
        try:
            yield
        finally:
            self.switch(0)


def checkpointing(task: Task, model: nn.Module) -> Lever:
    """How gradient checkpointing is switched on this model."""
    copies = HostCopies()
    if type(task).checkpointing is not Task.checkpointing and task.checkpointing(model, False):
        return Lever(lambda every: task.checkpointing(model, bool(every)), "by the task's own hook")
    if getattr(model, "is_gradient_checkpointing", False):
        return Lever(None, "the model came with it on", already_on=True)
    if getattr(model, "supports_gradient_checkpointing", False):
        switch, count = functools.partial(_switch_hugging_face, model, copies), len(_hugging_face_blocks(model))
        offloads = bool(count) and _is_apart(model)
        return Lever(switch, "by the model's own method", blocks=count, offloads=offloads, copies=copies)
    blocks = repeated_blocks(model)
    if not blocks:
        reason = "the model has no method for it and no repeated blocks in a ModuleList or Sequential"
        return Lever(None, f"not available: {reason}")
    if any(isinstance(part, _BATCH_NORMS) for block in blocks for part in block.modules()):
        return Lever(None, "not available: its blocks hold BatchNorm, whose running statistics would be updated twice")
    reason = f"over {len(blocks)} repeated blocks"
    forwards = _Forwards(blocks, _checkpointed, copies)
    return Lever(forwards, reason, blocks=len(blocks), offloads=_is_apart(model), copies=copies)


def _is_apart(model: nn.Module) -> bool:
    """Whether the model's memory is not the host's."""
    param = next(model.parameters(), None)
    return param is not None and param.device.type == "cuda"


def compiling(task: Task, model: nn.Module) -> Lever:
    """How the repeated blocks of this model are compiled."""
    if type(task).compiling is not Task.compiling and task.compiling(model, False):
        return Lever(lambda every: task.compiling(model, bool(every)), "by the task's own hook")
    blocks = repeated_blocks(model)
    if not blocks:
        return Lever(None, "not available: the model has no repeated blocks in a ModuleList or Sequential")
    return Lever(_Forwards(blocks, _compiled), f"over {len(blocks)} repeated blocks")


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Children of one class, with weights, that follow each other in a container; outermost containers first."""
    containers = [part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    for container in containers:
        alike: dict[type, list[nn.Module]] = {}
        for child in container:
            if any(True for _ in child.children()) and any(True for _ in child.parameters()):
                alike.setdefault(type(child), []).append(child)
        blocks = max(alike.values(), key=len, default=[])
        if len(blocks) >= 2:  # blocks of the same class may be in other containers: a decoder's beside an encoder's
            siblings = [child for other in containers for child in other if type(child) is type(blocks[0])]
            nested = {id(part) for block in blocks for part in block.modules()}
            around = {id(part) for part in model.modules() if any(one is blocks[0] for one in part.modules())}
            return blocks + [block for block in siblings if id(block) not in nested | around]
    return []


def _hugging_face_blocks(model: Any) -> list[Any]:
    """Blocks that read a flag of their own. Other models, whose code is older, read one flag for all."""

    def reads_flag(part: nn.Module) -> bool:
        return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(part).__mro__)

    return [part for part in model.modules() if reads_flag(part)]


def _switch_hugging_face(model: Any, copies: HostCopies, every: int) -> None:
    """The model's method also makes the output of its embeddings require gradients, and leaves that on when off again.

    Only re-entrant checkpointing needs that. It would make a frozen encoder keep its activations (+26 % on T5 tiny).
    """
    if every:
        before = getattr(model, "_require_grads_hooks", None)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for number, block in enumerate(_hugging_face_blocks(model)):
            block.gradient_checkpointing = number % every == 0
            if every == OFFLOAD:
                block._gradient_checkpointing_func = functools.partial(copies.run, block._gradient_checkpointing_func)
        if not before:
            model.disable_input_require_grads()
    else:
        model.gradient_checkpointing_disable()


class _Forwards:
    """A switch that replaces the forward of blocks, and puts back what it replaced: a method, or another switch's forward."""

    def __init__(
        self, blocks: list[nn.Module], wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]],
        copies: HostCopies | None = None,
    ) -> None:  # fmt: skip
        self._blocks, self._wrap, self._copies = blocks, wrap, copies
        self._before: list[tuple[nn.Module, Callable[..., Any] | None]] = []

    def __call__(self, every: int) -> None:
        if every:
            self._before = [(block, vars(block).get("forward")) for block in self._blocks[:: abs(every)]]
            for block, _ in self._before:
                wrapped = self._wrap(block, block.forward)
                moved = self._copies if every == OFFLOAD else None
                block.forward = functools.partial(moved.run, wrapped) if moved else wrapped
            return
        for block, before in self._before:
            del block.forward  # the method of the class is back
            if before is not None:
                block.forward = before


def _compiled(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    return compiled(forward)


def _checkpointed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def cudnn_attention(requested: AutoOnOff, device: torch.device, shape: Shape) -> tuple[Literal["on", "off"], str]:
    """Whether attention may use cuDNN's kernels, and why."""
    if requested != "auto":
        return requested, "as requested"
    if device.type != "cuda":
        return "on", "left to torch"
    if not shape:
        return "on", "left to torch: all rows have one shape"
    return "off", "rows differ in length, and it takes about 0.1 s and 5 MB of host RAM for every new shape"


def with_weights(task: Task, weights: Weights | None) -> Task:
    """A copy of the task whose models have weights of this dtype. The caller's task is not changed."""
    if weights is None:
        return task
    changed = copy.copy(task)
    changed.model = _Converted(task.model, DTYPES[weights])  # type: ignore[method-assign]
    changed.initial_model = _Converted(task.initial_model, DTYPES[weights])  # type: ignore[method-assign]
    return changed


@dataclass(frozen=True)
class _Converted:
    """Makes a model with weights of another dtype. Buffers stay, since tables such as rotary frequencies need theirs; so do
    weights that transformers keeps in float32, and those of a quantized model."""

    make: Callable[[], nn.Module]
    dtype: torch.dtype

    def __call__(self) -> nn.Module:
        model = self.make()
        if not isinstance(model, nn.Module):
            return model
        kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        for name, param in model.named_parameters():
            if param.dtype in CONVERTED and not kept & set(name.split(".")):
                param.data = param.data.to(self.dtype)
        return model


def weights_choice(context: StepContext, weights: Weights) -> Choice:
    """What the dtype of the weights saves. The optimizer has stepped, so its state can be counted."""
    tensors: dict[str, list[torch.Tensor]] = {
        "weights": list(context.model.parameters()),
        "gradients": [param for param in context.model.parameters() if param.requires_grad],
        "optimizer state": [
            value
            for one in context.optimizer.state.values()
            for value in one.values()
            if isinstance(value, torch.Tensor)
        ],
    }
    saved = {
        name: sum(2 * one.numel() for one in group if one.dtype == torch.bfloat16) for name, group in tensors.items()
    }
    parts = ", ".join(f"{show_bytes(count)} of {name}" for name, count in saved.items())
    reason = f"as requested; against fp32 it saves {parts} (counted)" if weights == "bf16" else "as requested"
    return Choice.of("weights", weights, weights, reason, "asked")


def frozen_choice(context: StepContext, shape: Shape, micro_batch: int) -> Choice | None:
    """What the frozen weights save; None if all weights train."""
    frozen = [param for param in context.model.parameters() if not param.requires_grad]
    if not frozen:
        return None
    every, trained = list(context.model.parameters()), [p for p in context.model.parameters() if p.requires_grad]
    count = sum(param.numel() for param in frozen)
    state = [value for one in context.optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]  # fmt: skip
    state_bytes = round(sum(value.nbytes for value in state) / max(1, sum(p.numel() for p in trained)) * count)
    gradient_bytes = sum(param.nbytes for param in frozen)
    reason = (
        f"saves {show_bytes(gradient_bytes)} of gradients and {show_bytes(state_bytes)} of optimizer state (counted)"
    )
    in_part = (
        context.task.trained_weights(context.model) is not None
    )  # the base of an adapter is frozen by definition, so there is nothing to compare with
    row_bytes = None if in_part else _activations_saved(context, frozen, shape)
    if row_bytes is not None:
        size = context.layout.show(micro_batch, shape)
        probed = f"{FROZEN_ROWS} and {2 * FROZEN_ROWS}"
        reason += f", and {show_bytes(row_bytes * micro_batch)} of activations at {size} (predicted from {probed})"
    share = f"{count / sum(param.numel() for param in every):.0%} of the weights"
    return Choice.of("frozen", None, share, reason, "measured")


def _activations_saved(context: StepContext, frozen: list[nn.Parameter], shape: Shape) -> float | None:
    """Bytes per row that autograd would keep if every weight trained; None if the forward cannot run that way.

    Only what grows with the rows counts: autocast's copies of weights are not activations.
    """
    random_state, buffers = RandomState(context.device), Buffers(context.model)
    sizes = (FROZEN_ROWS, 2 * FROZEN_ROWS)

    def run() -> float:
        now = [_saved_bytes(context, shape, rows) for rows in sizes]
        for param in frozen:
            param.requires_grad_(True)
        few, more = (_saved_bytes(context, shape, rows) - held for rows, held in zip(sizes, now, strict=True))
        return (more - few) / FROZEN_ROWS

    try:
        result = attempt(run, context.device)
    except Exception:  # weights of whole numbers, for example, cannot train at all
        return None
    finally:
        for param in frozen:
            param.requires_grad_(False)
        buffers.restore()
        random_state.restore()
    return None if isinstance(result, OutOfMemory) else max(0.0, result)


def _saved_bytes(context: StepContext, shape: Shape, rows: int) -> int:
    """What autograd keeps from the forward for the backward, without the weights."""
    saved: dict[int, int] = {}
    weights = {param.untyped_storage().data_ptr() for param in context.model.parameters()}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output saved as itself would keep its own graph alive

    batch = to_device(context.layout.dummy(context.task, rows, shape), context.device)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), context.forward_context():
        loss = context.task.loss(context.model, batch)
    total = sum(saved.values())
    del loss
    return total
