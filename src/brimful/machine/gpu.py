"""The accelerators torch sees: how much memory each has, how much is free, and who holds the rest.

torch says which devices there are and how large; NVML says what is free and who uses it. torch could say what is free
as well, but only from inside a CUDA context, and making one costs memory on the very card that is looked at (524 MiB
on an H200): that is the way out where NVML does not answer, and a note says so.

Other processes' memory is what is used less what this process holds. On a shared card that is the number that decides
whether a run fits; torch cannot see it.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from brimful.machine.nvml import CardUse, Nvml, open_nvml


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that holds memory on a card."""

    pid: int
    """As NVML gives it; in a container that may be the host's number."""
    name: str | None
    """`python3`; None where the process is not visible from here."""
    used_bytes: int | None
    """What it holds; None where NVML does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator. None is unknown throughout, never zero."""

    index: int
    """As torch numbers it, so `cuda:0` whatever CUDA_VISIBLE_DEVICES hides."""
    kind: str
    """torch's name for the kind: `cuda` (NVIDIA, and AMD under ROCm), `xpu`, `mps`."""
    name: str
    """`NVIDIA H200`."""
    uuid: str | None
    """With its prefix where NVML knows it: `GPU-0b22bb49-…`, `MIG-…`."""
    total_bytes: int | None
    """What programs can have of it: the driver's reserve is left out."""
    free_bytes: int | None
    """What nobody holds now."""
    used_by_others_bytes: int | None
    """What is neither free nor this process's."""
    own_bytes: int | None
    """What this process holds, its CUDA context included."""
    other_processes: tuple[GpuProcess, ...]
    """Who else is there, the largest first, as far as can be seen; their bytes need not add up to the whole."""
    driver: str | None
    """The driver's version."""
    capability: str | None
    """Compute capability, `9.0`; None for cards that have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What looking for GPUs gave."""

    gpus: tuple[Gpu, ...]
    """In torch's order."""
    driver: str | None
    """NVIDIA's driver, also where torch sees no card."""
    notes: tuple[str, ...]
    """What is unknown, and why."""


def detect_gpus() -> Seen:
    """Every accelerator torch sees. Whatever goes wrong on the way ends in a note."""
    import torch

    notes: list[str] = []
    with open_nvml() as nvml:
        with _warnings_as(notes):
            device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            count = torch.accelerator.device_count() if device else 0
            gpus = [_look(device.type, index, nvml, notes) for index in range(count)] if device else []
        notes += _why_others_unknown(device.type, nvml) if device else [_why_no_gpu(nvml)]
        return Seen(gpus=tuple(g for g in gpus if g), driver=nvml.driver(), notes=(*notes, *nvml.notes))


def _look(kind: str, index: int, nvml: Nvml, notes: list[str]) -> Gpu | None:
    """One device; None, and a note, where torch cannot even read its properties (a card that fell off the bus)."""
    try:
        return _cuda(index, nvml, notes) if kind == "cuda" else _other(kind, index, notes)
    except (RuntimeError, AssertionError) as error:
        notes.append(f"torch cannot read {kind}:{index} ({_first_line(error)}), so it is left out.")
        return None


def _cuda(index: int, nvml: Nvml, notes: list[str]) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid, total = getattr(properties, "uuid", None), properties.total_memory
    use = nvml.card(index, str(uuid), total) if uuid is not None else None
    own = _own_bytes(index, use, notes)
    used = total - use.free_bytes if use else None
    return Gpu(
        index=index,
        kind="cuda",
        name=properties.name,
        uuid=use.uuid if use else str(uuid) if uuid is not None else None,
        total_bytes=total,
        free_bytes=use.free_bytes if use else _free_by_torch("cuda", index, notes),
        used_by_others_bytes=None if used is None or own is None else max(0, used - own),
        own_bytes=own,
        other_processes=_others(index, use, nvml),
        driver=nvml.driver(),
        capability=f"{properties.major}.{properties.minor}",
    )


def _other(kind: str, index: int, notes: list[str]) -> Gpu:
    """Intel's and Apple's: torch alone answers, and nobody tells what other processes hold."""
    import torch

    module: Any = torch.get_device_module(kind)
    properties = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
    total = getattr(properties, "total_memory", None)
    if total is None and hasattr(module, "recommended_max_memory"):  # Apple: the share of RAM that the GPU may take
        total = module.recommended_max_memory()
    return Gpu(
        index=index,
        kind=kind,
        name=getattr(properties, "name", "Apple GPU" if kind == "mps" else kind),
        uuid=str(uuid) if (uuid := getattr(properties, "uuid", None)) is not None else None,
        total_bytes=total,
        free_bytes=_free_by_torch(kind, index, notes),
        used_by_others_bytes=None,
        own_bytes=None,
        other_processes=(),
        driver=getattr(properties, "driver_version", None),
        capability=None,
    )


def _free_by_torch(kind: str, index: int, notes: list[str]) -> int | None:
    """The way out without NVML. It fails on a card so full that not even a context fits, and on devices without it."""
    import torch

    had_context = kind != "cuda" or _has_context(index)
    try:
        free, _ = torch.accelerator.get_memory_info(index)
    except (RuntimeError, AttributeError) as error:
        notes.append(f"torch cannot tell what is free on {kind}:{index} ({_first_line(error)}).")
        return None
    if not had_context:
        notes.append(f"Free memory of cuda:{index} was asked through torch, which took a CUDA context (about 0.5 GiB).")
    return int(free)


def _own_bytes(index: int, use: CardUse | None, notes: list[str]) -> int | None:
    """What this process holds: as NVML lists it, nothing without a context, else at least what torch has reserved.

    The last happens in containers, where NVML lists the host's pids or no bytes.
    """
    import torch

    if use is None:
        return None
    listed = (use.processes or {}).get(os.getpid())
    if listed is not None or not _has_context(index):
        return listed or 0
    notes.append(
        f"NVML does not tell this process's share of GPU {index}: what torch has reserved is counted, "
        "and its CUDA context among other processes' memory."
    )
    return int(torch.cuda.memory_reserved(index))


def _others(index: int, use: CardUse | None, nvml: Nvml) -> tuple[GpuProcess, ...]:
    """The other processes, the largest first. Where our own pid should be listed and is not, pids are those of another
    namespace: the same number here is somebody else, so no name is looked up."""
    listed = use.processes if use and use.processes else {}
    foreign = _has_context(index) and os.getpid() not in listed
    others = [
        GpuProcess(pid=pid, name=None if foreign else _name(pid, nvml), used_bytes=used)
        for pid, used in listed.items()
        if pid != os.getpid()
    ]
    return tuple(sorted(others, key=lambda process: -(process.used_bytes or 0)))


def _name(pid: int, nvml: Nvml) -> str | None:
    import psutil

    try:
        return psutil.Process(pid).name() or None
    except (psutil.Error, ValueError):  # gone, hidden, or a pid that is none
        return nvml.process_name(pid)


def _has_context(index: int) -> bool:
    """Whether this process has a CUDA context on the card. torch's own question is private; without it, reserved
    memory proves a context but none proves nothing."""
    import torch

    exact = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if exact is not None:
        return bool(exact(index))
    return torch.cuda.memory_reserved(index) > 0


def _why_no_gpu(nvml: Nvml) -> str:
    """The reason torch sees no GPU. The first is the commonest mistake: the wrong build of torch."""
    import torch

    build, cards = f"torch {torch.__version__}", ", ".join(nvml.names())
    if cards and torch.version.cuda is None:
        return f"{build} has no CUDA support but NVML sees {cards}; install the CUDA build (pytorch.org/get-started)."
    if cards and "CUDA_VISIBLE_DEVICES" in os.environ:
        hidden = os.environ["CUDA_VISIBLE_DEVICES"]
        return f"NVML sees {cards}, but CUDA_VISIBLE_DEVICES={hidden!r} leaves torch no card; unset it to use one."
    if cards:
        return f"NVML sees {cards}, but {build} for CUDA {torch.version.cuda} cannot use driver {nvml.driver()}."
    if torch.version.cuda is not None:
        reason = nvml.problem or "it sees no card"
        return f"{build} is built for CUDA {torch.version.cuda}, but no NVIDIA card answers (NVML: {reason})."
    return f"{build} sees no GPU and there is no NVIDIA driver (NVML: {nvml.problem or 'no card'})."


def _why_others_unknown(kind: str, nvml: Nvml) -> list[str]:
    import torch

    if kind != "cuda" or torch.version.cuda is None:
        return [f"Other processes' memory is unknown: only NVIDIA's NVML tells it, and this is {kind} without it."]
    if nvml.problem:
        return [f"NVML is not available: {nvml.problem}, so other processes' memory is unknown."]
    return []


@contextmanager
def _warnings_as(notes: list[str]) -> Iterator[None]:
    """torch says why CUDA does not start (too old a driver, a broken install) in a warning: make it a note."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    notes.extend(f"torch warns: {_first_line(warning.message)}" for warning in heard)


def _first_line(problem: object) -> str:
    return str(problem).strip().split("\n")[0].rstrip(".")
