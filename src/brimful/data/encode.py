"""Texts to tokens: each field is tokenized whole, truncated to its limit and ended by exactly one eos.

The tokenizer's own truncation is not used: it keeps what it removes, and counts neither rows nor tokens. Its encodings take
some 130 bytes per token until they are read, so rows are encoded in pieces of half a megabyte of text (about 1,000 rows of
chat, 15 MB of encodings): smaller pieces cost time, larger ones only memory.

A text of more than 262,144 characters (a whole book in one field) is first truncated to its beginning, or to its end where
the end is kept. That still holds far more tokens than are kept, and one such row does not take gigabytes.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

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


@dataclass(slots=True)
class EncodedRows:
    """Rows as tokens, one after the other. Lists have one entry per field."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    """A line per row, a column per field, eos included."""
    empty: int
    """Rows left out because a field had no text or no token."""
    truncated: list[int] = dataclasses.field(default_factory=list)
    """Rows that were too long."""
    lost_tokens: list[int] = dataclasses.field(default_factory=list)
    """Tokens removed. Of a text longer than `LONG_CHARACTERS` only those in the part that was encoded are counted."""
    characters: list[int] = dataclasses.field(default_factory=list)
    """Of the rows kept, before truncation."""

    @classmethod
    def join(cls, parts: "list[EncodedRows]") -> "EncodedRows":
        def total(name: str) -> list[int]:
            return [sum(values) for values in zip(*(getattr(part, name) for part in parts), strict=True)]

        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            sum(part.empty for part in parts),
            *(total(name) for name in ("truncated", "lost_tokens", "characters")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Turns rows into tokens; used by several threads at once."""

    tokenizer: Tokenizer
    max_tokens: tuple[int, ...]
    """By field, eos included."""
    keep_end: tuple[bool, ...]
    """By field, whether truncation removes the beginning instead of the end."""
    eos_id: int
    dtype: str

    def __call__(self, rows: pa.RecordBatch) -> EncodedRows:
        kept = rows.filter(_has_text(rows))
        columns = [column.to_pylist() for column in kept.columns]
        fields = len(columns)
        ids = self._encode([text for row in zip(*columns, strict=True) for text in row])
        if not all(ids):  # a text of nothing but what the normalizer removes
            rows_left = [n for n in range(kept.num_rows) if all(ids[n * fields : (n + 1) * fields])]
            ids = [one for n in rows_left for one in ids[n * fields : (n + 1) * fields]]
            kept = kept.take(pa.array(rows_left, pa.int64()))
        encoded = self._flatten(ids, empty=rows.num_rows - kept.num_rows)
        encoded.characters = [pc.sum(pc.utf8_length(column)).as_py() or 0 for column in kept.columns]
        return encoded

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

    def _flatten(self, ids: list[list[int]], *, empty: int) -> EncodedRows:
        fields = len(self.max_tokens)
        truncated, lost = [0] * fields, [0] * fields
        for number, one in enumerate(ids):
            field = number % fields
            excess = len(one) + 1 - self.max_tokens[field]
            if excess > 0:
                truncated[field] += 1
                lost[field] += excess
                one[:] = one[self._truncation(number, len(one) - excess)]
            one.append(self.eos_id)
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), self.dtype, int(lengths.sum(dtype=np.int64)))
        return EncodedRows(tokens, lengths.reshape(-1, fields), empty, truncated, lost)


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


def _has_text(rows: pa.RecordBatch) -> pa.Array:
    """Which rows have more than white space on every field."""
    keep = pa.array(np.ones(rows.num_rows, dtype=bool))
    for column in rows.columns:
        keep = pc.and_(keep, pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0))
    return keep
