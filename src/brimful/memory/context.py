"""One optimizer step, with its phases marked for the meter and nothing else in it.

    first_forward → first_head → first_early → first_late        the first micro-batch: no gradients are held yet
          forward →       head →       early →       late        each later one: a full set of gradients is held
                                                    optimizer     scale, step, drop the gradients

The peak of a step is the highest of its phases, and each phase grows along its own line: at small batches the optimizer
sets the peak, at large ones the backward of the loss. One line through the step's own peak is off by 25 %, one line per
phase by less than 1 %. Hooks on the gradients divide the backward: before the first gradient the loss and the head are
computed, after half of them most activations are freed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brimful.memory.graphs import Graphs
from brimful.memory.layout import PADDED, Layout
from brimful.task import Loss, Task, loss_terms, map_tensors, other_terms

Mark = Callable[[str], None]
"""Called with the name of each phase of a metered step as it begins."""


class Phase(StrEnum):
    """What a step is doing. The value is how messages and events name it."""

    IDLE = "idle"
    COLLATE = "collate"
    TO_DEVICE = "to device"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
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
    """None runs the forward in the precision of the weights."""
    layout: Layout = PADDED
    """How rows become a batch."""
    cudnn_attention: bool = True
    """False keeps attention off cuDNN's kernels, forward and backward: see `forward_context`."""
    scaler: "torch.amp.GradScaler | None" = None
    """Created here for fp16 unless one is passed."""
    graphs: Graphs | None = None
    """Replays micro-batches of one size instead of launching them."""
    phase: Phase = field(init=False, default=Phase.IDLE)
    """What the step is doing now. It stays when an error is raised, so it tells where memory ran out."""
    params: list[nn.Parameter] = field(init=False)
    """All parameters of the model, and any others that the optimizer steps."""
    _stepped: list[nn.Parameter] = field(init=False, default_factory=list)
    """The optimizer's parameters when `params` was listed."""
    _with_gradient: list[nn.Parameter] = field(init=False, default_factory=list)
    """The parameters that got a gradient in the last full step."""

    def __post_init__(self) -> None:
        self.follow_optimizer()
        if self.scaler is None and self.autocast is torch.float16:
            self.scaler = torch.amp.GradScaler(self.device.type)

    def follow_optimizer(self) -> bool:
        """List the parameters again if the optimizer's have been added to or replaced. Returns whether they have.

        Only the optimizer is asked, since walking through the model takes 2 ms for T5.
        """
        stepped = [param for group in self.optimizer.param_groups for param in group["params"]]
        if [*map(id, stepped)] == [*map(id, self._stepped)]:
            return False
        self._stepped, self.params = stepped, list(dict.fromkeys((*self.model.parameters(), *stepped)))
        return True

    def state_tensors(self) -> list[torch.Tensor]:
        """Weights, buffers and the optimizer's state: what is on the device between two steps."""
        return [*self.params, *self.model.buffers(), *tensors_of(list(self.optimizer.state.values()))]

    def step(self, batches: Iterable[Any], rows: int, mark: Mark | None = None) -> float:
        """One optimizer step over micro-batches that have `rows` rows in all. Returns the mean loss."""
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
        self, batch: Any, divisor: "Divisor", mark: Mark | None = None, prefix: str = ""
    ) -> dict[str, Loss]:
        """Forward and backward of one micro-batch. Its gradients are added to those held.

        The sum of each term is divided by `divisor` first: any number, an estimate of the count, or each term's count.
        """
        if self.graphs is not None and mark is None and self.scaler is None:
            self.phase = Phase.FORWARD
            return self.graphs.run(self, batch, divisor, lambda: self.forward_backward(batch, divisor))
        return self.forward_backward(batch, divisor, mark, prefix)

    def forward_backward(
        self, batch: Any, divisor: "Divisor | torch.Tensor", mark: Mark | None = None, prefix: str = ""
    ) -> dict[str, Loss]:
        """As `run_micro_batch`, without a graph."""
        if mark:
            mark(f"{prefix}forward")
        self.phase = Phase.TO_DEVICE
        batch = to_device(batch, self.device)
        self.phase = Phase.FORWARD
        with self.forward_context():
            terms = loss_terms(self.task, self.task.loss(self.model, batch), model=self.model, batch=batch)
            scaled = _scaled_sum(self.task, terms, divisor)
        del batch  # the backward keeps only what the graph needs of it
        if mark:
            mark(f"{prefix}head")
        self.phase = Phase.BACKWARD
        phases = nullcontext() if mark is None else _gradient_phases(self.model, mark, prefix)
        with attention_kernels(cudnn=self.cudnn_attention), phases:
            (self.scaler.scale(scaled) if self.scaler else scaled).backward()
        return terms

    def forward_context(self) -> AbstractContextManager[Any]:
        """What the forward of the step runs in."""
        return forward_context(self.device, self.autocast, cudnn_attention=self.cudnn_attention)

    def finish(self, scale: float) -> None:
        """Scale the gradients to the mean over what was counted, step the optimizer, drop the gradients."""
        self.scale_gradients(scale)
        self.apply()
        self.drop_gradients()

    def scale_gradients(self, scale: torch.Tensor | float) -> None:
        """In place. A factor on the device stays there, so that nothing waits for it.

        Half precision is the exception: the factor would be rounded to it, and be off by up to 0.4 %.
        """
        self._with_gradient = [param for param in self.params if param.grad is not None]
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for param in self._with_gradient:
            assert param.grad is not None
            groups.setdefault((param.grad.device, param.grad.dtype), []).append(param.grad)
        if any(dtype.itemsize < 4 for _, dtype in groups):
            scale = float(scale)
        for (device, dtype), gradients in groups.items():
            if isinstance(scale, torch.Tensor):
                torch._foreach_mul_(gradients, scale.to(device, dtype))
            elif scale != 1.0:
                torch._foreach_mul_(gradients, scale)

    def apply(self) -> None:
        """The optimizer's step, through the scaler if there is one."""
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def drop_gradients(self) -> None:
        """As after an optimizer step. Not by the model's zero_grad, which takes 2 ms to walk through T5."""
        if any(param.grad is not None for param in self.params):
            self.optimizer.zero_grad(set_to_none=True)
        for param in self.params:
            param.grad = None

    def hold_gradients(self) -> None:
        """As before every micro-batch but the first: a gradient on each parameter that gets one."""
        for param in self._with_gradient:
            if param.grad is None:
                param.grad = torch.zeros_like(param)


class CountEstimate:
    """What a sum is divided by before the count of a step is known: the count of its first micro-batch, extrapolated.

    Gradients then have the scale of the mean, which a `GradScaler` and hooks expect, and a step of one micro-batch shows
    them exactly what a plain loop does. Nothing is read from the device.
    """

    def __init__(self, rows: int, first_rows: int) -> None:
        """`first_rows` of these rows are in the first micro-batch."""
        self._rows, self._first_rows = rows, first_rows
        self._value: torch.Tensor | float | None = None

    def __call__(self, term: Loss) -> torch.Tensor | float:
        """The estimate, made from the first term that it is called with."""
        if self._value is None:
            factor, count = self._rows / self._first_rows, term.count
            if isinstance(count, torch.Tensor):
                count = count.detach().to(term.sum.device, torch.promote_types(term.sum.dtype, torch.float32))
                self._value = torch.where(count > 0, factor * count, float(self._rows))  # all labels may be masked
            else:
                self._value = factor * float(count) if count > 0 else float(self._rows)
        return self._value

    def before_forward(self, batch: Any) -> torch.Tensor | float:
        """The estimate where it cannot wait for the loss: from the batch's own `count`, else the rows."""
        if self._value is None:
            count = batch.get("count") if isinstance(batch, Mapping) else None
            known = float(count) if isinstance(count, torch.Tensor) and count.device.type == "cpu" else 0.0
            self._value = self._rows / self._first_rows * known if known > 0 else float(self._rows)
        return self._value

    @property
    def value(self) -> torch.Tensor | float:
        """1 if nothing was divided."""
        return 1.0 if self._value is None else self._value


Divisor = float | CountEstimate | Mapping[str, float]


@contextmanager
def forward_context(
    device: torch.device, autocast: torch.dtype | None, *, cudnn_attention: bool = False
) -> Iterator[None]:
    """What a forward runs in: autocast, unless that is None, and attention without cuDNN unless it is asked for.

    cuDNN's attention, which torch prefers on Hopper GPUs and later, builds a plan for every new shape and keeps it as long
    as the process lives. Rows of varying length bring a new shape in every micro-batch. Measured on T5 base and an H200,
    48 rows: 218 ms a micro-batch and 4.7 MiB of host RAM that never come back, against 84 ms and nothing with torch's own
    kernels; for a known shape both take the same. Ten thousand such steps would use up the host's memory.
    """
    precision = nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast)
    with attention_kernels(cudnn=cudnn_attention), precision:
        yield


@contextmanager
def attention_kernels(*, cudnn: bool) -> Iterator[None]:
    """Switch cuDNN's attention off in here, or leave torch as it is set.

    A backward that recomputes blocks needs the same kernels as the forward.
    """
    if cudnn or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device, and every object that can be moved, such as a batch of graphs."""
    if not isinstance(batch, (Mapping, list, tuple, torch.Tensor)) and callable(getattr(batch, "to", None)):
        return batch.to(device)
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def tensors_of(batch: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    map_tensors(batch, tensors.append)
    return tensors


def split_batch(batch: Any, at: int) -> tuple[Any, Any]:
    """The rows of the batch before `at`, and the others."""
    return map_tensors(batch, lambda t: t[:at] if t.ndim else t), map_tensors(batch, lambda t: t[at:] if t.ndim else t)


def _scaled_sum(task: Task, terms: Mapping[str, Loss], divisor: Divisor | torch.Tensor) -> torch.Tensor:
    if isinstance(divisor, Mapping) and set(divisor) != set(terms):
        raise other_terms(task, terms, divisor)

    def divided(name: str, term: Loss) -> torch.Tensor:
        if isinstance(divisor, CountEstimate):
            return term.sum / divisor(term)
        return term.sum / (divisor[name] if isinstance(divisor, Mapping) else divisor)

    parts = [divided(name, term) for name, term in terms.items()]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


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
