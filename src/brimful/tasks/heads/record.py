"""The rows of a sweep as they become known: each written as an event at once, none computed twice.

A row belongs to a cell of the grid; trivial baselines have none and go by dataset, name and seed. What trains nothing is
the same under every seed and has one run for all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from brimful.tasks.heads.folder import SweepFolder
from brimful.tasks.heads.packed.runner import Finished
from brimful.tasks.heads.prepare import Prepared
from brimful.tasks.heads.rate import Scores
from brimful.tasks.heads.results.files import COLUMNS, write_run
from brimful.tasks.heads.results.metrics import Side, all_metrics
from brimful.tasks.heads.scores.trivial import TRIVIAL
from brimful.tasks.heads.spec.grid import Cell
from brimful.train.journal import Journal

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
        return _key(cell) in self.known

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
            self._write(_key(cell), self._row(prepared, cells[0].run, scores, **_of(cell), seconds=seconds))

    def trained(self, prepared: Prepared, cell: Cell, finished: Finished, scores: Scores) -> None:
        judged = finished.job.sees_ood  # a plain classifier is judged by its loss, which is no AUROC
        if finished.diverged:
            which = f"{cell.method.name} {cell.settings_text} on {cell.encoder.name}, seed {cell.seed}"
            self.remark(cell.dataset.name, [f"{which}: the loss was no number any more in epoch {finished.epochs}"])
        if not finished.best_epoch:  # nothing was learnt that could be measured
            scores = np.full_like(scores[0], np.nan), np.full_like(scores[1], np.nan)
        self._keep(cell.run, scores, np.array(finished.curve) if judged else NONE, np.array(finished.losses))
        row = self._row(
            prepared, cell.run, scores, **_of(cell), epochs=finished.epochs, best_epoch=finished.best_epoch,
            valid_auroc=finished.valid_score if judged and finished.best_epoch else None,
        )  # fmt: skip
        self._write(_key(cell), row)

    def rows(self, cells: Sequence[Cell], datasets: Iterable[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """In the order of the grid, each dataset's trivial baselines after its methods."""
        keys: list[str] = []
        for name in datasets:
            keys += [_key(cell) for cell in cells if cell.dataset.name == name]
            keys += [_trivial_key(name, method, seed) for method in TRIVIAL for seed in seeds]
        return [self._sided(self.known[key]) for key in keys if key in self.known]

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


def _key(cell: Cell) -> str:
    return f"{cell.run}/{cell.seed}"


def _trivial_key(dataset: str, method: str, seed: int) -> str:
    return f"{dataset}/{NO_ENCODER}/{method}/{seed}"
