"""The bytes an optimizer's step will allocate, known before it begins and held for a moment to prove they are there.

An out-of-memory error inside `optimizer.step()` leaves a half update that no retry can mend, so it must come earlier.
A step of a copy of the optimizer on the meta device allocates nothing and moves nothing, yet makes every tensor the real
step makes: a ledger lists those alive at its peak. Just before the real step tensors of the same sizes are allocated and
dropped, which leaves blocks of those very sizes in the allocator's cache. AdamW's first step needs twice the trained
weights (its state), fused AdamW's later steps nothing, foreach AdamW's one copy of the weights.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brimful.memory.context import StepContext
from brimful.memory.ledger import Ledger
from brimful.memory.meter import Room
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import Buffers, RandomState
from brimful.planning.plan import Plan
from brimful.step.interface import Events
from brimful.step.recovery import Ceiling
from brimful.units import show_bytes, show_rows

# The largest micro-batch of a plan run once before the first step, and forgotten.
#
# The caching allocator takes its final size at once then: segments made for small tensors first and large ones later leave
# holes (simulated over an epoch, 15.9 GB reserved instead of 17.4). It also proves on the very device, beside whatever else
# runs there today, that the plan still holds, before anything was trained. Weights, optimizer state, buffers, gradients and
# random numbers are as before.


def rehearse(rig: StepContext, plan: Plan, ceiling: Ceiling, room: Room, events: Events) -> bool:
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


STATE_GUESS = 2
"""Copies of the trained weights assumed for the first step of an optimizer whose code does not run on the meta device."""
TEMPORARY_GUESS = 1
"""Copies of the trained weights assumed for its later steps."""

FOR_LOOPS = ("Adafactor",)
"""Optimizers of torch that go through their tensors one by one on a card too, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Need:
    """Sizes of the tensors that one optimizer step makes, as they live at its peak."""

    first: tuple[int, ...]
    """For a step that makes its state as well."""
    later: tuple[int, ...]
    predicted: bool
    """False where the optimizer's code could not be traced, and a rule of thumb stands in."""


def predict(optimizer: Optimizer, graded: Sequence[nn.Parameter]) -> Need:
    """What a step of this optimizer over these parameters makes."""
    fused = all(group.get("fused") for group in optimizer.param_groups)  # one kernel: its state, and no temporaries
    try:
        shadow, gradients = _shadow(optimizer, graded)
        first, later = (_made_by_a_step(shadow, gradients, at_peak=not fused) for _ in range(2))
    except Exception:  # any code may stand in a step: a custom kernel, a value read on the host
        sizes = tuple(p.numel() * p.element_size() for p in graded)
        return Need(first=sizes * STATE_GUESS, later=sizes * TEMPORARY_GUESS, predicted=False)
    return Need(first=first, later=later, predicted=True)


def is_first_step(optimizer: Optimizer, graded: Sequence[nn.Parameter]) -> bool:
    """Whether some of these parameters have no state yet."""
    return any(not optimizer.state.get(param) for param in graded)


def reserve(sizes: Sequence[int], device: torch.device) -> None:
    """Allocate and drop tensors of these sizes; runs out of memory here or the step will not.

    On a card one more of the largest: what an operation takes inside itself is not seen (Adafactor: one more temporary).
    """
    if device.type != "cpu" and sizes:
        sizes = (*sizes, max(sizes))
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    del held


def _shadow(optimizer: Optimizer, graded: Sequence[nn.Parameter]) -> tuple[Optimizer, list[torch.Tensor]]:
    """A copy whose weights, gradients and state lie on the meta device, without hooks; counters stay on the host."""
    memo: dict[int, Any] = {}
    with_gradient = {id(param) for param in graded}
    gradients = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            stand_in = nn.Parameter(_on_meta(param), requires_grad=param.requires_grad)
            if id(param) in with_gradient:
                stand_in.grad = torch.empty_like(stand_in)
                gradients.append(stand_in.grad)
            memo[id(param)] = stand_in
    for param, state in optimizer.state.items():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                counts = value.ndim == 0 and (name == "step" or getattr(param, "ndim", 0) > 0)
                memo[id(value)] = value.detach().cpu().clone() if counts else _on_meta(value)
    memo.update((id(value), value) for value in vars(optimizer).values() if isinstance(value, nn.Module))
    shadow = object.__new__(type(optimizer))
    memo[id(optimizer)] = shadow
    kept = {name: OrderedDict() if name.endswith("_hooks") else value for name, value in vars(optimizer).items()}
    shadow.__dict__ = copy.deepcopy(kept, memo)
    on_card = all(param.device.type in ("cuda", "xpu") for param in graded)
    for group in shadow.param_groups:
        loops = type(optimizer).__name__ in FOR_LOOPS or isinstance(group.get("lr"), torch.Tensor)
        _resolve_implementation(group, many_at_once=on_card and not loops)
    return shadow, gradients


def _resolve_implementation(group: dict[str, Any], *, many_at_once: bool) -> None:
    """What `foreach=None` means on the real device; a fused kernel makes nothing but its state, nor does the plain loop."""
    if group.get("fused"):
        group.update(fused=False, foreach=False)
    elif "foreach" in group and group["foreach"] is None:
        group["foreach"] = many_at_once
    if "capturable" in group:
        group["capturable"] = False


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _run(optimizer: Any) -> None:
    """The class's own step, past the hooks and counters that users and schedulers hang on it."""
    step: Callable[..., Any] = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    weights = [param for group in optimizer.param_groups for param in group["params"]]
    return weights + [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def _made_by_a_step(optimizer: Optimizer, gradients: Sequence[torch.Tensor], *, at_peak: bool) -> tuple[int, ...]:
    """Sizes of the storages that a step adds to those held before: at its peak, or at its end."""
    ledger = _PeakLedger(device="meta")
    ledger.adopt((*_tensors(optimizer), *gradients))
    ledger.before = set(ledger.alive())
    with ledger:
        _run(optimizer)
        return tuple((ledger.at_peak() if at_peak else ledger.made()).values())


class _PeakLedger(Ledger):
    """Remembers which storages were alive when most was; a peak is over only when something is freed."""

    before: frozenset[int] | set[int] = frozenset()
    """Storages that were there before; an address that is freed and used again is not one of them."""
    _peak: dict[int, int] | None = None
    _highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0  # Adafactor reads a norm on the host; its value decides no size
        return super().__torch_dispatch__(func, types, args, kwargs)

    def alive(self) -> dict[int, int]:
        return {key: entry[0] for key, entry in self._entries.items()}

    def made(self) -> dict[int, int]:
        return {key: size for key, size in self.alive().items() if key not in self.before}

    def at_peak(self) -> dict[int, int]:
        self._keep()
        return self._peak or {}

    def _strike(self, key: int) -> None:
        self._keep()
        self.before -= {key}
        super()._strike(key)

    def _keep(self) -> None:
        if self.live_bytes > self._highest:
            self._highest, self._peak = self.live_bytes, self.made()
