"""Splits as published: a DrugOOD JSON file or a GOOD folder, used as they are.

Both have five parts: ID training, validation and test, OOD validation and test. Neither has OOD molecules to train on, so
part of the OOD validation molecules become them, by domain and as near to three in four as that goes. The test molecules are
the published ones. What the leak check finds is told and not mended.
"""

import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from brimful.errors import BadData, in_one_line
from brimful.molecules.dataset import Column, Facts, Molecules, Say, column_of, facts_of, molecules_of
from brimful.molecules.splits import Part, Places, Split, grouped, in_order, leaks, salts

# What a published split gives, whatever its format: the rows of five parts, one after the other.


FIVE = ("train", "iid_val", "iid_test", "ood_val", "ood_test")
"""The parts, as DrugOOD calls them."""


@dataclass(frozen=True, kw_only=True)
class FiveParts:
    """The rows of all five parts, one after the other."""

    source: str
    kind: str
    """What parts the sides: `scaffold`, `size`, `assay`, `protein` …"""
    smiles: Column
    part: Column
    """Of each row, one of `FIVE`."""
    domain: Column
    """Of each row, as text."""
    columns: Mapping[str, Column]
    remarks: tuple[str, ...] = ()


# A DrugOOD file: `{"cfg": …, "split": {"train": [{"smiles", "cls_label", "reg_label", "assay_id", "domain_id"}, …], …}}`.
#
# Read after the curator that writes them (tencent-ailab/DrugOOD, `drugood/curators/curator.py`). Its domains are disjoint
# between `train`, `ood_val` and `ood_test`; `iid_val` and `iid_test` are of the training domains.


_DOMAINS = ("domain_id", "assay_id")
"""Where the domain of a row stands, the first that is there."""


def read_drugood(path: Path) -> FiveParts:
    """All five parts. Proteins, of the structure-based sets, are left aside: two rows may have one molecule."""
    given = _loaded(path)
    rows = [(name, row) for name in FIVE for row in given["split"][name]]
    if not rows:
        raise BadData(f"{path} has no molecules; get it again")
    for number, (name, row) in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("smiles"), str):
            raise BadData(f'{path}: entry {number} ({name}) has no "smiles"; is this a file of DrugOOD?')
    domain = next((key for key in _DOMAINS if all(key in row for _, row in rows)), None)
    if domain is None:
        raise BadData(f"{path}: its entries have neither {' nor '.join(_DOMAINS)}; get a file of DrugOOD with domains")
    return FiveParts(
        source=str(path),
        kind=_kind(path, given),
        smiles=_objects(row["smiles"] for _, row in rows),
        part=_objects(name for name, _ in rows),
        domain=_objects(str(row[domain]) for _, row in rows),
        columns=_columns([row for _, row in rows]),
    )


def _loaded(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadData(f"{path}: no whole JSON file ({in_one_line(error)}); get it again") from None
    split = given.get("split") if isinstance(given, dict) else None
    missing = [name for name in FIVE if not isinstance(split, dict) or not isinstance(split.get(name), list)]
    if missing:
        raise BadData(f'{path} is no DrugOOD file: it has no list "split" → {", ".join(missing)}')
    return dict(given)


def _kind(path: Path, given: dict[str, Any]) -> str:
    """The domain that the file was split by; the curators end its name with it, too."""
    try:
        return str(given["cfg"]["domain"]["domain_name"])
    except (KeyError, TypeError):
        return path.stem.rsplit("_", 1)[-1]


def _columns(rows: list[dict[str, Any]]) -> dict[str, Column]:
    """Everything that is text or a number; a row may lack some, which is blank."""
    names = dict.fromkeys(name for row in rows for name in row if name not in ("smiles", "protein"))
    values = {name: [row.get(name) for row in rows] for name in names}
    return {
        name: column_of(found)
        for name, found in values.items()
        if not any(isinstance(one, list | dict) for one in found)
    }


def _objects(values: Any) -> Column:
    return np.array(list(values), dtype=object)


# A GOOD folder: `GOODHIV/scaffold/processed/{covariate,concept}_{train,id_val,id_test,val,test}.pt`.
#
# Each file is what torch_geometric's InMemoryDataset writes: the graphs of one part in one, with `smiles`, `y` and
# `domain_id` (divelab/GOOD, `GOOD/data/good_datasets/good_hiv.py`). Such a file is a pickle. It is read with
# `weights_only=True` and four classes of torch_geometric allowed; whatever else it holds is refused, never run.


SHIFTS = ("covariate", "concept")
_NAMES = dict(zip(FIVE, ("train", "id_val", "id_test", "val", "test"), strict=True))
"""GOOD's name of each part."""


def read_good(path: Path) -> FiveParts:
    """The parts of one shift: the covariate one, unless `path` is a file of the other."""
    folder, shift = _place(path)
    parts = {name: _loaded_good(folder / f"{shift}_{theirs}.pt") for name, theirs in _NAMES.items()}
    columns = {name: _columns_good(graphs) for name, graphs in parts.items()}
    shared = [name for name in columns["train"] if all(name in one for one in columns.values())]
    domain = folder.parent.name
    return FiveParts(
        source=str(folder.parent),
        kind=domain if shift == "covariate" else f"{shift} of {domain}",
        smiles=np.array([one for graphs in parts.values() for one in graphs["smiles"]], dtype=object),
        part=np.array([name for name, graphs in parts.items() for _ in graphs["smiles"]], dtype=object),
        domain=np.array([str(int(one)) for graphs in parts.values() for one in graphs["domain_id"]], dtype=object),
        columns={name: np.concatenate([one[name] for one in columns.values()]) for name in shared},
        remarks=_told(folder, shift),
    )


def _place(path: Path) -> tuple[Path, str]:
    """The folder of the files, and the shift."""
    if path.suffix == ".pt":
        shift = path.name.split("_")[0]
        if shift not in SHIFTS:
            raise BadData(f"{path} is of no shift with two sides; name a file of {' or '.join(SHIFTS)}")
        return path.resolve().parent, shift
    for folder in (path / "processed", path):
        shift = next((shift for shift in SHIFTS if (folder / f"{shift}_train.pt").is_file()), "")
        if shift:
            return folder.resolve(), shift
    below = sorted(found.parent.parent.name for found in path.glob("*/processed/covariate_train.pt"))
    raise BadData(
        f"{path} is no GOOD folder: it has no processed/covariate_train.pt; "
        + (f"name one of its folders {', '.join(below)}" if below else "name one such as GOODHIV/scaffold")
    )


def _told(folder: Path, shift: str) -> tuple[str, ...]:
    others = [other for other in SHIFTS if other != shift and (folder / f"{other}_train.pt").is_file()]
    return (f"this is the {shift} shift", *(f"name its {other}_train.pt for the {other} shift" for other in others))


def _loaded_good(file: Path) -> Mapping[str, Any]:
    """The graphs of one file, as columns."""
    import torch

    if not file.is_file():
        raise BadData(f"{file} is missing; a GOOD folder has {', '.join(_NAMES.values())} of a shift: get it again")
    allowed = _graph_classes()
    try:
        with torch.serialization.safe_globals(allowed):
            found = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, AttributeError) as error:
        raise _unreadable(file, error, known=bool(allowed)) from None
    graphs = found[0] if isinstance(found, tuple) and found else found
    graphs = graphs if isinstance(graphs, Mapping) else getattr(graphs, "to_dict", dict)()
    for name in ("smiles", "domain_id"):
        if name not in graphs or len(graphs[name]) != len(graphs.get("smiles", ())):
            raise BadData(f"{file}: its graphs do not each have a {name!r}; is this a molecular set of GOOD?")
    return graphs


def _graph_classes() -> list[Any]:
    """What a file of graphs may hold besides tensors; none where torch_geometric is not installed."""
    try:
        from torch_geometric.data import Data, storage
        from torch_geometric.data import data as graphs
    except ImportError:
        return []
    names = ((graphs, "DataEdgeAttr"), (graphs, "DataTensorAttr"), (storage, "GlobalStorage"))
    return [Data, *(getattr(module, name) for module, name in names if hasattr(module, name))]


def _unreadable(file: Path, error: Exception, *, known: bool) -> BadData:
    if not known and "torch_geometric" in str(error):
        return BadData(f"{file} holds torch_geometric's graphs, and it is not installed: pip install torch_geometric")
    refused = re.search(r"GLOBAL (\S+)", str(error))
    why = f"it holds {refused[1]}, neither a tensor nor a graph" if refused else in_one_line(error)
    return BadData(f"{file} cannot be read safely: {why}; get it again from its publisher")


def _columns_good(graphs: Mapping[str, Any]) -> dict[str, Column]:
    """The labels: `y`, or `y_0`, `y_1` … where a molecule has several; a label that was not measured stays NaN."""
    if "y" not in graphs:
        return {}
    labels = np.asarray(graphs["y"], dtype=np.float64).reshape(len(graphs["smiles"]), -1)
    return {"y" if labels.shape[1] == 1 else f"y_{task}": labels[:, task] for task in range(labels.shape[1])}


_FOR_TRAINING = 0.75
"""Of the OOD validation molecules: about 2000 to 600."""


def is_published(path: str | Path) -> bool:
    """Whether this is for `read_published` and not for `read_molecules`."""
    return Path(path).is_dir() or Path(path).suffix in (".json", ".pt")


def read_published(
    path: str | Path, *, cache: Path | None = None, say: Say = lambda phrase: None
) -> tuple[Molecules, Split]:
    """The molecules, with the columns `part` and `domain` besides the published ones, and their split."""
    path = Path(path)
    if not path.exists():
        raise BadData(f"{path} does not exist; name a DrugOOD JSON file or a GOOD folder")
    given = read_drugood(path) if path.suffix == ".json" else read_good(path)
    columns = {**given.columns, "part": given.part, "domain": given.domain}
    molecules = molecules_of(given.source, given.smiles, columns=columns, cache=cache, say=say)
    return molecules, _split(given, molecules, facts_of(molecules, cache=cache, say=say))


def _split(given: FiveParts, molecules: Molecules, facts: Facts) -> Split:
    places = {name: np.flatnonzero(molecules.columns["part"] == name) for name in FIVE}
    empty = [name for name, found in places.items() if not len(found)]
    if empty:
        raise BadData(f"{given.source} has no molecule that can be read in {', '.join(empty)}; get or write it again")
    train, valid, how = _part_valid(places["ood_val"], molecules)
    split = Split(
        kind=given.kind,
        id=Part(train=places["train"], valid=places["iid_val"], test=places["iid_test"]),
        ood=Part(train=train, valid=valid, test=places["ood_test"]),
    )
    found = leaks(split, facts)
    warned = [f"as published: {sentence}" for sentence in found] or ["checked: no molecule in two parts"]
    return replace(split, remarks=(*given.remarks, how, *warned, *salts(split, facts)))


def _part_valid(places: Places, molecules: Molecules) -> tuple[Places, Places, str]:
    """OOD molecules to train on and to validate with, and how they were parted."""
    if len(places) < 2:
        raise BadData(f"{molecules.source} has {len(places)} OOD validation molecule, and training needs some of them")
    groups = grouped(places, molecules.columns["domain"], 0, "published")
    goal = _FOR_TRAINING * len(places)
    if len(groups) == 1:
        ordered, cut = in_order(places, molecules.smiles, 0, "published"), int(goal)
        train, valid, by = ordered[:cut], ordered[cut:], "at random: all are of one domain"
    else:
        cuts = np.cumsum([len(group) for group in groups[:-1]])
        count = int(np.abs(cuts - goal).argmin()) + 1
        train, valid = np.concatenate(groups[:count]), np.concatenate(groups[count:])
        by = f"by domain: {count:,} and {len(groups) - count:,} of them"
    told = f"{len(train):,} of the {len(places):,} published OOD validation molecules are the OOD training part, {by}"
    return train, valid, told
