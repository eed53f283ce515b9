"""What every reader gives: rows under the file's own names, each with its line, and the rows that could not be read.

A reader is asked for a few fields and yields stretches of a file. A stretch has at most `CHUNK_ROWS` rows and about
`CHUNK_BYTES` of text, so that memory does not depend on the file; only one row that is larger than that makes it larger.
Where a stretch ends depends on the file alone: an interrupted command can count stretches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
