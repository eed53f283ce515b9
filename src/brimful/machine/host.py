"""The host as this process may use it: RAM, swap, cores and a few limits that end trainings.

Three numbers for RAM, because they answer three questions: what the machine has (`ram_total_bytes`), what this process
may ever have (`ram_limit_bytes`), what it could get now (`ram_available_bytes`). The second decides a plan.

**Cores round down.** A quota of 2.5 cores gives 2: with 3 busy threads the quota of each 100 ms is spent after 83 ms
and *all* threads then stand still, the one that feeds the GPU too; half a core unused costs less.

Every file is read below `root`, so that a test can lay out any machine. Without /proc (macOS), psutil answers.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from brimful.machine.cgroup import cpu_quotas, memory_bounds, swap_bounds
from brimful.machine.limits import Bound, memory_ulimits, ulimit


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """RAM, swap and cores: what is there, what is allowed, and what set the limit."""

    ram_total_bytes: int
    """Physical memory of the machine."""
    ram_limit_bytes: int
    """What this process may use at most: the least of physical memory, every cgroup level and `ulimit -v`, `-d`."""
    ram_limited_by: str
    """Which of them that is: `physical memory`, `cgroup v2 memory.max of /system.slice/x`, `ulimit -v`."""
    ram_available_bytes: int
    """What could be had now without swapping; page cache that the kernel would drop counts as available."""
    swap_total_bytes: int
    """Swap this process may use: 0 where its group forbids it."""
    swap_free_bytes: int
    """What of it is free."""
    cores_total: int
    """Logical cores of the machine."""
    cores: int
    """How many of them this process can keep busy, rounded down."""
    cores_limited_by: str
    """What set that number: `all cores of the machine`, `CPU affinity`, `cgroup v2 cpu.max of /x: 2.5 cores`."""
    open_files_limit: int | None
    """`ulimit -n`; None is no limit. Loader workers hold a file for every tensor they hand over."""
    locked_memory_limit_bytes: int | None
    """`ulimit -l`; None is no limit. Network cards (RDMA) and some drivers count pinned buffers against it."""

    @classmethod
    def detect(cls, root: Path = Path("/")) -> "Host":
        """Look below `root` at this process's limits; takes about a millisecond."""
        ram, swap = _physical(root)
        ram_bounds = [ram, *memory_bounds(root), *memory_ulimits()]
        swap_limits = [swap, *swap_bounds(root)]
        tightest = min(ram_bounds, key=lambda bound: bound.limit_bytes)
        cores_total, cores, cores_limited_by = _cores(root)
        return cls(
            ram_total_bytes=ram.limit_bytes,
            ram_limit_bytes=tightest.limit_bytes,
            ram_limited_by=tightest.name,
            ram_available_bytes=min(bound.left_bytes for bound in ram_bounds),
            swap_total_bytes=min(bound.limit_bytes for bound in swap_limits),
            swap_free_bytes=min(bound.left_bytes for bound in swap_limits),
            cores_total=cores_total,
            cores=cores,
            cores_limited_by=cores_limited_by,
            open_files_limit=ulimit("NOFILE"),
            locked_memory_limit_bytes=ulimit("MEMLOCK"),
        )


def _physical(root: Path) -> tuple[Bound, Bound]:
    """The machine's RAM and swap, as bounds like any other: /proc/meminfo, else psutil."""
    total, available, swap_total, swap_free = _meminfo(root / "proc/meminfo") or _from_psutil()
    return (
        Bound(name="physical memory", limit_bytes=total, used_bytes=total - available),
        Bound(name="the machine's swap", limit_bytes=swap_total, used_bytes=swap_total - swap_free),
    )


def _meminfo(file: Path) -> tuple[int, int, int, int] | None:
    """Lines like `MemTotal: 24684100 kB`, where kB means KiB; None where there is no such file."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return None
    sizes = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) >= 2}
    available = sizes.get("MemAvailable", sizes["MemFree"])  # kernels before 3.14, and some sandboxes
    return sizes["MemTotal"], available, sizes.get("SwapTotal", 0), sizes.get("SwapFree", 0)


def _from_psutil() -> tuple[int, int, int, int]:
    import psutil

    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    return ram.total, ram.available, swap.total, swap.free


def _cores(root: Path) -> tuple[int, int, str]:
    """Cores of the machine, cores to use, and what made the difference."""
    total = os.cpu_count() or 1
    choices = [(total, "all cores of the machine")]
    if hasattr(os, "sched_getaffinity"):  # Linux; a cpuset shows here too
        choices.append((len(os.sched_getaffinity(0)), "CPU affinity (taskset, cpuset or the batch system)"))
    for quota, name in cpu_quotas(root):
        choices.append((max(1, math.floor(quota)), f"{name}: {quota:.3g} cores"))
    cores, limited_by = min(choices, key=lambda choice: choice[0])
    return total, cores, limited_by
