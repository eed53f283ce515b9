"""Prepared rows on their way to disk, in segments that are either there as a whole or not at all.

    NNNNN.rows    the texts, in the order of their keys (shuffle.py)
    NNNNN.marks   parquet, a line a row: its number, file and line, digest and bands: what dedup.py groups by
    signatures    128 bytes a row, of all segments, in the order of their numbers: what dedup.py compares
    NNNNN.json    the tally up to and with this segment; written last, and only with it the segment counts

An interrupted clean goes on behind the last tally; whatever lies behind it is written over. For a row of 600 bytes
of text that is 380 + 144 + 128 bytes of disk.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brimful.data.check import Place
from brimful.data.clean.prepare import PLACES, REASONS, Prepared
from brimful.data.clean.similarity import HASHES, Slots
from brimful.data.clean.write import LINE_BITS, SLOT, write_segment
from brimful.data.read.files import Broken
from brimful.errors import BadOption

# The work folder `DIR/.clean`: everything is made in there, and only whole files leave it.
#
# One clean at a time holds its lock. A key over inputs and options says whose work it is: a clean with the same key goes
# on, one with another starts over. At the end the outputs are forced to disk, a list of them is written, and they are moved
# next to each other, the report last; a clean that was killed in between finds the list and moves the rest.


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


@dataclass(kw_only=True)
class Tally:
    """What was read so far: enough to go on from, and to add up at the end."""

    bits: int
    """Of a key that name its bucket: the same for all segments."""
    segments: int = 0
    chunks: int = 0
    rows_in: int = 0
    slots: int = 0
    """Rows that were prepared and stay so far."""
    read_bytes: int = 0
    complete: bool = False
    """Whether all chunks were read."""
    text_bytes: int = 0
    files: list[str] = field(default_factory=list)
    """Which the marks count by place."""
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    places: dict[str, list[Place]] = field(default_factory=lambda: {reason: [] for reason in REASONS})

    @property
    def first_broken(self) -> Broken | None:
        first = next(iter(self.places["broken"]), None)
        return None if first is None else Broken(first.file, first.line, first.why)

    def add(self, prepared: Prepared) -> None:
        """One more chunk."""
        self.chunks += 1
        self.rows_in += prepared.rows_in
        self.slots += prepared.rows
        self.read_bytes = prepared.read_bytes
        self.text_bytes += prepared.text_bytes
        if prepared.file not in self.files[-1:]:
            self.files.append(prepared.file)
        for reason, count in prepared.dropped.items():
            self.dropped[reason] += count
        for reason, places in prepared.places.items():
            self.places[reason] += places[: PLACES - len(self.places[reason])]

    @classmethod
    def read(cls, path: Path) -> "Tally":
        content = json.loads(path.read_text(encoding="utf-8"))
        places = {reason: [Place(**place) for place in places] for reason, places in content.pop("places").items()}
        return cls(**content, places=places)


class Segments:
    """The segments of a work folder: those that are there, and the one that grows."""

    def __init__(self, folder: Path, *, sides: tuple[str, ...], bands: int, seed: int) -> None:
        self.folder, self._sides, self._bands, self._seed = folder, sides, bands, seed
        folder.mkdir(exist_ok=True)
        self._waiting: list[Prepared] = []
        self.waiting_bytes = 0

    @property
    def signatures(self) -> Path:
        return self.folder / "signatures"

    def rows(self, tally: Tally) -> list[Path]:
        return [self._file(number, "rows") for number in range(tally.segments)]

    def marks(self, tally: Tally) -> list[Path]:
        return [self._file(number, "marks") for number in range(tally.segments)]

    def resume(self) -> Tally | None:
        """The last whole segment's tally. Files behind it will be written over; signatures behind it are cut off."""
        number = 0
        while self._file(number, "json").exists():
            number += 1
        tally = Tally.read(self._file(number - 1, "json")) if number else None
        with self.signatures.open("ab") as file:
            file.truncate(HASHES * tally.slots if tally and file.tell() else 0)
        return tally

    def add(self, prepared: Prepared) -> None:
        self._waiting.append(prepared)
        self.waiting_bytes += prepared.held_bytes

    def flush(self, tally: Tally) -> None:
        """Write what waits as one more segment, then the tally."""
        waiting, self._waiting, self.waiting_bytes = self._waiting, [], 0
        if waiting:
            self._write(tally.segments, waiting, tally)
            tally.segments += 1
        replace_text(self._file(tally.segments - 1, "json"), json.dumps(asdict(tally)))

    def _write(self, number: int, waiting: list[Prepared], tally: Tally) -> None:
        first = tally.slots - sum(prepared.rows for prepared in waiting)
        rows, marks = self._file(number, "rows"), self._file(number, "marks")
        places = _places(waiting, tally.files)
        write_segment(rows, self._table(waiting), first, places, seed=self._seed, bits=tally.bits)
        _write_marks(marks, waiting, first, tally.files, self._bands)
        with self.signatures.open("ab") as file:
            for prepared in waiting:
                for one in prepared.sketches:
                    file.write(one.signatures.data)
        forced(rows, marks, self.signatures)

    def _table(self, waiting: list[Prepared]) -> pa.Table:
        schema = pa.schema([(side, pa.string()) for side in self._sides])
        pieces = [piece for prepared in waiting for piece in prepared.sides]
        return pa.Table.from_batches([pa.RecordBatch.from_arrays(piece, schema=schema) for piece in pieces], schema)

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"{number:05}.{kind}"


def _places(waiting: list[Prepared], files: list[str]) -> Slots:
    """A number for each row's file and line."""
    numbers = [part + (files.index(prepared.file) << LINE_BITS) for prepared in waiting for part in prepared.lines]
    return np.concatenate([np.zeros(0, np.int64), *numbers])


def _write_marks(path: Path, waiting: list[Prepared], first_slot: int, files: list[str], bands: int) -> None:
    """Hashes do not compress; the numbers do, as differences."""
    rows = sum(prepared.rows for prepared in waiting)
    digests = np.concatenate(
        [np.zeros((0, 2), np.uint64), *(part for prepared in waiting for part in prepared.digests)]
    )
    columns: dict[str, Any] = {
        SLOT: np.arange(first_slot, first_slot + rows),
        "file": np.repeat(
            [files.index(prepared.file) for prepared in waiting], [prepared.rows for prepared in waiting]
        ),
        "line": np.concatenate([np.zeros(0, np.int64), *(part for prepared in waiting for part in prepared.lines)]),
        "digest_0": digests[:, 0],
        "digest_1": digests[:, 1],
    }
    none, sketches = np.zeros((bands, 0), np.uint64), [one for prepared in waiting for one in prepared.sketches]
    hashes = np.concatenate([none, *(one.bands for one in sketches)], axis=1)
    columns |= {f"band_{band}": hashes[band] for band in range(bands)}
    counted = dict.fromkeys((SLOT, "file", "line"), "DELTA_BINARY_PACKED")
    encoding = {name: counted.get(name, "PLAIN") for name in columns}
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "column_encoding": encoding}
    pq.write_table(pa.table(columns), path, **options)
