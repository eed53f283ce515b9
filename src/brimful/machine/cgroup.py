"""What limits this process besides the machine itself: control groups (v2, v1 and both mixed) and `ulimit`.

In a container, /proc/meminfo and the core count are those of the host, but the kernel kills at the limit of the *group*:
a program that sizes its workers by meminfo in a 16 GiB pod on a 1 TiB host dies without an exception. A limit may be set
at any level, so every level is read, from the group of this process up to the highest visible one. /proc/self/mountinfo
tells where the files are, since it also says which part of the tree is mounted: in a container the process may be in
`/docker/4f2…` while that very folder is mounted as the top.

All limits hold at once. Each becomes a `Bound`; the tightest total and the tightest remainder are then two plain `min`s,
and need not be the same bound.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60
"""v1 writes "no limit" as the largest number of whole pages, just under 2⁶³. No machine has an exbibyte."""

_USUAL_MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""Where systemd and Docker mount cgroup v2 (alone, or beside v1), for systems that hide mountinfo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A limit on memory, and how much of it is used."""

    name: str
    """As a user can look it up: `cgroup v2 memory.max of /system.slice/x`, `ulimit -v`, `physical memory`."""
    limit_bytes: int
    """What it allows in all."""
    used_bytes: int
    """What counts against it already, less what the kernel would free at once."""

    @property
    def left_bytes(self) -> int:
        """What is left; 0 if the limit was lowered below what is in use."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One group of the hierarchy, and its files."""

    folder: Path
    """Where its files are."""
    group: str
    """The group as seen from here: `/system.slice/x`, or `/` for the highest one visible."""
    version: int
    """1 or 2: they name their files differently."""

    def read(self, file: str) -> str | None:
        """The text of a file; None if the controller is off or the kernel does not have that file."""
        return _read(self.folder / file)

    def number(self, file: str) -> int | None:
        """A limit or a count; None for `max`, -1, v1's huge number, or no such file."""
        text = self.read(file)
        if text is None or not text.strip().isdigit():
            return None
        return value if (value := int(text)) < _UNLIMITED else None

    def name(self, file: str) -> str:
        """`cgroup v2 memory.max of /system.slice/x`."""
        return f"cgroup v{self.version} {file}" + (f" of {self.group}" if self.group != "/" else "")


def levels(controller: str, root: Path = Path("/")) -> Iterator[Level]:
    """The groups that govern this process's `memory` or `cpu`, from its own up to the highest visible one."""
    groups, mounts = _own_groups(root), _mounts(root)
    version = 1 if controller in groups and controller in mounts else 2  # a controller belongs to one version at a time
    key = controller if version == 1 else ""
    if key not in groups or key not in mounts:
        return
    top, mounted = mounts[key]
    parts = _below(groups[key], mounted)
    for depth in range(len(parts), -1, -1):
        folder = top.joinpath(*parts[:depth])
        if folder.is_dir():
            yield Level(folder=folder, group="/" + "/".join(parts[:depth]), version=version)


def memory_bounds(root: Path = Path("/")) -> list[Bound]:
    """Every limit on RAM. `memory.high` counts as one: beyond it the kernel nearly stops the process to reclaim."""
    return [
        Bound(name=level.name(file), limit_bytes=limit, used_bytes=_used(level))
        for level in levels("memory", root)
        for file in (("memory.max", "memory.high") if level.version == 2 else ("memory.limit_in_bytes",))
        if (limit := level.number(file)) is not None
    ]


def swap_bounds(root: Path = Path("/")) -> list[Bound]:
    """Every limit on swap. v1 limits RAM and swap together, so its limit on swap is a difference."""
    bounds = []
    for level in levels("memory", root):
        if level.version == 2:
            file, limit, used = "memory.swap.max", level.number("memory.swap.max"), level.number("memory.swap.current")
        else:
            file = "memory.memsw.limit_in_bytes"
            limit = _difference(level, file, "memory.limit_in_bytes")
            used = _difference(level, "memory.memsw.usage_in_bytes", "memory.usage_in_bytes")
        if limit is not None:
            bounds.append(Bound(name=level.name(file), limit_bytes=limit, used_bytes=used or 0))
    return bounds


def cpu_quotas(root: Path = Path("/")) -> list[tuple[float, str]]:
    """Every quota on CPU time, in cores (2.5 is 250 ms of every 100 ms), with its name."""
    quotas = []
    for level in levels("cpu", root):
        if level.version == 2:
            file, words = "cpu.max", (level.read("cpu.max") or "").split()
        else:
            file = "cpu.cfs_quota_us"
            words = [(level.read(name) or "").strip() for name in (file, "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            quotas.append((int(words[0]) / int(words[1]), level.name(file)))
    return quotas


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed for memory in this group, or else on the machine; None if unknown."""
    texts = [level.read(file) for level in levels("memory", root) for file in ("memory.events", "memory.oom_control")]
    lines = [line.split() for text in (*texts, _read(root / "proc/vmstat")) if text for line in text.splitlines()]
    return next((int(words[1]) for words in lines if words[0] == "oom_kill"), None)


def ulimit(name: str) -> int | None:
    """The soft limit `RLIMIT_<name>`; None if there is none or this system does not have it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    number = getattr(resource, f"RLIMIT_{name}", None)
    if number is None:
        return None
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def memory_ulimits() -> list[Bound]:
    """`ulimit -v` and `ulimit -d`, on Linux: macOS accepts them but does not enforce them.

    Both count address space, not pages: what torch has mapped and never touched counts as used.
    """
    limits = {"ulimit -v": (ulimit("AS"), "vms"), "ulimit -d": (ulimit("DATA"), "data")}
    if sys.platform != "linux" or not any(limit is not None for limit, _ in limits.values()):
        return []
    import psutil

    used = psutil.Process().memory_info()
    return [
        Bound(name=name, limit_bytes=limit, used_bytes=getattr(used, field))
        for name, (limit, field) in limits.items()
        if limit is not None
    ]


def _used(level: Level) -> int:
    """What the group holds, less inactive page cache, which the kernel drops before it kills (Kubernetes' convention).

    v1's plain `inactive_file` is of this group alone while its usage counts the groups below too: `total_` goes first.
    """
    current = level.number("memory.current" if level.version == 2 else "memory.usage_in_bytes") or 0
    stat = dict(line.split() for line in (level.read("memory.stat") or "").splitlines() if len(line.split()) == 2)
    return max(0, current - int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))


def _difference(level: Level, larger: str, smaller: str) -> int | None:
    first, second = level.number(larger), level.number(smaller)
    return None if first is None or second is None else max(0, first - second)


def _own_groups(root: Path) -> dict[str, str]:
    """This process's group by controller, from lines like `4:cpu,cpuacct:/a/b`; v2 is `0::/a/b`, under ""."""
    groups = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), group))
    return groups


def _mounts(root: Path) -> dict[str, tuple[Path, str]]:
    """By controller (v2 under ""): where its tree is mounted, and which group is the top of that mount."""
    mounts: dict[str, tuple[Path, str]] = {}
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        place, _, kind = line.partition(" - ")
        _, _, _, mounted, point, *_ = place.split()
        filesystem, _, options = [*kind.split(), "", ""][:3]
        if filesystem.startswith("cgroup"):
            for key in [""] if filesystem == "cgroup2" else options.split(","):
                mounts.setdefault(key, (root / point.lstrip("/"), mounted))
    return mounts or _usual_mounts(root)


def _usual_mounts(root: Path) -> dict[str, tuple[Path, str]]:
    mounts = {}
    for point in (root / place.lstrip("/") for place in _USUAL_MOUNTS):
        if (point / "cgroup.controllers").exists():
            mounts[""] = (point, "/")
    for controller in ("memory", "cpu"):
        if (point := root / "sys/fs/cgroup" / controller).is_dir():
            mounts[controller] = (point, "/")
    return mounts


def _below(group: str, mounted: str) -> tuple[str, ...]:
    """The path of the group below the mounted one; the top of the mount if it is not below it, as in a namespace."""
    path = Path(group)
    if ".." in path.parts or not path.is_relative_to(mounted):
        return ()
    return path.relative_to(mounted).parts


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
