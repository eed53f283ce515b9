"""The host: RAM and who holds it, cores, swap, /dev/shm, and the limits that end trainings.

In a container the figures of the machine mean nothing: the kernel kills at the limit of the group, and threads beyond the quota of
cores stop all others for the rest of each 100 ms. So each line names the limit that binds.

Of the run's folder, the data and the caches: may they be written, is there space, do locks work, how fast is the disk. Reading is timed
around the page cache (O_DIRECT), in blocks of 4 MiB, for at most 256 MiB or 2 s: a plain read of a file that was read before would time
RAM, and dropping the cache would slow down whatever else runs. Where the filesystem refuses that, the result goes through the cache and
says so. A token store is read at random, so the time of a random read counts as well: about 0.1 ms on an SSD, 10 ms on a hard disk. For
the run's folder a file of up to 128 MiB is written, which has no name and is gone when it is closed.
"""

import errno
import mmap
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from brimful.errors import in_one_line
from brimful.files import FileLock, cache_folder
from brimful.languages import Sentence, say
from brimful.machine.cgroup import levels, oom_kills
from brimful.machine.host import Host, Space, tree
from brimful.report.doctor.checks import Findings
from brimful.units import GiB, MiB, show_bytes, show_seconds

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
    text = say("{available} of {limit} available ({by})", available=show_bytes(available), limit=show_bytes(limit), by=Sentence(host.ram_limited_by))  # fmt: skip
    holders = [_holder(*one) for one in largest_processes(root)]
    figures = {"available_bytes": available, "limit_bytes": limit, "oom_kills": oom_kills(root)}
    little = available < max(LITTLE_RAM_BYTES, LITTLE_RAM * limit)
    found.grade("RAM", text, _less_ram(holders), failed=available < NO_RAM_BYTES, warning=little, **figures)
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
    else:
        text = say("swapping now, {rate}/s", rate=show_bytes(rate)) if rate > MiB else text
        busy = rate > MiB or used > SWAP_USED * host.swap_total_bytes
        found.grade("swap", text, fix, failed=False, warning=busy, **figures)
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
        "{cores} of {total} cores ({by})", cores=host.cores, total=host.cores_total, by=Sentence(host.cores_limited_by)
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
    none, little = shm.free_bytes < NO_SHM_BYTES, shm.free_bytes < SMALL_SHM_BYTES
    found.grade("/dev/shm", text, fix, failed=none, warning=little, **figures)
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
    none, few = (limit is not None and limit < least for least in (NO_FILES, FEW_FILES))
    found.grade("open files", text, say("`ulimit -n 65536`"), failed=none, warning=few, limit=limit)


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
    fix = say("start the container with {options}", options="--pids-limit -1")
    found.grade("threads", text, fix, failed=False, warning=left < FEW_TASKS, left=left)


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


BLOCK_BYTES = 4 * MiB
READ_BYTES, READ_S = 256 * MiB, 2.0
WRITE_BYTES, WRITE_S = 128 * MiB, 1.0
SEEKS, SEEK_S, SEEK_BYTES = 64, 0.5, 4096
LITTLE_BYTES, NO_BYTES = 10 * GiB, GiB
"""Free space below this is a warning, and a failure. A checkpoint of a 0.2 B model with AdamW takes 2.1 GiB (12 bytes per weight)."""
CHECKPOINTS = 3
"""Checkpoints of a run that must fit: two are kept, and a new one is complete before the oldest goes."""
SLOW_READ, SLOW_WRITE = 50 * MiB, 30 * MiB
"""Bytes per second. A hard disk reads 100–200 MiB/s, a slow network mount 10."""
SLOW_SEEK_S = 0.004
_FEW_INODES = 1000
_MOST_FILES = 2000
_IN_MEMORY = ("tmpfs", "ramfs")
_CONTAINER_PREFIX = ".brimful-doctor-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast bytes came or went."""

    bytes_per_s: float
    direct: bool
    """Whether the page cache was left out."""
    seek_s: float | None = None
    """The median time of a random read of 4 KiB; None if it was not measured."""

    @property
    def phrase(self) -> Sentence:
        size = f"{show_bytes(self.bytes_per_s)}/s"
        if not self.direct:
            return say("{size} through the page cache, so the disk may be slower", size=size)
        if self.seek_s is None:
            return say("{size} around the page cache", size=size)
        seek = f"{1000 * self.seek_s:.2g} ms"
        return say("{size} around the page cache, {seek} for a random read", size=size, seek=seek)


# ---- The run's folder and the caches ---------------------------------------------------------------------------------


def run_folder_checks(run: Path, root: Path = Path("/"), space: Space | None = None) -> Findings:
    """The folder of a run, or the one where runs will be: writable, with space, with locks."""
    found, place = Findings("Folders"), _existing(run)
    if not place.is_dir():
        text = say("{path} is a file, not a folder", path=str(place))
        found.fail("run folder", text, say("another --run"))
        return found
    if problem := _cannot_write(place):
        text = say("{path} cannot be written to ({problem})", path=str(place), problem=problem)
        found.fail("run folder", text, say("another --run, or `sudo chown -R $USER {path}`", path=str(place)))
        return found
    kind = filesystem(place, root)
    where = say("{path} ({kind})", path=str(place), kind=kind) if kind else say("{path}", path=str(place))
    if kind in _IN_MEMORY:
        text = say("{where} is in RAM: it counts as memory and is lost at a restart", where=where)
        found.warn("run folder", text, say("a --run on a disk"), path=str(place), filesystem=kind)
    else:
        found.ok("run folder", say("{where} is writable", where=where), path=str(place), filesystem=kind)
    _space(run, space or Space.around(run), found)
    _locks(place, found)
    return found


def _existing(path: Path) -> Path:
    place = path.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _cannot_write(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=_CONTAINER_PREFIX) as file:
            file.write(b"\0")
    except OSError as error:
        return error.strerror or str(error)
    return None


def filesystem(path: Path, root: Path = Path("/")) -> str | None:
    """`ext4`, `nfs4`, `overlay`: the type of the filesystem a path is on; None if unknown."""
    best, kind = -1, None
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            mount = before.split()[4].replace("\\040", " ")
            if len(mount) > best and path.resolve().is_relative_to(mount):
                best, kind = len(mount), after.split()[0]
    return kind


def _space(run: Path, space: Space | None, found: Findings) -> None:
    if space is None:
        found.skip("disk space", say("the filesystem does not tell"))
        return
    largest = _largest_checkpoint(run)
    needed = CHECKPOINTS * largest
    text = say("{free} of {total} free", free=show_bytes(space.free_bytes), total=show_bytes(space.total_bytes))
    figures = {"free_bytes": space.free_bytes, "total_bytes": space.total_bytes, "checkpoint_bytes": largest or None}
    fix = say("delete old runs or checkpoints, a lower --keep, or a --run on another disk")
    if needed and space.free_bytes < needed:
        text = say("{text}, and a checkpoint of this run takes {size}", text=text, size=show_bytes(largest))
    failed = space.free_bytes < (largest if needed and space.free_bytes < needed else NO_BYTES)
    warning = space.free_bytes < max(needed, LITTLE_BYTES)
    found.grade("disk space", text, fix, failed=failed, warning=warning, **figures)
    with suppress(OSError, AttributeError):
        stats = os.statvfs(space.path)
        if stats.f_files and stats.f_favail < _FEW_INODES:
            text = say("only {count} more files can be created (inodes)", count=stats.f_favail)
            found.fail("files on disk", text, say("delete small files you do not need"), left=stats.f_favail)


def _largest_checkpoint(run: Path) -> int:
    sizes = [0]
    for folder in list((run / "checkpoints").glob("step-*"))[:10]:
        with suppress(OSError):
            sizes.append(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    return max(sizes)


def _locks(place: Path, found: Findings) -> None:
    """A run is locked while a process trains in it."""
    try:
        with (
            tempfile.NamedTemporaryFile(dir=place, prefix=_CONTAINER_PREFIX) as file,
            FileLock(Path(file.name)) as lock,
        ):
            supported = lock.supported
    except (OSError, ImportError) as error:
        found.skip("locks", say("not tried: {problem}", problem=in_one_line(error)))
        return
    if supported:
        found.ok("locks", say("this filesystem has them, so that two processes cannot train in one run"))
    else:
        text = say("this filesystem has none, so that two processes could train in one run and damage it")
        found.warn("locks", text, say("a --run on a local disk, or never start a run twice"))


def cache_checks() -> Findings:
    """Where plans are kept, and where temporary files go."""
    found = Findings("Folders")
    places = [
        ("cache folder", cache_folder().parent, "BRIMFUL_CACHE"),
        ("temporary folder", Path(tempfile.gettempdir()), "TMPDIR"),
    ]
    for name, path, variable in places:
        place = _existing(path)
        problem = _cannot_write(place) if place.is_dir() else os.strerror(errno.ENOTDIR)
        if problem:
            text = say("{path} cannot be written to ({problem})", path=str(path), problem=problem)
            fix = say("`export {variable}=DIR`, a folder you may write to", variable=variable)
            (found.warn if variable == "BRIMFUL_CACHE" else found.fail)(name, text, fix, path=str(path))
        else:
            found.ok(name, say("{path} is writable", path=str(path)), path=str(path))
    return found


# ---- Data ------------------------------------------------------------------------------------------------------------


def data_checks(data: str | None) -> tuple[Findings, list[Path]]:
    """Whether the rows are there; and the files whose reading can be timed, the largest first."""
    found = Findings("Folders")
    if data is None:
        found.skip("data", say("no --data PATH"))
        return found, []
    path = Path(data).expanduser()
    if not path.exists():
        if "/" in data and not data.startswith((".", "/", "~")) and data.count("/") == 1:
            found.skip("data", say("{path} is not here; is it a name on the hub?", path=data))
        else:
            found.fail("data", say("{path} does not exist", path=data), say("another --data"))
        return found, []
    files = _files(path)
    unreadable = [file for file in files if not os.access(file, os.R_OK)]
    if unreadable:
        text = say("{path} cannot be read", path=str(unreadable[0]))
        found.fail("data", text, say("`sudo chmod -R a+rX {path}`", path=str(path)))
        return found, []
    total = sum(file.stat().st_size for file in files)
    if not total:
        found.fail("data", say("{path} is empty", path=data), say("another --data"))
        return found, []
    text = say("{path}: {size}, {count} files", path=data, size=show_bytes(total), count=len(files))
    if len(files) == 1:
        text = say("{path}: {size}", path=data, size=show_bytes(total))
    found.ok("data", text, bytes=total, files=len(files))
    return found, sorted(files, key=lambda file: -file.stat().st_size)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = []
    for file in path.rglob("*"):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            files.append(file)
        if len(files) >= _MOST_FILES:
            break
    return files


# ---- Speed -----------------------------------------------------------------------------------------------------------


def speed_checks(run: Path, files: Sequence[Path]) -> Findings:
    """The disks of the data and of the run's folder."""
    found = Findings("Folders")
    if files:
        _data_speed(read_speed(files), found)
    place = _existing(run)
    space = Space.of(place)
    if not place.is_dir() or _cannot_write(place):
        return found
    if space is not None and space.free_bytes < NO_BYTES:
        found.skip("run folder speed", say("too little space to try it"))
        return found
    try:
        write, read = write_and_read_speed(place)
    except OSError as error:
        found.skip("run folder speed", say("not tried: {problem}", problem=in_one_line(error)))
        return found
    text = say("writes {write}, reads {read}", write=f"{show_bytes(write.bytes_per_s)}/s", read=read.phrase)
    figures = {"write_bytes_per_s": write.bytes_per_s, "read_bytes_per_s": read.bytes_per_s, "direct": write.direct}
    if write.bytes_per_s < SLOW_WRITE:
        seconds = show_seconds(GiB / write.bytes_per_s)
        text = say("{text}; a checkpoint takes {time} per GiB", text=text, time=seconds)
        found.warn("run folder speed", text, say("a --run on a faster disk, or a higher --save-every"), **figures)
    else:
        found.ok("run folder speed", text, **figures)
    return found


def _data_speed(speed: Speed | None, found: Findings) -> None:
    if speed is None:
        found.skip("data speed", say("too little data to time"))
        return
    text = say("reads {speed}", speed=speed.phrase)
    figures = {"bytes_per_s": speed.bytes_per_s, "seek_s": speed.seek_s, "direct": speed.direct}
    slow = speed.bytes_per_s < SLOW_READ or (speed.seek_s or 0) > SLOW_SEEK_S
    found.grade("data speed", text, say("copy the data to a local SSD"), failed=False, warning=slow, **figures)


def read_speed(files: Sequence[Path], limit_bytes: int = READ_BYTES, limit_s: float = READ_S) -> Speed | None:
    """Of these files, one after the other; None if they have less than a block."""
    buffer = mmap.mmap(-1, BLOCK_BYTES)  # aligned to a page, which O_DIRECT requires
    done, direct, started, seek_s = 0, True, time.perf_counter(), None
    for file in files:
        with suppress(OSError):
            descriptor, is_direct = _open_direct(file)
            try:
                direct = direct and is_direct
                done += _read(descriptor, buffer, limit_bytes - done, started + limit_s)
            finally:
                os.close(descriptor)
        if done >= limit_bytes or time.perf_counter() > started + limit_s:
            break
    seconds = time.perf_counter() - started
    if done < BLOCK_BYTES:
        return None
    if direct:
        with suppress(OSError):
            seek_s = _random_reads(files[0])
    return Speed(bytes_per_s=done / seconds, direct=direct, seek_s=seek_s)


def _open_direct(file: Path) -> tuple[int, bool]:
    flag = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(file, os.O_RDONLY | flag), bool(flag)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(file, os.O_RDONLY), False


def _read(descriptor: int, buffer: mmap.mmap, limit_bytes: int, deadline: float) -> int:
    done = 0
    while done < limit_bytes and time.perf_counter() < deadline:
        got = os.preadv(descriptor, [buffer], done)
        done += got
        if got < BLOCK_BYTES:
            break
    return done


def _random_reads(file: Path) -> float | None:
    """The median time of a few; None for a file so small that a disk keeps it in its own cache."""
    size = file.stat().st_size
    if size < 64 * MiB:
        return None
    descriptor, direct = _open_direct(file)
    buffer, times, rng = mmap.mmap(-1, SEEK_BYTES), list[float](), random.Random(0)
    try:
        deadline = time.perf_counter() + SEEK_S
        while direct and len(times) < SEEKS and time.perf_counter() < deadline:
            started = time.perf_counter()
            os.preadv(descriptor, [buffer], rng.randrange(size // SEEK_BYTES) * SEEK_BYTES)
            times.append(time.perf_counter() - started)
    finally:
        os.close(descriptor)
    return sorted(times)[len(times) // 2] if times else None


def write_and_read_speed(folder: Path, limit_bytes: int = WRITE_BYTES, limit_s: float = WRITE_S) -> tuple[Speed, Speed]:
    """Of a file without a name in this folder."""
    descriptor, direct = _unnamed(folder)
    try:
        buffer = mmap.mmap(-1, BLOCK_BYTES)
        buffer.write(random.Random(0).randbytes(BLOCK_BYTES))  # zeros could be compressed
        done, started = 0, time.perf_counter()
        while done < limit_bytes and time.perf_counter() < started + limit_s:
            done += os.pwrite(descriptor, buffer, done)
        os.fsync(descriptor)
        write_s = time.perf_counter() - started
        started = time.perf_counter()
        got = _read(descriptor, buffer, done, started + limit_s)
        read_s = time.perf_counter() - started
    finally:
        os.close(descriptor)
    return (
        Speed(bytes_per_s=done / max(write_s, 1e-9), direct=direct),
        Speed(bytes_per_s=got / max(read_s, 1e-9), direct=direct),
    )


def _unnamed(folder: Path) -> tuple[int, bool]:
    """A file that is removed before anything is written to it, opened around the page cache where that works."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=_CONTAINER_PREFIX)
    try:
        os.close(descriptor)
        flag = getattr(os, "O_DIRECT", 0)
        try:
            return os.open(name, os.O_RDWR | flag), bool(flag)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(name, os.O_RDWR), False
    finally:
        Path(name).unlink(missing_ok=True)
