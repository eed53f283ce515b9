"""Encoders in a process of their own: what goes over the pipes, and the errors."""

import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections import OrderedDict

import numpy as np
import psutil
import pytest
import torch

from brimful.errors import BadModel, BadOption, ProcessLost
from brimful.molecules.features import external as process_module
from brimful.molecules.features.compute import compute_features
from brimful.molecules.features.encoder import load_encoder
from tests.molecules import support

SERVE = process_module.CHILDREN / "serve.py"
CHILD = """
import os, sys
from serve import Refused, serve
def describe():
    return {"version": "1", "graphium": "2", "weights": "abc"}
def load():
    print("printed while loading")
    def encode(smiles):
        print("printed while encoding", flush=True)
        if "die" in smiles: os._exit(3)
        if "kill" in smiles: os.kill(os.getpid(), 9)
        if "bad" in smiles: raise ValueError("a bad molecule\\nand more")
        if "refused" in smiles: raise Refused("it is too large")
        return [[len(one), float("nan") if one == "nan" else 1.0] for one in smiles]
    return encode
if __name__ == "__main__":
    serve(describe, load)
"""


def molecules(*smiles):
    return support.molecules(smiles)


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Writes the script that stands where MiniMol's child does; this Python runs it."""
    folder = tmp_path / "child"
    folder.mkdir()
    shutil.copy(SERVE, folder)
    monkeypatch.setattr(process_module, "CHILDREN", folder)

    def write(text=CHILD):
        (folder / "minimol_child.py").write_text(text)
        return load_encoder({"name": "minimol", "python": sys.executable})

    return write


def test_all_batches_are_served_by_one_process_which_ends_with_its_encoder(child, tmp_path):
    encoder = child()
    features = compute_features(encoder, molecules("C", "CC", "CCC"), cache=tmp_path, batch_bytes=1)
    np.testing.assert_array_equal(features.matrix, [[1, 1], [2, 1], [3, 1]])
    pid = encoder._process._process.pid
    assert psutil.pid_exists(pid)
    del encoder
    gc.collect()
    assert not psutil.pid_exists(pid)


def test_cached_features_start_no_process(child, tmp_path):
    compute_features(child(), molecules("C"), cache=tmp_path)
    again = child()
    assert compute_features(again, molecules("C"), cache=tmp_path).cached
    assert "_process" not in vars(again)


def test_a_bad_molecule_fails_alone(child):
    encoded = child().encode(molecules("C", "bad", "CC", "nan", "refused", "CCC"))
    assert encoded.failed == {
        1: "ValueError: a bad molecule",
        3: "its features are not finite",
        4: "it is too large",
    }
    np.testing.assert_array_equal(encoded.matrix[[0, 2, 5], 0], [1, 2, 3])


def test_only_bad_molecules_are_no_error_of_the_process(child):
    encoded = child().encode(molecules("bad", "bad"))
    assert list(encoded.failed) == [0, 1]
    assert len(encoded.matrix) == 2


@pytest.mark.parametrize(("word", "how"), [("die", "with exit code 3"), ("kill", "by signal 9 .*host memory ran out")])
def test_the_error_of_a_dead_process_has_its_last_line(child, word, how):
    encoder = child()
    with pytest.raises(ProcessLost, match=f"the process of minimol ended {how}.*printed while encoding.*it continues"):
        encoder.encode(molecules("C", word))
    with pytest.raises(ProcessLost, match="minimol"):
        encoder.encode(molecules("C"))


def test_batches_before_a_death_are_kept(child, tmp_path):
    some = molecules("C", "CC", "die")
    with pytest.raises(ProcessLost):
        compute_features(child(), some, cache=tmp_path, batch_bytes=1)
    assert len(list(tmp_path.glob(".minimol-*/*.npz"))) == 2


def test_ctrl_c_does_not_reach_the_process(child):
    encoder = child()
    encoder.encode(molecules("C"))
    os.kill(encoder._process._process.pid, signal.SIGINT)
    assert encoder.encode(molecules("CC")).matrix[0, 0] == 2


def test_weights_that_do_not_load_are_an_error(child):
    broken = CHILD.replace('print("printed while loading")', 'raise Refused("its weights lack tensors")')
    with pytest.raises(BadModel, match="minimol cannot be used .its weights lack tensors"):
        child(broken).encode(molecules("C"))


def test_a_python_that_prints_at_start_up_is_refused(child):
    with pytest.raises(BadOption, match="minimol: its Python prints 'welcome' to stdout at start-up"):
        child("print('welcome')" + CHILD).encode(molecules("C"))


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        ("/no/such/python", "/no/such/python cannot be run .*docs/encoders.md"),
        ("/bin/true", "/bin/true does not answer like a Python"),
        (sys.executable, "has no minimol, or no graphium. Try:"),
    ],
)
def test_a_python_without_minimol_says_how_to_get_one(python, sentence):
    with pytest.raises(BadOption, match=sentence):
        load_encoder({"name": "minimol", "python": python}).fingerprint()


def test_without_a_python_the_variable_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("BRIMFUL_MINIMOL_PYTHON", raising=False)
    with pytest.raises(BadOption, match="needs a Python of its own. Try: .*BRIMFUL_MINIMOL_PYTHON"):
        compute_features(load_encoder("minimol"), molecules("C"), cache=tmp_path)


def test_unimol_without_weights_is_refused_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.delenv("UNIMOL_WEIGHT_DIR", raising=False)
    with pytest.raises(BadOption, match="unimol needs mol_pre_all_h"):
        load_encoder("unimol").fingerprint()
    (tmp_path / "mol.dict.txt").write_text("C 1")
    with pytest.raises(BadOption, match="has no mol_pre_no_h_220816.pt. Try: dptech/Uni-Mol-Models"):
        load_encoder({"name": "unimol", "weights": ".", "remove_hs": True}, folder=tmp_path).fingerprint()


@pytest.fixture(scope="module")
def serve_module():
    spec = importlib.util.spec_from_file_location("brimful_child_serve", SERVE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: state.pop("body.weight"), r"lack tensors of the model \(1 of them, the first is body.weight\)"),
        (lambda state: state.update({"body.more": torch.ones(1)}), "does not know .*the first is body.more"),
    ],
)
def test_weights_must_match_where_the_features_depend_on_them(serve_module, change, sentence):
    model = torch.nn.Sequential(OrderedDict(body=torch.nn.Linear(2, 2), head=torch.nn.Linear(2, 1)))
    state = {name: value + 1 for name, value in model.state_dict().items()}
    used = lambda name: name.startswith("body.")  # noqa: E731
    del state["head.bias"]
    serve_module.load_strictly(model, state, used)
    torch.testing.assert_close(model.body.weight, state["body.weight"])
    change(state)
    with pytest.raises(serve_module.Refused, match=sentence):
        serve_module.load_strictly(model, state, used)


@pytest.mark.torture
@pytest.mark.skipif("BRIMFUL_MINIMOL_PYTHON" not in os.environ, reason="BRIMFUL_MINIMOL_PYTHON names no Python")
def test_minimol_itself(tmp_path):
    features = compute_features(load_encoder("minimol"), molecules("CCO", "not one", "c1ccccc1O"), cache=tmp_path)
    assert features.matrix.shape == (3, 512)
    assert features.failed == {1: "RDKit cannot read its SMILES"}
    assert not np.array_equal(features.matrix[0], features.matrix[2])
