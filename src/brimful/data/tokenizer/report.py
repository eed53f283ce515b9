"""What came out of a training, measured on rows that the tokenizer has not seen: how short texts become, what goes
through bytes, whether every text comes back, and whether the ids are the model's."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from brimful.data.tokenizer.options import IdCheck, Kind
from brimful.data.tokenizer.train import FIRST_BYTE, FIRST_PIECE, UNKNOWN
from brimful.errors import InternalError

_BATCH_ROWS = 256
_LONGEST_TEXT = 10_000
"""Characters of a text that are measured: encodings take some 130 bytes a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One decision: what was asked, what it became, why."""

    name: str
    requested: Any
    """None where nothing was asked."""
    effective: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a tokenizer suits some texts."""

    rows: int
    characters: int
    """After NFKC."""
    tokens: int
    byte_tokens: int
    """Tokens that are one byte of a rare character."""
    unknown_tokens: int

    @property
    def characters_per_token(self) -> float:
        return self.characters / max(1, self.tokens)

    @property
    def byte_share(self) -> float:
        return self.byte_tokens / max(1, self.tokens)

    @property
    def unknown_rate(self) -> float:
        return self.unknown_tokens / max(1, self.tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self), "characters_per_token": self.characters_per_token, "byte_share": self.byte_share,
            "unknown_rate": self.unknown_rate,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerReport:
    """The result of `train_tokenizer`. There is none unless every measured row came back as its NFKC."""

    tokenizer: str
    """The folder."""
    kind: Kind
    choices: tuple[Choice, ...]
    """Each figure that is not simply what was asked for: entries, rows, characters, alphabet, memory."""
    vocab_size: int
    rows_seen: int
    rows_used: int
    characters_seen: int
    characters_used: int
    broken: int
    """Rows that could not be read."""
    first_broken: str | None
    layout_reason: str
    measured_on: str
    """`held-out rows`, or `the training rows` where there are too few to hold some out."""
    total: Fit
    sides: dict[str, Fit]
    round_trip: float
    """The share of measured texts that come back exactly as their NFKC."""
    special_ids: dict[str, int]
    ids: tuple[IdCheck, ...]
    """Beside the model's config."""
    fingerprint: str
    """The sha256 of tokenizer.json, which a token store carries."""
    seconds: float
    training_s: float
    peak_bytes: int
    """Measured: anonymous and shared memory of the process at its highest."""
    predicted_peak_bytes: int
    """What the sample was chosen for."""
    host_limit_bytes: int

    def to_json(self) -> dict[str, Any]:
        sides = {side: fit.to_json() for side, fit in self.sides.items()}
        return {**asdict(self), "total": self.total.to_json(), "sides": sides}


def measure(tokenizer: Tokenizer, rows: pa.Table) -> dict[str, Fit]:
    """Each side of these rows there and back. A text that does not come back is a bug here, and shown."""
    return {name: _fit(tokenizer, rows[name]) for name in rows.column_names}


def together(fits: dict[str, Fit]) -> Fit:
    """All sides of the same rows."""
    parts = list(fits.values())
    return Fit(
        rows=parts[0].rows,
        **{
            name: sum(getattr(part, name) for part in parts)
            for name in ("characters", "tokens", "byte_tokens", "unknown_tokens")
        },
    )


def _fit(tokenizer: Tokenizer, side: pa.ChunkedArray) -> Fit:
    characters = 0
    counts = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for texts in _batches(side):
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        counts += np.bincount(np.fromiter(chain.from_iterable(ids), np.int64), minlength=len(counts))
        back = tokenizer.decode_batch(ids, skip_special_tokens=True)
        for text, again in zip(texts, back, strict=True):
            normal = tokenizer.normalizer.normalize_str(text)
            characters += len(normal)
            if again != normal:
                raise InternalError(f"the tokenizer turns {normal[:200]!r} into {again[:200]!r}")
    return Fit(
        rows=len(side), characters=characters, tokens=int(counts.sum()),
        byte_tokens=int(counts[FIRST_BYTE:FIRST_PIECE].sum()), unknown_tokens=int(counts[UNKNOWN]),
    )  # fmt: skip


def _batches(side: pa.ChunkedArray) -> Iterator[list[str]]:
    for start in range(0, len(side), _BATCH_ROWS):
        yield [text[:_LONGEST_TEXT] for text in side.slice(start, _BATCH_ROWS).to_pylist()]
