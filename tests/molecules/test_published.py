"""Published splits: DrugOOD's JSON, GOOD's folders. The files are small ones of the published layout."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brimful.errors import BadData
from brimful.molecules.published import read_published

pytest.importorskip("rdkit")

FIVE = ("train", "iid_val", "iid_test", "ood_val", "ood_test")
CHAINS = {"train": "C", "iid_val": "N", "iid_test": "O", "ood_val": "F", "ood_test": "S"}


def entry(part: str, number: int) -> dict[str, Any]:
    smiles = "F" + "C" * (number + 1) if part == "ood_val" else "C" * (number + 2) + CHAINS[part] * (part != "train")
    return {
        "smiles": smiles,
        "cls_label": number % 2,
        "assay_id": number,
        "domain_id": 10 * FIVE.index(part) + number // 2,
    }


@pytest.fixture
def drugood(tmp_path: Path) -> Path:
    path = tmp_path / "lbap_core_ic50_assay.json"
    split = {part: [entry(part, number) for number in range(8)] for part in FIVE}
    path.write_text(json.dumps({"cfg": {"domain": {"domain_name": "assay"}}, "split": split, "statistics": {}}))
    return path


def changed(path: Path, **parts: Any) -> Path:
    content = json.loads(path.read_text())
    content["split"].update(parts)
    path.write_text(json.dumps(content))
    return path


def test_the_parts_of_drugood_are_kept(drugood: Path) -> None:
    molecules, split = read_published(drugood)
    assert split.kind == "assay"
    assert split.id.sizes == (8, 8, 8) and len(split.ood.test) == 8
    for part, places in (("train", split.id.train), ("iid_test", split.id.test), ("ood_test", split.ood.test)):
        assert molecules.smiles[places].tolist() == [entry(part, number)["smiles"] for number in range(8)]
    assert molecules.columns["cls_label"].tolist() == [0.0, 1.0] * 20


def test_ood_training_molecules_come_from_the_validation_ones_by_domain(drugood: Path) -> None:
    molecules, split = read_published(drugood)
    domains = molecules.columns["domain"]
    assert not set(domains[split.ood.train]) & set(domains[split.ood.valid])
    assert set(molecules.columns["part"][[*split.ood.train, *split.ood.valid]]) == {"ood_val"}
    remark = "6 of the 8 published OOD validation molecules are the OOD training part, by domain: 3 and 1 of them"
    assert remark in split.remarks


def test_proteins_of_structure_based_sets_are_ignored(drugood: Path) -> None:
    rows = [{**entry("train", number), "protein": "MKV"} for number in range(8)]
    assert list(read_published(changed(drugood, train=rows))[0].columns) == [
        *("cls_label", "assay_id", "domain_id", "part", "domain")
    ]


def test_one_domain_is_divided_at_random(drugood: Path) -> None:
    one = [{**entry("ood_val", number), "domain_id": 30} for number in range(8)]
    _, split = read_published(changed(drugood, ood_val=one))
    assert split.ood.sizes == (6, 2, 8)
    assert any(remark.endswith("at random, all are of one domain") for remark in split.remarks)


def test_domains_are_divided_as_near_to_three_in_four_as_possible(drugood: Path) -> None:
    rows = [{**entry("ood_val", number), "domain_id": number // 6} for number in range(42)]
    _, split = read_published(changed(drugood, ood_val=rows))
    assert split.ood.sizes == (30, 12, 8)  # 36 would be further from 31.5


def test_a_last_domain_larger_than_all_others_leaves_something_to_validate_with(drugood: Path) -> None:
    for large in range(2):
        rows = [{**entry("ood_val", number), "domain_id": large if number else 1 - large} for number in range(8)]
        _, split = read_published(changed(drugood, ood_val=rows))
        assert min(split.ood.sizes) >= 1 and sum(split.ood.sizes) == 16


def test_a_published_leak_is_a_remark(drugood: Path) -> None:
    leaky = [entry("train", 0), *(entry("ood_test", number) for number in range(7))]
    molecules, split = read_published(changed(drugood, ood_test=leaky))
    assert "as published: 1 molecule is in ID train and in OOD test, such as 'CC'" in split.remarks
    assert molecules.smiles[split.ood.test].tolist()[0] == "CC"


def test_a_published_molecule_that_cannot_be_read_is_listed_and_left_out(drugood: Path) -> None:
    broken = [{**entry("iid_val", 0), "smiles": "CC("}, *(entry("iid_val", number) for number in range(1, 8))]
    molecules, split = read_published(changed(drugood, iid_val=broken))
    assert [(one.row, one.smiles) for one in molecules.unread] == [(8, "CC(")]
    assert split.id.sizes == (8, 7, 8)


def test_the_domain_comes_from_the_file_name_if_not_from_its_cfg(drugood: Path) -> None:
    drugood.write_text(json.dumps({**json.loads(drugood.read_text()), "cfg": {}}))
    assert read_published(drugood)[1].kind == "assay"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a whole JSON file"),
        ("[]", 'not a DrugOOD file: it has no list "split" → train, iid_val'),
        ('{"split": {"train": []}}', 'no list "split" → iid_val, iid_test, ood_val, ood_test'),
        (json.dumps({"split": {key: [] for key in FIVE}}), "has no molecules"),
        (json.dumps({"split": {key: [{"x": 1}] for key in FIVE}}), 'entry 0 \\(train\\) has no "smiles"'),
        (json.dumps({"split": {key: [{"smiles": "CC"}] for key in FIVE}}), "neither domain_id nor assay_id"),
    ],
)
def test_another_json_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BadData, match=says):
        read_published(tmp_path / "x.json")


def test_a_part_without_a_molecule_is_refused(drugood: Path) -> None:
    with pytest.raises(BadData, match="has no readable molecule in iid_test"):
        read_published(changed(drugood, iid_test=[]))


# GOOD ------------------------------------------------------------------------------------------------------------------

NAMES = dict(zip(("train", "id_val", "id_test", "val", "test"), FIVE, strict=True))


def graphs(part: str) -> dict[str, Any]:
    rows = [entry(part, number) for number in range(8)]
    labels = torch.tensor([[float("nan") if number == 3 else float(number % 2)] for number in range(8)])
    return {
        "smiles": [row["smiles"] for row in rows],
        "y": labels,
        "domain_id": torch.tensor([row["domain_id"] for row in rows]),
    }


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """As plain mappings, which need no torch_geometric."""
    folder = tmp_path / "GOODHIV" / "scaffold"
    (folder / "processed").mkdir(parents=True)
    for shift in ("covariate", "concept"):
        for theirs, part in NAMES.items():
            torch.save((graphs(part), {}), folder / "processed" / f"{shift}_{theirs}.pt")
    return folder


def test_the_parts_of_good_are_kept(good: Path) -> None:
    molecules, split = read_published(good)
    assert split.kind == "scaffold" and split.id.sizes == (8, 8, 8) and split.ood.sizes == (6, 2, 8)
    assert molecules.smiles[split.ood.test].tolist() == graphs("ood_test")["smiles"]
    np.testing.assert_array_equal(molecules.columns["y"][split.id.train], [0, 1, 0, np.nan, 0, 1, 0, 1])
    assert split.remarks[:2] == (
        "this is the covariate shift",
        "set file to its concept_train.pt for the concept shift",
    )


def test_a_file_of_the_other_shift_names_it(good: Path) -> None:
    _, split = read_published(good / "processed" / "concept_train.pt")
    assert split.kind == "concept of scaffold" and split.remarks[0] == "this is the concept shift"


def test_several_labels_become_several_columns(good: Path) -> None:
    for theirs, part in NAMES.items():
        both = {**graphs(part), "y": torch.arange(16.0).reshape(8, 2)}
        torch.save((both, {}), good / "processed" / f"covariate_{theirs}.pt")
    molecules, split = read_published(good)
    assert molecules.columns["y_1"][split.id.train].tolist() == [1.0, 3, 5, 7, 9, 11, 13, 15]


def test_a_folder_of_several_domains_asks_for_one(good: Path) -> None:
    with pytest.raises(BadData, match="not a GOOD folder, .* Try: one of its folders scaffold"):
        read_published(good.parent)


def test_a_missing_part_is_named(good: Path) -> None:
    (good / "processed" / "covariate_id_val.pt").unlink()
    with pytest.raises(BadData, match="covariate_id_val.pt is missing"):
        read_published(good)


def test_graphs_without_smiles_are_refused(good: Path) -> None:
    torch.save(({"domain_id": torch.zeros(3)}, {}), good / "processed" / "covariate_val.pt")
    with pytest.raises(
        BadData, match="covariate_val.pt is not a molecular set of GOOD: its graphs do not each have a 'smiles'"
    ):
        read_published(good)


class Hostile:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _run, ()


def _run() -> None:
    Hostile.ran = True


def test_a_file_that_would_run_code_is_refused_and_not_run(good: Path) -> None:
    torch.save((Hostile(), {}), good / "processed" / "covariate_train.pt")
    with pytest.raises(BadData, match=r"cannot be read safely: it holds \S*_run, neither a tensor nor a graph"):
        read_published(good)
    assert not Hostile.ran


FAKE = {
    "__init__.py": "",
    "data/__init__.py": "from torch_geometric.data.data import Data\n",
    "data/data.py": "class Data:\n    def to_dict(self): return dict(self._store.mapping)\nclass DataEdgeAttr: ...\nclass Other: ...\n",
    "data/storage.py": "class GlobalStorage: ...\n",
}
"""As much of torch_geometric as its files name: the real one is not a dependency. Checked by hand against 2.8.1."""


@pytest.fixture
def graph_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in FAKE.items():
        file = tmp_path / "lib" / "torch_geometric" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    before = _forget()
    yield
    _forget()
    sys.modules.update(before)


def _forget() -> dict[str, Any]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "torch_geometric"}


def as_graphs(good: Path) -> None:
    """Write the folder again as objects of the graph library."""
    data = importlib.import_module("torch_geometric.data.data")
    storage = importlib.import_module("torch_geometric.data.storage")
    for theirs, part in NAMES.items():
        one, kept = data.Data(), storage.GlobalStorage()
        kept.mapping, one._store, one.edge = graphs(part), kept, data.DataEdgeAttr()
        torch.save((one, {}), good / "processed" / f"covariate_{theirs}.pt")


@pytest.mark.usefixtures("graph_library")
def test_objects_of_the_graph_library_are_allowed(good: Path) -> None:
    as_graphs(good)
    _, split = read_published(good)
    assert split.id.sizes == (8, 8, 8)


@pytest.mark.usefixtures("graph_library")
def test_other_objects_of_the_graph_library_are_refused(good: Path) -> None:
    other = importlib.import_module("torch_geometric.data.data").Other()
    torch.save((other, {}), good / "processed" / "covariate_train.pt")
    with pytest.raises(BadData, match="it holds torch_geometric.data.data.Other, neither a tensor nor a graph"):
        read_published(good)


def test_a_missing_graph_library_names_the_pip_command(
    good: Path, graph_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_graphs(good)
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(BadData, match="not installed. Try: `pip install torch_geometric`"):
        read_published(good)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="does not exist. Try: a DrugOOD JSON file or a GOOD folder"):
        read_published(tmp_path / "x.json")
