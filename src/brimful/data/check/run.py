"""What is in these files, and how much of it can be used: one pass, nothing written.

Every row that would not make it into a training is counted under one reason: it cannot be read (`broken`), a side is blank
(`empty`), it is longer than was allowed (`over_long`), or it came before (`duplicate`). Rows in = rows out + all of these.

Memory: a chunk, 64 Ki counters for each side, and 8 bytes a row for the duplicates.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.data.check.duplicates import Duplicates, row_hashes
from brimful.data.check.histogram import Histogram, Lengths
from brimful.data.check.limits import Counts, TokenCounter, limits
from brimful.data.check.report import REASONS, CheckReport, Place
from brimful.data.source import Chunk, Layout, Source, open_source
from brimful.errors import BadOption
from brimful.units import show_rate

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
