"""Learn what a step costs from small probes, then find the largest micro-batch that fits, without running out once.

Short rows come first, then longer ones, then more of them. A probe is run only when what is known already bounds it
below the limit: memory grows at most with the square of the rows and of the lengths. From there the search climbs to
60 % of the budget, refits, goes to the predicted edge, refits, until the model and the readings agree. The all-pairs
head shows why: its square is invisible at 8 rows and all there is at 8,000, so each climb is limited, and the more so
while the model has not yet proved right on a size it had not seen.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from brimful.errors import TaskError
from brimful.memory.context import FIRST_PHASES, MICRO_PHASES
from brimful.memory.meter import has_peak_statistics
from brimful.memory.model import MemoryModel, Probe
from brimful.memory.oom import OutOfMemory
from brimful.planning.probe import Mode, Prober
from brimful.task import Shape
from brimful.units import show_rate, show_rows

# The fastest way to cut a step, among the sizes that fit.
#
# A step of 250 rows in micro-batches of at most 30 takes nine of them, so 28 rows each do as well as 30: only 250/9,
# 250/18, 250/36 … are worth timing. The largest is often not the fastest: a CPU's caches prefer smaller ones, and a GPU
# that is full gains nothing. So the climb starts at half of the largest and goes up only while speed does.


SAME_SPEED = 0.02
"""Speeds this close are the same."""
START_AT = 1
"""How often the largest size is halved for the first one that is timed."""
STILL_RISING = 1.25
"""The largest size is this much faster than half of it where more rows would clearly pay, noise aside."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One way to cut the step, timed."""

    rows: int
    accumulation: int
    rows_per_s: float
    seconds: float
    """Of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The chosen cut among all that were timed, largest first."""

    chosen: Timing
    timed: tuple[Timing, ...]

    @property
    def rising(self) -> bool:
        """Whether a larger micro-batch than the largest would still have paid."""
        if len(self.timed) < 2:
            return True  # nothing smaller to compare with
        return self.timed[0].rows_per_s > STILL_RISING * self.timed[1].rows_per_s

    @property
    def reason(self) -> str:
        others = [t for t in self.timed if t is not self.chosen]
        said = ", ".join(f"{show_rows(t.rows)} {show_rate(t.rows_per_s)}" for t in others)
        if not others:
            return f"{show_rate(self.chosen.rows_per_s)} rows/s, the only size there is to choose"
        best = max(t.rows_per_s for t in self.timed)
        verdict = (
            "fastest" if self.chosen.rows_per_s == best else f"within {SAME_SPEED:.0%} of the fastest, with less memory"
        )
        return f"{verdict}: {show_rate(self.chosen.rows_per_s)} rows/s, against {said}"


def micro_rows(step_rows: int, accumulation: int) -> int:
    """Rows of the largest of so many equal micro-batches."""
    return -(-step_rows // accumulation)


def find_fastest(
    step_rows: int, largest: int, seconds: Callable[[int], float], once_s: float, *, least: int = 1, only: bool = False
) -> Speed:
    """Climb from half of the largest size as long as speed grows; where it does not, look below.

    `seconds(rows)` times one micro-batch, `once_s` is what the optimizer takes; no size below `least` is tried; `only` times the
    largest alone.
    """

    def timing(rows: int, accumulation: int) -> Timing:
        took = seconds(rows)
        return Timing(rows, accumulation, step_rows / (accumulation * took + once_s), took)

    fewest = micro_rows(step_rows, largest)
    if only:
        only_one = timing(largest, fewest)
        return Speed(only_one, (only_one,))
    cuts = _halvings(step_rows, fewest, least)
    at = min(START_AT, len(cuts) - 1)
    timed = {at: timing(*cuts[at])}
    for direction in (-1, +1):
        while _grows(timed, at) and 0 <= at + direction < len(cuts):
            at += direction
            timed[at] = timing(*cuts[at])
        if len(timed) > 2:
            break
        at = max(timed)
    best = max(t.rows_per_s for t in timed.values())
    chosen = min((t for t in timed.values() if t.rows_per_s >= (1 - SAME_SPEED) * best), key=lambda t: t.rows)
    return Speed(chosen, tuple(timed[index] for index in sorted(timed)))


def _halvings(step_rows: int, fewest: int, least: int) -> list[tuple[int, int]]:
    """(rows, accumulation) for the fewest micro-batches, twice as many, four times as many …, down to the least rows."""
    cuts = [(micro_rows(step_rows, fewest), fewest)]
    while micro_rows(step_rows, accumulation := 2 * cuts[-1][1]) >= least and cuts[-1][0] > 1:
        cuts.append((micro_rows(step_rows, accumulation), accumulation))
    return cuts


def _grows(timed: dict[int, Timing], at: int) -> bool:
    """Whether the size timed last beats all others by more than noise."""
    others = [t.rows_per_s for index, t in timed.items() if index != at]
    return all(timed[at].rows_per_s > (1 + SAME_SPEED) * other for other in others)


CLIMB_TO = 0.6
"""The share of the budget at which the model is checked before it is trusted at the edge."""
CLOSE_ENOUGH = 0.4
"""A proven model may go to its edge when a reading of at least this share of the cost predicted there exists, what is
fixed left out."""
PROVEN = 0.01
"""A model is proven once it was off by no more than this on the last size it climbed to."""
NOTHING_MUCH = 0.02
"""Below this share of the budget a miss is not taken for one."""
PROVEN_REACH, FIRST_REACH, REACH = 4, 2.5, 1.5
"""The next size has at most so many times the rows of the largest that was read: by a proven model, by one that was
never tried, by one that was off."""
SHORT_OF_IT = 0.995
"""The first jump to the edge aims this far: the reserved ratio grows a little with size, and one probe too many costs
more than a row."""
SHORTEST = 64
"""The first probe's rows are no longer than this, so that longer ones have something to be bounded by."""
SURE_OF_MODEL = 0.7
"""A model of three readings or more may call a probe safe that it puts below this share of the limit."""


class Survey:
    """What was read at one setting of the levers, the model of it, and what it leads to."""

    def __init__(self, prober: Prober, worst: Shape, most: int, *, least: int = 1) -> None:
        self.prober = prober
        self.worst = worst
        self.most = most
        """Rows of the step in one process: a micro-batch of as many is the whole step."""
        self.least = least
        """Fewer rows are never run: BatchNorm refuses a single one."""
        self.shape_note = ""
        self._readings: dict[tuple[int, Shape], Probe] = {}
        self._failed: set[tuple[int, Shape]] = set()
        self._assumed: list[Probe] = []
        """What no probe told; see `settle`."""
        self._surveyed = False
        self._foreseen: dict[tuple[int, Shape], int] = {}
        self._model: MemoryModel | None = None

    @property
    def model(self) -> MemoryModel:
        """Of all that was read so far; fitted when it is asked for."""
        if self._model is None:
            assert self._readings, "nothing was read yet"
            readings = tuple(self._readings.values())
            model = MemoryModel.fit((*readings, *self._assumed), error=self._error())
            self._model = replace(model, probes=readings)
        return self._model

    def read(self, rows: int, shape: Shape, mode: Mode | None = None, *, reserved: bool = False) -> Probe | None:
        """The reading at this size, taken now if it is new or said less; None where memory ran out."""
        mode = "whole" if rows == self.most else mode or "later"
        known = self._readings.get((rows, shape))
        if known is not None and _says(known, mode, reserved and self._on_card):
            return known
        self._foresee(rows, shape)
        return self._learn(rows, shape, self.prober.run(rows, shape, mode, reserved=reserved))

    def time(self, rows: int) -> float:
        """Seconds of one micro-batch of the worst shape; what that tells of memory is kept too."""
        self._foresee(rows, self.worst)
        top = 2 * rows > max(self._at_worst(), default=0)  # likely the one to be chosen: read reserved bytes at once
        result = self.prober.time(rows, self.worst, whole=rows == self.most, reserved=top)
        if isinstance(result, OutOfMemory):
            self._learn(rows, self.worst, result)
            return math.inf
        seconds, reading = result
        if reading is not None:
            self._learn(rows, self.worst, reading)
        return seconds

    def explore(self) -> None:
        """The small probes: how the cost grows with rows and with each length."""
        for rows, shape, mode in self._ladder():
            if not (self.shape_note and shape != self.worst) and self._safe(rows, shape):
                self._read_any_shape(rows, shape, mode)
        if not self._readings:
            self.read(self.least, self._shorter(4))
        if self._readings and not self._at_worst() and self.predicted(self.least) <= self._limit:
            self.read(self.least, self.worst)
        self._surveyed = True

    def explore_beside(self, other: int) -> None:
        """Two probes at sizes that fitted with a lever that saves less: enough to tell where this one leads.

        There is only one such size where nothing smaller may be run; then short rows tell what a row takes.
        """
        if other // 2 < self.least:
            self.explore()
            return
        for rows in (other // 2, other):
            self.read(rows, self.worst)
        self._surveyed = True

    def settle(self, largest: int, budget_bytes: int) -> None:
        """The end of the search: where the model knows no growth with the rows, or too little for its own edge, it is
        given some."""
        named = {name for name in self.model.phases if name in MICRO_PHASES} or set(FIRST_PHASES)
        if len({probe.rows for probe in self._readings.values() if named & probe.phases.keys()}) == 1:
            self._assume(named)
        if largest < self.most and self.predicted(largest + 1) <= budget_bytes:
            self._assume(named)

    def largest(self, budget_bytes: int) -> int:
        """The most rows of the worst shape that ran within the budget, with the model sure that one more would not."""
        while True:
            read = self._at_worst()
            fits = max((n for n, probe in read.items() if probe.cost_bytes <= budget_bytes), default=0)
            over = [n for n, probe in read.items() if probe.cost_bytes > budget_bytes]
            breaks = min((*over, *(n for n, shape in self._failed if shape == self.worst)), default=self.most + 1)
            near = any(probe.cost_bytes > 0.8 * budget_bytes for probe in read.values())
            edge = self.model.largest(self.worst, budget_bytes * (1 if near else SHORT_OF_IT), self.most)
            edge = max(fits, min(edge, breaks - 1))
            if edge > fits:
                rows = self._within_reach(fits, edge, budget_bytes)
                if self._would_break(rows):
                    if not self._weighed(rows):
                        return fits
                    continue
                self.read(rows, self.worst, "full" if edge == self.most else "later", reserved=True)
            elif fits == 0 or not self._on_card or read[fits].reserved_bytes is not None:
                return fits
            else:
                self.read(fits, self.worst, reserved=True)

    def check_corner(self, budget_bytes: int) -> None:
        """Many short rows: the other end of what a real step is cut into. Where that surprised, middling ones as well."""
        for divisor in (4, 2):
            shape = self._shorter(divisor)
            if shape == self.worst or self.shape_note or (self._last_miss(self._shorter(4)) or 1.0) <= 2 * PROVEN:
                return
            rows = self.model.largest(shape, CLIMB_TO * budget_bytes, max(1, self.most - 1))
            if rows and self.predicted(rows, shape) <= self._limit:
                self.read(rows, shape)

    def said(self, rows: int) -> int:
        """The peak predicted for so many rows of the worst shape by a model that had not seen them."""
        others = [probe for at, probe in self._readings.items() if at != (rows, self.worst)]
        if not others:
            return self.model.peak_bytes(rows, self.worst, whole=rows == self.most)
        unseen = MemoryModel.fit(others).peak_bytes(rows, self.worst, whole=rows == self.most)
        return self._foreseen.get((rows, self.worst), unseen)

    @property
    def readings(self) -> int:
        return len(self._readings)

    @property
    def read_at_worst(self) -> bool:
        return bool(self._at_worst())

    def _ladder(self) -> Iterator[tuple[int, Shape, Mode]]:
        few, some, more = (min(n, max(self.least, self.most - 1)) for n in (2, 4, 8))
        thorough = not self._on_card  # a ledger's peaks bend more at small sizes; a card's new shapes cost 0.2 s each
        if self.worst:
            short, middle = self._shorter(4), self._shorter(2)
            if (shortest := tuple(min(length, SHORTEST) for length in short)) != short:
                yield few, shortest, "full"
            yield few, short, "full"
            if thorough or len(self.worst) == 1:
                yield some, short, "later"
            for axis, longest in enumerate(self.worst):
                if len(self.worst) > 1:
                    uneven = (*short[:axis], longest, *short[axis + 1 :])
                    yield some if self._safe(some, uneven) else few, uneven, "later"
            if thorough or len(self.worst) == 1:
                yield from ((few, middle, "later"), (some, middle, "later"))
        yield few, self.worst, "full"
        if thorough:
            yield some, self.worst, "full"
        yield more, self.worst, "full"

    def _read_any_shape(self, rows: int, shape: Shape, mode: Mode) -> None:
        """Read it; a model of fixed input size may refuse a shorter shape: then rows alone are modelled."""
        try:
            self.read(rows, shape, mode)
        except TaskError as error:
            if shape == self.worst:
                raise
            self.shape_note = f"only the worst shape was probed, because a shorter one fails: {error}"
            self._readings.clear()
            self._model = None

    def _foresee(self, rows: int, shape: Shape) -> None:
        if self._surveyed and (rows, shape) not in self._readings:
            self._foreseen.setdefault((rows, shape), self.model.peak_bytes(rows, shape, whole=rows == self.most))

    def _learn(self, rows: int, shape: Shape, result: Probe | OutOfMemory) -> Probe | None:
        if isinstance(result, OutOfMemory):
            self._failed.add((rows, shape))
            return None
        known = self._readings.get((rows, shape))
        self._readings[rows, shape] = result if known is None else known.joined(result)
        self._model = None
        return self._readings[rows, shape]

    def _assume(self, names: set[str]) -> None:
        """Of these phases, that twice the rows take twice what is not fixed."""
        of = [probe for probe in self._readings.values() if names & probe.phases.keys()]
        if not of:
            return
        top = max(of, key=lambda probe: (probe.shape == self.worst, probe.rows))
        fixed, gradients = self.prober.fixed_bytes, self.prober.gradient_bytes
        held = {name: fixed + gradients * (name not in FIRST_PHASES) for name in names}
        phases = {name: peak + max(0, peak - held[name]) for name, peak in top.phases.items() if name in names}
        self._assumed.append(Probe(rows=2 * top.rows, shape=top.shape, phases=phases))
        self._model = None

    def _error(self) -> float:
        """The model's miss on the last size it climbed to, and on the last of all that it had not seen."""
        shapes = {self.worst, *[shape for _, shape in self._foreseen][-1:]}
        return max(self._last_miss(shape) or 0.0 for shape in shapes)

    def _last_miss(self, shape: Shape, *, beyond_bytes: int = 0) -> float | None:
        """How far the model was off on the last size of this shape that it had not seen, relative to what is beyond."""
        misses = [
            abs(said - peak) / max(peak - beyond_bytes, NOTHING_MUCH * self.prober.target.budget_bytes)
            for at, said in self._foreseen.items()
            if at[1] == shape and at in self._readings and (peak := self._readings[at].peak_bytes)
        ]
        return misses[-1] if misses else None

    def _within_reach(self, fits: int, edge: int, budget_bytes: int) -> int:
        """The edge itself once the model is proven close to it, else a step towards it that is bounded below the limit."""
        fixed = self.prober.fixed_bytes  # however large it is, it proves nothing about the rest
        miss, read = self._last_miss(self.worst, beyond_bytes=fixed), self._at_worst()
        proven = miss is not None and miss <= PROVEN
        reach = PROVEN_REACH if proven else FIRST_REACH if miss is None else REACH
        top = max((probe.cost_bytes for probe in read.values()), default=0)
        close = top - fixed >= CLOSE_ENOUGH * (self.predicted(edge) - fixed)
        if proven and close and edge <= PROVEN_REACH * fits:
            return edge
        climb = self.model.largest(self.worst, CLIMB_TO * budget_bytes, self.most)
        rows = min(edge, int(reach * fits), max(climb, 1))
        while rows > fits + 1 and self._bound(rows, self.worst) > self._limit:
            rows = (rows + fits) // 2
        return max(rows, fits + 1)

    def _would_break(self, rows: int) -> bool:
        """More than the limit, whatever a model of few readings says: rows never get cheaper as they get more."""
        read = self._at_worst()
        if not read or self._bound(rows, self.worst) <= self._limit:
            return False
        most, fixed = max(read), self.prober.fixed_bytes + self.prober.gradient_bytes
        return rows > most and fixed + (read[most].peak_bytes - fixed) * rows / most > self._limit

    def _weighed(self, rows: int) -> bool:
        """Read a size that may be over a limit which exists on paper alone, where there is room for it in truth."""
        if self._bound(rows, self.worst) > self.prober.room_bytes:
            return False
        result = self.prober.run_without_limit(rows, self.worst, "whole" if rows == self.most else "later")
        return result is not None and self._learn(rows, self.worst, result) is not None

    def _safe(self, rows: int, shape: Shape) -> bool:
        if not self._readings or self._bound(rows, shape) <= self._limit:
            return True
        if (shape == self.worst and self._would_break(rows)) or not self._in_proportion(shape):
            return False
        return len(self._readings) >= 3 and self.predicted(rows, shape) <= SURE_OF_MODEL * self._limit

    def _in_proportion(self, shape: Shape) -> bool:
        """Each length the same share of the worst. Until others are read, the model cannot tell the lengths apart."""
        shares = [length / worst for length, worst in zip(shape, self.worst, strict=True)]
        return max(shares, default=1.0) <= 1.1 * min(shares, default=1.0)

    def _bound(self, rows: int, shape: Shape) -> float:
        """No step of this size can cost more, judging by each reading and growth with the square of everything."""
        fixed = self.prober.fixed_bytes
        return min(
            fixed + max(0, probe.peak_bytes - fixed) * _growth(rows, probe.rows) * _longest_growth(shape, probe.shape)
            for probe in self._readings.values()
        )

    def predicted(self, rows: int, shape: Shape | None = None) -> int:
        """What so many rows would cost against the limit, of the worst shape unless another is given."""
        return self.model.cost_bytes(rows, self.worst if shape is None else shape, whole=rows == self.most)

    def _at_worst(self) -> dict[int, Probe]:
        return {rows: probe for (rows, shape), probe in self._readings.items() if shape == self.worst}

    def _shorter(self, divisor: int) -> Shape:
        return tuple(max(1, length // divisor) for length in self.worst)

    @property
    def _limit(self) -> int:
        return self.prober.target.limit_bytes

    @property
    def _on_card(self) -> bool:
        return has_peak_statistics(self.prober.rig.device)


def _says(known: Probe, mode: Mode, reserved: bool) -> bool:
    """Whether a reading holds what a probe of this mode would add."""
    wanted = {"later": "forward", "whole": "first_forward", "full": "first_forward"}[mode]
    return wanted in known.phases and (known.reserved_bytes is not None or not reserved)


def _growth(new: int, old: int) -> float:
    return max(1.0, new / old) ** 2


def _longest_growth(new: Shape, old: Shape) -> float:
    return max((_growth(a, b) for a, b in zip(new, old, strict=True)), default=1.0)
