"""The folder of a sweep, and the rows that are known so far.

sweep.json      fingerprints of splits, labels and features: results of other data are not mixed in
events.jsonl    what happened; each finished run is an event with its whole row, and is never trained again
state/          runs that have begun, every 20 s; removed when all are done
splits/         which molecule is in which part, one parquet a dataset
left_out.csv    molecules that could not be used, and why
runs/           test scores and curves of each run
results.parquet, results.md, results.tex, report.html: see `results` and `page`
"""

import csv
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from brimful.errors import BadRun
from brimful.files import atomic_path, sha256, write_atomic
from brimful.molecules.heads import Job, Rows
from brimful.molecules.methods import TRIVIAL_BASELINES
from brimful.molecules.metrics import Side, all_metrics
from brimful.molecules.pack import TENSORS, State
from brimful.molecules.prepare import Prepared
from brimful.molecules.results import COLUMNS, write_run, writing
from brimful.molecules.runner import FinishedRun
from brimful.molecules.spec import PARTS, Cell
from brimful.training.events import Journal, read_events
from brimful.training.run import RunLock

NO_ENCODER = "–"
"""The encoder of a trivial baseline."""
TestScores = tuple[np.ndarray, np.ndarray]
"""Scores of the ID and of the OOD test molecules, higher for OOD."""
_EMPTY = np.empty(0)


class SweepFolder:
    """The files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.claims, self.events = root / "sweep.json", root / "events.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and lock it. If the spec is then refused, everything that was created is removed."""
        created = [path for path in (self.root, *self.root.parents) if not path.exists()]
        with RunLock(self.root, flag="output="):
            try:
                yield
            except BaseException:
                if created and not self.claims.exists():
                    with suppress(OSError):
                        self.events.unlink(missing_ok=True)
                        (self.root / "lock").unlink()
                        for path in created:
                            path.rmdir()
                raise

    def finished_rows(self) -> dict[str, dict[str, Any]]:
        """The rows of finished runs, by `Cell.key`; trivial baselines by a key of their own."""
        runs = (event for event in read_events(self.events) if event["event"] == "run")
        return {event["cell"]: {name: event.get(name) for name in COLUMNS} for event in runs}

    def notes(self) -> list[tuple[tuple[str, str], str]]:
        """(dataset, subject) and sentence of each remark, once each."""
        events = [event for event in read_events(self.events) if event["event"] == "note" and "dataset" in event]
        return list(dict.fromkeys(((event["dataset"], event.get("about", "")), event["sentence"]) for event in events))

    def claim(self, rows: Mapping[str, Rows], prepared: Mapping[str, Prepared]) -> None:
        """Refuse to mix results of other data with these. A label where there was none changes nothing."""
        before = self._claimed()
        now = {
            "splits": {name: _split_hash(dataset) for name, dataset in prepared.items()},
            "labels": {name: label_hash for name, dataset in prepared.items() if (label_hash := _label_hash(dataset))},
            "rows": {key: _rows_hash(dataset) for key, dataset in rows.items()},
        }
        for kind, hashes in now.items():
            for name, value in hashes.items():
                if before[kind].get(name, value) != value:
                    what = f"the molecules, the split or the features of {name}"
                    if kind == "labels":
                        what = f"the label of {name} ({', '.join(prepared[name].spec.label)})"
                    raise BadRun(f"{self.root} holds results of other data: {what} changed. Try: another output=.")
        with writing(self.claims):
            write_atomic(self.claims, json.dumps({kind: {**before[kind], **now[kind]} for kind in now}, indent=1))

    def _claimed(self) -> dict[str, dict[str, str]]:
        if not self.claims.exists():
            return {"splits": {}, "labels": {}, "rows": {}}
        try:
            content = json.loads(self.claims.read_bytes())
            return {kind: dict(content[kind]) for kind in ("splits", "labels", "rows")}
        except (OSError, ValueError, TypeError, KeyError):
            raise BadRun(f"{self.claims} cannot be read, so the data of these results is unknown. Try: another output=.") from None  # fmt: skip

    def save_state(self, share: int, state: State) -> None:
        """Save the runs that have begun."""
        path = self.root / "state" / f"{share}.safetensors"
        facts = {"names": [job.name for job in state.jobs], "curves": state.curves, "losses": state.losses}
        tensors = {name: getattr(state, name).contiguous() for name in TENSORS}
        try:
            path.parent.mkdir(exist_ok=True)
            with atomic_path(path) as draft:
                save_file(tensors, draft, metadata={"runs": json.dumps(facts)})
        except (OSError, SafetensorError) as error:  # the next one may work, and the sweep continues
            raise BadRun(f"{path} cannot be written ({error}), so a killed sweep could not resume. Try: free space.") from None  # fmt: skip

    def saved_states(self, jobs: Mapping[str, Job]) -> list[State]:
        """The saved states of these jobs. A file that cannot be read is skipped: its runs begin again."""
        states = []
        for path in sorted((self.root / "state").glob("*.safetensors")):
            with suppress(SafetensorError, OSError, KeyError, ValueError):
                states += [state] if (state := _read_state(path, jobs)) is not None else []
        return _furthest(states)

    def remove_states(self) -> None:
        """After the last run."""
        shutil.rmtree(self.root / "state", ignore_errors=True)

    def write_split(self, prepared: Prepared) -> None:
        path = self.root / "splits" / f"{prepared.spec.name}.parquet"
        with writing(path):
            pq.write_table(_split_table(prepared), path)

    def write_left_out(self, molecules: Iterable[Sequence[Any]]) -> None:
        """dataset, row, SMILES, reason; the header alone where all could be used."""
        path = self.root / "left_out.csv"
        with writing(path), path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("dataset", "row", "smiles", "reason"))
            writer.writerows(dict.fromkeys(map(tuple, molecules)))


def _split_table(prepared: Prepared) -> pa.Table:
    parts, molecules = prepared.split.parts(), prepared.molecules
    positions = np.concatenate(list(parts.values()))
    names = [name.split() for name, rows in parts.items() for _ in rows]
    return pa.table(
        {
            "row": molecules.rows[positions],
            "smiles": molecules.smiles[positions].tolist(),
            "side": [side for side, _ in names],
            "part": [part for _, part in names],
            "scaffold": molecules.facts.scaffold[positions].tolist(),
            "heavy_atoms": molecules.facts.heavy_atoms[positions],
        }
    )


def _split_hash(prepared: Prepared) -> str:
    """A hash of the molecules in use and their parts."""
    table = _split_table(prepared)
    columns = [table[name].to_pylist() for name in ("side", "part", "smiles")]
    return sha256("\n".join(map(" ".join, zip(*columns, strict=True))))[:16]


def _label_hash(prepared: Prepared) -> str | None:
    """A hash of the labels of the molecules in use; None without labels."""
    if prepared.labels is None:
        return None
    return sha256(prepared.labels[prepared.split.used()].tobytes())[:16]


def _rows_hash(rows: Rows) -> str:
    """A hash of features and parts."""
    parts = [np.ascontiguousarray(side[name]).tobytes() for side in (rows.id, rows.ood) for name in PARTS]
    return sha256(rows.features.numpy().tobytes() + b"".join(parts))[:16]


def _read_state(path: Path, jobs: Mapping[str, Job]) -> State | None:
    """The runs of these jobs; None where there are none."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["runs"])
        tensors = {name: file.get_tensor(name) for name in TENSORS}
    places = [place for place, name in enumerate(facts["names"]) if name in jobs]
    if not places:
        return None
    parts: dict[str, Any] = {name: tensor[torch.tensor(places)] for name, tensor in tensors.items()}
    parts |= {name: tuple(facts[name][place] for place in places) for name in ("curves", "losses")}
    return State(jobs=tuple(jobs[facts["names"][place]] for place in places), **parts)


def _furthest(states: Sequence[State]) -> list[State]:
    """Each run once, at its last step: another number of processes leaves files of an earlier call behind."""
    where: dict[str, tuple[int, int, int]] = {}
    for number, state in enumerate(states):
        for place, (job, step) in enumerate(zip(state.jobs, state.step.tolist(), strict=True)):
            where[job.name] = max(where.get(job.name, (-1, 0, 0)), (step, number, place))
    kept = [[place for _, of, place in where.values() if of == number] for number in range(len(states))]
    return [state.take(places) for state, places in zip(states, kept, strict=True) if places]


@dataclass(kw_only=True)
class Record:
    """The rows of a sweep as they become known: each is written as an event at once, and none is computed twice.

    A row belongs to a cell, whichever grid that was in. Trivial baselines have no cell and go by dataset, name and seed.
    """

    folder: SweepFolder
    journal: Journal
    positive: Side
    by_cell: dict[str, dict[str, Any]] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    """Sentences on each dataset."""

    def has(self, cell: Cell) -> bool:
        return cell.key in self.by_cell

    def has_trivial(self, dataset: str, method: str, seeds: Iterable[int]) -> bool:
        return all(_trivial_key(dataset, method, seed) in self.by_cell for seed in seeds)

    def remark(self, dataset: str, remarks: Sequence[str], about: str = "") -> None:
        self.remarks.setdefault(dataset, []).extend(remarks)
        for remark in remarks:
            self.journal.write("note", dataset=dataset, about=about, sentence=remark)

    def add_trivial(self, prepared: Prepared, method: str, scores: TestScores, seeds: Iterable[int]) -> None:
        run = f"{prepared.spec.name}-{method}"
        self._write_arrays(run, scores)
        own = {"encoder": NO_ENCODER, "method": method, "settings": "", "kind": "trivial", "deterministic": True}
        for seed in seeds:
            row = self._row(prepared, run, scores, seed=seed, **own)
            self._write(_trivial_key(prepared.spec.name, method, seed), row)

    def add_distance(self, prepared: Prepared, cells: Sequence[Cell], scores: TestScores, seconds: float) -> None:
        """One computation for all these cells, which differ in the seed."""
        self._write_arrays(cells[0].run, scores)
        for cell in cells:
            self._write(cell.key, self._row(prepared, cells[0].run, scores, **_cell_columns(cell), seconds=seconds))

    def add_trained(self, prepared: Prepared, cell: Cell, finished: FinishedRun, scores: TestScores) -> None:
        has_auroc = finished.job.objective.sees_ood  # a plain classifier is validated by its loss
        if finished.diverged:
            sentence = _diverged(cell, finished.epochs)
            self.journal.write("note", dataset=cell.dataset.name, about=cell.key, sentence=sentence)
        if not finished.best_epoch:  # it diverged in the first epoch
            scores = np.full_like(scores[0], np.nan), np.full_like(scores[1], np.nan)
        curve = np.array(finished.curve) if has_auroc else _EMPTY
        self._write_arrays(cell.run, scores, curve, np.array(finished.losses))
        row = self._row(
            prepared, cell.run, scores, **_cell_columns(cell), epochs=finished.epochs, best_epoch=finished.best_epoch,
            valid_auroc=finished.valid_score if has_auroc and finished.best_epoch else None,
        )  # fmt: skip
        self._write(cell.key, row)

    def remark_diverged(self, cells: Sequence[Cell]) -> None:
        """Runs of this call and of earlier ones that diverged, in the order and the words of this grid."""
        noted = {about for about, _ in self.folder.notes()}
        for cell in cells:
            if self.has(cell) and (cell.dataset.name, cell.key) in noted:
                sentence = _diverged(cell, self.by_cell[cell.key]["epochs"])
                self.remarks.setdefault(cell.dataset.name, []).append(sentence)

    def rows(self, cells: Sequence[Cell], datasets: Iterable[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """In the order of the grid and with its settings, each dataset's trivial baselines after its methods."""
        rows: list[dict[str, Any]] = []
        for name in datasets:
            own = [cell for cell in cells if cell.dataset.name == name and self.has(cell)]
            rows += [{**self.by_cell[cell.key], "settings": cell.settings_text} for cell in own]
            keys = [_trivial_key(name, method, seed) for method in TRIVIAL_BASELINES for seed in seeds]
            rows += [self.by_cell[key] for key in keys if key in self.by_cell]
        # An earlier call may have had the other side as the positive one.
        chosen = {name: f"{name}_{self.positive}" for name in ("aupr", "fpr95")}
        return [{**row, **{name: row[key] for name, key in chosen.items()}, "positive": self.positive} for row in rows]

    def _row(self, prepared: Prepared, run: str, scores: TestScores, **more: Any) -> dict[str, Any]:
        in_dist, out_dist = scores
        finite = bool(np.isfinite(in_dist).all() and np.isfinite(out_dist).all())
        figures = all_metrics(in_dist, out_dist, self.positive) if finite else {}
        return dict.fromkeys(COLUMNS) | {
            "dataset": prepared.spec.name, "split": prepared.split.kind, "positive": self.positive, "run": run,
            "n_id_test": len(in_dist), "n_ood_test": len(out_dist), **figures, **more,
        }  # fmt: skip

    def _write_arrays(self, run: str, scores: TestScores, curve: Any = _EMPTY, loss: Any = _EMPTY) -> None:
        write_run(self.folder.root, run, id_scores=scores[0], ood_scores=scores[1], curve=curve, loss=loss)

    def _write(self, key: str, row: dict[str, Any]) -> None:
        self.by_cell[key] = row
        self.journal.write("run", cell=key, **row)


def _cell_columns(cell: Cell) -> dict[str, Any]:
    return {
        "encoder": cell.encoder.name, "method": cell.method.name, "settings": cell.settings_text, "seed": cell.seed,
        "kind": cell.method.kind, "deterministic": cell.deterministic,
    }  # fmt: skip


def _diverged(cell: Cell, epoch: int) -> str:
    name = " ".join(word for word in (cell.method.name, cell.settings_text, "on", cell.encoder.name) if word)
    return f"{name}, seed {cell.seed}: the loss was not finite in epoch {epoch}"


def _trivial_key(dataset: str, method: str, seed: int) -> str:
    return f"{dataset}/{NO_ENCODER}/{method}/{seed}"
