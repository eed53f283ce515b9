"""SMILES to RDKit molecules, for the encoders that start there.

Reading is most of what a fingerprint costs: RDKit perceives rings and aromaticity for every molecule.
"""

from collections.abc import Iterable
from typing import Any

from brimful.tasks.heads.molecules.examine import rdkit_version


def parsed(smiles: Iterable[str]) -> tuple[list[Any], dict[int, str]]:
    """The molecules, None where RDKit cannot read one, and those positions with a reason."""
    rdkit_version()  # which says how to install it
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():  # the reason is ours to tell, once
        molecules = [Chem.MolFromSmiles(one) for one in smiles]
    return molecules, {at: "RDKit cannot read its SMILES" for at, one in enumerate(molecules) if one is None}
