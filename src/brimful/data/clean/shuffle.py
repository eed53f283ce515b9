"""Rows in a random order that needs no memory: each has a key, a seeded hash of its place, and rows go by their keys.

A place is a file and a line. The replies of one conversation share a line, hence a key: they stay together, in their
order, and on one side of a split.

    segments: some ten thousand consecutive rows, written in the order of their keys, one Arrow batch for each bucket
    bucket:   the rows whose keys begin with the same bits, gathered from all segments, put into order, handed on

Text is written once and read once. DuckDB's ORDER BY over a million rows (600 MB of text) took 13 s within 600 MiB and
failed within 300; this takes 5 s within 230, two of them to write the segments. The order depends on seed and places only:
not on segments, buckets, threads or an interruption.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from brimful.data.clean.minhash import Bytes, Slots, Words
from brimful.data.flow import in_order

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
