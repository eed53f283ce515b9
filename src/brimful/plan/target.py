"""Where the step will run: the device, the bytes it may use, and a word on who else is using it.

`--memory-limit` bounds reserved bytes. A limit on the CPU is virtual and kept by the ledger; on CUDA it is torch's own
cap on the process, taken off again afterwards. The CUDA context (about 0.8 GiB) is counted apart: free memory is read
when the context exists already.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from brimful.errors import BadOption, DeviceBusy
from brimful.machine.holders import gpu_holders
from brimful.machine.host import Host
from brimful.memory.ledger import active_limit_bytes
from brimful.memory.room import cap_bytes
from brimful.plan.options import FitOptions
from brimful.task import Precision
from brimful.units import MiB, show_bytes

SMALLEST_USEFUL = 64 * MiB
"""With less free than this a card counts as full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device and the bytes to plan for."""

    device: torch.device
    name: str
    limit_bytes: int
    limit_reason: str
    fill: float
    host_limit_bytes: int
    holders: str = ""
    """Who else holds the card's memory, as the end of a sentence; empty where the limit was asked for."""

    @property
    def budget_bytes(self) -> int:
        return int(self.limit_bytes * self.fill)

    def autocast(self, asked: Precision | None, tasks_own: Precision) -> tuple[torch.dtype | None, str]:
        """The dtype to autocast to, and why."""
        precision = asked or tasks_own
        dtype = autocast_dtype(precision, self.device)
        if precision == "auto":
            return dtype, f"{self.name} has bf16 units" if dtype else f"{self.name} gains nothing from bf16"
        return dtype, "as asked for" if asked else "the task's own"

    @contextmanager
    def capped(self) -> Iterator[None]:
        """The limit made real on CUDA; the ledger keeps it elsewhere."""
        if self.device.type != "cuda":
            yield
            return
        before = torch.cuda.memory.get_per_process_memory_fraction(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(before, self.limit_bytes / total), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)


def find_target(options: FitOptions) -> Target:
    """The device that was asked for or is there, and its limit; refuses a limit that is not free."""
    device = _find_device(options.device)
    host = Host.detect()
    host_limit = min(options.host_limit_bytes or host.ram_limit_bytes, host.ram_limit_bytes)
    if device.type in ("cpu", "mps"):
        free, free_reason = _host_free(options, host, device)
        name = "the CPU" if device.type == "cpu" else "the Apple GPU"
    else:
        free, free_reason = _card_free(device)
        name = torch.get_device_module(device).get_device_name(device)
    asked = options.memory_limit_bytes
    if asked is not None and asked > free + MiB and device.type != "cpu":
        raise DeviceBusy(
            f"--memory-limit {show_bytes(asked)}: only {show_bytes(free)} are free on {name} ({device}){_who(device)}"
        )
    if asked is not None and asked > host.ram_limit_bytes and device.type == "cpu":
        raise BadOption(
            f"--memory-limit {show_bytes(asked)}: this host has {show_bytes(host.ram_limit_bytes)} ({host.ram_limited_by})"
        )
    if asked is None and free < SMALLEST_USEFUL and device.type != "cpu":
        raise DeviceBusy(
            f"{name} ({device}) is full: {show_bytes(free)} are free{_who(device)}; free it or choose another --device"
        )
    limit, reason = (free, free_reason) if asked is None else (asked, "as asked for")
    return Target(
        device=device,
        name=name,
        limit_bytes=limit,
        limit_reason=reason,
        fill=options.fill,
        host_limit_bytes=host_limit,
        holders=_who(device) if asked is None else "",
    )


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """What a precision means on this device; None is the weights' own."""
    if precision == "auto":
        has_units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if has_units else None
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _find_device(asked: str) -> torch.device:
    if asked == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else _indexed(found)
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise BadOption(f"--device {asked}: write cpu, cuda, cuda:1, mps or xpu") from None
    if device.type == "cpu":
        return torch.device("cpu")
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None or there.type != device.type:
        raise DeviceBusy(
            f"--device {asked}: torch {torch.__version__} sees {'no accelerator' if there is None else there.type}"
        )
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise DeviceBusy(f"--device {asked}: there are only {count} of them, numbered from 0")
    return _indexed(device)


def _indexed(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())


def _host_free(options: FitOptions, host: Host, device: torch.device) -> tuple[int, str]:
    virtual = active_limit_bytes() if device.type == "cpu" else None
    if virtual is not None:
        return virtual, "the virtual_memory block around this call"
    if options.host_limit_bytes is not None:
        return options.host_limit_bytes, "the host limit, since the CPU has no memory of its own"
    return host.ram_available_bytes, "the host memory available now"


def _card_free(device: torch.device) -> tuple[int, str]:
    """What this process could reserve: what the card has free, what torch holds of it already, up to torch's cap."""
    free, total = torch.accelerator.get_memory_info(device)
    free += torch.accelerator.memory_reserved(device)
    cap = cap_bytes(device, total)
    return (cap, "the cap set on this process") if cap < free else (free, f"what is free of {show_bytes(total)}")


def _who(device: torch.device) -> str:
    holders = gpu_holders(device.index or 0) if device.type == "cuda" else ""
    return f": {holders}" if holders else ""
