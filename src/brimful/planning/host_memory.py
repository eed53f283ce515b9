"""The host's part of a plan: loader workers, how far they read ahead, pinned memory, and the RAM it all takes.

Everything is measured. A few steps of the real data are read, split and collated in this process. If that takes less
than 2 % of the time of a step, a worker would only cost RAM. Otherwise one worker is started, timed and weighed, and as
many are planned as keep up with the step within the cores, the host limit and /dev/shm. Pinned memory is on if it saves
more than 1 % of the step when a step's micro-batches are copied to the GPU. What the steps hold also gives the time of a step
of real rows, which are shorter than those that were timed.
"""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch

from brimful.data.loader import PREFETCH, Loader
from brimful.data.reader import StepRows
from brimful.errors import DoesNotFit
from brimful.machine.host import Host, Space, tree_bytes
from brimful.memory.context import tensors_of, to_device
from brimful.memory.meter import trim_heap
from brimful.planning.plan import Choice, HostPlan, Plan
from brimful.planning.plan_options import PlanOptions
from brimful.planning.plan_time import now
from brimful.planning.probe import Progress
from brimful.planning.target import Target
from brimful.task import Dataset, Task
from brimful.units import MiB, flag_bytes, show_bytes, show_count, show_seconds

NEGLIGIBLE = 0.02
"""Reading that takes no more than this share of a step needs no worker."""
HEADROOM = 1.25
"""Workers are planned to read this much faster than the step trains, because disks and neighbours vary."""
WORTH_PINNING = 0.01
"""Pinned memory must save this share of the step."""
ALWAYS_PINNED = 16 * MiB
"""A step of no more than this is pinned without timing a copy, which would not show what matters: on a GPU that is busy, a
copy from plain memory holds up the host until the GPU gets to it, and then the GPU waits for the host."""
CPU_BOUND = 0.5
"""Reading that computes for more than this share of its time competes with training on the CPU."""
FILL_HOST = 0.90
"""The share of the host limit to plan for. Above it the watchdog warns."""
STEPS, SECONDS = 8, 0.5
"""This many steps are timed, or as many as come in this many seconds."""
ROWS = 4096
"""A larger step is not read whole: times and bytes of its first rows are scaled."""
COPIES = 5
"""Copies to the GPU that are timed."""


def with_host(
    plan: Plan, task: Task, rows: Dataset | None, target: Target, options: PlanOptions, progress: Progress
) -> Plan:
    """The plan with its host part, which is unknown without `rows`."""
    return HostPlanner(plan, task, rows, target, options, progress).plan_host()


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps as they were read."""

    rows: StepRows
    seconds: float
    """Median time until the rows of a step were ready in one process; scaled if only some of them were read."""
    computing: float
    """The share of that time in which this process computed or waited for a core."""
    worker_bytes: int
    """Anonymous and shared memory that a worker adds; 0 without one."""
    work: float
    """Rows × padded lengths of a step in one process, on average; scaled as the seconds are."""
    micro_batches: float
    """On average."""


class HostPlanner:
    """Measures the loader of one plan and decides on it."""

    def __init__(
        self, plan: Plan, task: Task, rows: Dataset | None, target: Target, options: PlanOptions, progress: Progress
    ) -> None:
        self.plan, self.task, self.rows, self.target = plan, task, rows, target
        self.options, self.progress, self.host = options, progress, Host.detect()
        self.read_rows = min(plan.global_batch, max(ROWS, plan.processes))
        self.scale = plan.global_batch / self.read_rows
        self.here = None if rows is None else self.read(workers=0)
        self.worker: Timed | None = None

    def plan_host(self) -> Plan:
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
        limit = [] if self.options.host_limit is None else [self._limit()]
        named = ("workers", "prefetch", "pin_memory", "host_limit")
        others = (choice for choice in self.plan.choices if choice.name not in named)
        plan = replace(
            self.plan, host=host, step_s=self._step_s(host), choices=(*others, workers, prefetch, pinned, *limit)
        )
        return plan.with_warning(*self._warnings())

    def _limit(self) -> Choice:
        requested, usable = self.options.host_limit_bytes, self.target.host_limit_bytes
        reason = "as requested" if requested == usable else f"all there is: {self.host.ram_limited_by}"
        return Choice.of("host_limit", requested, usable, reason, "measured")

    def _warnings(self) -> Iterator[str]:
        requested, usable = self.options.host_limit_bytes, self.target.host_limit_bytes
        if requested is not None and requested > usable:
            yield (
                f"host_limit= is {show_bytes(requested)}, and there are {show_bytes(usable)} ({self.host.ram_limited_by}), "
                "which the plan is for"
            )
        if self.rows is not None and self.plan.global_batch > len(self.rows):
            batch, count = self.plan.global_batch, len(self.rows)
            yield (
                f"the global batch of {batch:,} rows exceeds the {count:,} rows of the data, so a step has each row "
                f"{_times(batch / count)}. Try: a smaller global_batch="
            )

    def _step_s(self, host: HostPlan) -> float | None:
        """The time of a step of the data's rows. A GPU computes while the next rows are read; a CPU does one after the other."""
        if self.here is None:
            return None
        on_data = next((one.data_rows_per_s for one in self.plan.tried if one.chosen), None)
        trains_s = max(self.plan.deal) / on_data * self.plan.simulation_slowdown if on_data else self.trains_s
        if host.workers:
            reads_s = (self.worker or self.here).seconds / host.workers
            return max(trains_s, reads_s)
        return trains_s + self.here.seconds if self.target.device.type == "cpu" else max(trains_s, self.here.seconds)

    def read(self, workers: int) -> Timed:
        """Time a few steps, after one that opens files and fills caches."""
        self.progress(f"read a few steps {'with a worker' if workers else 'of the data'}")
        loader = Loader(
            self.rows, self.task, self.plan, global_batch=self.read_rows, workers=workers, prefetch=PREFETCH,
            pin_memory=False, rank=0, speeds=(1.0,) * self.plan.processes,
        )  # fmt: skip
        trim_heap()  # as the loader does before it starts a worker
        alone = tree_bytes()
        steps = iter(loader)
        first = next(steps)
        work, micro_batches = [_work(first)], [len(first.groups)]
        seconds, computing, began = [], 0.0, now()
        for _ in _until(STEPS, SECONDS):
            started, busy = now(), _busy_s()
            rows = next(steps)
            seconds.append(now() - started)
            computing += _busy_s() - busy
            work.append(_work(rows))
            micro_batches.append(len(rows.groups))
            del rows  # which would count as the worker's
        total_s = now() - began
        # A forked worker shares pages with its parent, and each counts half of them: only the sum of all is right. It is
        # taken before the worker ends, because its pages then count as unshared for a while (300 MiB).
        held = max(0, tree_bytes() - alone) // workers if workers else 0
        loader.close()
        each = total_s / len(seconds) if workers else statistics.median(seconds)  # steps read ahead come at once
        mean_work, mean_count = (self.scale * statistics.fmean(values) for values in (work, micro_batches))
        return Timed(first, self.scale * each, computing / total_s, held, mean_work, mean_count)

    @property
    def trains_s(self) -> float:
        """Seconds that a step of such rows trains, predicted from the rows/s at the planned lengths, which were timed without a simulated limit."""
        assert self.here is not None
        plan, overhead = self.plan, self.plan.overhead or 0.0
        planned_work = max(plan.deal) * max(1, sum(plan.shape)) + plan.accumulation * overhead
        per_work_s = max(plan.deal) / plan.rows_per_s / planned_work
        return per_work_s * (self.here.work + self.here.micro_batches * overhead) * plan.simulation_slowdown

    def _workers(self) -> Choice:
        wanted = None if self.options.workers == "auto" else self.options.workers
        if self.here is None:
            return Choice.of(
                "workers", wanted, wanted, "unknown: without data nothing could be read and timed", "asked"
            )
        share, takes = self.here.seconds / self.trains_s, _ms(self.here.seconds)
        reason = f"a step is read in {takes}, {share:.1%} of the {_ms(self.trains_s)} that it is predicted to train"
        if wanted == 0:
            return Choice.of("workers", 0, 0, f"as requested; {reason}", "measured")
        if wanted is None and self.options.deterministic:
            reason = f"deterministic: none unless workers= is set, since rows that draw random numbers would differ; {reason}"
            return Choice.of("workers", None, 0, reason, "measured")
        if wanted is None and share <= NEGLIGIBLE:
            return Choice.of("workers", None, 0, f"{reason}; a worker would cost RAM and gain nothing", "measured")
        if wanted is None and self.target.device.type == "cpu" and self.here.computing > CPU_BOUND:
            reason = f"reading computes ({takes} per step), and training needs the same cores"
            return Choice.of("workers", None, 0, reason, "measured")
        self.worker = self.read(workers=1)
        needed = math.ceil(HEADROOM * self.worker.seconds / self.trains_s)
        cores = max(1, self.host.cores // self.plan.processes - 1)
        reason = (
            f"one worker reads a step in {_ms(self.worker.seconds)} and takes {show_bytes(self.worker.worker_bytes)}; "
            f"the step is predicted to train {_ms(self.trains_s)}"
        )
        if wanted is None and needed > cores:
            reason += f"; {needed} would keep up, {self.host.cores} cores for {self._processes} allow {cores}"
        return Choice.of("workers", wanted, min(needed, cores) if wanted is None else wanted, reason, "measured")

    def _prefetch(self, workers: Choice) -> Choice:
        wanted = None if self.options.prefetch == "auto" else self.options.prefetch
        if not workers.effective:
            return Choice.of("prefetch", wanted, wanted, "without workers nothing is read ahead", "asked")
        reason = f"steps per worker, {show_bytes(self._step_bytes)} each"
        return Choice.of("prefetch", wanted, wanted or PREFETCH, reason, "measured")

    @property
    def _processes(self) -> str:
        return f"{self.plan.processes} process{'es' * (self.plan.processes > 1)}"

    @property
    def _step_bytes(self) -> int:
        return round(self.scale * self._read_bytes)

    @property
    def _read_bytes(self) -> int:
        return 0 if self.here is None else sum(tensor.nbytes for tensor in tensors_of(self.here.rows.batches))

    def _bytes(self, workers: int, prefetch: int) -> int:
        """Host RAM of the job: that of this process now for each process, with the blocks' inputs that checkpointing moves
        there, and that of their workers."""
        mine = tree_bytes() + (self.plan.measured_peak_bytes if self.target.device.type == "cpu" else 0)
        weighed = self.worker.worker_bytes if self.worker else 0
        own = max(0, weighed - PREFETCH * self._read_bytes)
        mine += self.plan.offloaded_bytes
        return self.plan.processes * (mine + workers * (own + prefetch * self._step_bytes))

    def _within_the_limit(self, workers: Choice, prefetch: Choice) -> tuple[Choice, Choice]:
        """Fewer steps ahead, then fewer workers, until the host limit and /dev/shm suffice. Requested values stay."""
        limit, shm = FILL_HOST * self.target.host_limit_bytes, Space.of("/dev/shm")
        shm_bytes = math.inf if shm is None else FILL_HOST * shm.free_bytes / self.plan.processes
        count, ahead = workers.effective or 0, prefetch.effective or 0

        def fits() -> bool:
            return self._bytes(count, ahead) <= limit and count * ahead * self._step_bytes <= shm_bytes

        while not fits() and count:
            if ahead > 1 and self.options.prefetch == "auto":
                ahead -= 1
            elif self.options.workers == "auto":
                count -= 1
            else:
                break
        if not fits():
            raise self._too_large(count, ahead)
        if (count, ahead) == (workers.effective or 0, prefetch.effective or 0):
            return workers, prefetch
        free = show_bytes(None if shm is None else shm.free_bytes)
        reason = f"; {show_bytes(limit)} of host RAM and {free} of /dev/shm allow no more"
        fewer = replace(workers, effective=count, reason=workers.reason + reason)
        if not count:
            return fewer, replace(prefetch, effective=None, reason="without workers nothing is read ahead")
        return fewer, replace(prefetch, effective=ahead, reason=prefetch.reason + reason)

    def _too_large(self, workers: int, prefetch: int) -> DoesNotFit:
        needed = self._bytes(workers, prefetch) / FILL_HOST
        each = f" with {show_count(workers, 'worker')} each" if workers else ""
        moved = self.plan.offloaded_bytes
        tips = [f'host_limit="{flag_bytes(needed)}"'] + ["fewer workers="] * (workers > 0)
        tips += ["a smaller micro_batch="] * (moved > 0)
        return DoesNotFit(
            f"{self._processes}{each} {'take' if self.plan.processes > 1 else 'takes'} {show_bytes(needed * FILL_HOST)} "
            f"of host RAM{f' ({show_bytes(moved)} of it for offloaded inputs)' if moved else ''}, and {FILL_HOST:.0%} of the limit "
            f"is {show_bytes(FILL_HOST * self.target.host_limit_bytes)}. "
            f"Try: {', or '.join(tips)}.",
            needed_bytes=round(needed),
        )

    def _pin_memory(self) -> Choice:
        wanted = {"auto": None, "on": True, "off": False}[self.options.pin_memory]
        device = self.target.device
        if device.type != "cuda":
            return Choice.of("pin_memory", wanted, False, f"{self.target.name} reads host memory directly", "measured")
        if self.here is None:
            return Choice.of("pin_memory", wanted, wanted, "unknown: without data no copy could be timed", "asked")
        if wanted is None and self.options.deterministic:
            return Choice.of("pin_memory", None, True, "deterministic: on wherever there is a GPU", "predicted")
        if wanted is None and self._step_bytes <= ALWAYS_PINNED:
            size = show_bytes(self._step_bytes)
            reason = f"a step is {size}; from plain memory each copy would hold up the host until the GPU gets to it"
            return Choice.of("pin_memory", None, True, reason, "predicted")
        plain, pinned = self.here.rows, self.here.rows.pin_memory()
        slow, fast = (self.scale * _copy_s(rows, device) for rows in (plain, pinned))
        worth = slow - fast > WORTH_PINNING * self.trains_s
        reason = (
            f"copying a step ({show_bytes(self._step_bytes)}) to the GPU takes {_ms(fast)} from pinned memory and "
            f"{_ms(slow)} from plain; the step is predicted to take {_ms(self.trains_s)}"
        )
        return Choice.of("pin_memory", wanted, worth if wanted is None else wanted, reason, "measured")


def _work(rows: StepRows) -> int:
    return sum(len(group) * max(1, sum(shape)) for group, shape in zip(rows.groups, rows.shapes, strict=True))


def _times(passes: float) -> str:
    """How often a step has each row of data that it exceeds: `once or twice`, `2 or 3 times`, `2,500 times`."""
    least, most = math.floor(passes), math.ceil(passes)
    if most <= 2:
        return "twice" if least == most else "once or twice"
    return f"{least:,} times" if least == most else f"{least:,} or {most:,} times"


def _copy_s(rows: StepRows, device: torch.device) -> float:
    times = []
    for _ in range(COPIES):
        torch.accelerator.synchronize(device)
        started = now()
        to_device(rows.batches, device)
        torch.accelerator.synchronize(device)
        times.append(now() - started)
    return statistics.median(times)


def _busy_s() -> float:
    """Seconds in which this thread computed or waited for a core, so that neighbours do not make it look idle."""
    try:
        computed, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return (int(computed) + int(waited)) / 1e9
    except (OSError, ValueError):  # not Linux, or a kernel that does not count
        return time.thread_time()


def _until(times: int, seconds: float) -> Iterator[int]:
    """This many rounds, fewer if they take longer than this many seconds in all, and at least one."""
    began = now()
    return takewhile(lambda number: number == 0 or now() - began < seconds, range(times))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else show_seconds(seconds)
