"""Rows of any format as conversations: what `open_source(…, messages=True)` reads.

Each row becomes one JSON object in OpenAI's format, the column `conversation`:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], "tools": […]}

    OpenAI messages       `messages`: role and content, and whatever else a message has
    ShareGPT              `conversations`: from and value; columns `system` and `tools` beside it
    Alpaca                instruction, input, output; columns `system` and `history` (pairs of earlier turns)
    prompt and response   under all names that columns.py knows; each is a text or a list of messages

Files of plain text keep their field `text`. Tables, which have no nested columns, may hold messages, tools and history as
JSON in a text column.

What a chat template may rely on: roles are system, developer, user, assistant and tool (`gpt`, `human`, `observation` … are
mapped to these). `content` is a text, or null beside `tool_calls`. The arguments of a tool call are an object, as the
templates of transformers expect, also where the file has them as JSON text. Functions of OpenAI's older format become tools
and tool calls. All other keys of a message pass unchanged; keys that are null are left out. A system message in the
conversation replaces the system column. Whether there is a reply, or an order of roles, is not checked here.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from json.encoder import encode_basestring
from typing import Any

import pyarrow as pa

from brimful.data.read.columns import (
    CHOSEN,
    CONVERSATION,
    CONVERSATIONS,
    PROMPTS,
    REJECTED,
    RESPONSES,
    Kind,
    Layout,
    find_column,
    find_layout,
    found_reason,
    in_words,
    joined_columns,
    other_column,
    requested_columns,
    reuse_layout,
    text_array,
    type_name,
    used_columns,
    without_rows,
)
from brimful.data.read.files import JSON, TEXT, Chunk, Column, FileSchema, message_keys
from brimful.data.read.json_rows import to_json, value_name
from brimful.errors import BadData, BadOption

EXTRA_COLUMNS = {
    "system": ("system", "system_prompt", "system_message", "系统", "系统提示"),
    "tools": ("tools", "functions"),
    "history": ("history", "历史"),
}
"""Columns that a conversation may have besides its messages, or besides prompt and response."""

_SETTABLE = ("messages", "conversations", "prompt", "response", *EXTRA_COLUMNS, "text")

_FORMATS: dict[Kind, str] = {"instruction": "Alpaca", "pair": "prompt and response"}


# ── Which columns make up a conversation ──────────────────────────────────────────────────────────────────────────────


def find_conversation_layout(
    schema: FileSchema, file: str, earlier: Layout | None, *, rows_vary: bool
) -> Layout | None:
    """The layout by column names, with the columns of an earlier file where this one has them too."""
    base = (earlier and reuse_layout(_base(earlier), schema.common)) or _find_base(schema, file, rows_vary=rows_vary)
    if base is None or base.kind == "text":
        return base
    columns = {"messages": base.columns["prompt"]} if base.kind == "conversations" else dict(base.columns)
    columns |= find_extra_columns(base.kind, columns, schema)
    reason = f"{_format_name(base.kind, columns, schema)}: {found_reason(columns, list(schema.types))}"
    return Layout(kind=base.kind, fields=CONVERSATION, columns=columns, reason=reason)


def requested_conversation_layout(option: str, schema: FileSchema, file: str, *, rows_vary: bool) -> Layout:
    """The layout that `prompt=question,response=answer,system=sys` or `messages=chat` describes."""
    names = list(schema.types)
    requested = requested_columns(option, names, file, _SETTABLE)
    if "conversations" in requested and "messages" not in requested:
        requested["messages"] = requested.pop("conversations")
    kind = _requested_kind(requested, names)
    fields = {"text": ("text",), "conversations": ("messages",)}.get(kind, ("prompt", "response"))
    allowed = fields if kind == "text" else (*fields, *_extra_parts(kind))
    if extra := [field for field in requested if field not in allowed]:
        main = next((field for field in requested if field in fields), fields[0])
        raise BadOption(f"columns={option!r}: {extra[0]} cannot be combined with {main}. Try: one of them.")
    aliases = {"messages": CONVERSATIONS, "prompt": PROMPTS, "response": RESPONSES}
    used = used_columns(requested, names)
    unused = [name for name in names if name not in used]
    columns = dict(requested)
    for field in fields:
        columns[field] = requested.get(field) or other_column(option, field, aliases, unused, file)
    if kind == "text":
        return Layout(kind="text", fields=("text",), columns=columns, reason="as requested")
    columns |= find_extra_columns(kind, columns, schema)
    by_name = [column for field, column in columns.items() if field not in requested]
    reason = f"{_format_name(kind, columns, schema)}: as requested"
    reason += f"; found {in_words(by_name)}" if by_name else ""
    return Layout(kind=kind, fields=CONVERSATION, columns=columns, reason=reason)


def conversation_columns(layout: Layout, schema: FileSchema, file: str, *, rows_vary: bool) -> tuple[Column, ...]:
    """The columns to read, each once. Where rows vary, also the extra columns that later rows may have."""
    columns: dict[str, Column] = {}
    for part, joined in layout.columns.items():
        names = joined_columns(joined, schema.types)
        for place, name in enumerate(names):
            type_ = requested_type(part, schema.types.get(name), rows_vary=rows_vary, joined=len(names) > 1)
            if type_ is None:
                wanted = "messages" if part == "messages" else "text"
                raise BadData(
                    f"{file}: column '{name}' holds {type_name(schema.types[name])}, not {wanted}. "
                    "Try: another one with columns=."
                )
            required = part not in EXTRA_COLUMNS and place == 0
            columns[name] = Column(name, type_, required or (name in columns and columns[name].required))
    for part in _extra_parts(layout.kind) if rows_vary else ():
        if part not in layout.columns and part not in columns and part not in schema.types:
            columns[part] = Column(part, TEXT if part == "system" else JSON, required=False)
    return tuple(columns.values())


def _find_base(schema: FileSchema, file: str, *, rows_vary: bool) -> Layout | None:
    """As without `messages=True`, but a preference is no conversation."""
    chosen, rejected = find_column(CHOSEN, schema.common), find_column(REJECTED, schema.common)
    if not (chosen and rejected):
        return find_layout(schema, rows_vary=rows_vary)
    others = {name: type_ for name, type_ in schema.types.items() if name not in (chosen, rejected)}
    common = tuple(name for name in schema.common if name in others)
    layout = find_layout(FileSchema(others, common), rows_vary=rows_vary)
    prompt = find_column(PROMPTS, common)
    if prompt and (layout is None or layout.kind == "text"):
        raise BadData(
            f"{file} holds preferences ({prompt}, {chosen} and {rejected}), not conversations. "
            f"Try: columns='prompt={prompt},response={chosen}' to train on the preferred replies."
        )
    return layout


def _base(layout: Layout) -> Layout:
    """The layout of a conversation as `reuse_layout` knows it."""
    if not layout.is_conversation:
        return layout
    columns = {field: layout.columns.get(field) or layout.columns["messages"] for field in ("prompt", "response")}
    return replace(layout, columns=columns)


def _extra_parts(kind: Kind) -> tuple[str, ...]:
    return ("system", "tools") if kind == "conversations" else tuple(EXTRA_COLUMNS)


def find_extra_columns(kind: Kind, columns: Mapping[str, str], schema: FileSchema) -> dict[str, str]:
    """Columns for system, tools and history of a type that can be one, other than those already used."""
    used = used_columns(columns, schema.types)
    extra = {}
    for part in _extra_parts(kind):
        unused = [name for name in schema.types if name not in used]
        column = None if part in columns else find_column(EXTRA_COLUMNS[part], unused)
        if column and requested_type(part, schema.types[column], rows_vary=False, joined=False) is not None:
            extra[part] = column
            used.add(column)
    return extra


def requested_type(part: str, type_: pa.DataType | None, *, rows_vary: bool, joined: bool) -> pa.DataType | None:
    """The type to request for a column of this type; None if it cannot be this part of a conversation."""
    nested = type_ is not None and pa.types.is_nested(type_) and not pa.types.is_map(type_)
    if part in ("messages", "tools", "history"):
        # In JSON one row may have text where another has a list.
        return (JSON if nested or rows_vary else TEXT) if nested or type_ in (None, TEXT) else None
    if type_ in (None, TEXT):
        return TEXT
    may_be_messages = part in ("prompt", "response") and not joined
    return JSON if may_be_messages and nested and not pa.types.is_struct(type_) else None


def _format_name(kind: Kind, columns: Mapping[str, str], schema: FileSchema) -> str:
    if kind != "conversations":
        return _FORMATS[kind]
    type_ = schema.types.get(columns["messages"])
    lists = (pa.ListType, pa.LargeListType)
    item = type_.value_type if isinstance(type_, lists) else None
    keys = message_keys(field.name for field in item) if item is not None and pa.types.is_struct(item) else None
    return "ShareGPT" if keys == ("from", "value") else "OpenAI messages" if keys else "messages"


def _requested_kind(requested: Mapping[str, str], names: Sequence[str]) -> Kind:
    if "text" in requested:
        return "text"
    if "messages" in requested:
        return "conversations"
    has_messages = find_column(CONVERSATIONS, [name for name in names if name not in requested.values()])
    return "conversations" if has_messages and not {"prompt", "response"} & set(requested) else "pair"


# ── Rows to conversations ─────────────────────────────────────────────────────────────────────────────────────────────


class Unreadable(Exception):
    """What is wrong with a row."""


def map_conversations(layout: Layout, chunk: Chunk) -> Iterator[Chunk]:
    """The rows as one text column `conversation`. A row that is no conversation becomes a broken one."""
    problems: dict[int, str] = {}
    extras = _extra_arrays(layout, chunk.rows)
    if _are_texts(layout, chunk.rows, extras):
        texts = _from_texts(layout, chunk.rows, extras, problems)
    else:
        parts = ("messages",) if layout.kind == "conversations" else ("prompt", "response")
        texts = json_of_rows(layout, chunk.rows, parts, _conversation, problems)
    yield json_chunk(chunk, CONVERSATION[0], texts, problems)


def _extra_arrays(layout: Layout, rows: pa.RecordBatch) -> dict[str, pa.Array]:
    """The columns for system, tools and history that have something in these rows."""
    return {part: column for part in EXTRA_COLUMNS if (column := _extra_array(part, layout, rows)) is not None}


def _extra_array(part: str, layout: Layout, rows: pa.RecordBatch) -> pa.Array | None:
    """The column for system, tools or history; None if it is not there or has nothing in these rows."""
    name = layout.columns.get(part)
    if name is None:
        used = used_columns(layout.columns, rows.schema.names)
        name = part if part in rows.schema.names and part not in used else None
    column = None if name is None else rows.column(name)
    return None if column is None or column.null_count == len(column) else column


def _are_texts(layout: Layout, rows: pa.RecordBatch, extras: Mapping[str, pa.Array]) -> bool:
    """Whether rows are a prompt and a response as text, and a system text at most."""
    if layout.kind == "conversations" or {"tools", "history"} & set(extras):
        return False
    names = rows.schema.names
    used = [name for field in ("prompt", "response") for name in joined_columns(layout.columns[field], names)]
    return all(rows.column(name).type == TEXT for name in used)


def _from_texts(
    layout: Layout, rows: pa.RecordBatch, extras: Mapping[str, pa.Array], problems: dict[int, str]
) -> list[str]:
    """The JSON is joined as text: five times as fast as through objects."""
    prompts, responses = (
        map(encode_basestring, text_array(rows, field, layout.columns[field], problems).to_pylist())
        for field in ("prompt", "response")
    )
    systems = [
        f'{{"role":"system","content":{encode_basestring(text)}}},' if text.strip() else ""
        for text in (extras["system"].fill_null("").to_pylist() if "system" in extras else [""] * rows.num_rows)
    ]
    return [
        f'{{"messages":[{system}{{"role":"user","content":{prompt}}},{{"role":"assistant","content":{response}}}]}}'
        for system, prompt, response in zip(systems, prompts, responses, strict=True)
    ]


Convert = Callable[[Mapping[str, Any], Mapping[str, str], set[str]], dict[str, Any]]
"""A row from the values of its parts, the names of their columns for messages, and the parts that are JSON; others are text."""


def json_of_rows(
    layout: Layout, rows: pa.RecordBatch, parts: Iterable[str], convert: Convert, problems: dict[int, str]
) -> list[str]:
    """Each row as JSON, from these parts and the extra columns. A row that cannot be read is noted in `problems`."""
    columns: dict[str, list[Any]] = {part: array.to_pylist() for part, array in _extra_arrays(layout, rows).items()}
    names = {part: layout.columns.get(part, part) for part in EXTRA_COLUMNS}
    as_json: set[str] = set()
    for part in parts:
        names[part] = joined_columns(layout.columns[part], rows.schema.names)[0]
        array = rows.column(names[part])
        if part == "messages" or array.type == JSON:
            as_json.add(part)
            columns[part] = array.to_pylist()
        else:
            columns[part] = text_array(rows, part, layout.columns[part], problems).to_pylist()
    texts = []
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        text = ""
        try:
            text = to_json(convert(dict(zip(columns, values, strict=True)), names, as_json))
        except Unreadable as problem:
            problems.setdefault(row, str(problem))
        except RecursionError:
            problems.setdefault(row, "nested too deep")
        texts.append(text)
    return texts


def json_chunk(chunk: Chunk, field: str, texts: list[str], problems: dict[int, str]) -> Chunk:
    """The chunk with these texts as its only column. Rows with a problem become broken ones."""
    array = _text_array(texts, problems)
    mapped = replace(chunk, rows=pa.RecordBatch.from_arrays([array], schema=pa.schema([(field, TEXT)])))
    return without_rows(mapped, problems) if problems else mapped


def _text_array(texts: list[str], problems: dict[int, str]) -> pa.Array:
    """Text inside of JSON inside of text may still have half of a surrogate pair."""
    try:
        return pa.array(texts, TEXT)
    except UnicodeEncodeError:
        for row, text in enumerate(texts):
            if not text.isascii() and text != text.encode(errors="ignore").decode():
                problems.setdefault(row, "half of a surrogate pair")
                texts[row] = ""
        return pa.array(texts, TEXT)


# ── One conversation ──────────────────────────────────────────────────────────────────────────────────────────────────

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "用户"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "助手"), "assistant"),
    **dict.fromkeys(("system", "系统"), "system"),
    "developer": "developer",
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "tool call"),
}
"""OpenAI's names of roles. A `tool call` is a reply of the assistant whose text is a JSON object with name and arguments."""


def _conversation(values: Mapping[str, Any], names: Mapping[str, str], as_json: set[str]) -> dict[str, Any]:
    """The conversation of a row from its parts, which are text or, those of `as_json`, JSON."""
    tools = tool_list(values.get("tools"), names["tools"])
    if "messages" in values:
        value = parsed(values["messages"], names["messages"])
        if isinstance(value, dict) and "messages" in value:  # a whole conversation in one column, as we write it
            tools = tools or tool_list(value.get("tools"), "tools")
            value = value["messages"]
        messages = message_list(value, names["messages"])
    else:
        messages = history_messages(values.get("history"), names["history"])
        for part, role in (("prompt", "user"), ("response", "assistant")):
            value = parsed(values[part], names[part], nested=False) if part in as_json else values[part]
            texts = [{"role": role, "content": value}] if isinstance(value, str) else message_list(value, names[part])
            messages += texts
    system = values.get("system") or ""
    if system.strip() and not any(message["role"] in ("system", "developer") for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def parsed(text: str | None, name: str, *, nested: bool = True) -> Any:
    """The value of a JSON text, None if it is blank. `nested` also reads JSON in a JSON text, as some jsonl files have it."""
    if text is None or not text.strip():
        return None
    try:
        value = json.loads(text)
    except ValueError:
        raise Unreadable(f"'{name}' is text, not JSON") from None
    return parsed(value, name, nested=False) if nested and isinstance(value, str) else value


def one_message(value: Any, name: str) -> dict[str, Any]:
    try:
        return _message(value)
    except Unreadable as problem:
        raise Unreadable(f"'{name}'{problem}") from None


def message_list(value: Any, name: str) -> list[dict[str, Any]]:
    if value is None or value == []:
        raise Unreadable(f"'{name}' has no message")
    if not isinstance(value, list):
        raise Unreadable(f"'{name}' is {value_name(value)}, not a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        try:
            messages.append(_message(message))
        except Unreadable as problem:
            raise Unreadable(f"message {number} of '{name}'{problem}") from None
    return messages


def _message(message: Any) -> dict[str, Any]:
    """In OpenAI's format. A problem continues the sentence `message 3 of 'messages'`."""
    if not isinstance(message, dict):
        raise Unreadable(f" is {value_name(message)}, not an object")
    role_key = "from" if message.get("from") is not None else "role"
    content_key = "value" if message.get("value") is not None else "content"
    name = message.get(role_key)
    if not isinstance(name, str):
        raise Unreadable(": no role" if name is None else f": its role is {value_name(name)}, not text")
    role = _ROLES.get(name) or _ROLES.get(name.strip().lower())
    if role is None:
        raise Unreadable(f": unknown role {name!r}")
    content = message.get(content_key)
    if len(message) == 2 and isinstance(content, str) and role != "tool call":
        return {"role": role, "content": content}
    known = {"role", "content", "from", "value", "tool_calls", "function_call"}
    others = {key: value for key, value in message.items() if key not in known and value is not None}
    calls = _calls(message.get("tool_calls") or message.get("function_call"))
    if role == "tool call":
        role, content, calls = "assistant", None, _calls(_content(content))
    if calls:
        text = None if content is None else _content(content)
        return {"role": role, "content": text, "tool_calls": calls, **others}
    if not {"content", "value"} & set(message):
        raise Unreadable(": no content")
    return {"role": role, "content": _content(content), **others}


def _content(content: Any) -> str:
    """The text of a message; several parts are joined by line breaks. Null is an empty text."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise Unreadable(f": its content is {value_name(content)}, not text")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else None
            what = f"of type {kind!r}" if isinstance(kind, str) else value_name(part)
            raise Unreadable(f": a part of its content is {what}, not text")
        texts.append(text)
    return "\n".join(texts)


def _calls(value: Any) -> list[dict[str, Any]]:
    """Tool calls with `function`, `name` and `arguments`, from OpenAI's formats or ShareGPT's."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise Unreadable(": its tool call is text, not JSON") from None
    calls = []
    for call in value if isinstance(value, list) else [value] if value else []:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unreadable(": a tool call without the name of a function")
        outside = ("id", "type", "index") if function is call else set(call) - {"function"}
        inside = {key: item for key, item in function.items() if key not in ("arguments", "parameters", *outside)}
        arguments = _arguments(function.get("arguments", function.get("parameters")))
        calls.append(
            {"type": "function"}
            | {key: item for key, item in call.items() if key in outside and item is not None}
            | {"function": {**inside, "arguments": arguments}}
        )
    return calls


def _arguments(value: Any) -> Any:
    """As an object where they are the JSON of one; other text stays."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return parsed if isinstance(parsed, dict) else value
    return value


def tool_list(value: Any, name: str) -> list[dict[str, Any]]:
    """Tools in OpenAI's format; a bare function becomes a tool."""
    if isinstance(value, str):
        value = parsed(value, name)
    tools = value if isinstance(value, list) else [] if value is None else [value]
    for number, tool in enumerate(tools, 1):
        if not isinstance(tool, dict):
            raise Unreadable(f"tool {number} of '{name}' is {value_name(tool)}, not an object")
    return [_tool(tool) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "function" in tool or "name" not in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def history_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Earlier turns: pairs of what the user and the assistant said, or messages."""
    if isinstance(value, str):
        value = parsed(value, name)
    if value is None or value == []:
        return []
    if not isinstance(value, list):
        raise Unreadable(f"'{name}' is {value_name(value)}, not a list of pairs")
    if isinstance(value[0], dict):
        return message_list(value, name)
    messages = []
    for number, pair in enumerate(value, 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise Unreadable(f"turn {number} of '{name}' is not a pair of texts")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages
