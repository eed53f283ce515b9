"""A DrugOOD file: `{"cfg": …, "split": {"train": [{"smiles", "cls_label", "reg_label", "assay_id", "domain_id"}, …], …}}`.

Read after the curator that writes them (tencent-ailab/DrugOOD, `drugood/curators/curator.py`). Its domains are disjoint
between `train`, `ood_val` and `ood_test`; `iid_val` and `iid_test` are of the training domains.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from brimful.errors import BadData, in_one_line
from brimful.tasks.heads.molecules.five_parts import FIVE, FiveParts
from brimful.tasks.heads.molecules.table import Column, column_of

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
