"""NVML, asked politely: a missing library or a refused question is None and a note, never an exception.

NVML knows what torch does not: what *other* processes hold, without a CUDA context of our own. It also refuses often:
no library in a container without the `utility` capability, no process list for a MIG slice, no permission on a shared
host, a library that does not match the driver's kernel module. None of these may keep anybody from training.

Used memory is reckoned as torch's total less NVML's free. NVML's own `used` counts the driver's reserve (615 MiB on an
H200), torch's total leaves it out; measured there, the difference of the two is exact to the byte.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_PROCESS_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
"""A desktop's X server or a game is in the second list only; the first alone decides whether the answer is known."""

_SLICE = 0.8
"""torch's total is within 1 % of NVML's for a whole card; far below it torch has a MIG slice, and NVML the card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardUse:
    """What NVML says of one card."""

    uuid: str
    """With its prefix: `GPU-…` or `MIG-…`."""
    free_bytes: int
    """What nobody holds."""
    processes: dict[int, int | None] | None
    """Bytes by pid, None where NVML does not tell them; None altogether where it does not list processes."""


class Nvml:
    """A session with NVML, open or not. Refusals that cost the user something are collected in `notes`."""

    def __init__(self, module: Any, problem: str = "") -> None:
        self.module = module
        """pynvml, or None where NVML is not available."""
        self.problem = problem
        """Why it is not available; empty where it is."""
        self.notes: list[str] = []

    def ask(self, question: str, *args: Any, unknown: str = "") -> Any:
        """The answer, or None. With `unknown` a refusal is noted, together with what is unknown for it."""
        if self.module is None:
            return None
        try:
            return getattr(self.module, question)(*args)
        except (self.module.NVMLError, AttributeError, ValueError) as error:  # too old a pynvml; an undecodable name
            if unknown:
                self.notes.append(f"NVML did not answer {question} ({error}), so {unknown}.")
            return None

    def driver(self) -> str | None:
        """The driver's version, such as `580.159.04`."""
        return _text(self.ask("nvmlSystemGetDriverVersion"))

    def names(self) -> list[str]:
        """Every NVIDIA card of the machine, whether torch sees it or not."""
        count = self.ask("nvmlDeviceGetCount") or 0
        handles = [self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        known = [handle for handle in handles if handle is not None]
        return [_text(self.ask("nvmlDeviceGetName", handle)) or "an NVIDIA card" for handle in known]

    def card(self, index: int, uuid: str, total_bytes: int) -> CardUse | None:
        """The card torch numbers `index`, found by its UUID, since CUDA_VISIBLE_DEVICES renumbers cards.

        torch gives the UUID without its prefix, so both are tried; MIG slices have UUIDs of their own.
        """
        unknown, notes_before = f"who uses GPU {index} is unknown", len(self.notes)
        for full in (f"MIG-{uuid}", f"GPU-{uuid}"):
            handle = self.ask("nvmlDeviceGetHandleByUUID", full)
            memory = self.ask("nvmlDeviceGetMemoryInfo", handle, unknown=unknown) if handle is not None else None
            if memory is not None and total_bytes >= _SLICE * memory.total:
                return CardUse(uuid=full, free_bytes=int(memory.free), processes=self._processes(handle, unknown))
        if self.module is not None and len(self.notes) == notes_before:
            self.notes.append(f"NVML gives no figures for the card torch calls GPU {index} ({uuid}), so {unknown}.")
        return None

    def process_name(self, pid: int) -> str | None:
        """The name as NVML sees it; it knows some processes that psutil may not look at."""
        path = _text(self.ask("nvmlSystemGetProcessName", pid))
        return path.split(" ")[0].rpartition("/")[2] or None if path else None

    def _processes(self, handle: Any, unknown: str) -> dict[int, int | None] | None:
        """One entry a pid: a process that computes and draws is in both lists, with the same memory."""
        found: dict[int, int | None] = {}
        for question, loss in zip(_PROCESS_LISTS, (unknown, ""), strict=True):
            processes = self.ask(question, handle, unknown=loss)
            if processes is None and loss:
                return None
            for process in processes or ():
                found[process.pid] = found.get(process.pid) or process.usedGpuMemory
        return found


@contextmanager
def open_nvml() -> Iterator[Nvml]:
    """A session that is always given, and closed in the end if it could be opened."""
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
        nvml.ask("nvmlShutdown")


def _text(value: str | bytes | None) -> str | None:
    """Older bindings answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
