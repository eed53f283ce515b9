"""The options of clean, and what they do to a chunk of rows: normalize, drop unusable rows, hash the others.

Takes 16 µs of one core per row of 206 characters: normalizing 8, sketches 5, digests 1. Works in pieces of at most 4,096
rows and about 2 MiB, which bounds what a thread holds. The result does not depend on where a chunk or a piece begins.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brimful.data.check import DropCounts, Mask, Problem, TokenCounter, parse_limits
from brimful.data.clean.duplicates import HASHES, Sketches, Words, band_size, join_fields, sketch
from brimful.data.read.files import Lines
from brimful.data.read.source import Chunk, check_max_bad
from brimful.errors import BadOption
from brimful.machine.host import Host
from brimful.units import GiB, MiB, is_whole, parse_bytes

REASONS = ("broken", "empty", "too_short", "over_long", "duplicate", "near_duplicate")
"""Why a row is dropped. The first that applies counts."""
MIN_HOST_BYTES = 384 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanOptions:
    """The options of `brimful data clean`."""

    columns: str | None = None
    """Which column is which field, such as `prompt=question,response=answer`. Default: found by name."""
    tokenizer: str | None = None
    """A folder with a tokenizer.json, to count tokens with."""
    min_chars: int | str | None = None
    """Drop rows with a field of fewer characters: one number, or one for each field (`2,10`)."""
    max_chars: int | str | None = None
    """Drop rows with a field of more characters."""
    max_tokens: int | str | None = None
    """Drop rows with a field of more tokens, the closing eos included."""
    near: float | None = 0.85
    """The similarity from which a row is a near duplicate of an earlier one. None keeps near duplicates."""
    valid: float = 0.01
    """Rows of valid.parquet: a share below 1, or a number of rows."""
    test: float = 0
    """Rows of test.parquet: a share below 1, or a number of rows."""
    seed: int = 0
    """Seed of the row order, and so of the split."""
    host_limit: int | str = GiB
    """Memory limit, beyond what Python and its libraries take at the start."""
    max_bad: float = 0.0
    """The share of rows that may be broken."""
    overwrite: bool = False
    """Replace existing outputs."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise BadOption(" ".join(problems))

    @property
    def host_limit_bytes(self) -> int:
        return parse_bytes(self.host_limit, flag="host_limit=")

    def key(self) -> dict[str, Any]:
        """The options that the work up to the split depends on: only with the same ones an interrupted clean resumes."""
        return {name: getattr(self, name) for name in ("min_chars", "max_chars", "max_tokens", "near", "seed")}

    def _problems(self) -> Iterator[str]:
        for name in ("min_chars", "max_chars", "max_tokens"):
            try:
                parse_limits(name, getattr(self, name))
            except BadOption as error:
                yield str(error)
        if self.max_tokens is not None and self.tokenizer is None:
            yield f"max_tokens={self.max_tokens!r} needs a tokenizer to count with. Try: tokenizer=."
        if self.tokenizer is not None and self.max_tokens is None:
            yield f"tokenizer={self.tokenizer!r} only counts tokens. Try: max_tokens=."
        if self.near is not None and not 0.5 <= self.near <= 1:
            yield f"near={self.near:g} must be between 0.5 and 1. Try: near=0.85."
        try:
            check_max_bad(self.max_bad)
        except BadOption as error:
            yield str(error)
        for name, rows in (("valid", self.valid), ("test", self.test)):
            if not 0 <= rows < 2**53 or (rows >= 1 and rows != int(rows)):
                yield f"{name}={rows:g} must be a share below 1 or a whole number of rows. Try: {name}=0.01."
        if self.valid < 1 and self.test < 1 and self.valid + self.test >= 1:
            yield f"valid={self.valid:g} and test={self.test:g} leave no row for training. Try: smaller shares."
        try:
            if self.host_limit_bytes < MIN_HOST_BYTES:
                yield f"host_limit={self.host_limit!r} is too small. Try: host_limit='{MIN_HOST_BYTES // MiB}MiB'."
        except BadOption as error:
            yield str(error)
        if not is_whole(self.seed, 0) or self.seed >= 2**63:
            yield f"seed={self.seed!r} must be a whole number, 0 or more."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """How the memory limit is divided. The output does not depend on it."""

    threads: int
    segment_bytes: int
    """Rows and hashes collected before they are written; three copies of the text exist for a moment."""
    bucket_bytes: int
    """Text that is sorted at a time; up to twice as much, three copies, and the next bucket is read ahead."""
    duckdb_bytes: int
    """DuckDB stays within 2 % of it (301 MiB of 300 for 10 million rows); the rest is on disk."""

    @classmethod
    def within(cls, host_limit_bytes: int, cores: int | None = None) -> "MemoryShares":
        """Within this limit; by default on all cores that this process may use."""
        usable = cores or Host.detect().cores
        return cls(
            threads=max(1, min(usable, 8, host_limit_bytes // (192 * MiB))),
            segment_bytes=min(64 * MiB, host_limit_bytes // 32),
            bucket_bytes=min(64 * MiB, host_limit_bytes // 64),
            duckdb_bytes=host_limit_bytes // 6,
        )


@dataclass(kw_only=True)
class PreparedChunk:
    """The rows of a chunk that are kept so far, in pieces, and why the others are not."""

    file: str
    rows_in: int
    read_bytes: int
    texts: list[list[pa.StringArray]] = field(default_factory=list)
    """By piece, each field of its rows."""
    lines: list[Lines] = field(default_factory=list)
    digests: list[Words] = field(default_factory=list)
    """By piece, rows × 2: equal for equal rows."""
    sketches: list[Sketches] = field(default_factory=list)
    """By piece; empty where near duplicates are kept."""
    dropped: DropCounts = field(default_factory=lambda: DropCounts.empty(REASONS))

    @property
    def rows(self) -> int:
        return sum(len(lines) for lines in self.lines)

    @property
    def text_bytes(self) -> int:
        return sum(int(array.nbytes) for piece in self.texts for array in piece)

    @property
    def size_bytes(self) -> int:
        """With the hashes, which take more than short texts."""
        hashes = sum(piece.signatures.nbytes + piece.bands.nbytes for piece in self.sketches)
        return self.text_bytes + hashes + sum(part.nbytes for part in (*self.digests, *self.lines))


class Preparer:
    """Prepares chunks under these options. Several threads call it at once."""

    PIECE_ROWS = 4_096
    PIECE_BYTES = 2 * 2**20
    MIN_NEAR_CHARS = 24
    """Shorter rows, counted with the marks between their fields, are compared exactly only: 314 and 14 share two of
    three 4-grams, and a sketch of so few cannot tell them apart."""

    def __init__(self, options: CleanOptions, fields: Sequence[str]) -> None:
        self._fields = tuple(fields)
        self._min_chars = parse_limits("min_chars", options.min_chars, fields)
        self._max_chars = parse_limits("max_chars", options.max_chars, fields)
        self._max_tokens = parse_limits("max_tokens", options.max_tokens, fields)
        self._token_counter = None if options.tokenizer is None else TokenCounter(options.tokenizer)
        self._band_size = None if options.near is None else band_size(options.near)

    @property
    def bands(self) -> int:
        """Band hashes per row; 0 where near duplicates are kept."""
        return 0 if self._band_size is None else HASHES // self._band_size

    def __call__(self, chunk: Chunk) -> PreparedChunk:
        prepared = PreparedChunk(file=chunk.file, rows_in=chunk.rows_in, read_bytes=chunk.read_bytes)
        prepared.dropped.add("broken", len(chunk.broken), chunk.broken)
        mean_bytes = max(1, chunk.rows.nbytes // max(1, chunk.rows.num_rows))
        step = max(1, min(self.PIECE_ROWS, self.PIECE_BYTES // mean_bytes))
        for start in range(0, chunk.rows.num_rows, step):
            lines = chunk.lines[start : start + step]
            texts = [normalize(array) for array in chunk.rows.slice(start, step).columns]
            usable = np.ones(len(lines), dtype=bool)
            prepared.dropped.drop(chunk.file, lines, usable, self._unusable(texts, usable))
            if usable.any():
                self._hash([array.filter(pa.array(usable)) for array in texts], lines[usable], prepared)
        return prepared

    def _unusable(self, texts: list[pa.StringArray], usable: Mask) -> Iterator[Problem]:
        """Tokens are expensive and counted last, for rows that are still usable."""
        lengths = [pc.utf8_length(array).to_numpy() for array in texts]
        for name, length in zip(self._fields, lengths, strict=True):
            yield "empty", length == 0, f"{name} is blank"
        for name, length, least in zip(self._fields, lengths, self._min_chars or (), strict=False):
            yield "too_short", length < least, f"{name} has fewer than {least:,} characters"
        for name, length, most in zip(self._fields, lengths, self._max_chars or (), strict=False):
            yield "over_long", length > most, f"{name} has more than {most:,} characters"
        for name, array, most in zip(self._fields, texts, self._max_tokens or (), strict=False):
            assert self._token_counter is not None
            tokens = np.zeros(len(usable), dtype=np.int64)
            tokens[usable] = self._token_counter.count(array.filter(pa.array(usable)))
            yield "over_long", tokens > most, f"{name} has more than {most:,} tokens with its eos"

    def _hash(self, texts: list[pa.StringArray], lines: Lines, prepared: PreparedChunk) -> None:
        joined = join_fields(texts)
        digests = _digests(joined)
        prepared.texts.append(texts)
        prepared.lines.append(lines)
        prepared.digests.append(digests)
        if self._band_size is not None:
            sketches = sketch(joined, size=self._band_size)
            short = pc.utf8_length(joined).to_numpy() < self.MIN_NEAR_CHARS
            sketches.bands[:, short] = digests[short, 0]  # a bucket that only exact duplicates share
            prepared.sketches.append(sketches)


def _digests(joined: pa.StringArray) -> Words:
    """128 bits of BLAKE2 each: two of 10 million different rows agree with a chance of 1 in 10²⁴."""
    _, offsets, values = joined.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[joined.offset : joined.offset + len(joined) + 1].tolist()
    text = memoryview(values)
    digests = [hashlib.blake2b(text[start:end], digest_size=16).digest() for start, end in pairwise(ends)]
    return np.frombuffer(b"".join(digests), dtype=np.uint64).reshape(-1, 2)


# ── Normalization ─────────────────────────────────────────────────────────────────────────────────────────────────────
#     remove invisible characters ─► NFKC ─► line ends, blanks, newlines ─► punctuation ─► strip
# This order makes it idempotent: removing an invisible character can bring an accent to its letter, which NFKC composes,
# and NFKC makes blanks and punctuation (U+3000, `！`, `…`) but no invisible character. The steps after NFKC shorten runs and
# never bring two different neighbours together.

MAX_RUN: Final = 3
"""The longest run of one punctuation mark."""
MAX_INDENT: Final = 40
"""Blanks at the start of a line: ten levels of code."""

_BREAKS = r"\r\n|[\r\v\f\x{85}\x{2028}\x{2029}]"
_INVISIBLE = (
    r"\x{0}-\x{8}\x{E}-\x{1F}\x{7F}-\x{84}\x{86}-\x{9F}"  # control characters except tab, newline and the breaks above
    r"\x{AD}\x{61C}\x{180E}\x{200B}-\x{200F}\x{202A}-\x{202E}\x{2060}-\x{206F}\x{FEFF}\x{FFF9}-\x{FFFB}"
    r"\x{1D173}-\x{1D17A}\x{E0001}\x{E0020}-\x{E007F}"
)
# A zero-width joiner makes one picture of several emoji; in these scripts it and the non-joiner are part of the spelling.
# Both classes contain only characters that NFKC keeps within the class, so what is kept once is kept again.
_EMOJI = r"[\x{2190}-\x{21FF}\x{2600}-\x{27BF}\x{2B00}-\x{2BFF}\x{1F300}-\x{1FAFF}\x{FE0F}]"
_JOINED = r"[\x{620}-\x{6DC}\x{750}-\x{77F}\x{900}-\x{DFF}\x{1780}-\x{17DD}\x{1820}-\x{18AA}]"
_KEPT = (
    rf"{_EMOJI}+(?:\x{{200D}}{_EMOJI}+)+|{_JOINED}(?:[\x{{200C}}\x{{200D}}]{_JOINED}+)+"
    r"|\x{1F3F4}[\x{E0020}-\x{E007E}]+\x{E007F}"  # the flags of England, Scotland and Wales
)
_RUNS = (r"。、·—〜!?,", r".;:~-=_*")
"""RE2 has no backreferences and nine groups: two expressions with one group per mark."""


def _shorten_runs(marks: str) -> tuple[str, str]:
    """`(。。。)。+|(!!!)!+` and `\\1\\2`: the first three marks of each run."""
    runs = [f"([{mark}]{{{MAX_RUN}}})[{mark}]+" for mark in marks]
    return "|".join(runs), "".join(f"\\{number + 1}" for number in range(len(marks)))


_NEEDS_CLEANUP = rf"[\r\v\f\x{{85}}\x{{2028}}\x{{2029}}{_INVISIBLE}]"
_CLEANUP = ((_BREAKS, "\n"), (rf"({_KEPT})|[{_INVISIBLE}]", r"\1"))
_NEEDS_SHORTENING = "|".join([r"[ \t][ \t\n]", r"\n\n\n", *(f"[{mark}]{{{MAX_RUN + 1}}}" for mark in "".join(_RUNS))])
_SHORTENING = (
    (r"[ \t]+\n", "\n"),
    (r"\n{3,}", "\n\n"),
    (r"([^ \t\n])[ \t]{2,}", r"\1 "),
    (rf"(\n[ \t]{{{MAX_INDENT}}})[ \t]+", r"\1"),
    *map(_shorten_runs, _RUNS),
)


def normalize(texts: pa.StringArray) -> pa.StringArray:
    """Texts as a tokenizer should see them: NFKC, no invisible characters, no long runs of blanks or punctuation.

    Unchanged: English, digits, single blanks and tabs, the indentation of lines (code), brackets, quotes, `#` and
    backticks in any number. A text of nothing but blanks and invisible characters becomes "".

    Over 16,384 real rows NFKC costs 5 µs per row and each regular expression 1 to 4. So one expression finds the rows
    that need more than NFKC (about one in fifty) and the others run over those only: 8 µs per row.
    """
    texts = _replace_where(texts, _NEEDS_CLEANUP, _CLEANUP)
    texts = pc.utf8_normalize(texts, form="NFKC")
    texts = _replace_where(texts, _NEEDS_SHORTENING, _SHORTENING)
    return pc.utf8_trim_whitespace(texts)


def _replace_where(texts: pa.StringArray, needed: str, steps: tuple[tuple[str, str], ...]) -> pa.StringArray:
    """Apply the replacements to the texts that match `needed`."""
    matches = pc.match_substring_regex(texts, needed)
    if not pc.any(matches).as_py():
        return texts
    changed = reduce(lambda array, step: pc.replace_substring_regex(array, *step), steps, texts.filter(matches))
    return pc.replace_with_mask(texts, matches, changed)
