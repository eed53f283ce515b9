"""Preference pairs as tokens for a token store: fields `prompt`, `chosen` and `rejected`.

For a causal model the chat template writes the prompt up to the generation prompt, earlier turns included, and each reply with
the token that ends it. For an encoder-decoder the texts of the prompt's messages are joined by line breaks, and eos ends the
prompt and each reply.

What is too long is truncated: a prompt keeps its end, where the question is, and a reply its beginning, without the token that
would end it. A row of a causal model has one limit for prompt and longer reply together; the prompt gives way first, down to
half of the limit. A pair that teaches nothing is dropped and counted: an empty message, replies that are equal or become so
when they are truncated, replies that do not answer the same messages.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from tokenizers import Tokenizer

from brimful.data.encode import EMPTY, LONG_CHARACTERS, READ_AS_LETTERS, Drop, EncodedRows, Note
from brimful.data.store import token_dtype
from brimful.data.tokenizer.folder import TokenizerFacts, load_tokenizer, special_words
from brimful.tasks.causal_data import special_notes
from brimful.tasks.chat_template import ChatTemplate, RowError
from brimful.tasks.pair_batches import FIELDS, REPLIES

EQUAL = "with equal replies"
TOO_LONG = "too long"
UNRELATED = "whose replies answer different messages"


class PairTokenizer(Protocol):
    """Turns preferences into the tokens of prompt, chosen and rejected, or says what is wrong with one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def key(self) -> str: ...

    def encode(self, pairs: Sequence[dict[str, Any]]) -> list[list[list[int]] | RowError]: ...

    def notes(self, row: int, text: str, fields: Sequence[list[int]]) -> list[Note]:
        """What the owner of a pair should know of it. `text` is the pair in JSON."""

    def truncated(self, prompt: list[int], replies: list[list[int]]) -> list[list[int]]: ...

    @property
    def max_tokens(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True)
class TemplatePairs:
    """Pairs for a causal model, written by its chat template."""

    template: ChatTemplate
    limit: int
    """The most tokens of prompt and longer reply together."""

    @property
    def vocab_size(self) -> int:
        return self.template.vocab_size

    @property
    def key(self) -> str:
        return f"pairs, {self.template.fingerprint}, {self.limit}"

    @property
    def max_tokens(self) -> tuple[int, ...]:
        return (self.limit,) * len(FIELDS)

    def encode(self, pairs: Sequence[dict[str, Any]]) -> list[list[list[int]] | RowError]:
        conversations = [([*pair["prompt"], pair[name]], pair.get("tools")) for pair in pairs for name in REPLIES]
        results = self.template.reply_batch(conversations)
        rows: list[list[list[int]] | RowError] = []
        for chosen, rejected in zip(results[::2], results[1::2], strict=True):
            if isinstance(chosen, RowError) or isinstance(rejected, RowError):
                rows.append(chosen if isinstance(chosen, RowError) else rejected)  # type: ignore[arg-type]
            elif chosen[0] != rejected[0]:
                rows.append(RowError("the chat template prints another prompt for each of the two replies"))
            else:
                rows.append([chosen[0], chosen[1], rejected[1]])
        return rows

    def notes(self, row: int, text: str, fields: Sequence[list[int]]) -> list[Note]:
        return special_notes(row, self.template, text, chain(*fields))

    def truncated(self, prompt: list[int], replies: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, replies))
        kept = min(len(prompt), max(self.limit - longest, self.limit // 2))
        return [prompt[len(prompt) - kept :], *(reply[: self.limit - kept] for reply in replies)]


@dataclass(frozen=True, kw_only=True)
class TextPairs:
    """Pairs for an encoder-decoder."""

    tokenizer: Tokenizer
    limits: tuple[int, ...]
    """The most tokens of a prompt and of a reply, eos included."""
    eos_id: int
    vocab_size: int
    special: tuple[str, ...] = ()
    """Special tokens whose letters are worth a note."""

    @property
    def key(self) -> str:
        return f"pairs of texts, {self.eos_id}, {list(self.limits)}"

    @property
    def max_tokens(self) -> tuple[int, ...]:
        return (self.limits[0], self.limits[1], self.limits[1])

    def encode(self, pairs: Sequence[dict[str, Any]]) -> list[list[list[int]] | RowError]:
        texts = []
        for pair in pairs:
            prompt = "\n".join(text for text in map(_content, pair["prompt"]) if text.strip())
            replies = (_content(pair[name])[:LONG_CHARACTERS] for name in REPLIES)
            texts += [prompt[-LONG_CHARACTERS:], *replies]
        ids = [one.ids for one in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        return [[[*one, self.eos_id] if one else [] for one in ids[n : n + 3]] for n in range(0, len(ids), 3)]

    def notes(self, row: int, text: str, fields: Sequence[list[int]]) -> list[Note]:
        tokens = [token for token in self.special if token in text]
        return [Note(row, READ_AS_LETTERS, ", ".join(tokens))] if tokens else []

    def truncated(self, prompt: list[int], replies: list[list[int]]) -> list[list[int]]:
        return [prompt[-self.limits[0] :], *(reply[: self.limits[1]] for reply in replies)]


@dataclass(frozen=True, kw_only=True)
class PairEncoder:
    """The `RowEncoder` of preferences, which `open_source(…, preferences=True)` reads."""

    pairs: PairTokenizer
    folder: Path
    """Of the tokenizer."""

    fields = FIELDS
    keep_end = (True, False, False)

    @classmethod
    def load(
        cls, folder: str | Path, *, causal: bool, max_tokens: tuple[int, ...], template: str | None = None
    ) -> "PairEncoder":
        """With the tokenizer of a folder, and for a causal model its chat template or another one."""
        if causal:
            return cls(
                pairs=TemplatePairs(template=ChatTemplate.load(folder, template), limit=max_tokens[0]),
                folder=Path(folder),
            )
        facts = TokenizerFacts.read(folder)
        pairs = TextPairs(
            tokenizer=load_tokenizer(folder),
            limits=max_tokens,
            eos_id=facts.eos_id,
            vocab_size=facts.vocab_size,
            special=special_words(folder),
        )
        return cls(pairs=pairs, folder=Path(folder))

    def pieces(self, row: Sequence[Any]) -> list[tuple[str, str]]:
        """Prompt, chosen and rejected as text, each with its name."""
        return named_texts(load_tokenizer(self.folder), dict(zip(FIELDS, row, strict=True)))

    @property
    def max_tokens(self) -> tuple[int, ...]:
        return self.pairs.max_tokens

    @property
    def key(self) -> str:
        return self.pairs.key

    def __call__(self, rows: pa.RecordBatch, /) -> EncodedRows:
        texts: list[str] = rows.column(0).to_pylist()
        preferences = [json.loads(text) for text in texts]
        drops_by_row = {
            number: drop for number, pair in enumerate(preferences) if (drop := _unusable(number, pair)) is not None
        }
        usable = [number for number in range(len(texts)) if number not in drops_by_row]
        kept: list[list[list[int]]] = []
        notes: list[Note] = []
        truncated, lost, characters = [0, 0, 0], [0, 0, 0], [0, 0, 0]
        for number, result in zip(usable, self.pairs.encode([preferences[one] for one in usable]), strict=True):
            if isinstance(result, RowError):
                drops_by_row[number] = Drop(number, result.reason, str(result), refused=True)
                continue
            row = self.pairs.truncated(result[0], result[1:])
            if drop := _lost(number, result, row):
                drops_by_row[number] = drop
                continue
            kept.append(row)
            notes += self.pairs.notes(number, texts[number], result)
            for field, (before, after) in enumerate(zip(result, row, strict=True)):
                truncated[field] += len(after) < len(before)
                lost[field] += len(before) - len(after)
                part = preferences[number][FIELDS[field]]
                characters[field] += sum(len(_content(one)) for one in (part if field == 0 else [part]))
        return EncodedRows.of(
            kept, fields=3, dtype=token_dtype(self.pairs.vocab_size), rows_used=len(kept),
            drops=[drops_by_row[number] for number in sorted(drops_by_row)], notes=notes, truncated=truncated, lost_tokens=lost, characters=characters,
        )  # fmt: skip


def named_texts(tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The parts of a pair for people to look at, each with its name."""
    return [(tokenizer.decode(row[name].tolist(), skip_special_tokens=False), name) for name in FIELDS]


def _unusable(number: int, pair: dict[str, Any]) -> Drop | None:
    """Why a pair teaches nothing, as far as its texts tell."""
    if "problem" in pair:
        return Drop(number, UNRELATED, pair["problem"])
    for name in REPLIES:
        if _is_empty(pair[name]):
            return Drop(number, EMPTY, f"{name} is empty")
    if not pair["prompt"] or all(_is_empty(message) for message in pair["prompt"]):
        return Drop(number, EMPTY, "the prompt is empty")
    if _same_text(pair["chosen"], pair["rejected"]):
        return Drop(number, EQUAL, "chosen is equal to rejected")
    return None


def _lost(number: int, before: Sequence[list[int]], after: Sequence[list[int]]) -> Drop | None:
    """Why a pair teaches nothing once it is tokens of limited number."""
    if not all(before):  # a text of nothing but what the normalizer removes
        return Drop(number, EMPTY, "a text has no tokens")
    if before[1] == before[2]:
        return Drop(number, EQUAL, "chosen and rejected have the same tokens")
    if not all(after) or after[1] == after[2]:
        lengths = "+".join(str(len(one)) for one in before)
        return Drop(number, TOO_LONG, f"of {lengths} tokens nothing that differs is left within max_tokens")
    return None


def _content(message: dict[str, Any]) -> str:
    return message.get("content") or ""


def _is_empty(message: dict[str, Any]) -> bool:
    return not _content(message).strip() and not message.get("tool_calls")


def _same_text(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return {**one, "content": _content(one).strip()} == {**other, "content": _content(other).strip()}
