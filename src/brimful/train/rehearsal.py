"""The largest micro-batch of a plan run once before the first step, and forgotten.

The caching allocator takes its final size at once then: segments made for small tensors first and large ones later leave
holes (simulated over an epoch, 15.9 GB reserved instead of 17.4). It also proves on the very device, beside whatever else
runs there today, that the plan still holds, before anything was trained. Weights, optimizer state, buffers, gradients and
random numbers are as before.
"""

from brimful.memory.bare import Rig
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.room import Room
from brimful.memory.snapshot import Buffers, RandomState
from brimful.plan.plan import Plan
from brimful.train.ceiling import Ceiling
from brimful.train.events import Events
from brimful.units import show_bytes, show_rows


def rehearse(rig: Rig, plan: Plan, ceiling: Ceiling, room: Room, events: Events) -> bool:
    """Forward and backward of the planned micro-batch, the second time with gradients held. False: it ran out of memory."""
    rows, shape, whole = plan.micro_batch, plan.shape, plan.accumulation == 1
    random_state, buffers = RandomState(rig.device), Buffers(rig.model)

    def run() -> None:
        for _ in range(1 if whole else 2):
            rig.micro(rig.task.dummy(rows, shape), rows)

    outcome = attempt(run, rig.device, clean=rig.drop_gradients)
    rig.drop_gradients()
    buffers.restore()
    random_state.restore()
    size = f"{show_rows(rows)} of {'+'.join(map(str, shape))}" if shape else show_rows(rows)
    if isinstance(outcome, OutOfMemory):
        free = room.now()
        change = ceiling.failed(rows, shape, whole=whole, room_bytes=free, again=False)
        events.add("oom", 0, f"the rehearsal of {size} ran out of memory: {change}", rows=rows, room_bytes=free)
        return False
    predicted = show_bytes(plan.predicted_peak_bytes)
    events.add("note", 0, f"the planned micro-batch of {size} was rehearsed and fits, {predicted} as predicted")
    return True
