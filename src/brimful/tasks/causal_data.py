"""Rows of a causal language model: conversations and plain text as tokens for a token store.

    conversations    fields `tokens` and `spans`: all tokens of a conversation, and which of them are trained on
    plain text       field `tokens`: pieces of documents, all of them trained on

A conversation longer than `max_tokens` keeps its beginning, since a reply without its question teaches nothing; if none of
its replies is left, it is dropped and counted. A document is cut into pieces instead, so that nothing of it is lost; an eos
follows its last token. 20,000 conversations of two turns (278 tokens) in ChatML took 6.3 s of processor time: two thirds for
tokenizing with offsets, a sixth for printing the template twice and comparing.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from tokenizers import Tokenizer

from brimful.data.encode import EMPTY, LONG_CHARACTERS, READ_AS_LETTERS, Drop, EncodedRows, Note
from brimful.data.store import SPANS, spans_of, token_dtype
from brimful.tasks.chat_template import ChatTemplate, Encoded, RowError, load_auto_tokenizer, pieces
from brimful.tasks.reply_spans import NoReply, roles_out_of_order
from brimful.tasks.special_tokens import without_post_processor

TOKENS = "tokens"
READ_AS_TOKENS = "special tokens read as tokens"
ROLE_ORDER = "roles out of order"
"""Reasons of notes on rows."""
FOUND_BY = {
    "generation tag": "the template's own tag",
    "sentinel": "comparing texts",
    "one row per reply": "one row per reply",
}


@dataclass(frozen=True, kw_only=True)
class ConversationEncoder:
    """The `RowEncoder` of conversations, which `open_source(…, messages=True)` reads."""

    template: ChatTemplate
    limit: int
    """The most tokens of a row."""
    train_on: Literal["replies", "all"] = "replies"

    fields = (TOKENS, SPANS)
    keep_end = (False,)

    @classmethod
    def load(
        cls, folder: str | Path, *, max_tokens: int, train_on: Literal["replies", "all"] = "replies", template: str | None = None
    ) -> "ConversationEncoder":  # fmt: skip
        """With the tokenizer and chat template of a folder, or with another template."""
        return cls(template=ChatTemplate.load(folder, template), limit=max_tokens, train_on=train_on)

    @property
    def method(self) -> str:
        """How the trained tokens are found."""
        return FOUND_BY[self.template.method] if self.train_on == "replies" else "all tokens"

    def pieces(self, tokens: Sequence[int], trained: Sequence[bool]) -> list[tuple[str, bool]]:
        """A row as text, divided where training begins and ends."""
        return pieces(self.template, Encoded(list(tokens), list(trained)))

    @property
    def max_tokens(self) -> tuple[int, ...]:
        return (self.limit,)

    @property
    def key(self) -> str:
        return f"conversations, {self.template.fingerprint}, {self.limit}, {self.train_on}"

    def __call__(self, rows: pa.RecordBatch, /) -> EncodedRows:
        texts: list[str] = rows.column(0).to_pylist()
        conversations = [json.loads(text) for text in texts]
        results = self.template.encode_batch([(one["messages"], one.get("tools")) for one in conversations])
        kept: list[list[Any]] = []
        drops: list[Drop] = []
        notes: list[Note] = []
        truncated = lost = characters = 0
        for number, result in enumerate(results):
            if isinstance(result, RowError):
                drops.append(Drop(number, result.reason, str(result), refused=not isinstance(result, NoReply)))
                continue
            if self.train_on == "all":
                result = [Encoded(row.tokens, [True] * len(row.tokens)) for row in result]
            parts = [(row.tokens[: self.limit], spans_of(row.trained[: self.limit])) for row in result]
            usable = [[tokens, spans] for tokens, spans in parts if len(spans)]
            if not usable:
                tokens = max(len(row.tokens) for row in result)
                message = f"its first reply begins after max_tokens={self.limit:,} (it has {tokens:,} tokens)"
                drops.append(Drop(number, NoReply.reason, message))
                continue
            kept += usable
            notes += special_notes(number, self.template, texts[number], (one for row in result for one in row.tokens))
            if order := roles_out_of_order(conversations[number]["messages"]):
                notes.append(Note(number, ROLE_ORDER, order))
            excess = [len(row.tokens) - self.limit for row in result if len(row.tokens) > self.limit]
            truncated += len(excess)
            lost += sum(excess)
            characters += len(texts[number])
        return EncodedRows.of(
            kept, fields=2, dtype=token_dtype(self.template.vocab_size), rows_used=len(texts) - len(drops), drops=drops,
            notes=notes, truncated=[truncated], lost_tokens=[lost], characters=[characters],
        )  # fmt: skip


def special_notes(row: int, template: ChatTemplate, text: str, ids: Iterable[int]) -> list[Note]:
    """What became of the special tokens in the text of a row."""
    letters, tokens = template.special_words(text, ids)
    words = {READ_AS_LETTERS: letters, READ_AS_TOKENS: tokens}
    return [Note(row, reason, ", ".join(names)) for reason, names in words.items() if names]


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """The `RowEncoder` of plain text. A special token in a text is this token, as in transformers: texts that are made for a
    model have them on purpose. Tokenizers with `split_special_tokens` read its letters."""

    tokenizer: Tokenizer
    limit: int
    """The most tokens of a piece."""
    eos_id: int
    vocab_size: int
    special: Mapping[int, str] = field(default_factory=dict)
    """The special tokens that are read as such, by id."""
    first_ids: tuple[int, ...] = ()
    """What the tokenizer puts before every text: bos, or nothing."""

    fields = (TOKENS,)
    keep_end = (False,)

    @classmethod
    def load(cls, folder: str | Path, *, max_tokens: int) -> "TextEncoder":
        """With the tokenizer of a model folder; it needs no chat template."""
        loaded = load_auto_tokenizer(folder)
        tokenizer = Tokenizer.from_str(json.dumps(without_post_processor(loaded.backend_tokenizer)))
        tokenizer.encode_special_tokens = letters = bool(loaded.split_special_tokens)
        added = {} if letters else tokenizer.get_added_tokens_decoder()
        first = [one for one in loaded("")["input_ids"] if one == loaded.bos_token_id]
        return cls(
            tokenizer=tokenizer, limit=max_tokens, eos_id=int(loaded.eos_token_id), first_ids=tuple(first[:1]),
            vocab_size=1 + max(loaded.get_vocab().values()),
            special={number: token.content for number, token in added.items() if token.special},
        )  # fmt: skip

    method = "all tokens"

    def pieces(self, tokens: Sequence[int], trained: Sequence[bool]) -> list[tuple[str, bool]]:
        """A row as text: all of it is trained on."""
        return [(self.tokenizer.decode(list(tokens), skip_special_tokens=False), True)]

    @property
    def max_tokens(self) -> tuple[int, ...]:
        return (self.limit,)

    @property
    def key(self) -> str:
        return f"text, {list(self.first_ids)}, {self.eos_id}, {self.limit}, {'with' if self.special else 'no'} special tokens"

    def __call__(self, rows: pa.RecordBatch, /) -> EncodedRows:
        documents: list[str] = rows.column(0).to_pylist()
        passages = [_passages(text) if text.strip() else [] for text in documents]
        batch = self.tokenizer.encode_batch_fast([one for some in passages for one in some], add_special_tokens=False)
        encodings = iter(batch)
        kept: list[list[list[int]]] = []
        drops: list[Drop] = []
        notes: list[Note] = []
        characters = 0
        for number, text in enumerate(documents):
            ids = [one for _ in passages[number] for one in next(encodings).ids]
            if not ids:
                drops.append(Drop(number, EMPTY, "the text is empty"))
                continue
            if special := self.special.keys() & set(ids):
                notes.append(Note(number, READ_AS_TOKENS, ", ".join(sorted(self.special[one] for one in special))))
            kept += [[piece] for piece in _cut([*self.first_ids, *ids, self.eos_id], self.limit)]
            characters += len(text)
        return EncodedRows.of(
            kept, fields=1, dtype=token_dtype(self.vocab_size), rows_used=len(documents) - len(drops), drops=drops,
            notes=notes, truncated=[0], lost_tokens=[0], characters=[characters],
        )  # fmt: skip


def _passages(text: str) -> list[str]:
    """A text of a book's length in parts that are tokenized one by one, divided at line ends or blanks."""
    parts = []
    while len(text) > LONG_CHARACTERS:
        edge = max(text.rfind("\n", 1, LONG_CHARACTERS) + 1, 0) or text.rfind(" ", 1, LONG_CHARACTERS)
        edge = edge if edge > 0 else LONG_CHARACTERS
        parts.append(text[:edge])
        text = text[edge:]
    return [*parts, text]


def _cut(ids: list[int], limit: int) -> list[list[int]]:
    """Pieces of `limit` tokens. The last has two at least: a single one would have no token to be predicted from."""
    edges = list(range(0, len(ids), limit))
    if len(edges) > 1 and len(ids) - edges[-1] == 1:
        edges[-1] -= 1
    return [ids[first:last] for first, last in zip(edges, [*edges[1:], len(ids)], strict=True)]
