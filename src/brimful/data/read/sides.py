"""The rows of a file made into sides: columns joined, messages taken apart.

Text columns pass as they are. Columns joined with a plus give their parts that are not blank, one a line. A list of
messages gives its last one, or all of them for a prompt. A conversation gives a row for each reply, with all that was said
before it as the prompt; such rows grow with the square of the conversation, so they leave as soon as they fill a chunk.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brimful.data.read.columns import Layout, parts
from brimful.data.read.raw import CHUNK_BYTES, CHUNK_ROWS, TEXT, Broken, Lines, Raw

_PARTS = {
    **dict.fromkeys(("human", "user", "prompter", "用户", "tool", "function", "observation"), "ask"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "助手"), "answer"),
    **dict.fromkeys(("system", "developer"), "system"),
}
"""What a role does in a conversation; the result of a tool is something said before the next reply."""

_KNOWN = {"ask", "answer", "system"}

Sides = tuple[pa.RecordBatch, Lines, tuple[Broken, ...]]


def sides(file: str, layout: Layout, raw: Raw) -> Iterator[Sides]:
    """Rows with one text column a side, their lines, and all rows of this stretch that are broken."""
    if layout.kind == "conversations":
        yield from _exchanges(file, layout, raw)
        return
    broken: dict[int, str] = {}
    columns = [_side(raw.rows, side, layout.columns[side], broken) for side in layout.sides]
    rows, lines = _batch(layout, columns), raw.lines
    if broken:
        keep = np.ones(len(lines), dtype=bool)
        keep[list(broken)] = False
        told = [Broken(file, int(lines[row]), why) for row, why in broken.items()]
        yield rows.filter(pa.array(keep)), lines[keep], _by_line([*raw.broken, *told])
    else:
        yield rows, lines, raw.broken


def _side(rows: pa.RecordBatch, side: str, column: str, broken: dict[int, str]) -> pa.Array:
    names = parts(column, rows.schema.names)
    found = rows.column(names[0])
    if found.type != TEXT:
        return _said(found, names[0], broken, whole=side == "prompt")
    joined = found.fill_null("")
    for name in names[1:]:
        joined = _joined(joined, rows.column(name).fill_null(""))
    return joined


def _joined(left: pa.Array, right: pa.Array) -> pa.Array:
    """Both in two lines; where one is blank, the other alone."""
    no_left, no_right = _blank(left), _blank(right)
    both = pc.binary_join_element_wise(left, right, "\n")
    return pc.if_else(no_right, left, pc.if_else(no_left, right, both))


def _blank(column: pa.Array) -> pa.BooleanArray:
    return pc.equal(pc.utf8_trim_whitespace(column), "")


def _said(column: pa.Array, name: str, broken: dict[int, str], *, whole: bool) -> pa.Array:
    """What the messages of each row say: all of them, or the last one."""
    content = column.type.value_type[1].name
    found = []
    for row, messages in enumerate(column.to_pylist()):
        said = ["" if message is None else message[content] or "" for message in messages or []]
        if messages == []:
            broken.setdefault(row, f"'{name}' has no message")
        found.append("\n".join(said) if whole else said[-1] if said else "")
    return pa.array(found, type=TEXT)


def _exchanges(file: str, layout: Layout, raw: Raw) -> Iterator[Sides]:
    """The replies of all conversations, as chunks."""
    rows: list[tuple[str, str]] = []
    lines: list[int] = []
    told, held = list(raw.broken), 0
    for line, messages in zip(raw.lines.tolist(), _messages(raw.rows.column(0)), strict=True):
        for found in _replies(messages):
            if isinstance(found, str):
                told.append(Broken(file, line, found))
                continue
            rows.append(found)
            lines.append(line)
            held += len(found[0]) + len(found[1])
            if len(rows) + len(told) >= CHUNK_ROWS or held >= CHUNK_BYTES // 2:
                now, told = [one for one in told if one.line <= line], [one for one in told if one.line > line]
                yield _pairs(layout, rows), np.array(lines, dtype=np.int64), _by_line(now)
                rows, lines, held = [], [], 0
    if rows or told:
        yield _pairs(layout, rows), np.array(lines, dtype=np.int64), _by_line(told)


def _messages(column: pa.ListArray) -> Iterator[list[tuple[str, str]]]:
    """What each message of each conversation does, and its text. Lists of all of them are much faster than dicts."""
    items = column.flatten()
    roles = items.field(0).fill_null("").dictionary_encode()
    parts = [
        _PARTS.get(role.strip().lower(), f"the role {role!r} is not known") for role in roles.dictionary.to_pylist()
    ]
    turns = list(
        zip([parts[role] for role in roles.indices.to_pylist()], items.field(1).fill_null("").to_pylist(), strict=True)
    )
    ends = np.cumsum(pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)).tolist()
    return (turns[start:end] for start, end in zip([0, *ends], ends, strict=False))


def _replies(messages: list[tuple[str, str]]) -> Iterator[tuple[str, str] | str]:
    """A row for each reply, or why there is none."""
    parts = [part for part, _ in messages]
    if "answer" not in parts or not _KNOWN.issuperset(parts):
        yield next((part for part in parts if part not in _KNOWN), "no reply in this conversation")
        return
    system: list[str] = []
    said: list[str] = []
    for place, (part, text) in enumerate(messages):
        if part == "answer":
            yield ("\n".join(system + said), text) if place else "a reply to nothing"
        if text.strip():
            (system if part == "system" else said).append(text)


def _pairs(layout: Layout, rows: list[tuple[str, str]]) -> pa.RecordBatch:
    return _batch(layout, [pa.array([row[place] for row in rows], TEXT) for place in (0, 1)])


def _batch(layout: Layout, columns: list[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([(side, TEXT) for side in layout.sides]))


def _by_line(broken: Iterable[Broken]) -> tuple[Broken, ...]:
    return tuple(sorted(broken, key=lambda one: one.line))
