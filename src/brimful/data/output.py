"""An output folder that appears whole or not at all, and replaces only a folder of its own kind."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from brimful.errors import BadData, BadOption
from brimful.files import disk_full, sync


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFolder:
    """The output of a command. It is filled beside its place and renamed when all is written."""

    path: Path
    kind: str
    """In messages: `token store`."""
    marker: str
    """The file that such a folder has: `store.json`."""
    overwrite: bool

    def check(self) -> None:
        """Refuse an existing output unless it is an empty folder, or of this kind and may be replaced."""
        path = self.path
        if not (path.exists() or path.is_symlink()) or (path.is_dir() and not any(path.iterdir())):
            return
        if not (path / self.marker).is_file():
            what = f"folder that is not a {self.kind}" if path.is_dir() else "file"
            raise BadOption(f"output='{path}' is an existing {what}. Try: the name of a new folder.")
        if not self.overwrite:
            raise BadOption(f"output='{path}' is an existing {self.kind}. Try: another folder, or overwrite=True.")

    def publish(self, part: Path) -> None:
        """Rename the finished folder to the output. An old one is removed afterwards, and restored if the rename fails."""
        self.check()
        old = self.path.with_name(f".{self.path.name}.old")
        self._remove(old)  # left by a process that was killed right here
        if (self.path / self.marker).is_file():
            self.path.rename(old)
        try:
            part.rename(self.path)
        except BaseException:
            if old.exists():
                old.rename(self.path)
            raise
        self._remove(old)
        sync(self.path.parent)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the system's errors while writing into one sentence."""
        try:
            yield
        except OSError as error:
            if why := disk_full(error):
                raise BadData(f"{self.path}: {why}. Try: free some space and run the same command again.") from None
            place = Path(str(error.filename or self.path))
            advice = " Try: another output=." if place.is_relative_to(self.path.parent) else ""
            raise BadData(f"{place}: {error.strerror or error}.{advice}") from None

    def _remove(self, folder: Path) -> None:
        if (folder / self.marker).is_file():
            shutil.rmtree(folder, ignore_errors=True)
