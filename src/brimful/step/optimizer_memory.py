"""The bytes an optimizer's step will allocate, known before it begins and reserved for a moment to prove they are there.

An out-of-memory error inside `optimizer.step()` leaves a partial update that no retry can repair, so it must come earlier.
A copy of the optimizer steps on the meta device, which allocates nothing but makes every tensor the real step makes, and
a ledger lists those alive at the peak. Just before the real step, tensors of the same sizes are allocated and freed, which
leaves blocks of these sizes in the allocator's cache. AdamW's first step needs twice the trained weights (its state),
fused AdamW's later steps nothing, foreach AdamW's one copy of the weights.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brimful.memory.context import tensors_of
from brimful.memory.ledger import Ledger
from brimful.memory.snapshot import RandomState

PARAM_SETS_KEPT = 7
"""Other sets of stepped parameters whose bytes stay known."""
STATE_GUESS = 2
"""Copies of the trained weights assumed for the first step of an optimizer whose code does not run on the meta device."""
TEMPORARY_GUESS = 1
"""Copies of the trained weights assumed for its later steps."""
FOR_LOOPS = ("Adafactor",)
"""torch optimizers that step one tensor at a time by default, on a GPU too."""


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Sizes of the tensors that one optimizer step makes, as they are alive at its peak."""

    first: tuple[int, ...]
    """For a step that also makes its state."""
    later: tuple[int, ...]
    traced: bool
    """False if the optimizer's code could not be traced, so the sizes are a rule of thumb."""


class OptimizerMemory:
    """Reserves the bytes of an optimizer's next step. `note` receives a remark for the user."""

    def __init__(self, optimizer: Optimizer, device: torch.device, note: Callable[[str], object]) -> None:
        self._optimizer, self._device, self._note = optimizer, device, note
        self._known: dict[tuple[int, ...], OptimizerBytes] = {}

    def reserve(self, params: Sequence[nn.Parameter]) -> None:
        """Raise the out-of-memory error that a step over these parameters would raise. Changes no random state.

        What the optimizer's code changes outside the optimizer, such as a global counter, cannot be restored.
        """
        key = tuple(map(id, params))  # which parameters have gradients may change from step to step
        if key not in self._known:
            latest = dict(list(self._known.items())[:PARAM_SETS_KEPT])
            random_state = RandomState(self._device)  # an optimizer that adds noise to its step draws some here
            self._known = {key: predict(self._optimizer, params), **latest}
            random_state.restore()
            if not self._known[key].traced:
                name = type(self._optimizer).__name__
                self._note(f"{name} could not be traced, so the bytes reserved for its step are a rule of thumb")
        needed = self._known[key]
        reserve(needed.first if is_first_step(self._optimizer, params) else needed.later, self._device)


def predict(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> OptimizerBytes:
    """What a step of this optimizer over these parameters makes."""
    fused = all(group.get("fused") for group in optimizer.param_groups)  # one kernel: its state, and no temporaries
    try:
        shadow, gradients = _meta_copy(optimizer, params)
        first, later = (_trace_step(shadow, gradients, at_peak=not fused) for _ in range(2))
    except Exception:  # a step may hold any code: a custom kernel, a value read on the host
        sizes = tuple(p.numel() * p.element_size() for p in params)
        return OptimizerBytes(first=sizes * STATE_GUESS, later=sizes * TEMPORARY_GUESS, traced=False)
    return OptimizerBytes(first=first, later=later, traced=True)


def is_first_step(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> bool:
    """Whether some of these parameters have no state yet."""
    return any(not optimizer.state.get(param) for param in params)


def reserve(sizes: Sequence[int], device: torch.device) -> None:
    """Allocate and free tensors of these sizes.

    On a GPU one more of the largest, since what an operation allocates inside itself is not traced (Adafactor: one more
    temporary).
    """
    if device.type != "cpu" and sizes:
        sizes = (*sizes, max(sizes))
    tensors = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    del tensors


def _meta_copy(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> tuple[Optimizer, list[torch.Tensor]]:
    """A copy with weights, gradients and state on the meta device and without hooks. Counters stay on the host."""
    memo: dict[int, Any] = {}
    with_gradient = {id(param) for param in params}
    gradients = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            meta_param = nn.Parameter(_on_meta(param), requires_grad=param.requires_grad)
            if id(param) in with_gradient:
                meta_param.grad = torch.empty_like(meta_param)
                gradients.append(meta_param.grad)
            memo[id(param)] = meta_param
    for param, state in optimizer.state.items():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                counter = value.ndim == 0 and (name == "step" or getattr(param, "ndim", 0) > 0)
                memo[id(value)] = value.detach().cpu().clone() if counter else _on_meta(value)
    memo.update((id(value), value) for value in vars(optimizer).values() if isinstance(value, nn.Module))
    shadow = object.__new__(type(optimizer))
    memo[id(optimizer)] = shadow
    attributes = {name: OrderedDict() if name.endswith("_hooks") else value for name, value in vars(optimizer).items()}
    shadow.__dict__ = copy.deepcopy(attributes, memo)
    on_gpu = all(param.device.type in ("cuda", "xpu") for param in params)
    for group in shadow.param_groups:
        loops = type(optimizer).__name__ in FOR_LOOPS or isinstance(group.get("lr"), torch.Tensor)
        _choose_implementation(group, foreach=on_gpu and not loops)
    return shadow, gradients


def _choose_implementation(group: dict[str, Any], *, foreach: bool) -> None:
    """What `foreach=None` means on the real device. A fused kernel makes only its state, and so does the plain loop."""
    if group.get("fused"):
        group.update(fused=False, foreach=False)
    elif "foreach" in group and group["foreach"] is None:
        group["foreach"] = foreach
    if "capturable" in group:
        group["capturable"] = False


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _trace_step(optimizer: Optimizer, gradients: Sequence[torch.Tensor], *, at_peak: bool) -> tuple[int, ...]:
    """Sizes of the storages that a step adds: at its peak, or at its end."""
    weights = [param for group in optimizer.param_groups for param in group["params"]]
    state = tensors_of(list(optimizer.state.values()))
    ledger = _PeakLedger(device="meta")
    ledger.adopt((*weights, *state, *gradients))
    ledger.before = set(ledger.alive())
    step: Callable[..., Any] = type(optimizer).step
    with ledger:
        getattr(step, "__wrapped__", step)(optimizer)  # without the hooks and counters that schedulers add to it
        return tuple((ledger.at_peak() if at_peak else ledger.added()).values())


class _PeakLedger(Ledger):
    """Remembers which storages were alive at the peak. A peak ends only when something is freed."""

    before: frozenset[int] | set[int] = frozenset()
    """Storages alive before the step. An address that is freed and used again is not one of them."""
    _peak: dict[int, int] | None = None
    _peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0  # Adafactor reads a norm on the host; its value decides no size
        return super().__torch_dispatch__(func, types, args, kwargs)

    def alive(self) -> dict[int, int]:
        return {key: entry[0] for key, entry in self._entries.items()}

    def added(self) -> dict[int, int]:
        return {key: size for key, size in self.alive().items() if key not in self.before}

    def at_peak(self) -> dict[int, int]:
        self._update_peak()
        return self._peak or {}

    def _remove(self, key: int) -> None:
        self._update_peak()
        self.before -= {key}
        super()._remove(key)

    def _update_peak(self) -> None:
        if self.live_bytes > self._peak_bytes:
            self._peak_bytes, self._peak = self.live_bytes, self.added()
