"""What a step that went through teaches: the memory model corrected, thrashing noticed, the cut grown back."""

from brimful.memory.bare import Rig
from brimful.memory.room import Room, allocator_retries
from brimful.train.ceiling import MOST_RAISED, Ceiling
from brimful.train.events import Events
from brimful.train.gradients import Ready

THRASHING_STEPS = 2
"""Steps in a row with allocator retries that count as thrashing."""
MODEL_ERROR = 1.02
"""A step may take so much more than predicted before the memory model is corrected."""


class Aftermath:
    """Looks at each step once it is over."""

    def __init__(self, rig: Rig, ceiling: Ceiling, room: Room, events: Events) -> None:
        self._device, self._ceiling, self._room, self._events = rig.device, ceiling, room, events
        self._retries = allocator_retries(rig.device)
        self._thrashing = self._taken = 0

    def begin(self) -> None:
        """A step begins. What somebody else holds now may be gone before its peak is read."""
        self._taken = self._room.taken()

    def of(self, step: int, ready: Ready, peak: int | None, gradient_bytes: int) -> None:
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

    def _thrashed(self, step: int, ready: Ready, gradient_bytes: int) -> None:
        self._thrashing = 0
        rows, shape = max(ready.cut, key=lambda part: self._ceiling.measure(*part))
        room = self._room.now(besides=gradient_bytes)
        change = self._ceiling.thrashing(rows, shape, room, whole=len(ready.cut) == 1)
        short = f"the allocator gave its cache back in {THRASHING_STEPS} steps in a row"
        self._events.add("thrash", step, f"{short}: {change}", room_bytes=room)

    def _correct(self, ready: Ready, peak: int, gradient_bytes: int) -> str | None:
        predicted = self._ceiling.peak_bytes(ready.cut)
        if predicted is None or peak <= MODEL_ERROR * predicted:
            return None
        mine = peak - max(self._taken, self._room.taken(besides=gradient_bytes))
        if mine <= MODEL_ERROR * predicted:
            return None
        return self._ceiling.too_low(min(mine, round(MOST_RAISED * predicted)), predicted)
