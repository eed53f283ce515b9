"""A file of rows with a column of SMILES, as whole columns: csv and tsv, also compressed, and parquet.

A column is of numbers where everything in it that is not blank is one, else of text. A blank is NaN, or the empty text:
a label that was not measured must not become a zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption
from brimful.tasks.heads.spec.table import near

Column = npt.NDArray[Any]
"""float64 with NaN for blanks, or str objects with "" for them."""

ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.bz2", ".tsv.bz2", ".csv.zst", ".tsv.zst")
NOT_UTF8 = "not UTF-8"
"""What is said of a row of a csv file that is not."""
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
_LISTED = 20
"""Columns named in a message at most."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of a file that are rows."""

    smiles: Column
    columns: Mapping[str, Column]
    rows: npt.NDArray[np.int64]
    """Which row of the file each is, counted from 0, without the header."""
    broken: tuple[tuple[int, str], ...] = ()
    """The rows that cannot be read, with the reason."""


def read_table(path: Path, *, smiles: str, columns: Sequence[str]) -> Table:
    """With these columns, or with all where none is named."""
    if not path.is_file():
        raise BadData(f"{path} is no file; name a table with a column of SMILES")
    if path.suffix.lower() == ".parquet":
        return _parquet(path, smiles, columns)
    if path.name.lower().endswith(ENDINGS):
        return _csv(path, smiles, columns)
    raise BadData(f"{path} is of no kind that is read here; give .parquet, {', '.join(ENDINGS[:4])}")


def _csv(path: Path, smiles: str, asked: Sequence[str]) -> Table:
    from brimful.data.read.csv_file import csv_columns, read_csv
    from brimful.data.read.raw import TEXT, Field

    _check_start(path, smiles)
    names = _chosen(path, csv_columns(str(path)).usual, smiles, asked)
    stretches = list(read_csv(str(path), tuple(Field(name, TEXT) for name in names)))
    texts = {name: [text for one in stretches for text in one.rows.column(name).to_pylist()] for name in names}
    lines = np.concatenate([one.lines for one in stretches])
    broken = [one for stretch in stretches for one in stretch.broken]
    if not len(lines) and any(one.why == NOT_UTF8 for one in broken):
        raise BadData(f"{path} is {NOT_UTF8}; {_convert('gbk')}, or from the encoding it was saved in")
    order = np.sort(np.concatenate([lines, np.array([one.line for one in broken], dtype=np.int64)]))
    return Table(
        smiles=_text(texts.pop(smiles)),
        columns={name: column_of(column) for name, column in texts.items()},
        rows=np.searchsorted(order, lines),
        broken=tuple((int(np.searchsorted(order, one.line)), one.why) for one in broken),
    )


def _check_start(path: Path, smiles: str) -> None:
    """Another encoding, or another separator than the ending says, would make all of the header one strange name."""
    from brimful.data.read.byte_stream import ByteStream

    with ByteStream(str(path)) as stream:
        start = stream.read(4096)
    if b"\0" in start:
        raise BadData(f"{path} is {NOT_UTF8} but looks like UTF-16; {_convert('utf-16')}")
    header = start.split(b"\n")[0].decode(errors="replace").strip('\r"')
    own = "\t" if path.name.lower().endswith(tuple(one for one in ENDINGS if ".tsv" in one)) else ","
    other = next((one for one in _SEPARATORS if one in header), own) if own not in header else own
    if other != own and header != smiles:
        mend = {"\t": "call it .tsv", ",": "call it .csv"}.get(other, "write it with commas")
        raise BadData(
            f"{path} is read as columns between {_SEPARATORS[own]}, and its header has {_SEPARATORS[other]}; {mend}"
        )


def _convert(encoding: str) -> str:
    return f"convert it with iconv -f {encoding} -t utf-8"


def _parquet(path: Path, smiles: str, asked: Sequence[str]) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = _chosen(path, file.schema_arrow.names, smiles, asked)
            found = file.read(columns=names)
    except (pa.ArrowException, OSError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise BadData(f"{path}: no whole parquet file ({why}); get or write it again") from None
    columns = {name: _of_arrow(found[name]) for name in names}
    _refuse_other_types(path, found.schema, columns, smiles, asked)
    kept = {name: column for name, column in columns.items() if column is not None and name != smiles}
    written = columns[smiles]
    assert written is not None
    return Table(smiles=written, columns=kept, rows=np.arange(found.num_rows))


def _refuse_other_types(
    path: Path, schema: Any, columns: Mapping[str, Column | None], smiles: str, asked: Sequence[str]
) -> None:
    """SMILES are text, and what was asked for is text or numbers; other columns of lists and the like are passed over."""
    for name in (smiles, *asked):
        column = columns[name]
        if column is None or (name == smiles and column.dtype != object):
            wanted = "of text" if name == smiles else "of text or numbers"
            raise BadData(f"{path}: the column {name!r} is of {schema.field(name).type}; name one {wanted}")


def _chosen(path: Path, there: Sequence[str], smiles: str, asked: Sequence[str]) -> list[str]:
    """The columns to read. Every one that is not there is named at once, with what may be meant."""
    wanted = [smiles, *(name for name in asked if name != smiles)]
    missing = [name for name in wanted if name not in there]
    if missing:
        meant = {name: near(name, there, cutoff=0.5)[:2] for name in missing}
        likely = dict.fromkeys(one for found in meant.values() for one in found)
        hint = f"did you mean {' or '.join(map(repr, likely))}? " if likely else ""
        key = f'; say smiles = "{(meant[smiles] or ["…"])[0]}" under [[datasets]]' if smiles in missing else ""
        more = f" and {len(there) - _LISTED} more" if len(there) > _LISTED else ""
        raise BadOption(
            f"{path} has no column {', '.join(map(repr, missing))}; {hint}it has {', '.join(there[:_LISTED])}{more}{key}"
        )
    return wanted if asked else [smiles, *(name for name in there if name != smiles)]


def column_of(values: Iterable[Any]) -> Column:
    """Numbers where all that is not blank is a number, else text."""
    kept = [None if value is None or (isinstance(value, str) and not value.strip()) else value for value in values]
    try:
        return np.array([np.nan if value is None else float(value) for value in kept], dtype=np.float64)
    except ValueError:
        return _text(kept)


def _text(texts: Iterable[Any]) -> Column:
    return np.array(["" if text is None else str(text).strip() for text in texts], dtype=object)


def _of_arrow(column: Any) -> Column | None:
    """None for a type that is neither text nor a number nor a truth value. Text stays text, whatever it says."""
    import pyarrow.types as kind

    if kind.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if kind.is_string(column.type) or kind.is_large_string(column.type) or kind.is_string_view(column.type):
        return _text(column.to_pylist())
    if kind.is_integer(column.type) or kind.is_floating(column.type) or kind.is_boolean(column.type):
        return column_of(column.to_pylist())
    return None
