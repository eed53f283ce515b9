"""From small probes to the largest micro-batch that fits, without running out of memory on the way.

Short rows are probed first, then longer ones, then more of them. A probe runs only if the earlier ones bound it below
the limit, since memory grows at most with the square of the rows and of the lengths. From there the search climbs to
60 % of the budget, fits the memory model again, goes to the predicted edge, and repeats until model and probes agree.
The all-pairs loss shows why each climb is bounded: its square cannot be seen at 8 rows and dominates at 8,000. The bound
is tighter while the model has not yet predicted a size that it had not seen.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from brimful.errors import TaskError
from brimful.memory.layout import PACKED
from brimful.memory.meter import has_peak_statistics
from brimful.memory.model import FIRST_PHASES, MICRO_PHASES, MemoryModel, Probe
from brimful.memory.oom import OutOfMemory
from brimful.planning.plan_time import FINISH
from brimful.planning.probe import PASSES, Mode, Prober
from brimful.task import Shape

CLIMB_TO = 0.6
"""The share of the budget at which the model is checked before it is trusted at the edge."""
CLOSE_ENOUGH = 0.4
"""A proven model may go to its edge once a probe cost this share of what is predicted there, without the fixed part."""
PROVEN = 0.01
"""A model is proven if it was off by no more than this on the last size it climbed to."""
NEGLIGIBLE = 0.02
"""A miss is measured against at least this share of the budget."""
PROVEN_REACH, FIRST_REACH, REACH = 4, 2.5, 1.5
"""The next size has at most this many times the rows of the largest probed: for a proven model, for one that has not
been tried, for one that was off."""
FIRST_EDGE = 0.995
"""The first jump to the edge aims at this share of the budget: the reserved ratio grows a little with size, and one
probe too many costs more than a row."""
SHORTEST = 64
"""Rows of the first probe are no longer than this, so that it bounds the longer ones."""
TRUSTED = 0.7
"""A model of three probes or more may call a probe safe that it predicts below this share of the limit."""


class Survey:
    """Probes at one setting of the levers, the memory model fitted to them, and the sizes that fit."""

    def __init__(self, prober: Prober, worst: Shape, most: int, *, least: int = 1) -> None:
        self.prober = prober
        self.worst = worst
        self.most = most
        """Rows of the step in one process. A micro-batch of that many is the whole step."""
        self.least = least
        """Fewer rows are never run: BatchNorm refuses a single one."""
        self.shape_note = ""
        self.stopped = False
        """Whether time ended it before the edge was found."""
        self._probes: dict[tuple[int, Shape], Probe] = {}
        self._failed: set[tuple[int, Shape]] = set()
        self._assumed: list[Probe] = []
        self._explored = False
        self._predictions: dict[tuple[int, Shape], int] = {}
        """What the model predicted for a size before it was probed."""
        self._model: MemoryModel | None = None

    @property
    def model(self) -> MemoryModel:
        """Fitted to all probes so far."""
        if self._model is None:
            assert self._probes, "nothing has been probed"
            probes = tuple(self._probes.values())
            model = self._fit((*probes, *self._assumed), error=self._error())
            self._model = replace(model, probes=probes)
        return self._model

    def _fit(self, probes: Sequence[Probe], error: float = 0.0) -> MemoryModel:
        return MemoryModel.fit(probes, error=error, packed=self.prober.context.layout is PACKED)

    @property
    def probes(self) -> int:
        return len(self._probes)

    @property
    def probed_worst(self) -> bool:
        return bool(self._at_worst())

    def predicted(self, rows: int, shape: Shape | None = None) -> int:
        """What this many rows would cost against the limit, of the worst shape by default."""
        return self.model.cost_bytes(rows, self.worst if shape is None else shape, whole=rows == self.most)

    def predicted_unseen(self, rows: int) -> int:
        """The peak of this many rows of the worst shape, predicted by a model that had not seen them."""
        others = [probe for size, probe in self._probes.items() if size != (rows, self.worst)]
        if not others:
            return self.model.peak_bytes(rows, self.worst, whole=rows == self.most)
        unseen = self._fit(others).peak_bytes(rows, self.worst, whole=rows == self.most)
        return self._predictions.get((rows, self.worst), unseen)

    def probe(self, rows: int) -> Probe | None:
        """The probe of this many rows of the worst shape; None if none ran."""
        return self._probes.get((rows, self.worst))

    def measure(self, rows: int, shape: Shape, mode: Mode | None = None, *, reserved: bool = False) -> Probe | None:
        """The probe of this size, run now if it is new or if it measured less; None if memory ran out."""
        mode = "whole" if rows == self.most else mode or "later"
        earlier = self._probes.get((rows, shape))
        if earlier is not None and _covers(earlier, mode, reserved and self._counts_peaks):
            return earlier
        self._predict(rows, shape)
        return self._learn(rows, shape, self.prober.run(rows, shape, mode, reserved=reserved))

    def time(self, rows: int) -> float:
        """Seconds of one micro-batch of the worst shape. Memory that was metered with it is kept too."""
        self._predict(rows, self.worst)
        top = 2 * rows > max(self._at_worst(), default=0)  # likely to be chosen: read reserved bytes at once
        result = self.prober.time(rows, self.worst, whole=rows == self.most, reserved=top)
        if isinstance(result, OutOfMemory):
            self._learn(rows, self.worst, result)
            return math.inf
        seconds, probe = result
        if probe is not None:
            self._learn(rows, self.worst, probe)
        return seconds

    def explore(self) -> None:
        """The small probes: how the cost grows with rows and with each length."""
        for rows, shape, mode in self._ladder():
            wanted = not (self.shape_note and shape != self.worst) and self._safe(rows, shape)
            if wanted and self._in_time(rows, shape, mode, "some small probes"):
                self._measure_if_accepted(rows, shape, mode)
        if not self._probes:
            self.measure(self.least, self._shorter(4))
        if not self._at_worst():
            self._approach_worst()
        self._explored = True

    def _approach_worst(self) -> None:
        """The fewest rows of the worst shape, which the ladder did not dare: by way of shorter ones, since a model of two short shapes
        was 50 % too high for one four times as long. Where a limit is simulated the row is measured in any case."""
        for divisor in (4, 2, 1):
            shape = self.worst if divisor == 1 else self._shorter(divisor)
            if shape != self.worst and (self.shape_note or (self.least, shape) in self._failed):
                continue
            if self._probes and self.predicted(self.least, shape) <= self._limit:
                self._measure_if_accepted(self.least, shape, "later")
        if self._probes and not self._at_worst() and not self._counts_peaks:
            self._measure_over_limit(self.least)

    def explore_near(self, rows: int) -> None:
        """Two probes at sizes that fitted without checkpointing, enough to predict how far this one goes.

        Where nothing smaller may be run there is one such size, and short rows are probed instead.
        """
        if rows // 2 < self.least:
            self.explore()
            return
        for size in (rows // 2, rows):
            self.measure(size, self.worst)
        self._explored = True

    def largest(self, budget_bytes: int, *, in_time: bool = True) -> int:
        """The most rows of the worst shape that ran within the budget, where the model says that one more would not.

        Without `in_time` they are looked for however long it takes.
        """
        while True:
            probed = self._at_worst()
            fits = max((n for n, probe in probed.items() if probe.cost_bytes <= budget_bytes), default=0)
            over = [n for n, probe in probed.items() if probe.cost_bytes > budget_bytes]
            breaks = min((*over, *(n for n, shape in self._failed if shape == self.worst)), default=self.most + 1)
            near = any(probe.cost_bytes > 0.8 * budget_bytes for probe in probed.values())
            edge = self.model.largest(self.worst, budget_bytes * (1 if near else FIRST_EDGE), self.most)
            edge = max(fits, min(edge, breaks - 1))
            if edge > fits:
                rows, mode = self._within_reach(fits, edge, budget_bytes), self._edge_mode(edge)
                if fits and in_time and not self._in_time(rows, self.worst, mode, f"more than {fits} rows at once"):
                    return fits
                if self._would_break(rows):
                    if not self._measure_over_limit(rows):
                        return fits
                    continue
                self.measure(rows, self.worst, mode, reserved=True)
            elif fits == 0 or not self._counts_peaks or probed[fits].reserved_bytes is not None:
                return fits
            else:
                self.measure(fits, self.worst, reserved=True)

    def check_short_rows(self, budget_bytes: int) -> None:
        """Many short rows, the other end of what a real step is split into. If they surprise, medium ones as well."""
        for divisor in (4, 2):
            shape = self._shorter(divisor)
            if shape == self.worst or self.shape_note or (self._last_miss(self._shorter(4)) or 1.0) <= 2 * PROVEN:
                return
            rows = self.model.largest(shape, CLIMB_TO * budget_bytes, max(1, self.most - 1))
            if (
                rows
                and self.predicted(rows, shape) <= self._limit
                and self._in_time(rows, shape, "later", "short rows")
            ):
                self.measure(rows, shape)

    def assume_growth(self, largest: int, budget_bytes: int) -> None:
        """At the end of the search: if the probes show no growth with the rows, or less than the edge proves, twice the
        rows are assumed to take twice what is not fixed. A search that was stopped has not found the edge."""
        phases = {name for name in self.model.phases if name in MICRO_PHASES} or set(FIRST_PHASES)
        if len({probe.rows for probe in self._probes.values() if phases & probe.phases.keys()}) == 1:
            self._assume(phases)
        if not self.stopped and largest < self.most and self.predicted(largest + 1) <= budget_bytes:
            self._assume(phases)

    def _edge_mode(self, edge: int) -> Mode:
        return "full" if edge == self.most else "later"

    def _in_time(self, rows: int, shape: Shape, mode: Mode, skipping: str) -> bool:
        """Whether there is time for a probe, and to time and verify its size afterwards."""
        known = (rows, shape) in self._probes
        in_time = known or self.prober.plan_time.allows(rows, shape, PASSES[mode] + FINISH, skipping)
        self.stopped = self.stopped or not in_time
        return in_time

    def _ladder(self) -> Iterator[tuple[int, Shape, Mode]]:
        few, some, more = (min(n, max(self.least, self.most - 1)) for n in (2, 4, 8))
        thorough = not self._counts_peaks  # the ledger's peaks bend more at small sizes; new shapes cost a GPU 0.2 s
        if self.worst:
            short, middle = self._shorter(4), self._shorter(2)
            shortest = self.prober.available(tuple(min(length, SHORTEST) for length in short))
            if shortest != short:
                yield few, shortest, "full"
            yield few, short, "full"
            if thorough or len(self.worst) == 1:
                yield some, short, "later"
            for axis, longest in enumerate(self.worst):
                if len(self.worst) > 1:
                    uneven = self.prober.available((*short[:axis], longest, *short[axis + 1 :]))
                    yield some if self._safe(some, uneven) else few, uneven, "later"
            if thorough or len(self.worst) == 1:
                yield from ((few, middle, "later"), (some, middle, "later"))
        yield few, self.worst, "full"
        if thorough:
            yield some, self.worst, "full"
        yield more, self.worst, "full"

    def _measure_if_accepted(self, rows: int, shape: Shape, mode: Mode) -> None:
        """A model of fixed input size may refuse a shorter shape. Then growth with the rows alone is modelled."""
        try:
            self.measure(rows, shape, mode)
        except TaskError as error:
            if shape == self.worst:
                raise
            self.shape_note = f"only the worst shape was probed, because a shorter one fails: {error}"
            self._probes.clear()
            self._model = None

    def _predict(self, rows: int, shape: Shape) -> None:
        if self._explored and (rows, shape) not in self._probes:
            self._predictions.setdefault((rows, shape), self.model.peak_bytes(rows, shape, whole=rows == self.most))

    def _learn(self, rows: int, shape: Shape, result: Probe | OutOfMemory) -> Probe | None:
        if isinstance(result, OutOfMemory):
            self._failed.add((rows, shape))
            return None
        earlier = self._probes.get((rows, shape))
        self._probes[rows, shape] = result if earlier is None else earlier.merged(result)
        self._model = None
        return self._probes[rows, shape]

    def _assume(self, names: set[str]) -> None:
        probes = [probe for probe in self._probes.values() if names & probe.phases.keys()]
        if not probes:
            return
        top = max(probes, key=lambda probe: (probe.shape == self.worst, probe.rows))
        fixed, gradients = self.prober.fixed_bytes, self.prober.gradient_bytes
        held = {name: fixed + gradients * (name not in FIRST_PHASES) for name in names}
        phases = {name: peak + max(0, peak - held[name]) for name, peak in top.phases.items() if name in names}
        self._assumed.append(Probe(rows=2 * top.rows, shape=top.shape, phases=phases))
        self._model = None

    def _error(self) -> float:
        """The model's miss on the last size it climbed to, and on the last of all sizes that it had not seen."""
        shapes = {self.worst, *[shape for _, shape in self._predictions][-1:]}
        return max(self._last_miss(shape) or 0.0 for shape in shapes)

    def _last_miss(self, shape: Shape, *, beyond_bytes: int = 0) -> float | None:
        """How far off the model was on the last unseen size of this shape, relative to what is beyond some bytes."""
        misses = [
            abs(predicted - peak) / max(peak - beyond_bytes, NEGLIGIBLE * self.prober.target.budget_bytes)
            for size, predicted in self._predictions.items()
            if size[1] == shape and size in self._probes and (peak := self._probes[size].peak_bytes)
        ]
        return misses[-1] if misses else None

    def _within_reach(self, fits: int, edge: int, budget_bytes: int) -> int:
        """The edge itself once the model is proven close to it, else a step towards it that is bounded by the limit."""
        fixed = self.prober.fixed_bytes  # however large it is, it proves nothing about the rest
        miss, probed = self._last_miss(self.worst, beyond_bytes=fixed), self._at_worst()
        proven = miss is not None and miss <= PROVEN
        reach = PROVEN_REACH if proven else FIRST_REACH if miss is None else REACH
        top = max((probe.cost_bytes for probe in probed.values()), default=0)
        close = top - fixed >= CLOSE_ENOUGH * (self.predicted(edge) - fixed)
        if proven and close and edge <= PROVEN_REACH * fits:
            return edge
        climb = self.model.largest(self.worst, CLIMB_TO * budget_bytes, self.most)
        rows = min(edge, int(reach * fits), max(climb, 1))
        while rows > fits + 1 and self._bound(rows, self.worst) > self._limit:
            rows = (rows + fits) // 2
        return max(rows, fits + 1)

    def _would_break(self, rows: int) -> bool:
        """Over the limit whatever the model of a few probes says, since more rows are never cheaper per row."""
        probed = self._at_worst()
        if not probed or self._bound(rows, self.worst) <= self._limit:
            return False
        most, fixed = max(probed), self.prober.fixed_bytes + self.prober.gradient_bytes
        return rows > most and fixed + (probed[most].peak_bytes - fixed) * rows / most > self._limit

    def _measure_over_limit(self, rows: int) -> bool:
        """Probe a size that may be over a simulated limit, if the machine really has the memory for it."""
        if self._bound(rows, self.worst) > self.prober.available_bytes:
            return False
        probe = self.prober.run_without_limit(rows, self.worst, "whole" if rows == self.most else "later")
        return probe is not None and self._learn(rows, self.worst, probe) is not None

    def _safe(self, rows: int, shape: Shape) -> bool:
        if not self._probes or self._bound(rows, shape) <= self._limit:
            return True
        if (shape == self.worst and self._would_break(rows)) or not self._in_proportion(shape):
            return False
        return len(self._probes) >= 3 and self.predicted(rows, shape) <= TRUSTED * self._limit

    def _in_proportion(self, shape: Shape) -> bool:
        """Each length the same share of the worst. Until others are probed, the model cannot tell the lengths apart."""
        shares = [length / worst for length, worst in zip(shape, self.worst, strict=True)]
        return max(shares, default=1.0) <= 1.1 * min(shares, default=1.0)

    def _bound(self, rows: int, shape: Shape) -> float:
        """No step of this size can cost more, judging by each probe and growth with the square of everything."""
        fixed = self.prober.fixed_bytes
        return min(
            fixed + max(0, probe.peak_bytes - fixed) * _growth(rows, probe.rows) * _longest_growth(shape, probe.shape)
            for probe in self._probes.values()
        )

    def _at_worst(self) -> dict[int, Probe]:
        return {rows: probe for (rows, shape), probe in self._probes.items() if shape == self.worst}

    def _shorter(self, divisor: int) -> Shape:
        return self.prober.available(tuple(max(1, length // divisor) for length in self.worst))

    @property
    def _limit(self) -> int:
        return self.prober.target.limit_bytes

    @property
    def _counts_peaks(self) -> bool:
        return has_peak_statistics(self.prober.context.device)


def _covers(earlier: Probe, mode: Mode, reserved: bool) -> bool:
    """Whether a probe of this mode would add nothing to an earlier one."""
    wanted = {"later": "forward", "whole": "first_forward", "full": "first_forward"}[mode]
    return wanted in earlier.phases and (earlier.reserved_bytes is not None or not reserved)


def _growth(new: int, old: int) -> float:
    return max(1.0, new / old) ** 2


def _longest_growth(new: Shape, old: Shape) -> float:
    return max((_growth(a, b) for a, b in zip(new, old, strict=True)), default=1.0)
