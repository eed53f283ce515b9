"""Which columns of a file hold the prompt, the response or the text, and the rows rebuilt under these names.

    preference      prompt, chosen, rejected
    conversations   a list of messages: each reply becomes a row, its prompt is all messages before it
    pair            prompt and response under exactly these names
    instruction     instruction (and input, where a row has one) and its output
    pair            other common names: question/answer, input/output, 问题/回答 …
    text            text alone

The first kind that fits is used; its reason names the columns that could also have been meant. No column ever replaces
another: a loop over aliases that let an empty `input` replace `instruction` once cost 1.76 million prompts.
`columns="prompt=question,response=answer"` overrides the search.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brimful.data.read.files import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    TEXT,
    Chunk,
    Column,
    FileSchema,
    RowProblem,
    is_messages_type,
)
from brimful.errors import BadData, BadOption

Kind = Literal["pair", "instruction", "conversations", "preference", "text"]

PROMPTS = ("prompt", "question", "query", "instruction", "input", "source", "src", "q", "ask", "user", "human", "问题", "提问", "问", "指令", "输入", "题目")  # fmt: skip
RESPONSES = ("response", "answer", "output", "completion", "reply", "target", "tgt", "a", "assistant", "gpt", "回答", "答案", "回复", "答", "输出")  # fmt: skip
INSTRUCTIONS = ("instruction", "指令")
INPUTS = ("input", "context", "输入")
CHOSEN, REJECTED = ("chosen", "chosen_response"), ("rejected", "rejected_response")
CONVERSATIONS = ("conversations", "conversation", "messages", "对话")
TEXTS = ("text", "content", "document", "article", "body", "正文", "文本", "内容")

FIELDS: dict[Kind, tuple[str, ...]] = {
    "pair": ("prompt", "response"),
    "instruction": ("prompt", "response"),
    "conversations": ("prompt", "response"),
    "preference": ("prompt", "chosen", "rejected"),
    "text": ("text",),
}

CONVERSATION = ("conversation",)
"""The fields of a row that is a conversation."""
PREFERENCE = ("preference",)
"""The fields of a row that is a preference, as one JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which columns of the files make up which field of a row."""

    kind: Kind
    fields: tuple[str, ...]
    """What a row has: `("prompt", "response")`, `("prompt", "chosen", "rejected")`, `("text",)`, `CONVERSATION`
    or `PREFERENCE`."""
    columns: dict[str, str]
    """The file's column for each field: `{"prompt": "instruction+input", "response": "output"}`. Of a conversation, for each
    of its parts: `{"messages": "conversations", "tools": "tools"}`."""
    reason: str
    """`found prompt and response`, `as requested`."""

    @property
    def is_conversation(self) -> bool:
        """Whether rows are conversations, as `open_source(…, messages=True)` reads them."""
        return self.fields == CONVERSATION

    @property
    def is_preference(self) -> bool:
        """Whether rows are preferences, as `open_source(…, preferences=True)` reads them."""
        return self.fields == PREFERENCE

    def column_of(self, field: str) -> str:
        """The file's columns behind a field, for a report."""
        return self.columns.get(field) or ", ".join(self.columns.values())


# ── Layout by column names ────────────────────────────────────────────────────────────────────────────────────────────


def find_layout(schema: FileSchema, *, rows_vary: bool) -> Layout | None:
    """The layout for these columns; `rows_vary` where later rows may have more columns than the sampled ones."""
    names, every = schema.common, list(schema.types)
    prompt, response = find_column(PROMPTS, names), find_column(RESPONSES, names)
    chosen, rejected = find_column(CHOSEN, names), find_column(REJECTED, names)
    instruction, conversation, text = (
        find_column(INSTRUCTIONS, names),
        find_column(CONVERSATIONS, names),
        find_column(TEXTS, names),
    )
    if prompt and chosen and rejected:
        columns = {"prompt": with_input(prompt, every, rows_vary), "chosen": chosen, "rejected": rejected}
        return _found_layout("preference", columns, every)
    if conversation:
        return _found_layout("conversations", {"prompt": conversation, "response": conversation}, every)
    if instruction and response and not (_same_name(prompt, "prompt") and _same_name(response, "response")):
        columns = {"prompt": with_input(instruction, every, rows_vary), "response": response}
        return _found_layout("instruction", columns, every)
    if prompt and response:
        return _found_layout("pair", {"prompt": prompt, "response": response}, every)
    return _found_layout("text", {"text": text}, every) if text else None


def reuse_layout(layout: Layout, names: Sequence[str]) -> Layout | None:
    """The layout of an earlier file if this one has its columns. Not for instructions: this file may have an input."""
    used = used_columns(layout.columns, names)
    return layout if layout.kind in ("pair", "conversations", "text") and used <= set(names) else None


def columns_to_read(layout: Layout, schema: FileSchema, file: str) -> tuple[Column, ...]:
    """The columns to read, each once. Of joined columns only the first is required."""
    columns: dict[str, Column] = {}
    for field in layout.fields:
        names = joined_columns(layout.columns[field], schema.types)
        for place, name in enumerate(names):
            type_ = schema.types.get(name) or TEXT
            _check_type(type_, layout, name, file, joined=len(names) > 1)
            columns[name] = Column(name, type_, place == 0 or (name in columns and columns[name].required))
    return tuple(columns.values())


def no_layout(schema: FileSchema, file: str) -> BadData:
    """The error for a file without columns that fit."""
    return BadData(
        f"{file}: no columns look like prompt and response, conversations, preferences or text, only {listed(schema.types)}. "
        "Try: columns='prompt=question,response=answer'."
    )


def find_column(aliases: Iterable[str], names: Sequence[str]) -> str | None:
    """The column that comes first in the order of the aliases; exact spelling before another case."""
    known = dict.fromkeys(aliases)
    candidates = [name for name in names if name.strip().lower() in known]
    for alias in known:
        matches = [name for name in candidates if _same_name(name, alias)]
        if matches:
            return alias if alias in matches else matches[0]
    return None


def _same_name(name: str | None, alias: str) -> bool:
    return name is not None and name.strip().lower() == alias


def with_input(prompt: str, names: Sequence[str], rows_vary: bool) -> str:
    """An instruction is joined with the input of its row, also where only later rows have one."""
    if find_column(INSTRUCTIONS, [prompt]) is None:
        return prompt
    column = find_column(INPUTS, names) or ("input" if rows_vary else None)
    return f"{prompt}+{column}" if column else prompt


def joined_columns(column: str, names: Iterable[str]) -> list[str]:
    """The columns that `instruction+input` stands for; a column may have a plus in its own name."""
    return [column] if column in set(names) else column.split("+")


def used_columns(columns: Mapping[str, str], names: Iterable[str]) -> set[str]:
    """All columns behind these, by the file's own names."""
    return {part for column in columns.values() for part in joined_columns(column, names)}


def _found_layout(kind: Kind, columns: dict[str, str], names: Sequence[str]) -> Layout:
    return Layout(kind=kind, fields=FIELDS[kind], columns=columns, reason=found_reason(columns, names))


def found_reason(columns: dict[str, str], names: Sequence[str]) -> str:
    """Which columns are used, and which could also have been meant."""
    used = used_columns(columns, names)
    known = {*PROMPTS, *RESPONSES, *CHOSEN, *REJECTED, *CONVERSATIONS, *TEXTS, *INPUTS, "history", "system"}
    unused = [name for name in names if name.strip().lower() in known and name not in used]
    reason = f"found {in_words(list(dict.fromkeys(columns.values())))}"
    return reason + (f"; not used: {', '.join(unused)}" if unused else "")


def _check_type(type_: pa.DataType, layout: Layout, name: str, file: str, *, joined: bool) -> None:
    is_messages = is_messages_type(type_)
    if layout.kind == "conversations" and not is_messages:
        raise BadData(
            f"{file}: column '{name}' holds {type_name(type_)}, not messages. "
            "Try: messages with from and value, or role and content."
        )
    if type_ != TEXT and (joined or layout.kind == "text" or not is_messages):
        raise BadData(f"{file}: column '{name}' holds {type_name(type_)}, not text. Try: another one with columns=.")


def type_name(type_: pa.DataType) -> str:
    if pa.types.is_boolean(type_):
        return "true or false"
    if pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        return "numbers"
    if pa.types.is_nested(type_):
        return "objects" if pa.types.is_struct(type_) else "lists"
    return "text" if type_ == TEXT else str(type_)


def listed(names: Iterable[str]) -> str:
    """Column names for a message. Without a header they are the first row, which may be long."""
    shown = [name if len(name) <= 40 else name[:39] + "…" for name in names]
    return ", ".join(shown[:30]) + " …" * (len(shown) > 30) or "no columns"


def in_words(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# ── Requested layout ─────────────────────────────────────────────────────────────────────────────────────────────────
# Either side of the `=` may be the column as long as it is clear; the field comes first where both could be meant.
# Fields that are not set are found by name. `prompt=instruction+input` joins two columns.

_ALIASES = {"prompt": PROMPTS, "response": RESPONSES, "chosen": CHOSEN, "rejected": REJECTED}
_SETTABLE = (*_ALIASES, "text", "conversations")


def requested_layout(option: str, names: Sequence[str], file: str) -> Layout:
    """The layout that `prompt=question,response=answer` describes, for a file with these columns."""
    requested = requested_columns(option, names, file, _SETTABLE)
    kind = _requested_kind(requested, names)
    extra = [field for field in requested if field not in (*FIELDS[kind], kind)]
    if extra:
        raise BadOption(
            f"columns={option!r}: {extra[0]} cannot be combined with {next(iter(set(requested) - set(extra)))}. Try: one of them."
        )
    used = used_columns(requested, names)
    unused = [name for name in names if name not in used]
    columns, by_name = {}, []
    for field in FIELDS[kind]:
        columns[field] = (
            requested.get(field) or requested.get(kind) or other_column(option, field, _ALIASES, unused, file)
        )
        if field not in requested and kind not in requested:
            by_name.append(columns[field])
    reason = "as requested" + (f"; found {' and '.join(by_name)}" if by_name else "")
    return Layout(kind=kind, fields=FIELDS[kind], columns=columns, reason=reason)


def other_column(
    option: str, field: str, aliases: Mapping[str, Iterable[str]], unused: Sequence[str], file: str
) -> str:
    """The column for a field that the option does not set."""
    column = find_column(aliases.get(field, ()), unused)
    if column is None:
        raise BadOption(
            f"columns={option!r} must also set {field}. Try: one of the columns {listed(unused)} of {file}."
        )
    return column


def requested_columns(option: str, names: Sequence[str], file: str, settable: Sequence[str]) -> dict[str, str]:
    """The column for each field that the option sets, in the file's own spelling."""
    requested: dict[str, str] = {}
    for item in option.split(","):
        field, column = _field_and_column(item, option, names, file, settable)
        if field in requested:
            raise BadOption(f"columns={option!r} sets {field} twice. Try: '{field}=a+b' to join columns.")
        requested[field] = column
    return requested


def _field_and_column(
    item: str, option: str, names: Sequence[str], file: str, settable: Sequence[str]
) -> tuple[str, str]:
    left, equals, right = (part.strip() for part in item.partition("="))
    if not (equals and left and right) or not {left, right} & set(settable):
        raise BadOption(
            f"columns={option!r}: {item!r} is not 'field=column'. "
            f"Try: one of the fields {', '.join(settable)}, and one of the columns {listed(names)} of {file}."
        )
    if left in settable and (column := _spelled_as_in_file(right, names)):
        return left, column
    if right in settable and (column := _spelled_as_in_file(left, names)):
        return right, column
    missing = right if left in settable else left
    raise BadOption(f"columns={option!r}: {file} has no column {missing}. Try: one of {listed(names)}.")


def _spelled_as_in_file(column: str, names: Sequence[str]) -> str | None:
    """These columns in the file's own spelling; None if one is missing."""
    parts = [part.strip() for part in joined_columns(column, names)]
    spelled = [part if part in names else find_column([part.lower()], names) for part in parts]
    return "+".join(name for name in spelled if name) if all(spelled) else None


def _requested_kind(requested: dict[str, str], names: Sequence[str]) -> Kind:
    if "text" in requested:
        return "text"
    if "conversations" in requested:
        return "conversations"
    has_both = find_column(CHOSEN, names) and find_column(REJECTED, names)
    return (
        "preference"
        if {"chosen", "rejected"} & set(requested) or ("response" not in requested and has_both)
        else "pair"
    )


# ── Columns to fields ─────────────────────────────────────────────────────────────────────────────────────────────────

_ROLES = {
    **dict.fromkeys(("human", "user", "prompter", "用户", "tool", "function", "observation"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "助手"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
"""What a role does in a conversation. The result of a tool counts as said before the next reply."""

Message = tuple[str, str]
"""One of the values of `_ROLES`, or why the role is not one of them; and the text."""


def map_columns(layout: Layout, chunk: Chunk) -> Iterator[Chunk]:
    """The rows with one text column for each field.

    Text columns pass as they are. Columns joined with a plus give their non-blank parts, one per line. A list of messages
    gives its last one, or all of them for a prompt. A conversation gives one row for each reply; these rows grow with the
    square of the conversation, so one chunk may become several.
    """
    if layout.kind == "conversations":
        yield from _map_conversations(layout, chunk)
        return
    problems: dict[int, str] = {}
    arrays = [text_array(chunk.rows, field, layout.columns[field], problems) for field in layout.fields]
    mapped = replace(chunk, rows=_text_batch(layout, arrays))
    yield without_rows(mapped, problems) if problems else mapped


def without_rows(chunk: Chunk, problems: dict[int, str]) -> Chunk:
    """The chunk with these rows broken, by their place in it."""
    keep, lines = np.ones(len(chunk.lines), dtype=bool), chunk.lines
    keep[list(problems)] = False
    new = [RowProblem(chunk.file, int(lines[row]), message) for row, message in problems.items()]
    rows, broken = chunk.rows.filter(pa.array(keep)), by_line([*chunk.broken, *new])
    return replace(chunk, rows=rows, lines=lines[keep], broken=broken)


def text_array(rows: pa.RecordBatch, field: str, column: str, problems: dict[int, str]) -> pa.Array:
    names = joined_columns(column, rows.schema.names)
    array = rows.column(names[0])
    if array.type != TEXT:
        return _message_texts(array, names[0], problems, all_messages=field == "prompt")
    joined = array.fill_null("")
    for name in names[1:]:
        part = rows.column(name).fill_null("")
        both = pc.binary_join_element_wise(joined, part, "\n")
        joined = pc.if_else(is_blank(part), joined, pc.if_else(is_blank(joined), part, both))
    return joined


def is_blank(array: pa.Array) -> pa.BooleanArray:
    return pc.equal(pc.utf8_trim_whitespace(array), "")


def _message_texts(array: pa.Array, name: str, problems: dict[int, str], *, all_messages: bool) -> pa.Array:
    """The text of all messages of each row, or of the last one."""
    content = array.type.value_type[1].name
    texts = []
    for row, messages in enumerate(array.to_pylist()):
        contents = ["" if message is None else message[content] or "" for message in messages or []]
        if messages == []:
            problems.setdefault(row, f"'{name}' has no message")
        texts.append("\n".join(contents) if all_messages else contents[-1] if contents else "")
    return pa.array(texts, type=TEXT)


def _map_conversations(layout: Layout, chunk: Chunk) -> Iterator[Chunk]:
    pairs: list[tuple[str, str]] = []
    lines: list[int] = []
    broken, characters = list(chunk.broken), 0

    def part(problems: Iterable[RowProblem]) -> Chunk:
        arrays = [pa.array([pair[place] for pair in pairs], TEXT) for place in (0, 1)]
        rows, numbers = _text_batch(layout, arrays), np.array(lines, dtype=np.int64)
        return replace(chunk, rows=rows, lines=numbers, broken=by_line(problems))

    for line, messages in zip(chunk.lines.tolist(), _messages(chunk.rows.column(0)), strict=True):
        for reply in _replies(messages):
            if isinstance(reply, str):
                broken.append(RowProblem(chunk.file, line, reply))
                continue
            pairs.append(reply)
            lines.append(line)
            characters += len(reply[0]) + len(reply[1])
            if len(pairs) + len(broken) >= CHUNK_ROWS or characters >= CHUNK_BYTES // 2:
                yield part(problem for problem in broken if problem.line <= line)
                broken = [problem for problem in broken if problem.line > line]
                pairs, lines, characters = [], [], 0
    if pairs or broken:
        yield part(broken)


def _messages(array: pa.ListArray) -> Iterator[list[Message]]:
    """The messages of each conversation. Flat lists of all of them are much faster than dicts."""
    items = array.flatten()
    names = items.field(0).fill_null("").dictionary_encode()
    roles = [_ROLES.get(name.strip().lower(), f"unknown role {name!r}") for name in names.dictionary.to_pylist()]
    texts = items.field(1).fill_null("").to_pylist()
    messages = list(zip([roles[index] for index in names.indices.to_pylist()], texts, strict=True))
    ends = np.cumsum(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)).tolist()
    return (messages[start:end] for start, end in zip([0, *ends], ends, strict=False))


def _replies(messages: list[Message]) -> Iterator[tuple[str, str] | str]:
    """A prompt and response for each reply, or a message that says why there is none."""
    roles, known = [role for role, _ in messages], {"user", "assistant", "system"}
    if "assistant" not in roles or not known.issuperset(roles):
        yield next((role for role in roles if role not in known), "no reply in this conversation")
        return
    system: list[str] = []
    earlier: list[str] = []
    for place, (role, text) in enumerate(messages):
        if role == "assistant":
            yield ("\n".join(system + earlier), text) if place else "a reply without a prompt"
        if text.strip():
            (system if role == "system" else earlier).append(text)


def _text_batch(layout: Layout, arrays: list[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(field, TEXT) for field in layout.fields]))


def by_line(problems: Iterable[RowProblem]) -> tuple[RowProblem, ...]:
    return tuple(sorted(problems, key=lambda problem: problem.line))
