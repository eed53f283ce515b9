"""Prepared rows on their way to disk, in segments that are either there as a whole or not at all.

    NNNNN.rows    the texts, in the order of their keys (shuffle.py)
    NNNNN.marks   parquet, a line a row: its number, file and line, digest and bands: what dedup.py groups by
    signatures    128 bytes a row, of all segments, in the order of their numbers: what dedup.py compares
    NNNNN.json    the tally up to and with this segment; written last, and only with it the segment counts

An interrupted clean goes on behind the last tally; whatever lies behind it is written over. For a row of 600 bytes
of text that is 380 + 144 + 128 bytes of disk.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brimful.data.check.report import Place
from brimful.data.clean.minhash import HASHES, Slots
from brimful.data.clean.prepare import PLACES, REASONS, Prepared
from brimful.data.clean.shuffle import LINE_BITS, SLOT, write_segment
from brimful.data.clean.work import forced, replace_text
from brimful.data.source import Broken


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
