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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from brimful.data.read.raw import TEXT, Columns, Field, is_messages
from brimful.errors import BadData

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
