"""What a device's memory holds now, the peak of each phase of a step, and what is left for training.

CUDA and XPU keep peak statistics (torch.accelerator), which are exact and free. The CPU and MPS have none, so there a
ledger counts. Peaks are *allocated* bytes, which follow from the shapes. *Reserved* bytes, which a limit bounds, depend
on what the caching allocator kept from before and are read only after its cache was emptied.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from brimful.memory.ledger import Ledger, active_limit_bytes, active_live_bytes
from brimful.memory.oom import empty_cache


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory of one metered step."""

    phases: dict[str, int]
    """Peak allocated bytes of each phase."""
    reserved_bytes: int | None
    """Peak bytes taken from the device, if that is known and was requested."""

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
    """Whether torch keeps peak statistics of this device."""
    return device.type in ("cuda", "xpu")


def memory_peaks(device: torch.device) -> tuple[int, int]:
    """The most bytes allocated and reserved since the statistics were reset, by one query."""
    statistics = torch.accelerator.memory_stats(device)
    return statistics.get("allocated_bytes.all.peak", 0), statistics.get("reserved_bytes.all.peak", 0)


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


class AvailableMemory:
    """What training may use of a device: what is available, less what this process has since allocated for other things.

    Whatever is allocated between two steps, beyond the least that ever was, does not belong to training.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle_bytes: int | None = None

    def record_idle(self, *, reset: bool = False) -> None:
        """Between two steps: what is allocated now belongs to training. `reset`: training itself has grown since."""
        allocated = allocated_bytes(self._device)
        if allocated is not None:
            self._idle_bytes = allocated if reset or self._idle_bytes is None else min(self._idle_bytes, allocated)

    def training_bytes(self, *, excluding: int = 0) -> int | None:
        """Bytes for training, while a step holds no more than `excluding` bytes; None if unknown."""
        available = available_bytes(self._device)
        return None if available is None else available - self.other_bytes(excluding=excluding)

    def other_bytes(self, *, excluding: int = 0) -> int:
        """Bytes that this process holds for other things than training."""
        allocated = allocated_bytes(self._device)
        return 0 if allocated is None or self._idle_bytes is None else max(0, allocated - excluding - self._idle_bytes)


def available_bytes(device: torch.device) -> int | None:
    """The most this process could hold on the device now, what it holds already included; None if unknown.

    On a GPU that is what is free and what torch has reserved, up to the limit set on the process. The CPU is limited
    only by the kernel, so there only a simulated limit is known.
    """
    if device.type == "cpu":
        return active_limit_bytes()
    if device.type == "mps":
        return None
    free, total = torch.accelerator.get_memory_info(device)
    return min(free + torch.accelerator.memory_reserved(device), process_limit_bytes(device, total))


def allocated_bytes(device: torch.device) -> int | None:
    """What this process has allocated on the device; None if unknown."""
    if device.type == "cpu":
        return active_live_bytes()
    return None if device.type == "mps" else torch.accelerator.memory_allocated(device)


def process_limit_bytes(device: torch.device, total: int) -> int:
    """What torch lets this process reserve of the GPU's memory."""
    if device.type != "cuda":
        return total
    return int(torch.cuda.memory.get_per_process_memory_fraction(device) * total)


def allocator_retries(device: torch.device) -> int:
    """How often the allocator had to empty its cache and try again: thrashing, which precedes out-of-memory."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, as before a clock is read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def trim_heap() -> None:
    """Return freed host memory to the system, if the C library can.

    glibc maps large blocks separately, and raises the size that counts as large to that of the largest block freed so
    far, up to 32 MiB: from then on tensors are in its heap, and what is freed there stays with the process. Measured on
    T5 base, 0.75 GB of weights: built on the host and moved away, 1.0 GB stayed. Workers make it worse, since a page
    that was garbage when they were forked is theirs until they end.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized() and hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()  # pinned blocks that are free


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
