"""The rows of a sweep as they become known: each written as an event at once, none computed twice.

A row belongs to a cell, whichever grid that was in; trivial baselines have none and go by dataset, name and seed.
What trains nothing is the same under every seed and has one run for all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brimful.errors import BadData, BadOption
from brimful.molecules.folder import SweepFolder
from brimful.molecules.job import SAMPLES, Head, Job, Rows, kept, key
from brimful.molecules.metrics import Side, all_metrics
from brimful.molecules.prepare import Prepared
from brimful.molecules.results import COLUMNS, write_run
from brimful.molecules.runner import Finished
from brimful.molecules.scores import classifier_scores, distance_scores
from brimful.molecules.spec import Cell
from brimful.molecules.trivial import TRIVIAL
from brimful.training.events import Journal

# The scores of test molecules by a finished head, or without one: arrays of ID and of OOD, higher for OOD.


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


NO_ENCODER = "–"
NONE = np.empty(0)


@dataclass(kw_only=True)
class Record:
    """What is known so far."""

    folder: SweepFolder
    journal: Journal
    positive: Side
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    """Sentences on each dataset."""

    def has(self, cell: Cell) -> bool:
        return self._found(cell) is not None

    def has_trivial(self, dataset: str, method: str, seeds: Iterable[int]) -> bool:
        return all(_trivial_key(dataset, method, seed) in self.known for seed in seeds)

    def remark(self, dataset: str, remarks: Sequence[str], about: str = "") -> None:
        self.remarks.setdefault(dataset, []).extend(remarks)
        for remark in remarks:
            self.journal.write("note", dataset=dataset, about=about, sentence=remark)

    def trivial(self, prepared: Prepared, method: str, scores: Scores, seeds: Iterable[int]) -> None:
        run = f"{prepared.asked.name}-{method}"
        self._keep(run, scores)
        own = {"encoder": NO_ENCODER, "method": method, "settings": "", "kind": "trivial", "deterministic": True}
        for seed in seeds:
            self._write(
                _trivial_key(prepared.asked.name, method, seed), self._row(prepared, run, scores, seed=seed, **own)
            )

    def plain(self, prepared: Prepared, cells: Sequence[Cell], scores: Scores, seconds: float) -> None:
        """One computation for all these cells, which differ in the seed."""
        self._keep(cells[0].run, scores)
        for cell in cells:
            self._write(cell.keys[0], self._row(prepared, cells[0].run, scores, **_of(cell), seconds=seconds))

    def trained(self, prepared: Prepared, cell: Cell, finished: Finished, scores: Scores) -> None:
        judged = finished.job.sees_ood  # a plain classifier is judged by its loss, which is no AUROC
        if finished.diverged:
            told = {"dataset": cell.dataset.name, "about": cell.keys[0], "sentence": _diverged(cell, finished.epochs)}
            self.journal.write("note", **told)
        if not finished.best_epoch:  # nothing was learnt that could be measured
            scores = np.full_like(scores[0], np.nan), np.full_like(scores[1], np.nan)
        self._keep(cell.run, scores, np.array(finished.curve) if judged else NONE, np.array(finished.losses))
        row = self._row(
            prepared, cell.run, scores, **_of(cell), epochs=finished.epochs, best_epoch=finished.best_epoch,
            valid_auroc=finished.valid_score if judged and finished.best_epoch else None,
        )  # fmt: skip
        self._write(cell.keys[0], row)

    def tell_diverged(self, cells: Sequence[Cell]) -> None:
        """Those of this call and of earlier ones, in the order and the words of this grid."""
        noted = {about for about, _ in self.folder.notes()}
        for cell in cells:
            row = self._found(cell)
            if row is not None and any((cell.dataset.name, key) in noted for key in cell.keys):
                self.remarks.setdefault(cell.dataset.name, []).append(_diverged(cell, row["epochs"]))

    def rows(self, cells: Sequence[Cell], datasets: Iterable[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """In the order of the grid and with its settings, each dataset's trivial baselines after its methods."""
        rows: list[dict[str, Any]] = []
        for name in datasets:
            there = [(cell, self._found(cell)) for cell in cells if cell.dataset.name == name]
            rows += [{**row, "settings": cell.settings_text} for cell, row in there if row is not None]
            keys = [_trivial_key(name, method, seed) for method in TRIVIAL for seed in seeds]
            rows += [self.known[key] for key in keys if key in self.known]
        return [self._sided(row) for row in rows]

    def _found(self, cell: Cell) -> dict[str, Any] | None:
        return next((self.known[key] for key in cell.keys if key in self.known), None)

    def _sided(self, row: dict[str, Any]) -> dict[str, Any]:
        """As this spec asks: an earlier call may have had the other side for the positive one."""
        figures = {name: row[f"{name}_{self.positive}"] for name in ("aupr", "fpr95")}
        return {**row, **figures, "positive": self.positive}

    def _row(self, prepared: Prepared, run: str, scores: Scores, **more: Any) -> dict[str, Any]:
        in_dist, out_dist = scores
        finite = bool(np.isfinite(in_dist).all() and np.isfinite(out_dist).all())
        figures = all_metrics(in_dist, out_dist, self.positive) if finite else {}
        return dict.fromkeys(COLUMNS) | {
            "dataset": prepared.asked.name, "split": prepared.split.kind, "positive": self.positive, "run": run,
            "n_id_test": len(in_dist), "n_ood_test": len(out_dist), **figures, **more,
        }  # fmt: skip

    def _keep(self, run: str, scores: Scores, curve: Any = NONE, loss: Any = NONE) -> None:
        write_run(self.folder.root, run, id_scores=scores[0], ood_scores=scores[1], curve=curve, loss=loss)

    def _write(self, key: str, row: dict[str, Any]) -> None:
        self.known[key] = row
        self.journal.write("run", cell=key, **row)


def _of(cell: Cell) -> dict[str, Any]:
    return {
        "encoder": cell.encoder.name, "method": cell.method.name, "settings": cell.settings_text, "seed": cell.seed,
        "kind": cell.method.kind, "deterministic": cell.deterministic,
    }  # fmt: skip


def _diverged(cell: Cell, epoch: int) -> str:
    which = " ".join(word for word in (cell.method.name, cell.settings_text, "on", cell.encoder.name) if word)
    return f"{which}, seed {cell.seed}: the loss was no number any more in epoch {epoch}"


def _trivial_key(dataset: str, method: str, seed: int) -> str:
    return f"{dataset}/{NO_ENCODER}/{method}/{seed}"
