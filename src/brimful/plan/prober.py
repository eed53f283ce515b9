"""A task's model on its device, stepped and metered at any size, with nothing left behind.

A model that `task.model()` made for the purpose is thrown away afterwards. One that the user handed over is put back
bit for bit: weights, buffers, gradients, optimizer state, modes; random state in either case.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from brimful.errors import TaskError, UserError
from brimful.memory.bare import Rig, rows_of, to_device
from brimful.memory.meter import has_peak_statistics, meter
from brimful.memory.model import Probe
from brimful.memory.oom import OutOfMemory, attempt, is_oom
from brimful.plan.target import Target
from brimful.task import Loss, Shape, Task

Progress = Callable[[str], None]
"""Called with one short phrase before each piece of work."""

TIMED_S = 0.4
"""Timing one size goes on for at least so long, or for five repeats."""


class Prober:
    """Runs probes and timings on one rig, and counts them."""

    def __init__(self, rig: Rig, target: Target, progress: Progress) -> None:
        self.rig = rig
        self.target = target
        self.probes = 0
        self.ooms = 0
        self.fixed_bytes = 0
        self._progress = progress
        self._checked = False

    def run(self, rows: int, shape: Shape, *, whole: bool = False, final: bool = False) -> Probe | OutOfMemory:
        """Meter one step of two micro-batches, or of one where the step is `whole`. `final` reads reserved bytes too."""
        self._progress(f"{'verify' if final else 'probe'} {show_size(rows, shape)}")
        self.probes += 1
        result = attempt(lambda: self._metered(rows, shape, whole, final), self.rig.device)
        if isinstance(result, OutOfMemory):
            self.ooms += 1
            self._drop_gradients()
        return result

    def warm_up(self, shape: Shape) -> OutOfMemory | None:
        """One row, unmetered: checks the task, and makes the optimizer allocate the state that it keeps from then on."""
        self._progress(f"warm up with {show_size(1, shape)}")
        batch = self.batch(1, shape)
        failure = attempt(lambda: self._first_step(batch, shape), self.rig.device)
        self._drop_gradients()
        self.ooms += failure is not None
        self.fixed_bytes = self._fixed()
        return failure

    def _first_step(self, batch: Any, shape: Shape) -> None:
        with blame(self.rig.task, "loss", f"a dummy batch of {show_size(1, shape)}"):
            with self.rig.opened():
                _check_loss(self.rig.task, self.rig.task.loss(self.rig.model, to_device(batch, self.rig.device)))
            self.rig.step([batch], lambda _: None)

    def _fixed(self) -> int:
        """What lives through every step: weights, buffers, optimizer state, and on a card the libraries' workspaces."""
        if has_peak_statistics(self.rig.device):
            return torch.accelerator.memory_allocated(self.rig.device)
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _held(self.rig)}
        return sum(storages.values())

    def seconds(self, rows: int, shape: Shape) -> float:
        """Median time of forward and backward at this size: warmed up, synchronised, outside any ledger."""
        self._progress(f"time {show_size(rows, shape)}")
        with _disable_current_modes():
            batch = self.batch(rows, shape)
            self.rig.micro(batch, rows)
            return self._median(lambda: self.rig.micro(batch, rows))

    def optimizer_seconds(self, shape: Shape) -> float:
        """Median time of what happens once a step: scaling the gradients, the optimizer, dropping the gradients."""
        times = []
        with _disable_current_modes():
            for _ in range(3):
                self.rig.micro(self.batch(1, shape), 1)
                times.append(self._clock(lambda: self.rig.finish(1.0)))
        return sorted(times)[1]

    def batch(self, rows: int, shape: Shape) -> Any:
        with blame(self.rig.task, "dummy", show_size(rows, shape)):
            batch = self.rig.task.dummy(rows, shape)
            found = rows_of(batch)
        if found != rows:
            raise TaskError(f"task {self.rig.task.name}: dummy({rows}, {shape}) gave a batch of {found} rows")
        return batch

    def _metered(self, rows: int, shape: Shape, whole: bool, final: bool) -> Probe:
        device = self.rig.device
        batches = [self.batch(rows, shape) for _ in range(1 if whole else 2)]
        limit = None if has_peak_statistics(device) else self.target.limit_bytes
        metered = meter(device, limit_bytes=limit, adopt=_held(self.rig), reserved=final)
        with metered, blame(self.rig.task, "loss", f"a dummy batch of {show_size(rows, shape)}"):
            self.rig.step(batches, metered.phase)
        reading = metered.reading()
        phases = {name: peak for name, peak in reading.phases.items() if name != "idle"}
        return Probe(rows=rows, shape=shape, phases=phases, reserved_bytes=reading.reserved_bytes)

    def _median(self, work: Callable[[], Any]) -> float:
        times: list[float] = []
        while len(times) < 2 or (sum(times) < TIMED_S and len(times) < 5):
            times.append(self._clock(work))
        self._drop_gradients()
        return sorted(times)[len(times) // 2] if len(times) > 2 else min(times)

    def _clock(self, work: Callable[[], Any]) -> float:
        self._synchronise()
        start = time.perf_counter()
        work()
        self._synchronise()
        return time.perf_counter() - start

    def _synchronise(self) -> None:
        if self.rig.device.type != "cpu":
            torch.accelerator.synchronize(self.rig.device)

    def _drop_gradients(self) -> None:
        self.rig.model.zero_grad(set_to_none=True)
        self.rig.optimizer.zero_grad(set_to_none=True)


def make_rig(
    task: Task, model: nn.Module, optimizer: Optimizer | None, target: Target, autocast: torch.dtype | None
) -> Rig:
    if optimizer is None:
        with blame(task, "optimizer"):
            optimizer = task.optimizer(model)
    return Rig(task=task, model=model, optimizer=optimizer, device=target.device, autocast=autocast)


@contextmanager
def blame(task: Task, part: str, on: str = "") -> Iterator[None]:
    """An error in the user's code becomes one sentence that names the part at fault; out-of-memory stays what it is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_oom(error):
            raise
        words = str(error).strip().splitlines() or [""]
        where = f" on {on}" if on else ""
        raise TaskError(f"task {task.name}: its {part} failed{where}: {type(error).__name__}: {words[0]}") from error


def show_size(rows: int, shape: Shape) -> str:
    """`8 rows of 256+256`."""
    return f"{rows} row{'s' * (rows != 1)}" + (f" of {'+'.join(map(str, shape))}" if shape else "")


def _held(rig: Rig) -> Iterator[torch.Tensor]:
    """Every tensor that lives through the step: weights, buffers, optimizer state."""
    yield from rig.model.parameters()
    yield from rig.model.buffers()
    for state in rig.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _check_loss(task: Task, loss: Any) -> None:
    if not isinstance(loss, Loss):
        raise TaskError(f"task {task.name}: its loss returned a {type(loss).__name__}; return brimful.Loss(sum=…, count=…)")
    if not isinstance(loss.sum, torch.Tensor) or loss.sum.numel() != 1 or not loss.sum.requires_grad:
        raise TaskError(f"task {task.name}: Loss.sum must be one number that depends on the model's trainable weights")
    value, count = float(loss.sum.detach()), float(loss.count)
    if not math.isfinite(value):
        raise TaskError(f"task {task.name}: its loss is {value} at the first probe, before any training; check dummy() and loss()")
    if count <= 0:
        raise TaskError(f"task {task.name}: its loss counted {count:g} on a dummy batch; Loss.count must be above 0")
