"""Rows of a data set on the Hugging Face hub, streamed: nothing is downloaded beforehand.

`owner/name` means its split `train`, or its only one; `owner/name:split` says which.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from brimful.data.read.arrow import arrow_columns, arrow_rows
from brimful.data.read.raw import CHUNK_ROWS, Columns, Field, Raw, cut
from brimful.errors import BadData, MissingExtra, in_one_line

_PEEK_ROWS = 100


def hub_columns(name: str) -> Columns:
    """What its first rows have."""
    first = next(_batches(name, _PEEK_ROWS), None)
    if first is None:
        raise BadData(f"{name} has no rows; choose another split, such as {name.partition(':')[0]}:train")
    return arrow_columns(name, first.schema)


def read_hub(name: str, fields: tuple[Field, ...]) -> Iterator[Raw]:
    """All rows; their line is the number of the row."""
    before = 0
    for found in _batches(name, CHUNK_ROWS):
        rows, lines, broken = arrow_rows(name, fields, found, before)
        before += found.num_rows
        yield from cut(Raw(rows=rows, lines=lines, broken=broken, at_bytes=0))


def _batches(name: str, rows: int) -> Iterator[pa.RecordBatch]:
    try:
        for table in _load(name).with_format("arrow").iter(batch_size=rows):
            yield from table.combine_chunks().to_batches()
    except (BadData, MissingExtra):
        raise
    except Exception as error:  # whatever the network, the hub or the data set's own files are up to
        raise BadData(
            f"{name}: there is no such file or folder, and it cannot be loaded from the Hugging Face hub ({in_one_line(error)}); "
            "check the name and the network"
        ) from None


def _load(name: str) -> Any:
    """The split as a stream."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "hub") from None
    repository, _, split = name.partition(":")
    if split:
        return datasets.load_dataset(repository, split=split, streaming=True)
    splits = datasets.load_dataset(repository, streaming=True)
    if "train" in splits:
        return splits["train"]
    if len(splits) != 1:
        raise BadData(f"{name} has the splits {', '.join(splits)}; say which, such as {name}:{next(iter(splits))}")
    return next(iter(splits.values()))
