"""Machines that do not exist, for the doctor: cards as torch sees them, NVML's answers, children that have ended."""

from types import SimpleNamespace
from typing import Any

from brimful.machine.gpu import Gpu, GpuProcess
from brimful.machine.host import Host
from brimful.report.doctor.checks import Check
from brimful.report.doctor.software import Torch
from brimful.report.doctor.trial import Ended
from brimful.units import GiB
from tests.machine.conftest import FakeNvml

UUID = "GPU-0b22bb49-e7db-2222-8ec0-e808677dbcdb"
CUDA = Torch(version="2.11.0+cu130", cuda="13.0", archs=("sm_80", "sm_90", "compute_120"), nccl=True)
CPU = Torch(version="2.13.0+cpu")
GOOD = {"correct": True, "bf16": True, "bf16_correct": True, "seconds": 1.2}


def gpu(index: int = 0, *, others: int = 0, total: int = 80 * GiB, processes: tuple[GpuProcess, ...] = (), **values: Any) -> Gpu:  # fmt: skip
    """A card with this much held by others."""
    fields: dict[str, Any] = {
        "index": index, "kind": "cuda", "name": "NVIDIA H200", "uuid": f"{UUID}-{index}", "total_bytes": total,
        "free_bytes": total - others, "used_by_others_bytes": others, "own_bytes": 0, "other_processes": processes,
        "driver": "580.1", "capability": "9.0",
    }  # fmt: skip
    return Gpu(**{**fields, **values})


def host(**values: Any) -> Host:
    """64 GiB, half of them available, and 8 cores."""
    fields: dict[str, Any] = {
        "ram_total_bytes": 64 * GiB, "ram_limit_bytes": 64 * GiB, "ram_limited_by": "physical memory",
        "ram_available_bytes": 32 * GiB, "swap_total_bytes": 8 * GiB, "swap_free_bytes": 8 * GiB, "cores_total": 8, "cores": 8,
        "cores_limited_by": "all cores of the machine", "open_files_limit": 65536, "locked_memory_limit_bytes": None,
    }  # fmt: skip
    return Host(**{**fields, **values})


def tried(**card: Any) -> Ended:
    """A card's trial that answered; without values, one that went well."""
    return Ended(answers=({"card": {**GOOD, **card}},))


def only(checks: list[Check], name: str | None = None) -> Check:
    """The one check, or the one of this name."""
    named = [check for check in checks if name is None or str(check.name) == name]
    assert len(named) == 1, [str(check.name) for check in checks]
    return named[0]


class DoctorNvml(FakeNvml):
    """NVML with the figures that only the doctor asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons, self.errors, self.remapped = 0, 0, (0, 0, 0, 0)

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return next(uuid for uuid, card in self.cards.items() if card is handle)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return 91

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:
        return self.errors

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self.reasons

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, ...]:
        return self.remapped
