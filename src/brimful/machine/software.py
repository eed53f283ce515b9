"""The versions that decide what runs, what it costs in memory, and whether a saved plan still holds."""

import platform
from dataclasses import dataclass
from pathlib import Path

from brimful.machine.container import container_sign


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
