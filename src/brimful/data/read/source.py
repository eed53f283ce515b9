"""Rows from files of any format, in chunks of fixed size, under common names.

    paths ─► files ─► layout: which columns mean what (found, or given by --columns) ─► chunks of rows

Formats: parquet, jsonl, json (a list of objects), csv; also compressed (.gz, .zst, .bz2), a folder of them, or the name
of a data set on the Hugging Face hub (extra `hub`). All files must give the same sides.

A row that cannot be read (broken JSON, invalid UTF-8, a field that is missing or no text) is never skipped in silence and
never stops the reader: it comes beside the rows with its file and line, and the caller decides. A file that cannot be
read at all (truncated parquet, no columns that fit, empty) raises `BadData` with one sentence.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import pyarrow as pa

from brimful.data.read.columns import Kind, Layout, fields, find_layout, given_layout, like, missing, mixed, sides
from brimful.data.read.files import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    Broken,
    Columns,
    DataFile,
    Field,
    Format,
    Lines,
    Reader,
    find_files,
)
from brimful.data.read.json_rows import json_columns, lines_columns, read_json, read_lines
from brimful.data.read.tables import csv_columns, hub_columns, parquet_columns, read_csv, read_hub, read_parquet

__all__ = ["CHUNK_ROWS", "Broken", "Chunk", "Kind", "Layout", "Source", "open_source"]

_READERS: dict[Format, tuple[Callable[[str], Columns], Reader]] = {
    "parquet": (parquet_columns, read_parquet),
    "jsonl": (lines_columns, read_lines),
    "json": (json_columns, read_json),
    "csv": (csv_columns, read_csv),
    "hub": (hub_columns, read_hub),
}
_OPEN_ENDED = ("jsonl", "json")
"""Formats in which a later row may have fields that the first ones do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive rows of one file. The same files always come in the same chunks."""

    rows: pa.RecordBatch
    """One valid UTF-8 `string` column without nulls for each side, in the order of `Layout.sides`; a null became ""."""
    broken: tuple[Broken, ...]
    """Rows of this stretch that are not in `rows`."""
    file: str
    read_bytes: int
    """Bytes of all files read up to the end of this chunk, for progress."""
    lines: Lines = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Of each row in `rows`: its line in the file, as `Broken.line` counts."""

    @property
    def rows_in(self) -> int:
        return int(self.rows.num_rows) + len(self.broken)


@dataclass(frozen=True, slots=True)
class _Part:
    """A file with what is read of it."""

    file: DataFile
    has: Columns
    layout: Layout

    @property
    def fields(self) -> tuple[Field, ...]:
        return fields(self.layout, self.has, self.file.path)


class Source:
    """Files that were opened: their layout is known, their rows are read on demand, as often as asked."""

    layout: Layout
    files: tuple[str, ...]
    total_bytes: int
    """Of all files; 0 where that is unknown (the hub)."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = tuple(parts)
        self.layout = _common(parts)
        self.files = tuple(part.file.path for part in parts)
        self.total_bytes = sum(part.file.size_bytes for part in parts)

    def chunks(self, *, skip: int = 0) -> Iterator[Chunk]:
        """All rows in file order, without the first `skip` chunks: how an interrupted command goes on."""
        return islice(self._chunks(), skip, None)

    def fingerprint(self) -> str:
        """Changes when a file, its size, its time or the layout does; of the hub only the name is known."""
        files = [(_place(part.file), part.file.size_bytes, part.file.modified_ns) for part in self._parts]
        layouts = [(part.layout.kind, sorted(part.layout.columns.items())) for part in self._parts]
        return hashlib.sha256(repr((files, layouts, CHUNK_ROWS, CHUNK_BYTES)).encode()).hexdigest()

    def _chunks(self) -> Iterator[Chunk]:
        before_bytes = 0
        for part in self._parts:
            for raw in _READERS[part.file.format][1](part.file.path, part.fields):
                for rows, lines, broken in sides(part.file.path, part.layout, raw):
                    read_bytes = before_bytes + raw.at_bytes
                    yield Chunk(rows=rows, broken=broken, file=part.file.path, read_bytes=read_bytes, lines=lines)
            before_bytes += part.file.size_bytes


def open_source(paths: Sequence[str], *, columns: str | None = None) -> Source:
    """Find the files behind these paths and the meaning of their columns. Reads a few rows only."""
    parts: list[_Part] = []
    for file in find_files(paths):
        part = _part(file, columns, parts[0].layout if parts else None)
        if parts and part.layout.sides != parts[0].layout.sides:
            raise mixed(parts[0].file.path, parts[0].layout, parts[0].has, file.path, part.layout, part.has)
        parts.append(part)
    return Source(parts)


def _part(file: DataFile, asked: str | None, earlier: Layout | None) -> _Part:
    """A file and its layout: as asked for, as in the file before, or by its own columns."""
    has = _READERS[file.format][0](file.path)
    if asked is not None:
        layout = given_layout(asked, list(has.types), file.path)
    else:
        found = (earlier and like(earlier, has.usual)) or find_layout(has, open_ended=file.format in _OPEN_ENDED)
        if found is None:
            raise missing(has, file.path)
        layout = found
    fields(layout, has, file.path)  # a column that is no text is told now, not when its file's turn comes
    return _Part(file, has, layout)


def _place(file: DataFile) -> str:
    return file.path if file.format == "hub" else os.path.realpath(file.path)


def _common(parts: Sequence[_Part]) -> Layout:
    """The first file's layout; files in which other columns have that meaning are named."""
    layout = parts[0].layout
    others = [part for part in parts if part.layout.columns != layout.columns]
    if not others:
        return layout
    names = " and ".join(dict.fromkeys(others[0].layout.columns.values()))
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return replace(layout, reason=f"{layout.reason}; in {others[0].file.path}{more}: {names}")
