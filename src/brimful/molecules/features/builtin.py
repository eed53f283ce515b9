"""Extended-connectivity fingerprints: RDKit's Morgan generator, radius 2 and 2,048 bits (ECFP4) where nothing is asked.

The bits of a batch are made in one call and unpacked from their packed bytes: 0.040 ms a molecule where asking for NumPy
arrays one by one takes 0.047, and the same matrix; reading the SMILES takes 0.1. Stored as uint8: 41,000 molecules are 80 MiB, not 320.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brimful.errors import BadModel, BadOption, in_one_line
from brimful.molecules.dataset import rdkit_version
from brimful.molecules.features.cache import file_hash
from brimful.molecules.features.encoder import Encoded, Matrix, labelled, parsed

if TYPE_CHECKING:
    from brimful.molecules.dataset import Molecules

# ChemNet: what a network trained on bioactivities holds in its last layer, 512 numbers; weights in the wheel of `fcd_torch`.
#
# The package builds the network from its weight file; we read that file with `weights_only=True` and load each layer once
# more with `strict=True`, so that no tensor can be missing, left over or of another shape. ChemNet reads the canonical
# SMILES as characters, at most 349 of them: a longer molecule would be cut, so it is left out and told. It stops at the
# first dot, so of a salt it sees the part that comes first: that is what ChemNet is, and it is told how many those were.


WEIGHTS = "ChemNet_v0.13_pretrained.pt"
LONGEST = 349
"""Symbols ChemNet has room for, the end of the SMILES not counted."""
COLUMNS = 512
PARTIAL = "of several parts: ChemNet reads the first part of the canonical SMILES only"


@dataclass(frozen=True, kw_only=True)
class ChemNet:
    """Learned features; on `device`, in float32 with TF32 off."""

    device: str = "cpu"

    name = "chemnet"
    batch = 256
    molecule_bytes = 1_500_000
    reads_rows = False

    def fingerprint(self) -> str:
        package = _package()
        return f"chemnet fcd_torch weights {file_hash(package / WEIGHTS)} rdkit {rdkit_version()}"

    def encode(self, molecules: "Molecules") -> Encoded:
        texts, failed = _texts(molecules)
        matrix = np.zeros((len(texts), COLUMNS), dtype=np.float32)
        readable = [at for at in range(len(texts)) if at not in failed]
        if readable:
            matrix[readable] = self._rows([texts[at] for at in readable])
        parts = sum("." in texts[at] for at in readable)
        return Encoded(matrix=matrix, failed=failed, remarks={PARTIAL: parts} if parts else {})

    def _rows(self, texts: list[str]) -> Matrix:
        import torch
        from fcd_torch.utils import SmilesDataset

        letters = SmilesDataset(texts, canonize=False)
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            batch = torch.from_numpy(np.stack([letters[at] for at in range(len(texts))]).astype(np.float32))
            rows: Matrix = self._model(batch.transpose(1, 2).to(self.device)).cpu().numpy()
        return rows

    @cached_property
    def _model(self) -> Any:
        return load(_package() / WEIGHTS).to(self.device)


def load(weights: Path) -> Any:
    """ChemNet in evaluation mode, every tensor from the file."""
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
            f"the weights of chemnet in {weights} cannot be used ({in_one_line(error)}); install them anew: pip install --force-reinstall --no-deps fcd_torch"
        ) from error
    return model


def _package() -> Path:
    from importlib.util import find_spec

    found = find_spec("fcd_torch")
    if found is None or not found.submodule_search_locations:
        raise BadOption(
            "encoder chemnet needs fcd_torch, which is not installed; install it beside brimful[mol] with: pip install --no-deps fcd_torch"
        )
    return Path(found.submodule_search_locations[0])


def _texts(molecules: "Molecules") -> tuple[list[str], dict[int, str]]:
    """The canonical SMILES, which ChemNet was trained on, and which of them it cannot take."""
    mols, failed = parsed(molecules.smiles)
    from rdkit import Chem

    texts = ["" if mol is None else Chem.MolToSmiles(mol) for mol in mols]
    for at, text in enumerate(texts):
        symbols = _symbols(text.partition(".")[0])
        if symbols > LONGEST:
            failed[at] = f"its SMILES has {symbols} symbols and ChemNet reads {LONGEST}"
        elif not text and at not in failed:
            failed[at] = "it has no atoms"
    return texts, failed


def _symbols(text: str) -> int:
    """As ChemNet counts: Cl, Br and Si are one symbol."""
    return len(text) - sum(text.count(second) for second in "ril")


# RDKit's list of 2D descriptors, less those that are not a usable number for every molecule.
#
# Twelve are NaN for molecules with metals and other uncommon atoms (the BCUT and the partial-charge ones: a fifth of a
# sample of HIV and Tox21 chosen for such atoms), and Ipc grows to 1e84. They are left out by name and not by looking at the
# data, so a column means the same in every dataset and no test molecule has a say in which columns there are. With
# RDKit 2026.9 that leaves 204 of 217. A molecule that has no finite value in one of these is left out and told.
#
# Values are RDKit's own; the head's trainer standardises them, on in-distribution training molecules only.


LEFT_OUT = (
    *("BCUT2D_MWHI", "BCUT2D_MWLOW", "BCUT2D_CHGHI", "BCUT2D_CHGLO"),
    *("BCUT2D_LOGPHI", "BCUT2D_LOGPLOW", "BCUT2D_MRHI", "BCUT2D_MRLOW"),
    *("MaxPartialCharge", "MinPartialCharge", "MaxAbsPartialCharge", "MinAbsPartialCharge"),
    "Ipc",
)
MOST_DESCRIPTORS = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Descriptors:
    """Weights, counts, surface areas, fragment counts: one column each."""

    name = "descriptors"
    batch = 256
    molecule_bytes = 50_000
    reads_rows = False

    def fingerprint(self) -> str:
        return f"descriptors rdkit {rdkit_version()} without {' '.join(LEFT_OUT)}"

    def encode(self, molecules: "Molecules") -> Encoded:
        mols, failed = parsed(molecules.smiles)
        functions = used()
        matrix = np.zeros((len(mols), len(functions)), dtype=np.float32)
        for at, mol in enumerate(mols):
            if at not in failed:
                row = _row(mol, functions)
                if isinstance(row, str):
                    failed[at] = row
                else:
                    matrix[at] = row
        return Encoded(matrix=matrix, failed=failed)


def used() -> list[tuple[str, Callable[[Any], float]]]:
    """Name and function of each column."""
    from rdkit.Chem import Descriptors as rdkit_descriptors

    return [(name, function) for name, function in rdkit_descriptors.descList if name not in LEFT_OUT]


def _row(mol: Any, functions: list[tuple[str, Callable[[Any], float]]]) -> Matrix | str:
    """The values, or why there are none."""
    values = np.empty(len(functions), dtype=np.float32)
    for at, (name, function) in enumerate(functions):
        try:
            value = float(function(mol))
        except Exception as error:
            return f"its descriptor {name} cannot be computed ({in_one_line(error)})"
        if not abs(value) <= MOST_DESCRIPTORS:  # NaN compares as false as well
            return f"its descriptor {name} is {value:g}"
        values[at] = value
    return values


MOST = 255
"""The largest count a byte holds; no fragment of a drug-like molecule comes near it."""


@dataclass(frozen=True, kw_only=True)
class Ecfp:
    """Which fragments a molecule has, hashed to `bits` places."""

    radius: int = 2
    bits: int = 2048
    counts: bool = False
    """How often each fragment is there instead of whether it is, up to 255."""

    batch = 4096
    reads_rows = False

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.radius <= 16:
            problems.append(f"radius is {self.radius} and should be a whole number from 0 to 16, as in radius = 2")
        if not 8 <= self.bits <= 2**20 or self.bits % 8:
            problems.append(f"bits is {self.bits} and should be a multiple of 8 up to 1,048,576, as in bits = 2048")
        if problems:
            raise BadOption("encoder ecfp: " + "; ".join(problems))

    @property
    def name(self) -> str:
        return labelled("ecfp", self, "radius", "bits", "counts")

    @property
    def molecule_bytes(self) -> int:
        return (
            30_000 + 2 * self.bits
        )  # a parsed molecule takes 10 to 20 kB; the bits are there packed, unpacked and kept

    def fingerprint(self) -> str:
        return f"ecfp radius={self.radius} bits={self.bits} counts={self.counts} rdkit {rdkit_version()}"

    def encode(self, molecules: "Molecules") -> Encoded:
        mols, failed = parsed(molecules.smiles)
        matrix = np.zeros((len(mols), self.bits), dtype=np.uint8)
        readable = [at for at in range(len(mols)) if at not in failed]
        if readable:
            matrix[readable] = self._rows([mols[at] for at in readable])
        return Encoded(matrix=matrix, failed=failed)

    def _rows(self, mols: list[Any]) -> Matrix:
        from rdkit.Chem import rdFingerprintGenerator
        from rdkit.DataStructs import BitVectToBinaryText

        morgan = rdFingerprintGenerator.GetMorganGenerator(radius=self.radius, fpSize=self.bits)
        if self.counts:
            return np.stack([np.minimum(morgan.GetCountFingerprintAsNumPy(mol), MOST) for mol in mols]).astype(np.uint8)
        packed = b"".join(BitVectToBinaryText(one) for one in morgan.GetFingerprints(mols, numThreads=1))
        return np.unpackbits(np.frombuffer(packed, np.uint8).reshape(len(mols), -1), axis=1, bitorder="little")
