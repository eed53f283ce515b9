"""Rows of two replies to one prompt, one of them preferred: what `open_source(…, preferences=True)` reads.

Each row becomes one JSON object, the column `preference`:

    {"prompt": [{"role": "user", "content": "…"}], "chosen": {"role": "assistant", …}, "rejected": {…}, "tools": […]}

    texts             `prompt`, `chosen` and `rejected`, under all names that columns.py knows; `instruction` and `input`
    messages          `chosen` and `rejected` are lists of messages or single ones. They are the reply alone, after the
                      `prompt` (a text, or messages), or whole conversations whose last message is the reply
    UltraFeedback     a `prompt` that is also the first message of `chosen` and `rejected`; scores are not used
    ShareGPT          `conversations` up to the question, `chosen` and `rejected` with from and value

Where `chosen` and `rejected` are whole conversations, the messages that both begin with are the prompt, and the prompt's own
column is not needed. Columns `system`, `tools` and `history` are used as in conversations.py. A row whose replies do not
answer the same messages is `{"problem": "…"}`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from brimful.data.read.columns import (
    CHOSEN,
    CONVERSATIONS,
    PREFERENCE,
    PROMPTS,
    REJECTED,
    Layout,
    find_column,
    found_reason,
    in_words,
    joined_columns,
    listed,
    other_column,
    requested_columns,
    type_name,
    with_input,
    without_rows,
)
from brimful.data.read.conversations import (
    EXTRA_COLUMNS,
    Unreadable,
    find_extra_columns,
    history_messages,
    json_chunk,
    json_of_rows,
    message_list,
    one_message,
    parsed,
    requested_type,
    tool_list,
)
from brimful.data.read.files import JSON, TEXT, Chunk, Column, FileSchema
from brimful.errors import BadData

_REPLIES = ("chosen", "rejected")
PAIR = ("prompt", *_REPLIES)
"""The fields of a preference as texts."""
_SETTABLE = (*PAIR, "messages", "conversations", *EXTRA_COLUMNS)


def find_preference_layout(schema: FileSchema, file: str, *, rows_vary: bool) -> Layout:
    """The layout by column names."""
    names = list(schema.common)
    chosen, rejected = find_column(CHOSEN, names), find_column(REJECTED, names)
    if not (chosen and rejected):
        missing = " and ".join(name for name, column in zip(_REPLIES, (chosen, rejected), strict=True) if not column)
        raise BadData(
            f"{file} has no column {missing}, only {listed(schema.types)}. "
            "Try: columns='prompt=question,chosen=good,rejected=bad'."
        )
    columns = {"chosen": chosen, "rejected": rejected}
    columns = _with_prompt(columns, schema, file, rows_vary=rows_vary)
    columns |= find_extra_columns("pair", columns, schema)
    return Layout(
        kind="preference",
        fields=PREFERENCE,
        columns=columns,
        reason=f"preferences: {found_reason(columns, list(schema.types))}",
    )


def requested_preference_layout(option: str, schema: FileSchema, file: str, *, rows_vary: bool) -> Layout:
    """The layout that `prompt=question,chosen=good,rejected=bad` describes."""
    names = list(schema.types)
    requested = requested_columns(option, names, file, _SETTABLE)
    for other in ("messages", "conversations"):
        if other in requested:
            requested.setdefault("prompt", requested.pop(other))
    columns = dict(requested)
    unused = [name for name in names if name not in requested.values()]
    aliases = {"chosen": CHOSEN, "rejected": REJECTED}
    for field in _REPLIES:
        columns[field] = columns.get(field) or other_column(option, field, aliases, unused, file)
    if "prompt" not in columns:
        columns = _with_prompt(columns, schema, file, rows_vary=rows_vary)
    columns |= find_extra_columns("pair", columns, schema)
    by_name = [column for field, column in columns.items() if field not in requested]
    reason = "preferences: as requested" + (f"; found {in_words(by_name)}" if by_name else "")
    return Layout(kind="preference", fields=PREFERENCE, columns=columns, reason=reason)


def _with_prompt(columns: dict[str, str], schema: FileSchema, file: str, *, rows_vary: bool) -> dict[str, str]:
    """The prompt's column by its name, or none where both replies are messages."""
    unused = [name for name in schema.types if name not in columns.values()]
    prompt = find_column(PROMPTS, unused)
    if prompt is not None:
        return {"prompt": with_input(prompt, unused, rows_vary), **columns}
    conversation = find_column(CONVERSATIONS, unused)
    if conversation is not None:
        return {"prompt": conversation, **columns}
    are_texts = [schema.types[columns[field]] == TEXT for field in _REPLIES]
    if all(are_texts) or (any(are_texts) and not rows_vary):
        raise BadData(
            f"{file} has {columns['chosen']} and {columns['rejected']} as texts and no prompt, only {listed(schema.types)}. "
            "Try: columns='prompt=question'."
        )
    return columns


def preference_columns(layout: Layout, schema: FileSchema, file: str, *, rows_vary: bool) -> tuple[Column, ...]:
    """The columns to read, each once."""
    may_lack_prompt = any(schema.types.get(layout.columns[field]) != TEXT for field in _REPLIES)
    columns: dict[str, Column] = {}
    for part, joined in layout.columns.items():
        names = joined_columns(joined, schema.types)
        for place, name in enumerate(names):
            type_ = _type(part, schema.types.get(name), rows_vary=rows_vary, joined=len(names) > 1)
            if type_ is None:
                raise BadData(
                    f"{file}: column '{name}' holds {type_name(schema.types[name])}, not text. "
                    "Try: another one with columns=."
                )
            required = part in _REPLIES or (part == "prompt" and place == 0 and not may_lack_prompt)
            columns[name] = Column(name, type_, required or (name in columns and columns[name].required))
    return tuple(columns.values())


def _type(part: str, type_: pa.DataType | None, *, rows_vary: bool, joined: bool) -> pa.DataType | None:
    if part not in PAIR:
        return requested_type(part, type_, rows_vary=rows_vary, joined=joined)
    if rows_vary and not joined:
        return JSON  # one row may have text where another has messages
    if type_ in (None, TEXT):
        return TEXT
    nested = type_ is not None and pa.types.is_nested(type_) and not pa.types.is_map(type_)
    return JSON if nested and not joined else None


def map_preferences(layout: Layout, chunk: Chunk) -> Iterator[Chunk]:
    """The rows as one text column `preference`. A row that is none becomes a broken one."""
    problems: dict[int, str] = {}
    parts = [part for part in PAIR if part in layout.columns]
    texts = json_of_rows(layout, chunk.rows, parts, _preference, problems)
    yield json_chunk(chunk, PREFERENCE[0], texts, problems)


def pair_texts(chunk: Chunk) -> Chunk:
    """The same rows as three text columns, for people to look at: prompts of several messages have them line by line."""
    problems: dict[int, str] = {}
    columns: dict[str, list[str]] = {part: [] for part in PAIR}
    for row, text in enumerate(chunk.rows.column(0).to_pylist()):
        content = json.loads(text)
        if "problem" in content:
            problems[row], content = content["problem"], {}
        for part, texts in columns.items():
            messages = content.get(part) or []
            texts.append("\n".join(map(_shown, messages if part == "prompt" else [messages])) if messages else "")
    arrays = [pa.array(texts, type=TEXT) for texts in columns.values()]
    rows = pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(part, TEXT) for part in columns]))
    mapped = replace(chunk, rows=rows)
    return without_rows(mapped, problems) if problems else mapped


def _shown(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    return message.get("content") or (json.dumps(calls, ensure_ascii=False) if calls else "")


def _preference(values: Mapping[str, Any], names: Mapping[str, str], as_json: set[str]) -> dict[str, Any]:
    """The preference of a row from its parts, which are text or, those of `as_json`, JSON."""
    tools = tool_list(values.get("tools"), names["tools"])
    replies = [_reply_messages(values[part], names[part], part in as_json) for part in _REPLIES]
    whole = [len(messages) > 1 for messages in replies]
    if any(whole):
        if not all(whole):
            raise Unreadable(f"'{names['chosen']}' and '{names['rejected']}' are not both whole conversations")
        prompt = _shared(*replies)
        if any(len(messages) != len(prompt) + 1 for messages in replies):
            return {"problem": f"'{names['chosen']}' and '{names['rejected']}' differ in more than the last reply"}
    else:
        prompt = history_messages(values.get("history"), names["history"]) + _prompt_messages(values, names, as_json)
    chosen, rejected = (messages[-1] for messages in replies)
    for name, reply in zip(_REPLIES, (chosen, rejected), strict=True):
        if reply["role"] != "assistant":
            raise Unreadable(f"the last message of '{names[name]}' is of the role {reply['role']}, not a reply")
    system = values.get("system") or ""
    if system.strip() and not any(message["role"] in ("system", "developer") for message in prompt):
        prompt = [{"role": "system", "content": system}, *prompt]
    content = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return {**content, "tools": tools} if tools else content


def _reply_messages(value: Any, name: str, is_json: bool) -> list[dict[str, Any]]:
    if is_json:
        value = parsed(value, name, nested=False)
    if value is None or isinstance(value, str):
        return [{"role": "assistant", "content": value or ""}]
    if isinstance(value, dict):
        return [one_message(value, name)]
    return message_list(value, name)


def _prompt_messages(values: Mapping[str, Any], names: Mapping[str, str], as_json: set[str]) -> list[dict[str, Any]]:
    if "prompt" not in values:
        raise Unreadable(f"'{names['chosen']}' is a reply alone, and there is no prompt")
    value = parsed(values["prompt"], names["prompt"], nested=False) if "prompt" in as_json else values["prompt"]
    if value is None or isinstance(value, str):
        return [{"role": "user", "content": value or ""}]
    return message_list(value, names["prompt"])


def _shared(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that both begin with, without the last of either."""
    shared = []
    for first, second in zip(one[:-1], other[:-1], strict=False):
        if first != second:
            break
        shared.append(first)
    return shared
