"""A grid of small heads as one job: from the spec to the last row, and on again after a kill.

    prepare   every dataset and every encoder's features, all checked before the first step
    plain     what trains nothing: trivial baselines, distances
    train     all heads in packs, on one device, several or a cluster; each is scored as soon as it stops
    rows      one event a cell, written when it is known; a cell that has one is never computed again

One process writes, whatever trains. Progress is told as events; `report.sweep_progress` shows them.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from brimful.errors import BadOption, BadRun
from brimful.machine.host import Host
from brimful.machine.spawning import may_spawn
from brimful.memory.ledger import virtual_memory
from brimful.plan.options import FitOptions
from brimful.plan.target import Target, find_target
from brimful.tasks.heads.features import load_encoder
from brimful.tasks.heads.folder import SweepFolder
from brimful.tasks.heads.packed import cluster, processes
from brimful.tasks.heads.packed.job import Job, Rows
from brimful.tasks.heads.packed.runner import Finished
from brimful.tasks.heads.packed.share import Message, Packed, Share, Went
from brimful.tasks.heads.plan import data_key, job_of, kin
from brimful.tasks.heads.prepare import Prepared, check_batch, prepare, rows_of
from brimful.tasks.heads.rate import Scores, head_scores, plain_scores
from brimful.tasks.heads.results.files import COLUMNS, write_results, write_run
from brimful.tasks.heads.results.metrics import all_metrics
from brimful.tasks.heads.scores.trivial import TRIVIAL, trivial_scores
from brimful.tasks.heads.spec.asked import SweepSpec
from brimful.tasks.heads.spec.grid import Cell, grid, show_grid
from brimful.tasks.heads.spec.options import SweepOptions
from brimful.train.journal import Journal, Listener
from brimful.train.lock import RunLock
from brimful.train.signals import Interrupts
from brimful.units import show_count

Say = Callable[[str], object]
NONE = np.empty(0)
HEADS_A_PROCESS = 6
"""Fewer are trained before another process has imported torch."""


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


@dataclass
class Sweep:
    """One sweep in one folder."""

    spec: SweepSpec
    folder: SweepFolder
    options: SweepOptions
    cache: Path
    journal: Journal
    say: Say
    rows: dict[str, Rows] = field(default_factory=dict)
    prepared: dict[str, Prepared] = field(default_factory=dict)
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    packings: list[dict[str, Any]] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)
    """Runs in training, by share."""
    trained: int = 0
    ooms: int = 0
    peak_bytes: int | None = None

    def run(self) -> Outcome:
        began = time.monotonic()
        cells = grid(self.spec)
        self.known = self.folder.finished()
        target = find_target(
            FitOptions(device=self.options.device, memory_limit=self.options.memory_limit, fill=self.options.fill)
        )
        if target.device.type == "mps":
            raise BadOption("a sweep counts in float64, which the Apple GPU does not have: give --device cpu")
        self._prepare(target)
        jobs = self._jobs(cells)
        self.journal.write("begin", grid=show_grid(self.spec), cells=len(cells), known=self._known(cells), heads=len(jobs), device=target.name)  # fmt: skip
        self._trivial()
        self._plain(cells)
        with Interrupts() as asked:
            finished = self._train(jobs, target, asked)
        rows = self._rows(cells)
        write_results(self.folder.root, rows)
        if finished:
            self.folder.done()
        seconds = time.monotonic() - began
        self.journal.write("end", finished=finished, seconds=seconds, rows=len(rows))
        return Outcome(
            rows=rows, finished=finished, remarks=self.remarks, packings=tuple(self.packings), seconds=seconds,
            trained=self.trained, ooms=self.ooms, peak_bytes=self.peak_bytes,
        )  # fmt: skip

    def _prepare(self, target: Target) -> None:
        """Encoders are made first, which shows what is missing, and let go of at the end: some hold a process of their own."""
        left_out: list[tuple[str, int, str]] = []
        encoders = {
            one.name: load_encoder(one.asked, folder=self.spec.source.parent, device=str(target.device))
            for one in self.spec.encoders
        }
        for dataset in self.spec.datasets:
            self.say(f"{dataset.name}: reading {dataset.file.name}")
            prepared = self.prepared[dataset.name] = prepare(dataset, self.cache, self._said(dataset.name))
            left_out += [(dataset.name, one.row, one.reason) for one in prepared.molecules.unread]
            self._remark(dataset.name, prepared.remarks)
            for name, encoder in encoders.items():
                rows, features, failed = rows_of(prepared, encoder, self.cache, self._said(dataset.name))
                self.rows[f"{dataset.name}/{name}"] = rows
                left_out += [(dataset.name, row, f"{name}: {reason}") for row, reason in failed]
                more = [f"{show_count(len(failed), 'molecule')} without features left out"] if failed else []
                self._remark(dataset.name, [f"{name}: {one}" for one in (*more, *features.remarks)])
        self.folder.claim(self.rows)
        self.folder.write_left_out(left_out)
        for prepared in self.prepared.values():
            self.folder.write_split(prepared)

    def _said(self, name: str) -> Say:
        return lambda phrase: self.say(f"{name}: {phrase}")

    def _remark(self, dataset: str, remarks: Sequence[str], about: str = "") -> None:
        self.remarks.setdefault(dataset, []).extend(remarks)
        for remark in remarks:
            self.journal.write("note", dataset=dataset, about=about, sentence=remark)

    def _jobs(self, cells: Sequence[Cell]) -> dict[str, list[Cell]]:
        """The heads still to be trained, by name, each with the cells that read it."""
        found: dict[str, list[Cell]] = {}
        self._by_name: dict[str, Job] = {}
        for cell in cells:
            prepared, rows = self.prepared[cell.dataset.name], self.rows[data_key(cell)]
            job = job_of(cell, rows, prepared.classes)
            if job is None:
                continue
            check_batch(prepared, rows, job.training.batch, sees_ood=job.sees_ood)
            if self._key(cell) not in self.known:
                self._by_name[job.name] = job
                found.setdefault(job.name, []).append(cell)
        return found

    def _trivial(self) -> None:
        """The baselines that expose a leaky split, in every table."""
        noted = self.folder.notes()
        for name, prepared in self.prepared.items():
            for method in TRIVIAL:
                if all(f"{name}/–/{method}/{seed}" in self.known for seed in self.spec.seeds):
                    self.remarks[name] += [told for about, told in noted if about == (name, method)]
                    continue
                self.say(f"{name}: {method}")
                in_dist, out_dist, remark = trivial_scores(method, prepared.molecules, prepared.facts, prepared.split)
                run = f"{name}-{method}"
                self._remark(name, [f"{method}: {remark}"], about=method)
                write_run(self.folder.root, run, id_scores=in_dist, ood_scores=out_dist, curve=NONE, loss=NONE)
                for seed in self.spec.seeds:
                    self._write(f"{name}/–/{method}/{seed}", self._row(
                        prepared, "–", method, "", seed, "trivial", run, (in_dist, out_dist), deterministic=True,
                    ))  # fmt: skip

    def _plain(self, cells: Sequence[Cell]) -> None:
        """Methods that train nothing: once for all seeds."""
        groups: dict[Any, list[Cell]] = {}
        for cell in cells:
            if cell.deterministic and self._key(cell) not in self.known:
                groups.setdefault((data_key(cell), cell.method.name, cell.settings_text), []).append(cell)
        for group in groups.values():
            cell, began = group[0], time.monotonic()
            self.say(f"{cell.dataset.name}: {cell.method.name} on {cell.encoder.name}")
            scores = plain_scores(cell, self.rows[data_key(cell)])
            write_run(self.folder.root, cell.run, id_scores=scores[0], ood_scores=scores[1], curve=NONE, loss=NONE)
            for one in group:
                self._write(self._key(one), self._cell_row(one, cell.run, scores, seconds=time.monotonic() - began))

    def _train(self, jobs: Mapping[str, list[Cell]], target: Target, asked: Interrupts) -> bool:
        """Whether all were trained, and nobody asked to stop."""
        if not jobs:
            return True
        virtual = target.device.type == "cpu" and self.options.memory_limit is not None
        with ExitStack() as stack:
            stack.enter_context(target.capped())
            if virtual:
                stack.enter_context(virtual_memory(target.limit_bytes))
            messages = stack.enter_context(closing(self._messages(jobs, target, lambda: asked.by is not None)))
            for message in messages:
                self._take(message, jobs)
        if asked.by:
            self.journal.write("stop", by=asked.by)
        return self.trained == len(jobs)

    def _messages(self, jobs: Mapping[str, list[Cell]], target: Target, stop: Callable[[], bool]) -> Generator[Message]:
        todo = [self._by_name[name] for name in jobs]
        begun = self.folder.begun(self._by_name)
        if begun:
            self.journal.write("resume", heads=sum(map(len, begun)))
        groups = kin(todo, self.rows)
        if self.options.ray is None:
            devices, threads = _devices(target, self._processes(target, len(todo)))
            yield from processes.run_shares(self._shares(groups, devices, threads, target.budget_bytes, begun), stop)
            return
        ray, cards, cores = cluster.connect(self.options.ray)
        devices = ["cuda"] * cards or ["cpu"] * max(1, min(cores, self.options.processes or cores))
        yield from cluster.run_shares(ray, self._shares(groups, devices, 1 if not cards else None, None if cards else target.budget_bytes, begun), stop)  # fmt: skip

    def _processes(self, target: Target, heads: int) -> int:
        """Small products do not spread over cores, runs do: 12 heads took 6 min with two threads beside one busy process,
        and 2 min with one thread beside several."""
        if self.options.processes is not None:
            return self.options.processes
        if target.device.type != "cpu" or self.options.memory_limit is not None or not may_spawn():
            return 1  # a virtual limit is one process's
        return max(1, min(Host.detect().cores, heads // HEADS_A_PROCESS))

    def _shares(
        self,
        groups: Sequence[Sequence[Job]],
        devices: Sequence[str],
        threads: int | None,
        budget: int | None,
        begun: Any,
    ) -> list[Share]:
        """Every device gets a part of each group, so that packs stay as large as can be."""
        found = []
        for number, device in enumerate(devices):
            own = [group[number :: len(devices)] for group in groups]
            own = [group for group in own if group]
            used = {job.data for group in own for job in group}
            found.append(Share(
                number=number, groups=own, rows={key: rows for key, rows in self.rows.items() if key in used},
                device=device, threads=threads, budget_bytes=budget, most=self.options.pack, begun=begun,
            ))  # fmt: skip
        return found

    def _take(self, message: Message, jobs: Mapping[str, list[Cell]]) -> None:
        match message:
            case Packed():
                packing = message.packing
                told = {"share": message.share, "heads": message.jobs, "runs": packing.runs, "reason": packing.reason}
                told["trials"] = [{"runs": one.runs, "steps_per_s": one.steps_per_s, "peak_bytes": one.peak_bytes} for one in packing.trials]  # fmt: skip
                self.packings.append(told)
                self.journal.write("pack", **told)
            case Went():
                self._went(message, jobs)

    def _went(self, went: Went, jobs: Mapping[str, list[Cell]]) -> None:
        self.ooms += went.ooms
        self.alive[went.share] = went.alive
        self.peak_bytes = max((one for one in (self.peak_bytes, went.peak_bytes) if one is not None), default=None)
        if went.ooms:
            self.journal.write("oom", ooms=went.ooms, sentence="out of memory: half of the pack waits")
        for finished in went.finished:
            for cell in jobs[finished.job.name]:
                self._finished(cell, finished)
            self.trained += 1
        if went.state is not None:
            try:
                self.folder.keep(went.share, went.state)
            except BadRun as error:
                self.journal.write("note", sentence=str(error))
        self.journal.write(
            "epochs", epochs=went.epochs, alive=sum(self.alive.values()), trained=self.trained, heads=len(jobs)
        )

    def _finished(self, cell: Cell, finished: Finished) -> None:
        judged = finished.job.sees_ood  # a plain classifier is judged by its loss, which is no AUROC
        curve = np.array(finished.curve) if judged else NONE
        scores = head_scores(cell, finished, self.rows[data_key(cell)])
        if finished.diverged:
            which = f"{cell.method.name} {cell.settings_text} on {cell.encoder.name}, seed {cell.seed}"
            self._remark(cell.dataset.name, [f"{which}: the loss was no number any more in epoch {finished.epochs}"])
        if not finished.best_epoch:  # nothing was learnt that could be measured
            scores = np.full_like(scores[0], np.nan), np.full_like(scores[1], np.nan)
        write_run(self.folder.root, cell.run, id_scores=scores[0], ood_scores=scores[1], curve=curve, loss=np.array(finished.losses))  # fmt: skip
        row = self._cell_row(
            cell, cell.run, scores, epochs=finished.epochs, best_epoch=finished.best_epoch,
            valid_auroc=finished.valid_score if judged and finished.best_epoch else None,
        )  # fmt: skip
        self._write(self._key(cell), row)

    def _cell_row(self, cell: Cell, run: str, scores: Scores, **more: Any) -> dict[str, Any]:
        prepared = self.prepared[cell.dataset.name]
        return self._row(
            prepared, cell.encoder.name, cell.method.name, cell.settings_text, cell.seed, cell.method.kind, run, scores,
            deterministic=cell.deterministic, **more,
        )  # fmt: skip

    def _row(
        self, prepared: Prepared, encoder: str, method: str, settings: str, seed: int, kind: str, run: str,
        scores: Scores, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        in_dist, out_dist = scores
        finite = bool(np.isfinite(in_dist).all() and np.isfinite(out_dist).all())
        figures = all_metrics(in_dist, out_dist, self.spec.positive) if finite else {}
        return dict.fromkeys(COLUMNS) | {
            "dataset": prepared.asked.name, "split": prepared.split.kind, "encoder": encoder, "method": method,
            "settings": settings, "seed": seed, "kind": kind, "positive": self.spec.positive, "run": run,
            "n_id_test": len(in_dist), "n_ood_test": len(out_dist), **figures, **more,
        }  # fmt: skip

    def _write(self, key: str, row: dict[str, Any]) -> None:
        self.known[key] = row
        self.journal.write("run", cell=key, **row)

    def _key(self, cell: Cell) -> str:
        return f"{cell.run}/{cell.seed}"

    def _known(self, cells: Sequence[Cell]) -> int:
        return sum(self._key(cell) in self.known for cell in cells)

    def _rows(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """In the order of the grid, each dataset's trivial baselines after its methods."""
        keys: list[str] = []
        for name in self.prepared:
            keys += [self._key(cell) for cell in cells if cell.dataset.name == name]
            keys += [f"{name}/–/{method}/{seed}" for method in TRIVIAL for seed in self.spec.seeds]
        return [self.known[key] for key in keys if key in self.known]


def _devices(target: Target, count: int) -> tuple[list[str], int | None]:
    """The devices to share the runs, and the cores of each."""
    import torch

    if target.device.type == "cpu":
        return ["cpu"] * count, 1
    if count == 1:
        return [str(target.device)], None
    there = torch.accelerator.device_count()
    if count > there:
        raise BadRun(f"--gpus {count}: this box has {show_count(there, 'card')}")
    return [f"{target.device.type}:{number}" for number in range(count)], None


def sweep(
    spec: SweepSpec, output: Path, options: SweepOptions, *, cache: Path, listeners: Sequence[Listener] = (), say: Say = lambda phrase: None
) -> Outcome:  # fmt: skip
    """Run it, or what is left of it."""
    folder = SweepFolder(output)
    with RunLock(output, flag="--output"), closing(Journal(folder.events, listeners)) as journal:
        return Sweep(spec=spec, folder=folder, options=options, cache=cache, journal=journal, say=say).run()
