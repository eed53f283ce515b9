"""What can be asked of a clean, and how large its pieces may be within the memory asked for."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.data.check import Place, TokenCounter, limits
from brimful.data.clean.similarity import HASHES, Sketches, Words, band_rows, join, normalise, sketch
from brimful.data.read.source import Chunk
from brimful.errors import BadData, BadOption
from brimful.machine.host import Host
from brimful.units import GiB, MiB, flag_bytes, parse_bytes, show_bytes

LEAST_HOST_BYTES = 384 * MiB
_KEY = ("min_chars", "max_chars", "max_tokens", "near", "seed")
"""What the work up to the split depends on: an interrupted clean goes on under other values of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanOptions:
    """The words that `brimful data clean` and `brimful.data.clean.clean.clean` share."""

    columns: str | None = None
    """Which column is what, where the found ones are not meant: `prompt=question,response=answer`."""
    tokenizer: str | None = None
    """A folder with a tokenizer.json, to count tokens with."""
    min_chars: int | str | None = None
    """Drop rows with a side of fewer characters: one number for all sides, or one for each (`2,10`)."""
    max_chars: int | str | None = None
    """Drop rows with a side of more characters."""
    max_tokens: int | str | None = None
    """Drop rows with a side of more tokens, the closing eos counted."""
    near: float | None = 0.85
    """From which similarity on a row is a near duplicate of an earlier one. None keeps them."""
    valid: float = 0.01
    """Rows of valid.parquet: a share below 1, or a number."""
    test: float = 0
    """Rows of test.parquet, likewise."""
    seed: int = 0
    """Of the order of the rows, hence of the split."""
    host_limit: int | str = GiB
    """Memory to stay within, what Python and its libraries take at the start not counted."""
    max_bad: float = 0.0
    """The share of rows that may be broken."""
    overwrite: bool = False
    """Replace the outputs that are there already."""

    def __post_init__(self) -> None:
        problems = [problem for check in _CHECKS for problem in check(self)]
        if problems:
            raise BadOption("; ".join(problems))

    @property
    def host_limit_bytes(self) -> int:
        return parse_bytes(self.host_limit, flag="--host-limit")

    def key(self) -> dict[str, Any]:
        """What an interrupted clean must have been asked for to be gone on with."""
        return {name: getattr(self, name) for name in _KEY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How the memory is divided. No row that comes out depends on it."""

    threads: int
    segment_bytes: int
    """Rows and their hashes that are gathered before they are written; three copies of the text exist for a moment."""
    bucket_bytes: int
    """Text that is brought into order at a time; up to twice as much, three copies, and the next one read ahead."""
    duckdb_bytes: int
    """DuckDB keeps to it within 2 %: 301 MiB of 300 for 10 million rows, the rest is on disk."""

    @classmethod
    def of(cls, host_limit_bytes: int, cores: int | None = None) -> "Budget":
        """Within this limit, on so many cores; on those that this process may use unless given."""
        usable = cores or Host.detect().cores
        return cls(
            threads=max(1, min(usable, 8, host_limit_bytes // (192 * MiB))),
            segment_bytes=min(64 * MiB, host_limit_bytes // 32),
            bucket_bytes=min(64 * MiB, host_limit_bytes // 64),
            duckdb_bytes=host_limit_bytes // 6,
        )


def _limits(options: CleanOptions) -> list[str]:
    problems = []
    for flag, asked in (("min-chars", options.min_chars), ("max-chars", options.max_chars), ("max-tokens", options.max_tokens)):  # fmt: skip
        parts = [] if asked is None else str(asked).split(",")
        if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
            problems.append(
                f"--{flag} {asked}: give a whole number from 1 on, or one for each side with commas between"
            )
    if options.max_tokens is not None and options.tokenizer is None:
        problems.append(f"--max-tokens {options.max_tokens}: tokens are counted with a tokenizer; give --tokenizer DIR")
    if options.tokenizer is not None and options.max_tokens is None:
        problems.append(f"--tokenizer {options.tokenizer}: it only counts tokens; give --max-tokens, too")
    return problems


def _shares(options: CleanOptions) -> list[str]:
    problems = []
    if options.near is not None and not 0.5 <= options.near <= 1:
        problems.append(f"--near {options.near:g}: give a similarity from 0.5 to 1, such as 0.85, or --no-near")
    if not 0 <= options.max_bad <= 1:
        problems.append(f"--max-bad {options.max_bad:g}: give a share from 0 to 1, such as 0.01")
    for flag, asked in (("valid", options.valid), ("test", options.test)):
        if not 0 <= asked < 2**53 or (asked >= 1 and asked != int(asked)):
            problems.append(f"--{flag} {asked:g}: give a share below 1, such as 0.01, or a whole number of rows")
    if options.valid < 1 and options.test < 1 and options.valid + options.test >= 1:
        problems.append(f"--valid {options.valid:g} --test {options.test:g}: together they leave no row for training")
    return problems


def _host(options: CleanOptions) -> list[str]:
    try:
        asked = options.host_limit_bytes
    except BadOption as error:
        return [str(error)]
    least = f"{LEAST_HOST_BYTES // MiB}MiB"
    return [f"--host-limit {options.host_limit}: cleaning needs {least} at least"] if asked < LEAST_HOST_BYTES else []


def _seed(options: CleanOptions) -> list[str]:
    good = isinstance(options.seed, int) and not isinstance(options.seed, bool) and 0 <= options.seed < 2**63
    return [] if good else [f"--seed {options.seed!r}: give a whole number from 0 on"]


_CHECKS = (_limits, _shares, _host, _seed)


# A chunk of rows on its way through clean: normalised, the unusable ones out with their reasons, the others sketched.
#
# Takes 16 µs of a core a row (206 characters): normalising 8, sketches 5, digests 1. Works in pieces of at most 4,096 rows
# and about 2 MiB, which bounds what a thread holds; nothing depends on where a chunk or a piece begins. Runs in several
# threads at a time.


PIECE_ROWS = 4_096
PIECE_BYTES = 2 * 2**20
GIANT = 24
"""Times its own size is what a huge row may take on its way: several threads may have one each."""
SHORT = 24
"""Characters, with those between the sides, below which only exact duplicates count: 314 and 14 share two 4-grams of
three, and a sketch of so few cannot tell them apart."""
PLACES = 3
"""Of each reason, the first few rows are remembered."""
REASONS = ("broken", "empty", "too_short", "over_long", "duplicate", "near_duplicate")
"""Why a row is dropped; the first that applies is the one that counts."""

Lines = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(kw_only=True)
class Prepared:
    """What became of a chunk: its rows that stay, and why the others do not."""

    file: str
    rows_in: int
    read_bytes: int
    sides: list[list[pa.StringArray]] = field(default_factory=list)
    """By piece, each side of its rows."""
    lines: list[Lines] = field(default_factory=list)
    digests: list[Words] = field(default_factory=list)
    """By piece, rows × 2: equal for equal rows."""
    sketches: list[Sketches] = field(default_factory=list)
    """By piece; none where near duplicates stay."""
    dropped: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[Place]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(len(lines) for lines in self.lines)

    @property
    def text_bytes(self) -> int:
        return sum(int(side.nbytes) for piece in self.sides for side in piece)

    @property
    def held_bytes(self) -> int:
        """With its hashes, which outweigh short texts."""
        hashes = sum(one.signatures.nbytes + one.bands.nbytes for one in self.sketches)
        return self.text_bytes + hashes + sum(part.nbytes for part in (*self.digests, *self.lines))

    def drop(self, reason: str, count: int) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def note(self, reason: str, line: int, why: str) -> None:
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES:
            places.append(Place(file=self.file, line=line, why=why))


class Preparer:
    """How the rows of a source are prepared under these options."""

    def __init__(self, options: CleanOptions, sides: Sequence[str]) -> None:
        self._sides = tuple(sides)
        self._giant_bytes = options.host_limit_bytes // GIANT
        self._min_chars = limits("--min-chars", options.min_chars, sides)
        self._max_chars = limits("--max-chars", options.max_chars, sides)
        self._max_tokens = limits("--max-tokens", options.max_tokens, sides)
        self._counter = None if options.tokenizer is None else TokenCounter(options.tokenizer)
        self._per_band = None if options.near is None else band_rows(options.near)

    @property
    def bands(self) -> int:
        """Band hashes of each row; 0 where near duplicates stay."""
        return 0 if self._per_band is None else HASHES // self._per_band

    def __call__(self, chunk: Chunk) -> Prepared:
        self._refuse_giant(chunk)
        prepared = Prepared(file=chunk.file, rows_in=chunk.rows_in, read_bytes=chunk.read_bytes)
        for one in chunk.broken:
            prepared.drop("broken", 1)
            prepared.note("broken", one.line, one.why)
        for rows, lines in _pieces(chunk):
            sides = [normalise(side) for side in rows.columns]
            good = self._sift(sides, lines, prepared)
            if good.any():
                self._keep([side.filter(pa.array(good)) for side in sides], lines[good], prepared)
        return prepared

    def _refuse_giant(self, chunk: Chunk) -> None:
        """A row that alone would break the limit is named, with the limit it needs."""
        if chunk.rows.nbytes <= self._giant_bytes:
            return
        sizes = sum(pc.binary_length(side).to_numpy().astype(np.int64) for side in chunk.rows.columns)
        row = int(np.argmax(sizes))
        if sizes[row] > self._giant_bytes:
            needed = flag_bytes(int(sizes[row]) * GIANT)
            raise BadData(
                f"{chunk.file}, line {chunk.lines[row]}: a row of {show_bytes(int(sizes[row]))} is too large for this --host-limit; give {needed}, or take the row out"
            )

    def _sift(self, sides: list[pa.StringArray], lines: Lines, prepared: Prepared) -> Mask:
        """The rows that may stay; each other is counted under the first reason that applies."""
        good, first = np.ones(len(lines), dtype=bool), []
        for reason, hit, why in self._problems(sides, good):
            rows = np.flatnonzero(hit & good)
            prepared.drop(reason, len(rows))
            first += [(int(row), reason, why) for row in rows[:PLACES]]
            good[rows] = False
        for row, reason, why in sorted(first):
            prepared.note(reason, int(lines[row]), why)
        return good

    def _problems(self, sides: list[pa.StringArray], good: Mask) -> Iterator[tuple[str, Mask, str]]:
        """Reason, rows, and what is said of them. Tokens, which are dear, are counted of rows still good."""
        lengths = [pc.utf8_length(side).to_numpy() for side in sides]
        for name, length in zip(self._sides, lengths, strict=True):
            yield "empty", length == 0, f"{name} is blank"
        for name, length, least in zip(self._sides, lengths, self._min_chars or (), strict=False):
            yield "too_short", length < least, f"{name} has fewer than {least:,} characters"
        for name, length, most in zip(self._sides, lengths, self._max_chars or (), strict=False):
            yield "over_long", length > most, f"{name} has more than {most:,} characters"
        for name, side, most in zip(self._sides, sides, self._max_tokens or (), strict=False):
            assert self._counter is not None
            tokens = np.zeros(len(good), dtype=np.int64)
            tokens[good] = self._counter.count(side.filter(pa.array(good)))
            yield "over_long", tokens > most, f"{name} has more than {most:,} tokens, its eos counted"

    def _keep(self, sides: list[pa.StringArray], lines: Lines, prepared: Prepared) -> None:
        joined = join(sides)
        prepared.sides.append(sides)
        prepared.lines.append(lines)
        prepared.digests.append(_digests(joined))
        if self._per_band is not None:
            sketches = sketch(joined, per_band=self._per_band)
            short = pc.utf8_length(joined).to_numpy() < SHORT
            sketches.bands[:, short] = prepared.digests[-1][short, 0]  # a bucket that only its exact duplicates share
            prepared.sketches.append(sketches)


def _pieces(chunk: Chunk) -> Iterator[tuple[pa.RecordBatch, Lines]]:
    mean_bytes = max(1, chunk.rows.nbytes // max(1, chunk.rows.num_rows))
    step = max(1, min(PIECE_ROWS, PIECE_BYTES // mean_bytes))
    for start in range(0, chunk.rows.num_rows, step):
        yield chunk.rows.slice(start, step), chunk.lines[start : start + step]


def _digests(joined: pa.StringArray) -> Words:
    """128 bits of BLAKE2 each: that two of 10 million different rows agree has a chance of 1 in 10²⁴."""
    _, offsets, values = joined.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[joined.offset : joined.offset + len(joined) + 1].tolist()
    text = memoryview(values)
    found = [hashlib.blake2b(text[start:end], digest_size=16).digest() for start, end in pairwise(ends)]
    return np.frombuffer(b"".join(found), dtype=np.uint64).reshape(-1, 2)
