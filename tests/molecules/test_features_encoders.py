"""ECFP, descriptors, and finding an encoder by what the user wrote."""

import sys

import numpy as np
import pytest

from brimful.errors import BadOption, MissingExtra
from brimful.molecules.dataset import Molecules
from brimful.molecules.features.builtin import LEFT_OUT, used
from brimful.molecules.features.compute import ENCODERS, load_encoder

ASPIRIN, BENZENE, COPPER = "CC(=O)Oc1ccccc1C(=O)O", "c1ccccc1", "CCC1=[O+][Cu-3]2([O+]=C(CC)C1)[O+]=C(CC)CC(CC)=[O+]2"


def molecules(*smiles):
    count = len(smiles)
    return Molecules(
        source="some.csv", smiles=np.array(smiles, dtype=object), rows=np.arange(count), columns={}, rows_in=count
    )


@pytest.mark.parametrize("options", [{}, {"radius": 3, "bits": 512}])
def test_ecfp_is_rdkits_morgan_fingerprint(options):
    from rdkit import Chem
    from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator

    morgan = GetMorganGenerator(radius=options.get("radius", 2), fpSize=options.get("bits", 2048))
    matrix = load_encoder({"name": "ecfp", **options}).encode(molecules(ASPIRIN, BENZENE)).matrix
    assert matrix.dtype == np.uint8
    for row, smiles in zip(matrix, (ASPIRIN, BENZENE), strict=True):
        np.testing.assert_array_equal(row, morgan.GetFingerprintAsNumPy(Chem.MolFromSmiles(smiles)))


def test_ecfp_counts_how_often_a_fragment_is_there():
    matrix = load_encoder({"name": "ecfp", "counts": True, "radius": 0}).encode(molecules("C" * 300, BENZENE)).matrix
    assert matrix.dtype == np.uint8
    assert matrix[0].max() == 255  # 298 like carbon atoms do not wrap around
    assert matrix[1].max() == 6


def test_ecfp_fails_a_molecule_alone():
    encoded = load_encoder("ecfp").encode(molecules(BENZENE, "not one", ASPIRIN))
    assert encoded.failed == {1: "RDKit cannot read its SMILES"}
    assert encoded.matrix[[0, 2]].any(axis=1).all()


def test_descriptors_are_finite_where_rdkit_has_nan():
    encoded = load_encoder("descriptors").encode(molecules(COPPER, ASPIRIN))
    assert encoded.failed == {}
    assert encoded.matrix.dtype == np.float32
    assert encoded.matrix.shape == (2, len(used()))
    assert np.isfinite(encoded.matrix).all()


def test_descriptors_keep_rdkits_names_and_values():
    from rdkit import Chem
    from rdkit.Chem import Descriptors

    names = [name for name, _ in used()]
    known = {name for name, _ in Descriptors.descList}
    assert set(LEFT_OUT) <= known
    assert set(names) == known - set(LEFT_OUT)
    row = load_encoder("descriptors").encode(molecules(ASPIRIN)).matrix[0]
    assert row[names.index("MolWt")] == pytest.approx(Descriptors.MolWt(Chem.MolFromSmiles(ASPIRIN)))


def test_a_molecule_without_a_finite_descriptor_is_left_out_by_name(monkeypatch):
    from rdkit.Chem import Descriptors

    odd = [("Odd", lambda mol: 1e300 if mol.GetNumAtoms() == 6 else 1.0), ("Bad", _fails_on_copper)]
    monkeypatch.setattr(Descriptors, "descList", odd)
    failed = load_encoder("descriptors").encode(molecules(ASPIRIN, BENZENE, COPPER)).failed
    assert failed == {
        1: "its descriptor Odd is 1e+300",
        2: "its descriptor Bad cannot be computed (ValueError: a metal)",
    }


def _fails_on_copper(mol):
    if any(atom.GetSymbol() == "Cu" for atom in mol.GetAtoms()):
        raise ValueError("a metal")
    return 0.0


def test_rdkit_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(MissingExtra, match=r"pip install 'brimful\[mol\]'"):
        load_encoder("ecfp").encode(molecules(BENZENE))


def test_a_name_tells_options_that_are_not_the_default():
    assert load_encoder({"name": "ecfp", "bits": 2048}).name == "ecfp"
    assert load_encoder({"name": "ecfp", "bits": 1024, "counts": True}).name == "ecfp bits=1024 counts=true"


def test_every_option_is_in_the_fingerprint():
    asked = [{}, {"radius": 3}, {"bits": 1024}, {"counts": True}]
    assert len({load_encoder({"name": "ecfp", **one}).fingerprint() for one in asked}) == len(asked)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("ecpf", "unknown encoder 'ecpf'.*did you mean ecfp?"),
        ("wholly-else", "there are ecfp, descriptors, chemnet, minimol, unimol, a .npy"),
        ({"name": "ecfp", "bit": 64}, "no option 'bit'; its options are radius, bits, counts; did you mean bits?"),
        ({"name": "descriptors", "bits": 64}, "no option 'bits'; it has none"),
        ({"name": "ecfp", "bits": "64"}, "bits is '64' and should be a whole number"),
        ({"name": "ecfp", "bits": True}, "bits is True and should be a whole number"),
        ({"name": "ecfp", "counts": 1}, "counts is 1 and should be true or false"),
        ({"name": "ecfp", "bits": 1001, "radius": -1}, "radius is -1 .*; bits is 1001 and should be a multiple of 8"),
        ({"bits": 64}, "a name or a table with one"),
        ("missing.npy", "missing.npy: there is no such file"),
        ("missing.py:encode", "missing.py: there is no such file"),
        ("missing.py", "name the function in the file, as in missing.py:encode"),
        ({"name": "missing.npy", "bits": 8}, "takes no options, and bits was given"),
    ],
)
def test_what_cannot_be_an_encoder_is_told_in_one_sentence(asked, sentence):
    with pytest.raises(BadOption, match=sentence):
        load_encoder(asked)


def test_encoders_are_those_that_load():
    assert ENCODERS == ("ecfp", "descriptors", "chemnet", "minimol", "unimol")
    assert [load_encoder(name).name for name in ENCODERS] == list(ENCODERS)
