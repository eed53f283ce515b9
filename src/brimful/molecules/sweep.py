"""A grid of small heads as one job, from the spec to the last row, resumable after a kill.

    prepare    every dataset and every encoder's features, all checked before the first step
    baselines  what trains nothing: trivial baselines and distances
    train      all heads in packs, on one device, several, or a cluster; each is scored when it stops
    record     one event per run, written when it is known; a run that has one is never computed again

Only this process writes results, even if others train. Progress is reported as events, which `terminal` shows.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brimful.errors import BadData, BadOption, BadRun
from brimful.files import json_sha256
from brimful.machine.host import Host, may_spawn
from brimful.molecules import workers
from brimful.molecules.dataset import Progress, silent
from brimful.molecules.features.encoder import load_encoder
from brimful.molecules.folder import Record, SweepFolder, TestScores
from brimful.molecules.heads import SAMPLES, Head, HeadShape, Job, Rows, dropout_factors, random_key
from brimful.molecules.methods import HEAD_ROWS, TRIVIAL_BASELINES, classifier_scores, distance_scores
from brimful.molecules.pack import State
from brimful.molecules.prepare import Prepared, check_batch, prepare, rows_with_features
from brimful.molecules.results import write_results
from brimful.molecules.runner import FinishedRun
from brimful.molecules.spec import Cell, SweepOptions, SweepSpec, grid, show_grid
from brimful.molecules.workers import Message, PackMessage, ProgressMessage, Share
from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import Target, find_target
from brimful.training.events import Journal, Listener
from brimful.training.stop import Interrupts
from brimful.units import show_count

HEADS_PER_PROCESS = 6
"""Fewer heads are trained before another process has imported torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """How a sweep ended."""

    rows: list[dict[str, Any]]
    finished: bool
    remarks: dict[str, list[str]]
    """Sentences on each dataset: how it was split, what was left out."""
    packs: tuple[dict[str, Any], ...]
    """The size of each group's pack, with the reason and the trials."""
    seconds: float
    trained: int
    """Heads trained by this call."""
    ooms: int
    peak_bytes: int | None


def sweep(
    spec: SweepSpec, output: Path, options: SweepOptions, *, cache: Path, listeners: Sequence[Listener] = (), progress: Progress = silent
) -> SweepResult:  # fmt: skip
    """Run it, or what is left of it. `cache` keeps features between sweeps."""
    folder = SweepFolder(output)
    with folder.locked(), closing(Journal(folder.events, listeners)) as journal:
        record = Record(folder=folder, journal=journal, positive=spec.positive, by_cell=folder.finished_rows())
        return _Sweep(spec=spec, options=options, cache=cache, record=record, progress=progress).run()


@dataclass(kw_only=True)
class _Sweep:
    """One sweep in one folder."""

    spec: SweepSpec
    options: SweepOptions
    cache: Path
    record: Record
    progress: Progress
    rows: dict[str, Rows] = field(default_factory=dict)
    prepared: dict[str, Prepared] = field(default_factory=dict)

    def run(self) -> SweepResult:
        began, cells, record = time.monotonic(), grid(self.spec), self.record
        target = self._target()
        if self.options.ray:
            workers.check_address(self.options.ray)
        left_out = self._prepare(target)
        jobs, readers = self._jobs(cells)
        self._claim(left_out)
        known = sum(map(record.has, cells))
        record.journal.write("begin", grid=show_grid(self.spec), cells=len(cells), known=known, heads=len(jobs), device=target.name)  # fmt: skip
        self._trivial_baselines()
        self._distances(cells)
        training = _Training(
            jobs=jobs, rows=self.rows, folder=record.folder, journal=record.journal, options=self.options, target=target
        )
        with Interrupts() as interrupts:
            finished = training.run(
                lambda head: self._score(head, readers[head.job.name]), lambda: interrupts.signal is not None
            )
        if interrupts.signal:
            record.journal.write("stop", by=interrupts.signal)
        record.remark_diverged(cells)
        rows = record.rows(cells, self.prepared, self.spec.seeds)
        write_results(record.folder.root, rows)
        if finished:
            record.folder.remove_states()
        seconds = time.monotonic() - began
        record.journal.write("end", finished=finished, seconds=seconds, rows=len(rows))
        return SweepResult(
            rows=rows, finished=finished, remarks=record.remarks, packs=tuple(training.packs), seconds=seconds,
            trained=training.trained, ooms=training.ooms, peak_bytes=training.peak_bytes,
        )  # fmt: skip

    def _target(self) -> Target:
        options = self.options
        target = find_target(PlanOptions(device=options.device, memory_limit=options.memory_limit, fill=options.fill))
        if target.device.type == "mps":
            raise BadOption("a sweep needs float64, which the Apple GPU does not have. Try: device='cpu'.")
        return target

    def _prepare(self, target: Target) -> list[tuple[str, int, str, str]]:
        """Fills `prepared` and `rows`; returns dataset, row, SMILES and reason of the molecules left out.

        Encoders are created first, which shows what is missing, and released at the end: some hold a process.
        """
        left_out: list[tuple[str, int, str, str]] = []
        encoders = {
            encoder.name: load_encoder(encoder.config, folder=self.spec.source.parent, device=str(target.device))
            for encoder in self.spec.encoders
        }
        for dataset in self.spec.datasets:
            name, progress = dataset.name, self._progress_of(dataset.name)
            progress(f"reading {dataset.file.name}")
            prepared = self.prepared[name] = prepare(dataset, self.cache, progress)
            if any(choice.method.needs_labels for choice in self.spec.methods):
                prepared.check_labels()
            molecules = prepared.molecules
            left_out += [(name, molecule.row, molecule.smiles, molecule.reason) for molecule in molecules.unread]
            self.record.remark(name, prepared.remarks)
            for encoder_name, encoder in encoders.items():
                rows, features, failed = rows_with_features(prepared, encoder, self.cache, progress)
                self.rows[f"{name}/{encoder_name}"] = rows
                smiles = dict(zip(molecules.rows.tolist(), molecules.smiles, strict=True)) if failed else {}
                left_out += [(name, row, smiles[row], f"{encoder_name}: {reason}") for row, reason in failed]
                count = [f"{show_count(len(failed), 'molecule')} without features left out"] if failed else []
                self.record.remark(name, [f"{encoder_name}: {sentence}" for sentence in (*count, *features.remarks)])
        return left_out

    def _progress_of(self, dataset: str) -> Progress:
        return lambda phrase: self.progress(f"{dataset}: {phrase}")

    def _jobs(self, cells: Sequence[Cell]) -> tuple[dict[str, Job], dict[str, list[Cell]]]:
        """The heads still to train, by name, and the cells that read each."""
        jobs: dict[str, Job] = {}
        readers: dict[str, list[Cell]] = {}
        for cell in cells:
            prepared, rows = self.prepared[cell.dataset.name], self.rows[cell.data]
            job = job_of(cell, rows, prepared.classes)
            if job is None:
                continue
            check_batch(prepared, rows, job.training.batch, sees_ood=job.objective.sees_ood)
            if not self.record.has(cell):
                jobs[job.name] = job
                readers.setdefault(job.name, []).append(cell)
        return jobs, readers

    def _claim(self, left_out: Sequence[tuple[str, int, str, str]]) -> None:
        """The first files of the sweep, written once everything that can be refused has been checked."""
        folder = self.record.folder
        folder.claim(self.rows, self.prepared)
        folder.write_left_out(left_out)
        for prepared in self.prepared.values():
            folder.write_split(prepared)

    def _trivial_baselines(self) -> None:
        noted = self.record.folder.notes()
        for name, prepared in self.prepared.items():
            for method, score in TRIVIAL_BASELINES.items():
                if self.record.has_trivial(name, method, self.spec.seeds):
                    self.record.remarks[name] += [sentence for about, sentence in noted if about == (name, method)]
                    continue
                self.progress(f"{name}: {method}")
                in_dist, out_dist, how = score(prepared.molecules, prepared.split)
                self.record.remark(name, [f"{method}: {how}"], about=method)
                self.record.add_trivial(prepared, method, (in_dist, out_dist), self.spec.seeds)

    def _distances(self, cells: Sequence[Cell]) -> None:
        """Methods that train nothing, once for all seeds."""
        groups: dict[Any, list[Cell]] = {}
        for cell in cells:
            if cell.deterministic and not self.record.has(cell):
                groups.setdefault((cell.data, cell.method.name, cell.settings_text), []).append(cell)
        for group in groups.values():
            cell, began = group[0], time.monotonic()
            self.progress(f"{cell.dataset.name}: {cell.method.name} on {cell.encoder.name}")
            scores = score_distance(cell, self.rows[cell.data])
            self.record.add_distance(self.prepared[cell.dataset.name], group, scores, time.monotonic() - began)

    def _score(self, finished: FinishedRun, cells: Sequence[Cell]) -> None:
        for cell in cells:
            scores = score_head(cell, finished, self.rows[cell.data])
            self.record.add_trained(self.prepared[cell.dataset.name], cell, finished, scores)


# ---- Training: from cells to jobs, from jobs to shares -----------------------------------------------------------------------


def job_of(cell: Cell, rows: Rows, classes: Sequence[int]) -> Job | None:
    """The head that a cell reads; cells that read the same head get jobs of one name. None: nothing is trained."""
    if cell.head is None or cell.train is None or cell.method.objective is None:
        return None
    classifier = cell.method.kind == "classifier"
    if classifier and not classes:
        raise BadOption(f"{cell.method.name} needs classes. Try: label under dataset {cell.dataset.name}.")
    options = {name: cell.options[name] for name in cell.method.training_options}
    content = [cell.data, cell.method.objective.name, options, asdict(cell.head), asdict(cell.train), cell.seed]
    return Job(
        name=json_sha256(content)[:16],
        data=cell.data,
        objective=cell.method.objective,
        options=options,
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


def group_jobs(jobs: Sequence[Job], rows: Mapping[str, Rows]) -> list[list[Job]]:
    """Jobs that can share packs, the largest group first."""
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        groups.setdefault((*job.pack_key, rows[job.data].features.dtype), []).append(job)
    return sorted(groups.values(), key=len, reverse=True)


@dataclass(kw_only=True)
class _Training:
    """The heads to train, and the progress so far."""

    jobs: Mapping[str, Job]
    rows: Mapping[str, Rows]
    folder: SweepFolder
    journal: Journal
    options: SweepOptions
    target: Target
    packs: list[dict[str, Any]] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)
    """Runs in training, by share."""
    trained: int = 0
    ooms: int = 0
    peak_bytes: int | None = None

    def run(self, on_finished: Callable[[FinishedRun], None], stop: Callable[[], bool]) -> bool:
        """Whether all were trained; `on_finished` is called with each head that is."""
        with self.target.enforce(), closing(self._messages(stop)) as messages:
            for message in messages:
                if isinstance(message, PackMessage):
                    self._note_pack(message)
                else:
                    self._note_progress(message, on_finished)
        return self.trained == len(self.jobs)

    def _messages(self, stop: Callable[[], bool]) -> Generator[Message]:
        if not self.jobs:
            return
        resumed = self.folder.saved_states(self.jobs)
        if resumed:
            self.journal.write("resume", heads=sum(map(len, resumed)))
        if self.options.ray is None:
            shares = self._shares(self._devices(), self.target.budget_bytes, resumed)
            yield from workers.run_shares(shares, stop)
            return
        ray, gpus, cores = workers.connect_ray(self.options.ray)
        devices = ["cuda"] * gpus or ["cpu"] * max(1, min(cores, self.options.processes or cores))
        budget = None if gpus else self.target.budget_bytes  # GPUs of other machines are measured there
        yield from workers.run_shares_on_ray(ray, self._shares(devices, budget, resumed), stop)

    def _devices(self) -> list[str]:
        count, device = self._processes(), self.target.device
        if count == 1:
            return [str(device)]
        if device.type == "cpu":
            return ["cpu"] * count
        available = torch.accelerator.device_count()
        if count > available:
            raise BadRun(
                f"processes={count} is more than the {show_count(available, 'GPU')} of this machine. Try: processes={available}."
            )
        return [f"{device.type}:{number}" for number in range(count)]

    def _processes(self) -> int:
        """Small products do not gain from more threads, runs gain from more processes: 12 heads took 6 min with two
        threads beside one busy process, and 2 min with one thread beside several."""
        if self.options.processes is not None:
            return self.options.processes
        simulated = self.options.memory_limit is not None  # such a limit holds in one process
        if self.target.device.type != "cpu" or simulated or not may_spawn():
            return 1
        return max(1, min(Host.detect().cores, len(self.jobs) // HEADS_PER_PROCESS))

    def _shares(self, devices: Sequence[str], budget: int | None, resumed: Sequence[State]) -> list[Share]:
        """Every device gets a part of each group, so that packs stay as large as possible."""
        groups = group_jobs(list(self.jobs.values()), self.rows)
        shares = []
        for number, device in enumerate(devices):
            own = [part for group in groups if (part := group[number :: len(devices)])]
            used = {job.data for group in own for job in group}
            shares.append(Share(
                number=number, groups=own, rows={key: rows for key, rows in self.rows.items() if key in used},
                device=device, threads=1 if device == "cpu" else None, budget_bytes=budget, most=self.options.pack,
                resumed=resumed,
            ))  # fmt: skip
        return shares

    def _note_pack(self, message: PackMessage) -> None:
        size = message.size
        trials = [asdict(trial) for trial in size.trials]
        pack = {"share": message.share, "heads": message.jobs, "runs": size.runs, "reason": size.reason, "trials": trials}  # fmt: skip
        self.packs.append(pack)
        self.journal.write("pack", **pack)

    def _note_progress(self, message: ProgressMessage, on_finished: Callable[[FinishedRun], None]) -> None:
        self.ooms += message.ooms
        self.alive[message.share] = message.alive
        self.peak_bytes = max(
            (peak for peak in (self.peak_bytes, message.peak_bytes) if peak is not None), default=None
        )
        if message.ooms:
            self.journal.write("oom", ooms=message.ooms, sentence="out of memory: half of the pack waits")
        for finished in message.finished:
            on_finished(finished)
            self.trained += 1
        if message.state is not None:
            try:
                self.folder.save_state(message.share, message.state)
            except BadRun as error:  # the next one may work
                self.journal.write("note", sentence=str(error))
        alive = sum(self.alive.values())
        self.journal.write("epochs", epochs=message.epochs, alive=alive, trained=self.trained, heads=len(self.jobs))


# ---- Scores of the test molecules --------------------------------------------------------------------------------------------


def score_distance(cell: Cell, rows: Rows) -> TestScores:
    """The scores of a method that trains nothing, fitted on the ID training molecules."""
    matrix = rows.features.numpy()
    test = np.concatenate([rows.id["test"], rows.ood["test"]])
    labels = None if rows.labels is None else rows.labels.numpy()[rows.id["train"]]
    try:
        scores = distance_scores(
            cell.method.name, matrix[rows.id["train"]], matrix[test], labels=labels, **cell.options
        )
    except (BadData, BadOption) as error:
        where = f"{cell.dataset.name}, {cell.method.name} on {cell.encoder.name}"
        raise type(error)(f"{where}: {error}") from None
    return scores[: len(rows.id["test"])], scores[len(rows.id["test"]) :]


def score_head(cell: Cell, finished: FinishedRun, rows: Rows) -> TestScores:
    """The scores of a trained method, with the weights that were best on the validation molecules."""
    head = _loaded_head(finished)
    in_dist, out_dist = (_head_scores(cell, finished.job, head, rows.features[side["test"]]) for side in (rows.id, rows.ood))  # fmt: skip
    return in_dist, out_dist


def _loaded_head(finished: FinishedRun) -> Head:
    head, place = Head(finished.job.shape), 0
    with torch.no_grad():
        for param in head.parameters():
            param.copy_(finished.weights[place : place + param.numel()].view_as(param))
            place += param.numel()
    return head.eval()


def _head_scores(cell: Cell, job: Job, head: Head, features: Tensor) -> np.ndarray:
    x = features.float()
    if cell.method.kind == "energy":
        with torch.no_grad():
            return torch.cat([head(part) for part in x.split(HEAD_ROWS)]).squeeze(-1).double().numpy()

    def factors(rows: int, sample: int) -> tuple[Tensor, ...]:
        keys, dropout = random_key(torch.tensor([job.seed]), SAMPLES, sample), torch.tensor([job.dropout])
        return tuple(
            dropout_factors(random_key(keys, layer), rows, units, dropout)[0]
            for layer, units in enumerate(job.shape.hidden)
        )

    def logits(part: Tensor, dropout: bool, sample: int) -> Tensor:
        return job.shape.logits(head(part, factors(len(part), sample) if dropout else ()))

    options: dict[str, Any] = {name: cell.options[name] for name in cell.method.score_options}
    return classifier_scores(cell.method.name, logits, x, **options)
