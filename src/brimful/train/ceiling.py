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
from dataclasses import dataclass, field
from typing import Any

from brimful.memory.cut import cut
from brimful.memory.model import MemoryModel
from brimful.task import Shape
from brimful.units import show_bytes, show_rows

GROW_AFTER = 10
"""Clean steps before a lowered ceiling is raised again."""
LONGEST_WAIT = 64
"""Times `GROW_AFTER` that a growth waits at most after growths that failed."""
MOST_RAISED = 1.5
"""A single failure does not raise the memory model by more than this."""
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
    room_bytes: int | None
    """What the device had room for when it became necessary."""


@dataclass(kw_only=True)
class Ceiling:
    """The measure of a micro-batch, and how much of it is allowed now."""

    model: MemoryModel | None
    limit: float
    """What one micro-batch may measure: bytes with a memory model, padded work without."""
    most: int | None = None
    """What the user fixed: never more rows than this."""
    fill: float = 0.85
    grow_after: int = GROW_AFTER
    correction: float = 1.0
    """What the run taught about the memory model: its predictions times this."""
    lowered: list[Lowered] = field(default_factory=list)
    clean_steps: int = 0
    wait: int = 1
    """Times `grow_after` to wait before growing."""
    just_grown: bool = False

    def cut(self, shapes: list[Shape]) -> list[list[int]]:
        """The rows of these shapes in micro-batches below the ceiling."""
        return cut(shapes, self.measure, self.limit, most=self.most)

    def measure(self, rows: int, shape: Shape, *, whole: bool = False) -> float:
        """A byte for each unit of work keeps the measure rising where the optimizer's phase makes the peak flat."""
        work = float(rows * (1 + sum(shape)))
        return work if self.model is None else self.correction * self.model.cost_bytes(rows, shape, whole=whole) + work

    def predicted_bytes(self, rows: int, shape: Shape, *, whole: bool = False) -> int | None:
        return None if self.model is None else round(self.correction * self.model.cost_bytes(rows, shape, whole=whole))

    def peak_bytes(self, groups: list[tuple[int, Shape]]) -> int | None:
        """Allocated bytes at the peak of a step cut so; None without a model."""
        if self.model is None:
            return None
        whole = len(groups) == 1
        return round(self.correction * max(self.model.peak_bytes(*group, whole=whole) for group in groups))

    def failed(self, rows: int, shape: Shape, *, whole: bool, room_bytes: int | None, again: bool) -> str:
        """A micro-batch of this size ran out of memory. Lowers the ceiling below it and says how."""
        if self.just_grown:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
        self._remember(room_bytes)
        predicted = self.predicted_bytes(rows, shape, whole=whole)
        if predicted is not None and room_bytes is not None and not again:
            if predicted > self.fill * room_bytes:
                self.limit = min(self.limit, self.fill * room_bytes)
                return f"the device has room for {show_bytes(room_bytes)} only, so micro-batches stay within {self.fill:.0%} of that"
            raised = min(room_bytes / predicted, MOST_RAISED)
            self.correction *= raised
            return f"the memory model was too low and is raised by {raised - 1:.0%}"
        half = max(1, (rows + 1) // 2)
        self.limit = min(self.limit, self.measure(half, shape))
        return f"micro-batches as long as this one have {show_rows(half)} at most"

    def thrashing(self, rows: int, shape: Shape, room_bytes: int | None) -> str:
        """The largest micro-batch of the last step left the allocator short."""
        self._remember(room_bytes)
        fewer = max(1, int(THRASHING * rows))
        self.limit = min(self.limit, self.measure(fewer, shape))
        return f"micro-batches as long as the largest have {show_rows(fewer)} at most"

    def too_low(self, measured_bytes: int, predicted_bytes: int) -> str:
        """A step took more than was predicted of it, and fitted all the same."""
        self.correction *= measured_bytes / predicted_bytes
        return f"the memory model is raised by {measured_bytes / predicted_bytes - 1:.1%}"

    def clean(self, room_bytes: int | None) -> str | None:
        """A step went through. After enough of them lowerings are undone; says so if any was."""
        self.clean_steps += 1
        if self.just_grown and self.clean_steps >= self.grow_after:
            self.just_grown, self.wait = False, 1
        if not self.lowered or self.clean_steps < self.grow_after:
            return None
        undone = 0
        while self.lowered and self._may_undo(self.lowered[-1], room_bytes, undone):
            back = self.lowered.pop()
            self.limit, self.correction, undone = back.limit, back.correction, undone + 1
        if undone:
            self.clean_steps, self.just_grown = 0, True
            which = "one step coarser again" if self.lowered else "as coarse as planned again"
            return f"the cut is {which} after {self.grow_after} clean steps"
        return self._creep(room_bytes)

    def _may_undo(self, back: Lowered, room_bytes: int | None, undone: int) -> bool:
        waited = self.clean_steps >= self.grow_after * self.wait
        if room_bytes is None or back.room_bytes is None:
            return waited and not undone
        if self.model is None:
            if room_bytes >= CAME_BACK * back.room_bytes:
                return True
            return not undone and self.clean_steps >= self.grow_after * max(self.wait, SELDOM)
        return waited and self.fill * room_bytes >= ALMOST * back.limit

    def _creep(self, room_bytes: int | None) -> str | None:
        """Some room came back, not all of it."""
        if self.model is None or room_bytes is None:
            return None
        target = min(self.fill * room_bytes, self.lowered[-1].limit)
        if target * ALMOST <= self.limit:
            return None
        self.limit, self.clean_steps = target, 0
        return f"the device has room for {show_bytes(room_bytes)} again, and micro-batches grow with it"

    def _remember(self, room_bytes: int | None) -> None:
        self.lowered.append(Lowered(self.limit, self.correction, room_bytes))
        self.clean_steps, self.just_grown = 0, False

    def to_json(self) -> dict[str, Any]:
        """What belongs into a checkpoint: the same cuts follow from the same state."""
        return {
            "limit": None if math.isinf(self.limit) else self.limit,
            "correction": self.correction,
            "lowered": [
                [None if math.isinf(one.limit) else one.limit, one.correction, one.room_bytes] for one in self.lowered
            ],
            "clean_steps": self.clean_steps,
            "wait": self.wait,
            "just_grown": self.just_grown,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.limit = math.inf if state["limit"] is None else state["limit"]
        self.correction = state["correction"]
        self.lowered = [
            Lowered(math.inf if limit is None else limit, correction, room)
            for limit, correction, room in state["lowered"]
        ]
        self.clean_steps, self.wait, self.just_grown = state["clean_steps"], state["wait"], state["just_grown"]
