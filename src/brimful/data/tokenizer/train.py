"""`brimful data tokenizer`: a tokenizer trained on as many rows as the RAM holds.

    source ─► sample (fits --host-limit) ─► alphabet ─► byte pairs [─► unigram] ─► measured on held-out rows ─► folder

See `sample.py` for how the rows are chosen and `vocabulary.py` for the algorithms.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from brimful.data.check import read_progress
from brimful.data.pipeline import OutputFolder, PeakMemory, writing_to
from brimful.data.read.files import refuse_output_inside
from brimful.data.read.source import BrokenRowLimit, Source, open_source
from brimful.data.tokenizer.folder import MODEL_FILE, TokenizerFacts, save_tokenizer, write_json
from brimful.data.tokenizer.sample import (
    LONGEST_TEXT,
    OVERHEAD_BYTES,
    Kind,
    Sampler,
    available_memory,
    row_lengths,
    rows_that_fit,
)
from brimful.data.tokenizer.vocabulary import (
    FIRST_BYTE,
    FIRST_PIECE,
    FIXED,
    MIN_VOCAB_SIZE,
    SPECIAL,
    UNIGRAM_SEEDS,
    UNKNOWN,
    Alphabet,
    find_alphabet,
    normalized_texts,
    train_bpe,
    train_unigram,
    until,
    without_rare,
)
from brimful.errors import BadData, BadOption, InternalError
from brimful.units import GiB, show_bytes, show_seconds

ModelConfig = dict[str, Any]
"""The model's `vocab_size`, `pad_token_id`, `eos_token_id` and `decoder_start_token_id`, each None where unknown."""
Progress = Callable[[str], object]
T = TypeVar("T")

VOCAB_SIZE = 29298
"""The released ChatLM's."""
_MEASURED_ROWS, _MEASURED_TEXT = 256, 10_000
"""Rows at once and characters of a text that are measured: encodings take some 130 bytes per token."""
_PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerOptions:
    """How to train a tokenizer."""

    vocab_size: int | None = None
    """Entries, including 7 special tokens and 256 bytes. Default: the model's."""
    kind: Kind = "bpe"
    columns: str | None = None
    """Which columns make up which field: `prompt=question,response=answer`. Default: found by name."""
    host_limit_bytes: int = 4 * GiB
    """The RAM that the whole process may take; it decides how many rows are used."""
    seed: int = 0
    """Seed of the sample."""
    max_bad: float = 0.0
    """The share of rows that may be broken."""
    overwrite: bool = False
    """Replace an existing tokenizer."""

    def __post_init__(self) -> None:
        problems = []
        if self.vocab_size is not None and self.vocab_size < MIN_VOCAB_SIZE:
            problems.append(f"vocab_size={self.vocab_size} must be at least {MIN_VOCAB_SIZE}")
        if self.kind not in get_args(Kind):
            problems.append(f"kind='{self.kind}' must be one of {', '.join(get_args(Kind))}")
        if self.host_limit_bytes <= 0:
            problems.append(f"host_limit={self.host_limit_bytes} must be positive")
        if self.seed < 0:
            problems.append(f"seed={self.seed} must not be negative")
        if not 0 <= self.max_bad <= 1:
            problems.append(f"max_bad={self.max_bad} must be a share from 0 to 1")
        if problems:
            raise BadOption("; ".join(problems) + ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdCheck:
    """One figure of the tokenizer beside the model's."""

    name: str
    """As in config.json: `eos_token_id`."""
    tokenizer: int | None
    model: int | list[int] | None
    """None where the config does not have it."""
    matches: bool | None
    """None where there is nothing to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One decision: the value requested, its effective value, and why."""

    name: str
    requested: Any
    """None where nothing was requested."""
    effective: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStats:
    """What a tokenizer makes of some texts."""

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
        shares = ("characters_per_token", "byte_share", "unknown_rate")
        return {**asdict(self), **{name: getattr(self, name) for name in shares}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerReport:
    """The result of `train_tokenizer`. There is none unless every measured text decodes to its NFKC."""

    tokenizer: str
    """The folder."""
    kind: Kind
    choices: tuple[Choice, ...]
    """Entries, alphabet, rows, characters, host limit."""
    vocab_size: int
    rows_seen: int
    rows_used: int
    characters_seen: int
    characters_used: int
    broken: int
    """Rows that could not be read."""
    first_broken: str | None
    skipped: tuple[str, ...]
    """What the folders contain besides files of rows, each with the reason."""
    layout_reason: str
    measured_on: str
    """`held-out rows`, or `training rows` where there are too few to hold some out."""
    total: TextStats
    fields: dict[str, TextStats]
    round_trip: float
    """The share of measured texts that decode exactly to their NFKC."""
    special_ids: dict[str, int]
    ids: tuple[IdCheck, ...]
    """Compared with the model's config."""
    fingerprint: str
    """The sha256 of tokenizer.json, which a token store carries."""
    seconds: float
    training_s: float
    peak_bytes: int
    """Measured: the most anonymous and shared memory of the process."""
    predicted_peak_bytes: int
    """What the sample was chosen for."""
    host_limit_bytes: int

    def to_json(self) -> dict[str, Any]:
        fields = {field: stats.to_json() for field, stats in self.fields.items()}
        return {**asdict(self), "total": self.total.to_json(), "fields": fields}


def train_tokenizer(
    paths: Sequence[str] | Source,
    *,
    output: str | Path,
    options: TokenizerOptions | None = None,
    model_config: ModelConfig | None = None,
    progress: Progress = lambda phrase: None,
) -> TokenizerReport:
    """Train on the rows of these files, or of an open source, and save a folder that transformers loads."""
    options, path = options or TokenizerOptions(), Path(output).resolve()
    vocab_size, _ = requested_size(options, model_config)
    check_model(vocab_size, model_config)
    source = open_source(paths, columns=options.columns, host_limit_bytes=options.host_limit_bytes)
    refuse_output_inside(path, source.paths)
    folder = OutputFolder(path=path, kind="tokenizer", marker=MODEL_FILE, overwrite=options.overwrite)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with PeakMemory() as peak:
        job = _Training(options, model_config, vocab_size, progress, peak)
        with writing_to(path):
            folder.check()
            part.mkdir(parents=True)  # before the long work, not after it
        try:
            job.read(source)
            job.train()
            with writing_to(path):
                facts = save_tokenizer(part, job.tokenizer)
                report = job.report(path, facts)
                write_json(part / "report.json", report.to_json())
                folder.publish(part)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return report


def requested_size(options: TokenizerOptions, model_config: ModelConfig | None) -> tuple[int, str]:
    """How many entries to train, and why."""
    if options.vocab_size is not None:
        return options.vocab_size, "as requested"
    size = (model_config or {}).get("vocab_size")
    return (int(size), "the model's vocab_size") if size else (VOCAB_SIZE, "the released ChatLM's")


def compare_ids(vocab_size: int, model_config: ModelConfig | None) -> tuple[IdCheck, ...]:
    """Compare a tokenizer of this size with the model's config."""
    config, special = model_config or {}, range(len(SPECIAL))

    def check(name: str, tokenizer: int | None, matches: Callable[[Any], bool]) -> IdCheck:
        value = config.get(name)
        return IdCheck(name=name, tokenizer=tokenizer, model=value, matches=None if value is None else matches(value))

    def same(name: str, number: int) -> IdCheck:  # a config may list several ids that end a text
        return check(name, number, lambda value: number in value if isinstance(value, list) else number == value)

    start = config.get("decoder_start_token_id")
    return (
        check("vocab_size", vocab_size, lambda size: vocab_size <= size),
        same("pad_token_id", SPECIAL.index("[PAD]")),
        same("eos_token_id", SPECIAL.index("[EOS]")),
        # T5 starts with pad, BART with eos, others with bos: any special token will do, an ordinary one will not.
        check("decoder_start_token_id", start if start in special else None, lambda value: value in special),
    )


def check_model(vocab_size: int, model_config: ModelConfig | None) -> None:
    """Refuse, before any training, what the model could not use."""
    wrong = {check.name: check.model for check in compare_ids(vocab_size, model_config) if check.matches is False}
    problems = []
    if "vocab_size" in wrong:
        size = wrong.pop("vocab_size")
        problems.append(f"vocab_size={vocab_size} exceeds the model's vocab_size of {size}")
    if wrong:
        ids = ", ".join(f"{name} {value}" for name, value in wrong.items())
        problems.append(
            f"model= has {ids}, but tokenizers made here have [PAD] 0, [EOS] 1 and special tokens up to "
            f"{len(SPECIAL) - 1}"
        )
    if vocab_size < MIN_VOCAB_SIZE:
        problems.append(
            f"model= has a vocab_size of {vocab_size}, too small for {len(FIXED)} special tokens and bytes and an "
            f"alphabet; {MIN_VOCAB_SIZE} is the least"
        )
    if problems:
        raise BadOption("; ".join(problems) + ".")


class _Training:
    """One training in progress."""

    rows: pa.Table
    held_out: pa.Table
    alphabet: Alphabet
    tokenizer: Tokenizer

    def __init__(
        self, options: TokenizerOptions, model_config: ModelConfig | None, vocab_size: int, progress: Progress, peak: PeakMemory
    ) -> None:  # fmt: skip
        self.options, self.model_config, self.vocab_size, self.progress = options, model_config, vocab_size, progress
        self.peak, self.begin_s, self.training_s = peak, time.monotonic(), 0.0
        self.limit_bytes, self.training_bytes = available_memory(options.host_limit_bytes, peak.start_bytes)
        self.broken_rows = BrokenRowLimit(options.max_bad)
        self.sampler = Sampler.within(self.training_bytes, seed=options.seed)

    def read(self, source: Source) -> None:
        """One pass over all rows; the sample stays."""
        self.source = source
        sampler, begin_s = self.sampler, time.monotonic()
        for chunk in source.chunks():
            self.broken_rows.add(chunk)
            sampler.add(chunk.rows)
            rate = self.broken_rows.rows_in / max(1e-9, time.monotonic() - begin_s)
            self.progress(read_progress(self.broken_rows.rows_in, rate, chunk.read_bytes, source.total_bytes))
        self.broken_rows.check()
        if not sampler.characters_seen:
            raise BadData(f"{source.files[0]}: {sampler.rows_seen:,} rows without any text. Try: `brimful data check`.")
        sample, self.held_out = sampler.finish()
        self.rows, self.predicted_bytes = rows_that_fit(sample, self.training_bytes, self.options.kind, self.progress)
        self.all_fit = self.rows.num_rows == sample.num_rows
        self.characters = int(row_lengths(self.rows).sum())

    def train(self) -> None:
        begin_s, kind = time.monotonic(), self.options.kind
        size = f"{self.characters:,} characters"
        self.progress(f"counting {size}")
        texts = normalized_texts(self.rows)
        self.alphabet = find_alphabet(texts, vocab_size=self.vocab_size)
        texts = without_rare(texts, self.alphabet)
        entries = self.vocab_size * (UNIGRAM_SEEDS if kind == "unigram" else 1)
        self.tokenizer = call_in_thread(
            lambda stop: train_bpe(until(stop, texts), self.alphabet, vocab_size=entries),
            lambda seconds: self.progress(
                f"training on {size}: {show_seconds(seconds)}, {show_bytes(self.peak.measure())}"
            ),
        )
        if kind == "unigram":
            self.tokenizer = train_unigram(texts, self.tokenizer, vocab_size=self.vocab_size, progress=self.progress)
        self.training_s = time.monotonic() - begin_s

    def report(self, path: Path, facts: TokenizerFacts) -> TokenizerReport:
        """Measure the tokenizer and compare it with the model."""
        measured_on = "held-out rows" if self.held_out.num_rows else "training rows"
        self.progress(f"measuring on {measured_on}")
        ids = {token: number for number, token in enumerate(SPECIAL)}
        actual = {token: self.tokenizer.token_to_id(token) for token in SPECIAL}
        if actual != ids or facts.pad_id != ids["[PAD]"] or facts.eos_id != ids["[EOS]"]:
            raise InternalError(f"special tokens have the ids {actual} and {facts}")
        fields = measure(self.tokenizer, self.held_out if self.held_out.num_rows else self.rows)
        return TokenizerReport(
            tokenizer=str(path), kind=self.options.kind, choices=self._choices(facts), vocab_size=facts.vocab_size,
            rows_seen=self.sampler.rows_seen, rows_used=self.rows.num_rows, characters_seen=self.sampler.characters_seen,
            characters_used=self.characters, broken=self.broken_rows.broken,
            first_broken=None if self.broken_rows.first is None else str(self.broken_rows.first),
            skipped=self.source.skipped, layout_reason=self.source.layout.reason, measured_on=measured_on, total=add_up(fields), fields=fields,
            round_trip=1.0, special_ids=ids, ids=compare_ids(facts.vocab_size, self.model_config),
            fingerprint=facts.fingerprint, seconds=time.monotonic() - self.begin_s, training_s=self.training_s,
            peak_bytes=max(self.peak.bytes, self.peak.measure()),
            predicted_peak_bytes=self.peak.start_bytes + OVERHEAD_BYTES + self.predicted_bytes,
            host_limit_bytes=self.options.host_limit_bytes,
        )  # fmt: skip

    def _choices(self, facts: TokenizerFacts) -> tuple[Choice, ...]:
        sampler, requested = self.sampler, self.options.host_limit_bytes
        size, size_reason = requested_size(self.options, self.model_config)
        if facts.vocab_size < size:
            size_reason = f"{size_reason}, {size:,}, but the rows have no more pieces that occur twice"
        covers = f"these characters are {self.alphabet.coverage:.2%} of the sample; rarer ones become bytes"
        truncated = (
            f", {sampler.rows_truncated:,} of them truncated to {LONGEST_TEXT:,} per text"
            if sampler.rows_truncated
            else ""
        )
        limit_reason = "as requested" if self.limit_bytes == requested else "no more RAM is free now"
        choices = (
            ("vocab_size", self.options.vocab_size, facts.vocab_size, size_reason),
            ("alphabet", None, len(self.alphabet.characters), covers),
            ("rows", sampler.rows_seen, self.rows.num_rows, self._rows_reason()),
            ("characters", sampler.characters_seen, self.characters, f"of these rows{truncated}"),
            ("host_limit", requested, self.limit_bytes, limit_reason),
        )
        return tuple(Choice(name=name, requested=a, effective=b, reason=why) for name, a, b, why in choices)

    def _rows_reason(self) -> str:
        held_out, limit = self.held_out.num_rows, show_bytes(self.limit_bytes)
        if not self.all_fit:
            return f"a random sample, because training on more would exceed {limit} (predicted from their words)"
        if self.rows.num_rows + held_out < self.sampler.rows_seen:
            return f"a random sample of {self.sampler.budget:,} characters, the most that is read with {limit}"
        return f"all but {held_out:,} held out to measure on" if held_out else "all"


def call_in_thread(work: Callable[[threading.Event], T], progress: Callable[[float], object]) -> T:
    """A long native call in a daemon thread, so that progress is shown and Ctrl-C acts at once.

    `work` is given an event that is set on Ctrl-C: native code must not call back into a Python that is shutting down.
    """
    future: Future[T] = Future()
    stop = threading.Event()

    def run() -> None:
        try:
            future.set_result(work(stop))
        except BaseException as error:
            future.set_exception(error)

    begin_s = time.monotonic()
    thread = threading.Thread(target=run, name="brimful-tokenizer", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_PROGRESS_S)
            progress(time.monotonic() - begin_s)
    except BaseException:
        stop.set()
        thread.join(2 * _PROGRESS_S)
        raise
    return future.result()


def measure(tokenizer: Tokenizer, rows: pa.Table) -> dict[str, TextStats]:
    """Encode and decode each field of these rows. A text that does not come back is a bug here."""
    return {name: _measure_field(tokenizer, rows[name]) for name in rows.column_names}


def add_up(fields: dict[str, TextStats]) -> TextStats:
    """All fields of the same rows together."""
    names = ("characters", "tokens", "byte_tokens", "unknown_tokens")
    sums = {name: sum(getattr(stats, name) for stats in fields.values()) for name in names}
    return TextStats(rows=next(iter(fields.values())).rows, **sums)


def _measure_field(tokenizer: Tokenizer, field: pa.ChunkedArray) -> TextStats:
    characters = 0
    counts = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for texts in _batches(field):
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        counts += np.bincount(np.fromiter(chain.from_iterable(ids), np.int64), minlength=len(counts))
        decoded = tokenizer.decode_batch(ids, skip_special_tokens=True)
        for text, again in zip(texts, decoded, strict=True):
            normal = tokenizer.normalizer.normalize_str(text)
            characters += len(normal)
            if again != normal:
                raise InternalError(f"the tokenizer turns {normal[:200]!r} into {again[:200]!r}")
    return TextStats(
        rows=len(field), characters=characters, tokens=int(counts.sum()),
        byte_tokens=int(counts[FIRST_BYTE:FIRST_PIECE].sum()), unknown_tokens=int(counts[UNKNOWN]),
    )  # fmt: skip


def _batches(field: pa.ChunkedArray) -> Iterator[list[str]]:
    for start in range(0, len(field), _MEASURED_ROWS):
        yield [text[:_MEASURED_TEXT] for text in field.slice(start, _MEASURED_ROWS).to_pylist()]
