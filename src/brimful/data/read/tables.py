"""Rows of a csv file (commas) or a tsv file (tabs): the first row names the columns.

Python's csv module, in its strict mode: it knows the line of every row, goes on behind a mistake and takes quoted line
breaks. Arrow's reader is faster and does none of the three.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from brimful.data.read.files import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    COMPRESSIONS,
    TEXT,
    Broken,
    ByteStream,
    Columns,
    Field,
    Lines,
    Raw,
    batch,
    cut,
    turn_keys,
    turns,
)
from brimful.errors import BadData, MissingExtra, in_one_line

# Columns that are Arrow's already, as parquet files and the hub have them, made into the types asked for.
#
# Text comes in eight types (large, view, dictionary, binary …) and all become `string`. Arrow takes bytes for text without
# a look; here all of it is checked, and the rows that are no UTF-8 are picked out one by one.


_ANY_BYTES = pc.CastOptions(TEXT, allow_invalid_utf8=True)


def arrow_columns(path: str, schema: pa.Schema) -> Columns:
    """What rows with this schema have; two columns of one name could not be told apart."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise BadData(f"{path} has {', '.join(map(repr, twice))} twice; rename one of these columns")
    return Columns({field.name: _kind(field.type) for field in schema}, tuple(schema.names))


def _kind(kind: pa.DataType) -> pa.DataType | None:
    """What a reader makes of this type: `TEXT`, `turns(…)`, or itself where it is neither; None for a column of nulls."""
    if pa.types.is_null(kind):
        return None
    if _is_text(kind):
        return TEXT
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = kind.value_type
        keys = turn_keys(field.name for field in item) if pa.types.is_struct(item) else None
        if keys and all(_is_text(item.field(key).type) for key in keys):
            return turns(*keys)
    return kind


def arrow_rows(
    path: str, fields: tuple[Field, ...], found: pa.RecordBatch, before: int
) -> tuple[pa.RecordBatch, Lines, tuple[Broken, ...]]:
    """The fields of these rows, of which `before` came earlier, with the rows that are not UTF-8 apart."""
    columns = [_column(found, field) for field in fields]
    lines = np.arange(before + 1, before + found.num_rows + 1, dtype=np.int64)
    wrong = np.zeros(found.num_rows, dtype=bool)
    why: dict[int, str] = {}
    for field, column in zip(fields, columns, strict=True):
        for row in _not_utf8(column):
            wrong[row] = True
            why.setdefault(row, f"'{field.name}' is not UTF-8")
    rows = batch(fields, columns)
    if not why:
        return rows, lines, ()
    broken = tuple(Broken(path, before + row + 1, why[row]) for row in sorted(why))
    return rows.filter(pa.array(~wrong)), lines[~wrong], broken


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )  # fmt: skip


def _column(found: pa.RecordBatch, field: Field) -> pa.Array:
    column = found.column(field.name)
    return _text(column) if field.type == TEXT else _turns(column, field.type)


def _text(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column if column.type == TEXT else column.cast(options=_ANY_BYTES)


def _turns(column: pa.Array, kind: pa.ListType) -> pa.Array:
    """The two fields of each message that count. The lists are laid out anew: a slice's begin anywhere in its values."""
    item = column.flatten()
    wanted = [_text(item.field(field.name)) for field in kind.value_type]
    messages = pa.StructArray.from_arrays(wanted, fields=list(kind.value_type), mask=item.is_null())
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), messages, type=kind, mask=column.is_null())


def _not_utf8(column: pa.Array) -> list[int]:
    """Rows with bytes that are no UTF-8."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return [row for row in range(len(column)) if not _valid(column.slice(row, 1))]
    return []


def _valid(one: pa.Array) -> bool:
    try:
        one.to_pylist()
    except UnicodeDecodeError:
        return False
    return True


# Rows of a data set on the Hugging Face hub, streamed: nothing is downloaded beforehand.
#
# `owner/name` means its split `train`, or its only one; `owner/name:split` says which.


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


# Rows of a parquet file, whatever its row groups are.
#
# Arrow loads a whole column chunk of a row group unless told to buffer: one row group of 900,000 chat rows took 396 MiB,
# with a buffer of 1 MiB 118 MiB (31 of them Arrow's), and it was twice as fast. A page is still decoded as a whole: where
# the writer puts a row group into one page, as fastparquet does, the same rows take 878 MiB.


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


_FIELD_CHARACTERS = 64 * 2**20
"""A field longer than this is a quote that was never closed. The module keeps four bytes a character while it reads."""

Found = tuple[int, list[str] | str]
"""The line on which a row starts, and its fields or why it has none."""


def csv_columns(path: str) -> Columns:
    """The header. A file without a row below it is a mistake."""
    with ByteStream(path) as stream:
        rows = _rows(path, stream)
        header = _header(path, rows)
        if next(rows, None) is None:
            raise BadData(f"{path} has a header and no rows; leave it out")
        return Columns(dict.fromkeys(header, TEXT), tuple(header))


def read_csv(path: str, fields: tuple[Field, ...]) -> Iterator[Raw]:
    """All rows with the line on which they start."""
    with ByteStream(path) as stream:
        rows = _rows(path, stream)
        header = _header(path, rows)
        places = [header.index(field.name) for field in fields]
        held = _Held(path, fields)
        for line, found in rows:
            held.add(line, found, len(header), places)
            if held.full:
                yield held.raw(stream.at_bytes())
                held = _Held(path, fields)
        if held.count:
            yield held.raw(stream.at_bytes())


class _Held:
    """Rows on their way into a chunk."""

    def __init__(self, path: str, fields: tuple[Field, ...]) -> None:
        self._path, self._fields = path, fields
        self._columns: list[list[str]] = [[] for _ in fields]
        self._lines: list[int] = []
        self._broken: list[Broken] = []
        self._characters = 0

    @property
    def count(self) -> int:
        return len(self._lines) + len(self._broken)

    @property
    def full(self) -> bool:
        """Characters are counted, of which one may take three bytes."""
        return self.count == CHUNK_ROWS or self._characters >= CHUNK_BYTES // 2

    def add(self, line: int, found: list[str] | str, width: int, places: list[int]) -> None:
        if isinstance(found, str):
            self._broken.append(Broken(self._path, line, found))
        elif len(found) != width:
            self._broken.append(Broken(self._path, line, f"{len(found)} fields, the header has {width}"))
        elif not _utf8(found):
            self._broken.append(Broken(self._path, line, "not UTF-8"))
        else:
            self._lines.append(line)
            for column, place in zip(self._columns, places, strict=True):
                column.append(found[place])
                self._characters += len(found[place])

    def raw(self, at_bytes: int) -> Raw:
        columns = [pa.array(column, type=TEXT) for column in self._columns]
        lines = np.array(self._lines, dtype=np.int64)
        return Raw(rows=batch(self._fields, columns), lines=lines, broken=tuple(self._broken), at_bytes=at_bytes)


def _rows(path: str, stream: ByteStream) -> Iterator[Found]:
    """All rows that are not blank, the header first."""
    csv.field_size_limit(_FIELD_CHARACTERS)
    reader = csv.reader(_text_lines(stream), delimiter=_delimiter(path), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            found = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error) or "field limit" in str(error):
                raise BadData(
                    f"{path}, line {line}: a quote opens in this row and never closes; close it or double it"
                ) from None
            yield line, f"not CSV: {error}"
            continue
        if found:
            yield line, found


def _text_lines(stream: ByteStream) -> Iterator[str]:
    """Lines with their breaks. Bytes that are no UTF-8 pass as lone surrogates, to be found in the row they are in."""
    for block in stream.whole_lines():
        text = block.decode(errors="surrogateescape")
        yield from (line + "\n" for line in text.removesuffix("\n").split("\n"))


def _header(path: str, rows: Iterator[Found]) -> list[str]:
    line, header = next(rows, (1, "no rows; leave it out"))
    if isinstance(header, str):
        raise BadData(f"{path}, line {line}: {header}")
    if not _utf8(header):
        raise BadData(
            f"{path}, line {line}: the header is not UTF-8; if the file is in GBK, convert it with iconv -f gbk -t utf-8"
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise BadData(f"{path}, line {line}: the header names {', '.join(map(repr, twice))} twice; rename one of them")
    return header


def _utf8(found: list[str]) -> bool:
    try:
        "".join(found).encode()
    except UnicodeEncodeError:
        return False
    return True


def _delimiter(path: str) -> str:
    name = Path(path)
    ending = Path(name.stem).suffix if name.suffix.lower() in COMPRESSIONS else name.suffix
    return "\t" if ending.lower() == ".tsv" else ","
