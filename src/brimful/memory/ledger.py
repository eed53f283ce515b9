"""Counts the live tensor bytes of any torch program, and limits them: out-of-memory errors on the CPU.

A dispatch mode sees the tensors of every operation. A storage is counted when it is first seen (weights and inputs
included) and until torch frees it. That adds 4–90 % to the time of a step, so speed is never measured under a ledger.

It cannot see: temporaries inside one operation (a convolution's unfolded input: 65.6 MiB counted where the profiler
reports 89.5), what compiled code allocates for itself, storages that no operation has touched yet, other threads, sparse
tensors, and memory that is not torch's. A storage that is resized is counted again at its next use.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.units import parse_bytes, show_bytes

_active: list["Ledger"] = []


class Ledger(TorchDispatchMode):
    """Counts the live storages on one type of device while entered. Raises `torch.OutOfMemoryError` beyond a limit.

    `limit_bytes` may be changed at any time, also while the program runs.
    """

    def __init__(self, limit_bytes: int | None = None, *, device: str = "cpu") -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.device = device
        self.live_bytes = 0
        self.peak_bytes = 0
        self.phase_peaks: dict[str, int] = {}
        self.ooms = 0
        self._phase: str | None = None
        self._phase_peak = 0
        self.recent_peak_bytes = 0
        self._entries: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def phase(self, name: str | None) -> None:
        """Count what follows as phase `name`. A phase that is entered twice keeps its higher peak."""
        if self._phase is not None:
            self.phase_peaks[self._phase] = max(self.phase_peaks.get(self._phase, 0), self._phase_peak)
        self._phase, self._phase_peak = name, self.live_bytes

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that exist already, before any operation touches them."""
        for tensor in tensors:
            self._track(tensor)
        self._check("tensors that exist already")

    def __enter__(self) -> "Ledger":
        super().__enter__()
        _active.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        self.phase(None)
        _active.remove(self)
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = self.live_bytes
        self._track_all(args)
        if kwargs:
            self._track_all(kwargs.values())
        if self.live_bytes > start:  # if the limit was lowered meanwhile, the next allocation fails, as on a GPU
            self._check(func)
        before = self.live_bytes
        out = func(*args, **(kwargs or {}))
        self._track_all((out,))
        if self.limit_bytes is not None and self.live_bytes > max(self.limit_bytes, before):
            in_use = self.live_bytes
            del out  # the traceback keeps this frame alive, and the result must not live on in it
            raise self._out_of_memory(func, before, in_use)
        return out

    def _track_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._track(value)
            elif isinstance(value, (list, tuple)):
                self._track_all(value)

    def _track(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self.device:
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have no storage
            return
        key, size = storage._cdata, storage.nbytes()
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = (size, weakref.ref(storage, lambda _: self._remove(key)))
            self._grow(size)
        elif entry[0] != size:
            self._entries[key] = (size, entry[1])
            self._grow(size - entry[0])

    def _remove(self, key: int) -> None:
        size, _ = self._entries.pop(key)
        self.live_bytes -= size

    def _grow(self, size: int) -> None:
        self.live_bytes += size
        if self.limit_bytes is None or self.live_bytes <= self.limit_bytes:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self._phase_peak = max(self._phase_peak, self.live_bytes)
            self.recent_peak_bytes = max(self.recent_peak_bytes, self.live_bytes)

    def _check(self, what: Any) -> None:
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            raise self._out_of_memory(what, self.live_bytes, self.live_bytes)

    def _out_of_memory(self, what: Any, before: int, after: int) -> torch.OutOfMemoryError:
        """With torch's CPU wording in one string argument, which accelerate, transformers and Lightning look for."""
        self.ooms += 1
        return torch.OutOfMemoryError(
            f"{self.device} out of memory. DefaultCPUAllocator: can't allocate memory: {what} asked for "
            f"{show_bytes(after - before)} with {show_bytes(before)} in use of a simulated limit of "
            f"{show_bytes(self.limit_bytes)} ({after - before} of {self.limit_bytes} bytes)"
        )


def simulated_memory(limit: str | int) -> Ledger:
    """Limit the CPU tensors of a block, as a GPU of that size would.

    >>> import torch
    >>> with simulated_memory("1MiB") as memory:
    ...     x = torch.zeros(1000)
    >>> memory.peak_bytes
    4000
    """
    return Ledger(parse_bytes(limit, flag="simulated_memory"))


def active_limit_bytes() -> int | None:
    """The smallest simulated limit around the caller; None if there is none."""
    ledger = _tightest()
    return None if ledger is None else ledger.limit_bytes


def active_live_bytes() -> int | None:
    """The live bytes that the ledger with that limit counts."""
    ledger = _tightest()
    return None if ledger is None else ledger.live_bytes


def count_existing(tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Let every ledger around the caller count these tensors, before any operation touches them.

    Beyond a limit the next allocation fails, as on a GPU that is full already.
    """
    if _active:
        existing = list(tensors())
        for ledger in _active:
            ledger._track_all(existing)


def reset_active_peak() -> None:
    """Restart the count of `active_peak_bytes`."""
    if (ledger := _tightest()) is not None:
        ledger.recent_peak_bytes = ledger.live_bytes


def active_peak_bytes() -> int | None:
    """The most live bytes that ledger has counted since `reset_active_peak`."""
    ledger = _tightest()
    return None if ledger is None else ledger.recent_peak_bytes


def _tightest() -> Ledger | None:
    limited = [ledger for ledger in _active if ledger.limit_bytes is not None]
    return min(limited, key=lambda ledger: ledger.limit_bytes or 0) if limited else None
