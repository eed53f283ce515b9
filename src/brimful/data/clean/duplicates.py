"""Which rows came before, exactly or nearly.

**Exact**: rows with the same digest; the first stays. **Near**: each row has a sketch of 128 numbers. Rows that agree in a
whole band of them are in one bucket, and each is compared, by its sketch, with the first row of its bucket; a similarity of
`near` or more drops it. Only the first row of a bucket is compared against, so a bucket of a million rows costs a million
comparisons. That first row may itself have been dropped for an earlier one. Replies of one conversation (one line) are not
compared, since each contains the ones before it. Threads, chunks and interruptions do not change what is dropped.

DuckDB groups one band after the other: 1.0 s per band for 10 million rows within 300 MiB, where NumPy takes 6.5 s and the
whole column in memory. The sketches are in a memory-mapped file.

**Sketches** share about as many numbers as their texts share character 4-grams (Jaccard). One-permutation hashing (Li, Owen,
Zhang 2012) with optimal densification (Shrivastava 2017): each 4-gram is hashed once, its low bits choose one of 128 bins,
and the bin keeps the smallest of the other bits. An empty bin copies a filled one, in an order that is fixed for the bin. It
costs 5 µs per row of 206 characters, all in NumPy. `rensa` 0.5 takes 3 µs but returns lists of Python integers, which costs
20 µs more and holds the interpreter's lock; all of clean takes 40.

Why four characters: of copies of real rows with 2 % of their characters changed, 79 / 61 / 41 % are still 0.85 similar in
3- / 4- / 5-grams, and the most similar different rows 0.73 in each; long English texts share half of their 3-grams by
chance. Three marks follow each text, so that a text of one character has a gram as well.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from brimful.errors import MissingExtra
from brimful.files import write_atomic

EXACT, NEAR = 1, 2
"""Why a row was dropped; 0: it stays."""

GRAM: Final = 4
HASHES: Final = 128
RECALL: Final = 0.98
"""The least share of pairs exactly at the threshold that must agree in a band."""

ROW_ID = "row_id"
"""A row's number among the prepared rows, in file order."""

Bytes = npt.NDArray[np.uint8]
RowIds = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_PAIRS = 65_536
"""Pairs compared at a time: 16 MiB of sketches."""
_EXAMPLES = 3
"""Pairs that are remembered for the report."""


@dataclass(kw_only=True)
class DroppedRows:
    """The duplicates so far, and the steps that found them. Saved after each step."""

    reasons: Bytes
    """For each row 0, `EXACT` or `NEAR`."""
    steps: int = 0
    """0: nothing yet; 1: exact duplicates; 1 + n: and those of n bands."""
    examples: dict[int, list[tuple[int, int, float]]] = field(default_factory=lambda: {EXACT: [], NEAR: []})
    """By reason, the first few: row, the earlier row, their similarity."""

    def add(self, reason: int, rows: RowIds, earlier: RowIds, similarity: npt.NDArray[np.float64]) -> None:
        self.reasons[rows] = reason
        order = np.argsort(rows)[:_EXAMPLES]
        new = [(int(rows[place]), int(earlier[place]), float(similarity[place])) for place in order]
        self.examples[reason] = sorted([*self.examples[reason], *new])[:_EXAMPLES]

    def save(self, folder: Path) -> None:
        """The bytes first, then the JSON file that makes them count."""
        name = f"dropped-{self.steps:03}"
        (folder / name).write_bytes(self.reasons.data)
        content = {"file": name, "steps": self.steps, "examples": self.examples}
        write_atomic(folder / "dropped.json", json.dumps(content))
        for older in folder.glob("dropped-*"):
            if older.name != name:
                older.unlink()

    @classmethod
    def load(cls, folder: Path, rows: int) -> "DroppedRows":
        """What an interrupted run has saved, or nothing."""
        if not (folder / "dropped.json").exists():
            return cls(reasons=np.zeros(rows, dtype=np.uint8))
        content = json.loads((folder / "dropped.json").read_text())
        reasons = np.fromfile(folder / content["file"], dtype=np.uint8)
        examples = {int(reason): [tuple(pair) for pair in pairs] for reason, pairs in content["examples"].items()}
        return cls(reasons=reasons, steps=content["steps"], examples=examples)


class DuplicateSearch:
    """Over the hash files (parquet: row_id, file, line, digest_0, digest_1, band_0 …) and signatures of a clean."""

    def __init__(
        self, folder: Path, hash_files: Sequence[Path], signatures: Path, *, rows: int, memory_bytes: int, threads: int
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._rows, self._signatures = folder, rows, signatures
        self._table = f"read_parquet([{', '.join(_quoted(path) for path in hash_files)}])"
        self._connection = connect(folder / "spill", memory_bytes=memory_bytes, threads=threads)

    def run(self, *, near: float | None, bands: int, progress: Callable[[str], object]) -> DroppedRows:
        """All steps that are not done yet."""
        dropped = DroppedRows.load(self._folder, self._rows)
        for step in range(dropped.steps, 1 + bands):
            if step == 0:
                progress("finding duplicates")
                self._find_exact(dropped)
            else:
                progress(f"finding near duplicates, band {step} of {bands}")
                assert near is not None
                self._find_near(dropped, f"band_{step - 1}", near)
            dropped.steps = step + 1
            dropped.save(self._folder)
        return dropped

    def places(self, rows: Sequence[int]) -> dict[int, tuple[int, int]]:
        """The index of the file and the line of a few rows."""
        numbers = ", ".join(map(str, rows)) or "NULL"
        query = f"SELECT {ROW_ID}, file, line FROM {self._table} WHERE {ROW_ID} IN ({numbers})"
        return {row: (file, line) for row, file, line in self._connection.execute(query).fetchall()}

    def close(self) -> None:
        self._connection.close()

    def _find_exact(self, dropped: DroppedRows) -> None:
        for rows, earlier in self._pairs("digest_0, digest_1"):
            dropped.add(EXACT, rows, earlier, np.ones(len(rows)))

    def _find_near(self, dropped: DroppedRows, band: str, near: float) -> None:
        signatures: Bytes = np.memmap(self._signatures, dtype=np.uint8, mode="r").reshape(-1, HASHES)
        for rows, earlier in self._pairs(band, "NOT (file = first_file AND line = first_line)"):
            kept = dropped.reasons[rows] == 0
            rows, earlier = rows[kept], earlier[kept]
            similarity = similarities(signatures[rows], signatures[earlier])
            hit = similarity >= near
            dropped.add(NEAR, rows[hit], earlier[hit], similarity[hit])

    def _pairs(self, columns: str, condition: str = "true") -> Iterator[tuple[RowIds, RowIds]]:
        """Each row that is not the first with its values in these columns, and that first row."""
        pairs = self._folder / "pairs.parquet"
        run_query(
            self._connection,
            f"COPY (WITH firsts AS (SELECT {columns}, min({ROW_ID}) AS first_id, arg_min(file, {ROW_ID}) AS first_file, "
            f"arg_min(line, {ROW_ID}) AS first_line FROM {self._table} GROUP BY {columns} HAVING count(*) > 1) "
            f"SELECT {ROW_ID}, first_id FROM {self._table} JOIN firsts USING ({columns}) "
            f"WHERE {ROW_ID} <> first_id AND {condition}) "
            f"TO {_quoted(pairs)} (FORMAT parquet, ROW_GROUP_SIZE {_PAIRS})",
        )
        with pq.ParquetFile(pairs) as file:
            for batch in file.iter_batches(_PAIRS, use_threads=False):
                yield batch.column(0).to_numpy(), batch.column(1).to_numpy()
        pairs.unlink()


def need_duckdb() -> Any:
    """The module, or an error with the command that installs it."""
    try:
        import duckdb
    except ImportError:
        raise MissingExtra("duckdb", "data") from None
    return duckdb


def connect(spill: Path, *, memory_bytes: int, threads: int) -> Any:
    """DuckDB in memory within a limit, with a folder for what exceeds it."""
    settings = {
        "memory_limit": f"{memory_bytes // 1024}KiB",
        "threads": threads,
        "temp_directory": str(spill),
        "preserve_insertion_order": False,
    }
    return need_duckdb().connect(config=settings)


def run_query(connection: Any, query: str) -> None:
    """DuckDB catches Ctrl-C itself and raises an error of its own, which becomes KeyboardInterrupt again."""
    try:
        connection.execute(query)
    except Exception as error:
        if "interrupted" in str(error).lower():
            raise KeyboardInterrupt from None
        raise


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


# ── Sketches ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_MARK = "\x1f"
"""Between the fields of a row and after it. A control character, which no normalized text contains."""
_EMPTY = np.uint32(0xFFFFFFFF)
_MULTIPLY, _SPREAD, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(32)
_CONSTANTS = np.random.Generator(np.random.PCG64(20120924))
_LENDERS = np.stack([_CONSTANTS.permutation(HASHES) for _ in range(HASHES)], axis=1)
"""By attempt and bin, the bin to copy from. Each bin tries all others once, so even a single gram fills a sketch."""
_WEIGHTS = _CONSTANTS.integers(0, 2**63, HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

_BLOCK = 2**18
"""Code points at a time: the arrays stay in the cache, and a text of any length needs no more of them."""


@dataclass(frozen=True, slots=True)
class Sketches:
    """The sketches of some rows, in their order."""

    signatures: Bytes
    """Rows × 128, the low byte of each number: one in 256 agrees by chance (b-bit minwise hashing)."""
    bands: Words
    """Bands × rows: two rows that agree in a whole band are compared."""


def join_fields(fields: Sequence[pa.StringArray]) -> pa.StringArray:
    """All fields of a row as one text that differs whenever a field does."""
    return pc.binary_join_element_wise(*fields, _MARK * (GRAM - 2), _MARK)


def band_size(near: float) -> int:
    """Numbers per band: as many as still find 98 % of pairs exactly at the threshold.

    More numbers mean fewer bands and fewer useless comparisons: 8 (16 bands) at 0.85, 7 at 0.8, 16 from 0.95 on.
    """
    return next((size for size in range(16, 2, -1) if 1 - (1 - near**size) ** (HASHES // size) >= RECALL), 2)


def sketch(joined: pa.StringArray, *, size: int) -> Sketches:
    """Sketches of rows from `join_fields`, with bands of `size` numbers."""
    codes, ends = _code_points(joined), np.cumsum(pc.utf8_length(joined).to_numpy(), dtype=np.int64)
    least = np.full((len(joined), HASHES), _EMPTY)
    for start in range(0, len(codes), _BLOCK):
        hashes, rows = _gram_hashes(codes, ends, start, min(len(codes), start + _BLOCK))
        bins = rows * HASHES + (hashes & np.uint64(HASHES - 1)).astype(np.int64)
        np.minimum.at(least.reshape(-1), bins, (hashes >> _SHIFT).astype(np.uint32))
    _fill_empty_bins(least)
    return Sketches(least.astype(np.uint8), _bands(least, size))


def similarities(signatures: Bytes, others: Bytes) -> npt.NDArray[np.float64]:
    """The estimated Jaccard similarity of pairs of rows, without what agrees by chance."""
    agree: npt.NDArray[np.float64] = (signatures == others).mean(axis=1)
    return np.maximum(0.0, (agree - 1 / 256) / (1 - 1 / 256))


def _gram_hashes(codes: npt.NDArray[np.uint32], ends: RowIds, start: int, stop: int) -> tuple[Words, RowIds]:
    """The hashes of the grams that begin between `start` and `stop`, and the row of each."""
    first, last = np.searchsorted(ends, [start, stop - 1], side="right")
    borders = np.minimum(ends[first : last + 1], stop) - start
    rows = np.repeat(np.arange(first, last + 1), np.diff(borders, prepend=0))
    # Grams that begin in the marks behind a row would reach into the next row.
    marks = (ends[first : last + 1, None] - np.arange(1, GRAM)).reshape(-1) - start
    inside = np.ones(stop - start, dtype=bool)
    inside[marks[(marks >= 0) & (marks < stop - start)]] = False
    return _hash_grams(codes[start : stop + GRAM - 1], stop - start)[inside], rows[inside]


def _hash_grams(codes: npt.NDArray[np.uint32], count: int) -> Words:
    """A hash for each run of `GRAM` code points, padded at the very end."""
    padded = np.zeros(count + GRAM - 1, dtype=np.uint64)
    padded[: len(codes)] = codes
    hashes = padded[:count].copy()
    for place in range(1, GRAM):
        hashes *= _MULTIPLY
        hashes += padded[place : place + count]
    hashes ^= hashes >> _SHIFT
    hashes *= _SPREAD
    hashes ^= hashes >> _SHIFT
    return hashes


def _code_points(joined: pa.StringArray) -> npt.NDArray[np.uint32]:
    _, offsets, values = joined.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[joined.offset : joined.offset + len(joined) + 1]
    text = str(memoryview(values)[ends[0] : ends[-1]], "utf-8")
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def _fill_empty_bins(least: npt.NDArray[np.uint32]) -> None:
    """In place, from bins that were filled at first."""
    rows, bins = np.nonzero(least == _EMPTY)
    original = least.copy()
    for lenders in _LENDERS:
        if not len(rows):
            return
        copied = original[rows, lenders[bins]]
        least[rows, bins] = copied
        missing = copied == _EMPTY
        rows, bins = rows[missing], bins[missing]


def _bands(least: npt.NDArray[np.uint32], size: int) -> Words:
    bands = HASHES // size
    weighted = (least[:, : bands * size] + np.uint64(1)) * _WEIGHTS[: bands * size]
    sums: Words = weighted.reshape(len(least), bands, size).sum(axis=2, dtype=np.uint64)
    sums ^= sums >> _SHIFT
    sums *= _SPREAD
    return np.ascontiguousarray(sums.T)
