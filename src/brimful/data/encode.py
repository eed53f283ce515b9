"""Texts to tokens: each field is tokenized whole, truncated to its limit and ended by exactly one eos.

The tokenizer's own truncation is not used: it keeps what it removes, and counts neither rows nor tokens. Its encodings take
some 130 bytes per token until they are read, so rows are encoded in pieces of half a megabyte of text (about 1,000 rows of
chat, 15 MB of encodings): smaller pieces cost time, larger ones only memory.

A text of more than 262,144 characters (a whole book in one field) is first truncated to its beginning, or to its end where
the end is kept. That still holds far more tokens than are kept, and one such row does not take gigabytes.

Rows that are not plain texts, such as conversations, need another `RowEncoder`. It sees a batch of rows and nothing of
files: a row that it leaves out is a `Drop` with its place in the batch, and `tokenize` names its file and line.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from brimful.data.store import column_numbers
from brimful.errors import BadOption
from brimful.units import KiB, MiB, flag_bytes, show_bytes

PIECE_BYTES, MIN_PIECE_BYTES = 512 * KiB, 16 * KiB
PIECES_IN_FLIGHT = 4
"""Passed to the encoding threads and not yet joined."""
READING_BYTES = 96 * MiB
"""For the chunks that are read, joined and written; measured."""
BYTES_PER_TEXT_BYTE = 48
"""What encodings take: 130 bytes per token, at least three bytes of text per token."""
LONG_CHARACTERS = 2**18


EMPTY = "empty"
"""The reason for a row with a field that has no text or no token."""
READ_AS_LETTERS = "special tokens read as letters"
"""The reason of a note on a row that contains such letters."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A row that an encoder leaves out."""

    row: int
    """Its place in the batch, from 0."""
    reason: str
    """It is counted under this: `empty`, `nothing to train on`, `invalid`, `refused by the chat template`."""
    message: str = ""
    """What is wrong with this row. Default: the reason."""
    refused: bool = False
    """Whether it counts as broken: then it is an error unless `max_bad` allows it. Otherwise it is only counted."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the owner of the rows should know of one that is kept."""

    row: int
    """Its place in the batch, from 0."""
    reason: str
    """It is counted under this."""
    message: str
    """What there is in this row."""


@dataclass(slots=True)
class EncodedRows:
    """Rows as tokens, one after the other. Lists have one entry per field of tokens (spans are none)."""

    tokens: npt.NDArray[Any]
    """All fields of the first row, then of the second …"""
    lengths: npt.NDArray[np.int32]
    """A line per row, a column per field of the store, eos included."""
    rows_used: int
    """Rows of the batch that are in here: fewer than `lengths` has where one row gives several."""
    drops: list[Drop] = dataclasses.field(default_factory=list)
    """All other rows of the batch."""
    notes: list[Note] = dataclasses.field(default_factory=list)
    """On rows that are kept, at most one for each row and reason."""
    truncated: list[int] = dataclasses.field(default_factory=list)
    """Rows that were too long."""
    lost_tokens: list[int] = dataclasses.field(default_factory=list)
    """Tokens removed. Of a text longer than `LONG_CHARACTERS` only those in the part that was encoded are counted."""
    characters: list[int] = dataclasses.field(default_factory=list)
    """Characters of the rows that are kept, before truncation."""

    @property
    def dropped(self) -> dict[str, int]:
        """Rows of the batch that are not in here, by reason."""
        return dict(Counter(drop.reason for drop in self.drops))

    @classmethod
    def of(
        cls, rows: Sequence[Sequence[Sequence[int] | npt.NDArray[Any]]], *, fields: int, dtype: str, **counts: Any
    ) -> "EncodedRows":
        """From the fields of each row: `[[tokens, spans], [tokens, spans], …]`. `counts` are the other attributes."""
        parts = [part for row in rows for part in row]
        lengths = np.fromiter(map(len, parts), np.int32, len(parts))
        tokens = np.fromiter(chain.from_iterable(parts), dtype, int(lengths.sum(dtype=np.int64)))
        return cls(tokens, lengths.reshape(-1, fields), **counts)

    @classmethod
    def join(cls, parts: "list[EncodedRows]") -> "EncodedRows":
        """The rows of a batch that was encoded in several parts."""

        def total(name: str) -> list[int]:
            return [sum(values) for values in zip(*(getattr(part, name) for part in parts), strict=True)]

        drops, notes, first = [], [], 0
        for part in parts:
            drops += [dataclasses.replace(drop, row=drop.row + first) for drop in part.drops]
            notes += [dataclasses.replace(note, row=note.row + first) for note in part.notes]
            first += part.rows_used + len(part.drops)
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            sum(part.rows_used for part in parts),
            drops,
            notes,
            *(total(name) for name in ("truncated", "lost_tokens", "characters")),
        )


class RowEncoder(Protocol):
    """Turns rows of a source into rows of a token store. Called by several threads at once.

    A row gives one or more rows of the store, or a `Drop`; the order stays.
    """

    @property
    def key(self) -> str:
        """Everything the result depends on besides the tokenizer's files: the template's fingerprint, the limit. An
        interrupted run is continued only with the same key."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the store: `("tokens", "spans")`."""

    @property
    def max_tokens(self) -> tuple[int, ...]:
        """The limit of each field of tokens, for the report."""

    @property
    def keep_end(self) -> tuple[bool, ...]:
        """For each field of tokens, whether truncation removes the beginning instead of the end, for the report."""

    def __call__(self, rows: pa.RecordBatch, /) -> EncodedRows: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """The `RowEncoder` of plain texts: a field of tokens for each field of text."""

    fields: tuple[str, ...]

    tokenizer: Tokenizer
    max_tokens: tuple[int, ...]
    """By field, eos included."""
    keep_end: tuple[bool, ...]
    """By field, whether truncation removes the beginning instead of the end."""
    eos_id: int
    dtype: str
    special: tuple[str, ...] = ()
    """Special tokens whose letters are worth a note: they are encoded as letters."""

    @property
    def key(self) -> str:
        return ""  # the limits are in the key of `tokenize` already

    def __call__(self, rows: pa.RecordBatch, /) -> EncodedRows:
        has_text = _has_text(rows)
        kept, places = rows.filter(pa.array(has_text)), np.flatnonzero(has_text)
        columns = [column.to_pylist() for column in kept.columns]
        fields = len(columns)
        ids = self._encode([text for row in zip(*columns, strict=True) for text in row])
        if not all(ids):  # a text of nothing but what the normalizer removes
            rows_left = [n for n in range(kept.num_rows) if all(ids[n * fields : (n + 1) * fields])]
            ids = [text_ids for n in rows_left for text_ids in ids[n * fields : (n + 1) * fields]]
            kept, places = kept.take(pa.array(rows_left, pa.int64())), places[rows_left]
        encoded = self._flatten(ids)
        encoded.drops = [
            Drop(row, EMPTY, "a field is empty") for row in np.setdiff1d(np.arange(rows.num_rows), places).tolist()
        ]
        encoded.notes = self._notes(kept, places)
        encoded.characters = [pc.sum(pc.utf8_length(column)).as_py() or 0 for column in kept.columns]
        return encoded

    def _notes(self, rows: pa.RecordBatch, places: npt.NDArray[np.int64]) -> list[Note]:
        """On rows with the letters of a special token."""
        if not self.special:
            return []
        pattern = "|".join(rf"\Q{token}\E" for token in self.special)
        found = np.zeros(rows.num_rows, dtype=bool)
        for column in rows.columns:
            found |= column_numbers(pc.match_substring_regex(column, pattern).cast(pa.uint8())) > 0
        notes = []
        for number in np.flatnonzero(found).tolist():
            texts = [column[number].as_py() for column in rows.columns]
            tokens = [token for token in self.special if any(token in text for text in texts)]
            notes.append(Note(int(places[number]), READ_AS_LETTERS, ", ".join(tokens)))
        return notes

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """All tokens of each text, or more than are kept."""
        encode = self.tokenizer.encode_batch_fast
        heads = [
            text if len(text) <= LONG_CHARACTERS else text[self._truncation(number, LONG_CHARACTERS)]
            for number, text in enumerate(texts)
        ]
        ids = [encoding.ids for encoding in encode(heads, add_special_tokens=False)]
        for number, (text, head) in enumerate(zip(texts, heads, strict=True)):
            if head is not text and len(ids[number]) < 2 * max(self.max_tokens):
                ids[number] = encode([text], add_special_tokens=False)[0].ids
        return ids

    def _truncation(self, number: int, length: int) -> slice:
        """What is kept of a longer text, which is number `number` of all fields of all rows."""
        return slice(-length, None) if self.keep_end[number % len(self.keep_end)] else slice(0, length)

    def _flatten(self, ids: list[list[int]]) -> EncodedRows:
        fields = len(self.max_tokens)
        truncated, lost = [0] * fields, [0] * fields
        for number, text_ids in enumerate(ids):
            field = number % fields
            excess = len(text_ids) + 1 - self.max_tokens[field]
            if excess > 0:
                truncated[field] += 1
                lost[field] += excess
                text_ids[:] = text_ids[self._truncation(number, len(text_ids) - excess)]
            text_ids.append(self.eos_id)
        rows = len(ids) // fields
        return EncodedRows.of(
            [ids], fields=fields, dtype=self.dtype, rows_used=rows, truncated=truncated, lost_tokens=lost
        )


def in_pieces(rows: pa.RecordBatch, *, piece_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows, divided where their text exceeds another `piece_bytes`; at least one piece."""
    sizes = np.zeros(rows.num_rows, dtype=np.int64)
    for column in rows.columns:
        sizes += column_numbers(pc.binary_length(column))
    ends = np.cumsum(sizes)
    targets = np.arange(piece_bytes, ends[-1] if len(ends) else 0, piece_bytes)
    places = np.searchsorted(ends, targets, side="right")
    edges = [0, *(place for place in np.unique(places).tolist() if place), rows.num_rows]
    for first, last in pairwise(edges):
        yield rows.slice(first, last - first)


def piece_size(host_limit_bytes: int, start_bytes: int) -> int:
    """Bytes of text per piece, so that all pieces in flight fit beside what the process takes already."""
    available = host_limit_bytes - start_bytes - READING_BYTES
    size = available // (PIECES_IN_FLIGHT * BYTES_PER_TEXT_BYTE)
    if size < MIN_PIECE_BYTES:
        needed = start_bytes + READING_BYTES + PIECES_IN_FLIGHT * BYTES_PER_TEXT_BYTE * MIN_PIECE_BYTES
        raise BadOption(
            f"host_limit='{flag_bytes(host_limit_bytes)}' is too small: Python, its libraries and the tokenizer take "
            f"{show_bytes(start_bytes)}. Try: {flag_bytes(needed)} or more."
        )
    return min(PIECE_BYTES, size)


def _has_text(rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Which rows have more than white space on every field."""
    keep = np.ones(rows.num_rows, dtype=bool)
    for column in rows.columns:
        length = pc.utf8_length(pc.utf8_trim_whitespace(column))
        keep &= column_numbers(length) > 0
    return keep
