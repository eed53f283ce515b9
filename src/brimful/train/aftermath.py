"""What a step that went through teaches: the memory model corrected, thrashing noticed, the cut grown back."""

from brimful.memory.bare import Rig
from brimful.memory.room import Room, allocator_retries
from brimful.train.ceiling import Ceiling
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
        self._thrashing = 0

    def of(self, step: int, ready: Ready, peak: int | None, gradient_bytes: int) -> None:
        """A step is over; `peak` is what it allocated at most, where that is known. Gradients may still be held."""
        retries = allocator_retries(self._device)
        self._thrashing = self._thrashing + 1 if retries > self._retries else 0
        self._retries = retries
        if ready.ooms or not ready.cut:
            return
        room = self._room.now(besides=gradient_bytes)
        rows, shape = max(ready.cut, key=lambda part: self._ceiling.measure(*part))
        whole = len(ready.cut) == 1
        if self._thrashing >= THRASHING_STEPS and rows > 1:
            self._thrashing = 0
            short = f"the allocator gave its cache back in {THRASHING_STEPS} steps in a row"
            self._events.add(
                "thrash",
                step,
                f"{short}: {self._ceiling.thrashing(rows, shape, room, whole=whole)}",
                room_bytes=room,
            )
        elif peak is not None and (raised := self._correct(ready, peak, gradient_bytes)):
            self._events.add("model", step, f"the step took more than predicted: {raised}", peak_bytes=peak)
        elif grown := self._ceiling.clean(room):
            self._events.add("grow", step, grown, room_bytes=room)

    def _correct(self, ready: Ready, peak: int, gradient_bytes: int) -> str | None:
        predicted = self._ceiling.peak_bytes(ready.cut)
        mine = peak - self._room.taken(besides=gradient_bytes)
        if predicted is None or mine <= MODEL_ERROR * predicted:
            return None
        return self._ceiling.too_low(mine, predicted)
