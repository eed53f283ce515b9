"""SMILES to RDKit molecules, for the encoders that start there.

Reading is most of what a fingerprint costs: RDKit perceives rings and aromaticity for every molecule.
"""

from collections.abc import Iterable
from typing import Any

from brimful.errors import MissingExtra


def parsed(smiles: Iterable[str]) -> tuple[list[Any], dict[int, str]]:
    """The molecules, None where RDKit cannot read one, and those positions with a reason."""
    try:
        from rdkit import Chem, rdBase
    except ImportError:
        raise MissingExtra("rdkit", "mol") from None

    with rdBase.BlockLogs():  # the reason is ours to tell, once
        molecules = [Chem.MolFromSmiles(one) for one in smiles]
    return molecules, {at: "RDKit cannot read its SMILES" for at, one in enumerate(molecules) if one is None}


def rdkit_version() -> str:
    """Part of a fingerprint: canonical SMILES and descriptors have changed between releases."""
    try:
        from rdkit import rdBase
    except ImportError:
        raise MissingExtra("rdkit", "mol") from None
    return f"rdkit {rdBase.rdkitVersion}"
