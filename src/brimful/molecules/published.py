"""Published splits, used as they are: a DrugOOD JSON file or a GOOD folder.

Both have five parts: ID training, validation and test, OOD validation and test. Neither has OOD molecules to train on, so
part of the OOD validation molecules become those, by domain and as near to three in four as possible. The test molecules
are the published ones. Leaks become remarks and are not repaired.
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
from brimful.molecules.dataset import Column, Molecules, Progress, column_from, molecules_from, silent
from brimful.molecules.splits import Parts, Positions, Split, grouped, in_order, leaks, salts

PART_NAMES = ("train", "iid_val", "iid_test", "ood_val", "ood_test")
"""The five parts, as DrugOOD calls them."""
TRAINING_SHARE = 0.75
"""The share of the OOD validation molecules that is trained on: about 2000 to 600."""


@dataclass(frozen=True, kw_only=True)
class PublishedRows:
    """The rows of all five parts, one after the other."""

    source: str
    kind: str
    """What separates the sides: `scaffold`, `size`, `assay`, `protein` …"""
    smiles: Column
    part: Column
    """The part of each row, one of PART_NAMES."""
    domain: Column
    """The domain of each row, as text."""
    columns: Mapping[str, Column]
    remarks: tuple[str, ...] = ()


def read_published(path: Path, *, cache: Path | None = None, progress: Progress = silent) -> tuple[Molecules, Split]:
    """The molecules, with the columns `part` and `domain` besides the published ones, and their split."""
    if not path.exists():
        raise BadData(f"{path} does not exist. Try: a DrugOOD JSON file or a GOOD folder.")
    rows = read_drugood(path) if path.suffix == ".json" else read_good(path)
    columns = {**rows.columns, "part": rows.part, "domain": rows.domain}
    molecules = molecules_from(rows.source, rows.smiles, columns=columns, cache=cache, progress=progress)
    positions = {name: np.flatnonzero(molecules.columns["part"] == name) for name in PART_NAMES}
    empty = [name for name, rows_of_part in positions.items() if not len(rows_of_part)]
    if empty:
        raise BadData(f"{rows.source} has no readable molecule in {', '.join(empty)}. Try: download it again.")
    train, valid, remark = _divide_ood_valid(positions["ood_val"], molecules)
    split = Split(
        kind=rows.kind,
        id=Parts(train=positions["train"], valid=positions["iid_val"], test=positions["iid_test"]),
        ood=Parts(train=train, valid=valid, test=positions["ood_test"]),
    )
    shared = [f"as published: {sentence}" for sentence in leaks(split, molecules.facts)]
    checked = shared or ["checked: no molecule in two parts"]
    return molecules, replace(split, remarks=(*rows.remarks, remark, *checked, *salts(split, molecules.facts)))


def _divide_ood_valid(positions: Positions, molecules: Molecules) -> tuple[Positions, Positions, str]:
    """OOD molecules to train on and to validate with, and a sentence that says how they were chosen."""
    if len(positions) < 2:
        raise BadData(
            f"{molecules.source} has {len(positions)} OOD validation molecule, and training needs some of them. Try: another file."
        )
    groups = grouped(positions, molecules.columns["domain"], 0, "published")
    goal = TRAINING_SHARE * len(positions)
    if len(groups) == 1:
        ordered, count = in_order(positions, molecules.smiles, 0, "published"), int(goal)
        train, valid, how = ordered[:count], ordered[count:], "at random, all are of one domain"
    else:
        ends = np.cumsum([len(group) for group in groups[:-1]])
        count = int(np.abs(ends - goal).argmin()) + 1
        train, valid = np.concatenate(groups[:count]), np.concatenate(groups[count:])
        how = f"by domain: {count:,} and {len(groups) - count:,} of them"
    return train, valid, f"{len(train):,} of the {len(positions):,} published OOD validation molecules are the OOD training part, {how}"  # fmt: skip


# ---- DrugOOD: {"cfg": …, "split": {"train": [{"smiles", "cls_label", "reg_label", "assay_id", "domain_id"}, …], …}} ----------
#
# After the curator that writes it (tencent-ailab/DrugOOD, `drugood/curators/curator.py`). Its domains are disjoint between
# `train`, `ood_val` and `ood_test`; `iid_val` and `iid_test` have the training domains.

_DOMAIN_KEYS = ("domain_id", "assay_id")


def read_drugood(path: Path) -> PublishedRows:
    """All five parts. Proteins, of the structure-based sets, are ignored: two rows may have one molecule."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadData(f"{path} is not a whole JSON file ({in_one_line(error)}). Try: download it again.") from None
    split = content.get("split") if isinstance(content, dict) else None
    missing = [name for name in PART_NAMES if not isinstance(split, dict) or not isinstance(split.get(name), list)]
    if missing:
        raise BadData(
            f'{path} is not a DrugOOD file: it has no list "split" → {", ".join(missing)}. Try: download it again.'
        )
    rows = [(name, row) for name in PART_NAMES for row in content["split"][name]]
    if not rows:
        raise BadData(f"{path} has no molecules. Try: download it again.")
    for number, (name, row) in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("smiles"), str):
            raise BadData(
                f'{path} is not a DrugOOD file: entry {number} ({name}) has no "smiles". Try: download it again.'
            )
    domain = next((key for key in _DOMAIN_KEYS if all(key in row for _, row in rows)), None)
    if domain is None:
        raise BadData(
            f"{path}: its entries have neither {' nor '.join(_DOMAIN_KEYS)}. Try: a DrugOOD file with domains."
        )
    try:
        kind = str(content["cfg"]["domain"]["domain_name"])
    except (KeyError, TypeError):
        kind = path.stem.rsplit("_", 1)[-1]  # the curators also end the file name with it
    return PublishedRows(
        source=str(path),
        kind=kind,
        smiles=_objects(row["smiles"] for _, row in rows),
        part=_objects(name for name, _ in rows),
        domain=_objects(str(row[domain]) for _, row in rows),
        columns=_plain_columns([row for _, row in rows]),
    )


def _plain_columns(rows: list[dict[str, Any]]) -> dict[str, Column]:
    """Everything that is text or a number; a row that lacks one has a blank."""
    names = dict.fromkeys(name for row in rows for name in row if name not in ("smiles", "protein"))
    values = {name: [row.get(name) for row in rows] for name in names}
    return {
        name: column_from(column)
        for name, column in values.items()
        if not any(isinstance(value, list | dict) for value in column)
    }


def _objects(values: Any) -> Column:
    return np.array(list(values), dtype=object)


# ---- GOOD: GOODHIV/scaffold/processed/{covariate,concept}_{train,id_val,id_test,val,test}.pt --------------------------------
#
# Each file is what torch_geometric's InMemoryDataset writes, with `smiles`, `y` and `domain_id` (divelab/GOOD,
# `GOOD/data/good_datasets/good_hiv.py`). Such a file is a pickle. It is read with `weights_only=True` and four classes of
# torch_geometric allowed; anything else in it is refused, never run.

SHIFTS = ("covariate", "concept")
_GOOD_NAMES = dict(zip(PART_NAMES, ("train", "id_val", "id_test", "val", "test"), strict=True))


def read_good(path: Path) -> PublishedRows:
    """The parts of one shift: the covariate one, unless `path` is a file of the other."""
    folder, shift = _find_good(path)
    parts = {name: _load_graphs(folder / f"{shift}_{theirs}.pt") for name, theirs in _GOOD_NAMES.items()}
    columns = {name: _label_columns(graphs) for name, graphs in parts.items()}
    shared = [name for name in columns["train"] if all(name in labels for labels in columns.values())]
    domain = folder.parent.name
    others = [other for other in SHIFTS if other != shift and (folder / f"{other}_train.pt").is_file()]
    return PublishedRows(
        source=str(folder.parent),
        kind=domain if shift == "covariate" else f"{shift} of {domain}",
        smiles=_objects(smiles for graphs in parts.values() for smiles in graphs["smiles"]),
        part=_objects(name for name, graphs in parts.items() for _ in graphs["smiles"]),
        domain=_objects(str(int(number)) for graphs in parts.values() for number in graphs["domain_id"]),
        columns={name: np.concatenate([labels[name] for labels in columns.values()]) for name in shared},
        remarks=(
            f"this is the {shift} shift",
            *(f"set file to its {other}_train.pt for the {other} shift" for other in others),
        ),
    )


def _find_good(path: Path) -> tuple[Path, str]:
    """The folder of the files, and the shift."""
    if path.suffix == ".pt":
        shift = path.name.split("_")[0]
        if shift not in SHIFTS:
            raise BadData(f"{path} has no shift with two sides. Try: a file of {' or '.join(SHIFTS)}.")
        return path.resolve().parent, shift
    for folder in (path / "processed", path):
        shift = next((shift for shift in SHIFTS if (folder / f"{shift}_train.pt").is_file()), "")
        if shift:
            return folder.resolve(), shift
    below = sorted(file.parent.parent.name for file in path.glob("*/processed/covariate_train.pt"))
    fix = f"one of its folders {', '.join(below)}" if below else "one such as GOODHIV/scaffold"
    raise BadData(f"{path} is not a GOOD folder, it has no processed/covariate_train.pt. Try: {fix}.")


def _load_graphs(file: Path) -> Mapping[str, Any]:
    """The graphs of one file, as columns."""
    import torch

    if not file.is_file():
        raise BadData(f"{file} is missing. Try: a GOOD folder with {', '.join(_GOOD_NAMES.values())} of a shift.")
    allowed = _graph_classes()
    try:
        with torch.serialization.safe_globals(allowed):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, AttributeError) as error:
        raise _unreadable(file, error, installed=bool(allowed)) from None
    graphs = content[0] if isinstance(content, tuple) and content else content
    graphs = graphs if isinstance(graphs, Mapping) else getattr(graphs, "to_dict", dict)()
    for name in ("smiles", "domain_id"):
        if name not in graphs or len(graphs[name]) != len(graphs.get("smiles", ())):
            raise BadData(
                f"{file} is not a molecular set of GOOD: its graphs do not each have a {name!r}. Try: one such as GOODHIV."
            )
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


def _unreadable(file: Path, error: Exception, *, installed: bool) -> BadData:
    if not installed and "torch_geometric" in str(error):
        return BadData(
            f"{file} holds graphs of torch_geometric, which is not installed. Try: `pip install torch_geometric`."
        )
    refused = re.search(r"GLOBAL (\S+)", str(error))
    why = f"it holds {refused[1]}, neither a tensor nor a graph" if refused else in_one_line(error)
    return BadData(f"{file} cannot be read safely: {why}. Try: download it again.")


def _label_columns(graphs: Mapping[str, Any]) -> dict[str, Column]:
    """`y`, or `y_0`, `y_1` … where a molecule has several labels; one that was not measured stays NaN."""
    if "y" not in graphs:
        return {}
    labels = np.asarray(graphs["y"], dtype=np.float64).reshape(len(graphs["smiles"]), -1)
    return {"y" if labels.shape[1] == 1 else f"y_{task}": labels[:, task] for task in range(labels.shape[1])}
