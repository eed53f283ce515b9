"""All heads of a sweep trained, on one device, several or a cluster; each is scored as soon as it stops."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from brimful.errors import BadRun
from brimful.machine.host import Host
from brimful.machine.spawning import may_spawn
from brimful.memory.ledger import virtual_memory
from brimful.plan.target import Target
from brimful.tasks.heads.folder import SweepFolder
from brimful.tasks.heads.packed import cluster, processes
from brimful.tasks.heads.packed.job import Job, Rows
from brimful.tasks.heads.packed.runner import Finished
from brimful.tasks.heads.packed.share import Message, Packed, Share, Went
from brimful.tasks.heads.packed.state import State
from brimful.tasks.heads.plan import kin
from brimful.tasks.heads.spec.options import SweepOptions
from brimful.train.journal import Journal
from brimful.units import show_count

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
            stack.enter_context(self.target.capped())
            if self.target.device.type == "cpu" and self.options.memory_limit is not None:
                stack.enter_context(virtual_memory(self.target.limit_bytes))
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
            yield from processes.run_shares(self._shares(self._devices(), self.target.budget_bytes, begun), stop)
            return
        ray, cards, cores = cluster.connect(self.options.ray)
        there = ["cuda"] * cards or ["cpu"] * max(1, min(cores, self.options.processes or cores))
        budget = None if cards else self.target.budget_bytes  # cards elsewhere are measured where they are
        yield from cluster.run_shares(ray, self._shares(there, budget, begun), stop)

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
