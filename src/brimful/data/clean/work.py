"""The work folder `DIR/.clean`: everything is made in there, and only whole files leave it.

One clean at a time holds its lock. A key over inputs and options says whose work it is: a clean with the same key goes
on, one with another starts over. At the end the outputs are forced to disk, a list of them is written, and they are moved
next to each other, the report last; a clean that was killed in between finds the list and moves the rest.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from brimful.errors import BadOption

FOLDER = ".clean"
REPORT = "clean.json"
SPLITS = ("train", "valid", "test")
_FORMAT = 1
"""Of the work folder: the work of another version is not gone on with."""


def forced(*paths: Path) -> None:
    """Wait until they are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """A file that has either its old content or the new one."""
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    forced(draft)
    draft.replace(path)


class Work:
    """The work folder of one output folder, locked."""

    def __init__(self, output: Path) -> None:
        self.output, self.folder = output, output / FOLDER
        self.segments = self.folder / "segments"
        self.drafts = self.folder / "out"
        self.duckdb = self.folder / "duckdb"
        self._list = self.folder / "publish.json"
        self._key = self.folder / "key.json"

    def is_for(self, key: dict[str, Any]) -> bool:
        """Whether the work in there is this key's."""
        return self._key.exists() and self._key.read_text() == _digest(key)

    def start(self, key: dict[str, Any]) -> bool:
        """Make the folder this key's. True where there was other work, which is gone now."""
        others = self._key.exists()
        self._key.unlink(missing_ok=True)
        self.clear()
        replace_text(self._key, _digest(key))
        return others

    def clear(self) -> None:
        """Everything but the lock and the key."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("lock", self._key.name):
                path.unlink()

    def existing(self) -> list[str]:
        """Outputs that are there already."""
        names = [f"{split}.parquet" for split in SPLITS] + [REPORT]
        return [name for name in names if (self.output / name).exists()]

    def publishing(self, asked: dict[str, Any]) -> bool:
        """Whether a clean that asked for the same files was killed while they were being moved."""
        return self._list.exists() and _read(self._list)["asked"] == asked

    def publish(self, report: dict[str, Any], asked: dict[str, Any]) -> None:
        """The outputs are whole: move them, the report last, and remove the work folder."""
        forced(*self.drafts.iterdir(), self.drafts)
        replace_text(self._list, json.dumps({"asked": asked, "report": report}))
        self.finish()

    def finish(self) -> dict[str, Any]:
        """Move what is listed and not yet moved. An older output that the new ones do not replace goes, too."""
        report: dict[str, Any] = _read(self._list)["report"]
        (self.output / REPORT).unlink(missing_ok=True)
        for split in SPLITS:
            draft, place = self.drafts / f"{split}.parquet", self.output / f"{split}.parquet"
            if draft.exists():
                draft.replace(place)
            elif split not in report["files"]:
                place.unlink(missing_ok=True)
        replace_text(self.drafts / REPORT, json.dumps(report, indent=1) + "\n")
        forced(self.output)
        (self.drafts / REPORT).replace(self.output / REPORT)
        forced(self.output)
        shutil.rmtree(self.folder)
        return report

    def give_up(self) -> None:
        """Nothing worth going on with was done: leave no trace."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.output.rmdir()  # only if it is empty


@contextmanager
def locked(output: Path) -> Iterator[Work]:
    """The work folder, made if need be, for one command at a time. The lock ends with the process, however it ends."""
    work = Work(output)
    try:
        work.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(work.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise BadOption(f"--output {output}: {error.strerror}; give a folder that can be written to") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadOption(
                f"--output {output}: another clean is at work in there; wait for it, or give another folder"
            ) from None
        if not _same_file(handle, work.folder / "lock"):  # the other has just finished and removed its folder
            raise BadOption(f"--output {output}: another clean has just finished there")
        yield work
    finally:
        os.close(handle)


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
