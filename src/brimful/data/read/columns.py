"""Which columns of a file are the prompt, the response, the text: found by name, in a fixed order, and said why.

    preference      prompt, chosen, rejected
    conversations   a list of messages: each reply is a row, its prompt all that was said before
    pair            prompt and response under exactly these names
    instruction     instruction (and input, where a row has one) and its output
    pair            the other usual names: question/answer, input/output, 问题/回答 …
    text            text alone

The first that fits is taken. No column ever replaces another: a loop over aliases that did, an empty `input` over
`instruction`, once cost 1.76 million prompts. What else could have been meant is named in the reason.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brimful.data.read.files import CHUNK_BYTES, CHUNK_ROWS, TEXT, Broken, Columns, Field, Lines, Raw, is_messages
from brimful.errors import BadData, BadOption

Kind = Literal["pair", "instruction", "conversations", "preference", "text"]

PROMPTS = ("prompt", "question", "query", "instruction", "input", "source", "src", "q", "ask", "user", "human", "问题", "提问", "问", "指令", "输入", "题目")  # fmt: skip
RESPONSES = ("response", "answer", "output", "completion", "reply", "target", "tgt", "a", "assistant", "gpt", "回答", "答案", "回复", "答", "输出")  # fmt: skip
INSTRUCTIONS = ("instruction", "指令")
INPUTS = ("input", "context", "输入")
CHOSEN, REJECTED = ("chosen", "chosen_response"), ("rejected", "rejected_response")
CONVERSATIONS = ("conversations", "conversation", "messages", "对话")
TEXTS = ("text", "content", "document", "article", "body", "正文", "文本", "内容")

SIDES: dict[Kind, tuple[str, ...]] = {
    "pair": ("prompt", "response"),
    "instruction": ("prompt", "response"),
    "conversations": ("prompt", "response"),
    "preference": ("prompt", "chosen", "rejected"),
    "text": ("text",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which columns of the files make up which side of a row."""

    kind: Kind
    sides: tuple[str, ...]
    """What a row has: `("prompt", "response")`, `("prompt", "chosen", "rejected")` or `("text",)`."""
    columns: dict[str, str]
    """By side, the file's column: `{"prompt": "instruction+input", "response": "output"}`."""
    reason: str
    """Why: `found prompt and response`, `as asked for by --columns`."""


def find_layout(has: Columns, *, open_ended: bool) -> Layout | None:
    """The layout of a file with these columns; `open_ended` where later rows may have more than these."""
    names, every = has.usual, list(has.types)
    prompt, response = first(PROMPTS, names), first(RESPONSES, names)
    chosen, rejected = first(CHOSEN, names), first(REJECTED, names)
    instruction, talk, text = first(INSTRUCTIONS, names), first(CONVERSATIONS, names), first(TEXTS, names)
    if prompt and chosen and rejected:
        columns = {"prompt": _with_input(prompt, every, open_ended), "chosen": chosen, "rejected": rejected}
        return _layout("preference", columns, every)
    if talk:
        return _layout("conversations", {"prompt": talk, "response": talk}, every)
    if instruction and response and not (_same(prompt, "prompt") and _same(response, "response")):
        columns = {"prompt": _with_input(instruction, every, open_ended), "response": response}
        return _layout("instruction", columns, every)
    if prompt and response:
        return _layout("pair", {"prompt": prompt, "response": response}, every)
    return _layout("text", {"text": text}, every) if text else None


def first(aliases: Iterable[str], names: Sequence[str]) -> str | None:
    """The column that comes first in the order of the aliases: under the name itself, else under another case of it."""
    for alias in aliases:
        found = [name for name in names if _same(name, alias)]
        if found:
            return alias if alias in found else found[0]
    return None


def parts(column: str, names: Iterable[str]) -> list[str]:
    """The columns that `instruction+input` stands for; a column may have a plus in its own name."""
    return [column] if column in set(names) else column.split("+")


def fields(layout: Layout, columns: Columns, file: str) -> tuple[Field, ...]:
    """What a reader is asked for, each column once. Of joined columns only the first must be there."""
    found: dict[str, Field] = {}
    for side in layout.sides:
        names = parts(layout.columns[side], columns.types)
        for place, name in enumerate(names):
            kind = columns.types.get(name) or TEXT
            _must_fit(kind, layout, name, file, joined=len(names) > 1)
            found[name] = Field(name, kind, place == 0 or (name in found and found[name].required))
    return tuple(found.values())


def missing(columns: Columns, file: str) -> BadData:
    """No columns that fit."""
    return BadData(
        f"{file}: no columns that look like prompt and response, instruction and output, conversations, prompt with chosen "
        f"and rejected, or text; it has {named(columns.types)}: say which is which, such as --columns prompt=question,response=answer"
    )


def mixed(
    one: str, layout: Layout, columns: Columns, other: str, other_layout: Layout, other_columns: Columns
) -> BadData:
    """Two files whose rows do not have the same sides."""
    return BadData(
        f"{one} gives {_and(list(layout.sides))} (it has {named(columns.types)}), but {other} gives {_and(list(other_layout.sides))} "
        f"(it has {named(other_columns.types)}); give files of one kind, or say which columns count with --columns"
    )


def named(names: Iterable[str]) -> str:
    """Columns in a sentence; where a file has no header, its first row stands for one and may be long."""
    found = [name if len(name) <= 40 else name[:39] + "…" for name in names]
    return ", ".join(found[:30]) + " …" * (len(found) > 30) or "no columns"


def like(layout: Layout, names: Sequence[str]) -> Layout | None:
    """The layout of an earlier file, where this one has its columns; an instruction may have an input to take along."""
    used = [part for column in layout.columns.values() for part in parts(column, names)]
    return layout if layout.kind in ("pair", "conversations", "text") and set(used) <= set(names) else None


def _layout(kind: Kind, columns: dict[str, str], names: Sequence[str]) -> Layout:
    used = {part for column in columns.values() for part in parts(column, names)}
    known = {*PROMPTS, *RESPONSES, *CHOSEN, *REJECTED, *CONVERSATIONS, *TEXTS, *INPUTS, "history", "system"}
    aside = [name for name in names if name.strip().lower() in known and name not in used]
    reason = f"found {_and(list(dict.fromkeys(columns.values())))}"
    reason += f"; left aside: {', '.join(aside)}" if aside else ""
    return Layout(kind=kind, sides=SIDES[kind], columns=columns, reason=reason)


def _with_input(prompt: str, names: Sequence[str], open_ended: bool) -> str:
    """An instruction takes the input of its row along, also where only later rows of the file have one."""
    if first(INSTRUCTIONS, [prompt]) is None:
        return prompt
    found = first(INPUTS, names) or ("input" if open_ended else None)
    return f"{prompt}+{found}" if found else prompt


def _must_fit(kind: pa.DataType, layout: Layout, name: str, file: str, *, joined: bool) -> None:
    is_text, is_turns = kind == TEXT, is_messages(kind)
    if layout.kind == "conversations" and not is_turns:
        raise BadData(
            f"{file}: the column '{name}' holds {_called(kind)}, not a list of messages with from and value, or role and content"
        )
    if not is_text and (joined or layout.kind == "text" or not is_turns):
        raise BadData(f"{file}: the column '{name}' holds {_called(kind)}, not text; choose another one with --columns")


def _called(kind: pa.DataType) -> str:
    """A type of Arrow in words."""
    if pa.types.is_boolean(kind):
        return "true or false"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "numbers"
    if pa.types.is_nested(kind):
        return "objects" if pa.types.is_struct(kind) else "lists"
    return "text" if kind == TEXT else str(kind)


def _same(name: str | None, alias: str) -> bool:
    return name is not None and name.strip().lower() == alias


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# `--columns prompt=question,response=answer`: the user says which column is what.
#
# Either side of the `=` may be the column, as long as it is clear: the side comes first where both could be meant. Sides that
# are not given are found by name. `prompt=instruction+input` joins two columns.


_NAMES = {"prompt": PROMPTS, "response": RESPONSES, "chosen": CHOSEN, "rejected": REJECTED}
_SIDES = (*_NAMES, "text", "conversations")


def given_layout(asked: str, names: Sequence[str], file: str) -> Layout:
    """The layout that was asked for, of a file with these columns."""
    given: dict[str, str] = {}
    for item in asked.split(","):
        side, column = _pair(item, asked, names, file)
        if side in given:
            raise BadOption(f"--columns {asked}: {side} is given twice; join columns with a plus, such as {side}=a+b")
        given[side] = column
    kind = _kind(given, names)
    extra = [side for side in given if side not in (*SIDES[kind], kind)]
    if extra:
        raise BadOption(f"--columns {asked}: {extra[0]} does not go with {next(iter(set(given) - set(extra)))}")
    used = {part for column in given.values() for part in parts(column, names)}
    free = [name for name in names if name not in used]
    columns = {side: given.get(side) or given.get(kind) or _found(side, free, asked, file) for side in SIDES[kind]}
    found = [side for side in columns if side not in given and kind not in given]
    reason = "as asked for by --columns" + (f"; found {' and '.join(columns[side] for side in found)}" if found else "")
    return Layout(kind=kind, sides=SIDES[kind], columns=columns, reason=reason)


def _pair(item: str, asked: str, names: Sequence[str], file: str) -> tuple[str, str]:
    left, equals, right = (part.strip() for part in item.partition("="))
    if not (equals and left and right) or not {left, right} & set(_SIDES):
        raise BadOption(
            f"--columns {asked}: {item!r} is no side=column; sides are {', '.join(_SIDES)}, and {file} has {named(names)}"
        )
    if left in _SIDES and (column := _columns(right, names)):
        return left, column
    if right in _SIDES and (column := _columns(left, names)):
        return right, column
    raise BadOption(
        f"--columns {asked}: {file} has no column {right if left in _SIDES else left}; it has {named(names)}"
    )


def _columns(written: str, names: Sequence[str]) -> str | None:
    """The file's own spelling of these columns; None where it lacks one."""
    found = [_spelled(part.strip(), names) for part in parts(written, names)]
    return "+".join(name for name in found if name) if all(found) else None


def _spelled(written: str, names: Sequence[str]) -> str | None:
    return written if written in names else first([written.lower()], names)


def _kind(given: dict[str, str], names: Sequence[str]) -> Kind:
    if "text" in given:
        return "text"
    if "conversations" in given:
        return "conversations"
    preference = {"chosen", "rejected"} & set(given) or (
        "response" not in given and first(CHOSEN, names) and first(REJECTED, names)
    )
    return "preference" if preference else "pair"


def _found(side: str, names: Sequence[str], asked: str, file: str) -> str:
    column = first(_NAMES[side], names)
    if column is None:
        raise BadOption(f"--columns {asked}: say also which column is {side}; {file} has {named(names)}")
    return column


# The rows of a file made into sides: columns joined, messages taken apart.
#
# Text columns pass as they are. Columns joined with a plus give their parts that are not blank, one a line. A list of
# messages gives its last one, or all of them for a prompt. A conversation gives a row for each reply, with all that was said
# before it as the prompt; such rows grow with the square of the conversation, so they leave as soon as they fill a chunk.


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
