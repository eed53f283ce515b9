"""Checkpoints that survive anything: a folder is complete or it is not there, and a flipped byte is found.

    RUN/checkpoints/
      step-00000200/              complete: written beside its place, synced, hashed, renamed (`Checkpoints._make_durable`)
        model/…  optimizer.pt  …    whatever the training wrote
        manifest.json               sizes and hashes of all that, written last
      best.json                   which step was best, and how good it was
      .step-00000400.part-PID     what a killed save left: never read, removed by `clean`
      .step-00000400.gone-PID     what a killed removal left: the same
      .step-00000400.aside        the former checkpoint of a step that is saved again, until the new one is in its place

Killed at any moment, a save leaves nothing or all of it. If a step is saved again (a resumed run), the former checkpoint is
set aside under a name that `newest` knows too, so one of the two can be found at any moment. A removal renames first, so
that half a removed checkpoint is never taken for a complete one. Checkpoints are ordered by `serial`, not by step: a run
that went back to step 200 and saved step 250 continues from there, although a step 400 of its former course exists.

Only a hash finds a flipped byte: torch.load and safetensors load it without a word. `newest` reads everything, about a
second for 2.2 GB; removing old checkpoints, after every save, looks at sizes alone. Knows nothing about models and imports
no torch.
"""

import json
import logging
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from brimful.errors import BadCheckpoint, BadOption, InternalError, SaveFailed, in_one_line
from brimful.files import (
    block_hashes,
    damage,
    disk_full,
    json_sha256,
    parse_object,
    read_json,
    sync,
    sync_tree,
    write_atomic,
)
from brimful.machine.host import Host, Space
from brimful.units import KiB, show_bytes

MANIFEST, BEST = "manifest.json", "best.json"
VERSION = 1
"""Of the manifest; another one is refused."""
_MOST_THREADS = 8
"""They hash 12 GiB/s, which few disks can read."""
_NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.(part|gone|aside)(?:-\d+)?")

Kind = Literal["complete", "part", "gone", "aside"]
log = logging.getLogger("brimful")


class Checkpoints:
    """The checkpoints in one folder. It belongs to one process at a time, which the run's lock ensures."""

    def __init__(self, folder: Path, *, keep: int = 2, note: Callable[[str], object] = log.warning) -> None:
        if keep < 1:
            raise BadOption(f"keep={keep} must be at least 1.")
        self.folder, self.keep = folder, keep
        self._note = note
        self._noted: set[str] = set()
        self._damaged: set[int] = set()
        """Serials of those with the right sizes and wrong contents."""
        self._unwritten_best: Best | None = None

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return _Entry.of(self.folder, step).path

    def save(
        self, step: int, write: Callable[[Path], object], *, needs_bytes: int, facts: Mapping[str, Any] | None = None
    ) -> "Checkpoint":
        """On the disk and complete when this returns; otherwise `SaveFailed`, and earlier checkpoints are untouched.

        `write` fills an empty folder; the name `manifest.json` in it is taken. `needs_bytes` is a prediction, compared with
        what is free before anything is written.
        """
        space = Space.around(self.folder)
        if space is not None and needs_bytes + _margin_bytes(needs_bytes) > space.free_bytes:
            raise self._no_space(step, "there is too little space on the disk", needs_bytes)
        part = _Entry.of(self.folder, step, "part")
        try:
            self._make_empty(part)
            write(part.path)
            manifest = self._make_durable(part, facts or {})
        except BaseException as error:
            self._remove(part)
            if isinstance(error, Exception):
                raise self._failure(error, step, needs_bytes) from error
            raise
        self.rotate()
        return Checkpoint(path=self.path(step), manifest=manifest)

    def _make_durable(self, part: "_Entry", facts: Mapping[str, Any]) -> "Manifest":
        """Here a checkpoint becomes durable: synced, hashed, given its manifest, and only then renamed into place."""
        serial = 1 + max((checkpoint.manifest.serial for checkpoint in self._list_checkpoints()[0]), default=0)
        sync_tree(part.path)
        manifest = Manifest.write(part.path, step=part.step, serial=serial, facts=facts)
        complete, aside = part.renamed("complete").path, part.renamed("aside")
        if complete.exists():
            self._remove(aside)
            complete.rename(aside.path)
        try:
            part.path.rename(complete)
        except BaseException:
            if aside.path.exists() and not complete.exists():
                aside.path.rename(complete)
            raise
        sync(self.folder)
        self._remove(aside)
        return manifest

    def newest(self) -> "Newest":
        """The last one saved whose sizes and hashes are right, and those that had to be skipped."""
        checkpoints, unknown = self._list_checkpoints()
        skipped: list[Skipped] = []
        intact: Checkpoint | None = None
        for checkpoint in checkpoints:
            try:
                checkpoint.check(contents=True)
            except BadCheckpoint as error:
                self._damaged.add(checkpoint.manifest.serial)
                skipped.append(Skipped(path=checkpoint.path, step=checkpoint.step, why=str(error)))
            else:
                intact, unknown = checkpoint, [other for other in unknown if other.step >= checkpoint.step]
                break
        skipped = sorted([*skipped, *unknown], key=lambda checkpoint: checkpoint.step, reverse=True)
        return Newest(checkpoint=intact, skipped=tuple(skipped))

    def mark_best(self, best: "Best") -> None:
        """It is not removed until another one is marked. Never raises: a failure is noted, and tried again."""
        self._unwritten_best = best
        self._write_best()

    def best(self) -> "Best | None":
        """The one marked last; None if there is none or best.json is damaged, which is noted."""
        return self._unwritten_best or Best.read(self.folder, self._note_once)

    def clean(self) -> list[Path]:
        """Before a run: remove what killed saves and removals left, and restore what was set aside."""
        leftovers = [
            entry for entry in _Entry.list(self.folder) if entry.kind != "complete" and not self._restore_aside(entry)
        ]
        for entry in leftovers:
            self._remove(entry)
        return [entry.path for entry in leftovers]

    def rotate(self) -> None:
        """Remove checkpoints older than the newest `keep` complete ones, except the best. Never raises."""
        self._write_best()
        try:
            checkpoints, _ = self._list_checkpoints()
        except BadCheckpoint as error:
            self._note_once(f"old checkpoints were not removed: {error}")
            return
        # Not those set aside.
        named = [checkpoint for checkpoint in checkpoints if checkpoint.path == self.path(checkpoint.step)]
        kept = [checkpoint for checkpoint in named if self._looks_complete(checkpoint)][: self.keep]
        best = self.best()
        for checkpoint in named if len(kept) == self.keep else ():
            is_best = best is not None and checkpoint.step == best.step
            if checkpoint.manifest.serial < kept[-1].manifest.serial and not is_best:
                self._remove(_Entry.of(self.folder, checkpoint.step))

    def check_space(self, needs_bytes: int, *, saves: int | None = None) -> None:
        """Before a run: is there space for those to keep, the best and the one being written, or for `saves` of them?"""
        saves = saves or self.keep + 2
        existing_bytes = sum(checkpoint.size_bytes for checkpoint in self._list_checkpoints()[0])
        space, all_bytes = Space.around(self.folder), saves * (needs_bytes + _margin_bytes(needs_bytes))
        if space is not None and all_bytes > space.free_bytes + existing_bytes:
            raise SaveFailed(
                f"{saves} checkpoints of {show_bytes(needs_bytes)} (predicted) need {show_bytes(all_bytes - existing_bytes)} more "
                f"in {self.folder}, and {show_bytes(space.free_bytes)} is free. Try: free some space, a lower keep=, or another run=."
            )

    def _failure(self, error: Exception, step: int, needs_bytes: int) -> SaveFailed:
        if cause := disk_full(error):
            return self._no_space(step, cause, needs_bytes)
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else in_one_line(error).removesuffix(": ")
        )
        advice = " Try: make the folder writable, or another run=." if isinstance(error, OSError) else ""
        return SaveFailed(f"the checkpoint of step {step} could not be written to {self.folder}: {reason}.{advice}")

    def _no_space(self, step: int, cause: str, needs_bytes: int) -> SaveFailed:
        space = Space.around(self.folder)
        return SaveFailed(
            f"the checkpoint of step {step} could not be written to {self.folder}: {cause} ({show_bytes(needs_bytes)} needed, "
            f"{show_bytes(space.free_bytes if space else None)} free). Try: free some space, a lower keep=, or another run=."
        )

    def _write_best(self) -> None:
        try:
            if self._unwritten_best is not None:
                self._unwritten_best.write(self.folder)
            self._unwritten_best = None
        except OSError as error:
            self._note_once(f"{BEST} could not be written ({error.strerror}); the next save tries again")

    def _note_once(self, message: str) -> None:
        """What cannot be removed today cannot be removed after the next save either."""
        if message not in self._noted:
            self._noted.add(message)
            self._note(message)

    def _make_empty(self, part: "_Entry") -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            sync(self.folder.parent)
        if part.path.exists():
            shutil.rmtree(part.path)
        part.path.mkdir()

    def _remove(self, entry: "_Entry") -> None:
        """Under its name it is there or not, never half. A failure is noted, and the next `clean` tries again."""
        gone = entry if entry.kind in ("part", "gone") else entry.renamed("gone")
        try:
            if gone is not entry and entry.path.exists():
                shutil.rmtree(gone.path, ignore_errors=True)
                entry.path.rename(gone.path)
            if gone.path.exists():
                shutil.rmtree(gone.path)
        except OSError as error:
            self._note_once(f"{entry.path} could not be removed ({error.strerror or error}) and still takes up space")

    def _restore_aside(self, entry: "_Entry") -> bool:
        """Bring back what a killed save had set aside; False if the new checkpoint has its name already."""
        if entry.kind != "aside":
            return False
        complete = entry.renamed("complete").path
        try:
            if complete.exists():
                Checkpoint.read(complete).check(contents=False)
                return False
            entry.path.rename(complete)
        except (BadCheckpoint, OSError) as error:
            self._note_once(f"{entry.path} keeps this name: {error}")
        return True

    def _looks_complete(self, checkpoint: "Checkpoint") -> bool:
        try:
            checkpoint.check(contents=False)
        except BadCheckpoint:
            return False
        return checkpoint.manifest.serial not in self._damaged

    def _list_checkpoints(self) -> "tuple[list[Checkpoint], list[Skipped]]":
        """Those with a manifest, the last saved first; and those without."""
        checkpoints, unknown = [], []
        for entry in _Entry.list(self.folder):
            try:
                if entry.kind != "gone":
                    checkpoints.append(entry.checkpoint())
            except BadCheckpoint as error:
                unknown.append(Skipped(path=entry.path, step=entry.step, why=str(error)))
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.manifest.serial, reverse=True), unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder with a manifest. One that came from `Checkpoints.newest` is verified."""

    path: Path
    manifest: "Manifest"

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Its manifest alone; `check` looks at the files."""
        return cls(path=path, manifest=Manifest.read(path))

    def check(self, *, contents: bool, below: str = "") -> None:
        """Sizes, which costs nothing, or every byte, of the files below a folder; raises `BadCheckpoint`.

        What lies beside its files under a visible name must be its own too: a resume would read weights put there.
        """
        own, threads = {MANIFEST, *(file.name for file in self.manifest.files)}, _threads() if contents else 1
        for file in (file for file in self.manifest.files if file.name.startswith(below)):
            hashes = file.sha256 if contents else None
            if problem := damage(self.path, file.name, file.size_bytes, hashes, threads=threads):
                raise BadCheckpoint(problem)
        for path in sorted(self.path.iterdir()):
            if path.is_file() and path.name not in own and not path.name.startswith("."):
                raise BadCheckpoint(f"{path.name} was added after it was written")

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
    """A checkpoint that cannot be used."""

    path: Path
    step: int
    why: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest intact checkpoint, and the newer ones that are not."""

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...] = ()
    """Damaged or never finished, the newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """best.json: the best checkpoint of a run. The training decides what better means."""

    step: int
    metric: str
    """What was compared, such as `loss` or `bleu`."""
    score: float
    """Higher is better: a loss counts as its negative."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.score):
            raise InternalError(f"step {self.step} cannot be the best with {self.metric} {self.score}")

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / BEST, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path, note: Callable[[str], object]) -> "Best | None":
        try:
            return parse_object(cls, read_json((folder / BEST).read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, InternalError) as error:
            note(
                f"{folder / BEST} cannot be read ({type(error).__name__}), so no step counts as the best until the next one"
            )
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """One file of a checkpoint as it was written."""

    name: str
    """Relative to the checkpoint, with `/`: `model/config.json`."""
    size_bytes: int
    sha256: tuple[str, ...]
    """Of each 64 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """manifest.json. A folder without one was never finished; it carries its own hash, so that it can be trusted."""

    step: int
    serial: int
    """Counts the saves of this run, from 1."""
    created: str
    """UTC, for people; nothing is decided by a clock."""
    files: tuple[ManifestFile, ...]
    facts: dict[str, Any]
    """What the training adds: plain JSON."""
    version: int = VERSION

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @classmethod
    def write(cls, folder: Path, *, step: int, serial: int, facts: Mapping[str, Any]) -> "Manifest":
        """Hash every file below the folder and write the manifest beside them; on the disk when this returns."""
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        hashes = block_hashes([folder / name for name in names], threads=_threads())
        files = tuple(
            ManifestFile(name=name, size_bytes=(folder / name).stat().st_size, sha256=sha256)
            for name, sha256 in zip(names, hashes, strict=True)
        )
        created = datetime.now(UTC).isoformat(timespec="seconds")
        plain = json.loads(json.dumps(dict(facts)))  # as it will be read: a key 2 comes back, and is hashed, as "2"
        manifest = cls(step=step, serial=serial, created=created, files=files, facts=plain)
        content = asdict(manifest)
        write_atomic(folder / MANIFEST, json.dumps({"sha256": json_sha256(content), **content}, indent=1) + "\n")
        return manifest

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """What a folder says it is; its files are not looked at."""
        try:
            if stat.S_ISFIFO((folder / MANIFEST).stat().st_mode):  # reading it would wait forever
                raise OSError("a pipe")
            content = read_json((folder / MANIFEST).read_bytes())
            version = content.get("version")
        except FileNotFoundError:
            why = f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
            raise BadCheckpoint(why) from None
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"its {MANIFEST} cannot be read ({type(error).__name__})") from None
        if version != VERSION:
            raise BadCheckpoint(f"its {MANIFEST} has version {version!r}, and this Brimful reads version {VERSION}")
        hash_before = content.pop("sha256", None)
        if hash_before != json_sha256(content):
            raise BadCheckpoint(f"its {MANIFEST} was changed after it was written: its checksum differs")
        try:
            return parse_object(cls, content)
        except ValueError as error:
            raise BadCheckpoint(f"its {MANIFEST} cannot be read ({error})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One name in the folder of checkpoints, of one of four kinds; other names are not ours."""

    folder: Path
    step: int
    kind: Kind = "complete"
    name: str

    @classmethod
    def of(cls, folder: Path, step: int, kind: Kind = "complete") -> "_Entry":
        """The name this process gives to it."""
        suffix = {"complete": "", "aside": ".aside"}.get(kind, f".{kind}-{os.getpid()}")
        return cls(folder=folder, step=step, kind=kind, name=f"{'.' if suffix else ''}step-{step:08}{suffix}")

    @classmethod
    def list(cls, folder: Path) -> "list[_Entry]":
        """All that exist, by name."""
        try:
            names = sorted(path.name for path in folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadCheckpoint(f"{folder} cannot be read ({error.strerror}). Try: another run=.") from None
        entries = []
        for name in names:
            if match := _NAME.fullmatch(name):
                kind = cast("Kind", match[3] or "complete")
                entries.append(cls(folder=folder, step=int(match[1] or match[2]), kind=kind, name=name))
        return entries

    def renamed(self, kind: Kind) -> "_Entry":
        """The same step under the name of another kind."""
        return _Entry.of(self.folder, self.step, kind)

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def checkpoint(self) -> Checkpoint:
        """What it says it is, if its name agrees."""
        if self.kind == "part":
            raise BadCheckpoint("its save was interrupted")
        checkpoint = Checkpoint.read(self.path)
        if checkpoint.step != self.step:
            raise BadCheckpoint(f"its name says step {self.step} and its manifest step {checkpoint.step}")
        return checkpoint


def link(name: Path, target: Path, *, note: Callable[[str], object]) -> bool:
    """Point a symlink at `target`: relative, so that a run can be moved, and replaced by a rename. False if impossible.

    Links are a convenience: on a filesystem without symlinks (FAT, some shares) that is noted, no more.
    """
    draft = name.with_name(f".{name.name}.part")
    try:
        draft.unlink(missing_ok=True)
        draft.symlink_to(os.path.relpath(target, name.parent))
        draft.replace(name)
        sync(name.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        note(f"{name} could not be linked to {target} ({error.strerror}). Try: use the path of the checkpoint itself")
        return False
    return True


def _margin_bytes(needs_bytes: int) -> int:
    """For the manifest, folders and rounding to whole blocks: 2 % and 64 KiB."""
    return needs_bytes // 50 + 64 * KiB


def _threads() -> int:
    return min(_MOST_THREADS, Host.detect().cores)
