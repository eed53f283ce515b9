"""Runs gradient-free work (evaluation, generation) in batches that fit, by a memory model of its own.

    work of a few small sizes ─► bytes each added to what was allocated ─► MemoryModel ─► split ─► run, batch by batch
                                                                               ▲                       │ out of memory
                                                                               └──── half the rows ────┘

The memory model of training does not apply: without gradients no activation outlives its layer, and generation holds a
cache of keys and values instead of logits. So this work has probes of its own: at most 8 runs of 1 to 4 rows, none longer
than the longest row, on the CPU under a ledger and on a GPU by its peak statistics. The model covers only *added* bytes;
what is allocated already (weights, optimizer state, gradients) is read again before each pass and subtracted.

Without any limit, work on the CPU takes at most half of the host memory available at that moment.

`Halving` is the little that is left of this for the evaluation of another trainer, where nothing can be probed.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from brimful.errors import DoesNotFit
from brimful.machine.host import Host
from brimful.memory.layout import PADDED
from brimful.memory.meter import Meter, allocated_bytes, available_bytes, has_peak_statistics, meter
from brimful.memory.model import MemoryModel, Probe, work
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import RandomState
from brimful.memory.split import padded_shape, split_by_memory
from brimful.task import Shape
from brimful.units import show_bytes, show_rows

T = TypeVar("T")
Work = Callable[[int, Shape], object]
"""Runs the work once on a dummy batch of this many rows, padded to this shape."""

HOST_SHARE = 0.5
"""Of the host memory available now, if nothing else limits the CPU: page cache and other programs need some, too."""
MAX_ROWS = 512
"""A model fitted to at most 4 rows is not trusted beyond this."""
OVERHEAD = {"cpu": 128.0}
"""The cost of a further batch, in rows × padded lengths: a forward of the tiny chat model took 2 ms plus 32 µs per token."""
OTHER_OVERHEAD = 8192.0
"""A GPU takes thousands of tokens in the time that Python needs to launch its kernels."""
MAX_CORRECTION = 1.5
"""One out-of-memory error raises the memory model by at most this factor."""

log = logging.getLogger("brimful")


_probing: ContextVar[Meter | None] = ContextVar("probing", default=None)


def next_phase(name: str) -> None:
    """For work of parts whose memory follows different laws, such as prefill and decoding: in a probe, another part begins."""
    if (metered := _probing.get()) is not None:
        metered.phase(name)


class Forward:
    """One kind of gradient-free work of one model on one device: its memory model, and how rows are split for it."""

    def __init__(
        self,
        work: Work,
        model: nn.Module,
        device: torch.device,
        *,
        what: str = "evaluation",
        limit_bytes: int | None = None,
        fill: float = 0.85,
        processes: int = 1,
        max_rows: int = MAX_ROWS,
        fewest_batches: bool = False,
        note: Callable[[str], object] = log.warning,
    ) -> None:
        """`processes` share the host. `fewest_batches`: for work whose time hardly depends on the rows."""
        self.what, self.device = what, device
        self.model: MemoryModel | None = None
        self.ooms = self.batches = 0
        self.peak_bytes: int | None = None
        """Peak allocated bytes of the device; None if it has no statistics."""
        self._work, self._module, self._note = work, model, note
        self._limit_bytes, self._fill, self._processes, self._max_rows = limit_bytes, fill, processes, max_rows
        self._overhead = None if fewest_batches else OVERHEAD.get(device.type, OTHER_OVERHEAD)
        self._factor = 1.0
        self._plan_s = 0.0
        self._budget: tuple[int, str] = (0, "nothing has run yet")
        self._largest: tuple[int, Shape] = (0, ())

    def fit(self, longest: Shape) -> MemoryModel:
        """Fit the memory model to a few small sizes, no row longer than `longest`. Mode and random state stay as they were."""
        started, readings = time.perf_counter(), list[Probe]()
        with eval_mode(self._module, self.device):
            if self.device.type != "cpu":  # libraries allocate workspaces at first use, which no row should pay for
                attempt(partial(self._work, 1, probe_sizes(longest)[0][1]), self.device)
            for rows, shape in probe_sizes(longest):
                reading = attempt(partial(self._metered, rows, shape), self.device)
                if isinstance(reading, OutOfMemory):
                    self.ooms += 1
                    break
                readings.append(reading)
        if not readings:
            raise self._does_not_fit("one short row", probe_sizes(longest)[0][1])
        self.model = MemoryModel.fit(readings)
        self._plan_s += time.perf_counter() - started
        return self.model

    def run_batches(
        self, shapes: Sequence[Shape], run: Callable[[list[int]], T], *, name: Callable[[int], str] | None = None
    ) -> Iterator[tuple[list[int], T]]:
        """Run rows of these shapes, similar ones together, the costliest batch first. Yields each batch with its result.

        `run` takes the indices of its rows in `shapes`, and may be called again for some of them. `name` gives the name
        of a row in the error if it does not fit even alone.
        """
        if not shapes:
            return
        if self.model is None:
            self.fit(padded_shape(shapes))
        self._budget = self.added_budget()
        ceiling = float(self._budget[0])
        waiting = deque(self._split(shapes, ceiling))
        while waiting:
            group = waiting.popleft()
            rows, shape = len(group), padded_shape([shapes[row] for row in group])
            if rows > 1 and self._cost(rows, shape) > ceiling:  # lowered since
                finer = self._split([shapes[row] for row in group], ceiling)
                waiting.extendleft([group[place] for place in part] for part in reversed(finer))
                continue
            result = attempt(partial(self._run, run, group, shape), self.device, thorough=False)
            if not isinstance(result, OutOfMemory):
                yield group, result
            elif rows == 1:
                raise self._does_not_fit((name or _numbered)(group[0]), shape)
            else:
                ceiling = min(ceiling, self._after_oom(rows, shape))
                waiting.extendleft(_halves(group, shapes))

    def phase_bytes(self, rows: int, shape: Shape, *names: str) -> float:
        """The predicted added bytes of some phases of a probe alone, for work that does not run them in one piece."""
        assert self.model is not None
        phases = [phase((rows, *shape)) for name, phase in self.model.phases.items() if name in names]
        return self._factor * self.model.margin * max(phases)

    def correct(self, predicted_bytes: float, needed_bytes: float) -> None:
        """Raise the model after more was needed than predicted, for work that does not run through `run_batches`."""
        self._factor *= min(max(1.0, needed_bytes / max(1.0, predicted_bytes)), MAX_CORRECTION)

    def to_json(self) -> dict[str, Any]:
        """The budget and its reason, what was predicted, and what happened."""
        rows, shape = self._largest
        return {
            "what": self.what,
            "added_budget_bytes": self._budget[0],
            "because": self._budget[1],
            "batches": self.batches,
            "ooms": self.ooms,
            "largest_batch": {"rows": rows, "shape": list(shape)},
            "predicted_added_bytes": round(self._predicted(rows, shape)) if rows else None,
            "measured_peak_bytes": self.peak_bytes,
            "plan_s": round(self._plan_s, 3),
            "memory_model": self.model.to_json() if self.model else None,
        }

    def _metered(self, rows: int, shape: Shape) -> Probe:
        metered = meter(self.device, adopt=_tensors(self._module))
        with metered:
            metered.phase("idle")
            metered.phase("forward")
            token = _probing.set(metered)
            try:
                self._work(rows, shape)
            finally:
                _probing.reset(token)
        phases = metered.reading().phases
        idle = phases.pop("idle")
        return Probe(rows=rows, shape=shape, phases={name: max(1, peak - idle) for name, peak in phases.items()})

    def _run(self, run: Callable[[list[int]], T], group: list[int], shape: Shape) -> T:
        """If the device has peak statistics, every batch is a reading. One above its prediction raises the model."""
        if not has_peak_statistics(self.device):
            result = run(group)
        else:
            with meter(self.device) as metered:
                metered.phase("idle")
                metered.phase("forward")
                result = run(group)
            phases = metered.reading().phases
            self.peak_bytes = max(self.peak_bytes or 0, *phases.values())
            self._factor *= max(1.0, (phases["forward"] - phases["idle"]) / self._predicted(len(group), shape))
        self.batches += 1
        self._largest = max(self._largest, (len(group), shape), key=lambda one: work(*one))
        return result

    def _predicted(self, rows: int, shape: Shape) -> float:
        assert self.model is not None
        return self._factor * self.model.peak_bytes(rows, shape)

    def _cost(self, rows: int, shape: Shape, /, *, whole: bool = False) -> float:
        assert self.model is not None
        return self.model.rising_cost(rows, shape, factor=self._factor)

    def _split(self, shapes: Sequence[Shape], ceiling: float) -> list[list[int]]:
        return split_by_memory(shapes, self._cost, ceiling, max_rows=self._max_rows, overhead=self._overhead)

    def _after_oom(self, rows: int, shape: Shape) -> float:
        """Raise the model to what was not enough memory, and return the cost of half the rows."""
        self.ooms += 1
        predicted, available = self._predicted(rows, shape), self.added_budget()[0] / self._fill
        self.correct(predicted, available)
        half = (rows + 1) // 2
        self._note(
            f"{self.what}: out of memory with {PADDED.show(rows, shape)} (predicted {show_bytes(predicted)} of "
            f"{show_bytes(available)}). Batches this long now have at most {show_rows(half)}."
        )
        return self._cost(half, shape)

    def added_budget(self) -> tuple[int, str]:
        """Bytes that a batch may add to what is allocated now, and the reason for that number."""
        known = [size for size in (self._limit_bytes, available_bytes(self.device)) if size is not None]
        allocated = allocated_bytes(self.device)
        budgets = []
        if allocated is None:  # the CPU without a simulated limit: nothing counts there, so the host limits
            allocated = _bytes_of(_tensors(self._module))
            available, share = Host.detect().ram_available_bytes, HOST_SHARE / self._processes
            budgets = [(int(share * available), f"{share:.0%} of {show_bytes(available)} available on the host")]
        if known:
            because = f"{self._fill:.0%} of {show_bytes(min(known))}, less {show_bytes(allocated)} already allocated"
            budgets.append((int(self._fill * min(known)) - allocated, because))
        added, because = min(budgets)
        return max(1, added), because

    def _does_not_fit(self, row: str, shape: Shape) -> DoesNotFit:
        self.ooms += 1
        added, because = self.added_budget()
        lengths = f" of {'+'.join(map(str, shape))}" if shape else ""
        return DoesNotFit(
            f"{self.what}: {row}{lengths} does not fit in {show_bytes(added)} ({because}). "
            "Try: raise the memory limit, or truncate long rows.",
            needed_bytes=added if self.model is None else max(added, round(self._predicted(1, shape))),
        )


class Halving:
    """Gradient-free work of another library, which has no dummy rows to fit a memory model to.

    A batch is run whole. After an out-of-memory error it is run in halves, and later batches are no larger than what fitted,
    also in later passes. After a pass without an error, the next one tries twice as many rows.
    """

    def __init__(self, device: torch.device, *, what: str = "evaluation", note: Callable[[str], object] = log.warning):
        self.ooms = 0
        self._device, self._what, self._note = device, what, note
        self._max_rows: int | None = None
        self._ooms_before = 0
        """Those before this pass."""

    def begin_pass(self) -> None:
        if self._max_rows is not None and self.ooms == self._ooms_before:
            self._max_rows *= 2
        self._ooms_before = self.ooms

    def run(self, rows: int, run: Callable[[range], T]) -> Iterator[tuple[range, T | OutOfMemory]]:
        """Run these rows in parts, in order. `OutOfMemory` is the result of a single row that does not fit."""
        waiting = deque([range(rows)])
        while waiting:
            part = waiting.popleft()
            if self._max_rows is not None and len(part) > self._max_rows:
                waiting.extendleft([part[self._max_rows :], part[: self._max_rows]])
                continue
            outcome = attempt(partial(run, part), self._device, thorough=False)
            if not isinstance(outcome, OutOfMemory):
                yield part, outcome
                continue
            self.ooms += 1
            if len(part) == 1:
                yield part, outcome
                continue
            self._max_rows = (len(part) + 1) // 2
            self._note(
                f"{self._what}: out of memory with {show_rows(len(part))}. Batches now have at most {show_rows(self._max_rows)}."
            )
            waiting.appendleft(part)


@contextmanager
def eval_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode without gradients. Afterwards the mode of each module and all random state are as they were."""
    random_state, modes = RandomState(device), [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        random_state.restore()


def probe_sizes(longest: Shape) -> list[tuple[int, Shape]]:
    """1, 2 and 4 rows at a quarter of each length, each length alone at a half and at all of it, all at a half."""
    quarter, half = (tuple(math.ceil(length / part) for length in longest) for part in (4, 2))
    if not longest:
        return [(1, ()), (2, ()), (4, ()), (8, ())]
    longer = [
        (2, (*quarter[:axis], lengths[axis], *quarter[axis + 1 :]))
        for axis in range(len(longest))
        for lengths in (half, longest)
    ]
    sizes = [(1, quarter), (2, quarter), (4, quarter), *longer, (2, half)]
    return sorted(dict.fromkeys(sizes), key=lambda size: work(*size))


def _halves(group: list[int], shapes: Sequence[Shape]) -> list[list[int]]:
    """The shorter rows and the longer ones, in the order in which `extendleft` puts the longer ones first."""
    by_length = sorted(group, key=lambda row: sum(shapes[row]))
    middle = len(group) // 2
    return [by_length[:middle], by_length[middle:]]


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Tied weights count once."""
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


def _numbered(row: int) -> str:
    return f"row {row}"
