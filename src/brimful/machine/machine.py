"""`Machine`: one snapshot of everything the box offers, for plans, for tables and for JSON."""

import dataclasses
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.machine.gpu import Gpu, detect_gpus
from brimful.machine.host import Host, Space, container_sign

# The versions that decide what runs, what it costs in memory, and whether a saved plan still holds.


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Python, torch, CUDA, the driver and the system."""

    python: str
    """`3.11.9`."""
    torch: str
    """With its build: `2.13.0+cpu`, `2.11.0+cu130`."""
    cuda: str | None
    """The CUDA version torch was built for; None for a CPU, ROCm or XPU build."""
    driver: str | None
    """The NVIDIA driver as NVML gives it; None where NVML is not available."""
    platform: str
    """`Linux-6.8.0-x86_64-with-glibc2.39`."""
    in_container: bool
    """Whether this looks like a container."""
    container_sign: str | None
    """What it was recognised by: `/.dockerenv exists`."""

    @classmethod
    def detect(cls, *, driver: str | None = None, root: Path = Path("/")) -> "Software":
        """The versions in this process; the driver's is handed in by whoever asked NVML."""
        import torch

        sign = container_sign(root)
        return cls(
            python=platform.python_version(),
            torch=str(torch.__version__),
            cuda=torch.version.cuda,
            driver=driver,
            platform=platform.platform(),
            in_container=sign is not None,
            container_sign=sign,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this box has, and what of it this process may use."""

    gpus: tuple[Gpu, ...]
    """Every accelerator torch sees, in torch's order; empty where it sees none, with the reason in `notes`."""
    host: Host
    """RAM, swap and cores."""
    shm: Space | None
    """/dev/shm; None on systems without it. What lies there also counts against the RAM limit."""
    disk: Space | None
    """The filesystem that the run folder is on, or will be on; None where it may not be looked at."""
    software: Software
    """Versions, and whether this is a container."""
    notes: tuple[str, ...]
    """What could not be found out or looks wrong, one sentence each."""

    @classmethod
    def detect(cls, run_folder: Path | str = ".") -> "Machine":
        """Look at everything once: about 20 ms, and up to 0.3 s more where this is the process's first use of CUDA.

        No CUDA context is made where NVML answers. Like any question to torch about GPUs it starts CUDA in this
        process, so workers that use the GPU must then be spawned, not forked.
        """
        seen = detect_gpus()
        return cls(
            gpus=seen.gpus,
            host=Host.detect(),
            shm=Space.of("/dev/shm"),
            disk=Space.around(run_folder),
            software=Software.detect(driver=seen.driver),
            notes=seen.notes,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, sizes as whole bytes; unknown is null."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
