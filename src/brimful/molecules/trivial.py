"""The baselines that expose a leaky split: what a count of atoms or rings, or a look at the nearest molecule, tells already.

A size split is solved by counting atoms (AUROC 1.000); of the .79 that a trained head reaches on HIV by scaffold, counting
rings reaches .69. Only what a method adds to the best of these is worth a figure, so they stand in every table.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.errors import BadOption, MissingExtra
from brimful.molecules.dataset import Facts, Molecules
from brimful.molecules.metrics import auroc
from brimful.molecules.splits import Places, Split

TRIVIAL = ("heavy-atoms", "rings", "nearest-train")
_RADIUS, _BITS = 2, 2048
"""ECFP4."""

Scores = npt.NDArray[np.float64]


def trivial_scores(name: str, molecules: Molecules, facts: Facts, split: Split) -> tuple[Scores, Scores, str]:
    """Scores of the ID and of the OOD test molecules, higher for what looks OOD, and how they came about."""
    if name == "nearest-train":
        return _nearest_train(molecules, split)
    counts = {"heavy-atoms": facts.heavy_atoms, "rings": facts.rings}.get(name)
    if counts is None:
        raise BadOption(f"there is no trivial baseline {name!r}; there are {', '.join(TRIVIAL)}")
    sign, remark = _orientation(counts, split, name.replace("-", " "))
    return sign * counts[split.id.test].astype(np.float64), sign * counts[split.ood.test].astype(np.float64), remark


def _orientation(counts: npt.NDArray[np.int64], split: Split, what: str) -> tuple[float, str]:
    """Whether more or fewer looks OOD: decided on the validation molecules, as a trained method would have to."""
    seen = auroc(counts[split.id.valid].astype(np.float64), counts[split.ood.valid].astype(np.float64))
    sign, word = (1.0, "more") if seen >= 0.5 else (-1.0, "fewer")
    return sign, f"{word} {what} look OOD (on the validation molecules: AUROC {max(seen, 1 - seen):.3f})"


def _nearest_train(molecules: Molecules, split: Split) -> tuple[Scores, Scores, str]:
    known = _fingerprints(molecules, split.id.train)
    ids, ood = (_distance(_fingerprints(molecules, places), known) for places in (split.id.test, split.ood.test))
    return (
        ids,
        ood,
        f"1 − Tanimoto similarity (ECFP4, {_BITS} bits) to the nearest of {len(known):,} ID training molecules",
    )


def _fingerprints(molecules: Molecules, places: Places) -> list[Any]:
    try:
        from rdkit import Chem, rdBase
        from rdkit.Chem import rdFingerprintGenerator
    except ImportError:
        raise MissingExtra("rdkit", "mol") from None
    generator = rdFingerprintGenerator.GetMorganGenerator(radius=_RADIUS, fpSize=_BITS)
    with rdBase.BlockLogs():
        return [generator.GetFingerprint(Chem.MolFromSmiles(molecules.smiles[place])) for place in places]


def _distance(asked: list[Any], known: list[Any]) -> Scores:
    from rdkit import DataStructs

    return np.array([1 - max(DataStructs.BulkTanimotoSimilarity(one, known)) for one in asked], dtype=np.float64)
