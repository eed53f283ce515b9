"""Columns that are Arrow's already, as parquet files and the hub have them, made into the types asked for.

Text comes in eight types (large, view, dictionary, binary …) and all become `string`. Arrow takes bytes for text without
a look; here all of it is checked, and the rows that are no UTF-8 are picked out one by one.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brimful.data.read.raw import TEXT, Broken, Columns, Field, Lines, batch, turn_keys, turns
from brimful.errors import BadData

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
