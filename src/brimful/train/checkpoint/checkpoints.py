"""The checkpoints of one run: saved whole, found verified, kept in a number that fits the disk.

A save is written beside its place, synced file by file, hashed, given its manifest, and only then renamed: killed at
any moment, it leaves nothing or all of it. A step that is saved again (a resumed run) replaces the former one when the
new one is whole; in between the former is set aside under a name that `newest` knows too, so that one of the two can be
found at every moment. A removal renames first, so that half a removed checkpoint is never taken for a whole one.

Finding the newest reads all of it, about a second for 2.2 GB (hashing.py); rotation, after every save, looks at sizes.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from brimful.errors import BadCheckpoint, BadOption
from brimful.train.checkpoint import room
from brimful.train.checkpoint.best import Best
from brimful.train.checkpoint.checkpoint import Checkpoint, Found, Skipped
from brimful.train.checkpoint.durable import sync, sync_tree
from brimful.train.checkpoint.entries import Entry
from brimful.train.checkpoint.manifest import Manifest

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
        room.check_one(self.folder, step, needs_bytes)
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
                raise room.failure(error, self.folder, step, needs_bytes) from error
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
        room.check_all(self.folder, needs_bytes, saves=saves or self.keep + 2, there_bytes=there_bytes)

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
