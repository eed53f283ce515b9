"""Checkpoints that survive anything: a folder is whole or it is not there, and a flipped byte is found.

    RUN/checkpoints/
      step-00000200/              whole: written beside its place, synced, hashed, renamed
        model/…  optimizer.pt  …    whatever the training wrote
        manifest.json               sizes and hashes of all that, written last (manifest.py, hashing.py)
      best.json                   which step was best, and how good it was (best.py)
      .step-00000400.part-PID     what a killed save left: never read, removed by `clean`
      .step-00000400.gone-PID     what a killed removal left: the same
      .step-00000400.aside        the former one of a step that is saved again, until the new one is in its place

    RUN/model, RUN/best           links into the above (links.py)

The package knows folders, files, hashes and disks (durable.py, room.py), and nothing about models; it needs no torch.
"""

import errno
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from brimful.errors import BadCheckpoint, BadOption, InternalError, SaveFailed, in_one_line
from brimful.files import sync, sync_tree, write_atomic
from brimful.machine.host import Space
from brimful.training.manifest import Manifest
from brimful.units import KiB, show_bytes

# One checkpoint as it was found: where it is, what its manifest says, and whether that is still true.


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


# `best.json`: which step was best so far, by which measure. One small file, replaced whole, so it is old or new.


NAME = "best.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best checkpoint of a run; the training decides what better means."""

    step: int
    metric: str
    """What was compared: `loss`, `bleu`."""
    score: float
    """Higher is better: a loss counts as its negative."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.score):
            raise InternalError(f"step {self.step} cannot be the best with {self.metric} {self.score}")

    def write(self, folder: Path) -> None:
        """On the disk when this returns."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / NAME, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path, tell: Callable[[str], object]) -> "Best | None":
        """None where nothing was marked yet, or where the mark is damaged, which is told."""
        try:
            content = json.loads((folder / NAME).read_bytes())
            return cls(step=int(content["step"]), metric=str(content["metric"]), score=float(content["score"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, InternalError) as error:
            tell(
                f"{folder / NAME} cannot be read ({type(error).__name__}), so no step counts as the best until the next"
            )
            return None


# What lies in the folder of checkpoints, told by names alone: four kinds, and everything else is not ours.
#
# whole   `step-00000200`            a finished save
# part    `.step-00000200.part-PID`  a save on its way, or killed on it
# gone    `.step-00000200.gone-PID`  a removal on its way, or killed on it
# aside   `.step-00000200.aside`     a whole one whose step is saved again, until the new one has its name


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


# Links with a fixed name to what changes: `RUN/model` is always the newest weights, `RUN/best` the best.
#
# Relative, so that a run folder can be moved or copied whole; replaced by a rename, so that a reader finds the old target
# or the new one. They are a convenience: where a filesystem has no symlinks (FAT, some shares), that is told, no more.


def point(link: Path, target: Path, *, tell: Callable[[str], object]) -> bool:
    """Make `link` lead to `target`; False where that was impossible, which was told."""
    draft = link.with_name(f".{link.name}.part")
    try:
        draft.unlink(missing_ok=True)
        draft.symlink_to(os.path.relpath(target, link.parent))
        draft.replace(link)
        sync(link.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        tell(f"{link} could not be pointed at {target} ({error.strerror}); use the path of the checkpoint itself")
        return False
    return True


# Room on the disk: refused before writing where it can be known, one sentence where it shows only at writing.
#
# A quota is seen by nobody until it is hit. At writing, a full disk shows in three ways, all seen on a real one: Python's
# OSError; safetensors' `I/O error: No space left on device (os error 28)`; and torch.save's `unexpected pos 640 vs 598`,
# which names no cause at all.


_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file grew beyond what the disk or `ulimit -f` allows",
}
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
_TORCH_SAYS = ("unexpected pos", "iostream error", "failed writing file")
_CUT_SHORT = "a file was cut short, as on a full disk or at a quota"
_SAFE = "what was saved before is untouched"


def margin_bytes(needs_bytes: int) -> int:
    """For the manifest, folders and rounding to whole blocks: 2 % and 64 KiB."""
    return needs_bytes // 50 + 64 * KiB


def check_one(folder: Path, step: int, needs_bytes: int) -> None:
    """Before a save: is there room for it?"""
    space = Space.around(folder)
    if space is not None and needs_bytes + margin_bytes(needs_bytes) > space.free_bytes:
        raise _no_room(folder, step, "too little room on the disk", needs_bytes, space)


def check_all(folder: Path, needs_bytes: int, *, saves: int, there_bytes: int) -> None:
    """Before a run: is there room for as many as will lie there at once, those that lie there now counted in?"""
    space, all_bytes = Space.around(folder), saves * (needs_bytes + margin_bytes(needs_bytes))
    if space is None or all_bytes <= space.free_bytes + there_bytes:
        return
    raise SaveFailed(
        f"{saves} checkpoints of {show_bytes(needs_bytes)} (predicted) lie in {folder} at once, those to keep, the best "
        f"and the one being written; they need {show_bytes(all_bytes - there_bytes)} more and {show_bytes(space.free_bytes)} "
        "is free there; make room, lower --keep, or name another --run"
    )


def failure(error: Exception, folder: Path, step: int, needs_bytes: int) -> SaveFailed:
    """The one sentence for whatever ended a save; asked when what it had written is gone again."""
    if cause := _why_full(error):
        return _no_room(folder, step, cause, needs_bytes, Space.around(folder))
    advice = "make the folder writable or name another --run; " if isinstance(error, OSError) else ""
    said = error.strerror if isinstance(error, OSError) and error.strerror else in_one_line(error).removesuffix(": ")
    return SaveFailed(f"the checkpoint of step {step} could not be written to {folder}: {said}; {advice}{_SAFE}")


def _no_room(folder: Path, step: int, cause: str, needs_bytes: int, space: Space | None) -> SaveFailed:
    free = show_bytes(space.free_bytes if space else None)
    return SaveFailed(
        f"the checkpoint of step {step} could not be written to {folder}: {cause}; it needs about {show_bytes(needs_bytes)} "
        f"(predicted) and {free} is free there; make room, lower --keep, or name another --run; {_SAFE}"
    )


def _why_full(error: BaseException) -> str | None:
    """Which kind of full it was, or None; the first error of a chain knows more than the one that came of it."""
    return next(filter(None, map(_cause, reversed(_chain(error)))), None)


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _cause(error: BaseException) -> str | None:
    if isinstance(error, OSError):
        return _FULL.get(error.errno or 0)
    if said := _RUST_ERRNO.search(str(error)):
        return _FULL.get(int(said[1]))
    return _CUT_SHORT if any(words in str(error) for words in _TORCH_SAYS) else None


# The checkpoints of one run: saved whole, found verified, kept in a number that fits the disk.
#
# A save is written beside its place, synced file by file, hashed, given its manifest, and only then renamed: killed at
# any moment, it leaves nothing or all of it. A step that is saved again (a resumed run) replaces the former one when the
# new one is whole; in between the former is set aside under a name that `newest` knows too, so that one of the two can be
# found at every moment. A removal renames first, so that half a removed checkpoint is never taken for a whole one.
#
# Finding the newest reads all of it, about a second for 2.2 GB (hashing.py); rotation, after every save, looks at sizes.


log = logging.getLogger("brimful")


class Checkpoints:
    """Those in one folder. It belongs to one process at a time; the run's lock sees to that."""

    def __init__(self, folder: Path, *, keep: int = 2, tell: Callable[[str], object] = log.warning) -> None:
        if keep < 1:
            raise BadOption(f"--keep {keep}: one checkpoint at least must be kept; give 1 or more")
        self.folder, self.keep = folder, keep
        self._tell = tell
        self._said: set[str] = set()
        self._damaged: set[int] = set()
        """Serials of those whose sizes are right and whose content is not."""
        self._unmarked: Best | None = None
        """A best one that could not be written down yet."""

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return Entry.of(self.folder, step).path

    def save(
        self, step: int, write: Callable[[Path], object], *, needs_bytes: int, facts: Mapping[str, Any] | None = None
    ) -> Checkpoint:
        """On the disk and whole when this returns; otherwise `SaveFailed`, and what was there before is untouched.

        `write` fills an empty folder, sub-folders allowed; the name `manifest.json` in it is taken. `needs_bytes` is a
        prediction, held against what is free before anything is written.
        """
        check_one(self.folder, step, needs_bytes)
        part = Entry.of(self.folder, step, "part")
        try:
            self._make_empty(part)
            write(part.path)
            sync_tree(part.path)
            manifest = Manifest.write(part.path, step=step, serial=self._next_serial(), facts=facts or {})
            self._publish(part)
        except BaseException as error:
            self._remove(part)
            if isinstance(error, Exception):
                raise failure(error, self.folder, step, needs_bytes) from error
            raise
        self.rotate()
        return Checkpoint(path=self.path(step), manifest=manifest)

    def newest(self) -> Found:
        """The last one saved whose sizes and hashes are right, and what had to be passed over."""
        described, unknown = self._look()
        skipped: list[Skipped] = []
        for one in described:
            try:
                one.check(contents=True)
            except BadCheckpoint as error:
                self._damaged.add(one.manifest.serial)
                skipped.append(Skipped(path=one.path, step=one.step, why=str(error)))
                continue
            return Found(checkpoint=one, skipped=_in_order(skipped, [it for it in unknown if it.step >= one.step]))
        return Found(checkpoint=None, skipped=_in_order(skipped, unknown))

    def at(self, path: Path) -> Checkpoint:
        """A given checkpoint folder, here or anywhere, verified."""
        try:
            checkpoint = Checkpoint.read(path)
            checkpoint.check(contents=True)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{path} is not a whole checkpoint: {error}; name another one") from None
        return checkpoint

    def mark_best(self, best: Best) -> None:
        """It is not rotated away until another one is marked. Never raises: a failure is told, and tried again."""
        self._unmarked = best
        self._write_mark()

    def best(self) -> Best | None:
        """The one marked last; None where there is none, or its mark is damaged, which is told."""
        return self._unmarked or Best.read(self.folder, self._say)

    def clean(self) -> list[Path]:
        """Before a run: remove what killed saves and removals left, and bring back what was set aside."""
        left = [one for one in Entry.list(self.folder) if one.kind != "whole" and not self._brought_back(one)]
        for one in left:
            self._remove(one)
        return [one.path for one in left]

    def rotate(self) -> None:
        """A checkpoint goes once `keep` whole ones were saved after it, the best excepted. Never raises."""
        self._write_mark()
        try:
            described, _ = self._look()
        except BadCheckpoint as error:
            self._say(f"old checkpoints were not removed: {error}")
            return
        named = [one for one in described if one.path == self.path(one.step)]  # what is set aside is not counted
        kept = [one for one in named if self._looks_whole(one)][: self.keep]
        best = self.best()
        for one in named if len(kept) == self.keep else ():
            is_best = best is not None and one.step == best.step
            if one.manifest.serial < kept[-1].manifest.serial and not is_best:
                self._remove(Entry.of(self.folder, one.step))

    def check_space(self, needs_bytes: int, *, saves: int | None = None) -> None:
        """Before a run: is there room for those to keep, the best and the one being written, or for `saves` of them?"""
        there_bytes = sum(one.size_bytes for one in self._look()[0])
        check_all(self.folder, needs_bytes, saves=saves or self.keep + 2, there_bytes=there_bytes)

    def _write_mark(self) -> None:
        best = self._unmarked
        try:
            if best is not None:
                best.write(self.folder)
            self._unmarked = None
        except OSError as error:
            self._say(f"the best step could not be written down ({error.strerror}); the next save tries it again")

    def _say(self, sentence: str) -> None:
        """Once: what cannot be removed today cannot be removed after the next save either."""
        if sentence not in self._said:
            self._said.add(sentence)
            self._tell(sentence)

    def _make_empty(self, part: Entry) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            sync(self.folder.parent)
        if part.path.exists():
            shutil.rmtree(part.path)
        part.path.mkdir()

    def _next_serial(self) -> int:
        return 1 + max((one.manifest.serial for one in self._look()[0]), default=0)

    def _publish(self, part: Entry) -> None:
        whole, aside = part.as_("whole").path, part.as_("aside")
        if whole.exists():
            self._remove(aside)
            whole.rename(aside.path)
        try:
            part.path.rename(whole)
        except BaseException:
            if aside.path.exists() and not whole.exists():
                aside.path.rename(whole)
            raise
        sync(self.folder)
        self._remove(aside)

    def _remove(self, entry: Entry) -> None:
        """Under its name it is there or not, never half. A failure is told, and the next `clean` tries again."""
        gone = entry if entry.kind in ("part", "gone") else entry.as_("gone")
        try:
            if gone is not entry and entry.path.exists():
                shutil.rmtree(gone.path, ignore_errors=True)
                entry.path.rename(gone.path)
            if gone.path.exists():
                shutil.rmtree(gone.path)
        except OSError as error:
            self._say(f"{entry.path} could not be removed ({error.strerror or error}) and takes up room until it is")

    def _brought_back(self, entry: Entry) -> bool:
        """Set aside by a save that was killed before the new one had its name; False where it has it."""
        if entry.kind != "aside":
            return False
        whole = entry.as_("whole").path
        try:
            if whole.exists():
                Checkpoint.read(whole).check(contents=False)
                return False
            entry.path.rename(whole)
        except (BadCheckpoint, OSError) as error:
            self._say(f"{entry.path} stays under this name: {error}")
        return True

    def _looks_whole(self, checkpoint: Checkpoint) -> bool:
        try:
            checkpoint.check(contents=False)
        except BadCheckpoint:
            return False
        return checkpoint.manifest.serial not in self._damaged

    def _look(self) -> tuple[list[Checkpoint], list[Skipped]]:
        """Those that say what they are, the last saved first; and those that do not."""
        described, unknown = [], []
        for entry in Entry.list(self.folder):
            try:
                if entry.kind != "gone":
                    described.append(_described(entry))
            except BadCheckpoint as error:
                unknown.append(Skipped(path=entry.path, step=entry.step, why=str(error)))
        return sorted(described, key=lambda one: one.manifest.serial, reverse=True), unknown


def _described(entry: Entry) -> Checkpoint:
    """What an entry says it is, if its name agrees."""
    if entry.kind == "part":
        raise BadCheckpoint("its save was ended before it was whole")
    checkpoint = Checkpoint.read(entry.path)
    if checkpoint.step != entry.step:
        raise BadCheckpoint(f"its name says step {entry.step} and its manifest step {checkpoint.step}")
    return checkpoint


def _in_order(*groups: list[Skipped]) -> tuple[Skipped, ...]:
    return tuple(sorted((one for group in groups for one in group), key=lambda one: one.step, reverse=True))


__all__ = ["Best", "Checkpoint", "Checkpoints", "Found", "Skipped", "point"]
