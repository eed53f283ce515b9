"""Rows of a jsonl file: one JSON object a line.

Blocks of whole lines, `CHUNK_BYTES` and `CHUNK_ROWS` lines at most; a longer line makes a block of its own.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from brimful.data.read.byte_stream import ByteStream
from brimful.data.read.objects import Block, object_rows, parse
from brimful.data.read.raw import CHUNK_ROWS, TEXT, Columns, Field, Raw, is_messages, turn_keys, turns
from brimful.errors import BadData

_BREAK = ord("\n")
_SAMPLE_ROWS = 100
"""Rows whose fields are looked at: one alone may lack an optional field, or have null in it."""


def lines_columns(path: str) -> Columns:
    """The fields of the first rows."""
    with ByteStream(path) as stream:
        return sample_columns(path, blocks(path, stream))


def read_lines(path: str, fields: tuple[Field, ...]) -> Iterator[Raw]:
    """All rows with their lines."""
    with ByteStream(path) as stream:
        yield from read_blocks(stream, blocks(path, stream), fields)


def read_blocks(stream: ByteStream, found: Iterator[Block], fields: tuple[Field, ...]) -> Iterator[Raw]:
    """The rows of these blocks, and how far the stream has been read."""
    for block in found:
        rows, lines, broken = object_rows(block, fields)
        yield Raw(rows=rows, lines=lines, broken=broken, at_bytes=stream.at_bytes())


def sample_columns(path: str, found: Iterator[Block]) -> Columns:
    """What the first rows of these blocks have; no row at all is a mistake."""
    columns: dict[str, pa.DataType | None] = {}
    counts: Counter[str] = Counter()
    seen, wrong = 0, ""
    for line, row in _first_rows(found):
        if isinstance(row, str):
            wrong = wrong or f"{path}, line {line}: {row}"
            continue
        _learn(columns, row)
        counts.update(name for name in row if isinstance(name, str))
        seen += 1
        if seen == _SAMPLE_ROWS:
            break
    if not seen:
        raise BadData(
            f"{wrong}; nor can any other of the first rows be read" if wrong else f"{path} has no rows; leave it out"
        )
    return Columns(columns, tuple(name for name in columns if counts[name] >= seen / 2))


def _first_rows(found: Iterator[Block]) -> Iterator[tuple[int, dict[Any, Any] | str]]:
    """The rows of the first block that has any, read by Python."""
    for block in found:
        full = [index for index in range(len(block.ends)) if block.line(index).strip()]
        yield from ((int(block.lines[index]), parse(block.line(index))) for index in full)
        if full:
            return


def _learn(columns: dict[str, pa.DataType | None], row: dict[Any, Any]) -> None:
    """Text and messages in any of the rows count more than what else is there: a stray number is a broken row."""
    for name, value in row.items():
        if isinstance(name, str) and not (columns.get(name) == TEXT or is_messages(columns.get(name))):
            columns[name] = _kind(value) or columns.get(name)


def blocks(path: str, stream: ByteStream, *, before: int = 0) -> Iterator[Block]:
    """The stream in whole lines; `before` is how many of the file came earlier."""
    for data in stream.whole_lines():
        ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == _BREAK)
        if data[-1] != _BREAK:
            ends = np.append(ends, len(data))
        for start in range(0, len(ends), CHUNK_ROWS):
            part = ends[start : start + CHUNK_ROWS]
            begin = int(ends[start - 1]) + 1 if start else 0
            lines = np.arange(before + start + 1, before + start + len(part) + 1, dtype=np.int64)
            yield Block(file=path, data=data[begin : int(part[-1])], ends=part - begin, lines=lines)
        before += len(ends)


def _kind(value: object) -> pa.DataType | None:
    """`TEXT`, `turns(…)`, another type; None for what says nothing: null and an empty list."""
    if value is None or value == []:
        return None
    if isinstance(value, list) and isinstance(value[0], dict):
        keys = turn_keys(name for name in value[0] if isinstance(name, str))
        return turns(*keys) if keys else pa.list_(pa.null())
    kinds = {str: TEXT, bool: pa.bool_(), int: pa.float64(), float: pa.float64(), dict: pa.struct([])}
    return kinds.get(type(value), pa.list_(pa.null()))
