"""Machines that do not exist: folders laid out like /proc and /sys, an NVML and a torch that see GPUs."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from brimful.units import GiB


@pytest.fixture
def lay(tmp_path: Path) -> Callable[..., Path]:
    """Write files below a fake root: `lay({"proc/self/cgroup": "0::/", …})`."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return write


@pytest.fixture
def no_ulimits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may have `ulimit`s of its own."""
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def no_container_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run in a container."""
    for name in ("container", "KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        monkeypatch.delenv(name, raising=False)


class FakeNvml(ModuleType):
    """pynvml with the GPUs and processes a test gives it. Questions in `refused` raise as the real one does."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.cards: dict[str, SimpleNamespace] = {}
        self.names: dict[int, str] = {}
        self.refused: set[str] = set()

    def add(self, uuid: str, *, used: int, total: int = 140 * GiB, processes: dict[int, int | None]) -> None:
        listed = [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes.items()]
        memory = SimpleNamespace(total=total, free=total - used, used=used)
        self.cards[uuid] = SimpleNamespace(name="NVIDIA H200", memory=memory, processes=listed)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in super().__getattribute__("refused"):
            raise FakeNvml.NVMLError("Not Supported")
        return super().__getattribute__(name)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return list(self.cards.values())[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        if uuid not in self.cards:
            raise FakeNvml.NVMLError("Not Found")
        return self.cards[uuid]

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(handle.name)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return handle.memory

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any:
        return handle.processes

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> Any:
        return []

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid not in self.names:
            raise FakeNvml.NVMLError("Not Found")
        return self.names[pid]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """An NVML that works and sees no GPU yet."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def torch_sees(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make torch a CUDA build with GPUs of these UUIDs; `context` is whether this process already uses them."""

    def see(*uuids: str, context: bool = False, reserved: int = 0, total: int = 139 * GiB, free: int = 0) -> None:
        def properties(index: int) -> SimpleNamespace:
            return SimpleNamespace(name="NVIDIA H200", uuid=uuids[index], total_memory=total, major=9, minor=0)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(uuids))
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (free, total))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda _: context, raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return see


@pytest.fixture
def me() -> int:
    return os.getpid()
