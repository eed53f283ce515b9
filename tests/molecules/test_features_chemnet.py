"""ChemNet through a stand-in of its package: the same interface, four letters and one small layer."""

import os
import sys

import numpy as np
import pytest
import torch

from brimful.errors import BadModel, BadOption
from brimful.molecules.dataset import Molecules
from brimful.molecules.features.builtin import COLUMNS, WEIGHTS
from brimful.molecules.features.compute import load_encoder

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


def molecules(*smiles):
    count = len(smiles)
    return Molecules(
        source="some.csv", smiles=np.array(smiles, dtype=object), rows=np.arange(count), columns={}, rows_in=count
    )


@pytest.fixture
def layer(tmp_path, monkeypatch):
    """The layer whose weights the stand-in's file has."""
    package = tmp_path / "fcd_torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "utils.py").write_text(PACKAGE)
    shape = {"input_size": 4, "hidden_size": COLUMNS, "batch_first": True}
    layer = torch.nn.LSTM(**shape)
    torch.save([("LSTM", (layer.state_dict(), shape, {}))], package / WEIGHTS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("fcd_torch", "fcd_torch.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield layer
    for name in ("fcd_torch", "fcd_torch.utils"):
        sys.modules.pop(name, None)


def test_every_weight_is_the_files_even_if_the_package_loads_none(layer):
    matrix = load_encoder("chemnet").encode(molecules("OCC", "C")).matrix
    letters = torch.tensor([[float(letter == one) for one in "CNOc"] for letter in "CCO".ljust(350)])
    torch.testing.assert_close(torch.from_numpy(matrix[0]), layer(letters[None])[0][0, -1].detach())
    assert matrix.shape == (2, COLUMNS)


def test_a_missing_tensor_is_an_error(layer, tmp_path):
    path = tmp_path / "fcd_torch" / WEIGHTS
    ((kind, (state, shape, more)),) = torch.load(path)
    del state["bias_hh_l0"]
    torch.save([(kind, (state, shape, more))], path)
    with pytest.raises(
        BadModel, match=r"weights of chemnet in .* cannot be used .*loading state_dict for LSTM.*; install them anew"
    ):
        load_encoder("chemnet").encode(molecules("C"))


def test_weights_that_would_run_code_are_refused(layer, tmp_path):
    torch.save([("LSTM", _MakesAFolder(tmp_path / "made"))], tmp_path / "fcd_torch" / WEIGHTS)
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
    path = tmp_path / "fcd_torch" / WEIGHTS
    path.write_bytes(path.read_bytes() + b"0")
    assert load_encoder("chemnet").fingerprint() != before


def test_a_molecule_too_long_for_chemnet_is_left_out_and_not_cut(layer):
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
    with pytest.raises(BadOption, match="needs fcd_torch, which is not installed; .*pip install --no-deps fcd_torch"):
        load_encoder("chemnet").fingerprint()


def test_the_real_chemnet():
    pytest.importorskip("fcd_torch")
    matrix = load_encoder("chemnet").encode(molecules("CCO", "c1ccccc1O")).matrix
    assert matrix.shape == (2, COLUMNS)
    assert not np.allclose(matrix[0], matrix[1])
