"""All heads of a sweep trained, on one device, several or a cluster; each is scored as soon as it stops."""

import hashlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any

from brimful.errors import BadOption, BadRun
from brimful.machine.host import Host, may_spawn
from brimful.molecules import workers
from brimful.molecules.folder import SweepFolder
from brimful.molecules.job import HeadShape, Job, Rows
from brimful.molecules.pack import State
from brimful.molecules.runner import Finished
from brimful.molecules.spec import Cell, SweepOptions
from brimful.molecules.workers import Message, Packed, Share, Went
from brimful.planning.target import Target
from brimful.training.events import Journal
from brimful.units import show_count

# From the cells of a grid to the heads that must be trained: cells that read the same head share one job.


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


HEADS_A_PROCESS = 6
"""Fewer are trained before another process has imported torch."""


@dataclass(kw_only=True)
class Training:
    """The heads to train, and how far that is."""

    jobs: Mapping[str, Job]
    """By name."""
    rows: Mapping[str, Rows]
    folder: SweepFolder
    journal: Journal
    options: SweepOptions
    target: Target
    packings: list[dict[str, Any]] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)
    """Runs in training, by share."""
    trained: int = 0
    ooms: int = 0
    peak_bytes: int | None = None

    def run(self, scored: Callable[[Finished], None], stop: Callable[[], bool]) -> bool:
        """Whether all were trained; `scored` is called with each head that is."""
        with ExitStack() as stack:
            stack.enter_context(self.target.enforce())
            for message in stack.enter_context(closing(self._messages(stop))):
                if isinstance(message, Packed):
                    self._packed(message)
                else:
                    self._went(message, scored)
        return self.trained == len(self.jobs)

    def _messages(self, stop: Callable[[], bool]) -> Generator[Message]:
        if not self.jobs:
            return
        begun = self.folder.begun(self.jobs)
        if begun:
            self.journal.write("resume", heads=sum(map(len, begun)))
        if self.options.ray is None:
            yield from workers.run_shares(self._shares(self._devices(), self.target.budget_bytes, begun), stop)
            return
        ray, cards, cores = workers.connect(self.options.ray)
        there = ["cuda"] * cards or ["cpu"] * max(1, min(cores, self.options.processes or cores))
        budget = None if cards else self.target.budget_bytes  # cards elsewhere are measured where they are
        yield from workers.run_shares_cluster(ray, self._shares(there, budget, begun), stop)

    def _devices(self) -> list[str]:
        """Of this box, to share the heads."""
        count, device = self._processes(), self.target.device
        if count == 1:
            return [str(device)]
        if device.type == "cpu":
            return ["cpu"] * count
        import torch

        there = torch.accelerator.device_count()
        if count > there:
            raise BadRun(f"--gpus {count}: this box has {show_count(there, 'card')}")
        return [f"{device.type}:{number}" for number in range(count)]

    def _processes(self) -> int:
        """Small products do not spread over cores, runs do: 12 heads took 6 min with two threads beside one busy process,
        and 2 min with one thread beside several."""
        if self.options.processes is not None:
            return self.options.processes
        virtual = self.options.memory_limit is not None  # such a limit is one process's
        if self.target.device.type != "cpu" or virtual or not may_spawn():
            return 1
        return max(1, min(Host.detect().cores, len(self.jobs) // HEADS_A_PROCESS))

    def _shares(self, devices: Sequence[str], budget: int | None, begun: Sequence[State]) -> list[Share]:
        """Every device gets a part of each group, so that packs stay as large as can be."""
        groups = kin(list(self.jobs.values()), self.rows)
        found = []
        for number, device in enumerate(devices):
            own = [part for group in groups if (part := group[number :: len(devices)])]
            used = {job.data for group in own for job in group}
            found.append(Share(
                number=number, groups=own, rows={key: rows for key, rows in self.rows.items() if key in used},
                device=device, threads=1 if device == "cpu" else None, budget_bytes=budget, most=self.options.pack,
                begun=begun,
            ))  # fmt: skip
        return found

    def _packed(self, message: Packed) -> None:
        packing = message.packing
        trials = [{"runs": one.runs, "steps_per_s": one.steps_per_s, "peak_bytes": one.peak_bytes} for one in packing.trials]  # fmt: skip
        self.packings.append({
            "share": message.share, "heads": message.jobs, "runs": packing.runs, "reason": packing.reason, "trials": trials,
        })  # fmt: skip
        self.journal.write("pack", **self.packings[-1])

    def _went(self, went: Went, scored: Callable[[Finished], None]) -> None:
        self.ooms += went.ooms
        self.alive[went.share] = went.alive
        self.peak_bytes = max((one for one in (self.peak_bytes, went.peak_bytes) if one is not None), default=None)
        if went.ooms:
            self.journal.write("oom", ooms=went.ooms, sentence="out of memory: half of the pack waits")
        for finished in went.finished:
            scored(finished)
            self.trained += 1
        if went.state is not None:
            try:
                self.folder.keep(went.share, went.state)
            except BadRun as error:  # the next one may go through
                self.journal.write("note", sentence=str(error))
        alive = sum(self.alive.values())
        self.journal.write("epochs", epochs=went.epochs, alive=alive, trained=self.trained, heads=len(self.jobs))
