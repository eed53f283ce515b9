"""Readers for jsonl (one object per line) and json (a list of objects), both as blocks with one object per line.

Arrow reads 220 MB/s of chat, but it stops at the first mistake and does not see lines: it accepts two objects on a line,
an object over two lines, and reads a missing field as null. So a block is read by Arrow only where every line starts with
`{`, ends with `}` and gave one row: between `}` and `{` JSON allows no line break except the one between two objects. All
other blocks go line by line through Python's json, which is three times slower and names the mistake and its line. So do
columns that are requested as `JSON`, since Arrow would want to know all keys in them beforehand.

A json list is never held as a whole. The commas between its items follow from the quotes and brackets before them, which
numpy finds 1 MiB at a time; the items are then written one per line. A file that starts with `{` is read as jsonl.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
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
    JSON,
    TEXT,
    ByteStream,
    Chunk,
    Column,
    FileSchema,
    Lines,
    RowProblem,
    is_messages_type,
    message_keys,
    messages_type,
    record_batch,
    repeated_names,
    row_too_long,
)
from brimful.errors import BadData

_OPEN, _CLOSE, _RETURN, _NEWLINE, _QUOTE, _BACKSLASH, _COMMA, _END = (ord(mark) for mark in '{}\r\n"\\,]')
_SPACE = b" \t\r\n"
_SAMPLE_ROWS = 100
"""Rows whose fields are looked at: one alone may lack an optional field, or have null in it."""
_REPEATED = object()
"""Key of a parsed object for the set of names that it has more than once."""

Parsed = tuple[pa.RecordBatch, Lines, tuple[RowProblem, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Whole lines of a file; the last one may lack its line break."""

    file: str
    data: bytes
    ends: Lines
    """Where each line ends, without its line break."""
    lines: Lines
    """The number of each line in the file."""

    @property
    def starts(self) -> Lines:
        return np.concatenate([[0], self.ends[:-1] + 1])

    def line(self, index: int) -> bytes:
        return self.data[int(self.ends[index - 1]) + 1 if index else 0 : int(self.ends[index])]


# ── The two formats ───────────────────────────────────────────────────────────────────────────────────────────────────


def jsonl_schema(path: str, max_row_bytes: int) -> FileSchema:
    """The fields of the first rows."""
    with ByteStream(path) as stream:
        return _sample_schema(path, _line_blocks(path, stream, max_row_bytes))


def read_jsonl(path: str, columns: tuple[Column, ...], max_row_bytes: int) -> Iterator[Chunk]:
    """All rows with their lines."""
    with ByteStream(path) as stream:
        for block in _line_blocks(path, stream, max_row_bytes):
            yield Chunk(path, *parse_block(block, columns), stream.position())


def json_schema(path: str, max_row_bytes: int) -> FileSchema:
    """The fields of the first rows."""
    with ByteStream(path) as stream:
        return _sample_schema(path, _json_blocks(path, stream, max_row_bytes))


def read_json(path: str, columns: tuple[Column, ...], max_row_bytes: int) -> Iterator[Chunk]:
    """All rows with the line on which they start."""
    with ByteStream(path) as stream:
        for block in _json_blocks(path, stream, max_row_bytes):
            yield Chunk(path, *parse_block(block, columns), stream.position())


def _line_blocks(path: str, stream: ByteStream, max_row_bytes: int, *, lines_before: int = 0) -> Iterator[Block]:
    """The stream in blocks of at most `CHUNK_ROWS` lines."""
    for data in stream.whole_lines(max_row_bytes):
        ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == _NEWLINE)
        if data[-1] != _NEWLINE:
            ends = np.append(ends, len(data))
        for start in range(0, len(ends), CHUNK_ROWS):
            part = ends[start : start + CHUNK_ROWS]
            begin = int(ends[start - 1]) + 1 if start else 0
            lines = np.arange(lines_before + start + 1, lines_before + start + len(part) + 1, dtype=np.int64)
            yield Block(file=path, data=data[begin : int(part[-1])], ends=part - begin, lines=lines)
        lines_before += len(ends)


def _json_blocks(path: str, stream: ByteStream, max_row_bytes: int) -> Iterator[Block]:
    """The items of a list, or the lines of a file that is jsonl after all."""
    line, data = 1, stream.read(CHUNK_BYTES)
    while data and not data.strip(_SPACE):
        line, data = line + data.count(b"\n"), stream.read(CHUNK_BYTES)
    start = data.lstrip(_SPACE)[:1]
    if start == b"{":
        if data.lstrip(_SPACE).split(b"\n", 1)[0].rstrip() == b"{":
            raise BadData(f"{path} is one object over many lines. Try: a list of objects, or one object per line.")
        stream.push_back(data)
        yield from _line_blocks(path, stream, max_row_bytes, lines_before=line - 1)
    elif start == b"[":
        start_of_items = data.index(b"[") + 1
        items = _ListItems(path, line + data[:start_of_items].count(b"\n"), max_row_bytes)
        yield from items.blocks(stream, data[start_of_items:])
    elif start:
        first = start.decode(errors="replace")
        raise BadData(f"{path} is not JSON: it starts with {first!r}. Try: a list of objects, which starts with [.")


# ── Schema from the first rows ────────────────────────────────────────────────────────────────────────────────────────


def _sample_schema(path: str, blocks: Iterator[Block]) -> FileSchema:
    types: dict[str, pa.DataType | None] = {}
    counts: Counter[str] = Counter()
    rows, problem = 0, None
    for line, row in _first_rows(blocks):
        if isinstance(row, str):
            problem = problem or RowProblem(path, line, row)
            continue
        for name, value in row.items():
            # Text and messages in any row win over other values: a stray number is a broken row.
            if isinstance(name, str) and not (types.get(name) == TEXT or is_messages_type(types.get(name))):
                types[name] = _type_of(value) or types.get(name)
        counts.update(name for name in row if isinstance(name, str))
        rows += 1
        if rows == _SAMPLE_ROWS:
            break
    if not rows:
        raise BadData(
            f"{problem}, and no other of the first rows can be read. Try: {problem.repair('repair or remove them')}."
            if problem
            else f"{path} has no rows. Try: leave it out."
        )
    return FileSchema(types, tuple(name for name in types if counts[name] >= rows / 2))


def _first_rows(blocks: Iterator[Block]) -> Iterator[tuple[int, dict[Any, Any] | str]]:
    """The rows of the first block that has any."""
    for block in blocks:
        filled = [index for index in range(len(block.ends)) if block.line(index).strip()]
        yield from ((int(block.lines[index]), _parse_line(block.line(index))) for index in filled)
        if filled:
            return


def _type_of(value: object) -> pa.DataType | None:
    """`TEXT`, `messages_type(…)` or another type; None for null and an empty list, which say nothing."""
    if value is None or value == []:
        return None
    if isinstance(value, list) and isinstance(value[0], dict):
        keys = message_keys(name for name in value[0] if isinstance(name, str))
        return messages_type(*keys) if keys else pa.list_(pa.null())
    types = {str: TEXT, bool: pa.bool_(), int: pa.float64(), float: pa.float64(), dict: pa.struct([])}
    return types.get(type(value), pa.list_(pa.null()))


# ── One block by Arrow ────────────────────────────────────────────────────────────────────────────────────────────────


def parse_block(block: Block, columns: tuple[Column, ...]) -> Parsed:
    """The columns of every line that is an object and has them. Blank lines are not rows."""
    parsed = _by_arrow(block, columns)
    return _by_python(block, columns) if parsed is None else parsed


def _by_arrow(block: Block, columns: tuple[Column, ...]) -> Parsed | None:
    """The rows, where Arrow's result certainly matches the lines; otherwise None."""
    unread = [column for column in columns if column.type == JSON]
    if any(column.required or _may_have(block.data, column.name) for column in unread):
        return None
    filled = _object_lines(block)
    if filled is None or not _is_utf8(block.data) or _has_unusual_number(block.data):
        return None
    schema = pa.schema([(column.name, column.type) for column in columns if column.type != JSON])
    reading = pj.ReadOptions(use_threads=False, block_size=len(block.data) + 1)
    parsing = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = pj.read_json(pa.BufferReader(block.data), read_options=reading, parse_options=parsing)
        table.validate(full=True)  # Arrow rejects half a surrogate pair today; valid UTF-8 is our own promise
    except pa.ArrowException:
        return None
    if table.num_rows != len(filled):
        return None
    arrays = {name: column.combine_chunks() for name, column in zip(table.column_names, table.columns, strict=True)}
    arrays |= {column.name: pa.nulls(table.num_rows, JSON) for column in unread}
    rows = record_batch(columns, [arrays[column.name] for column in columns])
    return _without_missing(block, columns, rows, filled)


def _may_have(data: bytes, name: str) -> bool:
    """Whether an object could have this key. One that is not ASCII may be written with escapes, in several ways."""
    return json.dumps(name, ensure_ascii=False).encode() in data or (not name.isascii() and b"\\u" in data)


def _object_lines(block: Block) -> Lines | None:
    """Indices of the lines that are not blank; None where one of them does not look like an object."""
    if not block.data:
        return None
    data, starts, ends = np.frombuffer(block.data, dtype=np.uint8), block.starts, block.ends
    ends = ends - ((ends > starts) & (data[ends - 1] == _RETURN))
    filled = np.flatnonzero(ends > starts)
    are_objects = (data[starts[filled]] == _OPEN) & (data[ends[filled] - 1] == _CLOSE)
    return filled if len(filled) and are_objects.all() else None


def _has_unusual_number(data: bytes) -> bool:
    """Whether `Inf` or `-NaN` may stand for a number, which Arrow accepts and Python does not."""
    for word in (b"Inf", b"-NaN"):
        position = data.find(word)
        while position >= 0:
            before = data[max(0, position - 64) : position].rstrip(b" \t\r-")[-1:]
            if before in b":,[" and data[position : position + 8] != b"Infinity":
                return True
            position = data.find(word, position + 1)
    return False


def _is_utf8(data: bytes) -> bool:
    """Over the whole block: invalid bytes in a field that is not requested break a row as well."""
    offsets = pa.py_buffer(np.array([0, len(data)], dtype=np.int64))
    try:
        pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _without_missing(block: Block, columns: tuple[Column, ...], rows: pa.RecordBatch, filled: Lines) -> Parsed:
    """Arrow gives null both for `null` and for a missing field; Python's json distinguishes them."""
    keep, broken = np.ones(rows.num_rows, dtype=bool), []
    for row in _rows_with_null(columns, rows):
        values = _values(block.line(int(filled[row])), columns)
        if isinstance(values, str):
            keep[row] = False
            broken.append(RowProblem(block.file, int(block.lines[filled[row]]), values))
    lines = block.lines[filled]
    return (rows.filter(pa.array(keep)), lines[keep], tuple(broken)) if broken else (rows, lines, ())


def _rows_with_null(columns: tuple[Column, ...], rows: pa.RecordBatch) -> list[int]:
    numbers: set[int] = set()
    for column, array in zip(columns, rows.columns, strict=True):
        if column.required and array.null_count:
            numbers.update(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist())
        if column.type not in (TEXT, JSON):
            parents, items = pc.list_parent_indices(array).to_numpy(), pc.list_flatten(array)
            for leaf in (items, *items.flatten()):
                numbers.update(parents[leaf.is_null().to_numpy(zero_copy_only=False)].tolist())
    return sorted(numbers)


# ── One block by Python ───────────────────────────────────────────────────────────────────────────────────────────────


def _by_python(block: Block, columns: tuple[Column, ...]) -> Parsed:
    rows: list[list[Any]] = []
    lines: list[int] = []
    broken: list[RowProblem] = []
    for index, number in enumerate(block.lines.tolist()):
        line = block.line(index)
        if not line.strip():
            continue
        values = _values(line, columns)
        if isinstance(values, str):
            broken.append(RowProblem(block.file, number, values))
        else:
            rows.append(values)
            lines.append(number)
    arrays = [pa.array([row[place] for row in rows], type=column.type) for place, column in enumerate(columns)]
    return record_batch(columns, arrays), np.array(lines, dtype=np.int64), tuple(broken)


def _values(line: bytes, columns: tuple[Column, ...]) -> list[Any] | str:
    """The values of one line, or what is wrong with it."""
    exact = any(column.type == JSON for column in columns)
    row = _parse_line(line, parse_int=_integer if exact else len)
    if isinstance(row, str):
        return row
    for column in columns:
        problem = _field_problem(row, column.name, column.type, required=column.required)
        if problem:
            return problem
        if column.type == JSON and row.get(column.name) is not None:
            text, problem = _json_text(row[column.name], column.name)
            if problem:
                return problem
            row[column.name] = text
    return [row.get(column.name) for column in columns]


def _json_text(value: Any, name: str) -> tuple[str, str | None]:
    """The JSON of a value, or what is wrong with it."""
    try:
        text = to_json(value)
        text.encode()
    except UnicodeEncodeError:
        return "", f"'{name}' has half of a surrogate pair"
    except TypeError:  # the key `_REPEATED` of some object in it
        return "", f"'{name}' has an object with {_first_repeated(value)} twice"
    except RecursionError:
        return "", "not JSON: nested too deep"
    return text, None


to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _first_repeated(value: Any) -> str:
    """A name that an object somewhere in this value has twice."""
    if isinstance(value, dict) and _REPEATED in value:
        return f"the field {min(value[_REPEATED])!r}"
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((name for part in parts if (name := _first_repeated(part))), "")


def _integer(digits: str) -> int | float:
    """Python converts no number of more than 4,300 digits; such a one is larger than any float."""
    limit = sys.get_int_max_str_digits() or len(digits)
    return int(digits) if len(digits) <= limit else float(digits)


def _parse_line(line: bytes, parse_int: Callable[[str], Any] = len) -> dict[Any, Any] | str:
    """The object on a line, or why there is none. By default numbers are not converted: `len` is the fastest to skip them."""
    try:
        value = json.loads(line.decode(), object_pairs_hook=_to_object, parse_int=parse_int)
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg.removesuffix(' at')} at character {error.colno}"
    except RecursionError:
        return "not JSON: nested too deep"
    return value if isinstance(value, dict) else f"{value_name(value)}, not an object"


def _to_object(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    value: dict[Any, Any] = dict(pairs)
    if len(value) != len(pairs):
        value[_REPEATED] = set(repeated_names(name for name, _ in pairs))
    return value


def _field_problem(row: dict[Any, Any], name: str, type_: pa.DataType, *, required: bool) -> str | None:
    """Why this field of an object is not of this type."""
    if name in row.get(_REPEATED, ()):
        return f"the field '{name}' twice"
    if name not in row:
        return f"no field '{name}'" if required else None
    value = row[name]
    if value is None or type_ == JSON:
        return None
    if type_ == TEXT:
        return _text_problem(value, name)
    if not isinstance(value, list):
        return f"'{name}' is {value_name(value)}, not a list of messages"
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            return f"message {number} of '{name}' is {value_name(message)}, not an object"
        for field in type_.value_type:
            problem = _field_problem(message, field.name, field.type, required=True)
            if problem:
                return f"message {number} of '{name}': {problem}"
    return None


def _text_problem(value: Any, name: str) -> str | None:
    if not isinstance(value, str):
        return f"'{name}' is {value_name(value)}, not text"
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"'{name}' has half of a surrogate pair"
    return None


def value_name(value: Any) -> str:
    """What kind of value it is, for a message."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


# ── Items of a json list ──────────────────────────────────────────────────────────────────────────────────────────────

_PIECE_BYTES = 2**20
"""Looked at in one go. Where every byte is a bracket, its places and depths take 40 times as much."""
_MAX_DEPTH = 1_000
"""Python's json reads no deeper."""
_IS_MARK = np.isin(np.arange(256), [ord(mark) for mark in '"{}[],\n'])
_DEPTH_STEP = np.zeros(256, dtype=np.int64)
_DEPTH_STEP[[ord("{"), ord("[")]] = 1
_DEPTH_STEP[[ord("}"), ord("]")]] = -1
_INVALID_CHARACTER = 1
"""Replaces a line break inside a string: as invalid there, but it ends no line."""


class _ListItems:
    """The items of a list, found piece by piece. Holds one piece and the item that is not complete."""

    def __init__(self, path: str, line: int, max_row_bytes: int) -> None:
        self._path, self._max_row_bytes = path, max_row_bytes
        # Where the next piece begins: its line, how deep, whether in a string, whether behind a backslash that escapes.
        self._line, self._depth, self._in_string, self._escaping = line, 0, False, False
        self._item: list[bytes] = []
        """The beginning of an item that ends in a later piece."""
        self._item_line = line

    def blocks(self, stream: ByteStream, data: bytes) -> Iterator[Block]:
        """Blocks of items. The stream is at the first item; `data` was read from it already."""
        items: list[bytes] = []
        lines: list[int] = []
        first = True
        for piece in _pieces(stream, data):
            ends, closed, breaks, flat = self._scan(piece)
            new, new_lines = self._complete(flat, ends, breaks)
            if not (first and closed and new == [b""]):  # []
                items, lines = items + new, lines + new_lines
            while len(items) >= CHUNK_ROWS or sum(map(len, items)) >= CHUNK_BYTES or (closed and items):
                yield _item_block(self._path, items[:CHUNK_ROWS], lines[:CHUNK_ROWS])
                items, lines = items[CHUNK_ROWS:], lines[CHUNK_ROWS:]
            if closed:
                line = self._line + int(np.searchsorted(breaks, ends[-1]))
                return _check_nothing_follows(self._path, stream, piece[int(ends[-1]) + 1 :], line)
            self._keep(flat[int(ends[-1]) + 1 :] if len(ends) else flat, breaks, len(flat))
            first, self._line = first and not new, self._line + len(breaks)
        raise BadData(
            f"{self._path}, line {self._item_line if self._item else self._line}: the item that starts here never ends. "
            "Try: download it again, or add the missing quote or bracket."
        )

    def _scan(self, piece: bytes) -> tuple[Lines, bool, Lines, bytes]:
        """Where items end, whether the list does, where lines end, and the piece without line breaks."""
        data = b"\\" + piece if self._escaping else piece
        raw = np.frombuffer(data, dtype=np.uint8)
        places = np.flatnonzero(_IS_MARK[raw])
        mark = raw[places]
        inside = (np.cumsum((mark == _QUOTE) & ~_escaped(raw, places)) + self._in_string) % 2 == 1
        depth = self._depth + np.cumsum(np.where(inside, 0, _DEPTH_STEP[mark]))
        self._escaping = (len(data) - len(data.rstrip(b"\\"))) % 2 == 1
        if len(places):
            self._in_string, self._depth = bool(inside[-1]), int(depth[-1])
        is_break, is_end = mark == _NEWLINE, (mark == _COMMA) & ~inside & (depth == 0)
        closing = np.flatnonzero(depth < 0)[:1]
        if len(closing):
            if mark[closing[0]] != _END:
                line = self._line + int(np.count_nonzero(is_break[: closing[0]]))
                raise BadData(
                    f"{self._path}, line {line}: one closing brace too many. Try: remove it, or write the file again."
                )
            is_end[closing[0]], is_end[closing[0] + 1 :] = True, False
        places -= len(data) - len(piece)
        flat = np.frombuffer(piece, dtype=np.uint8).copy()
        flat[places[is_break]] = np.where(inside[is_break], _INVALID_CHARACTER, ord(" "))
        return places[is_end], bool(len(closing)), places[is_break], flat.tobytes()

    def _complete(self, flat: bytes, ends: Lines, breaks: Lines) -> tuple[list[bytes], list[int]]:
        """The items that end in this piece, and the lines on which they start."""
        starts = [0, *(ends + 1).tolist()][: len(ends)]
        items = [flat[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]
        begins = [start + _blanks(item) for start, item in zip(starts, items, strict=True)]
        lines = (self._line + np.searchsorted(breaks, begins)).tolist()
        if items and self._item:
            items[0], lines[0], self._item = b"".join([*self._item, items[0]]), self._item_line, []
        for item, line in zip(items, lines, strict=True):
            self._check_size(len(item), line)
        return [item.strip(_SPACE) for item in items], lines

    def _keep(self, rest: bytes, breaks: Lines, piece_bytes: int) -> None:
        """What follows the last complete item. Blanks before an item are not part of it."""
        if not self._item:
            begin = piece_bytes - len(rest) + _blanks(rest)
            self._item_line, rest = self._line + int(np.searchsorted(breaks, begin)), rest.lstrip(_SPACE)
        if rest:
            self._item.append(rest)
            self._check_size(sum(map(len, self._item)), self._item_line)

    def _check_size(self, size: int, line: int) -> None:
        if size > self._max_row_bytes:
            deep = f", nested {self._depth:,} levels deep," if self._depth > _MAX_DEPTH else ""
            place = f"{self._path}, line {line}: the item that starts here{deep}"
            raise row_too_long(place, self._max_row_bytes, "add a missing quote or bracket")


def _pieces(stream: ByteStream, data: bytes) -> Iterator[bytes]:
    """`data`, which was read before, and the rest of the stream."""
    size = min(_PIECE_BYTES, CHUNK_BYTES)
    yield from (data[start : start + size] for start in range(0, len(data), size))
    while piece := stream.read(size):
        yield piece


def _blanks(data: bytes) -> int:
    """How many blanks it starts with."""
    return len(data) - len(data.lstrip(_SPACE))


def _escaped(raw: npt.NDArray[np.uint8], marks: Lines) -> npt.NDArray[np.bool_]:
    """Which of the quotes among these marks follow an odd number of backslashes."""
    escaped = np.zeros(len(marks), dtype=bool)
    places = np.flatnonzero((raw[marks] == _QUOTE) & (marks > 0))
    places = places[raw[marks[places] - 1] == _BACKSLASH]
    if len(places):
        backslashes = np.flatnonzero(raw == _BACKSLASH)
        starts_run = np.diff(backslashes, prepend=-2) > 1
        run_starts = np.maximum.accumulate(np.where(starts_run, backslashes, 0))
        last = np.searchsorted(backslashes, marks[places]) - 1
        escaped[places] = (marks[places] - run_starts[last]) % 2 == 1
    return escaped


def _item_block(path: str, items: list[bytes], lines: list[int]) -> Block:
    """One item per line."""
    items = [item or b"," for item in items]  # nothing between two commas is invalid
    ends = np.cumsum([len(item) + 1 for item in items]) - 1
    return Block(file=path, data=b"\n".join(items), ends=ends, lines=np.array(lines, dtype=np.int64))


def _check_nothing_follows(path: str, stream: ByteStream, data: bytes, line: int) -> None:
    while data:
        if data.strip(_SPACE):
            raise BadData(f"{path}, line {line}: the list ends here but the file goes on. Try: one list per file.")
        data = stream.read(CHUNK_BYTES)
