"""Rows of a csv file (commas) or a tsv file (tabs): the first row names the columns.

Python's csv module, in its strict mode: it knows the line of every row, goes on behind a mistake and takes quoted line
breaks. Arrow's reader is faster and does none of the three.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from brimful.data.read.byte_stream import COMPRESSIONS, ByteStream
from brimful.data.read.raw import CHUNK_BYTES, CHUNK_ROWS, TEXT, Broken, Columns, Field, Raw, batch
from brimful.errors import BadData

_FIELD_CHARACTERS = 64 * 2**20
"""A field longer than this is a quote that was never closed. The module keeps four bytes a character while it reads."""

Found = tuple[int, list[str] | str]
"""The line on which a row starts, and its fields or why it has none."""


def csv_columns(path: str) -> Columns:
    """The header. A file without a row below it is a mistake."""
    with ByteStream(path) as stream:
        rows = _rows(path, stream)
        header = _header(path, rows)
        if next(rows, None) is None:
            raise BadData(f"{path} has a header and no rows; leave it out")
        return Columns(dict.fromkeys(header, TEXT), tuple(header))


def read_csv(path: str, fields: tuple[Field, ...]) -> Iterator[Raw]:
    """All rows with the line on which they start."""
    with ByteStream(path) as stream:
        rows = _rows(path, stream)
        header = _header(path, rows)
        places = [header.index(field.name) for field in fields]
        held = _Held(path, fields)
        for line, found in rows:
            held.add(line, found, len(header), places)
            if held.full:
                yield held.raw(stream.at_bytes())
                held = _Held(path, fields)
        if held.count:
            yield held.raw(stream.at_bytes())


class _Held:
    """Rows on their way into a chunk."""

    def __init__(self, path: str, fields: tuple[Field, ...]) -> None:
        self._path, self._fields = path, fields
        self._columns: list[list[str]] = [[] for _ in fields]
        self._lines: list[int] = []
        self._broken: list[Broken] = []
        self._characters = 0

    @property
    def count(self) -> int:
        return len(self._lines) + len(self._broken)

    @property
    def full(self) -> bool:
        """Characters are counted, of which one may take three bytes."""
        return self.count == CHUNK_ROWS or self._characters >= CHUNK_BYTES // 2

    def add(self, line: int, found: list[str] | str, width: int, places: list[int]) -> None:
        if isinstance(found, str):
            self._broken.append(Broken(self._path, line, found))
        elif len(found) != width:
            self._broken.append(Broken(self._path, line, f"{len(found)} fields, the header has {width}"))
        elif not _utf8(found):
            self._broken.append(Broken(self._path, line, "not UTF-8"))
        else:
            self._lines.append(line)
            for column, place in zip(self._columns, places, strict=True):
                column.append(found[place])
                self._characters += len(found[place])

    def raw(self, at_bytes: int) -> Raw:
        columns = [pa.array(column, type=TEXT) for column in self._columns]
        lines = np.array(self._lines, dtype=np.int64)
        return Raw(rows=batch(self._fields, columns), lines=lines, broken=tuple(self._broken), at_bytes=at_bytes)


def _rows(path: str, stream: ByteStream) -> Iterator[Found]:
    """All rows that are not blank, the header first."""
    csv.field_size_limit(_FIELD_CHARACTERS)
    reader = csv.reader(_text_lines(stream), delimiter=_delimiter(path), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            found = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error) or "field limit" in str(error):
                raise BadData(
                    f"{path}, line {line}: a quote opens in this row and never closes; close it or double it"
                ) from None
            yield line, f"not CSV: {error}"
            continue
        if found:
            yield line, found


def _text_lines(stream: ByteStream) -> Iterator[str]:
    """Lines with their breaks. Bytes that are no UTF-8 pass as lone surrogates, to be found in the row they are in."""
    for block in stream.whole_lines():
        text = block.decode(errors="surrogateescape")
        yield from (line + "\n" for line in text.removesuffix("\n").split("\n"))


def _header(path: str, rows: Iterator[Found]) -> list[str]:
    line, header = next(rows, (1, "no rows; leave it out"))
    if isinstance(header, str):
        raise BadData(f"{path}, line {line}: {header}")
    if not _utf8(header):
        raise BadData(
            f"{path}, line {line}: the header is not UTF-8; if the file is in GBK, convert it with iconv -f gbk -t utf-8"
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise BadData(f"{path}, line {line}: the header names {', '.join(map(repr, twice))} twice; rename one of them")
    return header


def _utf8(found: list[str]) -> bool:
    try:
        "".join(found).encode()
    except UnicodeEncodeError:
        return False
    return True


def _delimiter(path: str) -> str:
    name = Path(path)
    ending = Path(name.stem).suffix if name.suffix.lower() in COMPRESSIONS else name.suffix
    return "\t" if ending.lower() == ".tsv" else ","
