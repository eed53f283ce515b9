"""What an encoder is, and what comes of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from brimful.molecules.dataset import rdkit_version

if TYPE_CHECKING:
    from brimful.molecules.dataset import Molecules

# Whether features are bits. Their values tell, not their dtype: counts are often bytes, and bits are often floats.


ROWS = 512
"""Looked at together: most features that are no bits show it in the first ones."""


def only_bits(matrix: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Nothing but 0 and 1, which need no unit."""
    parts = (matrix[start : start + ROWS] for start in range(0, len(matrix), ROWS))
    return all(bool(((part == 0) | (part == 1)).all()) for part in parts)


# SMILES to RDKit molecules, for the encoders that start there.
#
# Reading is most of what a fingerprint costs: RDKit perceives rings and aromaticity for every molecule.


def parsed(smiles: Iterable[str]) -> tuple[list[Any], dict[int, str]]:
    """The molecules, None where RDKit cannot read one, and those positions with a reason."""
    rdkit_version()  # which says how to install it
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():  # the reason is ours to tell, once
        molecules = [Chem.MolFromSmiles(one) for one in smiles]
    return molecules, {at: "RDKit cannot read its SMILES" for at, one in enumerate(molecules) if one is None}


Matrix = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One batch: a row for each molecule, float32 or uint8. Rows of failed molecules may hold anything."""

    matrix: Matrix
    failed: Mapping[int, str] = field(default_factory=dict)
    """Position in the batch, and why there are no features."""
    remarks: Mapping[str, int] = field(default_factory=dict)
    """What the user should know of molecules that were encoded, and of how many it holds."""


class Encoder(Protocol):
    """From molecules to rows of numbers. Making one is cheap: weights are read at the first `encode`."""

    @property
    def name(self) -> str:
        """`ecfp`, `ecfp bits=1024`, a file's stem: what tables call it."""

    @property
    def batch(self) -> int:
        """Molecules a batch, where memory allows."""

    @property
    def molecule_bytes(self) -> int:
        """Working memory that one more molecule in a batch takes, rounded up from what was measured."""

    @property
    def reads_rows(self) -> bool:
        """Whether the row of a molecule in its file matters, and not only its SMILES."""

    def fingerprint(self) -> str:
        """Everything that changes the output: options, versions, a hash of the weights."""

    def encode(self, molecules: "Molecules") -> Encoded:
        """The features of one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The features of a set of molecules, in its order, memory-mapped."""

    matrix: Matrix
    """float32, or uint8 for fingerprints; C order. The rows of failed molecules are NaN."""
    failed: Mapping[int, str]
    """Position among the molecules, and why there are no features."""
    encoder: str
    seconds: float
    """Measured, of the computation, whether it was now or by the run that filled the cache."""
    cached: bool
    remarks: tuple[str, ...] = ()
    """Sentences on molecules that were encoded, but not as one might think."""

    @property
    def kept(self) -> Matrix:
        """Positions of the molecules that have features."""
        return np.setdiff1d(np.arange(len(self.matrix)), np.fromiter(self.failed, dtype=np.int64))


def labelled(name: str, encoder: Any, *options: str) -> str:
    """`ecfp`, or `ecfp bits=1024` where an option is not at its default."""
    defaults = {one.name: one.default for one in fields(encoder)}
    told = [f"{one}={_shown(getattr(encoder, one))}" for one in options if getattr(encoder, one) != defaults[one]]
    return " ".join([name, *told])


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
