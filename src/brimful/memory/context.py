"""The bare step: what any training step does with memory, with its phases marked and nothing else in it.

    first_forward → first_head → first_early → first_late        the first micro-batch: no gradients are held yet
          forward →       head →       early →       late        every later one: a full set of gradients is
                                                    optimizer     scale, step, drop the gradients

The peak of a step is the highest of its phases, and each phase grows along its own line: at small batches the
optimizer sets the peak, at large ones the loss's backward. One line through the step's own peak is off by 25 %, one per
phase by less than 1 %. Backward is told apart by hooks on the gradients: before the first one the loss and the head are
at work, after half of them most activations are gone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brimful.errors import TaskError
from brimful.task import Loss, Task, loss_terms, map_tensors

# What a forward is opened with: autocast, and attention whose kernels need no preparation where shapes vary.
#
# cuDNN's attention, which torch prefers on Hopper cards and later, builds a plan for every shape it meets and keeps it for as
# long as the process lives. Rows of varying length meet a new shape in every micro-batch. Measured on T5 base and an H200,
# 48 rows: 218 ms a micro-batch and 4.7 MiB of host RAM that never come back, against 84 ms and nothing with torch's own
# kernels; on a shape met before, both take the same. A run of ten thousand steps would have ended with the host's memory.


@contextmanager
def forward_context(device: torch.device, autocast: torch.dtype | None, *, cudnn_attention: bool = False) -> Iterator[None]:
    """For a forward; `autocast` None computes in the weights' own precision."""
    precision = nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast)
    with attention_kernels(cudnn=cudnn_attention), precision:
        yield


@contextmanager
def attention_kernels(*, cudnn: bool) -> Iterator[None]:
    """Without cuDNN's kernels in here, or as torch is set. A backward that computes blocks again needs the forward's."""
    if cudnn or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


MICRO_PHASES = ("forward", "head", "early", "late")
FIRST_PHASES = tuple(f"first_{phase}" for phase in MICRO_PHASES)
Mark = Callable[[str], None]


class Phase(StrEnum):
    """What a step is doing. The value is how messages and events name it."""

    IDLE = "idle"
    COLLATE = "collate"
    TO_DEVICE = "to device"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    SCALE = "gradient scaling"
    CLIP = "clipping"
    RESERVE = "optimizer state reservation"

    @property
    def in_micro_batch(self) -> bool:
        """Whether a smaller micro-batch would need less memory here."""
        return self in (Phase.COLLATE, Phase.TO_DEVICE, Phase.FORWARD, Phase.BACKWARD)


@dataclass(kw_only=True)
class StepContext:
    """A model and its optimizer on their device, ready to step."""

    task: Task
    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    autocast: torch.dtype | None
    """None runs the forward in the weights' own precision."""
    cudnn_attention: bool = True
    """False keeps attention off cuDNN's kernels, forward and backward: see `opened`."""
    scaler: "torch.amp.GradScaler | None" = None
    """Made here for fp16; one that exists already may be given."""
    phase: Phase = field(init=False, default=Phase.IDLE)
    """What the step is doing now. It stands still when an error is raised, so it tells where memory ran out."""
    params: list[nn.Parameter] = field(init=False)
    """All of the model's, and whatever else the optimizer steps."""
    _graded: list[nn.Parameter] = field(init=False, default_factory=list)
    """The parameters that the last full step left a gradient on."""

    def __post_init__(self) -> None:
        stepped = (param for group in self.optimizer.param_groups for param in group["params"])
        self.params = list(dict.fromkeys((*self.model.parameters(), *stepped)))
        if self.scaler is None and self.autocast is torch.float16:
            self.scaler = torch.amp.GradScaler(self.device.type)

    def forward_context(self) -> AbstractContextManager[Any]:
        """What the step's forward runs in."""
        return forward_context(self.device, self.autocast, cudnn_attention=self.cudnn_attention)

    def step(self, batches: Iterable[Any], rows: int, mark: Mark | None = None) -> float:
        """One optimizer step over micro-batches of so many rows in all, made one at a time. Returns the mean loss."""
        total = count = 0.0
        for index, batch in enumerate(batches):
            for term in self.run_micro_batch(batch, rows, mark, "first_" if index == 0 else "").values():
                total, count = total + float(term.sum.detach()), count + float(term.count)
            del term
        mark = mark or (lambda _: None)
        mark("optimizer")
        self.finish(rows / count if count else 1.0)
        mark("idle")
        return total / count if count else float("nan")

    def run_micro_batch(
        self, batch: Any, over: float | Mapping[str, float], mark: Mark | None = None, prefix: str = ""
    ) -> dict[str, Loss]:
        """Forward and backward of one micro-batch; its gradients are added to those held.

        Each term's sum is divided by `over` first: the rows of the step, or the term's own total where it is known.
        """
        if mark:
            mark(f"{prefix}forward")
        self.phase = Phase.TO_DEVICE
        batch = to_device(batch, self.device)
        self.phase = Phase.FORWARD
        with self.forward_context():
            terms = loss_terms(self.task, self.task.loss(self.model, batch), model=self.model, batch=batch)
            scaled = _mean(self.task, terms, over)
        del batch  # in backward only what the graph needs of it is kept
        if mark:
            mark(f"{prefix}head")
        self.phase = Phase.BACKWARD
        phases = nullcontext() if mark is None else _gradient_phases(self.model, mark, prefix)
        with attention_kernels(cudnn=self.cudnn_attention), phases:
            (self.scaler.scale(scaled) if self.scaler else scaled).backward()
        return terms

    def finish(self, scale: float) -> None:
        """Gradients to the mean over what was counted, one optimizer step, gradients dropped."""
        self.scale_gradients(scale)
        self.apply()
        self.drop_gradients()

    def scale_gradients(self, scale: float) -> None:
        self._graded = [param for param in self.params if param.grad is not None]
        if self._graded and scale != 1.0:
            torch._foreach_mul_([param.grad for param in self._graded if param.grad is not None], scale)

    def apply(self) -> None:
        """The optimizer's step, through the scaler where there is one."""
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def drop_gradients(self) -> None:
        """As after an optimizer step. Not by the model's zero_grad, whose walk over T5's parts takes 2 ms."""
        if any(param.grad is not None for param in self.params):
            self.optimizer.zero_grad(set_to_none=True)
        for param in self.params:
            param.grad = None

    def hold_gradients(self) -> None:
        """As before every micro-batch but the first: a gradient on each parameter that gets one."""
        for param in self._graded:
            if param.grad is None:
                param.grad = torch.zeros_like(param)


def _mean(task: Task, terms: Mapping[str, Loss], over: float | Mapping[str, float]) -> torch.Tensor:
    if isinstance(over, Mapping) and set(over) != set(terms):
        raise TaskError(
            f"task {task.name}: its loss has the terms {sorted(terms)}, its counts(batch) {sorted(over)}; they must be the same"
        )
    parts = [term.sum / (over[name] if isinstance(over, Mapping) else over) for name, term in terms.items()]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of the batch on the device; anything else as it is."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def tensors_of(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(batch, found.append)
    return found


def split_batch(batch: Any, at: int) -> tuple[Any, Any]:
    """The batch's rows before and from `at`."""
    return map_tensors(batch, lambda t: t[:at] if t.ndim else t), map_tensors(batch, lambda t: t[at:] if t.ndim else t)


@contextmanager
def _gradient_phases(model: nn.Module, mark: Mark, prefix: str) -> Iterator[None]:
    """Mark `early` at the first gradient that is ready and `late` at half of them."""
    params = [p for p in model.parameters() if p.requires_grad]
    ready = 0

    def hook(_: torch.Tensor) -> None:
        nonlocal ready
        ready += 1
        if ready == 1:
            mark(f"{prefix}early")
        if ready == (len(params) + 1) // 2:
            mark(f"{prefix}late")

    handles = [p.register_post_accumulate_grad_hook(hook) for p in params]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
