"""The host as this process may use it: RAM, swap, cores, space on disks, and a few limits that end trainings.

Three numbers for RAM answer three questions: what the machine has (`ram_total_bytes`), what this process may ever use
(`ram_limit_bytes`), and what it could get now (`ram_available_bytes`). The second decides a plan.

**Cores round down.** A quota of 2.5 cores gives 2: with 3 busy threads the quota of each 100 ms is spent after 83 ms, and
then *all* threads wait, the one that feeds the GPU too. Half a core unused costs less.

**Memory of processes.** Resident memory counts too much: pages of a memory-mapped file, which the kernel can drop at any
time (half a million random reads of a 2 GiB store: 2,078 MiB, of which 14 anonymous), and pages that forked workers share,
in each of them. `Pss_Anon + Pss_Shmem` of /proc/PID/smaps_rollup avoids both: anonymous and shared memory, each page
divided by the processes that share it, so that the sum over a tree is what the tree takes. Reading it takes about 1 ms for a
process with torch.

Every file is read below `root`, so that a test can lay out any machine. Without /proc (macOS), psutil answers.
"""

import math
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from brimful.machine.cgroup import Bound, cpu_quotas, memory_bounds, memory_ulimits, swap_bounds, ulimit

_PSS_KEYS = (b"Pss_Anon:", b"Pss_Shmem:")

_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
"""Set by podman, LXC and systemd-nspawn; by Kubernetes; by Apptainer and Singularity."""

_FILES = (".dockerenv", "run/.containerenv", "run/systemd/container")
"""Left by Docker, podman and systemd."""

_GROUPS = ("docker", "kubepods", "containerd", "libpod", "lxc")
"""Parts of the names that runtimes give their cgroups, unless a namespace hides them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """RAM, swap and cores: what exists, what is allowed, and what sets the limit."""

    ram_total_bytes: int
    """Physical memory of the machine."""
    ram_limit_bytes: int
    """What this process may use at most: the least of physical memory, every cgroup level and `ulimit -v`, `-d`."""
    ram_limited_by: str
    """Which of them that is: `physical memory`, `cgroup v2 memory.max of /system.slice/x`, `ulimit -v`."""
    ram_available_bytes: int
    """What could be allocated now without swapping. Page cache that the kernel would drop counts as available."""
    swap_total_bytes: int
    """Swap this process may use; 0 if its group forbids it."""
    swap_free_bytes: int
    """How much of it is free."""
    cores_total: int
    """Logical cores of the machine."""
    cores: int
    """How many of them this process can keep busy, rounded down."""
    cores_limited_by: str
    """What sets that number: `all cores of the machine`, `CPU affinity`, `cgroup v2 cpu.max of /x: 2.5 cores`."""
    open_files_limit: int | None
    """`ulimit -n`; None is no limit. Loader workers hold a file for every tensor they pass on."""
    locked_memory_limit_bytes: int | None
    """`ulimit -l`; None is no limit. Network cards (RDMA) and some drivers count pinned buffers against it."""

    @classmethod
    def detect(cls, root: Path = Path("/")) -> "Host":
        """Read this process's limits below `root`. Takes about a millisecond."""
        ram_limits, swap_limits = bounds(root)
        tightest = min(ram_limits, key=lambda bound: bound.limit_bytes)
        cores_total, cores, cores_limited_by = _cores(root)
        return cls(
            ram_total_bytes=ram_limits[0].limit_bytes,
            ram_limit_bytes=tightest.limit_bytes,
            ram_limited_by=tightest.name,
            ram_available_bytes=min(bound.left_bytes for bound in ram_limits),
            swap_total_bytes=min(bound.limit_bytes for bound in swap_limits),
            swap_free_bytes=min(bound.left_bytes for bound in swap_limits),
            cores_total=cores_total,
            cores=cores,
            cores_limited_by=cores_limited_by,
            open_files_limit=ulimit("NOFILE"),
            locked_memory_limit_bytes=ulimit("MEMLOCK"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The size of a filesystem, and what this user may still write to it. Quotas are not seen."""

    path: str
    """The folder, or its nearest parent that exists."""
    total_bytes: int
    """The size of the filesystem."""
    free_bytes: int
    """What is free for this user, without the administrator's reserve."""

    @classmethod
    def of(cls, path: Path | str) -> "Space | None":
        """The filesystem of an existing path; None if it does not exist or is not accessible."""
        try:
            usage = shutil.disk_usage(path)
        except OSError:
            return None
        return cls(path=str(path), total_bytes=usage.total, free_bytes=usage.free)

    @classmethod
    def around(cls, path: Path | str) -> "Space | None":
        """The filesystem a path is on, or will be on when it is created."""
        place = Path(path).expanduser().absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        return cls.of(place)


def bounds(root: Path = Path("/")) -> tuple[list[Bound], list[Bound]]:
    """Every limit on this process's RAM, and on its swap; the machine's own first."""
    ram, swap = _physical(root)
    return [ram, *memory_bounds(root), *memory_ulimits()], [swap, *swap_bounds(root)]


def tree_bytes(pid: int | None = None, root: Path = Path("/")) -> int:
    """Anonymous and shared memory of a process (default: this one) and all its descendants."""
    return sum(process_bytes(process, root) for process in tree(os.getpid() if pid is None else pid, root))


def tree(pid: int, root: Path = Path("/")) -> list[int]:
    """The process and all its running descendants."""
    pids, waiting = [], [pid]
    while waiting:
        current = waiting.pop()
        pids.append(current)
        threads = root / "proc" / str(current) / "task"
        with suppress(OSError):  # it has ended
            for thread in os.listdir(threads):  # noqa: PTH208 - a process has up to hundreds, and Path takes three times as long
                waiting.extend(int(child) for child in _read(f"{threads}/{thread}/children").split())
    return pids


def process_started(pid: int, root: Path = Path("/")) -> int | None:
    """When it started, in clock ticks since the machine did, which no change of the clock moves; None if it has ended."""
    _, bracket, rest = _read(root / "proc" / str(pid) / "stat").rpartition(b")")  # a program's name may hold brackets
    words = rest.split()
    return int(words[19]) if bracket and len(words) > 19 and words[0] not in (b"Z", b"X") else None


def process_bytes(pid: int, root: Path = Path("/")) -> int:
    """The same of one process; 0 if it has ended. Without a rollup, resident memory less file pages."""
    lines = [line.split() for line in _read(root / "proc" / str(pid) / "smaps_rollup").splitlines()]
    sizes = {line[0]: int(line[1]) * 1024 for line in lines if len(line) == 3}
    if sizes:
        return sum(sizes.get(key, 0) for key in _PSS_KEYS)
    status = [line.split() for line in _read(root / "proc" / str(pid) / "status").splitlines()]
    return sum(int(line[1]) * 1024 for line in status if line and line[0] in (b"RssAnon:", b"RssShmem:"))


def may_spawn() -> bool:
    """Whether processes may be spawned without the user asking for it.

    A spawned process imports the main file of the program again. The `brimful` command and `python -m` are made for that,
    but a script without `if __name__ == "__main__"` would run again from the top. There we do without processes.
    """
    main = sys.modules.get("__main__")
    return getattr(main, "__spec__", None) is not None or Path(getattr(main, "__file__", None) or "").stem == "brimful"


def container_sign(root: Path = Path("/")) -> str | None:
    """By what this process recognises that it runs in a container; None if it does not.

    It only changes messages: in a container, the processes that hold a GPU's memory are often outside and have no names,
    and the fix for a small /dev/shm is an option of `docker run`.
    """
    for variable in _VARIABLES:
        if os.environ.get(variable):
            return f"${variable} is set"
    for file in _FILES:
        if (root / file).exists():
            return f"/{file} exists"
    try:
        groups = (root / "proc/self/cgroup").read_text()
    except OSError:
        return None
    return next((f"/proc/self/cgroup names {name}" for name in _GROUPS if name in groups), None)


def _physical(root: Path) -> tuple[Bound, Bound]:
    """The machine's RAM and swap as bounds: from /proc/meminfo, or else psutil."""
    total, available, swap_total, swap_free = _meminfo(root / "proc/meminfo") or _from_psutil()
    return (
        Bound(name="physical memory", limit_bytes=total, used_bytes=total - available),
        Bound(name="the machine's swap", limit_bytes=swap_total, used_bytes=swap_total - swap_free),
    )


def _meminfo(file: Path) -> tuple[int, int, int, int] | None:
    """Lines like `MemTotal: 24684100 kB`, where kB means KiB; None if there is no such file."""
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
    """Cores of the machine, cores to use, and what limits them."""
    total = os.cpu_count() or 1
    choices = [(total, "all cores of the machine")]
    if hasattr(os, "sched_getaffinity"):  # Linux; a cpuset shows here too
        choices.append((len(os.sched_getaffinity(0)), "CPU affinity (taskset, cpuset or the batch system)"))
    for quota, name in cpu_quotas(root):
        choices.append((max(1, math.floor(quota)), f"{name}: {quota:.3g} cores"))
    cores, limited_by = min(choices, key=lambda choice: choice[0])
    return total, cores, limited_by


def _read(path: Path | str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - see `tree`
            return file.read()
    except OSError:
        return b""
