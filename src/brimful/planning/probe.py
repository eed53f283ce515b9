"""Probes: a task's model on its device, stepped and metered at any size; and the rows and models that they need.

A probe batch comes from `task.dummy`. A task without one is probed with real rows (`with_dummy`): those whose lengths
come closest to the shape wanted, repeated and collated. A user's own model is put back bit for bit by the planner.
"""

import copy
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from brimful.errors import TaskError, UserError, kind_of
from brimful.machine.host import Host
from brimful.memory.context import StepContext, to_device
from brimful.memory.layout import PACKED
from brimful.memory.ledger import active_limit_bytes
from brimful.memory.meter import has_peak_statistics, meter, synchronize
from brimful.memory.model import Probe
from brimful.memory.oom import OutOfMemory, attempt, is_oom
from brimful.planning.plan_time import PlanTime, now
from brimful.planning.target import Target
from brimful.task import Dataset, Loss, Shape, Task, failed_method, failure, loss_terms, shared_rows
from brimful.units import show_rows

T = TypeVar("T")
Progress = Callable[[str], object]
"""Called with one short phrase before each piece of work."""

Mode = Literal["later", "whole", "full"]
"""What a probe runs: one micro-batch with gradients held, a step of one micro-batch, or a step of two."""

SAMPLED_ROWS, SHAPES_S, SHOW_EVERY = 2000, 3.0, 50
"""If reading all rows would take longer than `SHAPES_S` seconds, `SAMPLED_ROWS` are read, or fewer once that time is over. The clock
is read, and progress shown, every `SHOW_EVERY` rows."""
LENGTHS_LOOKED_AT = 20_000
"""Rows of a token store whose lengths give the mean row."""
COLLATED_ROWS = 4
"""Rows that `collate` is tried on first."""
COMPARED_SIZES, COMPARE_SIZES_S, UNEVEN = 512, 0.5, 1.5
"""For a task without `shape`: how many rows are collated one by one, for how many seconds at most, and how much larger than the
smallest the largest must be to count as uneven. With 32 rows, a long row that is one in a hundred would be missed three
times out of four."""
TIMED_S = 0.15
"""A size is timed for at least this long, or for five repeats; twice if the plan is deterministic."""
SLOW_S = 1.0
"""A size that takes longer than this is timed once, because time for planning is limited."""
PASSES: dict[Mode, int] = {"later": 1, "whole": 1, "full": 2}
"""Micro-batches that a probe runs."""


class Prober:
    """Runs probes and timings of one model, and counts them."""

    def __init__(self, context: StepContext, target: Target, plan_time: PlanTime, progress: Progress) -> None:
        self.context = context
        self.target = target
        self.plan_time = plan_time
        self.probes = 0
        self.ooms = 0
        self.fixed_bytes = 0
        """What stays allocated between steps: weights, buffers, optimizer state and, on CUDA, library workspaces."""
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in context.model.parameters() if p.requires_grad)
        self.token_bytes = 0.0
        """What a token of a micro-batch takes, as far as a few of them tell; 0 until `learn_token_bytes` was called."""
        self._progress = progress

    def show(self, phrase: str) -> None:
        self._progress(phrase)

    def run(self, rows: int, shape: Shape, mode: Mode, *, reserved: bool = False) -> Probe | OutOfMemory:
        """Meter a step or a micro-batch of this size. `reserved` empties the device's cache first and reads it too."""
        self._progress(f"{'verify' if reserved else 'probe'} {self.context.layout.show(rows, shape)}")
        return self._attempt(lambda: self._metered(rows, shape, mode, reserved))

    def run_without_limit(self, rows: int, shape: Shape, mode: Mode) -> Probe | None:
        """What a step of this size would take without the limit; None if only the device itself could tell."""
        if has_peak_statistics(self.context.device):
            return None
        self._progress(f"probe {self.context.layout.show(rows, shape)}")
        result = self._attempt(lambda: self._metered(rows, shape, mode, reserved=False, limited=False))
        return None if isinstance(result, OutOfMemory) else result

    @property
    def available_bytes(self) -> int:
        """What may really be used, whatever the limit: half of what is free, or of the simulated memory around us."""
        if has_peak_statistics(self.context.device):
            return self.target.limit_bytes
        return (active_limit_bytes() or Host.detect().ram_available_bytes) // 2

    def time(self, rows: int, shape: Shape, *, whole: bool, reserved: bool) -> tuple[float, Probe | None] | OutOfMemory:
        """Median seconds of forward and backward: warmed up, synchronised, without the ledger, which slows a step.

        On a device that counts peaks by itself the warm-up is metered and returned as a probe.
        """
        self._progress(f"time {self.context.layout.show(rows, shape)}")
        return self._attempt(lambda: self._timed(rows, shape, whole, reserved))

    def simulation_slowdown(self, rows: int, shape: Shape) -> float:
        """How many times as long a micro-batch takes where training simulates the limit: on a CPU, if the user set one.

        Every operation is counted there, which may double the time of a small model. Steps with and without take turns, so that a
        machine that others use slows both.
        """
        if not self.target.requested or self.context.device.type != "cpu":
            return 1.0
        batch = self.batch(rows, shape)

        def clock() -> float:
            return self._clock(lambda: self.context.run_micro_batch(batch, rows))

        def work() -> float:
            plain, limited = list[float](), list[float]()
            with _disable_current_modes():
                while self._another(plain):
                    plain.append(clock())
                    with self.target.enforce(adopt=_held(self.context)):
                        limited.append(clock())
            return min(limited) / min(plain)

        ratio = self._attempt(work)
        return 1.0 if isinstance(ratio, OutOfMemory) else max(1.0, ratio)

    def warm_up(self, rows: int, shape: Shape) -> OutOfMemory | None:
        """One step that is not metered: it checks the task and allocates the optimizer's state."""
        self._progress(f"warm up with {self.context.layout.show(rows, shape)}")
        self._allocate_workspaces()
        batch = self.batch(rows, shape)
        failure = attempt(lambda: self._first_step(batch, rows, shape), self.context.device)
        self.context.drop_gradients()
        self.ooms += failure is not None
        self.fixed_bytes = self._fixed()
        return failure

    def optimizer_seconds(self, rows: int, shape: Shape) -> float:
        """Time of what happens once per step: scaling the gradients, the optimizer, dropping the gradients."""
        with _disable_current_modes():
            if has_peak_statistics(self.context.device):
                self.learn_token_bytes(rows, shape)
            else:
                self.context.run_micro_batch(self.batch(rows, shape), rows)
            return self._clock(lambda: self.context.finish(1.0))

    def learn_token_bytes(self, rows: int, shape: Shape) -> None:
        more, few = (self._peaks(count, shape) for count in (2 * rows, rows))
        grown = max(peak - few.get(phase, 0) for phase, peak in more.items())
        self.token_bytes = max(0, grown) / (rows * max(1, sum(shape)))

    def _peaks(self, rows: int, shape: Shape) -> dict[str, int]:
        """Of a micro-batch without gradients of an earlier one, by phase: so few tokens take less than the gradients, which set the
        peak of the whole and do not grow."""
        self.context.drop_gradients()
        metered = meter(self.context.device)
        with metered:
            self.context.run_micro_batch(self.batch(rows, shape), rows, metered.phase, "first_")
        return metered.reading().phases

    def batch(self, rows: int, shape: Shape) -> Any:
        task = self.context.task
        if self.context.layout is PACKED:
            with task_errors(task, "pack", self.context.layout.show(rows, shape)):
                return PACKED.dummy(task, rows, shape)
        with task_errors(task, "dummy", self.context.layout.show(rows, shape)):
            batch = task.dummy(rows, shape)
            count = shared_rows(batch)
        if count is not None and count != rows:
            raise TaskError(
                f"task {task.name}: dummy({rows}, {shape}) returned {show_rows(count)}. Try: make as many as its first argument says."
            )
        return batch

    def available(self, shape: Shape) -> Shape:
        """The shape that a probe of this one really has: the nearest in the data where the task has no dummy."""
        real = real_batches(self.context.task)
        if real is None:
            return shape
        return real.nearest_row(shape) if self.context.layout is PACKED else real.nearest_shape(shape)

    def _first_step(self, batch: Any, rows: int, shape: Shape) -> None:
        context, task = self.context, self.context.task
        with task_errors(task, "loss", f"a probe batch of {self.context.layout.show(rows, shape)}"):
            with context.forward_context():
                on_device = to_device(batch, context.device)
                value = task.loss(context.model, on_device)
                _check_loss(task, loss_terms(task, value, model=context.model, batch=on_device))
            context.run_micro_batch(batch, rows)
        with task_errors(task, "optimizer"):
            context.finish(1.0)

    def _allocate_workspaces(self) -> None:
        """Make cuBLAS allocate its workspaces (64 MiB, one for forward and one for backward) before the first probe."""
        if self.context.device.type != "cuda":
            return
        for dtype in {torch.float32, self.context.autocast or torch.float32}:
            square = torch.ones(512, 512, device=self.context.device, dtype=dtype, requires_grad=True)
            torch.nn.functional.linear(square, square, square[0]).sum().backward()

    def _fixed(self) -> int:
        if has_peak_statistics(self.context.device):
            return torch.accelerator.memory_allocated(self.context.device)
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _held(self.context)
        }
        return sum(storages.values())

    def _attempt(self, work: Callable[[], T]) -> T | OutOfMemory:
        self.probes += 1
        result = attempt(work, self.context.device)
        self.context.drop_gradients()
        self.ooms += isinstance(result, OutOfMemory)
        return result

    def _metered(self, rows: int, shape: Shape, mode: Mode, reserved: bool, limited: bool = True) -> Probe:
        context = self.context
        if mode == "later":
            context.hold_gradients()
        limit, started = self.target.limit_bytes if limited else None, now()
        metered = meter(context.device, limit_bytes=limit, adopt=_held(context), reserved=reserved)
        with metered, task_errors(context.task, "loss", f"a probe batch of {self.context.layout.show(rows, shape)}"):
            if mode == "later":
                context.run_micro_batch(self.batch(rows, shape), rows, metered.phase)
            else:
                count = PASSES[mode]
                context.step((self.batch(rows, shape) for _ in range(count)), count * rows, metered.phase)
        reading = metered.reading()
        synchronize(self.context.device)
        self.plan_time.record(rows, shape, (now() - started) / PASSES[mode])
        phases = {name: peak for name, peak in reading.phases.items() if name != "idle"}
        return Probe(rows=rows, shape=shape, phases=phases, reserved_bytes=reading.reserved_bytes)

    def _timed(self, rows: int, shape: Shape, whole: bool, reserved: bool) -> tuple[float, Probe | None]:
        with _disable_current_modes():
            probe = None
            if has_peak_statistics(self.context.device):
                probe = self._metered(rows, shape, "whole" if whole else "later", reserved)
            batch, times = self.batch(rows, shape), list[float]()
            if probe is None:
                self.context.run_micro_batch(batch, rows)
            while self._another(times):
                if whole:
                    self.context.drop_gradients()
                times.append(self._clock(lambda: self.context.run_micro_batch(batch, rows)))
            return sorted(times)[(len(times) - 1) // 2], probe

    def _another(self, times: Sequence[float]) -> bool:
        """Whether to time the same once more. What is drawn meanwhile must not depend on the clock of a deterministic plan."""
        steady = self.plan_time.limit_s is None
        if times and times[0] > SLOW_S and not steady:
            return False
        return len(times) < 2 or (sum(times) < TIMED_S and len(times) < (2 if steady else 5))

    def _clock(self, work: Callable[[], Any]) -> float:
        synchronize(self.context.device)
        start = now()
        work()
        synchronize(self.context.device)
        return now() - start


def make_context(
    task: Task, model: nn.Module, optimizer: Optimizer | None, target: Target, autocast: torch.dtype | None,
    *, cudnn_attention: bool = True,
) -> StepContext:  # fmt: skip
    """The context that probes step in, with the task's optimizer unless there is one."""
    if optimizer is None:
        with task_errors(task, "optimizer"):
            optimizer = task.optimizer(model)
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                f"task {task.name}: optimizer() returned {kind_of(optimizer)}. Try: return a torch.optim.Optimizer."
            )
    return StepContext(
        task=task, model=model, optimizer=optimizer, device=target.device, autocast=autocast, cudnn_attention=cudnn_attention
    )  # fmt: skip


def with_dummy(
    task: Task, rows: Dataset | None, progress: Progress = lambda phrase: None, *, steady: bool = False
) -> Task:
    """The task itself if it can be probed; without a `dummy` of its own, a copy that makes batches of real rows.

    Without data the task's `dummy` raises. `progress` and `steady` are as in `row_shapes`.
    """
    if task.has_dummy or rows is None:
        return task
    probed: Any = copy.copy(task)
    probed.dummy = real = RealBatches(task, rows, row_shapes(task, rows, progress, steady=steady))
    probed.dummy_row = real.row
    return probed  # type: ignore[no-any-return]


def real_batches(task: Task) -> "RealBatches | None":
    """What a task from `with_dummy` makes its batches of; None if it has a `dummy` of its own."""
    return task.dummy if isinstance(task.dummy, RealBatches) else None


@dataclass(frozen=True, slots=True)
class RowShapes:
    """The shapes of the rows that were read, by the number of the row."""

    shapes: dict[int, Shape]
    rows: int
    """Of the dataset."""

    @property
    def longest(self) -> Shape:
        return _longest(self.shapes.values())

    @property
    def sampled(self) -> str:
        """`longest of 2,000 sampled rows of 24,000`; empty if all rows are known."""
        few = len(self.shapes) < self.rows
        return f"longest of {len(self.shapes):,} sampled rows of {self.rows:,}" if few else ""


def row_shapes(
    task: Task, rows: Dataset, progress: Progress = lambda phrase: None, *, steady: bool = False
) -> RowShapes:
    """The shapes of all rows, or of some drawn at random if reading all would take long, as with images to decode.

    Without `Task.shape` they are known. `steady` reads a number of rows that does not depend on the clock.
    """
    count = len(rows)
    if not task.has_shape:
        return RowShapes(dict.fromkeys(range(count), tuple(task.worst_shape)), count)
    shapes, started = dict[int, Shape](), now()
    sample = random.Random(0).sample(range(count), min(SAMPLED_ROWS, count))
    with task_errors(task, "shape"):
        for done, index in enumerate(sample):
            if done % SHOW_EVERY == 0 and done:
                if not steady and now() - started > SHAPES_S:
                    return RowShapes(shapes, count)
                progress(f"read the lengths of rows: {done:,} of {count:,}")
            shapes[index] = tuple(task.shape(rows[index]))
        if steady or (now() - started) * count / len(sample) > SHAPES_S:
            return RowShapes(shapes, count)
        return RowShapes({index: tuple(task.shape(rows[index])) for index in range(count)}, count)


def row_lengths(task: Task, rows: Dataset, *, steady: bool) -> NDArray[np.float64]:
    """The lengths of the rows, or of enough of them to know the mean."""
    if hasattr(rows, "shapes"):  # a token store
        every = max(1, len(rows) // LENGTHS_LOOKED_AT)
        return np.asarray(rows.shapes(np.arange(0, len(rows), every)), dtype=np.float64)
    return np.array(list(row_shapes(task, rows, steady=steady).shapes.values()), dtype=np.float64)


def mean_row(task: Task, rows: Dataset, step_rows: int, *, steady: bool) -> Shape:
    """The mean row of a long step: three standard deviations above the mean of all rows, so that few steps are longer."""
    lengths = row_lengths(task, rows, steady=steady)
    long = lengths.mean(axis=0) + 3 * lengths.std(axis=0) / math.sqrt(step_rows)
    return tuple(max(1, math.ceil(min(mean, longest))) for mean, longest in zip(long, lengths.max(axis=0), strict=True))


def check_collate(task: Task, rows: Dataset) -> None:
    """Collate a few rows of the data before anything is probed, so that a mistake there is found at once, by its name."""
    count = min(COLLATED_ROWS, len(rows))
    with task_errors(task, "rows", f"the first {show_rows(count)} of the data"):
        some = [rows[index] for index in range(count)]
    with task_errors(task, "collate", f"the first {show_rows(count)} of the data"):
        collated = shared_rows(task.collate(some))
    if collated is not None and collated != count:
        raise TaskError(
            f"task {task.name}: collate() made {show_rows(collated)} of {count}. Try: return tensors with one entry for each row."
        )


def uneven_rows(task: Task, rows: Dataset | None, *, steady: bool = False) -> str:
    """A warning if the rows of a task without `shape` differ in size: they are planned for as if all were as large as those probed.

    Each of a few rows is collated alone. `steady` reads a number of them that does not depend on the clock. Rows that cannot be are left to the checks that name the task's mistakes.
    """
    if rows is None or task.has_shape or (task.has_dummy and task.worst_shape):
        return ""
    indices, sizes, started = random.Random(0).sample(range(len(rows)), min(COMPARED_SIZES, len(rows))), [], now()
    try:
        for index in indices:
            sizes.append(_values(task.collate([rows[index]])))
            if not steady and now() - started > COMPARE_SIZES_S:
                break
    except Exception:  # a user's code may raise anything
        return ""
    least, most = min(sizes), max(sizes)
    if not least or most < UNEVEN * least:
        return ""
    return (
        f"task {task.name} has no shape(), and its rows have from {least:,} to {most:,} values ({len(sizes)} rows were compared), "
        "so long rows may need more memory than planned; define shape(row), which returns the lengths of a row"
    )


def _values(batch: Any) -> int:
    """The numbers in all tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    if isinstance(batch, Mapping):
        return sum(map(_values, batch.values()))
    return sum(map(_values, batch)) if isinstance(batch, (list, tuple)) else 0


def read_rows(task: Task, data: str | os.PathLike[str] | Dataset) -> Dataset:
    """The dataset itself, or the one that the task reads from a path or name; refused if it is empty."""
    named = isinstance(data, (str, os.PathLike))
    with task_errors(task, "rows", str(data) if named else kind_of(data)):
        rows: Any = task.rows(os.fspath(data)) if isinstance(data, (str, os.PathLike)) else data
        count = len(rows)
    if not count:
        raise TaskError(f"task {task.name}: {data if named else 'data='} has no rows. Try: other data.")
    return rows  # type: ignore[no-any-return]


def build_model(task: Task, device: torch.device) -> nn.Module:
    """A model whose weights do not matter, built on the device itself if its code allows: 0.3 s instead of 3.5 for T5
    base on a GPU, and nothing on the host."""
    try:
        with torch.device(device):
            return task.model().to(device).train()
    except Exception as error:
        if is_oom(error):
            raise
    return task.model().to(device).train()


class RealBatches:
    """A `dummy` of real rows: batches of any size, as near to a wanted shape as the data have them."""

    def __init__(self, task: Task, rows: Dataset, shapes: RowShapes) -> None:
        self.task, self.rows, self.sampled = task, rows, shapes.sampled
        self._first: dict[Shape, int] = {}
        for index, shape in sorted(shapes.shapes.items()):
            self._first.setdefault(shape, index)  # rows of one shape cost the same: one is enough

    def __call__(self, rows: int, shape: Shape) -> Any:
        chosen = self._choose(shape)
        with task_errors(self.task, "collate"):
            return self.task.collate([self.rows[self._first[chosen[n % len(chosen)]]] for n in range(rows)])

    def row(self, shape: Shape) -> Any:
        """The row that comes nearest to this shape."""
        return self.rows[self._first[self.nearest_row(shape)]]

    def nearest_shape(self, shape: Shape) -> Shape:
        return _longest(self._choose(shape))

    def nearest_row(self, shape: Shape) -> Shape:
        return min(self._first, key=lambda one: sum(abs(a - b) for a, b in zip(one, shape, strict=True)))

    @property
    def longest(self) -> Shape:
        return _longest(self._first)

    def _choose(self, wanted: Shape) -> list[Shape]:
        """No longer than wanted, and for each length the row that comes nearest; the shortest row if all are longer."""
        shorter = [shape for shape in self._first if all(a <= b for a, b in zip(shape, wanted, strict=True))]
        if not shorter:
            return [min(self._first, key=sum)]
        nearest = {max(shorter, key=lambda shape: (shape[axis], sum(shape))) for axis in range(len(wanted))}
        return sorted(nearest or shorter, key=sum, reverse=True)


def _longest(shapes: Iterable[Shape]) -> Shape:
    return tuple(max(lengths) for lengths in zip(*shapes, strict=True))


@contextmanager
def task_errors(task: Task, method: str | None = None, on: str = "") -> Iterator[None]:
    """An error in the user's code becomes a TaskError that names the method; out-of-memory errors pass through.

    Without `method` it is the one in which the error was raised, and an error raised outside the task passes through.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        method = method or failed_method(task, error)
        if is_oom(error) or method is None:
            raise
        raise TaskError(failure(task, error, method, on)) from error


def _held(context: StepContext) -> Iterator[torch.Tensor]:
    """Every tensor that exists before the step: weights, gradients, buffers, optimizer state."""
    yield from context.model.parameters()
    yield from (p.grad for p in context.model.parameters() if p.grad is not None)
    yield from context.model.buffers()
    for state in context.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _check_loss(task: Task, terms: dict[str, Loss]) -> None:
    for term in terms.values():
        value, count = float(term.sum.detach()), float(term.count)
        if not math.isfinite(value):
            raise TaskError(
                f"task {task.name}: loss() is {value} before any training. Try: check loss() and its batch."
            )
        if count <= 0:
            raise TaskError(f"task {task.name}: loss() counted {count:g} in a probe batch. Try: a Loss.count above 0.")
