"""Features that are there already: a `.npy` or `.parquet` with one row for each row of the molecules' file.

All rows of the file, unreadable molecules included, so that row 17 here is row 17 there. Both numbers of rows are compared
before anything is used; that the order is the same is the user's word. A `.npy` is memory-mapped and read batch by batch.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from brimful.errors import BadData, BadOption, in_one_line
from brimful.molecules.features.cache import file_hash
from brimful.molecules.features.encoder import Encoded, Matrix
from brimful.units import show_rows

if TYPE_CHECKING:
    from brimful.molecules.dataset import Molecules

# Features from a function of the user's: `file.py:function` takes a list of SMILES and returns an array, a row for each.
#
# The file is run as a module of its own, with its folder importable, as a task's file is. Its content is part of the cache's
# key: an edited function computes anew. What the function imports is not in the key, since nobody can tell what that is.
# What it prints goes to stderr: stdout is for results.


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """A function, called with a batch of SMILES at a time."""

    file: Path
    function: str

    batch = 1024
    molecule_bytes = 100_000
    reads_rows = False

    @property
    def name(self) -> str:
        return self.function

    def fingerprint(self) -> str:
        return f"function {self.function} {file_hash(self.file)}"

    def encode(self, molecules: "Molecules") -> Encoded:
        function = self._function
        try:
            with redirect_stdout(sys.stderr):
                given = function(list(molecules.smiles))
        except (Exception, SystemExit) as error:
            raise BadData(
                f"{self.file}:{self.function} failed on a batch of {len(molecules)} SMILES: {in_one_line(error)}"
            ) from error
        return Encoded(matrix=self._array(given, len(molecules)))

    def _array(self, given: Any, count: int) -> Matrix:
        asked = f"it should return an array of {count} rows, one for each SMILES of its list"
        if hasattr(given, "detach"):  # a tensor
            given = given.detach().cpu().float().numpy()
        try:
            array = np.asarray(given)
        except Exception as error:
            raise BadData(f"{self.file}:{self.function} returned rows that do not make an array; {asked}") from error
        if array.dtype.kind not in "fiub":
            raise BadData(f"{self.file}:{self.function} returned a {type(given).__name__} of {array.dtype}; {asked}")
        if array.ndim != 2 or len(array) != count or array.shape[1] == 0:
            raise BadData(f"{self.file}:{self.function} returned the shape {array.shape}; {asked}")
        with np.errstate(over="ignore"):  # told as infinite
            return array.astype(np.uint8 if array.dtype in (np.uint8, np.bool_) else np.float32)

    @cached_property
    def _function(self) -> Callable[[list[str]], Any]:
        module = _run(self.file)
        found = getattr(module, self.function, None)
        if callable(found):
            return found
        own = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
        there = f"it has {', '.join(own)}" if own else "it defines no function"
        raise BadOption(f"there is no function {self.function!r} in {self.file}; {there}")


def _run(file: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"brimful_features_{file.stem}", file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    sys.path.insert(0, str(file.parent.resolve()))
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # the user's folder is not ours to write to
    try:
        with redirect_stdout(sys.stderr):
            found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise BadOption(f"{file} cannot be run: {in_one_line(error)}") from error
    finally:
        sys.dont_write_bytecode = before
    return module


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
