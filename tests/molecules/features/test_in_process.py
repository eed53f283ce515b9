"""Loading an encoder from what the user wrote; ECFP, descriptors, ChemNet, feature files and functions."""

import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from brimful.errors import BadData, BadModel, BadOption, MissingExtra
from brimful.molecules.features.compute import compute_features
from brimful.molecules.features.encoder import ENCODERS, load_encoder
from brimful.molecules.features.in_process import CHEMNET_WEIGHTS, EXCLUDED, FeatureFile, descriptor_functions
from tests.molecules import support

ASPIRIN, BENZENE, COPPER = "CC(=O)Oc1ccccc1C(=O)O", "c1ccccc1", "CCC1=[O+][Cu-3]2([O+]=C(CC)C1)[O+]=C(CC)CC(CC)=[O+]2"


def molecules(*smiles):
    return support.molecules(smiles)


@pytest.mark.parametrize("options", [{}, {"radius": 3, "bits": 512}])
def test_ecfp_is_rdkits_morgan_fingerprint(options):
    from rdkit import Chem
    from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator

    morgan = GetMorganGenerator(radius=options.get("radius", 2), fpSize=options.get("bits", 2048))
    matrix = load_encoder({"name": "ecfp", **options}).encode(molecules(ASPIRIN, BENZENE)).matrix
    assert matrix.dtype == np.uint8
    for row, smiles in zip(matrix, (ASPIRIN, BENZENE), strict=True):
        np.testing.assert_array_equal(row, morgan.GetFingerprintAsNumPy(Chem.MolFromSmiles(smiles)))


def test_ecfp_counts_fragments():
    matrix = load_encoder({"name": "ecfp", "counts": True, "radius": 0}).encode(molecules("C" * 300, BENZENE)).matrix
    assert matrix.dtype == np.uint8
    assert matrix[0].max() == 255  # 298 like carbon atoms do not wrap around
    assert matrix[1].max() == 6


def test_ecfp_fails_on_single_molecules():
    encoded = load_encoder("ecfp").encode(molecules(BENZENE, "not one", ASPIRIN))
    assert encoded.failed == {1: "RDKit cannot read its SMILES"}
    assert encoded.matrix[[0, 2]].any(axis=1).all()


def test_descriptors_are_finite_where_rdkit_has_nan():
    encoded = load_encoder("descriptors").encode(molecules(COPPER, ASPIRIN))
    assert encoded.failed == {}
    assert encoded.matrix.dtype == np.float32
    assert encoded.matrix.shape == (2, len(descriptor_functions()))
    assert np.isfinite(encoded.matrix).all()


def test_descriptors_keep_rdkits_names_and_values():
    from rdkit import Chem
    from rdkit.Chem import Descriptors

    names = [name for name, _ in descriptor_functions()]
    known = {name for name, _ in Descriptors.descList}
    assert set(EXCLUDED) <= known
    assert set(names) == known - set(EXCLUDED)
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


def test_the_name_shows_options_that_are_not_the_default():
    assert load_encoder({"name": "ecfp", "bits": 2048}).name == "ecfp"
    assert load_encoder({"name": "ecfp", "bits": 1024, "counts": True}).name == "ecfp bits=1024 counts=true"


def test_every_option_is_in_the_fingerprint():
    options = [{}, {"radius": 3}, {"bits": 1024}, {"counts": True}]
    assert len({load_encoder({"name": "ecfp", **one}).fingerprint() for one in options}) == len(options)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"name": "ecfp", "bit": 64}, "unknown option 'bit', did you mean bits[?] .known: radius, bits, counts"),
        ({"name": "descriptors", "bits": 64}, "unknown option 'bits' .known: none"),
        ({"name": "ecfp", "bits": "64"}, "bits must be a whole number, not '64'"),
        ({"name": "ecfp", "bits": True}, "bits must be a whole number, not True"),
        ({"name": "ecfp", "counts": 1}, "counts must be true or false, not 1"),
        (
            {"name": "ecfp", "bits": 1001, "radius": -1},
            "radius must be .*, not -1; bits must be a multiple of 8 .*, not 1001",
        ),
        ({"name": "missing.npy", "bits": 8}, "take no options. Try: remove bits"),
    ],
)
def test_a_wrong_encoder_is_refused(config, sentence):
    with pytest.raises(BadOption, match=sentence):
        load_encoder(config)


def test_encoders_are_those_that_load():
    assert list(ENCODERS) == ["ecfp", "descriptors", "chemnet", "minimol", "unimol"]
    assert [load_encoder(name).name for name in ENCODERS] == list(ENCODERS)


PACKAGE = """
import numpy as np, torch
from torch import nn
class Back(nn.Module):
    def forward(self, x): return x.transpose(1, 2)
class Last(nn.Module):
    def forward(self, x): return x[0][:, -1]
def load_imported_model(layers):                     # forgets to load anything
    return nn.Sequential(Back(), nn.LSTM(**layers[0][1][1]), Last())
class SmilesDataset:
    def __init__(self, smiles, canonize=True): self.smiles, self.canonize = smiles, canonize
    def __getitem__(self, at):
        assert not self.canonize
        return np.array([[letter == one for one in "CNOc"] for letter in self.smiles[at].ljust(350)], dtype=float)
"""


@pytest.fixture
def layer(tmp_path, monkeypatch):
    """The layer whose weights the stand-in's file has."""
    package = tmp_path / "fcd_torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "utils.py").write_text(PACKAGE)
    shape = {"input_size": 4, "hidden_size": 512, "batch_first": True}
    layer = torch.nn.LSTM(**shape)
    torch.save([("LSTM", (layer.state_dict(), shape, {}))], package / CHEMNET_WEIGHTS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("fcd_torch", "fcd_torch.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield layer
    for name in ("fcd_torch", "fcd_torch.utils"):
        sys.modules.pop(name, None)


def test_every_weight_comes_from_the_file(layer):
    matrix = load_encoder("chemnet").encode(molecules("OCC", "C")).matrix
    letters = torch.tensor([[float(letter == one) for one in "CNOc"] for letter in "CCO".ljust(350)])
    torch.testing.assert_close(torch.from_numpy(matrix[0]), layer(letters[None])[0][0, -1].detach())
    assert matrix.shape == (2, 512)


def test_a_missing_tensor_is_an_error(layer, tmp_path):
    path = tmp_path / "fcd_torch" / CHEMNET_WEIGHTS
    ((kind, (state, shape, more)),) = torch.load(path)
    del state["bias_hh_l0"]
    torch.save([(kind, (state, shape, more))], path)
    with pytest.raises(BadModel, match=r"weights of chemnet in .* cannot be used .*loading state_dict for LSTM"):
        load_encoder("chemnet").encode(molecules("C"))


def test_weights_that_would_run_code_are_refused(layer, tmp_path):
    torch.save([("LSTM", _MakesAFolder(tmp_path / "made"))], tmp_path / "fcd_torch" / CHEMNET_WEIGHTS)
    with pytest.raises(BadModel, match="cannot be used .*pip install --force-reinstall"):
        load_encoder("chemnet").encode(molecules("C"))
    assert not (tmp_path / "made").exists()


class _MakesAFolder:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_other_weights_are_another_fingerprint(layer, tmp_path):
    before = load_encoder("chemnet").fingerprint()
    path = tmp_path / "fcd_torch" / CHEMNET_WEIGHTS
    path.write_bytes(path.read_bytes() + b"0")
    assert load_encoder("chemnet").fingerprint() != before


def test_a_molecule_too_long_for_chemnet_is_left_out(layer):
    encoded = load_encoder("chemnet").encode(molecules("C" * 349, "C" * 350, "Cl" + "C" * 348, "not one", ""))
    assert encoded.failed == {
        1: "its SMILES has 350 symbols and ChemNet reads 349",
        3: "RDKit cannot read its SMILES",
        4: "it has no atoms",
    }


def test_salts_are_counted(layer):
    encoded = load_encoder("chemnet").encode(molecules("CC", "CCN.Cl", "[Na+].CC(=O)[O-]"))
    assert list(encoded.remarks.values()) == [2]
    assert encoded.failed == {}


def test_not_installed_names_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadOption, match="needs fcd_torch. Try: `pip install --no-deps fcd_torch`"):
        load_encoder("chemnet").fingerprint()


def test_the_real_chemnet():
    pytest.importorskip("fcd_torch")
    matrix = load_encoder("chemnet").encode(molecules("CCO", "c1ccccc1O")).matrix
    assert matrix.shape == (2, 512)
    assert not np.allclose(matrix[0], matrix[1])


SMILES = ["C", "CC", "CCC"]
ROWS = np.array([0, 2, 3])
"""Row 1 of the file could not be read."""


def file_molecules(rows_in=4):
    return support.molecules(SMILES, rows=ROWS, rows_in=rows_in)


def computed(config, tmp_path, some=None):
    return compute_features(load_encoder(config, folder=tmp_path), some or file_molecules(), cache=tmp_path / "cache")


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.uint8, np.bool_])
def test_npy_rows_are_those_of_the_molecules_file(tmp_path, dtype):
    matrix = (np.arange(12).reshape(4, 3) % 2).astype(dtype)
    np.save(tmp_path / "mine.npy", matrix)
    features = computed("mine.npy", tmp_path)
    assert features.encoder == "mine"
    assert features.matrix.dtype == (np.uint8 if dtype in (np.uint8, np.bool_) else np.float32)
    np.testing.assert_array_equal(features.matrix, matrix[ROWS])


@pytest.mark.parametrize("as_lists", [False, True])
def test_parquet_gives_its_columns_or_its_only_column_of_lists(tmp_path, as_lists):
    matrix = np.arange(12, dtype=np.float32).reshape(4, 3)
    columns = {"v": list(matrix)} if as_lists else {f"f{at}": matrix[:, at] for at in range(3)}
    pq.write_table(pa.table(columns), tmp_path / "mine.parquet")
    np.testing.assert_array_equal(computed("mine.parquet", tmp_path).matrix, matrix[ROWS])


def test_a_row_too_few_names_both_numbers(tmp_path):
    np.save(tmp_path / "mine.npy", np.zeros((3, 2)))
    with pytest.raises(BadData, match=r"mine.npy has 3 rows of features and some.csv has 4 rows. Try: one row"):
        computed("mine.npy", tmp_path)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e300])
def test_a_value_that_is_not_finite_names_its_row(tmp_path, value):
    matrix = np.zeros((4, 2))
    matrix[2, 1] = value
    np.save(tmp_path / "mine.npy", matrix)
    with pytest.raises(BadData, match=r"mine is NaN or infinite in row 2 \(CC\) of some.csv .*, 1 of 3 molecules"):
        computed("mine.npy", tmp_path)


def test_values_that_are_not_finite_are_counted(tmp_path, monkeypatch):
    matrix = np.zeros((10, 2))
    matrix[[0, 2, 3, 5, 9]] = np.nan
    np.save(tmp_path / "mine.npy", matrix)
    some = support.molecules(["C"] * 10, source="a.csv")
    rows = r"mine is NaN or infinite in rows 0 \(C\), 2 \(C\), 3 \(C\) and 2 more of a.csv .*, 5 of 10 molecules[.]"
    with pytest.raises(
        BadData, match=f"{rows} Try: fill them, or remove those rows from that file and from the features"
    ):
        computed("mine.npy", tmp_path, some)
    monkeypatch.setattr(FeatureFile, "batch", 7)
    with pytest.raises(BadData, match=r"and 1 more of a.csv .*, 4 of the first 7 of 10 molecules[.]"):
        computed("mine.npy", tmp_path, some)


def test_a_row_that_no_molecule_uses_may_be_nan(tmp_path):
    matrix = np.zeros((4, 2))
    matrix[1] = np.nan
    np.save(tmp_path / "mine.npy", matrix)
    assert computed("mine.npy", tmp_path).failed == {}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (np.zeros(4), r"has the shape \(4,\). Try: rows × columns"),
        (np.zeros((4, 0)), r"has the shape \(4, 0\)"),
        (np.zeros((4, 2), dtype=complex), "holds complex128, not real numbers"),
        (np.array([["a"]] * 4, dtype=object), "cannot be read as features"),
    ],
)
def test_a_npy_that_is_not_a_matrix_of_numbers_is_refused(tmp_path, content, sentence):
    np.save(tmp_path / "mine.npy", content, allow_pickle=True)
    with pytest.raises(BadData, match=sentence):
        computed("mine.npy", tmp_path)


def test_files_with_other_content_are_refused(tmp_path):
    (tmp_path / "mine.npy").write_text("smiles")
    with pytest.raises(BadData, match="mine.npy cannot be read as features .*Try: a .npy or .parquet of numbers"):
        computed("mine.npy", tmp_path)
    (tmp_path / "mine.parquet").write_text("smiles")
    with pytest.raises(BadData, match="mine.parquet cannot be read as features"):
        computed("mine.parquet", tmp_path)
    pq.write_table(pa.table({"smiles": list("abcd"), "f": [1.0] * 4}), tmp_path / "mine.parquet")
    with pytest.raises(BadData, match=r"columns that are not numbers \(smiles\)"):
        computed("mine.parquet", tmp_path)
    pq.write_table(pa.table({"v": [[1.0], [1.0, 2.0], [], None]}), tmp_path / "mine.parquet")
    with pytest.raises(BadData, match="lists of 0 to 2 numbers"):
        computed("mine.parquet", tmp_path)


def test_a_changed_file_is_read_again(tmp_path):
    np.save(tmp_path / "mine.npy", np.zeros((4, 2)))
    computed("mine.npy", tmp_path)
    np.save(tmp_path / "mine.npy", np.ones((4, 2)))
    assert computed("mine.npy", tmp_path).matrix.min() == 1


def written(tmp_path, body, imports="import numpy as np"):
    (tmp_path / "own.py").write_text(f"{imports}\ndef encode(smiles):\n    {body}\n")
    return "own.py:encode"


@pytest.mark.parametrize(
    "body", ["return [[len(s), 1] for s in smiles]", "return torch.tensor([[len(s), 1.0] for s in smiles])"]
)
def test_a_function_gets_smiles_and_returns_rows(tmp_path, body):
    features = computed(written(tmp_path, body, imports="import torch"), tmp_path)
    assert features.encoder == "encode"
    np.testing.assert_array_equal(features.matrix, [[1, 1], [2, 1], [3, 1]])


def test_a_function_may_import_its_neighbours_and_leaves_no_bytecode(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "beside_it.py").write_text("WIDTH = 3")
    config = written(
        tmp_path, "return np.ones((len(smiles), WIDTH))", "import numpy as np\nfrom beside_it import WIDTH"
    )
    assert computed(config, tmp_path).matrix.shape == (3, 3)
    assert not list(tmp_path.rglob("__pycache__"))


def test_what_a_function_prints_is_not_on_stdout(tmp_path, capsys):
    computed(written(tmp_path, "print('called'); return np.ones((len(smiles), 2))", "import numpy as np; print('read')"), tmp_path)  # fmt: skip
    output = capsys.readouterr()
    assert output.out == "" and output.err == "read\ncalled\n"


def test_an_edited_function_computes_again(tmp_path):
    computed(written(tmp_path, "return np.zeros((len(smiles), 2))"), tmp_path)
    assert computed(written(tmp_path, "return np.ones((len(smiles), 2))"), tmp_path).matrix.min() == 1


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return np.zeros((2, 4))", r"own.py:encode returned the shape \(2, 4\). Try: return an array of 3 rows"),
        ("return np.zeros(3)", r"returned the shape \(3,\)"),
        ("return np.zeros((3, 0))", r"returned the shape \(3, 0\)"),
        ("return None", "returned a NoneType of object"),
        ("return [[1], [1, 2], [3]]", "returned rows that do not form an array"),
        (
            "return np.full((3, 2), np.nan)",
            "encode is NaN or infinite in rows 0 .*, 3 of 3 molecules. Try: fill them, or remove those rows from that file.$",
        ),
        ("import sys; sys.exit(3)", "own.py:encode failed on a batch of 3 SMILES .SystemExit: 3"),
        ("raise KeyError('weights')", "own.py:encode failed on a batch of 3 SMILES .KeyError: 'weights'"),
    ],
)
def test_a_function_that_fails_is_an_error(tmp_path, body, sentence):
    with pytest.raises(BadData, match=sentence):
        computed(written(tmp_path, body), tmp_path)


def test_a_missing_function_lists_those_available(tmp_path):
    written(tmp_path, "return smiles")
    with pytest.raises(BadOption, match=r"no function 'embed' in .*own.py. Try: encode"):
        computed("own.py:embed", tmp_path)
    (tmp_path / "own.py").write_text("import no_such_package")
    with pytest.raises(BadOption, match="own.py cannot be run .ModuleNotFoundError: No module named 'no_such_package'"):
        computed("own.py:encode", tmp_path)
