"""What lies in the folder of checkpoints, told by names alone: four kinds, and everything else is not ours.

whole   `step-00000200`            a finished save
part    `.step-00000200.part-PID`  a save on its way, or killed on it
gone    `.step-00000200.gone-PID`  a removal on its way, or killed on it
aside   `.step-00000200.aside`     a whole one whose step is saved again, until the new one has its name
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from brimful.errors import BadCheckpoint

Kind = Literal["whole", "part", "gone", "aside"]
_NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.(part|gone|aside)(?:-\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name in the folder; whether there is something of that name is another matter."""

    folder: Path
    step: int
    kind: Kind = "whole"
    name: str

    @classmethod
    def of(cls, folder: Path, step: int, kind: Kind = "whole") -> "Entry":
        """The name this process gives to such a thing."""
        suffix = {"whole": "", "aside": ".aside"}.get(kind, f".{kind}-{os.getpid()}")
        return cls(folder=folder, step=step, kind=kind, name=f"{'.' if suffix else ''}step-{step:08}{suffix}")

    @classmethod
    def list(cls, folder: Path) -> "list[Entry]":
        """All that are there, by name."""
        try:
            names = sorted(path.name for path in folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadCheckpoint(f"{folder} cannot be read ({error.strerror}); name another --run") from None
        return [entry for name in names if (entry := cls._parse(folder, name))]

    @classmethod
    def _parse(cls, folder: Path, name: str) -> "Entry | None":
        if (match := _NAME.fullmatch(name)) is None:
            return None
        kind = cast("Kind", match[3] or "whole")
        return cls(folder=folder, step=int(match[1] or match[2]), kind=kind, name=name)

    def as_(self, kind: Kind) -> "Entry":
        """The same step under the name of another kind."""
        return Entry.of(self.folder, self.step, kind)

    @property
    def path(self) -> Path:
        return self.folder / self.name
