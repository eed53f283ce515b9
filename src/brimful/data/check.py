"""What is in these files, and how much of it can be used: one pass, nothing written.

Every row that would not make it into a training is counted under one reason: it cannot be read (`broken`), a side is blank
(`empty`), it is longer than was allowed (`over_long`), or it came before (`duplicate`). Rows in = rows out + all of these.

Memory: a chunk, 64 Ki counters for each side, and 8 bytes a row for the duplicates.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.data.read.columns import Layout
from brimful.data.read.files import Lines
from brimful.data.read.source import Chunk, Source, open_source
from brimful.errors import BadData, BadOption, in_one_line
from brimful.units import show_rate

# Lengths counted while rows pass by: percentiles and bars from 64 Ki counters, whatever the number of rows.
#
# Exact up to 65,535 characters or tokens. Longer ones are counted by the thousand: their percentiles are rounded up to the
# next 1,024, but never above the longest, which is exact.


_EXACT = 65_536
_ROUND = 1_024
_BARS = 10
_ROUND_STEPS = (1, 2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Rows with a length of at least `start` and less than `end`; the last bin has no end."""

    start: int
    end: int | None
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long the texts of one side are."""

    rows: int
    mean: float
    p50: int
    p90: int
    p99: int
    max: int
    bins: tuple[Bin, ...]

    def to_json(self) -> dict[str, Any]:
        bins = [{"from": one.start, "to": one.end, "rows": one.rows} for one in self.bins]
        return {"rows": self.rows, "mean": round(self.mean, 2), "p50": self.p50, "p90": self.p90, "p99": self.p99, "max": self.max, "bins": bins}  # fmt: skip


class Histogram:
    """Takes lengths in, gives `Lengths` out."""

    def __init__(self) -> None:
        self._counts = np.zeros(_EXACT, dtype=np.int64)
        self._long: Counter[int] = Counter()
        self._sum = self._max = 0

    def add(self, lengths: npt.NDArray[np.int64]) -> None:
        """Some more rows."""
        if not len(lengths):
            return
        short = lengths[lengths < _EXACT]
        self._counts += np.bincount(short, minlength=_EXACT)
        if len(short) < len(lengths):
            self._long.update((-(-lengths[lengths >= _EXACT] // _ROUND) * _ROUND).tolist())
        self._sum += int(lengths.sum())
        self._max = max(self._max, int(lengths.max()))

    def lengths(self) -> Lengths | None:
        """What was counted; None where no row was."""
        sizes = np.concatenate([np.flatnonzero(self._counts), sorted(self._long)]).astype(np.int64).clip(max=self._max)
        counts = np.concatenate([self._counts[self._counts > 0], [self._long[size] for size in sorted(self._long)]])
        counts = counts.astype(np.int64)
        rows = int(counts.sum())
        if not rows:
            return None
        below = np.cumsum(counts)
        p50, p90, p99 = (_percentile(sizes, below, rows, share) for share in (50, 90, 99))
        bins = _bins(sizes, counts, p99, self._max)
        return Lengths(rows=rows, mean=self._sum / rows, p50=p50, p90=p90, p99=p99, max=self._max, bins=bins)


def _percentile(sizes: npt.NDArray[np.int64], below: npt.NDArray[np.int64], rows: int, share: int) -> int:
    """The smallest length that at least `share` percent of the rows do not exceed."""
    return int(sizes[np.searchsorted(below, -(-rows * share // 100))])


def _bins(sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], p99: int, longest: int) -> tuple[Bin, ...]:
    """Ten bars of a round width from the shortest to the 99th percentile, and one for all that is longer."""
    shortest = int(sizes[0])
    width = _round_width((p99 - shortest) / _BARS)
    last = (p99 // width + 1) * width
    edges = np.arange(shortest // width * width, last + 1, width)
    rows = np.histogram(sizes, bins=edges, weights=counts)[0].astype(np.int64).tolist()
    rows[-1] -= int(counts[sizes == last].sum())  # numpy counts the last edge in
    found = [
        Bin(start=start, end=end, rows=one) for (start, end), one in zip(pairwise(edges.tolist()), rows, strict=True)
    ]
    rest = int(counts[sizes >= last].sum())
    return (*found, Bin(start=last, end=None, rows=rest)) if longest >= last else tuple(found)


def _round_width(about: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 …"""
    power = 1
    while True:
        for step in _ROUND_STEPS:
            if step * power >= about:
                return step * power
        power *= 10


# What `check` found, as a value: counts that add up, the first places of each problem, lengths.


UNUSABLE = ("broken", "empty", "over_long")
REASONS = (*UNUSABLE, "duplicate")
"""Why a row is dropped; the first that applies is the one that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a problem was met."""

    file: str
    line: int
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What a pass over the files found."""

    files: tuple[str, ...]
    layout: Layout
    rows_in: int
    dropped: dict[str, int]
    """By reason, all four of them."""
    places: dict[str, tuple[Place, ...]]
    """By reason, the first few."""
    examples: tuple[dict[str, str], ...]
    characters: dict[str, Lengths]
    """By side, over all rows that could be read."""
    tokens: dict[str, Lengths]
    """Likewise with the eos that is appended; empty without a tokenizer."""
    conversations: int | None
    """How many the rows come from; None where rows are not replies in conversations."""
    max_bad: float
    seconds: float

    @property
    def rows_out(self) -> int:
        """Rows that can be used."""
        return self.rows_in - sum(self.dropped.values())

    @property
    def bad_share(self) -> float:
        """Rows that cannot be used, of all; a duplicate could be."""
        return sum(self.dropped[reason] for reason in UNUSABLE) / max(1, self.rows_in)

    def complaint(self) -> str | None:
        """One sentence where more rows cannot be used than `--max-bad` allows."""
        if self.bad_share <= self.max_bad:
            return None
        reasons = [reason for reason in UNUSABLE if self.dropped[reason]]
        counts = ", ".join(f"{self.dropped[reason]:,} {reason.replace('_', '-')}" for reason in reasons)
        first = self.places[reasons[0]][0]
        return (
            f"{round(self.bad_share * self.rows_in):,} of {self.rows_in:,} rows cannot be used ({counts}), more than --max-bad {self.max_bad:g}; "
            f"the first is {first.file}, line {first.line}: {first.why}"
        )

    def to_json(self) -> dict[str, Any]:
        """The names that scripts rely on."""
        return {
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": self.dropped,
            "columns": self.layout.columns,
            "kind": self.layout.kind,
            "reason": self.layout.reason,
            "files": list(self.files),
            "conversations": self.conversations,
            "bad_share": self.bad_share,
            "max_bad": self.max_bad,
            "examples": list(self.examples),
            "places": {reason: [place.to_json() for place in places] for reason, places in self.places.items()},
            "characters": {side: lengths.to_json() for side, lengths in self.characters.items()},
            "tokens": {side: lengths.to_json() for side, lengths in self.tokens.items()},
            "seconds": round(self.seconds, 3),
        }


# Rows that came before, found by their hashes: 8 bytes a row, 80 MB for ten million.
#
# A row's hash is 64 bits of Python's own over each side without its outer spaces. Two different rows share one with a chance
# of 3 in a million over ten million rows. Counting sorts a sixteenth of the hashes at a time, so that the end needs no
# second copy of them.


_BUCKETS = 16
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]


def row_hashes(sides: Sequence[pa.Array]) -> Hashes:
    """One hash for each row of these columns."""
    total = np.zeros(len(sides[0]), dtype=np.uint64)
    for side in sides:
        hashes = np.fromiter(map(hash, side.cast(pa.binary()).to_pylist()), dtype=np.int64, count=len(side))
        total = (total ^ hashes.view(np.uint64)) * _FACTOR
        total ^= total >> np.uint64(29)
    return total


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The rows of a chunk: their hashes and where they stand."""

    hashes: Hashes
    file: str
    first_line: int
    lines: Lines | None
    """None where the lines follow each other, as they nearly always do."""


class Duplicates:
    """Collects the rows of a pass and says at its end how many came before."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []

    def add(self, hashes: Hashes, file: str, lines: Lines) -> None:
        """The usable rows of a chunk."""
        if len(hashes):
            follow = len(lines) == 1 or bool((np.diff(lines) == 1).all())
            self._stretches.append(_Stretch(hashes, file, int(lines[0]), None if follow else lines))

    def count(self, places: int) -> tuple[int, list[tuple[str, int]]]:
        """How many rows came before, and file and line of the first of them."""
        total, first = 0, np.zeros(0, dtype=np.int64)
        for bucket in range(_BUCKETS):
            found = self._again(bucket)
            total += len(found)
            first = np.sort(np.concatenate([first, found]))[:places]
        return total, [self._place(int(row)) for row in first]

    def _again(self, bucket: int) -> Lines:
        """The rows of a bucket, counted over the pass, that came before."""
        hashes, rows, before = [], [], 0
        for stretch in self._stretches:
            mine = np.flatnonzero(stretch.hashes >> np.uint64(60) == bucket)
            hashes.append(stretch.hashes[mine])
            rows.append(mine + before)
            before += len(stretch.hashes)
        if not hashes:
            return np.zeros(0, dtype=np.int64)
        all_hashes, all_rows = np.concatenate(hashes), np.concatenate(rows)
        order = np.argsort(all_hashes, kind="stable")
        again = all_hashes[order][1:] == all_hashes[order][:-1]
        found: Lines = all_rows[order[1:][again]]
        return found

    def _place(self, row: int) -> tuple[str, int]:
        for stretch in self._stretches:
            if row < len(stretch.hashes):
                return stretch.file, stretch.first_line + row if stretch.lines is None else int(stretch.lines[row])
            row -= len(stretch.hashes)
        raise IndexError(row)


# What is too long: limits as people write them, and tokens as `pack` will count them.


_BATCH_ROWS = 1_024
"""Encodings carry every token's text as well: 20 KB for a row of 300 tokens."""

Counts = npt.NDArray[np.int64]


def limits(flag: str, asked: str | int | None, sides: Sequence[str]) -> tuple[int, ...] | None:
    """A limit for each side; one number goes for all of them."""
    if asked is None:
        return None
    try:
        numbers = [int(part) for part in str(asked).split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise BadOption(f"{flag} {asked}: give a whole number from 1 on, or one for each side, such as 256,320")
    if len(numbers) not in (1, len(sides)):
        raise BadOption(
            f"{flag} {asked}: these are {len(numbers)} numbers, the sides are {', '.join(sides)}; give one number or one for each"
        )
    return tuple(numbers * len(sides) if len(numbers) == 1 else numbers)


class TokenCounter:
    """A tokenizer that only counts."""

    def __init__(self, folder: str) -> None:
        from tokenizers import Tokenizer

        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise BadData(
                f"--tokenizer {folder}: there is no tokenizer.json in it; `brimful data tokenizer` writes one"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more special
            raise BadData(f"{file}: no tokenizer ({in_one_line(error)})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "[EOS]" that somebody wrote is text

    def count(self, texts: pa.Array) -> Counts:
        """Tokens of each text and the eos behind it."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._counts(texts.to_pylist())])

    def _counts(self, texts: Sequence[str]) -> list[Counts]:
        found = []
        for start in range(0, len(texts), _BATCH_ROWS):
            encodings = self._tokenizer.encode_batch_fast(
                list(texts[start : start + _BATCH_ROWS]), add_special_tokens=False
            )
            found.append(np.fromiter((len(one) + 1 for one in encodings), dtype=np.int64, count=len(encodings)))
        return found


_PLACES = 3
"""Of each problem, and rows shown as examples."""

_LOOKED_AT = 100
"""Rows of a chunk among which examples are looked for."""

Mask = npt.NDArray[np.bool_]


def check(
    paths: Sequence[str],
    *,
    columns: str | None = None,
    tokenizer: str | None = None,
    max_chars: str | int | None = None,
    max_tokens: str | int | None = None,
    max_bad: float = 0.01,
    progress: Callable[[str], object] = lambda phrase: None,
) -> CheckReport:
    """Read everything once and count. Limits are one number, or one for each side: `256` or `256,320`."""
    if not 0 <= max_bad <= 1:
        raise BadOption(f"--max-bad {max_bad}: give a share from 0 to 1, such as 0.01")
    if max_tokens is not None and tokenizer is None:
        raise BadOption(
            f"--max-tokens {max_tokens}: tokens are counted with a tokenizer; give its folder with --tokenizer"
        )
    counter = None if tokenizer is None else TokenCounter(tokenizer)
    source, started = open_source(paths, columns=columns), time.monotonic()
    sides = source.layout.sides
    tally = _Tally(
        source.layout, limits("--max-chars", max_chars, sides), limits("--max-tokens", max_tokens, sides), counter
    )
    for chunk in source.chunks():
        tally.add(chunk)
        progress(_phrase(tally.rows_in, chunk, source, time.monotonic() - started))
    return tally.report(source, max_bad, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Rows of a chunk that something is wrong with."""

    reason: str
    rows: Mask
    why: Callable[[int], str]


@dataclass
class _Tally:
    """The counts of a pass."""

    layout: Layout
    max_chars: tuple[int, ...] | None
    max_tokens: tuple[int, ...] | None
    counter: TokenCounter | None
    rows_in: int = 0
    conversations: int = 0
    last_place: tuple[str, int] | None = None
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    places: dict[str, list[Place]] = field(default_factory=lambda: {reason: [] for reason in REASONS})
    examples: list[dict[str, str]] = field(default_factory=list)
    duplicates: Duplicates = field(default_factory=Duplicates)
    histograms: dict[tuple[str, str], Histogram] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        """The rows of one more chunk, each dropped for the first reason that applies."""
        self.rows_in += chunk.rows_in
        if self.layout.kind == "conversations":
            self._count_conversations(chunk)
        self.dropped["broken"] += len(chunk.broken)
        self._note("broken", [Place(file=one.file, line=one.line, why=one.why) for one in chunk.broken[:_PLACES]])
        bare = [pc.utf8_trim_whitespace(column) for column in chunk.rows.columns]
        blank = [_blank(side, column) for side, column in zip(self.layout.sides, bare, strict=True)]
        good = self._sift(chunk, [*blank, *self._too_long(chunk)])
        self._show(chunk, good)
        kept = [column.filter(pa.array(good)) for column in bare]
        self.duplicates.add(row_hashes(kept), chunk.file, chunk.lines[good])

    def report(self, source: Source, max_bad: float, seconds: float) -> CheckReport:
        """All of it, once every row was seen."""
        self.dropped["duplicate"], where = self.duplicates.count(_PLACES)
        self._note("duplicate", [Place(file=file, line=line, why="came before") for file, line in where])
        return CheckReport(
            files=source.files, layout=self.layout, rows_in=self.rows_in, dropped=self.dropped,
            places={reason: tuple(places) for reason, places in self.places.items()}, examples=tuple(self.examples),
            characters=self._lengths("characters"), tokens=self._lengths("tokens"),
            conversations=self.conversations if self.layout.kind == "conversations" else None,
            max_bad=max_bad, seconds=seconds,
        )  # fmt: skip

    def _sift(self, chunk: Chunk, problems: list[_Problem]) -> Mask:
        """The rows that no problem applies to; each other row counts under its first one."""
        good = np.ones(chunk.rows.num_rows, dtype=bool)
        found: dict[str, list[Place]] = {problem.reason: [] for problem in problems}
        for problem in problems:
            hit = np.flatnonzero(good & problem.rows)
            self.dropped[problem.reason] += len(hit)
            good[hit] = False
            for row in hit[:_PLACES].tolist():
                found[problem.reason].append(Place(file=chunk.file, line=int(chunk.lines[row]), why=problem.why(row)))
        for reason, places in found.items():
            self._note(reason, sorted(places, key=lambda place: place.line))
        return good

    def _too_long(self, chunk: Chunk) -> Iterator[_Problem]:
        """Measures all sides on the way: in characters and, with a tokenizer, in tokens."""
        for place, (side, column) in enumerate(zip(self.layout.sides, chunk.rows.columns, strict=True)):
            yield from self._measured(
                "characters", side, pc.utf8_length(column).to_numpy().astype(np.int64), self.max_chars, place
            )
            if self.counter:
                yield from self._measured("tokens", side, self.counter.count(column), self.max_tokens, place)

    def _measured(
        self, unit: str, side: str, lengths: Counts, most: tuple[int, ...] | None, place: int
    ) -> Iterator[_Problem]:
        self.histograms.setdefault((unit, side), Histogram()).add(lengths)
        if most is not None:
            limit = most[place]
            yield _Problem(
                "over_long", lengths > limit, lambda row: f"the {side} has {lengths[row]:,} {unit}, more than {limit:,}"
            )

    def _note(self, reason: str, places: list[Place]) -> None:
        self.places[reason] = (self.places[reason] + places)[:_PLACES]

    def _show(self, chunk: Chunk, good: Mask) -> None:
        """The first rows that differ."""
        for row in np.flatnonzero(good)[:_LOOKED_AT].tolist() if len(self.examples) < _PLACES else []:
            found = {side: chunk.rows.column(side)[row].as_py() for side in self.layout.sides}
            if found not in self.examples and len(self.examples) < _PLACES:
                self.examples.append(found)

    def _count_conversations(self, chunk: Chunk) -> None:
        """Rows on the same line are replies in the same one, also over the border of two chunks."""
        lines = np.unique(np.concatenate([chunk.lines, [one.line for one in chunk.broken]]).astype(np.int64))
        if len(lines):
            self.conversations += len(lines) - ((chunk.file, int(lines[0])) == self.last_place)
            self.last_place = chunk.file, int(lines[-1])

    def _lengths(self, unit: str) -> dict[str, Lengths]:
        found = {side: histogram.lengths() for (kind, side), histogram in self.histograms.items() if kind == unit}
        return {side: lengths for side, lengths in found.items() if lengths is not None}


def _blank(side: str, column: pa.Array) -> _Problem:
    return _Problem("empty", pc.equal(column, "").to_numpy(zero_copy_only=False), lambda row: f"the {side} is empty")


def _phrase(rows: int, chunk: Chunk, source: Source, seconds: float) -> str:
    """`read 1,250,000 rows, 480,000 rows/s, 31 %`."""
    share = f", {100 * chunk.read_bytes / source.total_bytes:.0f} %" if source.total_bytes else ""
    return f"read {rows:,} rows, {show_rate(rows / max(seconds, 1e-9))} rows/s{share}"
