"""Encoders that run in this process: fingerprints, descriptors, ChemNet, and the user's own files and functions."""

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

from brimful.errors import BadData, BadModel, BadOption, in_one_line, kind_of
from brimful.files import file_sha256
from brimful.molecules.dataset import rdkit_version
from brimful.molecules.features.encoder import Encoded, Matrix, parse_molecules, show_name
from brimful.units import show_rows

if TYPE_CHECKING:
    from brimful.molecules.dataset import Molecules


@dataclass(frozen=True, kw_only=True)
class Ecfp:
    """Extended-connectivity fingerprints: RDKit's Morgan generator, by default radius 2 and 2,048 bits (ECFP4).

    The bits of a batch are made in one call and unpacked from their packed bytes: 0.040 ms per molecule where NumPy arrays
    one by one take 0.047 and reading the SMILES 0.1. They are stored as uint8: 41,000 molecules take 80 MiB, not 320.
    """

    radius: int = 2
    bits: int = 2048
    counts: bool = False
    """How often each fragment occurs instead of whether it does, up to 255."""

    batch = 4096
    reads_rows = False

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.radius <= 16:
            problems.append(f"radius must be a whole number from 0 to 16, not {self.radius}")
        if not 8 <= self.bits <= 2**20 or self.bits % 8:
            problems.append(f"bits must be a multiple of 8 up to 1,048,576, not {self.bits}")
        if problems:
            raise BadOption(f"encoder ecfp: {'; '.join(problems)}.")

    @property
    def name(self) -> str:
        return show_name("ecfp", self, "radius", "bits", "counts")

    @property
    def molecule_bytes(self) -> int:
        return 30_000 + 2 * self.bits  # a parsed molecule takes 10 to 20 kB; the bits exist packed and unpacked

    def fingerprint(self) -> str:
        return f"ecfp radius={self.radius} bits={self.bits} counts={self.counts} rdkit {rdkit_version()}"

    def encode(self, molecules: "Molecules") -> Encoded:
        mols, failed = parse_molecules(molecules.smiles)
        matrix = np.zeros((len(mols), self.bits), dtype=np.uint8)
        readable = [index for index in range(len(mols)) if index not in failed]
        if readable:
            matrix[readable] = self._rows([mols[index] for index in readable])
        return Encoded(matrix=matrix, failed=failed)

    def _rows(self, mols: list[Any]) -> Matrix:
        from rdkit.Chem import rdFingerprintGenerator
        from rdkit.DataStructs import BitVectToBinaryText

        morgan = rdFingerprintGenerator.GetMorganGenerator(radius=self.radius, fpSize=self.bits)
        if self.counts:
            return np.stack([np.minimum(morgan.GetCountFingerprintAsNumPy(mol), 255) for mol in mols]).astype(np.uint8)
        packed = b"".join(
            BitVectToBinaryText(fingerprint) for fingerprint in morgan.GetFingerprints(mols, numThreads=1)
        )
        return np.unpackbits(np.frombuffer(packed, np.uint8).reshape(len(mols), -1), axis=1, bitorder="little")


# ---- RDKit descriptors -----------------------------------------------------------------------------------------------------

EXCLUDED = (
    *("BCUT2D_MWHI", "BCUT2D_MWLOW", "BCUT2D_CHGHI", "BCUT2D_CHGLO"),
    *("BCUT2D_LOGPHI", "BCUT2D_LOGPLOW", "BCUT2D_MRHI", "BCUT2D_MRLOW"),
    *("MaxPartialCharge", "MinPartialCharge", "MaxAbsPartialCharge", "MinAbsPartialCharge"),
    "Ipc",
)
"""The first twelve are NaN for molecules with metals and other uncommon atoms (a fifth of a sample of HIV and Tox21 chosen
for such atoms), and Ipc grows to 1e84. They are excluded by name and not by looking at the data, so that a column means the
same in every dataset. With RDKit 2026.9 that leaves 204 of 217."""
_MAX_FLOAT = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Descriptors:
    """RDKit's 2D descriptors: weights, counts, surface areas, fragment counts, one column each.

    Values are RDKit's own; `prepare` standardises them. A molecule without a finite value in one column is left out.
    """

    name = "descriptors"
    batch = 256
    molecule_bytes = 50_000
    reads_rows = False

    def fingerprint(self) -> str:
        return f"descriptors rdkit {rdkit_version()} without {' '.join(EXCLUDED)}"

    def encode(self, molecules: "Molecules") -> Encoded:
        mols, failed = parse_molecules(molecules.smiles)
        functions = descriptor_functions()
        matrix = np.zeros((len(mols), len(functions)), dtype=np.float32)
        for index, mol in enumerate(mols):
            if index not in failed:
                row = _descriptor_row(mol, functions)
                if isinstance(row, str):
                    failed[index] = row
                else:
                    matrix[index] = row
        return Encoded(matrix=matrix, failed=failed)


def descriptor_functions() -> list[tuple[str, Callable[[Any], float]]]:
    """Name and function of each column."""
    from rdkit.Chem import Descriptors as rdkit_descriptors

    return [(name, function) for name, function in rdkit_descriptors.descList if name not in EXCLUDED]


def _descriptor_row(mol: Any, functions: list[tuple[str, Callable[[Any], float]]]) -> Matrix | str:
    """The values, or why there are none."""
    values = np.empty(len(functions), dtype=np.float32)
    for index, (name, function) in enumerate(functions):
        try:
            value = float(function(mol))
        except Exception as error:
            return f"its descriptor {name} cannot be computed ({in_one_line(error)})"
        if not abs(value) <= _MAX_FLOAT:  # also true for NaN
            return f"its descriptor {name} is {value:g}"
        values[index] = value
    return values


# ---- ChemNet ---------------------------------------------------------------------------------------------------------------

CHEMNET_WEIGHTS = "ChemNet_v0.13_pretrained.pt"
CHEMNET_SYMBOLS = 349
"""Symbols that ChemNet has room for, without the end symbol."""
FIRST_FRAGMENT_ONLY = "of several fragments: ChemNet reads the first fragment of the canonical SMILES only"


@dataclass(frozen=True, kw_only=True)
class ChemNet:
    """The last layer of a network trained on bioactivities, 512 numbers; on `device`, in float32 with TF32 off.

    ChemNet reads the canonical SMILES as characters, at most 349. A longer molecule would be truncated, so it is left
    out. ChemNet stops at the first dot, so of a salt it sees the first fragment only; a remark counts those.
    """

    device: str = "cpu"

    name = "chemnet"
    batch = 256
    molecule_bytes = 1_500_000
    reads_rows = False

    def fingerprint(self) -> str:
        return f"chemnet fcd_torch weights {file_sha256(_chemnet_folder() / CHEMNET_WEIGHTS)} rdkit {rdkit_version()}"

    def encode(self, molecules: "Molecules") -> Encoded:
        texts, failed = _chemnet_texts(molecules)
        matrix = np.zeros((len(texts), 512), dtype=np.float32)
        readable = [index for index in range(len(texts)) if index not in failed]
        if readable:
            matrix[readable] = self._rows([texts[index] for index in readable])
        several = sum("." in texts[index] for index in readable)
        return Encoded(matrix=matrix, failed=failed, remarks={FIRST_FRAGMENT_ONLY: several} if several else {})

    def _rows(self, texts: list[str]) -> Matrix:
        import torch
        from fcd_torch.utils import SmilesDataset

        letters = SmilesDataset(texts, canonize=False)
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            batch = torch.from_numpy(np.stack([letters[index] for index in range(len(texts))]).astype(np.float32))
            rows: Matrix = self._model(batch.transpose(1, 2).to(self.device)).cpu().numpy()
        return rows

    @cached_property
    def _model(self) -> Any:
        return load_chemnet(_chemnet_folder() / CHEMNET_WEIGHTS).to(self.device)


def load_chemnet(weights: Path) -> Any:
    """In evaluation mode. The package builds the network from its weight file; each layer is loaded again strictly."""
    import torch
    from fcd_torch.utils import load_imported_model
    from torch import nn

    try:
        layers = torch.load(weights, map_location="cpu", weights_only=True)
        model = load_imported_model(layers).eval()
        built = [layer for layer in model if isinstance(layer, (nn.Conv1d, nn.LSTM))]
        for layer, (_, (state, _, _)) in zip(built, layers, strict=True):
            layer.load_state_dict(state, strict=True)
    except Exception as error:
        raise BadModel(
            f"the weights of chemnet in {weights} cannot be used ({in_one_line(error)}). "
            "Try: `pip install --force-reinstall --no-deps fcd_torch`."
        ) from error
    return model


def _chemnet_folder() -> Path:
    package = importlib.util.find_spec("fcd_torch")
    if package is None or not package.submodule_search_locations:
        raise BadOption("encoder chemnet needs fcd_torch. Try: `pip install --no-deps fcd_torch`.")
    return Path(package.submodule_search_locations[0])


def _chemnet_texts(molecules: "Molecules") -> tuple[list[str], dict[int, str]]:
    """The canonical SMILES, which ChemNet was trained on, and which of them it cannot take."""
    mols, failed = parse_molecules(molecules.smiles)
    from rdkit import Chem

    texts = ["" if mol is None else Chem.MolToSmiles(mol) for mol in mols]
    for index, text in enumerate(texts):
        first = text.partition(".")[0]
        symbols = len(first) - sum(first.count(second) for second in "ril")  # Cl, Br and Si are one symbol
        if symbols > CHEMNET_SYMBOLS:
            failed[index] = f"its SMILES has {symbols} symbols and ChemNet reads {CHEMNET_SYMBOLS}"
        elif not text and index not in failed:
            failed[index] = "it has no atoms"
    return texts, failed


# ---- The user's own features -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FeatureFile:
    """A `.npy` or `.parquet` with one row for each row of the molecules' file, unreadable molecules included.

    The numbers of rows are compared before anything is used; that the order is the same cannot be checked. A `.npy` is
    memory-mapped and read batch by batch.
    """

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
        return f"given {file_sha256(self.file)}"

    def encode(self, molecules: "Molecules") -> Encoded:
        if len(self._matrix) != molecules.rows_in:
            raise BadData(
                f"{self.file} has {show_rows(len(self._matrix))} of features and {molecules.source} has "
                f"{show_rows(molecules.rows_in)}. Try: one row of features for each row, unreadable molecules included."
            )
        rows = self._matrix[molecules.rows]
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, which is then reported
            return Encoded(matrix=rows.astype(np.uint8 if rows.dtype in (np.uint8, np.bool_) else np.float32))

    @cached_property
    def _matrix(self) -> Matrix:
        try:
            if self.file.suffix == ".parquet":
                matrix = _read_parquet(self.file)
            else:
                matrix = np.load(self.file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise BadData(f"{self.file} cannot be read as features ({in_one_line(error)}). Try: a .npy or .parquet of numbers.") from error  # fmt: skip
        if matrix.ndim != 2 or 0 in matrix.shape:
            raise BadData(f"{self.file} has the shape {matrix.shape}. Try: rows × columns, at least one of each.")
        if matrix.dtype.kind not in "fiub":
            raise BadData(f"{self.file} holds {matrix.dtype}, not real numbers. Try: float32 or uint8.")
        return matrix


def _read_parquet(file: Path) -> Matrix:
    """All columns in their order; or the only column, where it holds a list of numbers in each row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, types = pq.read_table(file), pa.types
    only = table.schema.field(0).type if table.num_columns == 1 else None
    if only is not None and (types.is_list(only) or types.is_large_list(only) or types.is_fixed_size_list(only)):
        lists = table.column(0).to_pylist()
        widths = {len(row) if row is not None else 0 for row in lists}
        if len(widths) > 1:
            raise BadData(f"{file} has lists of {min(widths)} to {max(widths)} numbers. Try: as many in every row.")
        return np.array(lists, dtype=np.float32)
    numbers = (types.is_floating, types.is_integer, types.is_boolean)
    other = [column.name for column in table.schema if not any(is_number(column.type) for is_number in numbers)]
    if other:
        raise BadData(f"{file} has columns that are not numbers ({', '.join(other[:3])}). Try: remove them.")
    columns = [table.column(index).to_numpy() for index in range(table.num_columns)]
    return np.stack(columns, axis=1) if columns else np.empty((table.num_rows, 0))


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """`file.py:function`, called with a list of SMILES at a time; returns an array with a row for each.

    The file runs as a module of its own, with its folder importable. Its content is part of the cache key, so an edited
    function computes again; what it imports is not. What it prints goes to stderr: stdout is for results.
    """

    file: Path
    function: str

    batch = 1024
    molecule_bytes = 100_000
    reads_rows = False

    @property
    def name(self) -> str:
        return self.function

    def fingerprint(self) -> str:
        return f"function {self.function} {file_sha256(self.file)}"

    def encode(self, molecules: "Molecules") -> Encoded:
        function = self._function
        try:
            with redirect_stdout(sys.stderr):
                result = function(list(molecules.smiles))
        except (Exception, SystemExit) as error:
            raise BadData(
                f"{self.file}:{self.function} failed on a batch of {len(molecules)} SMILES ({in_one_line(error)}). Try: call it with them."
            ) from error
        return Encoded(matrix=self._array(result, len(molecules)))

    def _array(self, result: Any, count: int) -> Matrix:
        fix = f"Try: return an array of {count} rows, one for each SMILES."
        if hasattr(result, "detach"):  # a tensor
            result = result.detach().cpu().float().numpy()
        try:
            array = np.asarray(result)
        except Exception as error:
            raise BadData(f"{self.file}:{self.function} returned rows that do not form an array. {fix}") from error
        if array.dtype.kind not in "fiub":
            raise BadData(f"{self.file}:{self.function} returned {kind_of(result)} of {array.dtype}. {fix}")
        if array.ndim != 2 or len(array) != count or array.shape[1] == 0:
            raise BadData(f"{self.file}:{self.function} returned the shape {array.shape}. {fix}")
        with np.errstate(over="ignore"):  # reported as infinite
            return array.astype(np.uint8 if array.dtype in (np.uint8, np.bool_) else np.float32)

    @cached_property
    def _function(self) -> Callable[[list[str]], Any]:
        module = _import_file(self.file)
        function = getattr(module, self.function, None)
        if callable(function):
            return function
        own = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
        advice = " or ".join(own) or "define it"
        raise BadOption(f"there is no function {self.function!r} in {self.file}. Try: {advice}.")


def _import_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"brimful_features_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent.resolve()))
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # nothing is written to the user's folder
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise BadOption(f"{file} cannot be run ({in_one_line(error)}). Try: run it with Python alone.") from error
    finally:
        sys.dont_write_bytecode = before
    return module
