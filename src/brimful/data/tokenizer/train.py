"""`brimful data tokenizer`: a tokenizer trained on as many rows as the RAM holds.

    source ─► sample (fits --host-limit) ─► alphabet ─► byte pairs [─► unigram] ─► measured on held-out rows ─► folder

Training takes memory with the text, so the sample is what decides; it is uniform over all rows (see `room`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from brimful.data.progress import Patience
from brimful.data.read.source import Source, open_source
from brimful.data.tokenizer.algorithms import (
    FIRST_BYTE,
    FIRST_PIECE,
    SEEDS,
    SPECIAL,
    UNKNOWN,
    Alphabet,
    Expected,
    IdCheck,
    Kind,
    TokenizerOptions,
    asked_size,
    check_ids,
    check_outside,
    find_alphabet,
    folder_beside,
    normalised,
    refuse_misfit,
    train_bpe,
    train_unigram,
    without_rare,
    write_report,
    write_tokenizer,
)
from brimful.data.tokenizer.sample import LONGEST_TEXT, OWN_BYTES, Fitting, Sample, Sampler, Watch, find_room, fitting
from brimful.data.tokens import TokenizerFacts
from brimful.errors import BadData, InternalError
from brimful.units import show_bytes

# What came out of a training, measured on rows that the tokenizer has not seen: how short texts become, what goes
# through bytes, whether every text comes back, and whether the ids are the model's.


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


Tell = Callable[[str], object]


def train_tokenizer(
    paths: Sequence[str],
    *,
    output: str | Path,
    options: TokenizerOptions | None = None,
    expected: Expected | None = None,
    progress: Tell = lambda phrase: None,
) -> TokenizerReport:
    """Train on the rows behind these paths and save a folder that transformers loads. `expected` is the model's config."""
    options, target = options or TokenizerOptions(), Path(output).resolve()
    vocab_size, _ = asked_size(options, expected)
    refuse_misfit(vocab_size, expected)
    check_outside(target, paths)
    job = _Training(options, expected, vocab_size, progress)
    with folder_beside(target, overwrite=options.overwrite) as folder:
        job.read(open_source(paths, columns=options.columns))
        job.train()
        facts = write_tokenizer(folder, job.tokenizer)
        report = job.report(target, facts)
        write_report(folder, report.to_json())
    return report


class _Training:
    """One training under way."""

    sample: Sample
    chosen: Fitting
    alphabet: Alphabet
    tokenizer: Tokenizer

    def __init__(self, options: TokenizerOptions, expected: Expected | None, vocab_size: int, tell: Tell) -> None:
        self.options, self.expected, self.vocab_size, self.tell = options, expected, vocab_size, tell
        self.watch, self.begin_s = Watch(), time.monotonic()
        self.room = find_room(options, self.watch.start_bytes)
        self.patience = Patience(options.max_bad)
        self.training_s = 0.0

    def read(self, source: Source) -> None:
        """One pass over all rows; the sample stays."""
        self.source = source
        sampler, begin_s = Sampler(characters=self.room.read_characters, seed=self.options.seed), time.monotonic()
        for chunk in source.chunks():
            self.patience.add(chunk)
            sampler.add(chunk.rows)
            self.watch.look()
            rate = self.patience.rows_in / max(1e-9, time.monotonic() - begin_s)
            share = f", {min(1, chunk.read_bytes / source.total_bytes):.0%}" if source.total_bytes else ""
            self.tell(f"read {self.patience.rows_in:,} rows, {rate:,.0f} rows/s{share}")
        self.patience.close()
        if not sampler.characters_seen:
            raise BadData(
                f"{source.files[0]}: no text to train on in {sampler.rows_seen:,} rows; see `brimful data check`"
            )
        sample = sampler.finish()
        self.chosen = fitting(sample.rows, self.room, self.options.kind, self.tell)
        self.sample = replace(sample, rows=self.chosen.rows)  # the others are freed

    def train(self) -> None:
        """Entries from the sample: byte pairs, and for Unigram twice as many of them as a start."""
        begin_s, unigram = time.monotonic(), self.options.kind == "unigram"
        characters = f"{self.chosen.characters:,} characters"
        self.tell(f"counting {characters}")
        texts = normalised(self.chosen.rows)
        self.alphabet = find_alphabet(texts, vocab_size=self.vocab_size)
        texts = without_rare(texts, self.alphabet)
        size = SEEDS * self.vocab_size if unigram else self.vocab_size
        self.tokenizer = self.watch.wait_for(
            lambda: train_bpe(lambda: self.watch.until_stopped(texts()), self.alphabet, vocab_size=size),
            lambda so_far: self.tell(f"training on {characters}: {so_far}"),
        )
        if unigram:
            self.tokenizer = train_unigram(texts, self.tokenizer, vocab_size=self.vocab_size, progress=self._watched)
        self.training_s = time.monotonic() - begin_s

    def report(self, target: Path, facts: TokenizerFacts) -> TokenizerReport:
        """What came out; measured, and compared with the model."""
        held_out = self.sample.held_out.num_rows > 0
        self.tell("measuring on rows that were held out" if held_out else "measuring on the training rows")
        ids = {token: number for number, token in enumerate(SPECIAL)}
        found = {token: self.tokenizer.token_to_id(token) for token in SPECIAL}
        if found != ids or facts.pad_id != ids["[PAD]"] or facts.eos_id != ids["[EOS]"]:
            raise InternalError(f"special tokens came out as {found} and {facts}")
        sides = measure(self.tokenizer, self.sample.held_out if held_out else self.chosen.rows)
        self.watch.look()
        return TokenizerReport(
            tokenizer=str(target), kind=self.options.kind, choices=self._choices(facts), vocab_size=facts.vocab_size,
            rows_seen=self.sample.rows_seen, rows_used=self.chosen.rows.num_rows,
            characters_seen=self.sample.characters_seen, characters_used=self.chosen.characters,
            broken=self.patience.broken, first_broken=None if self.patience.first is None else str(self.patience.first),
            layout_reason=self.source.layout.reason,
            measured_on="held-out rows" if held_out else "the training rows", total=together(sides), sides=sides,
            round_trip=1.0, special_ids=ids, ids=check_ids(facts.vocab_size, self.expected),
            fingerprint=facts.fingerprint, seconds=time.monotonic() - self.begin_s, training_s=self.training_s,
            peak_bytes=self.watch.peak_bytes,
            predicted_peak_bytes=self.watch.start_bytes + OWN_BYTES + self.chosen.predicted_bytes,
            host_limit_bytes=self.options.host_limit_bytes,
        )  # fmt: skip

    def _choices(self, facts: TokenizerFacts) -> tuple[Choice, ...]:
        sample, room, (asked, because) = self.sample, self.room, asked_size(self.options, self.expected)
        if facts.vocab_size < asked:
            because = f"{because}, {asked:,}; but the rows have no more pieces that occur twice"
        cut = f"; of {sample.rows_cut:,} rows only the first {LONGEST_TEXT:,} of a text" if sample.rows_cut else ""
        covered = f"these characters are {self.alphabet.coverage:.2%} of the sample; what is rarer becomes bytes"
        return (
            Choice(name="vocab_size", requested=self.options.vocab_size, effective=facts.vocab_size, reason=because),
            Choice(name="alphabet", requested=None, effective=len(self.alphabet.characters), reason=covered),
            Choice(
                name="rows", requested=sample.rows_seen, effective=self.chosen.rows.num_rows, reason=self._why_not_all()
            ),
            Choice(
                name="characters", requested=sample.characters_seen, effective=self.chosen.characters,
                reason=f"of these rows{cut}",
            ),
            Choice(
                name="host_limit", requested=self.options.host_limit_bytes, effective=room.limit_bytes,
                reason=room.limit_reason,
            ),
        )  # fmt: skip

    def _why_not_all(self) -> str:
        held_out = self.sample.held_out.num_rows
        if not self.chosen.complete:
            return f"training on more would take over {show_bytes(self.room.limit_bytes)} (predicted from their words)"
        if self.chosen.rows.num_rows + held_out < self.sample.rows_seen:
            return f"{self.room.read_characters:,} characters are read at most with {show_bytes(self.room.limit_bytes)}"
        return f"all but {held_out:,} held out to measure on" if held_out else "all"

    def _watched(self, phrase: str) -> None:
        self.tell(f"{phrase}, {show_bytes(self.watch.look())}")
