"""One limit on memory, and the limits a shell sets: `ulimit`.

Limits come from several places (the machine, every cgroup level, `ulimit`) and all hold at once. Each becomes a
`Bound`; the tightest total and the tightest remainder are then two plain `min`s, and need not be the same bound.
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Something that limits memory, and how far it is used up."""

    name: str
    """As the user would find it: `cgroup v2 memory.max of /system.slice/x`, `ulimit -v`, `physical memory`."""
    limit_bytes: int
    """What it allows altogether."""
    used_bytes: int
    """What already counts against it, less what the kernel would give back at once."""

    @property
    def left_bytes(self) -> int:
        """What can still be had; 0 where the limit was lowered below what is in use."""
        return max(0, self.limit_bytes - self.used_bytes)


def ulimit(name: str) -> int | None:
    """The soft limit `RLIMIT_<name>`; None where there is none, or no such thing on this system."""
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
    """`ulimit -v` and `ulimit -d`, on Linux: macOS accepts them and does not enforce them.

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
