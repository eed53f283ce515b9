"""What RDKit says of molecules, and its cache."""

from pathlib import Path

import numpy as np
import pytest

from brimful.errors import BadData
from brimful.molecules import dataset as module
from brimful.molecules.dataset import Facts, Molecules, examined, facts_of

pytest.importorskip("rdkit")

SMILES = ["OCC", "Cc1ccccc1", "c1ccc(cc1)C1CCNCC1", "C[C@H](N)O"]


def by_hand(smiles: list[str]) -> Molecules:
    return Molecules(
        source="here.csv",
        smiles=np.array(smiles, dtype=object),
        rows=np.arange(len(smiles)),
        columns={},
        rows_in=len(smiles),
    )


def same(one: Facts, other: Facts) -> bool:
    return all(getattr(one, name).tolist() == getattr(other, name).tolist() for name in Facts.__dataclass_fields__)


def test_facts_are_canonical_smiles_scaffold_atoms_and_rings() -> None:
    facts = facts_of(by_hand(SMILES))
    assert facts.canonical.tolist()[:2] == ["CCO", "Cc1ccccc1"]
    assert facts.scaffold.tolist() == ["", "c1ccccc1", "c1ccc(C2CCNCC2)cc1", ""]
    assert facts.heavy_atoms.tolist() == [3, 7, 12, 4]
    assert facts.rings.tolist() == [0, 1, 2, 0]


def test_mirror_images_count_as_one_molecule() -> None:
    facts = facts_of(by_hand(["C[C@H](N)O", "C[C@@H](N)O", "CC(N)O"]))
    assert len(set(facts.canonical)) == 1


def test_the_second_time_they_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = facts_of(by_hand(SMILES), cache=tmp_path)
    monkeypatch.setattr(module, "examine", lambda *_: pytest.fail("asked RDKit again"))
    assert same(facts_of(by_hand(SMILES), cache=tmp_path), first)


def test_the_cache_remembers_what_could_not_be_read(tmp_path: Path) -> None:
    _, before = examined(["CCO", "CC("], cache=tmp_path)
    _, again = examined(["CCO", "CC("], cache=tmp_path)
    assert before == again == {1: "syntax error around position 3"}


@pytest.mark.parametrize("other", [[*SMILES[:-1], "CCC"], SMILES[:-1], SMILES[::-1]])
def test_other_molecules_never_meet_the_cache_of_these(tmp_path: Path, other: list[str]) -> None:
    examined(SMILES, cache=tmp_path)
    assert same(examined(other, cache=tmp_path)[0], examined(other)[0])
    assert len(list(tmp_path.iterdir())) == 2


def test_another_rdkit_never_meets_this_ones_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examined(SMILES, cache=tmp_path)
    monkeypatch.setattr(module, "rdkit_version", lambda: "3000.1")
    examined(SMILES, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    first, _ = examined(SMILES, cache=tmp_path)
    file = next(tmp_path.iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert same(examined(SMILES, cache=tmp_path)[0], first)
    assert len(file.read_bytes()) == len(whole)


def test_a_full_disk_costs_the_cache_and_not_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object, path: Path, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    told: list[str] = []
    facts, _ = examined(SMILES, cache=tmp_path, say=told.append)
    assert len(facts) == len(SMILES)
    assert told[-1] == "what RDKit said is not kept for the next time: OSError: [Errno 28] No space left on device"
    assert not list(tmp_path.iterdir())


def test_a_smiles_that_cannot_be_read_is_named() -> None:
    with pytest.raises(BadData, match="here.csv: RDKit cannot use 'CC\\(' \\(syntax error around position 3\\)"):
        facts_of(by_hand(["CCO", "CC("]))
