"""`Machine`: one snapshot of everything this machine has, for plans, tables and JSON."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brimful.machine.gpu import Gpu, detect_gpus
from brimful.machine.host import Host, Space, container_sign


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """The versions that decide what runs, what it costs in memory, and whether a saved plan is still valid."""

    python: str
    """`3.11.9`."""
    torch: str
    """With its build: `2.13.0+cpu`, `2.11.0+cu130`."""
    cuda: str | None
    """The CUDA version torch was built for; None for a CPU, ROCm or XPU build."""
    driver: str | None
    """The NVIDIA driver; None if NVML is not available."""
    platform: str
    """`Linux-6.8.0-x86_64-with-glibc2.39`."""
    in_container: bool
    """Whether this looks like a container."""
    container_sign: str | None
    """How that was recognised: `/.dockerenv exists`."""

    @classmethod
    def detect(cls, *, driver: str | None = None, root: Path = Path("/")) -> "Software":
        """The versions in this process. The version of the driver comes from NVML and is passed in."""
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
    """What this machine has, and what this process may use of it.

    >>> machine = Machine.detect()
    >>> machine.host.ram_limit_bytes <= machine.host.ram_total_bytes
    True
    """

    gpus: tuple[Gpu, ...]
    """Every accelerator torch sees, in torch's order. If it sees none, `notes` has the reason."""
    host: Host
    """RAM, swap and cores."""
    shm: Space | None
    """/dev/shm; None on systems without it. Files there also count against the RAM limit."""
    disk: Space | None
    """The filesystem that the run folder is on, or will be on; None if it is not accessible."""
    software: Software
    """Versions, and whether this is a container."""
    notes: tuple[str, ...]
    """What is unknown or looks wrong, one sentence each."""

    @classmethod
    def detect(cls, run_folder: Path | str = ".") -> "Machine":
        """Detect everything: takes about 20 ms, and up to 0.3 s more if this is the first use of CUDA in the process.

        Creates no CUDA context if NVML answers. Like any call of torch about GPUs it initialises CUDA in this process,
        so workers that use the GPU must then be spawned, not forked.
        """
        detected = detect_gpus()
        return cls(
            gpus=detected.gpus,
            host=Host.detect(),
            shm=Space.of("/dev/shm"),
            disk=Space.around(run_folder),
            software=Software.detect(driver=detected.driver),
            notes=detected.notes,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: sizes in bytes, unknown is null."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain
