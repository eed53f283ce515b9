"""How large a micro-batch may be: what was planned, what out-of-memory errors taught, and the way back up.

The ceiling is on one measure of a micro-batch. With a memory model that is predicted bytes; without one it is padded
work, rows × (1 + lengths), and it starts at infinity: the whole step at once, then learn.

After a failure the ceiling comes down, and how far depends on what is known:

    less room on the device than the micro-batch was predicted to need   to the share `fill` of what is there
    room enough, so the model was wrong, first time in this step         the model is raised to the room that was not enough
    anything else                                                        to what half the rows would take

Every lowering is remembered with the ceiling before it, and undone after `grow_after` clean steps; where the room on the
device can be read, it is undone only once there is room again. A growth that fails doubles the wait, up to 64 times.
Nothing here depends on the clock: the same failures give the same cuts.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from brimful.memory.cut import cut
from brimful.memory.model import MemoryModel, work
from brimful.task import Shape
from brimful.units import show_bytes, show_rows

GROW_AFTER = 10
"""Clean steps before a lowered ceiling is raised again."""
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
