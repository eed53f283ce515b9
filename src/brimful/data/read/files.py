"""What every reader gives: rows under the file's own names, each with its line, and the rows that could not be read.

A reader is asked for a few fields and yields stretches of a file. A stretch has at most `CHUNK_ROWS` rows and about
`CHUNK_BYTES` of text, so that memory does not depend on the file; only one row that is larger than that makes it larger.
Where a stretch ends depends on the file alone: an interrupted command can count stretches.
"""

import difflib
import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.errors import BadData, BadOption

CHUNK_ROWS = 16_384
"""Rows of a chunk at most: about 10 MB of chat."""

CHUNK_BYTES = 8 * 2**20
"""Text of a chunk, about: whole articles come in fewer rows."""

MAX_ROW_BYTES = 256 * 2**20
"""A row longer than this is a file in another format, not a row: a list of objects in one line, a quote never closed."""

TEXT = pa.string()

Lines = npt.NDArray[np.int64]


def turns(role: str, content: str) -> pa.ListType:
    """A list of messages: `[{"from": …, "value": …}]`."""
    return pa.list_(pa.struct([(role, TEXT), (content, TEXT)]))


_ROLES = ("from", "role")
_CONTENTS = ("value", "content")


def turn_keys(names: Iterable[str]) -> tuple[str, str] | None:
    """Which names of a message are who speaks and what is said, if it is a message."""
    has = set(names)
    role = next((name for name in _ROLES if name in has), None)
    content = next((name for name in _CONTENTS if name in has), None)
    return (role, content) if role and content else None


def is_messages(kind: pa.DataType | None) -> bool:
    """Whether this is `turns(…)`."""
    item = kind.value_type if kind is not None and pa.types.is_list(kind) else None
    keys = turn_keys(field.name for field in item) if item is not None and pa.types.is_struct(item) else None
    return keys is not None and kind == turns(*keys)


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that cannot be read."""

    file: str
    line: int
    """Of a jsonl, json or csv file; in parquet the number of the row. Counted from 1."""
    why: str
    """`not JSON: Expecting ',' delimiter`, `not UTF-8`, `no field 'response'`."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.why}"


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a file that a reader is asked for."""

    name: str
    type: pa.DataType
    """`TEXT`, or `turns(…)`."""
    required: bool = True
    """Whether a row without it is broken; otherwise it is as good as empty."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What a file has."""

    types: Mapping[str, pa.DataType | None]
    """By name: `TEXT` or `turns(…)`, another type where it is neither, None where nothing is known of it."""
    usual: tuple[str, ...]
    """Those that its rows have as a rule: all of them, but for JSON, where each row may have others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """A stretch of a file."""

    rows: pa.RecordBatch
    """One column per field asked for, in that order, of its type, in valid UTF-8; null where the file has null."""
    lines: Lines
    """Of each row."""
    broken: tuple[Broken, ...]
    at_bytes: int
    """How far into the file this stretch reaches."""


Reader = Callable[[str, tuple[Field, ...]], Iterator[Raw]]


def batch(fields: tuple[Field, ...], columns: list[pa.Array]) -> pa.RecordBatch:
    """Columns under the names and types of the fields."""
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([(field.name, field.type) for field in fields]))


def cut(raw: Raw) -> Iterator[Raw]:
    """The same rows in equal stretches of about `CHUNK_BYTES` at most; a broken row stays with the rows after it."""
    pieces = max(1, -(-raw.rows.nbytes // CHUNK_BYTES))
    step = max(1, -(-raw.rows.num_rows // pieces))
    left = list(raw.broken)
    for start in range(0, max(1, raw.rows.num_rows), step):
        lines = raw.lines[start : start + step]
        last = start + step >= raw.rows.num_rows
        here = left if last else [one for one in left if one.line <= lines[-1]]
        left = left[len(here) :]
        yield replace(raw, rows=raw.rows.slice(start, step), lines=lines, broken=tuple(here))


# The bytes of a file of text, uncompressed on the way, with the position in the file itself.
#
# A compressed stream that ends in the middle must not pass for the end of the file: Arrow says so for .gz, .bz2 and .zst.


COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}

_BOM = b"\xef\xbb\xbf"


class ByteStream:
    """A file opened for reading from its start, without a byte-order mark."""

    def __init__(self, path: str) -> None:
        self._path, self._compression = path, COMPRESSIONS.get(Path(path).suffix.lower())
        self._first, self._given_back = True, b""
        try:
            self._file = pa.OSFile(path)
            self._stream = pa.CompressedInputStream(self._file, self._compression) if self._compression else self._file
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from None

    def read(self, count: int) -> bytes:
        """The next bytes, `count` of them unless the file ends; b"" at its end. What was given back comes by itself."""
        if self._given_back:
            found, self._given_back = self._given_back, b""
            return found
        pieces, missing = [], count
        while missing:
            piece = self._some(missing)
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        found = b"".join(pieces) if len(pieces) != 1 else pieces[0]
        if self._first and found:
            self._first, found = False, found.removeprefix(_BOM)
        return found

    def unread(self, data: bytes) -> None:
        """Give back what was read last."""
        self._given_back = data

    def at_bytes(self) -> int:
        """How much of the file was read."""
        return int(self._file.tell())

    def whole_lines(self) -> Iterator[bytes]:
        """Blocks that end with a line break, about `CHUNK_BYTES` of them; the last one ends with the file."""
        pieces, line = [b""], 1
        while piece := self.read(CHUNK_BYTES):
            last = piece.rfind(b"\n") + 1
            pieces.append(piece[:last] if last else piece)
            if last:
                block = b"".join(pieces)
                line += block.count(b"\n")
                yield block
                pieces = [piece[last:]]
            elif sum(map(len, pieces)) > MAX_ROW_BYTES:
                raise BadData(
                    f"{self._path}, line {line}: longer than {MAX_ROW_BYTES >> 20} MiB; is this one row a line?"
                )
        if rest := b"".join(pieces):
            yield rest

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._file.close()

    def _some(self, count: int) -> bytes:
        try:
            return bytes(self._stream.read(count))
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> BadData:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if self._compression and not isinstance(error, FileNotFoundError | PermissionError):
            return BadData(
                f"{self._path}: no whole {self._compression} file ({lines[0].rstrip('.')}); get or write it again"
            )
        return BadData(f"{self._path}: {lines[0].rstrip('.')}")


# From what a user typed to files with a known format: files, folders, patterns, or the name of a data set on the hub.


Format = Literal["parquet", "jsonl", "json", "csv", "hub"]

FORMATS: dict[str, Format] = {
    ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip


CLEANED = ("train.parquet", "clean.json")
"""A folder with these is the output of `brimful data clean`."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of rows."""

    path: str
    format: Format
    size_bytes: int
    modified_ns: int


def find_files(paths: Sequence[str]) -> tuple[DataFile, ...]:
    """All files behind these paths, in the order given, those of a folder by name; each once."""
    if not paths:
        raise BadData("no files given; name files, folders or a data set on the hub")
    found: dict[str, DataFile] = {}
    for file in (file for path in paths for file in _behind(path)):
        real = os.path.realpath(file.path) if file.format != "hub" else file.path
        if real in found:
            raise BadData(f"{file.path} is given twice; its rows would count twice: name it once")
        found[real] = file
    return tuple(found.values())


def _behind(path: str) -> Iterator[DataFile]:
    here = Path(path)
    try:
        if here.is_dir():
            yield from _in_folder(here)
        elif here.exists():
            yield _file(path, _format(path))
        elif matches := sorted(glob.glob(path, recursive=True)):  # noqa: PTH207 - Path.glob takes no absolute pattern
            for match in matches:
                yield from _behind(match)
        elif _is_hub_name(path):
            yield DataFile(path, "hub", 0, 0)
        else:
            raise BadData(f"{path}: there is no such file or folder{_near(here)}")
    except OSError as error:
        raise BadData(f"{error.filename or path}: {error.strerror}; it must be readable for who runs this") from None


def _in_folder(folder: Path) -> Iterator[DataFile]:
    if all((folder / name).is_file() for name in CLEANED):
        raise BadData(
            f"{folder} is what `brimful data clean` made, its splits are apart on purpose: name the file you mean, such as {folder / CLEANED[0]}"
        )
    inside = sorted(_walk(folder))
    known = [path for path in inside if _known(path.name)]
    if not known:
        has = f"it has {_some([path.name for path in inside])}" if inside else "it is empty"
        raise BadData(f"{folder}: no file of rows in this folder, {has}; known are {_endings()}")
    for path in known:
        yield _file(str(path), _format(str(path)))


def _walk(folder: Path) -> Iterator[Path]:
    """All files below, but for hidden ones. A folder that cannot be read is an error, not an empty one."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        elif path.is_file():
            yield path


def _file(path: str, kind: Format) -> DataFile:
    with Path(path).open("rb"):  # may it be read at all?
        about = Path(path).stat()
    if about.st_size == 0:
        raise BadData(f"{path} is empty (0 bytes); leave it out, or get it again")
    return DataFile(path, kind, about.st_size, about.st_mtime_ns)


def _format(path: str) -> Format:
    found = _known(path)
    if found is None:
        raise BadData(f"{path}: unknown format; known are {_endings()}")
    return found


def _known(name: str) -> Format | None:
    path = Path(name)
    if path.suffix.lower() in COMPRESSIONS:
        found = FORMATS.get(Path(path.stem).suffix.lower())
        return None if found == "parquet" else found  # parquet compresses within
    return FORMATS.get(path.suffix.lower())


def _endings() -> str:
    return f"{', '.join(FORMATS)}, those of text also with {', '.join(COMPRESSIONS)}"


def _is_hub_name(path: str) -> bool:
    """`owner/name` or `owner/name:split`: two plain parts, and no ending of a file."""
    name = path.partition(":")[0].split("/")
    return (
        len(name) == 2
        and all(name)
        and not path.startswith((".", "/", "~"))
        and _known(name[1]) is None
        and not Path(name[0]).is_dir()
    )


def _near(path: Path) -> str:
    """What there is instead, in the nearest folder that exists."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    names = sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
    close = difflib.get_close_matches(path.name, names, n=3) if folder == path.absolute().parent else []
    if close:
        return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?"
    return f"; {folder} has {_some(names)}" if names else f"; {folder} is empty"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + " …" * (len(names) > 5)


def refuse_output_inside(output: Path, paths: Sequence[str]) -> None:
    """A store within a folder of rows would be read as rows the next time."""
    for path in paths:
        if Path(path).is_dir() and output.resolve().is_relative_to(Path(path).resolve()):
            raise BadOption(f"--output {output} lies inside {path}, whose files are read; name a folder outside of it")
