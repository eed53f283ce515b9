"""What follows from an out-of-memory error in a step: a finer cut, another try, a row set aside, or the end of the run.

A micro-batch that failed is cut. One that cannot be cut any more is tried again with everything cleaned up, since memory
may have been short for a moment only; then it is set aside if the user allowed that, or the run stops and says which row
it was, what it needs, and what would make it fit.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from brimful.errors import DoesNotFit, UserError
from brimful.memory.context import Phase, StepContext
from brimful.memory.meter import Room, allocator_retries, held_bytes
from brimful.memory.model import MemoryModel, work
from brimful.memory.split import cut
from brimful.planning.levers import checkpointing
from brimful.step.distributed import Share
from brimful.step.interface import GROW_AFTER, Events, StepOptions
from brimful.task import Shape
from brimful.units import show_bytes, show_rows

if TYPE_CHECKING:
    from brimful.step.gradients import Ready

# How large a micro-batch may be: what was planned, what out-of-memory errors taught, and the way back up.
#
# The ceiling is on one measure of a micro-batch. With a memory model that is predicted bytes; without one it is padded
# work, rows × (1 + lengths), and it starts at infinity: the whole step at once, then learn.
#
# After a failure the ceiling comes down, and how far depends on what is known:
#
#     less room on the device than the micro-batch was predicted to need   to the share `fill` of what is there
#     room enough, so the model was wrong, first time in this step         the model is raised to the room that was not enough
#     anything else                                                        to what half the rows would take
#
# Every lowering is remembered with the ceiling before it, and undone after `grow_after` clean steps; where the room on the
# device can be read, it is undone only once there is room again. A growth that fails doubles the wait, up to 64 times.
# Nothing here depends on the clock: the same failures give the same cuts.


LONGEST_WAIT = 64
"""Times `GROW_AFTER` that a growth waits at most after growths that failed."""
MOST_RAISED = 1.5
"""A single failure, or a single peak, does not raise the memory model by more than this."""
THRASHING = 0.75
"""The share of the rows that is left at once when the allocator thrashes."""
CAME_BACK = 1.05
"""Without a memory model, so much more room than at the failure counts as memory that came back."""
SELDOM = 8
"""Without a memory model and with no more room than at the failure, a growth is tried this many times less often."""
ALMOST = 0.98
"""Room for this share of a ceiling is room for it: what libraries take for themselves varies a little."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """One lowering, as it is undone."""

    limit: float
    correction: float
    may_run_whole: bool
    room_bytes: int | None
    """What the device had room for when it became necessary."""


@dataclass(kw_only=True)
class Ceiling:
    """The measure of a micro-batch, and how much of it is allowed now."""

    model: MemoryModel | None
    limit: float
    """What one micro-batch may measure: bytes with a memory model, padded work without."""
    budget: float = math.inf
    """What the limit may not exceed: the share of the memory that is to be used."""
    most: int | None = None
    """What the user fixed: never more rows than this."""
    overhead: float | None = None
    """What a further micro-batch costs, in rows × padded lengths; None: as few of them as can be."""
    fill: float = 0.85
    grow_after: int = GROW_AFTER
    correction: float = 1.0
    """What out-of-memory errors taught about the memory model: its predictions times this."""
    measured: float = 1.0
    """What measured peaks taught about it: times this as well, for good."""
    may_run_whole: bool = True
    """A step of a single micro-batch holds no gradients; once one has failed, steps are cut."""
    for_now: int | None = None
    """Never more rows than this in the step on its way, which failed where the measure sees no difference."""
    lowered: list[Lowered] = field(default_factory=list)
    clean_steps: int = 0
    wait: int = 1
    """Times `grow_after` to wait before growing."""
    just_grown: bool = False

    def cut(self, shapes: list[Shape], *, part: bool = False) -> list[list[int]]:
        """The rows of these shapes in micro-batches below the ceiling. `part`: there are others in the step."""
        cost = self._cost_of_a_part if part else self._cost
        return cut(shapes, cost, self.limit, most=self._most, overhead=self.overhead)

    def allows(self, rows: int, shape: Shape, *, whole: bool) -> bool:
        """Whether a micro-batch that was proposed may run as it is."""
        return rows <= (self._most or rows) and self._cost(rows, shape, whole=whole) <= self.limit

    @property
    def _most(self) -> int | None:
        return min((most for most in (self.most, self.for_now) if most is not None), default=None)

    def _cost_of_a_part(self, rows: int, shape: Shape, /, *, whole: bool = False) -> float:
        """Rows that come first or last in the cut are still not the whole step: gradients are held beside them."""
        return self.measure(rows, shape)

    def _cost(self, rows: int, shape: Shape, /, *, whole: bool = False) -> float:
        return math.inf if whole and not self.may_run_whole else self.measure(rows, shape, whole=whole)

    def measure(self, rows: int, shape: Shape, *, whole: bool = False) -> float:
        if self.model is None:
            return work(rows, shape)
        return self.model.measure(rows, shape, whole=whole, factor=self._factor)

    @property
    def _factor(self) -> float:
        return self.correction * self.measured

    def predicted_bytes(self, rows: int, shape: Shape, *, whole: bool = False) -> int | None:
        return None if self.model is None else round(self._factor * self.model.cost_bytes(rows, shape, whole=whole))

    def peak_bytes(self, groups: list[tuple[int, Shape]]) -> int | None:
        """Allocated bytes at the peak of a step cut so; None without a model."""
        if self.model is None:
            return None
        whole = len(groups) == 1
        return round(self._factor * max(self.model.peak_bytes(*group, whole=whole) for group in groups))

    def failed(self, rows: int, shape: Shape, *, whole: bool, room_bytes: int | None, again: bool) -> str:
        """A micro-batch of this size ran out of memory. Lowers the ceiling below it and says how."""
        self._lower(room_bytes)
        predicted = self.predicted_bytes(rows, shape, whole=whole)
        if predicted is not None and room_bytes is not None and not again:
            if predicted > self.fill * room_bytes:
                self.limit = min(self.limit, self.fill * room_bytes)
                return f"the device has room for {show_bytes(room_bytes)} only, so micro-batches stay within {self.fill:.0%} of that"
            raised = min(room_bytes / predicted, MOST_RAISED)
            self.correction *= raised
            if self.measure(rows, shape, whole=whole) > self.limit:
                return f"the memory model was too low and is raised by {raised - 1:.0%}"
        half = max(1, (rows + 1) // 2)
        self._allow(half, shape, whole)
        if rows > 1 and self.measure(rows, shape) <= self.limit:  # a model that does not rise with the rows there
            self.for_now = half
        return f"micro-batches as long as this one have {show_rows(half)} at most"

    def thrashing(self, rows: int, shape: Shape, room_bytes: int | None, *, whole: bool = False) -> str:
        """The largest micro-batch of the last step left the allocator short."""
        self._lower(room_bytes)
        fewer = max(1, int(THRASHING * rows))
        self._allow(fewer, shape, whole)
        return f"micro-batches as long as the largest have {show_rows(fewer)} at most"

    def too_low(self, measured_bytes: int, predicted_bytes: int) -> str:
        """A step took more than was predicted of it, and fitted. The sizes allowed stay what they are, up to the budget."""
        ratio = measured_bytes / predicted_bytes
        self.measured *= ratio
        self.limit = min(ratio * self.limit, max(self.budget, self.limit))
        self.lowered = [replace(one, limit=min(ratio * one.limit, max(self.budget, one.limit))) for one in self.lowered]
        return f"the memory model is raised by {ratio - 1:.1%}"

    def _allow(self, rows: int, shape: Shape, whole: bool) -> None:
        """No more than so many rows of this shape, as a part of a step."""
        self.limit = min(self.limit, self.measure(rows, shape))
        self.may_run_whole = self.may_run_whole and not whole

    def _lower(self, room_bytes: int | None) -> None:
        if self.just_grown:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
        self.lowered.append(Lowered(self.limit, self.correction, self.may_run_whole, room_bytes))
        self.clean_steps, self.just_grown = 0, False

    def clean(self, room_bytes: int | None) -> str | None:
        """A step went through. After enough of them lowerings are undone; says so if any was."""
        self.for_now = None
        self.clean_steps += 1
        if self.just_grown and self.clean_steps >= self.grow_after:
            self.just_grown, self.wait = False, 1
        if not self.lowered or self.clean_steps < self.grow_after:
            return None
        undone = 0
        while self.lowered and self._may_undo(self.lowered[-1], room_bytes, undone):
            back = self.lowered.pop()
            self.limit, self.correction, self.may_run_whole = back.limit, back.correction, back.may_run_whole
            undone += 1
        if undone:
            self.clean_steps, self.just_grown = 0, True
            which = "one step coarser again" if self.lowered else "as coarse as at the start again"
            return f"the cut is {which} after {self.grow_after} clean steps"
        return self._creep(room_bytes)

    def _may_undo(self, back: Lowered, room_bytes: int | None, undone: int) -> bool:
        waited = self.clean_steps >= self.grow_after * self.wait
        if room_bytes is None or back.room_bytes is None:
            return waited and not undone
        if self.model is None:
            if room_bytes >= CAME_BACK * back.room_bytes:
                return waited
            return not undone and self.clean_steps >= self.grow_after * max(self.wait, SELDOM)
        return waited and self.fill * room_bytes >= ALMOST * back.limit

    def _creep(self, room_bytes: int | None) -> str | None:
        """Some room came back, not all of it."""
        if self.model is None or room_bytes is None or self.clean_steps < self.grow_after * self.wait:
            return None
        target = min(self.fill * room_bytes, self.lowered[-1].limit)
        if target * ALMOST <= self.limit:
            return None
        self.limit, self.clean_steps, self.just_grown = target, 0, True
        return f"the device has room for {show_bytes(room_bytes)} again, and micro-batches grow with it"

    def to_json(self) -> dict[str, Any]:
        """What belongs into a checkpoint: the same cuts follow from the same state."""
        return {
            **{name: getattr(self, name) for name in _STATE},
            "limit": _finite(self.limit),
            "lowered": [
                [_finite(one.limit), one.correction, one.may_run_whole, one.room_bytes] for one in self.lowered
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state[name])
        self.limit = _number(state["limit"])
        self.lowered = [Lowered(_number(limit), *others) for limit, *others in state["lowered"]]


_STATE = ("correction", "measured", "may_run_whole", "clean_steps", "wait", "just_grown")


def _finite(limit: float) -> float | None:
    """JSON has no infinity."""
    return None if math.isinf(limit) else limit


def _number(limit: float | None) -> float:
    return math.inf if limit is None else limit


# What a step that went through teaches: the memory model corrected, thrashing noticed, the cut grown back.


THRASHING_STEPS = 2
"""Steps in a row with allocator retries that count as thrashing."""
MODEL_ERROR = 1.02
"""A step may take so much more than predicted before the memory model is corrected."""


class Aftermath:
    """Looks at each step once it is over."""

    def __init__(self, rig: StepContext, ceiling: Ceiling, room: Room, events: Events) -> None:
        self._device, self._ceiling, self._room, self._events = rig.device, ceiling, room, events
        self._retries = allocator_retries(rig.device)
        self._thrashing = self._taken = 0

    def begin(self) -> None:
        """A step begins. What somebody else holds now may be gone before its peak is read."""
        self._taken = self._room.taken()

    def of(self, step: int, ready: "Ready", peak: int | None, gradient_bytes: int) -> None:
        """A step is over; `peak` is what it allocated at most, where that is known. Gradients may still be held."""
        retries = allocator_retries(self._device)
        self._thrashing = self._thrashing + 1 if retries > self._retries else 0
        self._retries = retries
        if ready.ooms or not ready.cut:
            return
        if self._thrashing >= THRASHING_STEPS and max(rows for rows, _ in ready.cut) > 1:
            self._thrashed(step, ready, gradient_bytes)
        elif peak is not None and (raised := self._correct(ready, peak, gradient_bytes)):
            self._events.add("model", step, f"the step took more than predicted: {raised}", peak_bytes=peak)
        elif self._ceiling.lowered or self._ceiling.just_grown:
            room = self._room.now(besides=gradient_bytes)
            if grown := self._ceiling.clean(room):
                self._events.add("grow", step, grown, room_bytes=room)

    def _thrashed(self, step: int, ready: "Ready", gradient_bytes: int) -> None:
        self._thrashing = 0
        rows, shape = max(ready.cut, key=lambda part: self._ceiling.measure(*part))
        room = self._room.now(besides=gradient_bytes)
        change = self._ceiling.thrashing(rows, shape, room, whole=len(ready.cut) == 1)
        short = f"the allocator gave its cache back in {THRASHING_STEPS} steps in a row"
        self._events.add("thrash", step, f"{short}: {change}", room_bytes=room)

    def _correct(self, ready: "Ready", peak: int, gradient_bytes: int) -> str | None:
        predicted = self._ceiling.peak_bytes(ready.cut)
        if predicted is None or peak <= MODEL_ERROR * predicted:
            return None
        mine = peak - max(self._taken, self._room.taken(besides=gradient_bytes))
        if mine <= MODEL_ERROR * predicted:
            return None
        return self._ceiling.too_low(min(mine, round(MOST_RAISED * predicted)), predicted)


ALONE_TRIES = 3
"""A row that runs out of memory alone is tried twice more, with everything cleaned up, before it counts as too large."""
FINISH_TRIES = 4
"""Clipping and the optimizer's bytes do not depend on the cut: after so many retries there the step gives up."""
SAME_CUT = 2
"""So many of those retries keep the cut. A finer one can only help against fragments, and where a step ran whole it costs
memory: gradients then wait through a forward."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which micro-batch was at work when memory ran out; after the last of them, the largest."""

    index: int
    of: int
    rows: list[int]
    shape: Shape


@dataclass
class Pass:
    """One step on its way."""

    step: int
    share: Share
    left: list[int]
    """The rows still in: all but those set aside."""
    groups: list[list[int]] = field(default_factory=list)
    place: Place | None = None
    through: bool = False
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    busy_s: float = 0.0
    ooms: int = 0
    finish_failures: int = 0
    alone: Counter[tuple[int, ...]] = field(default_factory=Counter)
    set_aside: list[int] = field(default_factory=list)
    stop: UserError | None = None
    went_through: float = 0.0
    """The measure of the largest micro-batch that went through in this try."""


class Failures:
    """Draws the consequences, and tells of them."""

    def __init__(
        self, rig: StepContext, ceiling: Ceiling, room: Room, events: Events, options: StepOptions, rank: int
    ) -> None:
        self._rig, self._ceiling, self._room, self._events, self._options = rig, ceiling, room, events, options
        self._rank = rank
        self.ooms = 0
        """Of this process, in all steps."""
        norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in rig.model.modules())
        self.least = 2 if norms else 1
        """Rows of the smallest micro-batch: BatchNorm cannot average over a single one."""

    def learn(self, current: Pass, message: str) -> None:
        """An out-of-memory error: lower the ceiling, or set the row aside, or stop; and tell."""
        assert current.place is not None
        current.ooms += 1
        self.ooms += 1
        place, room = current.place, self._room.now()
        phase = self._rig.phase
        whole = place.of == 1
        rows, shape = len(place.rows), place.shape
        predicted = self._ceiling.predicted_bytes(rows, shape, whole=whole) if rows else None
        in_micro_batch = phase.in_micro_batch
        if in_micro_batch and rows <= self.least:
            change = self._alone(current, place, room)
        elif current.finish_failures >= FINISH_TRIES:
            change = self._give_up(current, phase, room)
        elif rows > 1 and (in_micro_batch or (current.finish_failures >= SAME_CUT and not whole)):
            change = self._ceiling.failed(rows, shape, whole=whole, room_bytes=room, again=current.ooms > 1)
        else:
            change = "with everything cleaned up the step is tried again"
        self._events.add(
            "oom",
            current.step,
            f"out of memory in {_where(place, phase)}: {change}",
            process=self._rank,
            phase=phase,
            micro_batch=place.index,
            micro_batches=place.of,
            rows=rows,
            shape=list(shape),
            predicted_bytes=predicted,
            room_bytes=room,
            held_bytes=held_bytes(self._rig.device),
            attempt=current.ooms,
            change=change,
            message=message.splitlines()[0] if message else "",
        )

    def _alone(self, current: Pass, place: Place, room: int | None) -> str:
        """A micro-batch that cannot be cut: try again, and then set it aside or stop."""
        rows, which = tuple(place.rows), _names(place.rows)
        current.alone[rows] += 1
        if current.alone[rows] < ALONE_TRIES:
            return f"{which} cannot be cut, so with everything cleaned up the step is tried again"
        if self._ceiling.measure(len(rows), place.shape) <= current.went_through:
            return self._no_room_for_a_second(current, which, room)
        predicted = self._ceiling.predicted_bytes(len(rows), place.shape)
        lengths = f" (lengths {'+'.join(map(str, place.shape))})" if place.shape else ""
        needs = f"about {show_bytes(predicted)} (predicted)" if predicted else "an unknown amount"
        room_now = f"the device has room for {show_bytes(room)}" if room is not None else "the device's room is unknown"
        sentence = (
            f"{which} of step {current.step}{lengths} cannot be cut and needs {needs}, but memory ran out; {room_now}"
        )
        if self._options.skip_oversized:
            current.left = [row for row in current.left if row not in rows]
            current.set_aside += rows
            self._events.add(
                "oversized", current.step, f"{sentence}; set aside", rows=list(rows), shape=list(place.shape)
            )
            return f"{which} set aside"
        current.stop = DoesNotFit(f"{sentence}; {self._ways_out()}", needed_bytes=predicted or (room or 0) + 1)
        return "the run stops"

    def _no_room_for_a_second(self, current: Pass, which: str, room: int | None) -> str:
        """It is not the row: a micro-batch as large went through before it, while no gradients were held."""
        room_now = f"of the {show_bytes(room)} there is room for" if room is not None else "of the device's memory"
        current.stop = DoesNotFit(
            f"{which} of step {current.step} ran out of memory although as much went through before it in the same step: weights, "
            f"gradients and optimizer state take so much {room_now} that no second micro-batch fits beside the gradients of the "
            f"first; {self._ways_out(rows=False)}",
            needed_bytes=(room or 0) + 1,
        )
        return "the run stops"

    def _ways_out(self, *, rows: bool = True) -> str:
        """The levers that are still there to pull."""
        model, ways = self._rig.model, []
        lever = checkpointing(self._rig.task, model)
        if lever.offered and not lever.already_on:
            ways.append(f"gradient checkpointing ({lever.how})")
        if self._rig.autocast is None and self._rig.device.type != "cpu":
            ways.append("precision='bf16'")
        ways += ["shorter rows"] * rows + ["a smaller model or an optimizer with less state", "more memory"]
        skip = "; skip_oversized=True sets such rows aside and goes on" if rows else ""
        return f"what would make it fit: {', '.join(ways)}{skip}"

    def _give_up(self, current: Pass, phase: Phase, room: int | None) -> str:
        has = f"the device has room for {show_bytes(room)}" if room is not None else "the device has no room for it"
        current.stop = DoesNotFit(
            f"memory ran out {FINISH_TRIES + 1} times in {phase} of step {current.step}, which no cut makes smaller: {has}; an optimizer "
            "with less state, a smaller model or more memory would let the run go on",
            needed_bytes=(room or 0) + 1,
        )
        return "the run stops"


def _where(place: Place, phase: Phase) -> str:
    if phase.in_micro_batch:
        lengths = f" of {'+'.join(map(str, place.shape))}" if place.shape else ""
        return f"{phase}, micro-batch {place.index + 1} of {place.of} ({show_rows(len(place.rows))}{lengths})"
    return f"{phase}, after {place.of} micro-batch{'es' if place.of != 1 else ''}"


def _names(rows: Sequence[int]) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {' and '.join(map(str, rows))}"
