"""The accelerators torch sees: how much memory each has, how much is free, and which processes hold the rest.

torch reports which devices there are and their size. NVML reports what is free and which processes use it, without a CUDA
context. torch can report free memory too, but only from within a CUDA context, which itself takes memory on the GPU (524 MiB
on an H200): that is the fallback if NVML does not answer, and a note says so.

NVML often does not answer: no library in a container without the `utility` capability, no process list for a MIG slice,
no permission on a shared host, a library that does not match the driver. That is None and a note, never an exception.

Used memory is torch's total less NVML's free. NVML's own `used` includes the driver's reserve (615 MiB on an H200), which
torch's total leaves out; measured there, the difference is exact to the byte. What other processes hold is what is used
less what this process holds. On a shared GPU that number decides whether a run fits, and torch cannot see it.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from brimful.machine.host import container_sign
from brimful.units import MiB, show_bytes

_PROCESS_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
"""A desktop's X server or a game is in the second list only. The first decides whether the answer is known."""

_WHOLE_CARD = 0.8
"""torch's total is within 1 % of NVML's for a whole GPU. Far below it, torch has a MIG slice and NVML the GPU."""

_NAMED = 3
"""Further processes are summed up: the phrase goes into error messages."""

_NOISE_BYTES = 64 * MiB
"""Less than this is ignored: starting CUDA takes 3 MiB that no process is charged for, and NVML rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    """As NVML gives it; in a container that may be the host's number."""
    name: str | None
    """`python3`; None if the process is not visible from here."""
    used_bytes: int | None
    """What it holds; None if NVML does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator. None means unknown, never zero."""

    index: int
    """torch's number: `cuda:0` whatever CUDA_VISIBLE_DEVICES hides."""
    kind: str
    """torch's device type: `cuda` (NVIDIA, and AMD under ROCm), `xpu`, `mps`."""
    name: str
    """`NVIDIA H200`."""
    uuid: str | None
    """The UUID, with its prefix if NVML reports it: `GPU-0b22bb49-…`, `MIG-…`."""
    total_bytes: int | None
    """What programs can use of it, without the driver's reserve."""
    free_bytes: int | None
    """What no process holds now."""
    used_by_others_bytes: int | None
    """What is neither free nor held by this process."""
    own_bytes: int | None
    """What this process holds, its CUDA context included."""
    other_processes: tuple[GpuProcess, ...]
    """Other processes, the largest first, as far as visible. Their bytes need not add up to the whole."""
    driver: str | None
    """The driver's version."""
    capability: str | None
    """Compute capability such as `9.0`; None for GPUs without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectedGpus:
    """The result of `detect_gpus`."""

    gpus: tuple[Gpu, ...]
    """In torch's order."""
    driver: str | None
    """NVIDIA's driver, also if torch sees no GPU."""
    notes: tuple[str, ...]
    """What is unknown, and why."""


def detect_gpus(only: int | None = None, *, may_create_context: bool = True) -> DetectedGpus:
    """Every accelerator torch sees, or the one of this number. Whatever goes wrong becomes a note.

    Where NVML does not answer, free memory stays unknown unless a CUDA context may be created to ask for it.
    """
    import torch

    notes: list[str] = []
    with open_nvml() as nvml:
        with _warnings_as(notes):
            device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            count = torch.accelerator.device_count() if device else 0
            indices = [index for index in range(count) if only in (None, index)]
            gpus = (
                [_detect_one(device.type, index, nvml, notes, may_create_context) for index in indices]
                if device
                else []
            )
        notes += _why_others_unknown(device.type, nvml) if device else [_why_no_gpu(nvml)]
        return DetectedGpus(gpus=tuple(g for g in gpus if g), driver=nvml.driver(), notes=(*notes, *nvml.notes))


def gpu_holders(index: int) -> str:
    """Which other processes hold memory of the GPU that torch numbers `index`, now, as a phrase.

    Only this GPU is queried: without NVML, each would need a CUDA context of its own.
    """
    for gpu in detect_gpus(only=index).gpus:
        return describe_holders(gpu, in_container=container_sign() is not None)
    return f"there is no GPU {index}"


def describe_holders(gpu: Gpu, *, in_container: bool) -> str:
    """Which other processes hold the GPU's memory, the largest first: `python3 (pid 4711) holds 61.2 GiB`."""
    if gpu.used_by_others_bytes is None:
        return "who holds the rest is unknown"
    named = [process for process in gpu.other_processes if process.name is not None and process.used_bytes]
    phrases = [f"{_label(process)} holds {show_bytes(process.used_bytes)}" for process in named[:_NAMED]]
    if more := named[_NAMED:]:
        total = sum(process.used_bytes or 0 for process in more)
        phrases.append(f"{len(more)} more {'hold' if len(more) > 1 else 'holds'} {show_bytes(total)}")
    rest = gpu.used_by_others_bytes - sum(process.used_bytes or 0 for process in named)
    if rest >= _NOISE_BYTES:
        phrases.append(_unlisted(gpu, rest, in_container))
    return _enumerate(phrases) or "no other process holds memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """NVML's figures of one GPU."""

    uuid: str
    """With its prefix: `GPU-…` or `MIG-…`."""
    free_bytes: int
    """What no process holds."""
    processes: dict[int, int | None] | None
    """Bytes by pid, None where NVML does not tell; None instead of the mapping if it does not list processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmlCard:
    """What NVML says of one whole GPU, whether torch sees it or not. None is unknown."""

    index: int
    """NVML's number, which CUDA_VISIBLE_DEVICES does not change."""
    uuid: str | None
    """With its prefix."""
    free_bytes: int
    utilization: float | None
    """Share of the last moments in which a kernel ran."""
    temperature_c: float | None
    power_w: float | None
    processes: dict[int, int | None] | None
    """As in `GpuUse`."""


class Nvml:
    """A session with NVML, open or not. Failures that matter to the user are collected in `notes`."""

    def __init__(self, module: Any, problem: str = "") -> None:
        self.module = module
        """pynvml, or None if NVML is not available."""
        self.problem = problem
        """Why it is not available; empty if it is."""
        self.notes: list[str] = []

    def query(self, function: str, *args: Any, unknown: str = "") -> Any:
        """The answer, or None. With `unknown`, a failure is noted together with what is therefore unknown."""
        if self.module is None:
            return None
        try:
            return getattr(self.module, function)(*args)
        except (self.module.NVMLError, AttributeError, ValueError) as error:  # too old a pynvml; an undecodable name
            if unknown:
                self.notes.append(f"NVML did not answer {function} ({error}), so {unknown}.")
            return None

    def driver(self) -> str | None:
        """The driver's version, such as `580.159.04`."""
        version: str | None = self.query("nvmlSystemGetDriverVersion")
        return version

    def names(self) -> list[str]:
        """Every NVIDIA GPU of the machine, whether torch sees it or not."""
        return [self.query("nvmlDeviceGetName", handle) or "an NVIDIA GPU" for _, handle in self._handles()]

    def gpu(self, index: int, uuid: str, total_bytes: int) -> GpuUse | None:
        """The GPU that torch numbers `index`, by its UUID, since CUDA_VISIBLE_DEVICES renumbers GPUs.

        torch gives the UUID without its prefix, so both are tried. MIG slices have their own UUIDs.
        """
        unknown, notes_before = f"who uses GPU {index} is unknown", len(self.notes)
        match = self.find(uuid, total_bytes, unknown=unknown)
        if match is not None:
            full, handle, free = match
            return GpuUse(uuid=full, free_bytes=free, processes=self.processes(handle, unknown))
        if self.module is not None and len(self.notes) == notes_before:
            self.notes.append(f"NVML has no figures for GPU {index} ({uuid}), so {unknown}.")
        return None

    def find(self, uuid: str, total_bytes: int, *, unknown: str = "") -> tuple[str, Any, int] | None:
        """The full UUID, NVML's handle and the free bytes of the GPU with this UUID and size in torch."""
        for full in (f"MIG-{uuid}", f"GPU-{uuid}"):
            handle = self.query("nvmlDeviceGetHandleByUUID", full)
            memory = self.query("nvmlDeviceGetMemoryInfo", handle, unknown=unknown) if handle is not None else None
            if memory is not None and total_bytes >= _WHOLE_CARD * memory.total:
                return full, handle, int(memory.free)
        return None

    def cards(self) -> list[NvmlCard]:
        """Every GPU of the machine as it is now, without torch. Takes about a millisecond for each."""
        cards = [self._card(index, handle) for index, handle in self._handles()]
        return [card for card in cards if card is not None]

    def sensors(self, handle: Any) -> tuple[float | None, int | None, float | None]:
        """The share of the last moments in which a kernel ran, the temperature in °C, and the power in watts."""
        busy = self.query("nvmlDeviceGetUtilizationRates", handle)
        milliwatts = self.query("nvmlDeviceGetPowerUsage", handle)
        return (
            None if busy is None else busy.gpu / 100,
            self.query("nvmlDeviceGetTemperature", handle, 0),  # 0: of the GPU itself
            None if milliwatts is None else milliwatts / 1000,
        )

    def _handles(self) -> list[tuple[int, Any]]:
        """Number and handle of each GPU that answers."""
        count = self.query("nvmlDeviceGetCount") or 0
        handles = [(index, self.query("nvmlDeviceGetHandleByIndex", index)) for index in range(count)]
        return [(index, handle) for index, handle in handles if handle is not None]

    def _card(self, index: int, handle: Any) -> NvmlCard | None:
        memory = self.query("nvmlDeviceGetMemoryInfo", handle)
        if memory is None:
            return None
        utilization, temperature_c, power_w = self.sensors(handle)
        return NvmlCard(
            index=index,
            uuid=self.query("nvmlDeviceGetUUID", handle),
            free_bytes=int(memory.free),
            utilization=utilization,
            temperature_c=None if temperature_c is None else float(temperature_c),
            power_w=power_w,
            processes=self.processes(handle),
        )

    def process_name(self, pid: int) -> str | None:
        """The name as NVML reports it, also for some processes that psutil may not access."""
        path = self.query("nvmlSystemGetProcessName", pid)
        return path.split(" ")[0].rpartition("/")[2] or None if path else None

    def processes(self, handle: Any, unknown: str = "") -> dict[int, int | None] | None:
        """One entry for each pid: a process that computes and draws is in both lists, with the same memory."""
        used: dict[int, int | None] = {}
        for function, consequence in zip(_PROCESS_LISTS, (unknown, ""), strict=True):
            processes = self.query(function, handle, unknown=consequence)
            if processes is None and function == _PROCESS_LISTS[0]:
                return None
            for process in processes or ():
                used[process.pid] = used.get(process.pid) or process.usedGpuMemory
        return used


@contextmanager
def open_nvml() -> Iterator[Nvml]:
    """A session, which is closed at the end if it could be opened."""
    try:
        import pynvml
    except ImportError:
        yield Nvml(None, "the package nvidia-ml-py is not installed")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Nvml(None, str(error))
        return
    nvml = Nvml(pynvml)
    try:
        yield nvml
    finally:
        nvml.query("nvmlShutdown")


def _detect_one(kind: str, index: int, nvml: Nvml, notes: list[str], may_create_context: bool) -> Gpu | None:
    """One device; None and a note if torch cannot even read its properties (a GPU that fell off the bus)."""
    try:
        return _cuda(index, nvml, notes, may_create_context) if kind == "cuda" else _other(kind, index, notes)
    except (RuntimeError, AssertionError) as error:
        notes.append(f"torch cannot read {kind}:{index} ({_first_line(error)}), so it is ignored.")
        return None


def _cuda(index: int, nvml: Nvml, notes: list[str], may_create_context: bool) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid, total = getattr(properties, "uuid", None), properties.total_memory
    use = nvml.gpu(index, str(uuid), total) if uuid is not None else None
    own = _own_bytes(index, use, notes)
    used = total - use.free_bytes if use else None
    free = use.free_bytes if use else _free_by_torch("cuda", index, notes) if may_create_context else None
    return Gpu(
        index=index,
        kind="cuda",
        name=properties.name,
        uuid=use.uuid if use else str(uuid) if uuid is not None else None,
        total_bytes=total,
        free_bytes=free,
        used_by_others_bytes=None if used is None or own is None else max(0, used - own),
        own_bytes=own,
        other_processes=_others(index, use, nvml),
        driver=nvml.driver(),
        capability=f"{properties.major}.{properties.minor}",
    )


def _other(kind: str, index: int, notes: list[str]) -> Gpu:
    """Intel and Apple: only torch answers, and what other processes hold is unknown."""
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
    """The fallback without NVML. It fails on a GPU too full for a context, and on devices without this function."""
    import torch

    had_context = kind != "cuda" or _has_context(index)
    try:
        free, _ = torch.accelerator.get_memory_info(index)
    except (RuntimeError, AttributeError) as error:
        notes.append(f"torch cannot tell what is free on {kind}:{index} ({_first_line(error)}).")
        return None
    if not had_context:
        notes.append(f"torch reported the free memory of cuda:{index}, which took a CUDA context (about 0.5 GiB).")
    return int(free)


def _own_bytes(index: int, use: GpuUse | None, notes: list[str]) -> int | None:
    """What this process holds: as NVML lists it, nothing without a context, or else what torch has reserved.

    The last happens in containers, where NVML lists the host's pids or no bytes.
    """
    import torch

    if use is None:
        return None
    listed = (use.processes or {}).get(os.getpid())
    if listed is not None or not _has_context(index):
        return listed or 0
    notes.append(
        f"NVML does not tell what this process holds of GPU {index}. What torch has reserved is counted, "
        "and its CUDA context counts as other processes' memory."
    )
    return int(torch.cuda.memory_reserved(index))


def _others(index: int, use: GpuUse | None, nvml: Nvml) -> tuple[GpuProcess, ...]:
    """The other processes, the largest first.

    If our own pid should be listed and is not, the pids belong to another namespace. The same number here is another
    process, so no names are looked up.
    """
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
    except (psutil.Error, ValueError):  # ended, hidden, or not a valid pid
        return nvml.process_name(pid)


def _has_context(index: int) -> bool:
    """Whether this process has a CUDA context on the GPU.

    torch's function for it is private. Without it, reserved memory proves a context, but none proves nothing.
    """
    import torch

    exact = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if exact is not None:
        return bool(exact(index))
    return torch.cuda.memory_reserved(index) > 0


def _why_no_gpu(nvml: Nvml) -> str:
    """The reason why torch sees no GPU. The first is the most common mistake: the wrong build of torch."""
    import torch

    build, names = f"torch {torch.__version__}", ", ".join(nvml.names())
    if names and torch.version.cuda is None:
        return f"{build} has no CUDA support but NVML sees {names}; install the CUDA build (pytorch.org/get-started)."
    if names and "CUDA_VISIBLE_DEVICES" in os.environ:
        hidden = os.environ["CUDA_VISIBLE_DEVICES"]
        return f"NVML sees {names}, but CUDA_VISIBLE_DEVICES={hidden!r} leaves torch no GPU; unset it to use one."
    if names:
        return f"NVML sees {names}, but {build} for CUDA {torch.version.cuda} cannot use driver {nvml.driver()}."
    if torch.version.cuda is not None:
        reason = nvml.problem or "it sees no GPU"
        return f"{build} is built for CUDA {torch.version.cuda}, but no NVIDIA GPU answers (NVML: {reason})."
    return f"{build} sees no GPU and there is no NVIDIA driver (NVML: {nvml.problem or 'no GPU'})."


def _why_others_unknown(kind: str, nvml: Nvml) -> list[str]:
    import torch

    if kind != "cuda" or torch.version.cuda is None:
        return [f"Other processes' memory is unknown on {kind}, since only NVIDIA's NVML reports it."]
    if nvml.problem:
        return [f"NVML is not available: {nvml.problem}, so other processes' memory is unknown."]
    return []


@contextmanager
def _warnings_as(notes: list[str]) -> Iterator[None]:
    """torch warns if CUDA does not start (too old a driver, a broken install): turn that into a note."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notes.extend(f"torch warns: {_first_line(warning.message)}" for warning in caught)


def _first_line(problem: object) -> str:
    return str(problem).strip().split("\n")[0].rstrip(".")


def _unlisted(gpu: Gpu, rest_bytes: int, in_container: bool) -> str:
    """Memory of processes that have a name but no bytes, or that are not visible at all."""
    who = [
        _label(process) for process in gpu.other_processes if process.name is not None and process.used_bytes is None
    ]
    if not who or any(process.name is None for process in gpu.other_processes):
        who.append("processes outside this container" if in_container else "processes that are not visible from here")
    verb = "holds" if len(who) == 1 and not who[0].startswith("processes") else "hold"
    return f"{_enumerate(who)} {verb} {show_bytes(rest_bytes)}"


def _label(process: GpuProcess) -> str:
    return f"{process.name} (pid {process.pid})"


def _enumerate(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1] if len(items) > 1 else "".join(items)
