"""The peak of each phase of a step, measured where the device can tell and counted where it cannot.

CUDA and XPU keep peak statistics (torch.accelerator): exact, and free. The CPU and MPS have none, so the ledger counts
there. Peaks are *allocated* bytes, which follow the shapes; *reserved* bytes, which a limit bounds, depend on what the
caching allocator kept from before and are read only after emptying its cache.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from brimful.memory.ledger import Ledger, active_limit_bytes, active_live_bytes
from brimful.memory.oom import empty_cache

# Freed host memory, given back to the system.
#
# glibc maps a block of its own for what is large, and raises the bound of "large" to the largest such block it has seen
# freed, up to 32 MiB: from then on a model's tensors lie in its heap, and what is freed there stays with the process.
# Measured on T5 base, 0.75 GB of weights: built on the host and moved away, 1.0 GB stayed. Workers make it worse: a page
# that was garbage when they were forked is theirs until they end, whatever the parent does with its own.


def trim_heap() -> None:
    """Return what is free in the heap; where the C library has no way to ask for it, nothing happens."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


# How many bytes this process could hold on a device in all: what it has, and what it could still take.
#
# On a card that is what is free, plus what torch reserved of it already, up to the cap set on the process. The CPU has no
# limit of its own short of the kernel's, so there only a virtual limit is known.


class AvailableMemory:
    """What is left for training: the device's room, less what the same process took for something else since.

    Whatever is alive between two steps, beyond the least that ever was, is not training's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle_bytes: int | None = None

    def settle(self, *, anew: bool = False) -> None:
        """Between two steps: what is alive now is needed for ever. `anew`: training itself has grown since, by its state."""
        held = allocated_bytes(self._device)
        if held is not None:
            self._idle_bytes = held if anew or self._idle_bytes is None else min(self._idle_bytes, held)

    def now(self, *, besides: int = 0) -> int | None:
        """Bytes, while nothing of a step is alive besides so many; None where nothing can tell."""
        room = available_bytes(self._device)
        return None if room is None else room - self.taken(besides=besides)

    def taken(self, *, besides: int = 0) -> int:
        """Bytes alive between two steps that are not training's."""
        held = allocated_bytes(self._device)
        return 0 if held is None or self._idle_bytes is None else max(0, held - besides - self._idle_bytes)


def available_bytes(device: torch.device) -> int | None:
    """The most this process could hold there now; None where nothing can tell."""
    if device.type == "cpu":
        return active_limit_bytes()
    if device.type == "mps":
        return None
    free, total = torch.accelerator.get_memory_info(device)
    return min(free + torch.accelerator.memory_reserved(device), process_limit_bytes(device, total))


def allocated_bytes(device: torch.device) -> int | None:
    """What is allocated there by this process."""
    if device.type == "cpu":
        return active_live_bytes()
    return None if device.type == "mps" else torch.accelerator.memory_allocated(device)


def process_limit_bytes(device: torch.device, total: int) -> int:
    """What torch lets this process reserve of the card's memory."""
    if device.type != "cuda":
        return total
    return int(torch.cuda.memory.get_per_process_memory_fraction(device) * total)


def allocator_retries(device: torch.device) -> int:
    """How often the allocator had to give back its cache and try again: the sign of thrashing before out-of-memory."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


@dataclass(frozen=True, slots=True)
class Reading:
    """What one metered step took."""

    phases: dict[str, int]
    """Peak allocated bytes of each phase."""
    reserved_bytes: int | None
    """Peak bytes taken from the device, where it is known and was asked for."""

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())


class Meter(Protocol):
    """`with meter(device): … phase("forward") … phase("head") …`, then `reading()`."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> None: ...
    def phase(self, name: str) -> None: ...
    def reading(self) -> Reading: ...


def meter(
    device: torch.device, *, limit_bytes: int | None = None, adopt: Iterable[torch.Tensor] = (), reserved: bool = False
) -> Meter:
    """The meter for this device. `limit_bytes` and `adopt` are for the ledger; `reserved` empties the cache first."""
    if has_peak_statistics(device):
        return _AllocatorMeter(device, reserved)
    return _LedgerMeter(Ledger(limit_bytes, device=device.type), adopt)


def has_peak_statistics(device: torch.device) -> bool:
    """Whether torch can tell this device's peak by itself."""
    return device.type in ("cuda", "xpu")


class _AllocatorMeter:
    def __init__(self, device: torch.device, reserved: bool) -> None:
        self._device, self._reserved = device, reserved
        self._phases: dict[str, int] = {}
        self._phase = ""
        self._reserved_peak = 0

    def __enter__(self) -> "_AllocatorMeter":
        if self._reserved:
            empty_cache(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        return self

    def phase(self, name: str) -> None:
        if self._phase:
            peak = torch.accelerator.max_memory_allocated(self._device)
            self._phases[self._phase] = max(self._phases.get(self._phase, 0), peak)
        self._reserved_peak = max(self._reserved_peak, torch.accelerator.max_memory_reserved(self._device))
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._phase = name

    def __exit__(self, *exc: Any) -> None:
        self.phase("")

    def reading(self) -> Reading:
        return Reading(self._phases, self._reserved_peak if self._reserved else None)


class _LedgerMeter:
    def __init__(self, ledger: Ledger, adopt: Iterable[torch.Tensor]) -> None:
        self._ledger, self._adopt = ledger, adopt

    def __enter__(self) -> "_LedgerMeter":
        self._ledger.adopt(self._adopt)
        self._ledger.__enter__()
        return self

    def phase(self, name: str) -> None:
        self._ledger.phase(name)

    def __exit__(self, *exc: Any) -> None:
        self._ledger.__exit__(*exc)

    def reading(self) -> Reading:
        return Reading(dict(self._ledger.phase_peaks), None)
