"""Room on a filesystem: the run folder's disk, and /dev/shm, through which loader workers pass tensors."""

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """How large a filesystem is and what this user may still write to it; quotas are not seen."""

    path: str
    """The folder that was asked about, or its nearest parent that exists."""
    total_bytes: int
    """The size of the filesystem."""
    free_bytes: int
    """What is free for this user, the administrator's reserve left out."""

    @classmethod
    def of(cls, path: Path | str) -> "Space | None":
        """The filesystem of an existing path; None where it does not exist or may not be looked at."""
        try:
            usage = shutil.disk_usage(path)
        except OSError:
            return None
        return cls(path=str(path), total_bytes=usage.total, free_bytes=usage.free)

    @classmethod
    def around(cls, path: Path | str) -> "Space | None":
        """The filesystem a path is on, or will be on once it is made."""
        place = Path(path).expanduser().absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        return cls.of(place)
