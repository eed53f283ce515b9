"""Features that are there already: a `.npy` or `.parquet` with one row for each row of the molecules' file.

All rows of the file, unreadable molecules included, so that row 17 here is row 17 there. Both numbers of rows are compared
before anything is used; that the order is the same is the user's word. A `.npy` is memory-mapped and read batch by batch.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from brimful.errors import BadData, in_one_line
from brimful.tasks.heads.features.cache import file_hash
from brimful.tasks.heads.features.protocol import Encoded, Matrix
from brimful.units import show_rows

if TYPE_CHECKING:
    from brimful.tasks.heads.molecules.molecules import Molecules


@dataclass(frozen=True, kw_only=True)
class Given:
    """Rows of a file of the user's."""

    file: Path

    batch = 4096
    reads_rows = True

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def molecule_bytes(self) -> int:
        return max(1, 3 * self._matrix.shape[1] * 8)

    def fingerprint(self) -> str:
        return f"given {file_hash(self.file)}"

    def encode(self, molecules: "Molecules") -> Encoded:
        if len(self._matrix) != molecules.rows_in:
            raise BadData(
                f"{self.file} has {show_rows(len(self._matrix))} of features and {molecules.source} has {show_rows(molecules.rows_in)}; give one row of features for each row of that file, unreadable molecules included"
            )
        rows = self._matrix[molecules.rows]
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite and is named as such
            return Encoded(matrix=rows.astype(np.uint8 if rows.dtype in (np.uint8, np.bool_) else np.float32))

    @cached_property
    def _matrix(self) -> Matrix:
        matrix = _read(self.file)
        if matrix.ndim != 2 or 0 in matrix.shape:
            raise BadData(
                f"{self.file} has the shape {matrix.shape}; features are rows × columns, at least one of each"
            )
        if matrix.dtype.kind not in "fiub":
            raise BadData(f"{self.file} holds {matrix.dtype}, which are not real numbers; write float32 or uint8")
        return matrix


def _read(file: Path) -> Matrix:
    try:
        if file.suffix == ".parquet":
            return _parquet(file)
        matrix: Matrix = np.load(file, mmap_mode="r", allow_pickle=False)
        return matrix
    except (OSError, ValueError, EOFError) as error:
        raise BadData(f"{file} cannot be read as features ({in_one_line(error)}); give a .npy or .parquet of numbers") from error  # fmt: skip


def _parquet(file: Path) -> Matrix:
    """All columns in their order; or the only column, where it holds a list of numbers in each row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    only = table.schema.field(0).type if table.num_columns == 1 else None
    if only is not None and (
        pa.types.is_list(only) or pa.types.is_large_list(only) or pa.types.is_fixed_size_list(only)
    ):
        lists = table.column(0).to_pylist()
        widths = {len(one) if one is not None else 0 for one in lists}
        if len(widths) > 1:
            raise BadData(
                f"{file} has lists of {min(widths)} to {max(widths)} numbers; features are as many in every row"
            )
        return np.array(lists, dtype=np.float32)
    other = [one.name for one in table.schema if not _is_number(one.type)]
    if other:
        raise BadData(
            f"{file} has columns that are not numbers ({', '.join(other[:3])}); keep the columns of features only"
        )
    columns = [table.column(at).to_numpy() for at in range(table.num_columns)]
    return np.stack(columns, axis=1) if columns else np.empty((table.num_rows, 0))


def _is_number(kind: object) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))
