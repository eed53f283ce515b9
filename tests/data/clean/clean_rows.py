"""Rows for the tests of clean: a source with chunks of a given size, and texts to fill it with."""

import hashlib
import random
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brimful.data.clean.clean import clean
from brimful.data.clean.prepare import CleanOptions, MemoryShares
from brimful.data.read.columns import Layout
from brimful.data.read.files import RowProblem
from brimful.data.read.source import Chunk, Source

SMALL = MemoryShares(threads=2, segment_bytes=4_000, bucket_bytes=4_000, duckdb_bytes=64 * 2**20)
"""Pieces so small that a few hundred rows make several segments and buckets."""


class Rows(Source):
    """These rows, in chunks of this many; a `None` among them is a broken row."""

    def __init__(self, rows: Sequence[tuple[str, ...] | None], fields=("prompt", "response"), chunk_rows=50):
        self.layout = Layout(kind="pair", fields=fields, columns={field: field for field in fields}, reason="given")
        self.paths = self.skipped = ()
        self.files = ("rows",)
        self.total_bytes = 100 * len(rows)
        self._rows, self._chunk_rows = list(rows), chunk_rows

    def chunks(self, *, skip=0):
        schema = pa.schema([(field, pa.string()) for field in self.layout.fields])
        for start in range(skip * self._chunk_rows, len(self._rows), self._chunk_rows):
            numbered = [
                (start + place + 1, row) for place, row in enumerate(self._rows[start : start + self._chunk_rows])
            ]
            good = [(line, row) for line, row in numbered if row is not None]
            arrays = [pa.array([row[field] for _, row in good], pa.string()) for field in range(len(schema))]
            yield Chunk(
                rows=pa.RecordBatch.from_arrays(arrays, schema=schema),
                broken=tuple(RowProblem("rows", line, "not JSON") for line, row in numbered if row is None),
                file="rows",
                read_bytes=100 * min(len(self._rows), start + self._chunk_rows),
                lines=np.array([line for line, _ in good], dtype=np.int64),
            )

    def fingerprint(self):
        return hashlib.sha256(repr(self._rows).encode()).hexdigest()


def varied(count, seed=0, length=60):
    """Pairs that have nothing in common."""
    draw = random.Random(seed)
    text = lambda size: "".join(chr(draw.randrange(0x4E00, 0x9FA0)) for _ in range(size))  # noqa: E731
    return [(f"{text(8)}?", text(length)) for _ in range(count)]


def with_copies(count, seed=0):
    """Varied rows, among them exact copies and copies with another last character (0.96 similarities); how many of each."""
    draw, rows, exact, near = random.Random(seed), varied(count, seed, length=200), 0, 0
    for row in list(rows):
        if draw.random() < 0.1:
            rows.insert(draw.randrange(len(rows)), row)
            exact += 1
        elif draw.random() < 0.1:
            rows.insert(draw.randrange(len(rows)), (row[0], row[1][:-1] + "龥"))
            near += 1
    return rows, exact, near


def outcome(folder):
    """The outputs to the byte."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.parquet")}


def cleaned(
    rows, output, *, memory=SMALL, progress=lambda phrase: None, fields=("prompt", "response"), chunk_rows=50, **options
):
    source = Rows(rows, fields=fields, chunk_rows=chunk_rows)
    return clean(source, output=output, options=CleanOptions(**options), memory=memory, progress=progress)


def read_back(folder, split="train"):
    table = pq.read_table(folder / f"{split}.parquet")
    return list(zip(*[column.to_pylist() for column in table.columns], strict=True))
