"""The outputs: parquet files whose bytes depend on the rows and their order alone.

A row group ends after 32,768 rows or 32 MiB of text, whichever comes first, wherever the tables that arrive begin and
end: whoever reads the file back needs little memory, and the same rows give the same file. Texts are compressed with zstd
and without dictionaries, which no long text profits from.
"""

import errno
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from brimful.data.clean.similarity import Bytes, Slots, Words
from brimful.data.progress import in_order
from brimful.errors import BadData, BadOption, InternalError
from brimful.machine.host import Space
from brimful.units import show_bytes

# Rows in a random order that needs no memory: each has a key, a seeded hash of its place, and rows go by their keys.
#
# A place is a file and a line. The replies of one conversation share a line, hence a key: they stay together, in their
# order, and on one side of a split.
#
#     segments: some ten thousand consecutive rows, written in the order of their keys, one Arrow batch for each bucket
#     bucket:   the rows whose keys begin with the same bits, gathered from all segments, put into order, handed on
#
# Text is written once and read once. DuckDB's ORDER BY over a million rows (600 MB of text) took 13 s within 600 MiB and
# failed within 300; this takes 5 s within 230, two of them to write the segments. The order depends on seed and places only:
# not on segments, buckets, threads or an interruption.


MAX_BITS = 10
"""1,024 buckets: at 16 MiB each, 16 GiB of text. Buckets of more text are ordered in several passes."""
MAX_OPEN = 256
"""Segments: at 32 MiB each, 8 GiB of text."""
SLOT = "slot"
"""A row's number among those that were prepared, in the order of the files."""
KEY = "key"
LINE_BITS = 40
"""Of a place's number; the bits above are the file's."""


def keys(places: Slots, seed: int) -> Words:
    """64 bits for each place, different for different ones (splitmix64 is a bijection)."""
    offset = np.uint64((seed * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) % 2**64)
    mixed: Words = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + offset
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(multiplier)
    return mixed ^ (mixed >> np.uint64(31))


def bits_for(text_bytes: float, bucket_bytes: int) -> int:
    """So many first bits of a key name its bucket."""
    return min(MAX_BITS, max(0, math.ceil(math.log2(max(1.0, text_bytes / bucket_bytes)))))


def write_segment(path: Path, sides: pa.Table, first_slot: int, places: Slots, *, seed: int, bits: int) -> None:
    """Rows with consecutive numbers, in the order of their keys, one batch a bucket."""
    slots = np.arange(first_slot, first_slot + sides.num_rows)
    key = keys(places, seed)
    order = np.argsort(key, kind="stable")
    starts = np.searchsorted(_bucket(key[order], bits), np.arange(2**bits + 1))
    rows = sides.combine_chunks().take(pa.array(order)).add_column(0, SLOT, pa.array(slots[order]))
    rows = rows.add_column(1, KEY, pa.array(key[order]))
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema, options=options) as writer:
        for start, end in pairwise(starts):
            writer.write_batch(_one_batch(rows.slice(start, end - start)))


def in_key_order(segments: Sequence[Path], dropped: Bytes, *, bits: int, parts: int = 1) -> Iterator[pa.Table]:
    """All rows that were not dropped, in the order of their keys, which come along; each bucket in so many parts."""
    with ExitStack() as stack:
        # An open segment gives a batch twice as fast as one that is opened for it; a thousand would be too many files.
        opened = {path: stack.enter_context(_reader(path)) for path in segments[:MAX_OPEN]}
        read = partial(_part, segments, opened, dropped, bits=bits, parts=parts)
        yield from in_order(lambda place: read(*divmod(place, parts)), range(2**bits * parts), threads=1, in_flight=2)


def _part(
    segments: Sequence[Path],
    opened: Mapping[Path, pa.RecordBatchFileReader],
    dropped: Bytes,
    bucket: int,
    part: int,
    *,
    bits: int,
    parts: int,
) -> pa.Table:
    """The rows of a bucket, or of a part of it, in order."""
    found = []
    for path in segments:
        with nullcontext(opened[path]) if path in opened else _reader(path) as reader:
            batch = reader.get_batch(bucket)
        slots = batch.column(SLOT).to_numpy()
        mine = dropped[slots] == 0
        if parts > 1:
            mine &= _within(batch.column(KEY).to_numpy(), bits) * parts // 2**32 == part
        found.append(batch.filter(pa.array(mine)))
    rows = pa.Table.from_batches(found).combine_chunks()
    order = np.lexsort((rows.column(SLOT).to_numpy(), rows.column(KEY).to_numpy()))
    return rows.take(pa.array(order)).drop_columns([SLOT])


@contextmanager
def _reader(path: Path) -> Iterator[pa.RecordBatchFileReader]:
    with pa.memory_map(str(path)) as file:
        yield pa.ipc.open_file(file)


def _bucket(key: Words, bits: int) -> Words:
    return key >> np.uint64(64 - bits) if bits else np.zeros_like(key)


def _within(key: Words, bits: int) -> Words:
    """Where in its bucket a key lies: the 32 bits behind those that name it."""
    return (key << np.uint64(bits)) >> np.uint64(32)


def _one_batch(rows: pa.Table) -> pa.RecordBatch:
    batches = rows.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=rows.schema)


# Room on the disk: predicted from what was read so far, and one sentence when it does not suffice.
#
# The first chunk tells how much text a byte of input becomes; from then on every segment corrects the prediction. A full
# disk shows in three ways: an OSError, DuckDB that cannot put its memory aside, and Arrow with an errno in its text.


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DUCKDB_SAYS = ("No space left", "max_temp_directory_size", "File too large", "quota exceeded")
_SEGMENT_SHARE, _OUTPUT_SHARE = 0.8, 0.7
"""Of the text, what segments and outputs take at most; 0.65 and 0.6 of the generated rows."""
_ROW_BYTES = 64
"""Digest, numbers, and what DuckDB puts aside."""


def still_needed(*, rows: int, text_bytes: int, sketch_bytes: int, read_share: float) -> float:
    """What is yet to be written, after so many rows and bytes of text were prepared. A prediction."""
    read_share = min(1.0, read_share) or 1.0
    segments = _SEGMENT_SHARE * text_bytes + rows * (_ROW_BYTES + sketch_bytes)
    return segments * (1 / read_share - 1) + _OUTPUT_SHARE * text_bytes / read_share


def check_room(folder: Path, needed_bytes: float) -> None:
    """Refuse early rather than fill the disk for an hour and fail then."""
    space = Space.around(folder)
    if space is not None and needed_bytes > space.free_bytes:
        raise BadData(_sentence(folder, needed_bytes, space.free_bytes))


@contextmanager
def full_disk_told(folder: Path, needed_bytes: Callable[[], float]) -> Iterator[None]:
    """Turn a full disk, however it shows, into one sentence. What was done so far stays."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        space = Space.around(folder)
        raise BadData(_sentence(folder, needed_bytes(), space.free_bytes if space else None)) from error


def is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return type(error).__module__.lstrip("_").startswith("duckdb") and any(said in str(error) for said in _DUCKDB_SAYS)


def _sentence(folder: Path, needed_bytes: float, free_bytes: int | None) -> str:
    return (
        f"the disk of {folder} is too full: cleaning needs about {show_bytes(needed_bytes)} more there (predicted) "
        f"and {show_bytes(free_bytes)} is free; make room and run the same again to go on, or give another --output"
    )


GROUP_ROWS = 32_768
GROUP_BYTES = 32 * 2**20


def split_rows(rows: int, *, valid: float, test: float) -> dict[str, int]:
    """How many rows each file gets, the first rows first: test, valid, train. A share gives one row at least."""
    counts = {name: _count(rows, asked) for name, asked in (("test", test), ("valid", valid))}
    rest = rows - sum(counts.values())
    if rest < 1:
        raise BadOption(
            f"--valid {valid:g} --test {test:g}: {rows:,} rows are left after cleaning, which leaves none for training; ask for fewer"
        )
    return {**{name: count for name, count in counts.items() if count}, "train": rest}


def _count(rows: int, asked: float) -> int:
    if asked >= 1 or asked == 0 or rows < 2:
        return int(asked)
    return max(1, round(rows * asked))


def write_splits(
    tables: Iterable[pa.Table], counts: Mapping[str, int], folder: Path, sides: tuple[str, ...]
) -> dict[str, int]:
    """The first rows into the first file, and so on; how many each got. They add up to all there were, or this fails.

    A file gets exactly as many as it should, and a few more where that would part rows of one key: a conversation.
    """
    rows, written = iter(tables), dict.fromkeys(counts, 0)
    schema = pa.schema([(side, pa.string()) for side in sides])
    rest, final = schema.empty_table(), list(counts)[-1]
    for split, count in counts.items():
        with GroupedWriter(folder / f"{split}.parquet", schema) as writer:
            while split == final or written[split] < count:
                rest = rest if rest.num_rows else next(rows, None)
                if rest is None:
                    rest = schema.empty_table()
                    break
                end = rest.num_rows if split == final else _whole(rest, count - written[split])
                writer.add(rest.slice(0, end).select(sides))
                written[split], rest = written[split] + end, rest.slice(end)
    _check(written, counts, folder)
    return written


def _whole(rows: pa.Table, count: int) -> int:
    """So many rows, and those that follow with the last one's key. Rows of one key come in one table."""
    if KEY not in rows.column_names or count >= rows.num_rows:
        return min(count, int(rows.num_rows))
    key = rows.column(KEY).to_numpy()
    return int(np.searchsorted(key, key[count - 1], side="right"))


def _check(written: Mapping[str, int], counts: Mapping[str, int], folder: Path) -> None:
    for split, rows in written.items():
        found = pq.read_metadata(folder / f"{split}.parquet").num_rows
        if found != rows:
            raise InternalError(f"{split}.parquet has {found:,} rows, not the {rows:,} that were written to it")
    if sum(written.values()) != sum(counts.values()):
        raise InternalError(f"{sum(written.values()):,} rows were written of {sum(counts.values()):,}")
    if empty := [split for split, rows in written.items() if not rows]:
        raise BadOption(
            f"--valid, --test: rows of one conversation stay together, which leaves none for {' and '.join(empty)}; ask for fewer"
        )


class GroupedWriter:
    """A parquet file that takes tables of any size and writes row groups of fixed ones."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(
            path, schema, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False
        )
        self._waiting: list[pa.Table] = []
        self._rows = self._bytes = 0

    def __enter__(self) -> "GroupedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._rows:
                self._write(pa.concat_tables(self._waiting))
        finally:
            self._writer.close()

    def add(self, rows: pa.Table) -> None:
        self._waiting.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        # Offsets are counted in `_bytes` and not in a group's, so this looks too often rather than too seldom.
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._cut()

    def _cut(self) -> None:
        rows = pa.concat_tables(self._waiting)
        sizes = sum(pc.binary_length(column).to_numpy().astype(np.int64) for column in rows.columns)
        ends, start = np.cumsum(sizes), 0
        while True:
            before = int(ends[start - 1]) if start else 0
            end = min(start + GROUP_ROWS, int(np.searchsorted(ends, before + GROUP_BYTES)) + 1)
            if end > rows.num_rows:
                break
            self._write(rows.slice(start, end - start))
            start = end
        rest = rows.slice(start)
        self._waiting, self._rows, self._bytes = [rest], rest.num_rows, rest.nbytes

    def _write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows.combine_chunks(), row_group_size=GROUP_ROWS)
