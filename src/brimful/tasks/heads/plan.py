"""From the cells of a grid to the heads that must be trained: cells that read the same head share one job."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from brimful.errors import BadOption
from brimful.tasks.heads.packed.head import HeadShape
from brimful.tasks.heads.packed.job import Job, Rows
from brimful.tasks.heads.spec.grid import Cell


def data_key(cell: Cell) -> str:
    """What rows a cell reads."""
    return f"{cell.dataset.name}/{cell.encoder.name}"


def job_of(cell: Cell, rows: Rows, classes: Sequence[int]) -> Job | None:
    """None where nothing is trained."""
    if cell.head is None or cell.train is None or cell.method.objective is None:
        return None
    classifier = cell.method.kind == "classifier"
    if classifier and not classes:
        raise BadOption(f"{cell.method.name} needs classes to train on: give dataset {cell.dataset.name} a label")
    trained = {name: cell.options[name] for name in cell.method.trained}
    what = [data_key(cell), cell.method.objective, trained, asdict(cell.head), asdict(cell.train), cell.seed]
    name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return Job(
        name=name,
        data=data_key(cell),
        objective=cell.method.objective,
        options=trained,
        seed=cell.seed,
        shape=HeadShape(
            inputs=rows.features.shape[1],
            hidden=cell.head.hidden,
            classes=tuple(classes) if classifier else (),
            activation=cell.head.activation,
        ),
        training=cell.train,
        dropout=cell.head.dropout,
    )


def kin(jobs: Sequence[Job], rows: Mapping[str, Rows]) -> list[list[Job]]:
    """Jobs that can share packs, the largest group first: all that differ in loss, dataset, seed or a number at most."""
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        groups.setdefault((*job.kin, rows[job.data].features.dtype), []).append(job)
    return sorted(groups.values(), key=len, reverse=True)
