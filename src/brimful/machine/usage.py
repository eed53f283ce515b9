"""What a GPU and the host do right now, cheap enough to be read every few seconds while a run trains.

    GpuMeter    utilisation, temperature, power, memory in use and memory of others, by NVML; no call of CUDA, since the thread
                that reads must neither wait for the device nor disturb the recording of a CUDA graph
    HostMeter   memory of the run's processes, memory in use under the limit that binds, swap, CPU and disk reads, by /proc

What does not answer is None. Reading the memory of a process exactly (`host.process_bytes`) takes about 10 ms for each GB that
it holds. The kernel does it while Python goes on, but it is a core's time, so it takes at most a fiftieth of it: a run that
holds 30 GB is measured every 15 s, and in between the last figure stands.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.machine.gpu import Nvml
from brimful.machine.host import Host, bounds, process_bytes, tree
from brimful.units import GiB

TREE_SHARE = 0.02
"""The most of one core's time that measuring the memory of processes may take."""
UNLISTED_BYTES = 2 * GiB
"""Where NVML does not list this process (in containers), this much beside what torch has reserved may be its own too: a CUDA
context takes 0.5 GiB and more, NCCL's buffers as much again."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """One GPU at one moment."""

    index: int
    """torch's number."""
    name: str
    uuid: str | None
    """torch's, without NVML's prefix."""
    utilization: float | None
    """Share of the last moments, about a second, in which a kernel ran."""
    temperature_c: int | None
    power_w: float | None
    used_bytes: int | None
    """Held by all processes."""
    total_bytes: int | None
    others_bytes: int | None
    """Held by processes that are none of the run's; at least this much where NVML does not list ours."""


class GpuMeter:
    """Reads one GPU through an open session with NVML."""

    def __init__(
        self,
        nvml: Nvml,
        *,
        index: int,
        name: str,
        uuid: str | None = None,
        total_bytes: int | None = None,
        pids: Collection[int] = (),
        reserved: Callable[[], int] | None = None,
    ) -> None:
        """`uuid` is torch's, None for a GPU that is not NVIDIA's. `pids` are the processes of the run that use this GPU.

        `reserved` tells what torch has reserved there in this process.
        """
        self._nvml, self._pids, self._reserved = nvml, frozenset(pids), reserved
        self._index, self._name, self._uuid, self._total_bytes = index, name, uuid, total_bytes
        self._handle: Any = None

    def read(self) -> GpuSample:
        handle = self._find()
        sensors = (None, None, None) if handle is None else self._nvml.sensors(handle)
        utilization, temperature_c, power_w = sensors
        used = None if handle is None else self._used(handle)
        return GpuSample(
            index=self._index,
            name=self._name,
            uuid=self._uuid,
            utilization=utilization,
            temperature_c=temperature_c,
            power_w=power_w,
            used_bytes=used,
            total_bytes=self._total_bytes,
            others_bytes=None if used is None else self._others(handle, used),
        )

    def _find(self) -> Any:
        if self._handle is None and self._uuid is not None and self._total_bytes is not None:
            match = self._nvml.find(self._uuid, self._total_bytes)
            self._handle = None if match is None else match[1]
        return self._handle

    def _used(self, handle: Any) -> int | None:
        """torch's total less what is free, as `gpu.py` counts."""
        memory = self._nvml.query("nvmlDeviceGetMemoryInfo", handle)
        return None if memory is None or self._total_bytes is None else max(0, self._total_bytes - int(memory.free))

    def _others(self, handle: Any, used_bytes: int) -> int | None:
        listed = self._nvml.processes(handle) or {}
        ours = [listed.get(pid) for pid in self._pids]
        if ours and None not in ours:
            return max(0, used_bytes - sum(size or 0 for size in ours))
        if self._reserved is None or len(self._pids) != 1:
            return None
        return max(0, used_bytes - self._reserved() - UNLISTED_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSample:
    """The host at one moment."""

    tree_bytes: int | None
    """Memory of the run's processes and their descendants."""
    machine_bytes: int
    """RAM in use under the limit that binds, page cache that the kernel would drop left out."""
    limit_bytes: int
    """That limit: the least of physical memory, every cgroup and `ulimit`."""
    limited_by: str
    swap_used_bytes: int
    swap_total_bytes: int
    cpu: float | None
    """CPU time of the run's processes since the reading before, as a share of the allowed cores."""
    read_bytes_per_s: float | None
    """What these processes read from disks, page cache left out."""


class HostMeter:
    """Reads the host for a run whose processes on this machine are `pids` and their descendants."""

    def __init__(
        self, pids: Collection[int], *, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pids, self._root, self._clock = tuple(pids), root, clock
        self._cores = Host.detect(root).cores
        self._tree_bytes: int | None = None
        self._tree_due = -float("inf")
        self._read_at: float | None = None
        self._cpu_s: dict[int, float] = {}
        self._read_bytes: dict[int, float] = {}

    def read(self) -> HostSample:
        now = self._clock()
        processes = [pid for own in self._pids for pid in tree(own, self._root)]
        if now >= self._tree_due:
            self._tree_bytes = sum(process_bytes(pid, self._root) for pid in processes) or None
            self._tree_due = now + (self._clock() - now) / TREE_SHARE
        cpu_s = _by_pid(processes, self._cpu_time)
        read_bytes = _by_pid(processes, self._disk_reads)
        seconds = None if self._read_at is None else now - self._read_at
        cpu = _growth(self._cpu_s, cpu_s, seconds)
        ram_limits, swap_limits = bounds(self._root)
        ram = min(ram_limits, key=lambda bound: bound.limit_bytes)
        swap = min(swap_limits, key=lambda bound: bound.limit_bytes)
        sample = HostSample(
            tree_bytes=self._tree_bytes,
            machine_bytes=ram.used_bytes,
            limit_bytes=ram.limit_bytes,
            limited_by=ram.name,
            swap_used_bytes=min(swap.used_bytes, swap.limit_bytes),
            swap_total_bytes=swap.limit_bytes,
            cpu=None if cpu is None else min(1.0, cpu / self._cores),
            read_bytes_per_s=_growth(self._read_bytes, read_bytes, seconds),
        )
        self._read_at, self._cpu_s, self._read_bytes = now, cpu_s, read_bytes
        return sample

    def _cpu_time(self, pid: int) -> float | None:
        """Seconds that a process has computed, its ended children left out."""
        words = self._words(pid, "stat", after=b")")  # a program's name, in brackets, may hold spaces
        return (int(words[11]) + int(words[12])) / _TICKS_PER_S if len(words) > 12 else None

    def _disk_reads(self, pid: int) -> float | None:
        words = self._words(pid, "io", after=b"\nread_bytes:")
        return float(words[0]) if words else None

    def _words(self, pid: int, file: str, *, after: bytes) -> list[bytes]:
        try:
            content = (self._root / "proc" / str(pid) / file).read_bytes()
        except OSError:  # it has ended, or there is no /proc
            return []
        return content[content.rindex(after) + len(after) :].split() if after in content else []


def _by_pid(pids: list[int], read: Callable[[int], float | None]) -> dict[int, float]:
    return {pid: value for pid in pids if (value := read(pid)) is not None}


def _growth(before: Mapping[int, float], now: Mapping[int, float], seconds: float | None) -> float | None:
    """Per second, over the processes that live; None if there is nothing to compare with."""
    if not seconds or not now or not before:
        return None
    return sum(max(0.0, value - before.get(pid, 0.0)) for pid, value in now.items()) / seconds
