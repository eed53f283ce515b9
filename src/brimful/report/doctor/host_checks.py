"""The host: RAM and who holds it, cores, swap, /dev/shm, and the limits that end trainings.

In a container the figures of the machine mean nothing: the kernel kills at the limit of the group, and threads beyond the quota of
cores stop all others for the rest of each 100 ms. So each line names the limit that binds.
"""

import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from brimful.machine.cgroup import levels, oom_kills
from brimful.machine.host import Host, Space, tree
from brimful.report.doctor.checks import Findings, Foreign, Sentence, say
from brimful.units import GiB, MiB, show_bytes

LITTLE_RAM_BYTES, LITTLE_RAM = 2 * GiB, 0.1
"""Less available than this, or than this share of the limit, is a warning."""
NO_RAM_BYTES = 512 * MiB
"""`import torch` and a small model take this much."""
SMALL_SHM_BYTES, NO_SHM_BYTES = GiB, 16 * MiB
"""Docker gives 64 MiB. NCCL takes up to 10 MiB for each pair of cards, a loader worker a step of rows at a time."""
SWAP_USED = 0.25
FEW_FILES, NO_FILES = 1024, 256
FEW_TASKS = 512
"""torch starts a thread per core in each process, and its libraries some more."""
RDMA_LOCKED_BYTES = GiB
_TOP = 3
SWAP_WATCH_S = 0.5


# ---- RAM -------------------------------------------------------------------------------------------------------------


def ram_checks(host: Host, root: Path = Path("/")) -> Findings:
    """What is available under the limit that binds, and who holds the rest."""
    found = Findings("Host")
    limit, available = host.ram_limit_bytes, host.ram_available_bytes
    text = say("{available} of {limit} available ({by})", available=show_bytes(available), limit=show_bytes(limit), by=Foreign(host.ram_limited_by))  # fmt: skip
    holders = [_holder(*one) for one in largest_processes(root)]
    figures = {"available_bytes": available, "limit_bytes": limit, "oom_kills": oom_kills(root)}
    if available < NO_RAM_BYTES:
        found.fail("RAM", text, _less_ram(holders), **figures)
    elif available < max(LITTLE_RAM_BYTES, LITTLE_RAM * limit):
        found.warn("RAM", text, _less_ram(holders), **figures)
    else:
        found.ok("RAM", text, **figures)
    if holders:
        found.ok("RAM held", say("{holders}", holders=holders))
    else:
        found.ok("RAM held", say("no other process that is visible here holds more than 256 MiB"))
    return found


def _holder(name: str, pid: int, size: int) -> Sentence:
    return say("{name} (pid {pid}) holds {size}", name=name, pid=pid, size=show_bytes(size))


def _less_ram(holders: list[Sentence]) -> Sentence:
    if holders:
        return say("end what you do not need ({first}), or a lower --host-limit", first=holders[0])
    return say("a lower --host-limit, or more memory for this container")


def largest_processes(root: Path = Path("/"), least_bytes: int = 256 * MiB) -> list[tuple[str, int, int]]:
    """Other processes with the most anonymous and shared memory: name, pid, bytes. /proc/PID/status is readable for all users."""
    own = set(tree(os.getpid(), root))
    sizes = []
    for folder in (root / "proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            lines = dict(
                line.split(":", 1)
                for line in (folder / "status").read_text(errors="replace").splitlines()
                if ":" in line
            )
            size = sum(int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem") if key in lines)
            if size >= least_bytes and int(folder.name) not in own:
                sizes.append((lines["Name"].strip(), int(folder.name), size))
    return sorted(sizes, key=lambda one: -one[2])[:_TOP]


def swap_checks(host: Host, root: Path = Path("/"), sleep: Callable[[float], object] = time.sleep) -> Findings:
    """Swap in use, and whether pages are swapped right now: then everything waits for the disk."""
    found = Findings("Host")
    used = host.swap_total_bytes - host.swap_free_bytes
    before = _swapped_pages(root)
    sleep(SWAP_WATCH_S)
    after = _swapped_pages(root)
    rate = (after - before) * mmap.PAGESIZE / SWAP_WATCH_S if before is not None and after is not None else 0.0
    figures = {"used_bytes": used, "total_bytes": host.swap_total_bytes, "bytes_per_s": rate}
    text = say("{used} of {total} in use", used=show_bytes(used), total=show_bytes(host.swap_total_bytes))
    fix = say("end what you do not need, or a lower --host-limit")
    if not host.swap_total_bytes:
        found.ok("swap", say("none, so the kernel kills a process as soon as RAM runs out"), **figures)
    elif rate > MiB:
        text = say("swapping now, {rate}/s", rate=show_bytes(rate))
        found.warn("swap", text, fix, **figures)
    elif used > SWAP_USED * host.swap_total_bytes:
        found.warn("swap", text, fix, **figures)
    else:
        found.ok("swap", text, **figures)
    return found


def _swapped_pages(root: Path) -> int | None:
    with suppress(OSError, ValueError):
        counts = dict(line.split() for line in (root / "proc/vmstat").read_text().splitlines())
        return int(counts["pswpin"]) + int(counts["pswpout"]) if "pswpin" in counts else None
    return None


# ---- Cores -----------------------------------------------------------------------------------------------------------


def core_checks(host: Host, environment: Mapping[str, str] = os.environ) -> Findings:
    """A quota below the cores that libraries count makes them start too many threads, all of which then wait."""
    found = Findings("Host")
    figures = {"cores": host.cores, "cores_total": host.cores_total}
    text = say(
        "{cores} of {total} cores ({by})", cores=host.cores, total=host.cores_total, by=Foreign(host.cores_limited_by)
    )
    threads = environment.get("OMP_NUM_THREADS", "")
    limited = "cgroup" in host.cores_limited_by and host.cores < host.cores_total
    if limited and not threads:
        text = say("{text}, but libraries start a thread for each of them", text=text)
        found.warn("cores", text, say("`export OMP_NUM_THREADS={cores}`", cores=host.cores), **figures)
    elif host.cores < 2 and host.cores_total > 1:
        found.warn("cores", text, say("more cores: one computes or feeds the card, another reads rows"), **figures)
    else:
        found.ok("cores", text, **figures)
    return found


# ---- Limits ----------------------------------------------------------------------------------------------------------


def shm_checks(shm: Space | None, *, in_container: bool, linux: bool = sys.platform == "linux") -> Findings:
    """/dev/shm carries rows from loader workers, and what NCCL and gloo exchange on one machine."""
    found = Findings("Several processes")
    if not linux:
        return found
    fix = (
        say("start the container with {options}", options="--shm-size 8g")
        if in_container
        else say("`sudo mount -o remount,size=8G /dev/shm`")
    )
    if shm is None:
        found.fail("/dev/shm", say("missing, so processes cannot share memory"), fix)
        return found
    figures = {"total_bytes": shm.total_bytes, "free_bytes": shm.free_bytes}
    text = say("{free} of {total} free", free=show_bytes(shm.free_bytes), total=show_bytes(shm.total_bytes))
    if shm.total_bytes >= SMALL_SHM_BYTES > shm.free_bytes:
        fix = say("remove files of ended processes (`ls -l /dev/shm`)")
    if shm.free_bytes < NO_SHM_BYTES:
        found.fail("/dev/shm", text, fix, **figures)
    elif shm.free_bytes < SMALL_SHM_BYTES:
        found.warn("/dev/shm", text, fix, **figures)
    else:
        found.ok("/dev/shm", text, **figures)
    return found


def limit_checks(host: Host, root: Path = Path("/")) -> Findings:
    """Open files, threads and processes, locked memory."""
    found = Findings("Host")
    _open_files(host.open_files_limit, found)
    _tasks(root, found)
    _locked_memory(host.locked_memory_limit_bytes, root, found)
    return found


def _open_files(limit: int | None, found: Findings) -> None:
    text = say("no limit") if limit is None else say("{limit} (`ulimit -n`)", limit=f"{limit:,}")
    if limit is not None and limit < FEW_FILES:
        state = found.fail if limit < NO_FILES else found.warn
        state("open files", text, say("`ulimit -n 65536`"), limit=limit)
    else:
        found.ok("open files", text, limit=limit)


def _tasks(root: Path, found: Findings) -> None:
    """Containers limit threads and processes together; beyond it, no thread can be started."""
    left = None
    for level in levels("pids", root):
        limit, used = level.number("pids.max"), level.number("pids.current")
        if limit is not None:
            left = min(limit - (used or 0), left if left is not None else limit)
    if left is None:
        return
    text = say("{left} more threads and processes are allowed (cgroup pids.max)", left=f"{left:,}")
    if left < FEW_TASKS:
        fix = say("start the container with {options}", options="--pids-limit -1")
        found.warn("threads", text, fix, left=left)
    else:
        found.ok("threads", text, left=left)


def _locked_memory(limit: int | None, root: Path, found: Findings) -> None:
    """It matters to network cards that read memory themselves; CUDA's pinned memory does not count."""
    rdma = any((root / "sys/class/infiniband").glob("*"))
    text = say("no limit") if limit is None else say("{limit} (`ulimit -l`)", limit=show_bytes(limit))
    if rdma and limit is not None and limit < RDMA_LOCKED_BYTES:
        text = say("{text}: too little for the InfiniBand cards here", text=text)
        found.warn(
            "locked memory", text, say("`ulimit -l unlimited`, or --ulimit memlock=-1 for a container"), limit=limit
        )
    else:
        found.ok("locked memory", text, limit=limit)
