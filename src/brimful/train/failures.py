"""What follows from an out-of-memory error in a step: a finer cut, another try, a row set aside, or the end of the run.

A micro-batch that failed is cut. One that cannot be cut any more is tried again with everything cleaned up, since memory
may have been short for a moment only; then it is set aside if the user allowed that, or the run stops and says which row
it was, what it needs, and what would make it fit.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from brimful.errors import DoesNotFit, UserError
from brimful.memory.bare import Rig
from brimful.memory.room import Room, held_bytes
from brimful.plan.levers import checkpointing
from brimful.task import Shape
from brimful.train.ceiling import Ceiling
from brimful.train.events import Events
from brimful.train.options import StepOptions
from brimful.train.share import Share
from brimful.units import show_bytes, show_rows

ALONE_TRIES = 3
"""A row that runs out of memory alone is tried twice more, with everything cleaned up, before it counts as too large."""
FINISH_TRIES = 4
"""Clipping and the optimizer's bytes do not depend on the cut: after so many retries there the step gives up."""
SAME_CUT = 2
"""So many of those retries keep the cut. A finer one can only help against fragments, and where a step ran whole it costs
memory: gradients then wait through a forward."""
IN_A_MICRO_BATCH = ("collating", "to device", "forward", "backward")


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

    def __init__(self, rig: Rig, ceiling: Ceiling, room: Room, events: Events, options: StepOptions, rank: int) -> None:
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
        doing = self._rig.doing
        whole = place.of == 1
        rows, shape = len(place.rows), place.shape
        predicted = self._ceiling.predicted_bytes(rows, shape, whole=whole) if rows else None
        in_micro_batch = doing in IN_A_MICRO_BATCH
        if in_micro_batch and rows <= self.least:
            change = self._alone(current, place, room)
        elif current.finish_failures >= FINISH_TRIES:
            change = self._give_up(current, doing, room)
        elif rows > 1 and (in_micro_batch or (current.finish_failures >= SAME_CUT and not whole)):
            change = self._ceiling.failed(rows, shape, whole=whole, room_bytes=room, again=current.ooms > 1)
        else:
            change = "with everything cleaned up the step is tried again"
        self._events.add(
            "oom",
            current.step,
            f"out of memory in {_where(place, doing)}: {change}",
            process=self._rank,
            doing=doing,
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

    def _give_up(self, current: Pass, doing: str, room: int | None) -> str:
        has = f"the device has room for {show_bytes(room)}" if room is not None else "the device has no room for it"
        current.stop = DoesNotFit(
            f"memory ran out {FINISH_TRIES + 1} times in {doing} of step {current.step}, which no cut makes smaller: {has}; an optimizer "
            "with less state, a smaller model or more memory would let the run go on",
            needed_bytes=(room or 0) + 1,
        )
        return "the run stops"


def _where(place: Place, doing: str) -> str:
    if doing in IN_A_MICRO_BATCH:
        lengths = f" of {'+'.join(map(str, place.shape))}" if place.shape else ""
        return f"{doing}, micro-batch {place.index + 1} of {place.of} ({show_rows(len(place.rows))}{lengths})"
    return f"{doing}, after {place.of} micro-batch{'es' if place.of != 1 else ''}"


def _names(rows: Sequence[int]) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {' and '.join(map(str, rows))}"
