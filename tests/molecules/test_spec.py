"""A spec becomes a grid in a stable order, or one sentence with everything that is wrong in it."""

import os
import subprocess
import sys

import pytest

from brimful.errors import BadOption
from brimful.molecules.spec import grid, show_grid
from brimful.molecules.spec_file import read_spec

TOP = 'seeds = 2\nmethods = ["dpo", "knn"]\nencoders = ["ecfp"]\n'
DATA = '[[datasets]]\nfile = "some.csv"\nsplit = "scaffold"\n'


@pytest.fixture
def read(tmp_path):
    """Reads a spec from text, with some.csv beside it."""
    (tmp_path / "some.csv").write_text("smiles\nC\n")

    def read(text):
        (tmp_path / "sweep.toml").write_text(text, encoding="utf-8")
        return read_spec(tmp_path / "sweep.toml")

    return read


@pytest.fixture
def refused(read):
    def refused(text):
        with pytest.raises(BadOption) as caught:
            read(text)
        return str(caught.value)

    return refused


def test_defaults_are_those_of_the_experiments(read):
    spec = read(TOP + DATA)
    (head,), (train,) = spec.heads, spec.trainings
    assert (head.hidden, head.activation, head.dropout) == ((256, 128), "relu", 0.1)
    assert (train.lr, train.weight_decay, train.batch, train.epochs, train.patience) == (1e-4, 1e-5, 512, 500, 10)
    assert (train.clip, train.step_size, train.gamma) == (1.0, 10, 0.9)
    assert spec.positive == "ood" and spec.methods[0].options == {"beta": 0.1, "lam": 0.01}


def test_a_byte_order_mark_is_accepted(read):
    assert read("\ufeff" + TOP + DATA).seeds == (0, 1)


def test_seeds_are_a_number_or_a_list(read):
    assert read(TOP + DATA).seeds == (0, 1)
    assert read(TOP.replace("= 2", "= [7, 3]") + DATA).seeds == (7, 3)
    assert len(read(TOP.replace("seeds = 2\n", "") + DATA).seeds) == 10


def test_the_order_is_dataset_encoder_method_settings_seed(read):
    spec = read(TOP.replace('["ecfp"]', '["ecfp", "chemnet"]') + DATA.replace('"scaffold"', '["size", "random"]'))
    cells = [(cell.dataset.name, cell.encoder.name, cell.method.name, cell.seed) for cell in grid(spec)]
    names = ("some-size", "some-random"), ("ecfp", "chemnet"), ("dpo", "knn"), (0, 1)
    assert cells == [(d, e, m, s) for d in names[0] for e in names[1] for m in names[2] for s in names[3]]


def test_lists_are_grids_and_settings_name_what_varies(read):
    spec = read(
        TOP.replace('"dpo"', '{name = "hinge", margin = [0.5, 1.0], lam = 0}')
        + DATA
        + '[head]\nhidden = [[64], [256, 128]]\nactivation = "gelu"\n[train]\nlr = [1e-3, 1e-4]\nepochs = 5\n'
    )
    cells = [cell for cell in grid(spec) if cell.seed == 0]
    hinge = [cell for cell in cells if cell.method.name == "hinge"]
    assert len(hinge) == 8 and all(cell.options["lam"] == 0 and cell.options["hard"] == 1 for cell in hinge)
    assert {tuple(cell.settings) for cell in hinge} == {("hidden", "lr", "margin")}
    assert hinge[0].settings == {"hidden": (64,), "lr": 1e-3, "margin": 0.5}
    assert hinge[0].settings_text == "hidden=64 lr=0.001 margin=0.5"
    assert hinge[0].head.activation == "gelu" and hinge[0].train.epochs == 5
    assert hinge[-1].head.hidden == (256, 128) and hinge[-1].options["margin"] == 1.0


def test_methods_without_training_are_not_multiplied(read):
    cells = grid(read(TOP + DATA + "[train]\nlr = [1e-3, 1e-4, 1e-5]\n"))
    knn = [cell for cell in cells if cell.method.name == "knn"]
    assert len(cells) == 3 * 2 + 2 and len(knn) == 2
    assert all(cell.settings == {} and cell.head is None and cell.deterministic for cell in knn)


def test_two_entries_of_a_method_are_named_by_what_differs(read):
    spec = read(TOP.replace('"dpo"', '"dpo", {name = "dpo", beta = 1}') + DATA)
    assert [cell.settings_text for cell in grid(spec) if cell.seed == 0] == ["beta=0.1", "beta=1", ""]


def test_a_layer_list_is_one_shape_and_an_empty_one_a_linear_head(read):
    assert read(TOP + DATA + "[head]\nhidden = [32, 16]\n").heads[0].hidden == (32, 16)
    assert read(TOP + DATA + "[head]\nhidden = []\n").heads[0].hidden == ()
    shapes = read(TOP + DATA + "[head]\nhidden = [[], [32, 16]]\n")
    assert [cell.settings_text for cell in grid(shapes) if cell.seed == 0] == ["hidden=none", "hidden=32-16", ""]


def test_the_number_of_runs_is_shown(read):
    spec = read(TOP + DATA)
    assert show_grid(spec) == "1 dataset × 1 encoder × 2 methods × 2 seeds = 4 runs" and len(grid(spec)) == 4
    spec = read(TOP + DATA + "[train]\nlr = [1e-3, 1e-4]\n")
    assert show_grid(spec) == "1 dataset × 1 encoder × 2 methods in 3 settings × 2 seeds = 6 runs" and len(grid(spec)) == 6  # fmt: skip


def test_runs_have_unique_stable_names(read):
    text = TOP + DATA.replace('"scaffold"', '["scaffold", "size"]')
    names = [cell.run for cell in grid(read(text))]
    assert len(set(names)) == len(names) and all("/" not in name for name in names)
    assert names == [cell.run for cell in grid(read(text))]
    longer = [cell.run for cell in grid(read(text + "[train]\nepochs = 7\n"))]
    same = [old == new for old, new in zip(names, longer, strict=True)]
    assert same == ["-knn-" in name for name in names]


def test_files_are_relative_to_the_spec_and_a_moved_sweep_keeps_its_names(read, tmp_path):
    (tmp_path / "own.npy").write_bytes(b"")
    (tmp_path / "weights").mkdir()
    spec = read(TOP.replace('"ecfp"', '"own.npy", {name = "unimol", weights = "./weights"}') + DATA)
    assert spec.datasets[0].file == tmp_path / "some.csv" and spec.encoders[0].config == str(tmp_path / "own.npy")
    before = [cell.run for cell in grid(spec)]
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("own.npy", "weights", "some.csv", "sweep.toml"):
        (tmp_path / name).rename(moved / name)
    assert [cell.run for cell in grid(read_spec(moved / "sweep.toml"))] == before


def test_encoders_have_unique_names(read, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.npy").write_bytes(b"")
    (tmp_path / "mine.py").write_text("")
    weights = ", ".join(f'{{name = "unimol", weights = "{folder}/own.npy"}}' for folder in ("a", "b"))
    encoders = '["ecfp", {name = "ecfp", bits = 1024}, "a/own.npy", "b/own.npy", "mine.py:encode", ' + f"{weights}]"
    spec = read(TOP.replace('["ecfp"]', encoders) + DATA)
    names = [one.name for one in spec.encoders]
    assert names[:2] == ["ecfp", "ecfp bits=1024"] and names[4] == "encode" and len(set(names)) == 7
    assert spec.encoders[1].config == {"name": "ecfp", "bits": 1024}
    assert spec.encoders[5].config == {"name": "unimol", "weights": "a/own.npy"}
    assert spec.encoders[4].config == f"{tmp_path / 'mine.py'}:encode"


def test_a_dataset_name_carries_the_split_only_if_there_are_two(read):
    assert [one.name for one in read(TOP + DATA + 'name = "x"\n').datasets] == ["x"]
    two = DATA.replace('"scaffold"', '["size", "scaffold"]') + 'name = "x"\n'
    assert [one.name for one in read(TOP + two).datasets] == ["x-size", "x-scaffold"]


def test_a_column_split_takes_its_column_and_values(read):
    text = DATA.replace('"scaffold"', '["column", "size"]') + 'column = "assay"\nood = ["a", 3]\ntrain = 50\nlabel = ["x", "y"]\n'  # fmt: skip
    column, size = read(TOP + text).datasets
    assert (column.column, column.ood, column.train, column.label) == ("assay", ("a", 3), 50, ("x", "y"))
    assert (size.column, size.ood) == (None, ())


def test_a_published_dataset_has_its_own_split(read, refused, tmp_path):
    (tmp_path / "drug.json").write_text("{}")
    assert read(TOP + '[[datasets]]\nfile = "drug.json"\n').datasets[0].published
    assert "has its own split, remove split" in refused(TOP + '[[datasets]]\nfile = "drug.json"\nsplit = "size"\n')  # fmt: skip


WRONG = {
    "unknown key 'sedes', did you mean seeds": TOP + "sedes = 1\n" + DATA,
    "unknown method 'DOP', did you mean dpo": TOP.replace("dpo", "DOP") + DATA,
    "unknown encoder 'ecpf', did you mean ecfp": TOP.replace("ecfp", "ecpf") + DATA,
    "unknown split 'scafold', did you mean scaffold": TOP + DATA.replace("scaffold", "scafold"),
    "there is no file some.cvs": TOP + DATA.replace("some.csv", "some.cvs"),
    "some.cvs in ": TOP + DATA.replace("some.csv", "some.cvs"),
    "method dpo: unknown key 'bta', did you mean beta": TOP.replace('"dpo"', '{name = "dpo", bta = 1}') + DATA,
    "method dpo: beta must be a number above 0, not -1": TOP.replace('"dpo"', '{name = "dpo", beta = -1}') + DATA,
    "method knn: k must be a whole number of at least 1, not 2.5": TOP.replace('"knn"', '{name = "knn", k = 2.5}')
    + DATA,
    "[train]: lr must be a number above 0, not 'fast'": TOP + DATA + '[train]\nlr = "fast"\n',
    "[train]: lr is an empty list": TOP + DATA + "[train]\nlr = []\n",
    "[train]: lr has 0.1 twice": TOP + DATA + "[train]\nlr = [0.1, 0.1]\n",
    "[train]: batch must be a whole number of at least 1, not True": TOP + DATA + "[train]\nbatch = true\n",
    "[train]: unknown key 'epoch', did you mean epochs": TOP + DATA + "[train]\nepoch = 1\n",
    "[head]: dropout must be a number of at least 0 and below 1, not 1": TOP + DATA + "[head]\ndropout = 1\n",
    "[head]: hidden must be a list of layer sizes such as [256, 128], not 64": TOP + DATA + "[head]\nhidden = 64\n",
    "[head]: activation must be one of relu": TOP + DATA + '[head]\nactivation = "rleu"\n',
    "methods is empty": TOP.replace('["dpo", "knn"]', "[]") + DATA,
    "methods has dpo twice": TOP.replace('"knn"', '{name = "dpo", beta = 0.1}') + DATA,
    "encoders has 'ecfp' twice": TOP.replace('["ecfp"]', '["ecfp", "ecfp"]') + DATA,
    "encoders is missing": TOP.replace('encoders = ["ecfp"]\n', "") + DATA,
    "datasets is missing": TOP,
    "two datasets are called some-scaffold": TOP + DATA + DATA,
    "dataset 1: split is missing": TOP + '[[datasets]]\nfile = "some.csv"\n',
    "dataset 1: file is missing": TOP + '[[datasets]]\nsplit = "size"\n',
    "dataset 1: seeds belongs to the top of the file": TOP + DATA + "seeds = 3\n",
    "dataset 1: train must be a whole number of at least 1, not 0": TOP + DATA + "train = 0\n",
    "needs column, the name of the column": TOP + DATA.replace("scaffold", "column"),
    'ood can only be used with split = "column"': TOP + DATA + "ood = [1]\n",
    "msp trains a classifier and needs label": TOP.replace("knn", "msp") + DATA,
    "seeds must be a number such as 10": TOP.replace("= 2", "= 0") + DATA,
    "seeds has 1 twice": TOP.replace("= 2", "= [1, 1]") + DATA,
    "positive must be one of ood, id, not 'odo'": TOP + 'positive = "odo"\n' + DATA,
    "memory_limit: 'much' is not a size": TOP + 'memory_limit = "much"\n' + DATA,
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_mistake_is_named_with_its_place(refused, sentence):
    message = refused(WRONG[sentence])
    assert sentence in message and "sweep.toml: " in message and "\n" not in message


def test_all_mistakes_are_reported_together(refused):
    message = refused('sedes = 1\nmethods = ["dop"]\nencoders = []\n' + DATA.replace('"scaffold"', '["size", "random"]') + "test = -1\n[train]\nlr = 0\n")  # fmt: skip
    for part in ("'sedes'", "'dop'", "encoders is empty", "not -1", "not 0"):
        assert message.count(part) == 1


@pytest.mark.parametrize("content", [None, b"seeds = ", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "sweep.toml").write_bytes(content)
    with pytest.raises(BadOption, match="cannot be read: "):
        read_spec(tmp_path / "sweep.toml")


def test_reading_a_spec_loads_neither_torch_nor_rdkit(tmp_path):
    (tmp_path / "some.csv").write_text("smiles\n")
    (tmp_path / "sweep.toml").write_text(TOP + DATA)
    code = "import sys; from brimful.molecules.spec_file import read_spec; from brimful.molecules.spec import grid; assert len(grid(read_spec(sys.argv[1]))) == 4; sys.exit(bool({'torch', 'rdkit', 'sklearn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "sweep.toml"], env=os.environ, check=False)
    assert done.returncode == 0
