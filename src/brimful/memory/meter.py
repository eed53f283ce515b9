"""The peak of each phase of a step, measured where the device can tell and counted where it cannot.

CUDA and XPU keep peak statistics (torch.accelerator): exact, and free. The CPU and MPS have none, so the ledger counts
there. Peaks are *allocated* bytes, which follow the shapes; *reserved* bytes, which a limit bounds, depend on what the
caching allocator kept from before and are read only after emptying its cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from brimful.memory.ledger import Ledger
from brimful.memory.oom import empty_cache


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
