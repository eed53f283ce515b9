"""From paths to files of rows, and what all readers share: a `Chunk` of rows, a `RowProblem`, a stream of bytes.

    paths ─► find_files ─► DataFile ─► a reader (json_rows.py, tables.py) ─► Chunk ─► columns.py

A reader yields chunks of at most `CHUNK_ROWS` rows and about `CHUNK_BYTES` of text (16,384 rows of chat are 10 MB), so
memory does not depend on the size of the file; only a single larger row makes a larger chunk. How long a row may be follows
from the memory limit (`longest_row`), and a longer one is refused before it is held whole. Chunk borders depend on the file
alone, so an interrupted command can skip the chunks it has finished.
"""

import difflib
import glob
import lzma
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.errors import BadData, BadOption
from brimful.units import flag_bytes, show_bytes

CHUNK_ROWS = 16_384
"""Most rows in a chunk."""

CHUNK_BYTES = 8 * 2**20
"""Approximate text in a chunk: long articles come in fewer rows."""

_LONGEST_ROW_SHARE = 32
"""A row takes up to this many times its own size, as objects of Python or in several threads of clean."""

TEXT = pa.string()

JSON = pa.large_string()
"""A column of any values, each as its JSON: what a conversation consists of differs from row to row. Another type than
`TEXT`, so that a reader can tell the two apart."""

Lines = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowProblem:
    """A row that cannot be used, and why."""

    file: str
    line: int
    """Line of a jsonl, json or csv file; row number in parquet and on the hub. Counted from 1."""
    message: str
    """`not JSON: Expecting ',' delimiter`, `not UTF-8`, `no field 'response'`."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.message}"

    def repair(self, otherwise: str) -> str:
        """What to try: the command that converts a file in GBK, as Excel saves Chinese, or something else."""
        if not self.message.endswith("not UTF-8") or format_of(self.file) == "parquet":
            return otherwise
        return f"`iconv -f GBK -t UTF-8 {shlex.quote(self.file)} > utf8{Path(self.file).suffix}` if its text is GBK"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one file. The same files always come in the same chunks."""

    file: str
    rows: pa.RecordBatch
    """From a reader: the requested columns, null where the file has null. From a source: one text column without nulls
    for each field of the layout. Always valid UTF-8."""
    lines: Lines
    """The line of each row, counted as `RowProblem.line`."""
    broken: tuple[RowProblem, ...]
    """Rows of this part of the file that could not be read."""
    read_bytes: int
    """Bytes read up to the end of this chunk: of the file (reader) or of all files (source)."""

    @property
    def rows_in(self) -> int:
        return int(self.rows.num_rows) + len(self.broken)


@dataclass(frozen=True, slots=True)
class Column:
    """A column to read."""

    name: str
    type: pa.DataType
    """`TEXT`, `messages_type(…)` or `JSON`."""
    required: bool = True
    """Whether a row without it is broken; otherwise the value counts as empty."""


@dataclass(frozen=True, slots=True)
class FileSchema:
    """The columns of a file."""

    types: Mapping[str, pa.DataType | None]
    """By name: `TEXT`, `messages_type(…)`, or another type; None where the sampled values say nothing."""
    common: tuple[str, ...]
    """Columns that most rows have. All of them, except in JSON, where each row may have others."""


def longest_row(host_limit_bytes: int) -> int:
    """Bytes of the longest row that can be read within this memory: 32 MiB of 1 GiB."""
    return max(1, host_limit_bytes // _LONGEST_ROW_SHARE)


def row_too_long(place: str, max_row_bytes: int, advice: str = "one row per line") -> BadData:
    """The error for a row that would exceed the memory limit. Most are another format, or a quote that never closes."""
    limit = flag_bytes(max_row_bytes * _LONGEST_ROW_SHARE)
    return BadData(
        f"{place} is longer than {show_bytes(max_row_bytes)}, the most for host_limit='{limit}'. "
        f"Try: {advice}, or a higher host_limit=."
    )


def record_batch(columns: Sequence[Column], arrays: list[pa.Array]) -> pa.RecordBatch:
    """Arrays under the names and types of the columns."""
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(column.name, column.type) for column in columns]))


def split_chunk(chunk: Chunk) -> Iterator[Chunk]:
    """The same rows in equal chunks of about `CHUNK_BYTES` at most. A broken row stays with the rows after it."""
    pieces = max(1, -(-chunk.rows.nbytes // CHUNK_BYTES))
    step = max(1, -(-chunk.rows.num_rows // pieces))
    broken = list(chunk.broken)
    for start in range(0, max(1, chunk.rows.num_rows), step):
        lines = chunk.lines[start : start + step]
        last = start + step >= chunk.rows.num_rows
        here = broken if last else [problem for problem in broken if problem.line <= lines[-1]]
        broken = broken[len(here) :]
        yield replace(chunk, rows=chunk.rows.slice(start, step), lines=lines, broken=tuple(here))


def messages_type(role: str, content: str) -> pa.ListType:
    """The type of a conversation: `[{"from": …, "value": …}, …]`."""
    return pa.list_(pa.struct([(role, TEXT), (content, TEXT)]))


def message_keys(names: Iterable[str]) -> tuple[str, str] | None:
    """Which of these keys hold the role and the content of a message; None if it is not a message."""
    present = set(names)
    role = next((name for name in ("from", "role") if name in present), None)
    content = next((name for name in ("value", "content") if name in present), None)
    return (role, content) if role and content else None


def is_messages_type(type_: pa.DataType | None) -> bool:
    """Whether this is a `messages_type(…)`."""
    item = type_.value_type if type_ is not None and pa.types.is_list(type_) else None
    keys = message_keys(field.name for field in item) if item is not None and pa.types.is_struct(item) else None
    return keys is not None and type_ == messages_type(*keys)


# ── Bytes of a text file ──────────────────────────────────────────────────────────────────────────────────────────────

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}

_XZ_READ_BYTES = 2**16

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ByteStream:
    """A text file opened for reading, decompressed, without a byte-order mark.

    A compressed file that is cut off raises an error, so a partial file never passes for a whole one.
    """

    def __init__(self, path: str) -> None:
        self._path, self._compression = path, COMPRESSIONS.get(Path(path).suffix.lower())
        self._at_start, self._pushed_back = True, b""
        try:
            self._file = pa.OSFile(path)
            self._stream = _decompressed(self._file, self._compression)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from None

    def read(self, count: int) -> bytes:
        """The next `count` bytes, fewer at the end of the file. Bytes that were pushed back come alone."""
        if self._pushed_back:
            data, self._pushed_back = self._pushed_back, b""
            return data
        pieces, missing = [], count
        while missing and (piece := self._read_some(missing)):
            pieces.append(piece)
            missing -= len(piece)
        data = b"".join(pieces) if len(pieces) != 1 else pieces[0]
        if self._at_start and data:
            self._at_start, data = False, data.removeprefix(_BYTE_ORDER_MARK)
        return data

    def push_back(self, data: bytes) -> None:
        """Return what was read last."""
        self._pushed_back = data

    def position(self) -> int:
        """Bytes of the (compressed) file that were read."""
        return int(self._file.tell())

    def whole_lines(self, max_line_bytes: int) -> Iterator[bytes]:
        """Blocks of about `CHUNK_BYTES` that end with a line break; the last one ends with the file."""
        pieces, line = [b""], 1
        while piece := self.read(CHUNK_BYTES):
            last = piece.rfind(b"\n") + 1
            pieces.append(piece[:last] if last else piece)
            if last:
                block = b"".join(pieces)
                self._check_lines(block, line, max_line_bytes)
                line += block.count(b"\n")
                yield block
                pieces = [piece[last:]]
            elif sum(map(len, pieces)) > max_line_bytes:
                raise row_too_long(f"{self._path}, line {line}", max_line_bytes)
        if rest := b"".join(pieces):
            self._check_lines(rest, line, max_line_bytes)
            yield rest

    def _check_lines(self, block: bytes, first: int, max_line_bytes: int) -> None:
        if len(block) > max_line_bytes:
            sizes = map(len, block.split(b"\n"))
            if long := next((number for number, size in enumerate(sizes, first) if size > max_line_bytes), None):
                raise row_too_long(f"{self._path}, line {long}", max_line_bytes)

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._file.close()

    def _read_some(self, count: int) -> bytes:
        try:
            return bytes(self._stream.read(count))
        except (pa.ArrowException, OSError, lzma.LZMAError, EOFError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> BadData:
        if self._compression and not isinstance(error, FileNotFoundError | PermissionError):
            return damaged_file(self._path, self._compression, error)
        return BadData(f"{self._path}: {_first_line(error)}. Try: make it readable for this user.")


def _decompressed(file: pa.NativeFile, compression: str | None) -> "pa.NativeFile | _XzStream":
    if compression is None:
        return file
    return _XzStream(file) if compression == "xz" else pa.CompressedInputStream(file, compression)


class _XzStream:
    """An xz file, which Arrow does not read. Python's `LZMAFile` drops what follows a stream if it is damaged."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file, self._decompressor = file, lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def read(self, count: int) -> bytes:
        """At most `count` bytes; none at the end of the file."""
        while True:
            data = b""
            if self._decompressor.eof:
                data = self._next_stream()
                if not data:
                    return b""
                self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            elif self._decompressor.needs_input and not (data := self._file.read(_XZ_READ_BYTES)):
                raise EOFError("it ends before its last block")
            if piece := self._decompressor.decompress(data, count):
                return piece

    def _next_stream(self) -> bytes:
        """The first bytes after a stream and its padding of zeros; none at the end of the file."""
        data = self._decompressor.unused_data.lstrip(b"\0")
        while not data and (piece := self._file.read(_XZ_READ_BYTES)):
            data = piece.lstrip(b"\0")
        return data

    def close(self) -> None:
        """The file is closed by its owner."""


def damaged_file(place: str, format_: str, error: Exception) -> BadData:
    """The error for a file that is cut off or damaged."""
    return BadData(f"{place}: not a complete {format_} file ({_first_line(error)}). Try: download or write it again.")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


# ── Paths to files ────────────────────────────────────────────────────────────────────────────────────────────────────

Format = Literal["parquet", "jsonl", "json", "csv", "text", "hub"]

FORMATS: dict[str, Format] = {
    ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".txt": "text",
}  # fmt: skip

_SUPPORTED = f"{', '.join(FORMATS)} (text formats also with {', '.join(COMPRESSIONS)})"

CLEAN_OUTPUT = ("train.parquet", "clean.json")
"""A folder with these files is the output of `brimful data clean`."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of rows, or one dataset on the hub."""

    path: str
    format: Format
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files behind some paths."""

    files: tuple[DataFile, ...]
    """In the order of the paths, those of a folder sorted by name."""
    skipped: tuple[str, ...]
    """What else the folders contain, hidden files aside, with the reason: `data/README.md (unknown format)`."""


def find_files(paths: Sequence[str]) -> FoundFiles:
    """The files behind files, folders, patterns and hub names."""
    if not paths:
        raise BadData("No files were given. Try: files, folders or a dataset on the hub.")
    files: dict[str, DataFile] = {}
    skipped: list[str] = []
    for file in (file for path in paths for file in _expand(path, skipped)):
        key = os.path.realpath(file.path) if file.format != "hub" else file.path
        if key in files:
            raise BadData(f"{file.path} was given twice, so its rows would count twice. Try: name it once.")
        files[key] = file
    return FoundFiles(tuple(files.values()), tuple(skipped))


def skipped_note(skipped: Sequence[str]) -> str:
    """`not read: data/README.md (unknown format)`, with the count if there are several; empty if nothing was skipped."""
    count = f" ({len(skipped):,} entries)" if len(skipped) > 1 else ""
    return f"not read{count}: {first_names(skipped)}" if skipped else ""


def refuse_output_inside(output: Path, paths: Sequence[str]) -> None:
    """Refuse an output folder inside an input folder: the next run would read it as input."""
    for path in paths:
        if Path(path).is_dir() and output.resolve().is_relative_to(Path(path).resolve()):
            raise BadOption(f"output='{output}' is inside {path}, whose files are read. Try: a folder outside of it.")


def format_of(name: str) -> Format | None:
    """The format by the ending of a name; None if it is not supported."""
    path = Path(name)
    if path.suffix.lower() in COMPRESSIONS:
        inner = FORMATS.get(Path(path.stem).suffix.lower())
        return None if inner == "parquet" else inner  # parquet files are compressed inside
    return FORMATS.get(path.suffix.lower())


def _expand(path: str, skipped: list[str]) -> Iterator[DataFile]:
    """The files behind one path. What is skipped in folders is added to `skipped`."""
    location = Path(path)
    try:
        if location.is_dir():
            yield from _folder_files(location, skipped)
        elif location.exists() or location.is_symlink():
            yield _data_file(path)
        elif matches := sorted(glob.glob(path, recursive=True)):  # noqa: PTH207 - Path.glob takes no absolute pattern
            for match in matches:
                yield from _expand(match, skipped)
        elif _is_hub_name(path):
            yield DataFile(path, "hub", 0, 0)
        else:
            raise BadData(f"{path} does not exist. {_suggestion(location)}")
    except OSError as error:
        raise BadData(f"{error.filename or path}: {error.strerror}. Try: make it readable for this user.") from None


def _folder_files(folder: Path, skipped: list[str]) -> Iterator[DataFile]:
    if all((folder / name).is_file() for name in CLEAN_OUTPUT):
        raise BadData(
            f"{folder} is an output of `brimful data clean` with separate splits. Try: one file, such as {folder / CLEAN_OUTPUT[0]}."
        )
    paths = sorted(_walk(folder))
    supported = [path for path in paths if format_of(path.name) and not path.is_dir()]
    tables = [path for path in supported if format_of(path.name) != "text"]
    notes = sorted(set(supported) - set(tables)) if tables else []
    supported = tables or supported
    if not supported:
        content = f"contains only {first_names([path.name for path in paths])}" if paths else "is empty"
        raise BadData(f"{folder} {content}. Try: {_SUPPORTED}.")
    others = sorted(set(paths) - set(supported) - set(notes))
    skipped.extend(f"{path} (a text beside other formats)" for path in notes)
    skipped.extend(f"{path} ({'a link to a folder' if path.is_dir() else 'unknown format'})" for path in others)
    for path in supported:
        yield _data_file(str(path))


def _walk(folder: Path) -> Iterator[Path]:
    """All files and links below, except hidden ones. An unreadable folder raises an error instead of looking empty.

    Links to folders are not followed: they may lead out of the folder, or back into it.
    """
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def _data_file(path: str) -> DataFile:
    format_ = format_of(path)
    if format_ is None:
        raise BadData(f"{path}: unknown format. Try: {_SUPPORTED}.")
    if not Path(path).exists():
        raise BadData(f"{path} is a link to {Path(path).readlink()}, which does not exist. Try: repair or remove it.")
    if not Path(path).is_file():  # opening a pipe would wait for its writer
        raise BadData(f"{path} is not a regular file. Try: write its rows to a file, or remove it.")
    with Path(path).open("rb"):  # raises if it is not readable
        stat = Path(path).stat()
    if stat.st_size == 0:
        raise BadData(f"{path} is empty (0 bytes). Try: leave it out, or download it again.")
    return DataFile(path, format_, stat.st_size, stat.st_mtime_ns)


def _is_hub_name(path: str) -> bool:
    """`owner/name` or `owner/name:split`: two plain parts without the ending of a file."""
    parts = path.partition(":")[0].split("/")
    return (
        len(parts) == 2
        and all(parts)
        and not path.startswith((".", "/", "~"))
        and format_of(parts[1]) is None
        and not Path(parts[0]).is_dir()
    )


def _suggestion(path: Path) -> str:
    """Similar names, or what the nearest existing folder contains."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    names = sorted(child.name for child in folder.iterdir() if not child.name.startswith("."))
    close = difflib.get_close_matches(path.name, names, n=3) if folder == path.absolute().parent else []
    if close:
        return f"Try: {' or '.join(str(path.parent / name) for name in close)}."
    return f"Try: one of {first_names(names)} in {folder}." if names else f"Try: another folder, {folder} is empty."


def first_names(names: Iterable[str]) -> str:
    """The first five, and an ellipsis if there are more."""
    first = list(islice(names, 6))
    return ", ".join(first[:5]) + " …" * (len(first) > 5)


def repeated_names(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, sorted."""
    return sorted(name for name, count in Counter(names).items() if count > 1)
