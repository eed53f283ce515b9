"""One checkpoint as it was found: where it is, what its manifest says, and whether that is still true."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.train.checkpoint.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder with a manifest. Whoever got it from `Checkpoints` has a verified one."""

    path: Path
    manifest: Manifest

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Its manifest alone; `check` looks at the files."""
        return cls(path=path, manifest=Manifest.read(path))

    def check(self, *, contents: bool) -> None:
        """Sizes, which costs nothing, or every byte; raises `BadCheckpoint`."""
        self.manifest.check(self.path, contents=contents)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def facts(self) -> dict[str, Any]:
        """What was given to `save`."""
        return self.manifest.facts

    @property
    def size_bytes(self) -> int:
        return self.manifest.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """One that cannot be used, and why."""

    path: Path
    step: int
    why: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest whole checkpoint, and what was passed over on the way to it."""

    checkpoint: Checkpoint | None
    """None where there is no whole one."""
    skipped: tuple[Skipped, ...] = ()
    """Newer ones that are damaged or were never finished, the newest first."""
