"""What the user may fix. Everything left alone is chosen; everything given stays as given, or the fit refuses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from brimful.errors import BadOption, DeviceBusy
from brimful.machine.gpu import gpu_holders
from brimful.machine.host import Host
from brimful.memory.ledger import active_limit_bytes
from brimful.memory.meter import cap_bytes
from brimful.task import Precision, Shape
from brimful.units import MiB, parse_bytes, show_bytes

Lever3 = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The words that `brimful plan` and `brimful.plan` share. None means: not asked for."""

    global_batch: int | None = None
    """Rows per optimizer step, exact, over all micro-batches and processes. The task's own unless given."""
    micro_batch: int | Literal["auto"] = "auto"
    """Rows per forward and backward; a fixed number is a ceiling that is never raised."""
    memory_limit: int | str | None = None
    """Cap on the memory to use: reserved bytes on a GPU, a virtual limit on the CPU. What is free unless given."""
    host_limit: int | str | None = None
    """Cap on host RAM. What this process may use unless given."""
    fill: float = 0.85
    """The share of the limit to plan for."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`, `xpu`; the first accelerator, else the CPU, unless given."""
    processes: int = 1
    """How many processes share the global batch."""
    checkpointing: Lever3 = "auto"
    """Gradient checkpointing: only if it is faster or nothing else fits, always, or never."""
    precision: Precision | None = None
    """What the forward is autocast to. The task's own unless given."""
    cudnn_attention: Lever3 = "auto"
    """cuDNN's attention on a card: only where all rows have one shape, wherever torch would use it, or never."""
    workers: int | Literal["auto"] = "auto"
    """Loader workers of each process; 0 reads in the process itself."""
    prefetch: int | Literal["auto"] = "auto"
    """Steps that each worker reads ahead."""
    pin_memory: Lever3 = "auto"
    """Page-locked host memory, from which a card copies while it computes."""
    lengths: Shape | None = None
    """The lengths to fit for. The task's worst shape, or the data's, unless given."""
    allow_inexact: bool = False
    """Cut a task whose loss looks across rows all the same."""
    cache: bool = True
    """Reuse a plan whose key matches, and keep this one."""
    seed: int = 0
    """Of the dummy batches and the throwaway model."""

    def __post_init__(self) -> None:
        problems = [problem for check in _CHECKS for problem in check(self)]
        if problems:
            raise BadOption("; ".join(problems))

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit is None else parse_bytes(self.memory_limit, flag="--memory-limit")

    @property
    def host_limit_bytes(self) -> int | None:
        return None if self.host_limit is None else parse_bytes(self.host_limit, flag="--host-limit")

    @classmethod
    def of(cls, asked: dict[str, Any]) -> "PlanOptions":
        """From keywords, with one clear sentence for a word that does not exist."""
        known = [field.name for field in fields(cls)]
        unknown = [word for word in asked if word not in known]
        if unknown:
            raise BadOption(f"unknown option {', '.join(map(repr, unknown))}; fit takes {', '.join(known)}")
        return cls(**asked)


def _whole_numbers(options: PlanOptions) -> list[str]:
    asked = (
        ("--global-batch", options.global_batch, 1),
        ("--processes", options.processes, 1),
        ("--micro-batch", options.micro_batch, 1),
        ("--workers", options.workers, 0),
        ("--prefetch", options.prefetch, 1),
        ("--seed", options.seed, 0),
    )
    return [
        f"{flag} {value!r}: give a whole number of at least {least}"
        for flag, value, least in asked
        if value not in (None, "auto") and (not isinstance(value, int) or isinstance(value, bool) or value < least)
    ]


def _shares(options: PlanOptions) -> list[str]:
    fill = options.fill
    good = isinstance(fill, (int, float)) and not isinstance(fill, bool) and 0 < fill <= 1
    problems = [] if good else [f"--fill {fill!r}: give a share above 0 and up to 1, such as 0.85"]
    processes, rows = options.processes, options.global_batch
    if not _whole_numbers(options) and rows is not None and rows < processes:
        problems.append(f"--global-batch {rows}: {processes} processes need at least a row each")
    return problems


def _words(options: PlanOptions) -> list[str]:
    allowed = {
        "checkpointing": get_args(Lever3),
        "cudnn_attention": get_args(Lever3),
        "pin_memory": get_args(Lever3),
        "precision": (None, *get_args(Precision)),
    }
    return [
        f"--{name.replace('_', '-')} {getattr(options, name)}: one of {', '.join(filter(None, words))}"
        for name, words in allowed.items()
        if getattr(options, name) not in words
    ]


def _lengths(options: PlanOptions) -> list[str]:
    if options.lengths is not None and not isinstance(options.lengths, (tuple, list)):
        return [f"--lengths {options.lengths!r}: give a tuple of whole numbers, such as (256, 256)"]
    lengths: Sequence[int] = options.lengths or ()
    bad = any(not isinstance(length, int) or length < 1 for length in lengths)
    return [f"--lengths {','.join(map(str, lengths))}: give whole numbers of at least 1"] if bad else []


def _switches(options: PlanOptions) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {getattr(options, name)!r}: give true or false"
        for name in ("cache", "allow_inexact")
        if not isinstance(getattr(options, name), bool)
    ]


def _sizes(options: PlanOptions) -> list[str]:
    problems = []
    for flag, value in (("--memory-limit", options.memory_limit), ("--host-limit", options.host_limit)):
        try:
            if value is not None:
                parse_bytes(value, flag=flag)
        except BadOption as error:
            problems.append(str(error))
    return problems


_CHECKS = (_whole_numbers, _shares, _words, _lengths, _switches, _sizes)


# Where the step will run: the device, the bytes it may use, and a word on who else is using it.
#
# `--memory-limit` bounds reserved bytes. A limit on the CPU is virtual and kept by the ledger; on CUDA it is torch's own
# cap on the process, taken off again afterwards. The CUDA context (about 0.8 GiB) is counted apart: free memory is read
# when the context exists already.


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


def find_target(options: PlanOptions) -> Target:
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


def _host_free(options: PlanOptions, host: Host, device: torch.device) -> tuple[int, str]:
    virtual = active_limit_bytes() if device.type == "cpu" else None
    if virtual is not None:
        return virtual, "the simulated_memory block around this call"
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
