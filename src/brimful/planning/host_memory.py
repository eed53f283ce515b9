"""The host's side of a plan: loader workers, how far they read ahead, pinned memory, and the RAM it all takes.

Nothing here is a rule of thumb. A few steps of the real data are read, cut and collated in this process; if that takes
less than 2 % of the time the step trains, a worker would only cost RAM. Otherwise one worker is started, timed and
weighed, and as many are planned as keep up with the step, within the cores, the host limit and /dev/shm. Pinned memory
is on where copying a step's micro-batches from it to the card saved more than 1 % of the step.
"""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from brimful.data.loader import PREFETCH, Loader
from brimful.data.reader import StepRows
from brimful.errors import DoesNotFit
from brimful.machine.host import Host, Space, tree_bytes
from brimful.memory.context import tensors_of, to_device
from brimful.memory.meter import trim_heap
from brimful.planning.plan import Choice, HostPlan, Plan
from brimful.planning.probe import Progress
from brimful.planning.search import as_choice
from brimful.planning.target import PlanOptions, Target
from brimful.task import Task
from brimful.units import flag_bytes, show_bytes, show_seconds

NEGLIGIBLE = 0.02
"""Reading that takes no more than this share of a step needs no worker."""
HEADROOM = 1.25
"""Workers are planned to read so much faster than the step trains: disks and neighbours vary."""
WORTH_PINNING = 0.01
"""Pinned memory must save this share of the step."""
CPU_BOUND = 0.5
"""Reading that computes for more than this share of its time competes with a training on the CPU."""
FILL_HOST = 0.90
"""The share of the host limit that is planned for; from there on the watchdog warns."""
STEPS, SECONDS = 8, 0.5
"""So many steps are timed, or as many as come in so many seconds."""
ROWS = 4096
"""A larger step is not read whole: its first rows are, and its times and bytes are those in proportion."""
PASSES = 10
"""A step that goes through the data more often than this is worth a warning."""
COPIES = 5
"""So many copies to the card are timed."""


def with_host(plan: Plan, task: Task, rows: Any, target: Target, options: PlanOptions, progress: Progress) -> Plan:
    """The plan with its host side. `rows` is the data set; None where there is none, and then its loader is unknown."""
    return _HostFit(plan, task, rows, target, options, progress).plan_it()


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps as they were read."""

    rows: StepRows
    seconds: float
    """Until a step's rows of one process were ready, at the median; in proportion where only some of them were read."""
    computing: float
    """The share of that in which this process computed or wanted to."""
    worker_bytes: int
    """Anonymous and shared memory that a worker adds, 0 without one."""


class _HostFit:
    """One fit of the host's side under way."""

    def __init__(
        self, plan: Plan, task: Task, rows: Any, target: Target, options: PlanOptions, progress: Progress
    ) -> None:
        self.plan, self.task, self.rows, self.target = plan, task, rows, target
        self.options, self.progress, self.host = options, progress, Host.detect()
        self.read_rows = min(plan.global_batch, max(ROWS, plan.processes))
        self.scale = plan.global_batch / self.read_rows
        self.here = None if rows is None else self._read(workers=0)
        self.worker: Timed | None = None

    def plan_it(self) -> Plan:
        workers = self._workers()
        prefetch = self._prefetch(workers)
        workers, prefetch = self._within_the_limit(workers, prefetch)
        pinned = self._pin_memory()
        host = HostPlan(
            workers=workers.effective,
            prefetch=prefetch.effective,
            pin_memory=pinned.effective,
            predicted_bytes=self._bytes(workers.effective or 0, prefetch.effective or 0),
            limit_bytes=self.target.host_limit_bytes,
        )
        mine = (workers, prefetch, pinned)
        others = (choice for choice in self.plan.choices if choice.name not in {one.name for one in mine})
        plan = replace(self.plan, host=host, choices=(*others, *mine))
        passes = 0.0 if self.rows is None else plan.global_batch / len(self.rows)
        if passes <= PASSES:
            return plan
        return plan.warned(
            f"a step of {plan.global_batch:,} rows goes through the data's {len(self.rows):,} rows {passes:,.0f} times; "
            f"give a smaller --global-batch"
        )

    def _read(self, workers: int) -> Timed:
        """A few steps, after one that opens files and fills caches."""
        self.progress(f"reading a few steps {'with a worker' if workers else 'of the data'}")
        even = (1.0,) * self.plan.processes
        loader = Loader(
            self.rows, self.task, self.plan, global_batch=self.read_rows, workers=workers, prefetch=PREFETCH,
            pin_memory=False, rank=0, speeds=even,
        )  # fmt: skip
        trim_heap()  # as the loader does before it starts a worker
        alone = tree_bytes()
        steps = iter(loader)
        first = next(steps)
        seconds, computing, began = [], 0.0, time.perf_counter()
        for _ in _until(STEPS, SECONDS):
            started, busy = time.perf_counter(), _busy_s()
            next(steps)
            seconds.append(time.perf_counter() - started)
            computing += _busy_s() - busy
        in_all = time.perf_counter() - began
        # A forked worker shares what it was forked from, and each counts half of that: only all of them together tell. Not
        # after it has ended: for a while its pages then count as shared with nobody, 300 MiB of them on a card's host.
        held = max(0, tree_bytes() - alone) // workers if workers else 0
        loader.close()
        # Steps that were read ahead come at once: what a worker really takes is the mean.
        each = in_all / len(seconds) if workers else statistics.median(seconds)
        return Timed(first, self.scale * each, computing / in_all, held)

    @property
    def trains_s(self) -> float:
        """Seconds that a step of such rows would train, as predicted from the rows/s at the planned lengths."""
        assert self.here is not None
        per_work = 1 / (self.plan.rows_per_s * max(1, sum(self.plan.shape)))
        rows = self.here.rows
        return (
            self.scale
            * per_work
            * sum(len(group) * max(1, sum(shape)) for group, shape in zip(rows.groups, rows.shapes, strict=True))
        )

    def _workers(self) -> Choice:
        asked = None if self.options.workers == "auto" else self.options.workers
        if self.here is None:
            return as_choice("workers", asked, asked, "no DATA was given, so nothing could be read and timed", "asked")
        share, takes = self.here.seconds / self.trains_s, _ms(self.here.seconds)
        said = f"a step's rows are ready in {takes}, {share:.1%} of the {_ms(self.trains_s)} it is predicted to train"
        if asked == 0:
            return as_choice("workers", 0, 0, f"as asked for; {said}", "measured")
        if asked is None and share <= NEGLIGIBLE:
            return as_choice("workers", None, 0, f"{said}; a worker would cost RAM and gain nothing", "measured")
        if asked is None and self.target.device.type == "cpu" and self.here.computing > CPU_BOUND:
            said = f"reading computes ({takes} a step), and the training needs the same cores"
            return as_choice("workers", None, 0, said, "measured")
        self.worker = self._read(workers=1)
        needed = math.ceil(HEADROOM * self.worker.seconds / self.trains_s)
        cores = max(1, self.host.cores // self.plan.processes - 1)
        said = (
            f"a worker has a step's rows ready every {_ms(self.worker.seconds)} and takes "
            f"{show_bytes(self.worker.worker_bytes)}; the step is predicted to train {_ms(self.trains_s)}"
        )
        if asked is None and needed > cores:
            said += f"; {needed} would keep up, {self.host.cores} cores for {self.plan.processes} process{'es' * (self.plan.processes > 1)} allow {cores}"
        return as_choice("workers", asked, min(needed, cores) if asked is None else asked, said, "measured")

    def _prefetch(self, workers: Choice) -> Choice:
        asked = None if self.options.prefetch == "auto" else self.options.prefetch
        if not workers.effective:
            return as_choice("prefetch", asked, asked, "without workers nothing is read ahead", "asked")
        ahead = show_bytes(self._step_bytes)
        return as_choice("prefetch", asked, asked or PREFETCH, f"steps for each worker, {ahead} each", "measured")

    @property
    def _step_bytes(self) -> int:
        return round(self.scale * self._read_bytes)

    @property
    def _read_bytes(self) -> int:
        return 0 if self.here is None else sum(tensor.nbytes for tensor in tensors_of(self.here.rows.parts))

    def _bytes(self, workers: int, prefetch: int) -> int:
        """Host RAM of the job: this process's as it is now times the processes, and their workers as one was weighed."""
        mine = tree_bytes() + (self.plan.measured_peak_bytes if self.target.device.type == "cpu" else 0)
        weighed = self.worker.worker_bytes if self.worker else 0
        own = max(0, weighed - PREFETCH * self._read_bytes)
        return self.plan.processes * (mine + workers * (own + prefetch * self._step_bytes))

    def _within_the_limit(self, workers: Choice, prefetch: Choice) -> tuple[Choice, Choice]:
        """Fewer steps ahead, then fewer workers, until the host limit and /dev/shm hold it all; what was asked for stays."""
        limit, shm = FILL_HOST * self.target.host_limit_bytes, Space.of("/dev/shm")
        room = math.inf if shm is None else FILL_HOST * shm.free_bytes / self.plan.processes
        many, ahead = workers.effective or 0, prefetch.effective or 0

        def fits() -> bool:
            return self._bytes(many, ahead) <= limit and many * ahead * self._step_bytes <= room

        while not fits() and many:
            if ahead > 1 and self.options.prefetch == "auto":
                ahead -= 1
            elif self.options.workers == "auto":
                many -= 1
            else:
                break
        if not fits():
            raise self._too_large(many, ahead)
        if (many, ahead) == (workers.effective or 0, prefetch.effective or 0):
            return workers, prefetch
        why = f"; {show_bytes(limit)} of host RAM and {show_bytes(None if shm is None else shm.free_bytes)} of /dev/shm hold no more"
        less = replace(workers, effective=many, reason=workers.reason + why)
        if not many:
            return less, replace(prefetch, effective=None, reason="without workers nothing is read ahead")
        return less, replace(prefetch, effective=ahead, reason=prefetch.reason + why)

    def _too_large(self, workers: int, prefetch: int) -> DoesNotFit:
        needed = self._bytes(workers, prefetch) / FILL_HOST
        which = f" with {workers} worker{'s' * (workers != 1)} each" if workers else ""
        fewer = ", or fewer --workers" if workers else ""
        return DoesNotFit(
            f"{self.plan.processes} process{'es' * (self.plan.processes > 1)}{which} {'take' if self.plan.processes > 1 else 'takes'} {show_bytes(needed * FILL_HOST)} of host RAM, and "
            f"{FILL_HOST:.0%} of the limit are {show_bytes(FILL_HOST * self.target.host_limit_bytes)}: give --host-limit "
            f"{flag_bytes(needed)}{fewer}",
            needed_bytes=round(needed),
        )

    def _pin_memory(self) -> Choice:
        asked = {"auto": None, "on": True, "off": False}[self.options.pin_memory]
        device = self.target.device
        if device.type != "cuda":
            return as_choice("pin_memory", asked, False, f"{self.target.name} reads host memory as it is", "measured")
        if self.here is None:
            return as_choice("pin_memory", asked, asked, "no DATA was given, so no copy could be timed", "asked")
        plain, pinned = self.here.rows, self.here.rows.pin_memory()
        slow, fast = (self.scale * _copy_s(rows, device) for rows in (plain, pinned))
        worth = slow - fast > WORTH_PINNING * self.trains_s
        said = (
            f"copying a step ({show_bytes(self._step_bytes)}) to the card takes {_ms(fast)} from pinned memory and {_ms(slow)} "
            f"from plain, and the step is predicted to take {_ms(self.trains_s)}"
        )
        return as_choice("pin_memory", asked, worth if asked is None else asked, said, "measured")


def _copy_s(rows: StepRows, device: torch.device) -> float:
    times = []
    for _ in range(COPIES):
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        to_device(rows.parts, device)
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _busy_s() -> float:
    """Seconds that this thread computed or waited for a core, so that neighbours do not make it look idle."""
    try:
        computed, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return (int(computed) + int(waited)) / 1e9
    except (OSError, ValueError):  # not Linux, or a kernel that does not count
        return time.thread_time()


def _until(times: int, seconds: float) -> Iterator[int]:
    """So many rounds, fewer where they take longer than so many seconds in all, and one at least."""
    began = time.perf_counter()
    return takewhile(lambda number: number == 0 or time.perf_counter() - began < seconds, range(times))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else show_seconds(seconds)
