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

from brimful.data.clean.shuffle import KEY
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
