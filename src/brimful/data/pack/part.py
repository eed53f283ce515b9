"""The folder a pack is made in: `.OUTPUT.part` beside the output, locked, able to go on, renamed when all is done.

`progress.json` lists the files that are whole, with their checksums, and how far in the source they reach. A pack that
was killed goes on behind the last of them when source, tokenizer and options are the same, and gives the same store as
one that ran through.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from brimful.data.store.meta import NAME, FileFacts, check_files
from brimful.data.store.write import write_synced
from brimful.errors import BadData, BadOption

PROGRESS = "progress.json"


@dataclass(kw_only=True)
class Counts:
    """How far a pack has come, in rows and tokens; lists are per side."""

    chunks: int = 0
    rows_in: int = 0
    broken: int = 0
    empty: int = 0
    rows_out: int = 0
    cut: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    first_broken: list[Any] | None = None
    """File, line and reason of the first row that could not be read."""

    @property
    def dropped(self) -> dict[str, int]:
        return {"broken": self.broken, "empty": self.empty}

    def add_sides(self, **lists: list[int]) -> None:
        for name, values in lists.items():
            before = getattr(self, name) or [0] * len(values)
            setattr(self, name, [one + other for one, other in zip(before, values, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What an earlier pack left that can be used: nothing, where `files` is empty."""

    counts: Counts
    files: tuple[FileFacts, ...] = ()
    discarded: str = ""
    """Why what was there is of no use; empty where nothing was there."""


@contextmanager
def part_folder(output: Path) -> Iterator[Path]:
    """The folder, for one process at a time. Left behind on an error if there is something in it to go on with."""
    part = output.with_name(f".{output.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDONLY)
    try:
        _lock(descriptor, part, output)
        try:
            yield part
        except BaseException:
            if not (part / PROGRESS).exists():
                shutil.rmtree(part, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def begun(part: Path, key: dict[str, Any]) -> Begun:
    """What is in there from an earlier pack of the same rows; everything else in the folder is removed."""
    found = _read(part, key)
    whole = {one.name for one in found.files}
    for path in part.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in whole | ({PROGRESS} if whole else set()):
            path.unlink()
    return found


def save(part: Path, key: dict[str, Any], counts: Counts, files: list[FileFacts]) -> None:
    """After each whole file."""
    content = {"key": key, "counts": asdict(counts), "files": [asdict(one) for one in files]}
    write_synced(part / PROGRESS, json.dumps(content))


def check_output(output: Path, *, overwrite: bool) -> None:
    """An existing output is refused, or replaced if that was asked for and it is a token store."""
    if not output.exists() and not output.is_symlink():
        return
    if output.is_dir() and not any(output.iterdir()):
        return
    if not (output / NAME).is_file():
        kind = "folder that is not a token store" if output.is_dir() else "file"
        raise BadOption(f"--output {output} is an existing {kind}; name another folder")
    if not overwrite:
        raise BadOption(f"--output {output} is an existing token store; name another folder, or add --overwrite")


def publish(part: Path, output: Path, *, overwrite: bool) -> None:
    """Rename the finished folder to the output; an old store goes when the new one is in its place."""
    check_output(output, overwrite=overwrite)
    old = output.with_name(f".{output.name}.old")
    _remove_store(old)  # of a pack that was killed right here
    if (output / NAME).is_file():
        output.rename(old)
    part.rename(output)
    (output / PROGRESS).unlink(missing_ok=True)
    _remove_store(old)
    descriptor = os.open(output.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_store(folder: Path) -> None:
    if (folder / NAME).is_file():
        shutil.rmtree(folder, ignore_errors=True)


def _lock(descriptor: int, part: Path, output: Path) -> None:
    """Held until the descriptor is closed; the folder may have been renamed by its owner since it was opened."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.fstat(descriptor).st_ino == part.stat().st_ino
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT):
            raise
        same = False
    if not same:
        raise BadOption(f"--output {output}: another brimful data pack is writing there; wait for it, or name another")


def _read(part: Path, key: dict[str, Any]) -> Begun:
    path = part / PROGRESS
    if not path.is_file():
        return Begun(counts=Counts())
    try:
        content = json.loads(path.read_bytes())
        files = tuple(FileFacts.from_json(one) for one in content["files"])
        differ = [name for name in key if content["key"].get(name) != key[name]]
        if differ:
            return Begun(counts=Counts(), discarded=f"it was made with another {' and '.join(differ)}")
        check_files(part, files, contents=True)
        return Begun(counts=Counts(**content["counts"]), files=files)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Begun(counts=Counts(), discarded=f"its {PROGRESS} cannot be read")
    except BadData as error:
        return Begun(counts=Counts(), discarded=str(error).partition(";")[0])
