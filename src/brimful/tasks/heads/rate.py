"""The scores of test molecules by a finished head, or without one: arrays of ID and of OOD, higher for OOD."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from brimful.errors import BadData, BadOption
from brimful.tasks.heads.packed.chance import SAMPLES, kept, key
from brimful.tasks.heads.packed.head import Head
from brimful.tasks.heads.packed.job import Job, Rows
from brimful.tasks.heads.packed.runner import Finished
from brimful.tasks.heads.scores import classifier_scores, distance_scores
from brimful.tasks.heads.spec.grid import Cell

Scores = tuple[Any, Any]
ROWS = 8192
"""Rows that go through a head at a time."""


def head_scores(cell: Cell, finished: Finished, rows: Rows) -> Scores:
    """Of a trained method, with the weights that did best on validation molecules."""
    head = _loaded(finished)
    options: dict[str, Any] = {name: cell.options[name] for name in cell.method.scored}
    found = [_by_head(cell, finished.job, head, rows.features[side["test"]], options) for side in (rows.id, rows.ood)]
    return found[0], found[1]


def plain_scores(cell: Cell, rows: Rows) -> Scores:
    """Of a method that trains nothing: fitted on the ID training molecules."""
    matrix = rows.features.numpy()
    test = np.concatenate([rows.id["test"], rows.ood["test"]])
    labels = None if rows.labels is None else rows.labels.numpy()[rows.id["train"]]
    try:
        found = distance_scores(cell.method.name, matrix[rows.id["train"]], matrix[test], labels=labels, **cell.options)
    except (BadData, BadOption) as error:
        where = f"{cell.dataset.name}, {cell.method.name} on {cell.encoder.name}"
        raise type(error)(f"{where}: {error}") from None
    return found[: len(rows.id["test"])], found[len(rows.id["test"]) :]


def _loaded(finished: Finished) -> Head:
    head, place = Head(finished.job.shape), 0
    with torch.no_grad():
        for param in head.parameters():
            param.copy_(finished.weights[place : place + param.numel()].view_as(param))
            place += param.numel()
    return head.eval()


def _by_head(cell: Cell, job: Job, head: Head, features: Tensor, options: dict[str, Any]) -> Any:
    x = features.float()
    if cell.method.kind == "energy":
        with torch.no_grad():
            return torch.cat([head(part) for part in x.split(ROWS)]).squeeze(-1).double().numpy()

    def logits(part: Tensor, dropout: bool, sample: int) -> Tensor:
        return job.shape.logits(head(part, _factors(job, len(part), sample) if dropout else ()))

    return classifier_scores(cell.method.name, logits, x, classes=torch.tensor(job.shape.classes), **options)


def _factors(job: Job, rows: int, sample: int) -> tuple[Tensor, ...]:
    keys = key(torch.tensor([job.seed]), SAMPLES, sample)
    dropout = torch.tensor([job.dropout])
    return tuple(kept(key(keys, layer), rows, units, dropout)[0] for layer, units in enumerate(job.shape.hidden))
