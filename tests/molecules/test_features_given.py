"""Features of the user's: a file of numbers, or a function."""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful.errors import BadData, BadOption
from brimful.molecules.dataset import Molecules
from brimful.molecules.features.compute import features_of, load_encoder
from brimful.molecules.features.own import Given

SMILES = np.array(["C", "CC", "CCC"], dtype=object)
ROWS = np.array([0, 2, 3])
"""Row 1 of the file could not be read."""


def molecules(rows_in=4):
    return Molecules(source="some.csv", smiles=SMILES, rows=ROWS, columns={}, rows_in=rows_in)


def computed(asked, tmp_path, some=None):
    return features_of(load_encoder(asked, folder=tmp_path), some or molecules(), cache=tmp_path / "cache")


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
    with pytest.raises(BadData, match=r"mine.npy has 3 rows of features and some.csv has 4 rows; give one row"):
        computed("mine.npy", tmp_path)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e300])
def test_a_value_that_is_not_finite_names_its_row(tmp_path, value):
    matrix = np.zeros((4, 2))
    matrix[2, 1] = value
    np.save(tmp_path / "mine.npy", matrix)
    with pytest.raises(BadData, match=r"mine is NaN or infinite in row 2 \(CC\) of some.csv .*, 1 of 3 molecules"):
        computed("mine.npy", tmp_path)


def test_many_values_that_are_not_finite_are_counted_and_what_to_do_keeps_rows_aligned(tmp_path, monkeypatch):
    matrix = np.zeros((10, 2))
    matrix[[0, 2, 3, 5, 9]] = np.nan
    np.save(tmp_path / "mine.npy", matrix)
    some = Molecules(
        source="a.csv", smiles=np.array(["C"] * 10, dtype=object), rows=np.arange(10), columns={}, rows_in=10
    )
    rows = r"mine is NaN or infinite in rows 0 \(C\), 2 \(C\), 3 \(C\) and 2 more of a.csv .*, 5 of 10 molecules;"
    with pytest.raises(
        BadData, match=f"{rows} fill them, or remove those rows from that file and from the features alike"
    ):
        computed("mine.npy", tmp_path, some)
    monkeypatch.setattr(Given, "batch", 7)
    with pytest.raises(BadData, match=r"and 1 more of a.csv .*, 4 of the first 7 of 10 molecules;"):
        computed("mine.npy", tmp_path, some)


def test_a_row_that_no_molecule_uses_may_be_nan(tmp_path):
    matrix = np.zeros((4, 2))
    matrix[1] = np.nan
    np.save(tmp_path / "mine.npy", matrix)
    assert computed("mine.npy", tmp_path).failed == {}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (np.zeros(4), r"has the shape \(4,\); features are rows × columns"),
        (np.zeros((4, 0)), r"has the shape \(4, 0\)"),
        (np.zeros((4, 2), dtype=complex), "holds complex128, which are not real numbers"),
        (np.array([["a"]] * 4, dtype=object), "cannot be read as features"),
    ],
)
def test_a_npy_that_is_no_matrix_of_numbers_is_refused(tmp_path, content, sentence):
    np.save(tmp_path / "mine.npy", content, allow_pickle=True)
    with pytest.raises(BadData, match=sentence):
        computed("mine.npy", tmp_path)


def test_files_that_hold_something_else_are_refused(tmp_path):
    (tmp_path / "mine.npy").write_text("smiles")
    with pytest.raises(BadData, match="mine.npy cannot be read as features .*give a .npy or .parquet of numbers"):
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
    (tmp_path / "mine.csv").write_text("1,2")
    with pytest.raises(BadOption, match="features are read from .npy and .parquet files"):
        computed("mine.csv", tmp_path)


def test_a_changed_file_is_read_anew(tmp_path):
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
def test_a_function_gets_smiles_and_gives_rows(tmp_path, body):
    features = computed(written(tmp_path, body, imports="import torch"), tmp_path)
    assert features.encoder == "encode"
    np.testing.assert_array_equal(features.matrix, [[1, 1], [2, 1], [3, 1]])


def test_a_function_may_import_its_neighbours_and_leaves_no_bytecode(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "beside_it.py").write_text("WIDTH = 3")
    asked = written(tmp_path, "return np.ones((len(smiles), WIDTH))", "import numpy as np\nfrom beside_it import WIDTH")
    assert computed(asked, tmp_path).matrix.shape == (3, 3)
    assert not list(tmp_path.rglob("__pycache__"))


def test_what_a_function_prints_is_not_on_stdout(tmp_path, capsys):
    computed(written(tmp_path, "print('called'); return np.ones((len(smiles), 2))", "import numpy as np; print('read')"), tmp_path)  # fmt: skip
    said = capsys.readouterr()
    assert said.out == "" and said.err == "read\ncalled\n"


def test_an_edited_function_computes_anew(tmp_path):
    computed(written(tmp_path, "return np.zeros((len(smiles), 2))"), tmp_path)
    assert computed(written(tmp_path, "return np.ones((len(smiles), 2))"), tmp_path).matrix.min() == 1


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return np.zeros((2, 4))", r"own.py:encode returned the shape \(2, 4\); it should return an array of 3 rows"),
        ("return np.zeros(3)", r"returned the shape \(3,\)"),
        ("return np.zeros((3, 0))", r"returned the shape \(3, 0\)"),
        ("return None", "returned a NoneType of object"),
        ("return [[1], [1, 2], [3]]", "returned rows that do not make an array"),
        (
            "return np.full((3, 2), np.nan)",
            "encode is NaN or infinite in rows 0 .*, 3 of 3 molecules; fill them, or remove those rows from that file$",
        ),
        ("import sys; sys.exit(3)", "own.py:encode failed on a batch of 3 SMILES: SystemExit: 3"),
        ("raise KeyError('weights')", "own.py:encode failed on a batch of 3 SMILES: KeyError: 'weights'"),
    ],
)
def test_a_function_that_goes_wrong_is_told_in_one_sentence(tmp_path, body, sentence):
    with pytest.raises(BadData, match=sentence):
        computed(written(tmp_path, body), tmp_path)


def test_a_function_that_is_not_there_lists_those_that_are(tmp_path):
    written(tmp_path, "return smiles")
    with pytest.raises(BadOption, match=r"no function 'embed' in .*own.py; it has encode"):
        computed("own.py:embed", tmp_path)
    (tmp_path / "own.py").write_text("import no_such_package")
    with pytest.raises(BadOption, match="own.py cannot be run: ModuleNotFoundError: No module named 'no_such_package'"):
        computed("own.py:encode", tmp_path)
