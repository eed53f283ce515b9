"""Features from a function of the user's: `file.py:function` takes a list of SMILES and returns an array, a row for each.

The file is run as a module of its own, with its folder importable, as a task's file is. Its content is part of the cache's
key: an edited function computes anew. What the function imports is not in the key, since nobody can tell what that is.
What it prints goes to stderr: stdout is for results.
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
from brimful.tasks.heads.features.cache import file_hash
from brimful.tasks.heads.features.protocol import Encoded, Matrix

if TYPE_CHECKING:
    from brimful.tasks.heads.molecules.molecules import Molecules


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
