"""Rows of a json file: a list of objects, of any size, never held as a whole.

    [ {…} , {…} , {…} ]   ─► where the commas of the list are ─► one object a line ─► as jsonl

Where the list's own commas are follows from the quotes and brackets before them, which numpy finds 8 MiB at a time. What
is between two commas and no object is a broken row. A quote or bracket that is missing makes the rest of the file one
item that never ends: that is told with the line on which it starts.

A file that starts with `{` is read as jsonl, whatever it is called.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brimful.data.read.byte_stream import ByteStream
from brimful.data.read.json_lines import blocks, read_blocks, sample_columns
from brimful.data.read.objects import Block
from brimful.data.read.raw import CHUNK_BYTES, CHUNK_ROWS, MAX_ROW_BYTES, Columns, Field, Lines, Raw
from brimful.errors import BadData

_SPACE = b" \t\r\n"
_QUOTE, _BACKSLASH, _COMMA, _BREAK, _END = (ord(one) for one in '"\\,\n]')
_MARKS = np.isin(np.arange(256), [ord(one) for one in '"{}[],\n'])
_STEP = np.zeros(256, dtype=np.int64)
_STEP[[ord("{"), ord("[")]] = 1
_STEP[[ord("}"), ord("]")]] = -1
_NO_TEXT = 1
"""Put in place of a line break inside a string: as wrong there, and no line break."""


def json_columns(path: str) -> Columns:
    """The fields of the first rows."""
    with ByteStream(path) as stream:
        return sample_columns(path, _blocks(path, stream))


def read_json(path: str, fields: tuple[Field, ...]) -> Iterator[Raw]:
    """All rows with the line on which they start."""
    with ByteStream(path) as stream:
        yield from read_blocks(stream, _blocks(path, stream), fields)


def _blocks(path: str, stream: ByteStream) -> Iterator[Block]:
    """The rows of a list, or the lines of what is jsonl after all."""
    before, data = 1, stream.read(CHUNK_BYTES)
    while data and not data.strip(_SPACE):
        before, data = before + data.count(b"\n"), stream.read(CHUNK_BYTES)
    start = data.lstrip(_SPACE)[:1]
    if start == b"{":
        if data.lstrip(_SPACE).split(b"\n", 1)[0].rstrip() == b"{":
            raise BadData(f"{path}: one object over many lines; rows come as a list of objects or as one object a line")
        stream.unread(data)
        yield from blocks(path, stream, before=before - 1)
    elif start == b"[":
        at = data.index(b"[") + 1
        yield from _list_blocks(path, stream, data[at:], before + data[:at].count(b"\n"))
    elif start:
        raise BadData(
            f"{path}: no JSON, it starts with {start.decode(errors='replace')!r}; a list of objects starts with ["
        )


@dataclass(frozen=True, slots=True)
class _Marks:
    """Where in a piece of a list its items end."""

    commas: Lines
    """The commas between items, and the end of the list where it is there."""
    ended: bool
    breaks: Lines
    in_string: npt.NDArray[np.bool_]
    """Which of the line breaks are inside a string, where JSON allows none."""


def _list_blocks(path: str, stream: ByteStream, data: bytes, line: int) -> Iterator[Block]:
    """From behind the opening bracket on; `line` is that of the first byte."""
    first = True
    while True:
        marks = _marks(path, data, line)
        if len(marks.commas):
            last = int(marks.commas[-1])
            yield from _items(path, data[:last], marks, line, only=first and marks.ended)
            first, line, data = False, line + int(np.searchsorted(marks.breaks, last)), data[last + 1 :]
        if marks.ended:
            return _nothing_after(path, stream, data, line)
        piece = stream.read(max(CHUNK_BYTES, len(data)))
        if not piece or len(data) > MAX_ROW_BYTES:
            there = line + data[: len(data) - len(data.lstrip(_SPACE))].count(b"\n")
            raise BadData(
                f"{path}, line {there}: what starts here never ends: cut off, or a quote or bracket is missing"
            )
        data += piece


def _marks(path: str, data: bytes, line: int) -> _Marks:
    raw = np.frombuffer(data, dtype=np.uint8)
    at = np.flatnonzero(_MARKS[raw])
    mark = raw[at]
    breaks = mark == _BREAK
    inside = np.cumsum((mark == _QUOTE) & ~_escaped(raw, at)) % 2 == 1
    depth = np.cumsum(np.where(inside, 0, _STEP[mark]))
    commas = (mark == _COMMA) & ~inside & (depth == 0)
    ends = np.flatnonzero(depth < 0)
    if len(ends):
        end = int(ends[0])
        if mark[end] != _END:
            there = line + int(np.count_nonzero(breaks[:end]))
            raise BadData(f"{path}, line {there}: a closing brace too many; what follows cannot be told apart")
        commas = np.append(commas[:end], True)
    return _Marks(at[: len(commas)][commas], bool(len(ends)), at[breaks], inside[breaks])


def _escaped(raw: npt.NDArray[np.uint8], at: Lines) -> npt.NDArray[np.bool_]:
    """Which marks stand behind an odd number of backslashes."""
    escaped = np.zeros(len(at), dtype=bool)
    places, back = np.flatnonzero(raw[at] == _QUOTE), 1
    while len(places):
        places = places[at[places] >= back]
        places = places[raw[at[places] - back] == _BACKSLASH]
        escaped[places] ^= True
        back += 1
    return escaped


def _items(path: str, data: bytes, marks: _Marks, line: int, *, only: bool) -> Iterator[Block]:
    """What is between the commas, an item a line."""
    copy = np.frombuffer(data, dtype=np.uint8).copy()
    inner = marks.breaks < len(data)
    copy[marks.breaks[inner]] = np.where(marks.in_string[inner], _NO_TEXT, ord(" "))
    flat = copy.tobytes()
    starts = np.concatenate([[0], marks.commas[:-1] + 1])
    found = [flat[start:end] for start, end in zip(starts.tolist(), marks.commas.tolist(), strict=True)]
    items = [one.strip(_SPACE) for one in found]
    if only and items == [b""]:
        return
    begins = starts + [len(one) - len(one.lstrip(_SPACE)) for one in found]
    lines = line + np.searchsorted(marks.breaks, begins)
    for start in range(0, len(items), CHUNK_ROWS):
        part = [item or b"," for item in items[start : start + CHUNK_ROWS]]  # nothing between two commas is no row
        ends = np.cumsum([len(item) + 1 for item in part]) - 1
        yield Block(file=path, data=b"\n".join(part), ends=ends, lines=lines[start : start + CHUNK_ROWS])


def _nothing_after(path: str, stream: ByteStream, data: bytes, line: int) -> None:
    while data:
        if data.strip(_SPACE):
            raise BadData(f"{path}, line {line}: the list ends here and the file goes on; is it more than one list?")
        data = stream.read(CHUNK_BYTES)
