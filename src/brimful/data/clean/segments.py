"""Prepared rows on disk, in segments that are complete or do not count, and read back in random order.

    NNNNN.rows     the texts, sorted by key, one Arrow batch for each bucket
    NNNNN.hashes   parquet: number, file and line, digest and bands of each row, for duplicates.py
    signatures     128 bytes per row of all segments, in the order of their numbers
    NNNNN.json     the read state up to this segment; written last, and only with it the segment counts

An interrupted clean continues after the last read state and overwrites what comes after it. A row with 600 bytes of text
takes 380 + 144 + 128 bytes of disk.

**Random order without memory.** Each row has a key, a seeded hash of its file and line, and rows are sorted by key. The
replies of one conversation share a line, hence a key: they stay together, in order, on one side of a split. Rows whose keys
begin with the same bits form a bucket; a bucket is collected from all segments, sorted and handed on. Text is written once
and read once. DuckDB's ORDER BY over a million rows (600 MB of text) took 13 s within 600 MiB and failed within 300; this
takes 5 s within 230. The order depends on seed, files and lines only, not on segments, buckets, threads or interruptions.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brimful.data.check import DropCounts
from brimful.data.clean.duplicates import HASHES, ROW_ID, Bytes, RowIds, Words
from brimful.data.clean.prepare import REASONS, PreparedChunk
from brimful.data.pipeline import GOLDEN, in_order, splitmix64
from brimful.data.read.files import RowProblem
from brimful.files import sync, write_atomic

SORT_KEY = "sort_key"
MAX_BITS = 10
"""1,024 buckets: 16 GiB of text at 16 MiB each. Buckets of more text are sorted in several passes."""
MAX_OPEN = 256
"""Segments that stay open: 8 GiB of text at 32 MiB each."""
_LINE_BITS = 40
"""Bits of a place that hold its line; those above hold the file."""


@dataclass(kw_only=True)
class ReadState:
    """What was read so far: enough to continue from, and to add up at the end."""

    bits: int
    """Bits of a key that name its bucket, the same for all segments."""
    segments: int = 0
    chunks: int = 0
    rows_in: int = 0
    rows_kept: int = 0
    """Rows that were prepared and not dropped; duplicates are still among them."""
    read_bytes: int = 0
    complete: bool = False
    """Whether all chunks were read."""
    text_bytes: int = 0
    files: list[str] = field(default_factory=list)
    """The hash files refer to them by index."""
    dropped: DropCounts = field(default_factory=lambda: DropCounts.empty(REASONS))

    def add(self, prepared: PreparedChunk) -> None:
        """Count one more chunk."""
        self.chunks += 1
        self.rows_in += prepared.rows_in
        self.rows_kept += prepared.rows
        self.read_bytes = prepared.read_bytes
        self.text_bytes += prepared.text_bytes
        if prepared.file not in self.files[-1:]:
            self.files.append(prepared.file)
        for reason, count in prepared.dropped.counts.items():
            self.dropped.add(reason, count, prepared.dropped.problems[reason])

    @classmethod
    def load(cls, path: Path) -> "ReadState":
        content = json.loads(path.read_text(encoding="utf-8"))
        dropped = content.pop("dropped")
        problems = {
            reason: [RowProblem(**problem) for problem in problems] for reason, problems in dropped["problems"].items()
        }
        return cls(**content, dropped=DropCounts(dropped["counts"], problems))


class Segments:
    """The segments in a folder: those that are complete, and the one that grows in memory."""

    def __init__(self, folder: Path, *, fields: tuple[str, ...], bands: int, seed: int) -> None:
        self._folder, self._fields, self._bands, self._seed = folder, fields, bands, seed
        folder.mkdir(exist_ok=True)
        self.signatures = folder / "signatures"
        self._pending: list[PreparedChunk] = []
        self.pending_bytes = 0

    def row_files(self, state: ReadState) -> list[Path]:
        return [self._file(number, "rows") for number in range(state.segments)]

    def hash_files(self, state: ReadState) -> list[Path]:
        return [self._file(number, "hashes") for number in range(state.segments)]

    def resume(self) -> ReadState | None:
        """The state at the last complete segment. Signatures after it are cut off; its files will be overwritten."""
        number = 0
        while self._file(number, "json").exists():
            number += 1
        state = ReadState.load(self._file(number - 1, "json")) if number else None
        with self.signatures.open("ab") as file:
            file.truncate(HASHES * state.rows_kept if state and file.tell() else 0)
        return state

    def add(self, prepared: PreparedChunk) -> None:
        self._pending.append(prepared)
        self.pending_bytes += prepared.size_bytes

    def flush(self, state: ReadState) -> None:
        """Write the pending rows as one more segment, then the state."""
        pending, self._pending, self.pending_bytes = self._pending, [], 0
        if pending:
            self._write(state.segments, pending, state)
            state.segments += 1
        write_atomic(self._file(state.segments - 1, "json"), json.dumps(asdict(state)))

    def _write(self, number: int, pending: list[PreparedChunk], state: ReadState) -> None:
        first_id = state.rows_kept - sum(prepared.rows for prepared in pending)
        rows, hashes = self._file(number, "rows"), self._file(number, "hashes")
        places = [part + (state.files.index(chunk.file) << _LINE_BITS) for chunk in pending for part in chunk.lines]
        schema = pa.schema([(name, pa.string()) for name in self._fields])
        batches = [pa.RecordBatch.from_arrays(piece, schema=schema) for chunk in pending for piece in chunk.texts]
        table = pa.Table.from_batches(batches, schema)
        write_segment(rows, table, first_id, _joined(places, np.int64), seed=self._seed, bits=state.bits)
        _write_hashes(hashes, pending, first_id, state.files, self._bands)
        with self.signatures.open("ab") as file:
            for chunk in pending:
                for piece in chunk.sketches:
                    file.write(piece.signatures.data)
        for path in (rows, hashes, self.signatures):
            sync(path)

    def _file(self, number: int, kind: str) -> Path:
        return self._folder / f"{number:05}.{kind}"


def _write_hashes(path: Path, pending: list[PreparedChunk], first_id: int, files: list[str], bands: int) -> None:
    """Uncompressed, since hashes do not compress; the numbers are stored as differences."""
    counts = [chunk.rows for chunk in pending]
    digests = np.concatenate([np.zeros((0, 2), np.uint64), *(part for chunk in pending for part in chunk.digests)])
    columns: dict[str, Any] = {
        ROW_ID: np.arange(first_id, first_id + sum(counts)),
        "file": np.repeat([files.index(chunk.file) for chunk in pending], counts),
        "line": _joined([part for chunk in pending for part in chunk.lines], np.int64),
        "digest_0": digests[:, 0],
        "digest_1": digests[:, 1],
    }
    sketches = [piece for chunk in pending for piece in chunk.sketches]
    band_hashes = np.concatenate([np.zeros((bands, 0), np.uint64), *(piece.bands for piece in sketches)], axis=1)
    columns |= {f"band_{band}": band_hashes[band] for band in range(bands)}
    delta = dict.fromkeys((ROW_ID, "file", "line"), "DELTA_BINARY_PACKED")
    encoding = {name: delta.get(name, "PLAIN") for name in columns}
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "column_encoding": encoding}
    pq.write_table(pa.table(columns), path, **options)


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.zeros(0, dtype), *parts])


# ── Random order ──────────────────────────────────────────────────────────────────────────────────────────────────────


def sort_keys(places: RowIds, seed: int) -> Words:
    """64 bits for each place, different for different places (splitmix64 is a bijection)."""
    offset = np.uint64((seed * 0xD1B54A32D192ED03 + GOLDEN) % 2**64)
    return splitmix64(places.astype(np.uint64) * np.uint64(GOLDEN) + offset)


def bucket_bits(text_bytes: float, bucket_bytes: int) -> int:
    """How many first bits of a key name its bucket, for buckets of about this size."""
    return min(MAX_BITS, max(0, math.ceil(math.log2(max(1.0, text_bytes / bucket_bytes)))))


def write_segment(path: Path, texts: pa.Table, first_id: int, places: RowIds, *, seed: int, bits: int) -> None:
    """Rows with consecutive numbers, sorted by key, one batch for each bucket."""
    row_ids = np.arange(first_id, first_id + texts.num_rows)
    keys = sort_keys(places, seed)
    order = np.argsort(keys, kind="stable")
    buckets = keys[order] >> np.uint64(64 - bits) if bits else np.zeros_like(keys)
    starts = np.searchsorted(buckets, np.arange(2**bits + 1))
    rows = texts.combine_chunks().take(pa.array(order)).add_column(0, ROW_ID, pa.array(row_ids[order]))
    rows = rows.add_column(1, SORT_KEY, pa.array(keys[order]))
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema, options=options) as writer:
        for start, end in pairwise(starts):
            batches = rows.slice(start, end - start).to_batches()
            writer.write_batch(batches[0] if batches else pa.RecordBatch.from_pylist([], schema=rows.schema))


def rows_by_key(segments: Sequence[Path], dropped: Bytes, *, bits: int, parts: int = 1) -> Iterator[pa.Table]:
    """All rows that were not dropped, with their keys, sorted by key; each bucket in `parts` tables."""
    with ExitStack() as stack:
        # An open segment gives a batch twice as fast; a thousand would be too many open files.
        readers = {path: stack.enter_context(_reader(path)) for path in segments[:MAX_OPEN]}
        read = partial(_read_part, segments, readers, dropped, bits=bits, parts=parts)
        yield from in_order(lambda place: read(*divmod(place, parts)), range(2**bits * parts), threads=1, in_flight=2)


def _read_part(
    segments: Sequence[Path],
    readers: Mapping[Path, pa.RecordBatchFileReader],
    dropped: Bytes,
    bucket: int,
    part: int,
    *,
    bits: int,
    parts: int,
) -> pa.Table:
    """The sorted rows of one part of a bucket."""
    batches = []
    for path in segments:
        with nullcontext(readers[path]) if path in readers else _reader(path) as reader:
            batch = reader.get_batch(bucket)
        wanted = dropped[batch.column(ROW_ID).to_numpy()] == 0
        if parts > 1:  # by the 32 bits behind those that name the bucket
            within = (batch.column(SORT_KEY).to_numpy() << np.uint64(bits)) >> np.uint64(32)
            wanted &= within * parts // 2**32 == part
        batches.append(batch.filter(pa.array(wanted)))
    rows = pa.Table.from_batches(batches).combine_chunks()
    order = np.lexsort((rows.column(ROW_ID).to_numpy(), rows.column(SORT_KEY).to_numpy()))
    return rows.take(pa.array(order)).drop_columns([ROW_ID])


@contextmanager
def _reader(path: Path) -> Iterator[pa.RecordBatchFileReader]:
    with pa.memory_map(str(path)) as file:
        yield pa.ipc.open_file(file)
