"""The baselines that any method has to beat."""

import numpy as np
import pytest

from brimful.errors import BadOption
from brimful.molecules.dataset import Facts, Molecules, facts_of
from brimful.molecules.splits import Part, Split
from brimful.molecules.trivial import TRIVIAL, trivial_scores

pytest.importorskip("rdkit")

# ID are benzenes with a chain, OOD piperidines; longer chains in the ID validation molecules than in the OOD ones.
ID = ["c1ccccc1C", "c1ccccc1CC", "c1ccccc1CCC", "c1ccccc1CCCC", "c1ccccc1CCCCC", "c1ccccc1CCCCCC"]
OOD = ["C1CCNCC1", "C1CCNCC1C", "OC1CCNCC1", "FC1CCNCC1", "C1CC1C1CCNCC1", "C1CCNCC1"]


@pytest.fixture(scope="module")
def case() -> tuple[Molecules, Facts, Split]:
    smiles = np.array(ID + OOD, dtype=object)
    molecules = Molecules(source="here", smiles=smiles, rows=np.arange(12), columns={}, rows_in=12)
    at = np.arange(12).reshape(2, 3, 2)
    sides = [Part(train=side[0], valid=side[1], test=side[2]) for side in at]
    return molecules, facts_of(molecules), Split(kind="random", id=sides[0], ood=sides[1])


def test_a_count_is_turned_so_that_ood_is_higher_on_the_validation_molecules(
    case: tuple[Molecules, Facts, Split],
) -> None:
    ids, ood, remark = trivial_scores("heavy-atoms", *case)
    assert ids.tolist() == [-11.0, -12.0] and ood.tolist() == [-9.0, -6.0]
    assert remark == "fewer heavy atoms look OOD (on the validation molecules: AUROC 1.000)"


def test_the_test_molecules_have_no_say_in_the_direction(case: tuple[Molecules, Facts, Split]) -> None:
    molecules, facts, split = case
    rings = facts.rings.copy()
    rings[split.id.valid], rings[split.ood.valid] = 5, 9
    rings[split.id.test], rings[split.ood.test] = 20, 0
    turned = Facts(canonical=facts.canonical, scaffold=facts.scaffold, heavy_atoms=facts.heavy_atoms, rings=rings)
    ids, ood, remark = trivial_scores("rings", molecules, turned, split)
    assert ids.tolist() == [20.0, 20.0] and ood.tolist() == [0.0, 0.0]
    assert remark.startswith("more rings look OOD")


def test_nearest_train_is_one_less_the_similarity_to_the_nearest_id_training_molecule(
    case: tuple[Molecules, Facts, Split],
) -> None:
    from rdkit import Chem, DataStructs
    from rdkit.Chem import rdFingerprintGenerator

    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=2048)
    bits = [generator.GetFingerprint(Chem.MolFromSmiles(one)) for one in ID + OOD]
    ids, ood, remark = trivial_scores("nearest-train", *case)
    for place, score in zip([4, 5, 10, 11], [*ids, *ood], strict=True):
        nearest = max(DataStructs.TanimotoSimilarity(bits[place], bits[known]) for known in (0, 1))
        assert score == pytest.approx(1 - nearest)
    assert max(ids) < min(ood)
    assert "2048 bits) to the nearest of 2 ID training molecules" in remark


def test_a_training_molecule_itself_is_at_distance_zero(case: tuple[Molecules, Facts, Split]) -> None:
    molecules, facts, split = case
    same = Split(kind="random", id=Part(train=split.id.test, valid=split.id.valid, test=split.id.test), ood=split.ood)
    assert trivial_scores("nearest-train", molecules, facts, same)[0].tolist() == [0.0, 0.0]


def test_an_unknown_baseline_is_told_with_those_there_are(case: tuple[Molecules, Facts, Split]) -> None:
    with pytest.raises(BadOption, match=f"no trivial baseline 'atoms'; there are {', '.join(TRIVIAL)}"):
        trivial_scores("atoms", *case)
