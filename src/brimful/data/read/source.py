"""Rows from files of any format, in chunks of bounded size, under common names. Every data command reads through here.

    paths ─► files.find_files ─► a layout for each file (columns.py) ─► Source.chunks(): read, then map columns to fields

Formats: parquet, jsonl, json (a list of objects), csv, tsv and plain text (.txt, a file is a document); text formats also
compressed (.gz, .bz2, .zst, .xz); folders of them; or a dataset on the Hugging Face hub (extra `hub`). All files must give the
same fields.

With `messages=True` every row becomes one conversation instead (conversations.py), whatever the format of its file, and with
`preferences=True` one prompt with two replies (preferences.py).

A row that cannot be read (broken JSON, invalid UTF-8, a field that is missing or not text) neither stops the reader nor is
skipped silently: it comes in `Chunk.broken` with file and line, and the caller decides (`BrokenRowLimit`). A file that
cannot be read at all (truncated parquet, no columns that fit, empty) or that changes while it is read raises `BadData`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from brimful.data.read.columns import (
    CHOSEN,
    REJECTED,
    Layout,
    columns_to_read,
    find_column,
    find_layout,
    in_words,
    listed,
    map_columns,
    no_layout,
    requested_layout,
    reuse_layout,
)
from brimful.data.read.conversations import (
    conversation_columns,
    find_conversation_layout,
    map_conversations,
    requested_conversation_layout,
)
from brimful.data.read.files import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    Chunk,
    Column,
    DataFile,
    FileSchema,
    Format,
    RowProblem,
    find_files,
    longest_row,
    row_too_long,
)
from brimful.data.read.json_rows import json_schema, jsonl_schema, read_json, read_jsonl
from brimful.data.read.plain_text import read_text, text_schema
from brimful.data.read.preferences import (
    find_preference_layout,
    map_preferences,
    preference_columns,
    requested_preference_layout,
)
from brimful.data.read.tables import csv_schema, hub_schema, parquet_schema, read_csv, read_hub, read_parquet
from brimful.errors import BadData, BadOption
from brimful.files import sha256
from brimful.units import GiB

__all__ = [
    "CHUNK_ROWS",
    "BrokenRowLimit",
    "Chunk",
    "Layout",
    "RowProblem",
    "Source",
    "check_max_bad",
    "holds_preferences",
    "open_source",
]

Reader = Callable[[str, tuple[Column, ...], int], Iterator[Chunk]]

_READERS: dict[Format, tuple[Callable[[str, int], FileSchema], Reader]] = {
    "parquet": (parquet_schema, read_parquet),
    "jsonl": (jsonl_schema, read_jsonl),
    "json": (json_schema, read_json),
    "csv": (csv_schema, read_csv),
    "text": (text_schema, read_text),
    "hub": (hub_schema, read_hub),
}


@dataclass(frozen=True, slots=True)
class _SourceFile:
    """A file and what is read from it."""

    file: DataFile
    schema: FileSchema
    layout: Layout
    columns: tuple[Column, ...]


class Source:
    """Opened files: their layout is known, their rows are read on demand, as often as needed."""

    layout: Layout
    paths: tuple[str, ...]
    """As given: files, folders, patterns, hub names."""
    files: tuple[str, ...]
    total_bytes: int
    """Size of all files; 0 where it is unknown (the hub)."""
    skipped: tuple[str, ...]
    """What the folders contain besides files of rows, each with the reason."""

    def __init__(
        self, paths: Sequence[str], files: Sequence[_SourceFile], skipped: Sequence[str], max_row_bytes: int
    ) -> None:
        self.paths, self._files, self._max_row_bytes = tuple(paths), tuple(files), max_row_bytes
        self.layout, self.skipped = _common_layout(files), tuple(skipped)
        self.files = tuple(entry.file.path for entry in files)
        self.total_bytes = sum(entry.file.size_bytes for entry in files)

    def chunks(self, *, skip: int = 0) -> Iterator[Chunk]:
        """All rows in file order, without the first `skip` chunks (to continue an interrupted command)."""
        return islice(self._chunks(), skip, None)

    def fingerprint(self) -> str:
        """Changes with any file, its size, its time or the layout. Of a hub dataset only the name is known."""
        files = [
            (entry.file.path if entry.file.format == "hub" else os.path.realpath(entry.file.path), entry.file.size_bytes, entry.file.modified_ns)
            for entry in self._files
        ]  # fmt: skip
        layouts = [
            (*entry.layout.fields * (entry.layout.is_conversation or entry.layout.is_preference), entry.layout.kind, sorted(entry.layout.columns.items()))
            for entry in self._files
        ]  # fmt: skip
        return sha256(repr((files, layouts, CHUNK_ROWS, CHUNK_BYTES)))

    def _chunks(self) -> Iterator[Chunk]:
        bytes_before = 0
        for entry in self._files:
            read, mapped = _READERS[entry.file.format][1], _mapping(entry.layout)
            for chunk in read(entry.file.path, entry.columns, self._max_row_bytes):
                _check_row_sizes(chunk, self._max_row_bytes)
                yield from mapped(entry.layout, replace(chunk, read_bytes=bytes_before + chunk.read_bytes))
            _check_unchanged(entry.file)
            bytes_before += entry.file.size_bytes


def open_source(
    paths: Sequence[str] | Source,
    *,
    columns: str | None = None,
    host_limit_bytes: int = GiB,
    messages: bool = False,
    preferences: bool = False,
) -> Source:
    """Find the files behind these paths and what their columns mean. Reads only a few rows.

    With `messages`, rows have one text column `conversation`, a JSON object (see conversations.py); plain text stays `text`.
    With `preferences`, they have one text column `preference` (see preferences.py).
    A row that cannot be read within the memory limit is an error. A source that is already open is returned as it is, so
    that commands built on each other open it once.
    """
    if isinstance(paths, Source):
        return paths
    files: list[_SourceFile] = []
    listed_files, max_row_bytes = find_files(paths), longest_row(host_limit_bytes)
    for file in listed_files.files:
        entry = _open_file(
            file, columns, files[0].layout if files else None, max_row_bytes, messages=messages, preferences=preferences
        )
        if files and entry.layout.fields != files[0].layout.fields:
            first = files[0]
            raise BadData(
                f"{first.file.path} gives {in_words(first.layout.fields)} (from {listed(first.schema.types)}), but {file.path} gives "
                f"{in_words(entry.layout.fields)} (from {listed(entry.schema.types)}). Try: files of one kind, or columns=."
            )
        files.append(entry)
    return Source(paths, files, listed_files.skipped, max_row_bytes)


def holds_preferences(paths: Sequence[str], *, columns: str | None = None, host_limit_bytes: int = GiB) -> bool:
    """Whether rows have two replies, one of them preferred: by the columns of the first file, or by the fields that
    `columns` sets."""
    if columns is not None:
        fields = {word.strip() for item in columns.split(",") for word in item.split("=")}
        return {"chosen", "rejected"} <= fields and "response" not in fields
    file = find_files(paths).files[0]
    names = _READERS[file.format][0](file.path, longest_row(host_limit_bytes)).common
    return find_column(CHOSEN, names) is not None and find_column(REJECTED, names) is not None


def _check_unchanged(file: DataFile) -> None:
    """Refuse a file that was written to since it was found: one that is truncated would just seem to end early."""
    if file.format == "hub":
        return
    try:
        stat = Path(file.path).stat()
    except OSError as error:
        raise BadData(f"{file.path} changed while it was read ({error.strerror}). Try: read a copy of it.") from None
    if (stat.st_size, stat.st_mtime_ns) != (file.size_bytes, file.modified_ns):
        raise BadData(
            f"{file.path} changed while it was read: it had {file.size_bytes:,} bytes and now has {stat.st_size:,}. "
            "Try: again once nothing writes to it."
        )


def _check_row_sizes(chunk: Chunk, max_row_bytes: int) -> None:
    """Refuse a row of a table that is too long. Readers of text have looked already, before it was whole."""
    if chunk.rows.nbytes > max_row_bytes:
        row = next((row for row in range(chunk.rows.num_rows) if chunk.rows.slice(row, 1).nbytes > max_row_bytes), None)
        if row is not None:
            raise row_too_long(f"{chunk.file}, line {chunk.lines[row]}", max_row_bytes, "shorter rows")


def _open_file(
    file: DataFile,
    requested: str | None,
    earlier: Layout | None,
    max_row_bytes: int,
    *,
    messages: bool,
    preferences: bool,
) -> _SourceFile:
    """A file and its layout: as requested, as in the first file, or by its own columns."""
    path, schema = file.path, _READERS[file.format][0](file.path, max_row_bytes)
    vary = file.format in ("jsonl", "json")
    layout: Layout | None
    if preferences and requested is not None:
        layout = requested_preference_layout(requested, schema, path, rows_vary=vary)
    elif preferences:
        layout = find_preference_layout(schema, path, rows_vary=vary)
    elif messages and requested is not None:
        layout = requested_conversation_layout(requested, schema, path, rows_vary=vary)
    elif messages:
        layout = find_conversation_layout(schema, path, earlier, rows_vary=vary)
    elif requested is not None:
        layout = requested_layout(requested, list(schema.types), path)
    else:
        layout = (earlier and reuse_layout(earlier, schema.common)) or find_layout(schema, rows_vary=vary)
    if layout is None:
        raise no_layout(schema, path)
    if layout.is_preference:
        columns = preference_columns(layout, schema, path, rows_vary=vary)
    elif layout.is_conversation:
        columns = conversation_columns(layout, schema, path, rows_vary=vary)
    else:
        columns = columns_to_read(layout, schema, path)
    return _SourceFile(file, schema, layout, columns)


def _mapping(layout: Layout) -> Callable[[Layout, Chunk], Iterator[Chunk]]:
    """What turns the columns of a file into the fields of this layout."""
    if layout.is_preference:
        return map_preferences
    return map_conversations if layout.is_conversation else map_columns


def _common_layout(files: Sequence[_SourceFile]) -> Layout:
    """The layout of the first file. Its reason mentions files whose fields come from other columns."""
    layout = files[0].layout
    others = [entry for entry in files if entry.layout.columns != layout.columns]
    if not others:
        return layout
    names = " and ".join(dict.fromkeys(others[0].layout.columns.values()))
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return replace(layout, reason=f"{layout.reason}; in {others[0].file.path}{more}: {names}")


@dataclass
class BrokenRowLimit:
    """Counts rows that could not be read and raises `BadData` when they are more than `max_bad` allows."""

    max_bad: float = 0.0
    """The allowed share of all rows. With 0 the first broken row is an error."""
    rows_in: int = 0
    broken: int = 0
    first: RowProblem | None = None

    def __post_init__(self) -> None:
        check_max_bad(self.max_bad)

    def add(self, chunk: Chunk, *, refused: Sequence[RowProblem] = ()) -> None:
        """Count one more chunk; `refused` are rows of it that were read but cannot be used."""
        self.rows_in += chunk.rows_in
        problems = sorted([*chunk.broken, *refused], key=lambda problem: problem.line) if refused else chunk.broken
        self.broken += len(problems)
        if problems and self.first is None:
            self.first = problems[0]
        if self.first is not None and self.max_bad == 0:
            repair = self.first.repair("repair that row")
            raise BadData(f"{self.first}. Try: {repair}, or drop such rows with max_bad=0.01.")

    def check(self) -> None:
        """Check the share once all rows were read."""
        if self.first is not None and self.broken > self.max_bad * self.rows_in:
            raise BadData(
                f"{self.broken:,} of {self.rows_in:,} rows are broken, more than max_bad={self.max_bad:g} allows. "
                f"Try: {self.first.repair('repair them')}, starting with {self.first}."
            )


def check_max_bad(max_bad: float) -> None:
    if not 0 <= max_bad <= 1:
        raise BadOption(f"max_bad={max_bad:g} must be between 0 and 1. Try: max_bad=0.01.")
