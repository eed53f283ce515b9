"""Readers for tables: csv and tsv, parquet, and datasets on the Hugging Face hub.

Each format has two functions: `…_schema(path)` looks at the columns, `read_…(path, columns)` yields all rows as chunks.

- **csv**: Python's csv module in strict mode. It knows the line of every row, continues after an error and accepts quoted
  line breaks; Arrow's reader is faster and does none of these.
- **parquet**: read through a 1 MiB buffer. Without it Arrow loads whole column chunks: a row group of 900,000 chat rows
  took 396 MiB instead of 118 MiB, at half the speed. Texts come as dictionaries and are decoded in pieces, which costs a
  tenth of the time: 3,000 rows of one text of 1 MiB are a file of 49 kB and took 4 GiB. A page is still decoded as a whole:
  where the writer puts a row group into one page, as fastparquet does, the 900,000 rows take 878 MiB.
- **hub**: streamed, nothing is downloaded first. `owner/name` means the split `train`, or the only one.
"""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from json.encoder import encode_basestring
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
    JSON,
    TEXT,
    ByteStream,
    Chunk,
    Column,
    FileSchema,
    RowProblem,
    damaged_file,
    first_names,
    message_keys,
    messages_type,
    record_batch,
    repeated_names,
    row_too_long,
    split_chunk,
)
from brimful.errors import BadData, MissingExtra, in_one_line

# ── csv ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

CsvRow = tuple[int, list[str] | str]
"""The line on which a row starts, and its values or the reason why it has none."""


def csv_schema(path: str, max_row_bytes: int) -> FileSchema:
    """The columns of the header. A file without a row below the header is an error."""
    with ByteStream(path) as stream:
        rows = _csv_rows(path, stream, max_row_bytes)
        header = _header(path, rows)
        if next(rows, None) is None:
            raise BadData(f"{path} has a header but no rows. Try: leave it out.")
        return FileSchema(dict.fromkeys(header, TEXT), tuple(header))


def read_csv(path: str, columns: tuple[Column, ...], max_row_bytes: int) -> Iterator[Chunk]:
    """All rows, each with the line on which it starts."""
    with ByteStream(path) as stream:
        rows = _csv_rows(path, stream, max_row_bytes)
        header = _header(path, rows)
        places = [header.index(column.name) for column in columns]
        good: list[tuple[int, list[str]]] = []
        broken: list[RowProblem] = []
        characters = 0

        def chunk() -> Chunk:
            arrays = [pa.array([texts[place] for _, texts in good], type=TEXT) for place in range(len(columns))]
            lines = np.array([line for line, _ in good], dtype=np.int64)
            return Chunk(path, record_batch(columns, arrays), lines, tuple(broken), stream.position())

        for line, values in rows:
            if problem := _row_problem(values, len(header)):
                broken.append(RowProblem(path, line, problem))
            else:
                texts = [values[place] for place in places]
                good.append((line, texts))
                characters += sum(map(len, texts))
            # A character may take up to three bytes.
            if len(good) + len(broken) == CHUNK_ROWS or characters >= CHUNK_BYTES // 2:
                yield chunk()
                good, broken, characters = [], [], 0
        if good or broken:
            yield chunk()


def _row_problem(values: list[str] | str, width: int) -> str | None:
    if isinstance(values, str):
        return values
    if len(values) != width:
        return f"{len(values)} fields, the header has {width}"
    return None if _is_utf8(values) else "not UTF-8"


def _csv_rows(path: str, stream: ByteStream, max_row_bytes: int) -> Iterator[CsvRow]:
    """All rows that are not blank, the header first."""
    csv.field_size_limit(sys.maxsize)  # the limit is ours: of a whole row
    name = Path(path)
    ending = Path(name.stem).suffix if name.suffix.lower() in COMPRESSIONS else name.suffix
    delimiter = "\t" if ending.lower() == ".tsv" else ","
    line, row_bytes = 1, 0

    def lines() -> Iterator[str]:
        nonlocal row_bytes
        for text in _text_lines(stream, max_row_bytes):
            row_bytes += len(text)
            if row_bytes > max_row_bytes:
                raise row_too_long(f"{path}, line {line}: the row that starts here", max_row_bytes, "close its quotes")
            yield text

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        line, row_bytes = reader.line_num + 1, 0
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise BadData(
                    f"{path}, line {line}: a quote opens in this row and never closes. Try: close or double it."
                ) from None
            yield line, f"not CSV: {error}"
            continue
        if values:
            yield line, values


def _text_lines(stream: ByteStream, max_line_bytes: int) -> Iterator[str]:
    """Lines with their breaks. Invalid UTF-8 passes as lone surrogates, so that only its row is broken."""
    for block in stream.whole_lines(max_line_bytes):
        text = block.decode(errors="surrogateescape")
        yield from (line + "\n" for line in text.removesuffix("\n").split("\n"))


def _header(path: str, rows: Iterator[CsvRow]) -> list[str]:
    line, header = next(rows, (1, "no rows"))
    if isinstance(header, str):
        raise BadData(f"{path}, line {line}: {header}. Try: leave the file out, or repair its header.")
    if not _is_utf8(header):
        problem = RowProblem(path, line, "the header is not UTF-8")
        raise BadData(f"{problem}. Try: {problem.repair('repair it')}.")
    if repeated := repeated_names(header):
        raise BadData(
            f"{path}, line {line}: the header has {first_names(map(repr, repeated))} twice. Try: rename one of the columns."
        )
    return header


def _is_utf8(values: list[str]) -> bool:
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return False
    return True


# ── parquet ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_BUFFER_BYTES = 2**20


def parquet_schema(path: str, max_row_bytes: int) -> FileSchema:
    """The columns of the file. A file without rows is an error."""
    with _open_parquet(path) as file:
        if file.metadata.num_rows == 0:
            raise BadData(f"{path} has no rows. Try: leave it out.")
        return _arrow_schema(path, file.schema_arrow)


def read_parquet(path: str, columns: tuple[Column, ...], max_row_bytes: int) -> Iterator[Chunk]:
    """All rows; the line of a row is its number."""
    texts = [column.name for column in columns if column.type == TEXT]
    with _open_parquet(path) as file:
        repeated = [name for name in texts if _may_repeat(file.metadata, name)]
    with _open_parquet(path, dictionaries=repeated) as file:
        size, total, rows_before = Path(path).stat().st_size, file.metadata.num_rows, 0
        names = [column.name for column in columns]
        batch_rows = _batch_rows(path, file, names, max_row_bytes)
        try:
            for batch in file.iter_batches(batch_rows, columns=names, use_threads=False):
                for part in _before_decoding(batch, repeated):
                    read_bytes = size * (rows_before + part.num_rows) // total
                    yield from split_chunk(_arrow_chunk(path, columns, part, rows_before, read_bytes))
                    rows_before += part.num_rows
        except (pa.ArrowException, OSError) as error:
            raise damaged_file(f"{path}, row {rows_before + 1:,} or later", "parquet", error) from None


def _open_parquet(path: str, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False, read_dictionary=list(dictionaries))
    except (pa.ArrowException, OSError) as error:
        raise damaged_file(path, "parquet", error) from None


def _may_repeat(metadata: pq.FileMetaData, name: str) -> bool:
    """Whether the rows of a batch could decode to much more than a chunk: all of them to the whole of their row group."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [(group, group.column(number)) for group in groups for number in range(group.num_columns)]
    return any(
        column.path_in_schema == name
        and min(CHUNK_ROWS, group.num_rows) * column.total_uncompressed_size > 16 * CHUNK_BYTES
        for group, column in columns
    )


def _before_decoding(batch: pa.RecordBatch, texts: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The same rows in pieces of about `CHUNK_BYTES` of text: a dictionary may hold one long text for a million rows.

    A batch of dictionaries ends with its row group, which is why only those that `_may_repeat` come as such.
    """
    sizes = np.zeros(batch.num_rows, dtype=np.int64)
    for column in map(batch.column, texts):
        if pa.types.is_dictionary(column.type):
            sizes += pc.binary_length(column.dictionary).take(column.indices).fill_null(0).to_numpy()
    pieces = (np.cumsum(sizes) - 1) // CHUNK_BYTES
    edges = [0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), batch.num_rows]
    return (batch.slice(start, end - start) for start, end in pairwise(edges))


def _batch_rows(path: str, file: pq.ParquetFile, names: list[str], max_row_bytes: int) -> int:
    """Rows per batch such that a chunk is not exceeded where rows are longest, by the sizes in the metadata."""
    longest, rows_before = 1.0, 0
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        columns = [group.column(number) for number in range(group.num_columns)]
        sizes = [column.total_uncompressed_size for column in columns if column.path_in_schema.split(".")[0] in names]
        mean_bytes = sum(sizes) / max(1, group.num_rows)
        if mean_bytes > max_row_bytes:  # before any of them is decoded
            place = f"{path}, row {rows_before + 1:,} or later"
            raise row_too_long(place, max_row_bytes, "shorter rows")
        longest, rows_before = max(longest, mean_bytes), rows_before + group.num_rows
    return int(min(CHUNK_ROWS, max(1, CHUNK_BYTES // longest)))


# ── the hub ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_SAMPLE_ROWS = 100


def hub_schema(name: str, max_row_bytes: int) -> FileSchema:
    """The columns of the first rows."""
    first = next(_hub_batches(name, _SAMPLE_ROWS), None)
    if first is None:
        raise BadData(f"{name} has no rows. Try: another split, such as {name.partition(':')[0]}:train.")
    return _arrow_schema(name, first.schema)


def read_hub(name: str, columns: tuple[Column, ...], max_row_bytes: int) -> Iterator[Chunk]:
    """All rows; the line of a row is its number."""
    rows_before = 0
    for batch in _hub_batches(name, CHUNK_ROWS):
        yield from split_chunk(_arrow_chunk(name, columns, batch, rows_before, 0))
        rows_before += batch.num_rows


def _hub_batches(name: str, rows: int) -> Iterator[pa.RecordBatch]:
    try:
        for table in _load_split(name).with_format("arrow").iter(batch_size=rows):
            yield from table.combine_chunks().to_batches()
    except (BadData, MissingExtra):
        raise
    except Exception as error:  # the network, the hub and the dataset's own files raise anything
        raise BadData(
            f"{name} is not a file, and it cannot be loaded from the Hugging Face hub ({in_one_line(error)}). "
            "Try: check the name and the network."
        ) from None


def _load_split(name: str) -> Any:
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
        raise BadData(f"{name} has the splits {', '.join(splits)}. Try: {name}:{next(iter(splits))}.")
    return next(iter(splits.values()))


# ── Arrow columns to the requested types ──────────────────────────────────────────────────────────────────────────────
# Text comes in eight Arrow types (large, view, dictionary, binary …); all become `string`. Arrow does not validate the
# bytes of text, so all of it is checked here and rows that are not UTF-8 are reported one by one.

_UNCHECKED_TEXT = pc.CastOptions(TEXT, allow_invalid_utf8=True)


def _arrow_schema(path: str, schema: pa.Schema) -> FileSchema:
    if repeated := repeated_names(schema.names):
        raise BadData(f"{path} has {first_names(map(repr, repeated))} twice. Try: rename one of the columns.")
    return FileSchema({field.name: _read_type(field.type) for field in schema}, tuple(schema.names))


def _read_type(type_: pa.DataType) -> pa.DataType | None:
    """What readers turn this type into: `TEXT`, `messages_type(…)`, itself, or None for a column of nulls."""
    if pa.types.is_null(type_):
        return None
    if _is_text(type_):
        return TEXT
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        item = type_.value_type
        keys = message_keys(field.name for field in item) if pa.types.is_struct(item) else None
        if keys and all(_is_text(item.field(key).type) for key in keys):
            return messages_type(*keys)
    return type_


def _is_text(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        return _is_text(type_.value_type)
    return bool(
        pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_)
        or pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_)
    )  # fmt: skip


def _arrow_chunk(
    path: str, columns: tuple[Column, ...], batch: pa.RecordBatch, rows_before: int, read_bytes: int
) -> Chunk:
    """The columns of these rows, without the rows that are not UTF-8."""
    arrays = []
    for column in columns:
        array = batch.column(column.name)
        arrays.append(_converted(array, column.type))
    lines = np.arange(rows_before + 1, rows_before + batch.num_rows + 1, dtype=np.int64)
    problems: dict[int, str] = {}
    for column, array in zip(columns, arrays, strict=True):
        for row in _invalid_rows(array):
            problems.setdefault(row, f"'{column.name}' is not UTF-8")
    rows = record_batch(columns, arrays)
    if not problems:
        return Chunk(path, rows, lines, (), read_bytes)
    valid = np.ones(batch.num_rows, dtype=bool)
    valid[list(problems)] = False
    broken = tuple(RowProblem(path, rows_before + row + 1, problems[row]) for row in sorted(problems))
    return Chunk(path, rows.filter(pa.array(valid)), lines[valid], broken, read_bytes)


def _converted(array: pa.Array, type_: pa.DataType) -> pa.Array:
    if type_ == TEXT:
        return _to_text(array)
    return _to_json(array) if type_ == JSON else _to_messages(array, type_)


def _to_text(array: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array if array.type == TEXT else array.cast(options=_UNCHECKED_TEXT)


def _to_messages(array: pa.Array, type_: pa.ListType) -> pa.Array:
    """Role and content of each message. The lists are rebuilt: those of a slice begin anywhere in their values."""
    items = array.flatten()
    parts = [_to_text(items.field(field.name)) for field in type_.value_type]
    messages = pa.StructArray.from_arrays(parts, fields=list(type_.value_type), mask=items.is_null())
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), messages, type=type_, mask=array.is_null())


def _to_json(array: pa.Array) -> pa.Array:
    """Every value as JSON, null where it is null. Bytes that are not UTF-8 stay as they are."""
    texts = [None if text == "null" else text for text in _json_texts(array)]
    try:
        return pa.array(texts, JSON)
    except UnicodeEncodeError:
        data = [None if text is None else text.encode(errors="surrogateescape") for text in texts]
        return pa.array(data, pa.large_binary()).cast(options=pc.CastOptions(JSON, allow_invalid_utf8=True))


def _json_texts(array: pa.Array) -> list[str]:
    """The JSON of each value, built column by column: three times as fast as through `to_pylist`."""
    type_ = array.type
    if pa.types.is_null(type_):
        return ["null"] * len(array)
    if _is_text(type_):
        return ["null" if text is None else encode_basestring(text) for text in _python_texts(_to_text(array))]
    if pa.types.is_struct(type_):
        return _json_objects(array)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        items = _json_texts(array.flatten())
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths).tolist()
        nulls = array.is_null().to_pylist()
        bounds = zip([0, *ends], ends, nulls, strict=False)
        return ["null" if null else f"[{','.join(items[start:end])}]" for start, end, null in bounds]
    if pa.types.is_map(type_):
        return ["null" if pairs is None else _json_value(dict(pairs)) for pairs in array.to_pylist()]
    return [_json_value(value) for value in array.to_pylist()]


def _json_objects(array: pa.StructArray) -> list[str]:
    """A struct has the keys of all rows: one with null is a key that this row lacks, except for a message's content."""
    names = [field.name for field in array.type]
    is_message = message_keys(names) is not None
    keys = [f"{encode_basestring(name)}:" for name in names]
    kept = {key for key, name in zip(keys, names, strict=True) if is_message and name in ("content", "value")}
    columns = [_json_texts(column) for column in array.flatten()]
    rows = zip(*columns, strict=True) if columns else iter([()] * len(array))
    nulls = array.is_null().to_pylist()
    return [
        "null" if null else "{" + ",".join(key + value for key, value in zip(keys, row, strict=True) if value != "null" or key in kept) + "}"
        for row, null in zip(rows, nulls, strict=True)
    ]  # fmt: skip


def _json_value(value: Any) -> str:
    """A number, true, false, or the text of anything else (a date)."""
    return "null" if value != value else json.dumps(value, ensure_ascii=False, default=str)


def _python_texts(array: pa.Array) -> list[str | None]:
    """Invalid UTF-8 passes as lone surrogates, so that only its row is broken."""
    try:
        texts: list[str | None] = array.to_pylist()
    except UnicodeDecodeError:
        values = array.cast(pa.binary()).to_pylist()
        texts = [None if value is None else value.decode(errors="surrogateescape") for value in values]
    return texts


def _invalid_rows(array: pa.Array) -> list[int]:
    """Rows with bytes that are not UTF-8."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return [row for row in range(len(array)) if not _is_valid(array.slice(row, 1))]
    return []


def _is_valid(row: pa.Array) -> bool:
    try:
        row.to_pylist()
    except UnicodeDecodeError:
        return False
    return True
