"""Lines of JSON objects made into rows: fast by Arrow, exact by Python.

Arrow reads 220 MB/s of chat but stops at the first mistake and does not see lines: it takes two objects in a line, an
object over two lines, and a missing field for null. So a block counts as read by Arrow only where every line starts with `{`, ends
with `}` and made one row: between `}` and `{` JSON allows no line break but the one between two objects. Any other block
goes line by line through Python's json, which is three times slower and says what is wrong with which line.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from brimful.data.read.files import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    MAX_ROW_BYTES,
    TEXT,
    Broken,
    ByteStream,
    Columns,
    Field,
    Lines,
    Raw,
    batch,
    is_messages,
    turn_keys,
    turns,
)
from brimful.errors import BadData

_TWICE = object()
"""Key of a parsed object under which the names stand that it has more than once."""

_OPEN, _CLOSE, _RETURN = ord("{"), ord("}"), ord("\r")

Rows = tuple[pa.RecordBatch, Lines, tuple[Broken, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Whole lines of a file: the last one may lack its line break."""

    file: str
    data: bytes
    ends: Lines
    """Where each line ends, its line break excluded."""
    lines: Lines
    """The number of each line in its file."""

    @property
    def starts(self) -> Lines:
        return np.concatenate([[0], self.ends[:-1] + 1])

    def line(self, index: int) -> bytes:
        """The bytes of one line."""
        return self.data[int(self.ends[index - 1]) + 1 if index else 0 : int(self.ends[index])]


def object_rows(block: Block, fields: tuple[Field, ...]) -> Rows:
    """The fields of every line that is an object and has them; blank lines are no rows."""
    found = _by_arrow(block, fields)
    return _by_python(block, fields) if found is None else found


def parse(line: bytes) -> dict[Any, Any] | str:
    """The object of one line, or why there is none."""
    try:
        value = json.loads(line.decode(), object_pairs_hook=_object, parse_int=len)
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg.removesuffix(' at')} at character {error.colno}"
    except RecursionError:
        return "not JSON: nested too deep"
    return value if isinstance(value, dict) else f"{_called(value)}, not an object"


def _by_arrow(block: Block, fields: tuple[Field, ...]) -> Rows | None:
    """The rows, where Arrow's reading is sure to be that of the lines."""
    full = _full_lines(block)
    if full is None or not _utf8(block.data) or _has_odd_number(block.data):
        return None
    schema = pa.schema([(field.name, field.type) for field in fields])
    reading = pj.ReadOptions(use_threads=False, block_size=len(block.data) + 1)
    parsing = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = pj.read_json(pa.BufferReader(block.data), read_options=reading, parse_options=parsing)
        table.validate(full=True)  # half a surrogate pair is an error for Arrow's own parser, but the promise is ours
    except pa.ArrowException:
        return None
    if table.num_rows != len(full):
        return None
    rows = batch(fields, [column.combine_chunks() for column in table.columns])
    return _without_missing(block, fields, rows, full)


def _full_lines(block: Block) -> Lines | None:
    """Indices of the lines that are not blank; None where one of them does not look like an object."""
    if not block.data:
        return None
    data, starts, ends = np.frombuffer(block.data, dtype=np.uint8), block.starts, block.ends
    ends = ends - ((ends > starts) & (data[ends - 1] == _RETURN))
    full = np.flatnonzero(ends > starts)
    looks = (data[starts[full]] == _OPEN) & (data[ends[full] - 1] == _CLOSE)
    return full if len(full) and looks.all() else None


def _has_odd_number(data: bytes) -> bool:
    """Whether `Inf` or `-NaN` may stand for a number: Arrow takes them, Python does not."""
    for word in (b"Inf", b"-NaN"):
        at = data.find(word)
        while at >= 0:
            before = data[max(0, at - 64) : at].rstrip(b" \t\r-")[-1:]
            if before in b":,[" and data[at : at + 8] != b"Infinity":
                return True
            at = data.find(word, at + 1)
    return False


def _utf8(data: bytes) -> bool:
    """Also what no field asks for: a line is UTF-8 or not, whoever reads it."""
    offsets = pa.py_buffer(np.array([0, len(data)], dtype=np.int64))
    try:
        pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _without_missing(block: Block, fields: tuple[Field, ...], rows: pa.RecordBatch, full: Lines) -> Rows:
    """Arrow has null both for `null` and for a field that is not there: Python's json tells them apart."""
    keep, broken = np.ones(rows.num_rows, dtype=bool), []
    for row in _rows_with_null(fields, rows):
        found = _values(block.line(int(full[row])), fields)
        if isinstance(found, str):
            keep[row] = False
            broken.append(Broken(block.file, int(block.lines[full[row]]), found))
    lines = block.lines[full]
    return (rows.filter(pa.array(keep)), lines[keep], tuple(broken)) if broken else (rows, lines, ())


def _rows_with_null(fields: tuple[Field, ...], rows: pa.RecordBatch) -> list[int]:
    found: set[int] = set()
    for field, column in zip(fields, rows.columns, strict=True):
        if field.required and column.null_count:
            found.update(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist())
        if field.type != TEXT:
            parents, items = pc.list_parent_indices(column).to_numpy(), pc.list_flatten(column)
            for leaf in (items, *items.flatten()):
                found.update(parents[leaf.is_null().to_numpy(zero_copy_only=False)].tolist())
    return sorted(found)


def _by_python(block: Block, fields: tuple[Field, ...]) -> Rows:
    rows: list[list[Any]] = []
    lines: list[int] = []
    broken: list[Broken] = []
    for index, number in enumerate(block.lines.tolist()):
        line = block.line(index)
        if not line.strip():
            continue
        found = _values(line, fields)
        if isinstance(found, str):
            broken.append(Broken(block.file, number, found))
        else:
            rows.append(found)
            lines.append(number)
    columns = [pa.array([row[place] for row in rows], type=field.type) for place, field in enumerate(fields)]
    return batch(fields, columns), np.array(lines, dtype=np.int64), tuple(broken)


def _values(line: bytes, fields: tuple[Field, ...]) -> list[Any] | str:
    """The fields of one line, or what is wrong with it."""
    found = parse(line)
    if isinstance(found, str):
        return found
    for field in fields:
        wrong = _wrong(found, field.name, field.type, required=field.required)
        if wrong:
            return wrong
    return [found.get(field.name) for field in fields]


def _wrong(found: dict[Any, Any], name: str, kind: pa.DataType, *, required: bool) -> str | None:
    """Why this field of an object is not of this type."""
    if name in found.get(_TWICE, ()):
        return f"the field '{name}' twice"
    if name not in found:
        return f"no field '{name}'" if required else None
    value = found[name]
    if value is None:
        return None
    if kind == TEXT:
        return _wrong_text(value, name)
    if not isinstance(value, list):
        return f"'{name}' is {_called(value)}, not a list of messages"
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            return f"message {number} of '{name}' is {_called(message)}, not an object"
        for field in kind.value_type:
            wrong = _wrong(message, field.name, field.type, required=True)
            if wrong:
                return f"message {number} of '{name}': {wrong}"
    return None


def _wrong_text(value: Any, name: str) -> str | None:
    if not isinstance(value, str):
        return f"'{name}' is {_called(value)}, not text"
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"'{name}' has half of a surrogate pair"
    return None


def _object(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        found[_TWICE] = {name for name in names if names.count(name) > 1}
    return found


def _called(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


# Rows of a jsonl file: one JSON object a line.
#
# Blocks of whole lines, `CHUNK_BYTES` and `CHUNK_ROWS` lines at most; a longer line makes a block of its own.


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


# Rows of a json file: a list of objects, of any size, never held as a whole.
#
#     [ {…} , {…} , {…} ]   ─► where the commas of the list are ─► one object a line ─► as jsonl
#
# Where the list's own commas are follows from the quotes and brackets before them, which numpy finds 8 MiB at a time. What
# is between two commas and no object is a broken row. A quote or bracket that is missing makes the rest of the file one
# item that never ends: that is told with the line on which it starts.
#
# A file that starts with `{` is read as jsonl, whatever it is called.


_SPACE = b" \t\r\n"
_QUOTE, _BACKSLASH, _COMMA, _BREAK_JSON_LIST, _END = (ord(one) for one in '"\\,\n]')
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
    breaks = mark == _BREAK_JSON_LIST
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
