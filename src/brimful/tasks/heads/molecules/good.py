"""A GOOD folder: `GOODHIV/scaffold/processed/{covariate,concept}_{train,id_val,id_test,val,test}.pt`.

Each file is what torch_geometric's InMemoryDataset writes: the graphs of one part in one, with `smiles`, `y` and
`domain_id` (divelab/GOOD, `GOOD/data/good_datasets/good_hiv.py`). Such a file is a pickle. It is read with
`weights_only=True` and four classes of torch_geometric allowed; whatever else it holds is refused, never run.
"""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brimful.errors import BadData, in_one_line
from brimful.tasks.heads.molecules.five_parts import FIVE, FiveParts
from brimful.tasks.heads.molecules.table import Column

SHIFTS = ("covariate", "concept")
_NAMES = dict(zip(FIVE, ("train", "id_val", "id_test", "val", "test"), strict=True))
"""GOOD's name of each part."""


def read_good(path: Path) -> FiveParts:
    """The parts of one shift: the covariate one, unless `path` is a file of the other."""
    folder, shift = _place(path)
    parts = {name: _loaded(folder / f"{shift}_{theirs}.pt") for name, theirs in _NAMES.items()}
    columns = {name: _columns(graphs) for name, graphs in parts.items()}
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


def _loaded(file: Path) -> Mapping[str, Any]:
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


def _columns(graphs: Mapping[str, Any]) -> dict[str, Column]:
    """The labels: `y`, or `y_0`, `y_1` … where a molecule has several; a label that was not measured stays NaN."""
    if "y" not in graphs:
        return {}
    labels = np.asarray(graphs["y"], dtype=np.float64).reshape(len(graphs["smiles"]), -1)
    return {"y" if labels.shape[1] == 1 else f"y_{task}": labels[:, task] for task in range(labels.shape[1])}
