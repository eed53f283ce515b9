"""`brimful data check`: what is in these files and how many rows are usable. One pass, nothing written.

Every row that training could not use is counted under one reason: it cannot be read (`broken`), a field is blank
(`empty`), the two replies of a preference are equal (`equal`), it is longer than allowed (`over_long`), or it came before
(`duplicate`). Rows in = rows out + all of these.

Memory: one chunk, 64 Ki counters per field, and 8 bytes per different row to find duplicates (80 MB for ten million rows).
`host_limit` bounds them, and how long a row may be.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.data.read.columns import Layout
from brimful.data.read.files import Lines, RowProblem
from brimful.data.read.preferences import PAIR, pair_texts
from brimful.data.read.source import Chunk, Source, check_max_bad, holds_preferences, open_source
from brimful.errors import BadData, BadOption
from brimful.units import GiB, flag_bytes, parse_bytes, show_rate

UNUSABLE = ("broken", "empty", "equal", "over_long")
"""Why a row is dropped, besides that it is a duplicate. The first that applies counts; `equal` is for preferences alone."""

EXAMPLES = 3
"""Rows shown as examples, and problems remembered per reason."""

Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Rows with a length of at least `start` and less than `end`; the last bin has no end."""

    start: int
    end: int | None
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long the texts of one field are."""

    rows: int
    mean: float
    p50: int
    p90: int
    p99: int
    max: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of `check`."""

    files: tuple[str, ...]
    skipped: tuple[str, ...]
    """What the folders contain besides these files, each with the reason."""
    layout: Layout
    rows_in: int
    dropped: dict[str, int]
    """Rows by reason, all that apply to this layout."""
    problems: dict[str, tuple[RowProblem, ...]]
    """By reason, the first few rows."""
    examples: tuple[dict[str, str], ...]
    characters: dict[str, Lengths]
    """By field, over all rows that could be read."""
    tokens: dict[str, Lengths]
    """The same in tokens, with the eos that is appended; empty without a tokenizer."""
    conversations: int | None
    """How many conversations the rows come from; None for other layouts."""
    max_bad: float
    seconds: float

    @property
    def rows_out(self) -> int:
        """Rows that can be used."""
        return self.rows_in - sum(self.dropped.values())

    @property
    def bad_share(self) -> float:
        """The share of rows that cannot be used. Duplicates could be."""
        return sum(self.dropped.get(reason, 0) for reason in UNUSABLE) / max(1, self.rows_in)

    def failure(self) -> str | None:
        """The error message if more rows are unusable than `max_bad` allows."""
        if self.bad_share <= self.max_bad:
            return None
        reasons = [reason for reason in UNUSABLE if self.dropped.get(reason)]
        counts = ", ".join(f"{self.dropped[reason]:,} {reason.replace('_', '-')}" for reason in reasons)
        first = self.problems[reasons[0]][0]
        return (
            f"{round(self.bad_share * self.rows_in):,} of {self.rows_in:,} rows cannot be used ({counts}), "
            f"more than max_bad={self.max_bad:g} allows. Try: {first.repair('repair them')}, starting with {first}."
        )

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        layout = content.pop("layout")
        derived = {"rows_out": self.rows_out, "bad_share": self.bad_share, "seconds": round(self.seconds, 3)}
        return content | derived | {name: layout[name] for name in ("columns", "kind", "reason")}


def check(
    paths: Sequence[str],
    *,
    columns: str | None = None,
    tokenizer: str | None = None,
    max_chars: str | int | None = None,
    max_tokens: str | int | None = None,
    host_limit: int | str = GiB,
    max_bad: float = 0.01,
    progress: Callable[[str], object] = lambda phrase: None,
) -> CheckReport:
    """Read everything once and count. A limit is one number, or one for each field: `256` or `256,320`."""
    check_max_bad(max_bad)
    if max_tokens is not None and tokenizer is None:
        raise BadOption(f"max_tokens={max_tokens!r} needs a tokenizer to count with. Try: tokenizer=.")
    host_limit_bytes = parse_bytes(host_limit, flag="host_limit=")
    token_counter = None if tokenizer is None else TokenCounter(tokenizer)
    started = time.monotonic()
    source, layout, chunks = _open_texts(paths, columns, host_limit_bytes)
    limits = {
        "characters": parse_limits("max_chars", max_chars, layout.fields),
        "tokens": parse_limits("max_tokens", max_tokens, layout.fields),
    }
    row_pass = _Pass(layout, limits, token_counter, Duplicates(host_limit_bytes=host_limit_bytes))
    for chunk in chunks:
        row_pass.add(chunk)
        rate = row_pass.rows_in / max(time.monotonic() - started, 1e-9)
        progress(read_progress(row_pass.rows_in, rate, chunk.read_bytes, source.total_bytes))
    return row_pass.report(source, max_bad, time.monotonic() - started)


def _open_texts(
    paths: Sequence[str], columns: str | None, host_limit_bytes: int
) -> tuple[Source, Layout, Iterator[Chunk]]:
    """Files whose rows are texts: preferences are read as `brimful train dpo` reads them."""
    if not holds_preferences(paths, columns=columns, host_limit_bytes=host_limit_bytes):
        source = open_source(paths, columns=columns, host_limit_bytes=host_limit_bytes)
        return source, source.layout, source.chunks()
    source = open_source(paths, columns=columns, host_limit_bytes=host_limit_bytes, preferences=True)
    file_columns = source.layout.columns
    names = {field: file_columns.get(field, file_columns["chosen"]) for field in PAIR}
    return source, replace(source.layout, fields=PAIR, columns=names), map(pair_texts, source.chunks())


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """Rows to evaluate on whose prompt is also in the training rows, which makes them too easy."""

    files: tuple[str, ...]
    rows: int
    """To evaluate on."""
    shared: int
    first: RowProblem | None


def shared_prompts(
    paths: Sequence[str], valid: Sequence[str], *, columns: str | None = None, host_limit: int | str = GiB
) -> SharedPrompts:
    """Compare the prompts of two sets of files, or their texts where there are no prompts. 8 bytes a training row."""
    host_limit_bytes = parse_bytes(host_limit, flag="host_limit=")

    def prompts(chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Hashes]]:
        for chunk in chunks:
            yield chunk, row_hashes([pc.utf8_trim_whitespace(chunk.rows.column(0))])

    training = _open_texts(paths, columns, host_limit_bytes)[2]
    known = np.unique(np.concatenate([np.zeros(0, np.uint64), *(hashes for _, hashes in prompts(training))]))
    source, _, chunks = _open_texts(valid, columns, host_limit_bytes)
    rows = shared = 0
    first: RowProblem | None = None
    for chunk, hashes in prompts(chunks):
        rows += chunk.rows_in
        shared_rows = np.flatnonzero(np.isin(hashes, known))
        shared += len(shared_rows)
        if len(shared_rows) and first is None:
            first = RowProblem(chunk.file, int(chunk.lines[shared_rows[0]]), "its prompt is also in the training rows")
    return SharedPrompts(files=source.files, rows=rows, shared=shared, first=first)


def read_progress(rows: int, rows_per_s: float, read_bytes: int, total_bytes: int) -> str:
    """`read 1,250,000 rows, 480,000 rows/s, 31 %`."""
    share = f", {100 * read_bytes / total_bytes:.0f} %" if total_bytes else ""
    return f"read {rows:,} rows, {show_rate(rows_per_s)} rows/s{share}"


Problem = tuple[str, Mask, str | Callable[[int], str]]
"""A reason, the rows it applies to, and the message for a row."""


@dataclass
class DropCounts:
    """Dropped rows by reason, and the first few of each."""

    counts: dict[str, int]
    problems: dict[str, list[RowProblem]]

    @classmethod
    def empty(cls, reasons: Sequence[str]) -> "DropCounts":
        return cls(dict.fromkeys(reasons, 0), {reason: [] for reason in reasons})

    def add(self, reason: str, count: int, first: Iterable[RowProblem]) -> None:
        self.counts[reason] += count
        self.problems[reason] = [*self.problems[reason], *first][:EXAMPLES]

    def drop(self, file: str, lines: Lines, usable: Mask, problems: Iterable[Problem]) -> None:
        """Mark rows with a problem as not usable, and count each under the first one that applies."""
        first: dict[str, dict[int, RowProblem]] = {}
        for reason, mask, message in problems:
            rows = np.flatnonzero(usable & mask)
            usable[rows] = False
            self.counts[reason] += len(rows)
            for row in rows[:EXAMPLES].tolist():
                text = message if isinstance(message, str) else message(row)
                first.setdefault(reason, {})[row] = RowProblem(file, int(lines[row]), text)
        for reason, by_row in first.items():
            self.add(reason, 0, (by_row[row] for row in sorted(by_row)))


def _field_name(field: str) -> str:
    return {"chosen": "chosen reply", "rejected": "rejected reply"}.get(field, field)


class _Pass:
    """The counts of one pass over the rows."""

    def __init__(
        self,
        layout: Layout,
        limits: dict[str, tuple[int, ...] | None],
        token_counter: "TokenCounter | None",
        duplicates: "Duplicates",
    ) -> None:
        self._layout, self._limits, self._token_counter = layout, limits, token_counter
        self.rows_in = 0
        reasons = [reason for reason in UNUSABLE if reason != "equal" or layout.fields == PAIR]
        self._dropped = DropCounts.empty([*reasons, "duplicate"])
        self._examples: list[dict[str, str]] = []
        self._duplicates = duplicates
        self._histograms: dict[tuple[str, str], Histogram] = {}
        self._conversations = 0
        self._last_line: tuple[str, int] | None = None

    def add(self, chunk: Chunk) -> None:
        """Count the rows of a chunk, each under the first reason that applies."""
        self.rows_in += chunk.rows_in
        self._count_conversations(chunk)
        self._dropped.add("broken", len(chunk.broken), chunk.broken[:EXAMPLES])
        trimmed = [pc.utf8_trim_whitespace(column) for column in chunk.rows.columns]
        usable = np.ones(chunk.rows.num_rows, dtype=bool)
        self._dropped.drop(chunk.file, chunk.lines, usable, self._unusable(chunk, trimmed))
        self._add_examples(chunk, usable)
        texts = [column.filter(pa.array(usable)) for column in trimmed]
        self._duplicates.add(row_hashes(texts), chunk.file, chunk.lines[usable])

    def report(self, source: Source, max_bad: float, seconds: float) -> CheckReport:
        count, places = self._duplicates.count()
        self._dropped.add("duplicate", count, [RowProblem(file, line, "came before") for file, line in places])
        return CheckReport(
            files=source.files, skipped=source.skipped, layout=self._layout, rows_in=self.rows_in,
            dropped=self._dropped.counts,
            problems={reason: tuple(problems) for reason, problems in self._dropped.problems.items()},
            examples=tuple(self._examples), characters=self._lengths("characters"), tokens=self._lengths("tokens"),
            conversations=self._conversations if self._layout.kind == "conversations" else None,
            max_bad=max_bad, seconds=seconds,
        )  # fmt: skip

    def _unusable(self, chunk: Chunk, trimmed: list[pa.Array]) -> Iterator[Problem]:
        """Measures every field on the way: in characters and, with a tokenizer, in tokens."""
        for field, column in zip(self._layout.fields, trimmed, strict=True):
            yield "empty", pc.equal(column, "").to_numpy(zero_copy_only=False), f"the {_field_name(field)} is empty"
        if self._layout.fields == PAIR:
            yield "equal", pc.equal(*trimmed[1:]).to_numpy(zero_copy_only=False), "chosen is equal to rejected"
        for place, (field, column) in enumerate(zip(self._layout.fields, chunk.rows.columns, strict=True)):
            yield from self._over_long("characters", place, field, pc.utf8_length(column).to_numpy().astype(np.int64))
            if self._token_counter:
                yield from self._over_long("tokens", place, field, self._token_counter.count(column))

    def _over_long(self, unit: str, place: int, field: str, lengths: Counts) -> Iterator[Problem]:
        self._histograms.setdefault((unit, field), Histogram()).add(lengths)
        limits = self._limits[unit]
        if limits is not None:
            most = limits[place]
            yield (
                "over_long",
                lengths > most,
                lambda row: f"the {_field_name(field)} has {lengths[row]:,} {unit}, more than {most:,}",
            )

    def _add_examples(self, chunk: Chunk, usable: Mask) -> None:
        """The first rows that differ, out of the first hundred of a chunk."""
        for row in np.flatnonzero(usable)[:100].tolist() if len(self._examples) < EXAMPLES else []:
            example = {field: chunk.rows.column(field)[row].as_py() for field in self._layout.fields}
            if example not in self._examples and len(self._examples) < EXAMPLES:
                self._examples.append(example)

    def _count_conversations(self, chunk: Chunk) -> None:
        """Rows on one line are replies in one conversation, also across two chunks."""
        lines = np.unique(np.concatenate([chunk.lines, [problem.line for problem in chunk.broken]]).astype(np.int64))
        if len(lines):
            self._conversations += len(lines) - ((chunk.file, int(lines[0])) == self._last_line)
            self._last_line = chunk.file, int(lines[-1])

    def _lengths(self, unit: str) -> dict[str, Lengths]:
        lengths = {field: histogram.lengths() for (kind, field), histogram in self._histograms.items() if kind == unit}
        return {field: stats for field, stats in lengths.items() if stats is not None}


# ── Limits and tokens, shared with clean ──────────────────────────────────────────────────────────────────────────────


def parse_limits(name: str, value: str | int | None, fields: Sequence[str] | None = None) -> tuple[int, ...] | None:
    """`256` or `256,320` as one limit for each field; without `fields` the numbers as they are."""
    if value is None:
        return None
    try:
        numbers = [int(part) for part in str(value).split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise BadOption(
            f"{name}={value!r} must be a positive whole number, or one for each field. Try: {name}='256,320'."
        )
    if fields is None:
        return tuple(numbers)
    if len(numbers) not in (1, len(fields)):
        raise BadOption(
            f"{name}={value!r} has {len(numbers)} numbers for {', '.join(fields)}. Try: one number, or one for each field."
        )
    return tuple(numbers * len(fields) if len(numbers) == 1 else numbers)


class TokenCounter:
    """A tokenizer that only counts."""

    _CHARACTERS = 2**18
    """At a time: encodings carry the text of every token as well, 130 bytes per token. A longer text is counted in parts,
    whose borders may divide a token."""

    def __init__(self, folder: str) -> None:
        from brimful.data.tokenizer.folder import load_tokenizer

        self._tokenizer = load_tokenizer(folder)

    def count(self, texts: pa.Array) -> Counts:
        """Tokens of each text, including the eos after it."""
        counts, rows, parts, characters = np.ones(len(texts), dtype=np.int64), [], [], 0
        for row, text in enumerate(texts.to_pylist()):
            for start in range(0, len(text), self._CHARACTERS):
                rows.append(row)
                parts.append(text[start : start + self._CHARACTERS])
                characters += len(parts[-1])
                if characters >= self._CHARACTERS:
                    self._add(counts, rows, parts)
                    rows, parts, characters = [], [], 0
        self._add(counts, rows, parts)
        return counts

    def _add(self, counts: Counts, rows: list[int], parts: list[str]) -> None:
        encodings = self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        np.add.at(counts, rows, [len(encoding) for encoding in encodings])


# ── Lengths ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Histogram:
    """Counts lengths in constant memory.

    Exact up to 65,535 characters or tokens. Longer ones are counted by the thousand: their percentiles are rounded up to
    the next 1,024, but never above the longest, which is exact.
    """

    _EXACT = 65_536
    _ROUND = 1_024

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._sum = self._max = 0

    def add(self, lengths: Counts) -> None:
        if not len(lengths):
            return
        rounded = np.where(lengths < self._EXACT, lengths, -(-lengths // self._ROUND) * self._ROUND)
        sizes, counts = np.unique(rounded, return_counts=True)
        self._counts.update(dict(zip(sizes.tolist(), counts.tolist(), strict=True)))
        self._sum += int(lengths.sum())
        self._max = max(self._max, int(lengths.max()))

    def lengths(self) -> Lengths | None:
        """The result; None without rows."""
        if not self._counts:
            return None
        table = np.array(sorted(self._counts.items()), dtype=np.int64)
        sizes, counts = table[:, 0].clip(max=self._max), table[:, 1]
        rows, up_to = int(counts.sum()), np.cumsum(counts)
        p50, p90, p99 = (int(sizes[np.searchsorted(up_to, -(-rows * share // 100))]) for share in (50, 90, 99))
        bins = _bins(sizes, counts, p99, self._max)
        return Lengths(rows=rows, mean=self._sum / rows, p50=p50, p90=p90, p99=p99, max=self._max, bins=bins)


def _bins(sizes: Counts, counts: Counts, p99: int, longest: int) -> tuple[Bin, ...]:
    """Ten bins of a round width from the shortest to the 99th percentile, and one for all that is longer."""
    shortest = int(sizes[0])
    width = _round_width((p99 - shortest) / 10)
    last = (p99 // width + 1) * width
    edges = np.arange(shortest // width * width, last + 1, width)
    rows = np.histogram(sizes, bins=edges, weights=counts)[0].astype(np.int64).tolist()
    rows[-1] -= int(counts[sizes == last].sum())  # numpy includes the last edge
    bins = [
        Bin(start=start, end=end, rows=count)
        for (start, end), count in zip(pairwise(edges.tolist()), rows, strict=True)
    ]
    longer = int(counts[sizes >= last].sum())
    return (*bins, Bin(start=last, end=None, rows=longer)) if longest >= last else tuple(bins)


def _round_width(at_least: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 …"""
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power >= at_least:
                return step * power
        power *= 10


# ── Duplicates ────────────────────────────────────────────────────────────────────────────────────────────────────────


def row_hashes(columns: Sequence[pa.Array]) -> Hashes:
    """A 64-bit hash for each row. Among ten million rows two different ones collide with a chance of 3 in a million."""
    total = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        hashes = np.fromiter(map(hash, column.cast(pa.binary()).to_pylist()), dtype=np.int64, count=len(column))
        total = (total ^ hashes.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        total ^= total >> np.uint64(29)
    return total


@dataclass(frozen=True, slots=True)
class _HashedRows:
    """The rows of a chunk: their hashes and where they are."""

    hashes: Hashes
    file: str
    lines: Lines


class Duplicates:
    """Keeps the hashes of different rows, 8 bytes each, and counts the rows that came before."""

    BUCKETS = 16
    """One sixteenth of the hashes is merged at a time, so that merging needs no second copy of them."""
    BATCH_ROWS = 2**20
    """Rows compared at a time: 40 MB, however many of them are equal."""

    def __init__(self, *, host_limit_bytes: int = GiB) -> None:
        self._host_limit_bytes = host_limit_bytes
        self._known = [np.zeros(0, dtype=np.uint64) for _ in range(self.BUCKETS)]
        """Sorted, by their first four bits."""
        self._new: list[_HashedRows] = []
        self._count = 0
        self._places: list[tuple[str, int]] = []

    def add(self, hashes: Hashes, file: str, lines: Lines) -> None:
        """The usable rows of a chunk."""
        self._new.append(_HashedRows(hashes, file, lines))
        if sum(len(chunk.hashes) for chunk in self._new) >= self.BATCH_ROWS:
            self._merge()
        if self.size_bytes > self._host_limit_bytes // 2 and len(lines):
            raise BadData(
                f"{file}, line {lines[-1]}: the {self.size_bytes // 8:,} different rows up to here are more than "
                f"host_limit='{flag_bytes(self._host_limit_bytes)}' can compare. "
                f"Try: host_limit='{flag_bytes(2 * self._host_limit_bytes)}'."
            )

    @property
    def size_bytes(self) -> int:
        """Memory of the hashes that are kept."""
        return sum(known.nbytes for known in self._known)

    def count(self) -> tuple[int, list[tuple[str, int]]]:
        """How many rows came before, and file and line of the first of them."""
        self._merge()
        return self._count, self._places

    def _merge(self) -> None:
        hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *(chunk.hashes for chunk in self._new)])
        order = np.argsort(hashes, kind="stable")  # of equal rows, the earlier one is first
        hashes = hashes[order]
        repeated = np.concatenate([[False], hashes[1:] == hashes[:-1]])[: len(hashes)]
        edges = np.searchsorted(hashes >> np.uint64(60), np.arange(self.BUCKETS + 1))
        for bucket, (start, end) in enumerate(pairwise(edges.tolist())):
            part, known = hashes[start:end], self._known[bucket]
            if len(known):
                nearest = np.searchsorted(known, part).clip(max=len(known) - 1)
                repeated[start:end] |= known[nearest] == part
            self._known[bucket] = np.sort(np.concatenate([known, part[~repeated[start:end]]]), kind="stable")
        self._count += int(np.count_nonzero(repeated))
        missing = EXAMPLES - len(self._places)
        self._places += [self._place(int(row)) for row in np.sort(order[repeated])[:missing]]
        self._new = []

    def _place(self, row: int) -> tuple[str, int]:
        for chunk in self._new:
            if row < len(chunk.hashes):
                return chunk.file, int(chunk.lines[row])
            row -= len(chunk.hashes)
        raise IndexError(row)
