"""What a step did on all ranks: speed, memory, padding, where its time went, and model FLOPs utilization (MFU).

**Where the time went**, of each rank and on average, from one exchange of these figures to the next. The parts add up to that time,
which leaves out evaluations and saves:

    compute         the step itself without its collectives: micro-batches, clipping, optimizer, and the wait for the device
    data            waiting for rows, and reading ahead as far as the device had nothing to do meanwhile
    communication   collectives of the step and of the loop, and the exchange of the figures of the step before; waits for slower
                    ranks are in them (`step.distributed` has the how)
    other           the rest: the journal, hooks, the schedule, Python

A GPU computes while the host goes on, and a step waits for it once, before the optimizer, so what the optimizer launches
last counts for the next step. What each rank did is gathered in one exchange of a dozen numbers.

    MFU of a step = FLOPs of its real rows / seconds / (peak FLOP/s × processes)

Both sides are measured here. **What a row costs** is counted (torch's `FlopCounterMode`) while the task's own loss runs,
forward and backward, on a few small batches, and is a polynomial of the row's lengths (attention is their square): counted
on T5 base at 8 to 24 tokens, it predicts 64 + 48 tokens to the last FLOP. **What the device can do** is the best of repeated
large matrix products in the run's precision, or in fp32 if that is faster (fp16 on a CPU: 0.001 TFLOP/s): data sheets
promise what no program reaches, and a GPU that is shared or throttled reaches less.

Only a row's own lengths count, so padding lowers the figure; so does work done twice: gradient checkpointing, attention
kernels that recompute their scores, a step repeated after an out-of-memory error. Frozen parts count what they do: no
gradients of their own. As usual only matrix products, convolutions and attention are counted.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from brimful.data.reader import StepRows
from brimful.errors import in_one_line
from brimful.memory.context import forward_context, to_device
from brimful.memory.meter import synchronize
from brimful.memory.model import Polynomial, Powers
from brimful.memory.oom import OutOfMemory, attempt, empty_cache
from brimful.memory.snapshot import Buffers, RandomState
from brimful.step.distributed import SingleProcess
from brimful.step.result import StepResult
from brimful.task import Dataset, Shape, Task, loss_terms
from brimful.training.monitor import Monitor

ETA_STEPS = 20
"""The time left is predicted from the median of this many steps."""
ROWS = 2
"""Rows of a counted batch: BatchNorm refuses to train on one."""
PARTS = 8
"""Counted batches are 1/8, 2/8 and 3/8 as long as the longest row; the formula is checked at 4/8."""
MOST_OFF = 0.05
"""If the formula is further off than this at the check, MFU stays unknown."""
MATRIX = {"cpu": 1024, "cuda": 8192}
"""Side of the matrices whose product is timed, 2 × side³ FLOPs; 4096 on other devices."""
SMALLEST = 256
"""No smaller matrices are tried if memory is short."""
TIMED_S = 0.1
"""Products are repeated for this long, and at least three times; fp16 on a CPU, at 2 s each, once."""
HALF_PRECISIONS = (torch.float16, torch.bfloat16)

aten = torch.ops.aten


class Speedometer:
    """Makes the figures of a `step` event, with one exchange between the ranks."""

    def __init__(
        self,
        rows: Dataset,
        group: SingleProcess,
        *,
        flops: "FlopModel | None",
        peak_flops: float | None,
        limit_bytes: int | None,
        host_memory: Monitor | None = None,
    ) -> None:
        self._shapes = getattr(rows, "shapes", None)
        self._group, self._flops, self._limit_bytes = group, flops, limit_bytes
        self._peak, self._host_memory = peak_flops, host_memory
        self._step_s: deque[float] = deque(maxlen=ETA_STEPS)
        self._ahead_s = 0.0
        """What reading the next rows ahead has cost in time."""
        self._paused_s, self._is_paused = 0.0, False
        self._exchange_s = 0.0
        """What the last exchange took, a wait for slower ranks included."""
        self.begin()

    def begin(self) -> None:
        """The first step begins now."""
        self._last, self._paused_s = time.perf_counter(), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in here, an evaluation or a save, belongs to no step."""
        if self._is_paused:
            yield
            return
        self._is_paused, started = True, time.perf_counter()
        try:
            yield
        finally:
            self._is_paused = False
            self._paused_s += time.perf_counter() - started

    def figures(
        self, rows: StepRows, result: StepResult, waited_s: float, *, steps_left: int, agreed_s: float = 0.0
    ) -> dict[str, Any]:
        """Of the step that has just ended. `waited_s`: for its rows; `agreed_s`: on whether to go on, before it."""
        lengths, now = self._lengths(rows), time.perf_counter()
        step_s, self._last, self._paused_s = now - self._last - self._paused_s, now, 0.0
        self._step_s.append(step_s)
        collective_s = agreed_s + self._exchange_s if self._group.size > 1 else 0.0
        own = _RankFigures(
            length=float(lengths.sum() if rows.real_positions is None else rows.real_positions),
            flops=0.0 if self._flops is None else self._flops.count(lengths),
            real_positions=_or_nan(rows.real_positions),
            positions=_or_nan(rows.positions),
            peak_bytes=_or_nan(result.peak_bytes),
            reserved_bytes=_or_nan(result.reserved_bytes),
            limit_bytes=_or_nan(self._limit_bytes),
            micro_batches=float(result.micro_batches),
            busy_s=result.seconds - result.communication_s,
            data_s=waited_s + result.meanwhile_s,
            communication_s=result.communication_s + collective_s,
            step_s=step_s,
        )
        ranks = [_RankFigures(*numbers) for numbers in self._group.gather(own)]
        self._exchange_s = time.perf_counter() - now
        length, flops = sum(rank.length for rank in ranks), sum(rank.flops for rank in ranks)
        tokens = length if result.count > result.rows else 0  # lengths of images, or of rows scored as one, are none
        data_wait_s, self._ahead_s = waited_s + self._ahead_s, result.meanwhile_s
        host = self._host_memory
        return {
            "tokens": int(tokens) or None,
            "seconds": result.seconds,
            "data_wait_s": data_wait_s,
            "peak_bytes": _highest(rank.peak_bytes for rank in ranks),
            "reserved_bytes": _highest(rank.reserved_bytes for rank in ranks),
            "limit_bytes": self._limit_bytes,
            "rows_per_s": result.rows / (result.seconds + data_wait_s),
            "tokens_per_s": tokens / (result.seconds + data_wait_s) if tokens else None,
            "mfu": utilization(flops, result.seconds, self._peak, self._group.size),
            "eta_s": steps_left * median(self._step_s),
            "padding": _padding(ranks),
            "times": {name: round(fmean(rank.times[name] for rank in ranks), 6) for name in own.times},
            "host_bytes": None if host is None else host.host_bytes,
            "machine_bytes": None if host is None else host.machine_bytes,
            "ranks": [figures.to_event(rank) for rank, figures in enumerate(ranks)],
        }

    def _lengths(self, rows: StepRows) -> NDArray[Any]:
        """One line per row: the dataset's own if it knows them; else as long as their micro-batch."""
        padded = np.repeat(np.array(rows.shapes, dtype=np.int64), [len(group) for group in rows.groups], axis=0)
        own = np.asarray(self._shapes(rows.indices)) if len(padded) and callable(self._shapes) else padded
        return own if own.shape == padded.shape else padded


class _RankFigures(NamedTuple):
    """What a rank tells the others of its step. NaN is unknown: only numbers can be gathered."""

    length: float
    """Lengths of its rows, added up."""
    flops: float
    real_positions: float
    positions: float
    peak_bytes: float
    reserved_bytes: float
    limit_bytes: float
    micro_batches: float
    busy_s: float
    """Seconds of the step in which it was in no collective."""
    data_s: float
    communication_s: float
    step_s: float
    """From one exchange to the next, evaluations and saves left out."""

    @property
    def times(self) -> dict[str, float]:
        """Where the time went; a device may have computed while rows were read, and then both count."""
        other_s = max(0.0, self.step_s - self.busy_s - self.data_s - self.communication_s)
        parts = {"compute_s": self.busy_s, "data_s": self.data_s, "communication_s": self.communication_s, "other_s": other_s}  # fmt: skip
        return {name: round(value, 6) for name, value in parts.items()}

    def to_event(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "peak_bytes": _whole(self.peak_bytes),
            "reserved_bytes": _whole(self.reserved_bytes),
            "limit_bytes": _whole(self.limit_bytes),
            "micro_batches": _whole(self.micro_batches),
            "padding": _padding([self]),
            "times": self.times,
        }


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _whole(value: float) -> int | None:
    """NaN is unknown."""
    return int(value) if value == value else None


def _highest(values: Iterable[float]) -> int | None:
    """Of those that are known."""
    return _whole(max((value for value in values if value == value), default=math.nan))


def _padding(ranks: Sequence[_RankFigures]) -> float | None:
    """The share of all positions that no row needs; None if one rank does not know it, or if rows have no lengths."""
    real, computed = sum(rank.real_positions for rank in ranks), sum(rank.positions for rank in ranks)
    return 1 - real / computed if computed > 0 and real == real else None


def utilization(flops: float, seconds: float, peak_flops_per_s: float | None, processes: int = 1) -> float | None:
    """MFU; None if the peak is unknown, or if more was done than the peak, which then is none."""
    if not flops or not peak_flops_per_s or seconds <= 0:
        return None
    share = flops / seconds / (peak_flops_per_s * processes)
    return share if share <= 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopModel:
    """FLOPs of one row, forward and backward, as a function of its lengths."""

    polynomial: Polynomial

    @classmethod
    def measure(
        cls, task: Task, model: nn.Module, device: torch.device, shape: Shape, *, autocast: torch.dtype | None = None
    ) -> "tuple[FlopModel | None, str]":
        """The formula for rows of at most this shape, and how it was found; or None, and why not.

        Call it before checkpointing or compilation changes the model: the one counts work twice, the other hides it.
        Weights, buffers, gradients, modes and random state are as before.
        """
        if not task.work_follows_shape:
            return None, "unknown: what a row costs does not follow from its lengths alone"
        count = partial(_count, task, model, device, autocast)
        modes = [(part, part.training) for part in model.modules()]
        random_state, buffers = RandomState(device), Buffers(model)
        try:
            outcome = attempt(lambda: _fit(count, shape), device)
        except Exception as error:
            return None, f"unknown: counting its FLOPs failed ({in_one_line(error)})"
        finally:
            buffers.restore()
            random_state.restore()
            for part, training in modes:
                part.training = training
        if isinstance(outcome, OutOfMemory):
            return None, "unknown: counting its FLOPs ran out of memory"
        formula, how = outcome
        return (None if formula is None else cls(polynomial=formula)), how

    def count(self, shapes: Sequence[Shape] | NDArray[Any]) -> float:
        """FLOPs of training once on rows of these lengths, without padding."""
        lengths = np.asarray(shapes, dtype=float)
        if not len(lengths):
            return 0.0
        terms = self.polynomial.terms.items()
        return float(sum(value * np.prod(lengths**powers, axis=1).sum() for powers, value in terms))


def _fit(count: Callable[[int, Shape], int], shape: Shape) -> tuple[Polynomial | None, str]:
    """As many small batches as there are terms, one with more rows, and one of longer rows to check the formula."""
    terms, points = _design(shape)
    count(ROWS, points[0])  # the first run of a model may do more, such as prove how its head works
    values = [count(ROWS, point) / ROWS for point in points]
    if not any(values):
        return None, "unknown: it does no matrix product, convolution or attention that could be counted"
    if count(2 * ROWS, points[0]) != 2 * ROWS * values[0]:
        return None, "unknown: its FLOPs are not proportional to the rows, so a row has no cost of its own"
    formula = _solve(points, values, terms)
    check = tuple(min(longest, 4 * _unit(longest)) for longest in shape)
    counted = count(ROWS, check) / ROWS
    off = abs(formula(check) / counted - 1) if counted else np.inf
    if off > MOST_OFF:
        return None, f"unknown: its FLOPs are no simple function of a row's lengths (a formula is {off:.0%} off)"
    exact = "to the last one" if off < 1e-9 else f"to {off:.1%}"
    at = f", right {exact} at rows of {'+'.join(map(str, check))}" if shape else ""
    return formula, f"counted over {len(points) + 2} small batches, forward and backward{at}"


def _design(shape: Shape) -> tuple[list[Powers], list[Shape]]:
    """The terms 1, l, l² and l·m of all lengths, and a point for each: one length longer at a time, then two."""
    base = tuple(map(_unit, shape))
    terms: list[Powers] = [(0,) * len(shape)]
    points: list[Shape] = [base]

    def add(powers: dict[int, int], times: dict[int, int]) -> None:
        terms.append(tuple(powers.get(axis, 0) for axis in range(len(shape))))
        points.append(tuple(unit * times.get(axis, 1) for axis, unit in enumerate(base)))

    for axis, longest in enumerate(shape):
        for power in range(1, min(3, longest)):  # a length of 1 cannot vary, one of 2 makes a line
            add({axis: power}, {axis: power + 1})
    for pair in combinations([axis for axis, longest in enumerate(shape) if longest > 1], 2):
        add(dict.fromkeys(pair, 1), dict.fromkeys(pair, 2))
    return terms, points


def _unit(longest: int) -> int:
    return max(1, longest // PARTS)


def _solve(points: Sequence[Shape], values: Sequence[float], terms: Sequence[Powers]) -> Polynomial:
    """The polynomial through all points, without terms that are only rounding errors."""
    matrix = np.array([[np.prod(np.power(point, powers, dtype=float)) for powers in terms] for point in points])
    scale = matrix.max(axis=0)
    factors = np.linalg.solve(matrix / scale, np.array(values))
    keep = np.abs(factors) > 1e-9 * np.abs(factors).max()
    return Polynomial(
        {powers: round(float(f / s), 3) for powers, f, s, kept in zip(terms, factors, scale, keep, strict=True) if kept}
    )


def _count(
    task: Task, model: nn.Module, device: torch.device, autocast: torch.dtype | None, rows: int, shape: Shape
) -> int:
    """FLOPs of a probe batch. `autograd.grad` leaves gradients and the hooks on them alone."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    batch = to_device(task.dummy(rows, shape), device)
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        with forward_context(device, autocast):
            terms = loss_terms(task, task.loss(model, batch), model=model, batch=batch)
            total = torch.stack([term.sum.reshape(()) for term in terms.values()]).sum()
        torch.autograd.grad(total, trainable, allow_unused=True)
    return int(counter.get_total_flops())


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(_gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Twice the forward, whether or not a kernel computes the scores again."""
    return 2 * int(sdpa_flop_count(query, key, value))


_KERNELS = (
    "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "fused_attention_overrideable",
)  # fmt: skip
_ATTENTION = {
    **{getattr(aten, f"_scaled_dot_product_{kernel}"): _attention for kernel in _KERNELS},
    **{getattr(aten, f"_scaled_dot_product_{kernel}_backward"): _attention_backward for kernel in _KERNELS},
}
"""torch's counter ignores the CPU's kernel, and counts five products instead of four in backward."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """The most FLOP/s that a matrix product reaches on this device, measured now, and how; or None, and why not.

    If half precision is slower than fp32, as fp16 is on a CPU, fp32's is the peak.
    """
    peak, how = _measure_peak(device, dtype)
    if peak is None or dtype not in HALF_PRECISIONS:
        return peak, how
    full, full_how = _measure_peak(device, torch.float32)
    return (full, full_how) if full is not None and full > peak else (peak, how)


def _measure_peak(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    side, name = MATRIX.get(device.type, 4096), str(dtype).removeprefix("torch.")
    try:
        while isinstance(outcome := attempt(partial(_best_s, device, dtype, side), device), OutOfMemory):
            if side <= SMALLEST:
                return None, f"unknown: there is no memory for {name} matrices of {side} × {side}"
            side //= 2
    except Exception as error:
        return None, f"unknown: two {name} matrices cannot be multiplied here ({in_one_line(error)})"
    empty_cache(device)
    peak = 2 * side**3 / outcome
    return peak, f"measured {peak / 1e12:.3g} TFLOP/s: the best product of two {name} matrices of {side} × {side}"


def _best_s(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Normal numbers, since a GPU clocks higher on zeros; from a generator of their own."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    times_s: list[float] = []
    while sum(times_s) < 10 * TIMED_S and (len(times_s) < 4 or sum(times_s[1:]) < TIMED_S):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronize(device)
        times_s.append(time.perf_counter() - start)
    return min(times_s[1:] or times_s)  # the first one chose its kernel
