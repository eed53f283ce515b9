"""What the finders compete on: the same task, limit and step for each."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import brimful
from brimful.memory.context import StepContext, to_device
from brimful.memory.meter import Meter, meter
from brimful.memory.oom import is_oom
from brimful.planning.target import Target
from brimful.task import Shape, Task


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What every finder gets, and the step that every result is measured with."""

    task: Task
    shape: Shape
    target: Target
    autocast: torch.dtype | None
    most: int
    """No finder may try more rows than this."""
    start: int
    """The rows that accelerate starts with."""

    @property
    def device(self) -> torch.device:
        return self.target.device

    def build(self, *, on_host: bool = False) -> StepContext:
        """A new model and optimizer on the device, built there, or on the host and moved as most scripts do."""
        torch.manual_seed(0)
        with torch.device("cpu" if on_host else self.device):
            model = self.task.model()
        model = model.to(self.device).train()
        optimizer = self.task.optimizer(model)
        return StepContext(task=self.task, model=model, optimizer=optimizer, device=self.device, autocast=self.autocast)

    def batch(self, rows: int) -> Any:
        return self.task.dummy(rows, self.shape)

    def meter(self, context: StepContext) -> Meter:
        """Peaks as the GPU reports them, or as a simulated memory counts them."""
        limit_bytes = self.target.limit_bytes if self.device.type == "cpu" else None
        return meter(self.device, limit_bytes=limit_bytes, adopt=held(context), reserved=True)

    def clock(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """What the work returns, and its seconds with the device's queue empty at both ends."""
        self._synchronise()
        start = time.perf_counter()
        result = work()
        self._synchronise()
        return result, time.perf_counter() - start

    def free(self) -> None:
        """Free what the last finder left in reference cycles and in the allocator's cache."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table: what a finder returned, and how that ran. None is unknown."""

    finder: str
    rows: int | None = None
    ooms: int | None = None
    seconds: float | None = None
    ran: bool | None = None
    """Whether the finder itself ran full steps of at least this many rows."""
    predicted_peak_bytes: int | None = None
    checkpointed: int = 0
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    rows_per_s: float | None = None
    seconds_ratio: float | None = None
    """In units of Brimful's, as the next."""
    rows_per_s_ratio: float | None = None
    all_seconds: tuple[float, ...] = ()
    all_rows: tuple[int, ...] = ()
    note: str = ""
    problem: str = ""
    """Why something above is missing."""
    details: dict[str, Any] = field(default_factory=dict)


class Limit:
    """The limit for a peer: the GPU's cap, or a simulated memory around each attempt. Counts how often it is exceeded.

    One simulated memory serves all attempts, so what a peer does not free after one is in its way in the next.
    """

    def __init__(self, target: Target) -> None:
        self._ledger = brimful.simulated_memory(target.limit_bytes) if target.device.type == "cpu" else None
        self._seen = 0

    @contextlib.contextmanager
    def attempt(self, held: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Around whatever may run out of memory; `held` are tensors that exist before it begins."""
        try:
            if self._ledger is None:
                yield
                return
            self._ledger.adopt(held)
            with self._ledger:
                yield
        except Exception as error:
            self._seen += is_oom(error)
            raise

    @property
    def ooms(self) -> int:
        return self._seen if self._ledger is None else self._ledger.ooms


def full_step(context: StepContext, batch: Any) -> None:
    """What a plain training loop does once, and no more."""
    forward_backward(context, batch)
    if context.scaler:
        context.scaler.step(context.optimizer)
        context.scaler.update()
    else:
        context.optimizer.step()
    context.optimizer.zero_grad(set_to_none=True)


def forward_backward(context: StepContext, batch: Any) -> None:
    with context.forward_context():
        loss = context.task.loss(context.model, to_device(batch, context.device))
    mean = loss.sum / loss.count
    (context.scaler.scale(mean) if context.scaler else mean).backward()


def held(context: StepContext) -> Iterator[torch.Tensor]:
    """Weights, buffers and optimizer state: what lives through a step."""
    yield from context.model.parameters()
    yield from context.model.buffers()
    for state in context.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
