"""Texts to tokens: each side tokenised whole, cut to its limit, ended by exactly one eos.

The tokenizer's own truncation is not used: it keeps what it cuts off, and counts neither rows nor tokens. Its encodings
take some 130 bytes a token until they are read, so a chunk is tokenised in pieces of half a megabyte of text (about
1,000 rows of chat, 15 MB of encodings): smaller pieces cost time, larger ones only memory.

A text of more than 262,144 characters (a whole book in one field) is first cut to its beginning, or to its end where
that is what is kept: it holds far more tokens than are kept, and one such row does not take gigabytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from brimful.data.store.store import column_numbers
from brimful.units import KiB

PIECE_BYTES = 512 * KiB
LONG_CHARACTERS = 2**18


@dataclass(slots=True)
class Encoded:
    """Rows as tokens, one after the other, and what was counted on the way: per side, in the order of the sides."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    """A line a row, a column a side; the eos counts."""
    empty: int
    """Rows left out because a side had no text or no token."""
    cut: list[int] = field(default_factory=list)
    """Rows cut."""
    lost: list[int] = field(default_factory=list)
    """Tokens cut off. Of a text longer than `LONG_CHARACTERS` only those in its beginning are counted."""
    characters: list[int] = field(default_factory=list)
    """Of the rows kept, before cutting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """What turns a piece of rows into tokens; used by several threads at once."""

    tokenizer: Tokenizer
    max_tokens: tuple[int, ...]
    """By side, the eos counted."""
    keep_end: tuple[bool, ...]
    """By side, whether it loses its beginning instead of its end."""
    eos_id: int
    dtype: str

    def __call__(self, rows: pa.RecordBatch) -> Encoded:
        filled = rows.filter(_with_text(rows))
        columns = [column.to_pylist() for column in filled.columns]
        sides = len(columns)
        ids = self._ids([text for row in zip(*columns, strict=True) for text in row])
        if not all(ids):  # a text of nothing but what the normaliser removes
            kept = [n for n in range(filled.num_rows) if all(ids[n * sides : (n + 1) * sides])]
            ids = [one for n in kept for one in ids[n * sides : (n + 1) * sides]]
            filled = filled.take(pa.array(kept, pa.int64()))
        found = self._flat(ids, empty=rows.num_rows - filled.num_rows)
        found.characters = [pc.sum(pc.utf8_length(column)).as_py() or 0 for column in filled.columns]
        return found

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Of each text all tokens, or more than are kept."""
        encode = self.tokenizer.encode_batch_fast
        heads = [
            text if len(text) <= LONG_CHARACTERS else text[self._kept(number, LONG_CHARACTERS)]
            for number, text in enumerate(texts)
        ]
        ids = [encoding.ids for encoding in encode(heads, add_special_tokens=False)]
        for number, (text, head) in enumerate(zip(texts, heads, strict=True)):
            if head is not text and len(ids[number]) < 2 * max(self.max_tokens):
                ids[number] = encode([text], add_special_tokens=False)[0].ids
        return ids

    def _kept(self, number: int, length: int) -> slice:
        """What is kept of a text that is longer, which is the so many-th of all sides of all rows."""
        return slice(-length, None) if self.keep_end[number % len(self.keep_end)] else slice(0, length)

    def _flat(self, ids: list[list[int]], *, empty: int) -> Encoded:
        sides = len(self.max_tokens)
        cut, lost = [0] * sides, [0] * sides
        for number, one in enumerate(ids):
            side = number % sides
            over = len(one) + 1 - self.max_tokens[side]
            if over > 0:
                cut[side] += 1
                lost[side] += over
                one[:] = one[self._kept(number, len(one) - over)]
            one.append(self.eos_id)
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), self.dtype, int(lengths.sum(dtype=np.int64)))
        return Encoded(tokens, lengths.reshape(-1, sides), empty, cut, lost)


def pieces(rows: pa.RecordBatch, *, piece_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows, cut where their text exceeds another `piece_bytes`; one piece at least."""
    sizes = np.zeros(rows.num_rows, dtype=np.int64)
    for column in rows.columns:
        sizes += column_numbers(pc.binary_length(column))
    ends = np.cumsum(sizes)
    targets = np.arange(piece_bytes, ends[-1] if len(ends) else 0, piece_bytes)
    cuts = np.searchsorted(ends, targets, side="right")
    edges = [0, *(cut for cut in np.unique(cuts).tolist() if cut), rows.num_rows]
    for first, last in pairwise(edges):
        yield rows.slice(first, last - first)


def joined(parts: list[Encoded]) -> Encoded:
    """The pieces of one chunk together."""

    def total(name: str) -> list[int]:
        return [sum(values) for values in zip(*(getattr(part, name) for part in parts), strict=True)]

    return Encoded(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        sum(part.empty for part in parts),
        total("cut"), total("lost"), total("characters"),
    )  # fmt: skip


def _with_text(rows: pa.RecordBatch) -> pa.Array:
    """Which rows have more than white space on every side."""
    keep = pa.array(np.ones(rows.num_rows, dtype=bool))
    for column in rows.columns:
        keep = pc.and_(keep, pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0))
    return keep
