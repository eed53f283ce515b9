"""Work without gradients (a loss that is only read, texts that are generated) in batches that fit, by a memory model of its own.

    work of a few small sizes ─► what each took beyond what was alive before ─► MemoryModel ─► cut ─► run, batch by batch
                                                                                      ▲                   │ out of memory
                                                                                      └─── half the rows ─┘

A training step's model says nothing about it: without gradients no activation outlives its layer, and generation holds a
cache of keys and values instead of logits. So it is probed by itself: at most 8 runs of 1 to 4 rows, each no longer than
the longest row, on the CPU under the ledger and on a card by its own statistics. Only *added* bytes are modelled; what is
alive already (weights, optimizer state, gradients) is read anew before each pass and left out of the room.

Without any limit the CPU's work takes at most half of the host memory that is available at that moment.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from brimful.errors import DoesNotFit
from brimful.machine.host import Host
from brimful.memory.meter import allocated_bytes, available_bytes, has_peak_statistics, meter
from brimful.memory.model import MemoryModel, Probe, work
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import RandomState
from brimful.memory.split import split_by_memory
from brimful.task import Shape
from brimful.units import show_bytes, show_rows

T = TypeVar("T")
Work = Callable[[int, Shape], object]
"""Runs the work once on a dummy of so many rows, padded to this shape."""
Tell = Callable[[str], object]

HOST_SHARE = 0.5
"""Of the host memory available now, where nothing else limits the CPU: page cache and other programs need some, too."""
MOST_ROWS = 512
"""From 4 rows probed a model is not trusted further than this."""
OVERHEAD = {"cpu": 128.0}
"""What a further batch costs, in rows × padded lengths: a forward of the tiny chat model took 2 ms plus 32 µs a token."""
OVERHEAD_ELSEWHERE = 8192.0
"""A card takes thousands of tokens in the time that Python needs to start its kernels."""
MOST_RAISED = 1.5
"""One out-of-memory error does not raise the memory model by more than this."""

log = logging.getLogger("brimful")


class Forward:
    """One kind of gradient-free work of one model on one device: what it costs, and how rows are cut for it."""

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
        most_rows: int = MOST_ROWS,
        fewest: bool = False,
        tell: Tell = log.warning,
    ) -> None:
        """`processes` share the host. `fewest`: as few batches as fit, for work whose time hardly depends on the rows."""
        self.what, self.device = what, device
        self.model: MemoryModel | None = None
        self.ooms = self.batches = 0
        self.peak_bytes: int | None = None
        """Allocated on the device at the highest; None where it does not tell."""
        self._work, self._module, self._tell = work, model, tell
        self._limit_bytes, self._fill, self._processes, self._most = limit_bytes, fill, processes, most_rows
        self._overhead = None if fewest else OVERHEAD.get(device.type, OVERHEAD_ELSEWHERE)
        self._factor = 1.0
        self._plan_s = 0.0
        self._budget: tuple[int, str] = (0, "nothing was run yet")
        self._largest: tuple[int, Shape] = (0, ())

    def fit(self, longest: Shape) -> MemoryModel:
        """Learn the cost from a few small sizes, no row longer than `longest`. Whatever the model was doing is eval_mode."""
        started, readings = time.perf_counter(), list[Probe]()
        with eval_mode(self._module, self.device):
            if self.device.type != "cpu":  # libraries take their workspaces at the first use, which is no row's cost
                attempt(partial(self._work, 1, probe_sizes(longest)[0][1]), self.device)
            for rows, shape in probe_sizes(longest):
                reading = attempt(partial(self._metered, rows, shape), self.device)
                if isinstance(reading, OutOfMemory):
                    self.ooms += 1
                    break
                readings.append(reading)
        if not readings:
            raise self._does_not_fit("not even one short row", probe_sizes(longest)[0][1])
        self.model = MemoryModel.fit(readings)
        self._plan_s += time.perf_counter() - started
        return self.model

    def over(
        self, shapes: Sequence[Shape], run: Callable[[list[int]], T], *, name: Callable[[int], str] | None = None
    ) -> Iterator[tuple[list[int], T]]:
        """Run rows of these shapes, alike ones together, the costliest batch first; yields each batch with its result.

        `run` takes the places of its rows in `shapes`, and may be called again for some of them. `name` is what a row is
        called where it does not fit even alone.
        """
        if not shapes:
            return
        if self.model is None:
            self.fit(_padded(shapes))
        self._budget = self._added_budget()
        ceiling = float(self._budget[0])
        waiting = deque(self._cut(shapes, ceiling))
        while waiting:
            group = waiting.popleft()
            rows, shape = len(group), _padded([shapes[row] for row in group])
            if rows > 1 and self._measure(rows, shape) > ceiling:  # it was lowered since
                finer = self._cut([shapes[row] for row in group], ceiling)
                waiting.extendleft([group[place] for place in part] for part in reversed(finer))
                continue
            result = attempt(partial(self._watched, run, group, shape), self.device, thorough=False)
            if not isinstance(result, OutOfMemory):
                yield group, result
            elif rows == 1:
                raise self._does_not_fit((name or _numbered)(group[0]), shape)
            else:
                ceiling = min(ceiling, self._lowered(rows, shape))
                waiting.extendleft(_halves(group, shapes))

    def facts(self) -> dict[str, Any]:
        """The plan of this work as JSON: what was allowed and why, what was predicted, what happened."""
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
            self._work(rows, shape)
        phases = metered.reading().phases
        return Probe(rows=rows, shape=shape, phases={"forward": max(1, phases["forward"] - phases["idle"])})

    def _watched(self, run: Callable[[list[int]], T], group: list[int], shape: Shape) -> T:
        """Where the device keeps peaks, every batch is a reading; one above its prediction raises the model."""
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

    def _measure(self, rows: int, shape: Shape, /, *, whole: bool = False) -> float:
        assert self.model is not None
        return self.model.measure(rows, shape, factor=self._factor)

    def _cut(self, shapes: Sequence[Shape], ceiling: float) -> list[list[int]]:
        return split_by_memory(shapes, self._measure, ceiling, max_rows=self._most, overhead=self._overhead)

    def _lowered(self, rows: int, shape: Shape) -> float:
        """After an out-of-memory error: the model is raised to the room that was not enough, and half the rows are left."""
        self.ooms += 1
        predicted, room = self._predicted(rows, shape), self._added_budget()[0] / self._fill
        self._factor *= min(max(1.0, room / predicted), MOST_RAISED)
        half = (rows + 1) // 2
        self._tell(
            f"{self.what}: {_size(rows, shape)} ran out of memory (predicted {show_bytes(predicted)} of {show_bytes(room)}), "
            f"so batches as long as these have {show_rows(half)} at most"
        )
        return self._measure(half, shape)

    def _added_budget(self) -> tuple[int, str]:
        """Bytes that batches may add to what is alive now, and what set the number."""
        known = [size for size in (self._limit_bytes, available_bytes(self.device)) if size is not None]
        held = allocated_bytes(self.device)
        budgets = []
        if held is None:  # the CPU without a virtual limit: nobody counts there, so the host has a say
            held = _bytes_of(_tensors(self._module))
            available, share = Host.detect().ram_available_bytes, HOST_SHARE / self._processes
            budgets = [(int(share * available), f"{share:.0%} of {show_bytes(available)} available on the host")]
        if known:
            because = f"{self._fill:.0%} of {show_bytes(min(known))}, less {show_bytes(held)} held already"
            budgets.append((int(self._fill * min(known)) - held, because))
        added, because = min(budgets)
        return max(1, added), because

    def _does_not_fit(self, row: str, shape: Shape) -> DoesNotFit:
        self.ooms += 1
        added, because = self._added_budget()
        lengths = f" of {'+'.join(map(str, shape))}" if shape else ""
        return DoesNotFit(
            f"{self.what}: {row}{lengths} does not fit even alone: {show_bytes(added)} are left for it ({because}); raise "
            "--memory-limit, or cut long rows with --max-tokens",
            needed_bytes=added if self.model is None else max(added, round(self._predicted(1, shape))),
        )


@contextmanager
def eval_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model in eval mode and without gradients; afterwards each part's mode and all random state as they were."""
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
    """Rows 1, 2 and 4 at a quarter of each length, then each length alone to a half and to all of it, then all to a half."""
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
    """The shorter rows and the longer ones; put back on the left one by one, the longer come first again."""
    by_length = sorted(group, key=lambda row: sum(shapes[row]))
    middle = len(group) // 2
    return [by_length[:middle], by_length[middle:]]


def _padded(shapes: Sequence[Shape]) -> Shape:
    return tuple(map(max, zip(*shapes, strict=True)))


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Tied weights count once."""
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


def _numbered(row: int) -> str:
    return f"row {row}"


def _size(rows: int, shape: Shape) -> str:
    return show_rows(rows) + (f" of {'+'.join(map(str, shape))}" if shape else "")
