"""A grid of small heads as one job: from the spec to the last row, and on again after a kill.

    prepare   every dataset and every encoder's features, all checked before the first step
    plain     what trains nothing: trivial baselines, distances
    train     all heads in packs (`training`)
    record    one event a cell, written when it is known; a cell that has one is never computed again

One process writes, whatever trains. Progress is told as events; `report.sweep_progress` shows them.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brimful.errors import BadOption
from brimful.molecules.features.compute import load_encoder
from brimful.molecules.folder import SweepFolder
from brimful.molecules.job import Job, Rows
from brimful.molecules.prepare import Prepared, check_batch, prepare, rows_of
from brimful.molecules.record import Record, head_scores, plain_scores
from brimful.molecules.results import write_results
from brimful.molecules.runner import Finished
from brimful.molecules.spec import METHODS, Cell, SweepOptions, SweepSpec, grid, show_grid
from brimful.molecules.training import Training, data_key, job_of
from brimful.molecules.trivial import TRIVIAL, trivial_scores
from brimful.molecules.workers import check_address
from brimful.planning.target import PlanOptions, Target, find_target
from brimful.training.events import Journal, Listener
from brimful.training.stop import Interrupts
from brimful.units import show_count

Say = Callable[[str], object]
LeftOut = tuple[str, int, str, str]
"""Dataset, row, SMILES, why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a sweep ended."""

    rows: list[dict[str, Any]]
    finished: bool
    remarks: dict[str, list[str]]
    """Sentences on each dataset: how it was split, what was left out."""
    packings: tuple[dict[str, Any], ...]
    seconds: float
    trained: int
    """Heads trained now, not by an earlier call."""
    ooms: int
    peak_bytes: int | None


def sweep(
    spec: SweepSpec, output: Path, options: SweepOptions, *, cache: Path, listeners: Sequence[Listener] = (), say: Say = lambda phrase: None
) -> Outcome:  # fmt: skip
    """Run it, or what is left of it."""
    folder = SweepFolder(output)
    with folder.held(), closing(Journal(folder.events, listeners)) as journal:
        record = Record(folder=folder, journal=journal, positive=spec.positive, known=folder.finished())
        return _Sweep(spec=spec, options=options, cache=cache, record=record, say=say).run()


@dataclass(kw_only=True)
class _Sweep:
    """One sweep in one folder."""

    spec: SweepSpec
    options: SweepOptions
    cache: Path
    record: Record
    say: Say
    rows: dict[str, Rows] = field(default_factory=dict)
    prepared: dict[str, Prepared] = field(default_factory=dict)

    def run(self) -> Outcome:
        began, cells, record = time.monotonic(), grid(self.spec), self.record
        target = self._target()
        if self.options.ray:
            check_address(self.options.ray)
        left_out = self._prepare(target)
        jobs, readers = self._jobs(cells)
        self._claim(left_out)
        known = sum(map(record.has, cells))
        record.journal.write("begin", grid=show_grid(self.spec), cells=len(cells), known=known, heads=len(jobs), device=target.name)  # fmt: skip
        self._trivial()
        self._plain(cells)
        training = Training(
            jobs=jobs, rows=self.rows, folder=record.folder, journal=record.journal, options=self.options, target=target
        )
        with Interrupts() as asked:
            finished = training.run(lambda one: self._score(one, readers[one.job.name]), lambda: asked.by is not None)
        if asked.by:
            record.journal.write("stop", by=asked.by)
        record.tell_diverged(cells)
        rows = record.rows(cells, self.prepared, self.spec.seeds)
        write_results(record.folder.root, rows)
        if finished:
            record.folder.done()
        seconds = time.monotonic() - began
        record.journal.write("end", finished=finished, seconds=seconds, rows=len(rows))
        return Outcome(
            rows=rows, finished=finished, remarks=record.remarks, packings=tuple(training.packings), seconds=seconds,
            trained=training.trained, ooms=training.ooms, peak_bytes=training.peak_bytes,
        )  # fmt: skip

    def _target(self) -> Target:
        options = self.options
        target = find_target(PlanOptions(device=options.device, memory_limit=options.memory_limit, fill=options.fill))
        if target.device.type == "mps":
            raise BadOption("a sweep counts in float64, which the Apple GPU does not have: give --device cpu")
        return target

    def _prepare(self, target: Target) -> list[LeftOut]:
        """Encoders are made first, which shows what is missing, and let go of at the end: some hold a process of their own."""
        left_out: list[LeftOut] = []
        encoders = {
            one.name: load_encoder(one.asked, folder=self.spec.source.parent, device=str(target.device))
            for one in self.spec.encoders
        }
        for dataset in self.spec.datasets:
            self.say(f"{dataset.name}: reading {dataset.file.name}")
            prepared = self.prepared[dataset.name] = prepare(dataset, self.cache, self._said(dataset.name))
            if any(METHODS[one.name].needs_labels for one in self.spec.methods):
                len(prepared.classes)  # refused before features are computed where there are none to learn
            molecules = prepared.molecules
            left_out += [(dataset.name, one.row, one.smiles, one.reason) for one in molecules.unread]
            self.record.remark(dataset.name, prepared.remarks)
            for name, encoder in encoders.items():
                rows, features, failed = rows_of(prepared, encoder, self.cache, self._said(dataset.name))
                self.rows[f"{dataset.name}/{name}"] = rows
                smiles = dict(zip(molecules.rows.tolist(), molecules.smiles, strict=True)) if failed else {}
                left_out += [(dataset.name, row, smiles[row], f"{name}: {reason}") for row, reason in failed]
                more = [f"{show_count(len(failed), 'molecule')} without features left out"] if failed else []
                self.record.remark(dataset.name, [f"{name}: {one}" for one in (*more, *features.remarks)])
        return left_out

    def _claim(self, left_out: Sequence[LeftOut]) -> None:
        """The first that is written of a sweep, once all that can be refused has been looked at."""
        folder = self.record.folder
        folder.claim(self.rows, self.prepared)
        folder.write_left_out(left_out)
        for prepared in self.prepared.values():
            folder.write_split(prepared)

    def _said(self, name: str) -> Say:
        return lambda phrase: self.say(f"{name}: {phrase}")

    def _jobs(self, cells: Sequence[Cell]) -> tuple[dict[str, Job], dict[str, list[Cell]]]:
        """The heads still to be trained, by name, and the cells that read each."""
        jobs: dict[str, Job] = {}
        readers: dict[str, list[Cell]] = {}
        for cell in cells:
            prepared, rows = self.prepared[cell.dataset.name], self.rows[data_key(cell)]
            job = job_of(cell, rows, prepared.classes)
            if job is None:
                continue
            check_batch(prepared, rows, job.training.batch, sees_ood=job.sees_ood)
            if not self.record.has(cell):
                jobs[job.name] = job
                readers.setdefault(job.name, []).append(cell)
        return jobs, readers

    def _trivial(self) -> None:
        """The baselines that expose a leaky split, in every table."""
        noted = self.record.folder.notes()
        for name, prepared in self.prepared.items():
            for method in TRIVIAL:
                if self.record.has_trivial(name, method, self.spec.seeds):
                    self.record.remarks[name] += [told for about, told in noted if about == (name, method)]
                    continue
                self.say(f"{name}: {method}")
                *scores, remark = trivial_scores(method, prepared.molecules, prepared.facts, prepared.split)
                self.record.remark(name, [f"{method}: {remark}"], about=method)
                self.record.trivial(prepared, method, (scores[0], scores[1]), self.spec.seeds)

    def _plain(self, cells: Sequence[Cell]) -> None:
        """Methods that train nothing: once for all seeds."""
        groups: dict[Any, list[Cell]] = {}
        for cell in cells:
            if cell.deterministic and not self.record.has(cell):
                groups.setdefault((data_key(cell), cell.method.name, cell.settings_text), []).append(cell)
        for group in groups.values():
            cell, began = group[0], time.monotonic()
            self.say(f"{cell.dataset.name}: {cell.method.name} on {cell.encoder.name}")
            scores = plain_scores(cell, self.rows[data_key(cell)])
            self.record.plain(self.prepared[cell.dataset.name], group, scores, time.monotonic() - began)

    def _score(self, finished: Finished, cells: Sequence[Cell]) -> None:
        for cell in cells:
            scores = head_scores(cell, finished, self.rows[data_key(cell)])
            self.record.trained(self.prepared[cell.dataset.name], cell, finished, scores)
