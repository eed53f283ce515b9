"""A task's model on its device, stepped and metered at any size, with nothing left behind.

A model that `task.model()` made for the purpose is thrown away afterwards. One that the user handed over is put back
bit for bit: weights, buffers, gradients, optimizer state, modes; random state in either case.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from brimful.errors import TaskError, UserError, in_one_line
from brimful.machine.host import Host
from brimful.memory.context import StepContext, to_device
from brimful.memory.ledger import active_limit_bytes
from brimful.memory.meter import has_peak_statistics, meter
from brimful.memory.model import Probe
from brimful.memory.oom import OutOfMemory, attempt, is_oom
from brimful.planning.target import Target
from brimful.task import Shape, Task, loss_terms, rows_of
from brimful.units import show_rows

T = TypeVar("T")
Progress = Callable[[str], object]
"""Called with one short phrase before each piece of work."""

Mode = Literal["later", "whole", "full"]
"""What a probe runs: one micro-batch with gradients held, a step of a single one, or a step of two."""

TIMED_S = 0.15
"""Timing one size goes on for at least so long, or for five repeats."""


class Prober:
    """Runs probes and timings on one rig, and counts them."""

    def __init__(self, rig: StepContext, target: Target, progress: Progress) -> None:
        self.rig = rig
        self.target = target
        self.probes = 0
        self.ooms = 0
        self.fixed_bytes = 0
        self._progress = progress

    def run(self, rows: int, shape: Shape, mode: Mode, *, reserved: bool = False) -> Probe | OutOfMemory:
        """Meter one step or micro-batch of this size. `reserved` empties the device's cache first and reads it too."""
        self._progress(f"{'verify' if reserved else 'probe'} {show_size(rows, shape)}")
        return self._attempt(lambda: self._metered(rows, shape, mode, reserved))

    def run_without_limit(self, rows: int, shape: Shape, mode: Mode) -> Probe | None:
        """What a step of this size would take if nothing limited it; None where only the device could tell."""
        if has_peak_statistics(self.rig.device):
            return None
        self._progress(f"probe {show_size(rows, shape)}")
        result = self._attempt(lambda: self._metered(rows, shape, mode, reserved=False, limited=False))
        return None if isinstance(result, OutOfMemory) else result

    @property
    def room_bytes(self) -> int:
        """What may be used in truth, whatever limit was asked for: half of what is free, or of the block around this call."""
        if has_peak_statistics(self.rig.device):
            return self.target.limit_bytes
        return (active_limit_bytes() or Host.detect().ram_available_bytes) // 2

    def time(self, rows: int, shape: Shape, *, whole: bool, reserved: bool) -> tuple[float, Probe | None] | OutOfMemory:
        """Median seconds of forward and backward: warmed up, synchronised, outside any ledger.

        Where the device keeps peaks by itself, the warm-up is metered and comes as a reading.
        """
        self._progress(f"time {show_size(rows, shape)}")
        return self._attempt(lambda: self._timed(rows, shape, whole, reserved))

    def warm_up(self, rows: int, shape: Shape) -> OutOfMemory | None:
        """One unmetered step: checks the task, and makes the optimizer allocate the state that it keeps from then on."""
        self._progress(f"warm up with {show_size(rows, shape)}")
        self._wake_libraries()
        batch = self.batch(rows, shape)
        failure = attempt(lambda: self._first_step(batch, rows, shape), self.rig.device)
        self.rig.drop_gradients()
        self.ooms += failure is not None
        self.fixed_bytes = self._fixed()
        return failure

    def _first_step(self, batch: Any, rows: int, shape: Shape) -> None:
        with blame(self.rig.task, "loss", f"a dummy batch of {show_size(rows, shape)}"):
            with self.rig.opened():
                _check_loss(self.rig, to_device(batch, self.rig.device))
            self.rig.micro(batch, rows)
        with blame(self.rig.task, "optimizer"):
            self.rig.finish(1.0)

    def _wake_libraries(self) -> None:
        """Have cuBLAS take its workspaces now (64 MiB, one for forward and one for backward), not at some later size."""
        if self.rig.device.type != "cuda":
            return
        for dtype in {torch.float32, self.rig.autocast or torch.float32}:
            square = torch.ones(512, 512, device=self.rig.device, dtype=dtype, requires_grad=True)
            torch.nn.functional.linear(square, square, square[0]).sum().backward()

    def _fixed(self) -> int:
        """What lives through every step: weights, buffers, optimizer state, and on a card the libraries' workspaces."""
        if has_peak_statistics(self.rig.device):
            return torch.accelerator.memory_allocated(self.rig.device)
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _held(self.rig)}
        return sum(storages.values())

    def optimizer_seconds(self, rows: int, shape: Shape) -> float:
        """Time of what happens once a step: scaling the gradients, the optimizer, dropping the gradients."""
        with _disable_current_modes():
            self.rig.micro(self.batch(rows, shape), rows)
            return self._clock(lambda: self.rig.finish(1.0))

    def batch(self, rows: int, shape: Shape) -> Any:
        with blame(self.rig.task, "dummy", show_size(rows, shape)):
            batch = self.rig.task.dummy(rows, shape)
            found = rows_of(batch)
        if found != rows:
            raise TaskError(f"task {self.rig.task.name}: dummy({rows}, {shape}) gave a batch of {found} rows")
        return batch

    @property
    def gradient_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.rig.model.parameters() if p.requires_grad)

    def _attempt(self, work: Callable[[], T]) -> T | OutOfMemory:
        self.probes += 1
        result = attempt(work, self.rig.device)
        self.rig.drop_gradients()
        self.ooms += isinstance(result, OutOfMemory)
        return result

    def _metered(self, rows: int, shape: Shape, mode: Mode, reserved: bool, limited: bool = True) -> Probe:
        rig, device = self.rig, self.rig.device
        if mode == "later":
            rig.hold_gradients()
        limit = self.target.limit_bytes if limited else None
        metered = meter(device, limit_bytes=limit, adopt=_held(rig), reserved=reserved)
        with metered, blame(rig.task, "loss", f"a dummy batch of {show_size(rows, shape)}"):
            if mode == "later":
                rig.micro(self.batch(rows, shape), rows, metered.phase)
            else:
                count = 2 if mode == "full" else 1
                rig.step((self.batch(rows, shape) for _ in range(count)), count * rows, metered.phase)
        reading = metered.reading()
        phases = {name: peak for name, peak in reading.phases.items() if name != "idle"}
        return Probe(rows=rows, shape=shape, phases=phases, reserved_bytes=reading.reserved_bytes)

    def _timed(self, rows: int, shape: Shape, whole: bool, reserved: bool) -> tuple[float, Probe | None]:
        with _disable_current_modes():
            reading = None
            if has_peak_statistics(self.rig.device):
                reading = self._metered(rows, shape, "whole" if whole else "later", reserved)
            batch, times = self.batch(rows, shape), list[float]()
            if reading is None:
                self.rig.micro(batch, rows)
            while len(times) < 2 or (sum(times) < TIMED_S and len(times) < 5):
                if whole:
                    self.rig.drop_gradients()
                times.append(self._clock(lambda: self.rig.micro(batch, rows)))
            return sorted(times)[(len(times) - 1) // 2], reading

    def _clock(self, work: Callable[[], Any]) -> float:
        self._synchronise()
        start = time.perf_counter()
        work()
        self._synchronise()
        return time.perf_counter() - start

    def _synchronise(self) -> None:
        if self.rig.device.type != "cpu":
            torch.accelerator.synchronize(self.rig.device)


def make_rig(
    task: Task, model: nn.Module, optimizer: Optimizer | None, target: Target, autocast: torch.dtype | None,
    *, cudnn_attention: bool = True,
) -> StepContext:  # fmt: skip
    if optimizer is None:
        with blame(task, "optimizer"):
            optimizer = task.optimizer(model)
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                f"task {task.name}: its optimizer() returned a {type(optimizer).__name__}, not a torch.optim.Optimizer"
            )
    return StepContext(
        task=task, model=model, optimizer=optimizer, device=target.device, autocast=autocast, cudnn_attention=cudnn_attention
    )  # fmt: skip


@contextmanager
def blame(task: Task, part: str, on: str = "") -> Iterator[None]:
    """An error in the user's code becomes one sentence that names the part at fault; out-of-memory stays what it is."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if is_oom(error):
            raise
        where = f" on {on}" if on else ""
        raise TaskError(f"task {task.name}: its {part} failed{where}: {in_one_line(error)}") from error


def show_size(rows: int, shape: Shape) -> str:
    """`8 rows of 256+256`."""
    return show_rows(rows) + (f" of {'+'.join(map(str, shape))}" if shape else "")


def _held(rig: StepContext) -> Iterator[torch.Tensor]:
    """Every tensor that is there before the step: weights, gradients, buffers, optimizer state."""
    yield from rig.model.parameters()
    yield from (p.grad for p in rig.model.parameters() if p.grad is not None)
    yield from rig.model.buffers()
    for state in rig.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _check_loss(rig: StepContext, batch: Any) -> None:
    """A first look, before any training: finite sums, counts above 0, and names that `counts` knows."""
    task = rig.task
    for term in loss_terms(task, task.loss(rig.model, batch), model=rig.model, batch=batch).values():
        value, count = float(term.sum.detach()), float(term.count)
        if not math.isfinite(value):
            raise TaskError(
                f"task {task.name}: its loss is {value} at the first probe, before any training; check dummy() and loss()"
            )
        if count <= 0:
            raise TaskError(
                f"task {task.name}: its loss counted {count:g} on a dummy batch; Loss.count must be above 0"
            )
