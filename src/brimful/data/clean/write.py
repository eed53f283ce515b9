"""The outputs: parquet files whose bytes depend on the rows and their order alone.

A row group ends after 32,768 rows or 32 MiB of text, whichever comes first, wherever the tables that arrive begin and
end: whoever reads the file back needs little memory, and the same rows give the same file. Texts are compressed with zstd
and without dictionaries, which no long text profits from.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from brimful.errors import BadOption, InternalError

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


def write_splits(tables: Iterable[pa.Table], counts: Mapping[str, int], folder: Path, sides: tuple[str, ...]) -> None:
    """The first rows into the first file, and so on; each file has exactly as many as it should, or this fails."""
    rows = iter(tables)
    rest = pa.schema([(side, pa.string()) for side in sides]).empty_table()
    for split, count in counts.items():
        with GroupedWriter(folder / f"{split}.parquet", rest.schema) as writer:
            while count and (rest := rest if rest.num_rows else next(rows, None)) is not None:
                part, rest = rest.slice(0, count), rest.slice(min(count, rest.num_rows))
                writer.add(part)
                count -= part.num_rows
    for split, expected in counts.items():
        written = pq.read_metadata(folder / f"{split}.parquet").num_rows
        if written != expected:
            raise InternalError(f"{split}.parquet has {written:,} rows, not the {expected:,} it should have")
    if rest.num_rows or any(table.num_rows for table in rows):
        raise InternalError("rows are left over after all files were written")


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
