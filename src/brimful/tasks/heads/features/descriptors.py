"""RDKit's list of 2D descriptors, less those that are not a usable number for every molecule.

Twelve are NaN for molecules with metals and other uncommon atoms (the BCUT and the partial-charge ones: a fifth of a
sample of HIV and Tox21 chosen for such atoms), and Ipc grows to 1e84. They are left out by name and not by looking at the
data, so a column means the same in every dataset and no test molecule has a say in which columns there are. With
RDKit 2026.9 that leaves 204 of 217. A molecule that has no finite value in one of these is left out and told.

Values are RDKit's own; the head's trainer standardises them, on in-distribution training molecules only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from brimful.errors import in_one_line
from brimful.tasks.heads.features.protocol import Encoded, Matrix
from brimful.tasks.heads.features.smiles import parsed
from brimful.tasks.heads.molecules.examine import rdkit_version

if TYPE_CHECKING:
    from brimful.tasks.heads.molecules.molecules import Molecules

LEFT_OUT = (
    *("BCUT2D_MWHI", "BCUT2D_MWLOW", "BCUT2D_CHGHI", "BCUT2D_CHGLO"),
    *("BCUT2D_LOGPHI", "BCUT2D_LOGPLOW", "BCUT2D_MRHI", "BCUT2D_MRLOW"),
    *("MaxPartialCharge", "MinPartialCharge", "MaxAbsPartialCharge", "MinAbsPartialCharge"),
    "Ipc",
)
MOST = float(np.finfo(np.float32).max)


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
        if not abs(value) <= MOST:  # NaN compares as false as well
            return f"its descriptor {name} is {value:g}"
        values[at] = value
    return values
