"""Rows of a parquet file, whatever its row groups are.

Arrow loads a whole column chunk of a row group unless told to buffer: one row group of 900,000 chat rows took 396 MiB,
with a buffer of 1 MiB 118 MiB (31 of them Arrow's), and it was twice as fast. A page is still decoded as a whole: where
the writer puts a row group into one page, as fastparquet does, the same rows take 878 MiB.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from brimful.data.read.arrow import arrow_columns, arrow_rows
from brimful.data.read.raw import CHUNK_BYTES, CHUNK_ROWS, Columns, Field, Raw, cut
from brimful.errors import BadData

_BUFFER_BYTES = 2**20


def parquet_columns(path: str) -> Columns:
    """What the file has; one without rows is a mistake."""
    with _open(path) as file:
        if file.metadata.num_rows == 0:
            raise BadData(f"{path} has no rows; leave it out")
        return arrow_columns(path, file.schema_arrow)


def read_parquet(path: str, fields: tuple[Field, ...]) -> Iterator[Raw]:
    """All rows; their line is the number of the row."""
    with _open(path) as file:
        size, total, before = Path(path).stat().st_size, file.metadata.num_rows, 0
        names = [field.name for field in fields]
        try:
            for found in file.iter_batches(_batch_rows(file, names), columns=names, use_threads=False):
                rows, lines, broken = arrow_rows(path, fields, found, before)
                before += found.num_rows
                yield from cut(Raw(rows=rows, lines=lines, broken=broken, at_bytes=size * before // total))
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error, f", row {before + 1:,} or later") from None


def _open(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


def _damaged(path: str, error: Exception, where: str = "") -> BadData:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return BadData(f"{path}{where}: no whole parquet file ({lines[0].rstrip('.')}); get or write it again")


def _batch_rows(file: pq.ParquetFile, names: list[str]) -> int:
    """As many rows as make up a chunk where they are longest, by the sizes that the file states."""
    longest = 1.0
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        columns = [group.column(number) for number in range(group.num_columns)]
        mine = [one.total_uncompressed_size for one in columns if one.path_in_schema.split(".")[0] in names]
        longest = max(longest, sum(mine) / max(1, group.num_rows))
    return int(min(CHUNK_ROWS, max(1, CHUNK_BYTES // longest)))
