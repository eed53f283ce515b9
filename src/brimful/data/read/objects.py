"""Lines of JSON objects made into rows: fast by Arrow, exact by Python.

Arrow reads 220 MB/s of chat but stops at the first mistake and does not see lines: it takes two objects in a line, an
object over two lines, and a missing field for null. So a block counts as read by Arrow only where every line starts with `{`, ends
with `}` and made one row: between `}` and `{` JSON allows no line break but the one between two objects. Any other block
goes line by line through Python's json, which is three times slower and says what is wrong with which line.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from brimful.data.read.raw import TEXT, Broken, Field, Lines, batch

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
