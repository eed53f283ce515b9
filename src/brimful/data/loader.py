"""The loader: steps read ahead by workers, endless, from an exact position, and able to give memory back while it runs.

Workers, pinning and shared memory are torch's DataLoader's, which is given a whole step at a time. Because a position is one
number, the workers can be replaced at any step: by fewer of them when host RAM runs short (a watchdog checks), or after the
kernel has killed one. No row is lost or read twice.

A stored row of 120 tokens takes about 15 µs from file to collated micro-batch, so without workers a process feeds a GPU that
does 20,000 rows/s and more. Workers pay where a dataset decodes, augments or waits for a disk.
"""

import gc
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data._utils import signal_handling

from brimful.data.batches import Excluded, Lengths, Mix, SampledStep, StepSampler
from brimful.data.reader import PackedStep, ReadError, StepReader, StepRows, WorkerTraceback, is_exhausted, pack
from brimful.errors import BadOption, StoppedWaiting, TaskError, in_one_line
from brimful.machine.cgroup import oom_kills
from brimful.machine.host import Host, Space, tree_bytes
from brimful.memory.layout import PADDED
from brimful.memory.meter import trim_heap
from brimful.memory.snapshot import RandomState
from brimful.task import Task
from brimful.units import DANGER, is_whole, show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from brimful.planning.plan import Plan

PREFETCH = 2
"""Steps that each worker reads ahead."""
WARN_AT = DANGER
"""Share of the host limit from which on the watchdog acts."""
CHECK_S = 2.0
"""Between two checks of host RAM; one takes some milliseconds."""
SETTLE_CHECKS = 3
"""Checks skipped after a change: workers must end and the kernel take their pages back."""
REAP_S = 2.0
"""How long to wait for the exit code of a worker that does not answer."""
POLL_S = 2.0
"""Between two checks that the workers are alive while a step is waited for."""
STALL_S, STUCK_S = 30.0, 1800.0
"""A step that takes longer than the first to read is reported, longer than the second an error. File servers are known to
pause for ten minutes."""
LEAVE_S = 1.0
"""How long a worker may take to finish what it reads when it is no longer needed."""
OPEN_FILES = 8192
"""The limit of open files to request: the usual 1,024 are too few for many workers and a dataset that maps its files."""
SEND_FAILED = 75
"""Exit code of a worker that could not pass on a step. Its queue would drop the step, and the training wait for ever."""
_SHOWN_ROWS = 5

T = TypeVar("T")
Note = Callable[[str, dict[str, Any]], object]
"""Called with a message and its figures whenever the loader changes something on its own."""

log = logging.getLogger("brimful")


class Loader:
    """An endless iterator over the optimizer steps of a dataset, for one rank.

    Each item is a `StepRows`: this rank's rows of one step, split into micro-batches by the plan, collated, and ready for
    `Stepper.step`. Every row comes once per pass, in an order that depends on the seed alone.

    >>> import torch, brimful
    >>> class Numbers(brimful.Task):
    ...     def collate(self, rows):
    ...         return torch.stack(rows)
    >>> loader = brimful.Loader([torch.zeros(3)] * 20, Numbers(), global_batch=8)
    >>> steps = iter(loader)
    >>> len(next(steps)), len(next(steps))
    (8, 8)
    >>> loader.samples, loader.passes
    (16, 0.8)
    >>> steps.close()

    Save `state_dict()` in a checkpoint and give it to `load_state_dict` to continue at the same row, also with other
    workers, processes or plan.
    """

    def __init__(
        self,
        dataset: Any,
        task: Task,
        plan: "Plan | None" = None,
        *,
        global_batch: int | None = None,
        seed: int = 0,
        mix: str | None = None,
        lengths: Any = None,
        workers: int | None = None,
        prefetch: int | None = None,
        pin_memory: bool | None = None,
        rank: int | None = None,
        speeds: Sequence[float] | None = None,
        excluded: Excluded | None = None,
        host_limit_bytes: int | None = None,
        note: Note | None = None,
    ) -> None:
        """Start at the first row. Nothing is read before the first step is requested.

        dataset: any map-style dataset: a token store, a list, a `datasets.Dataset`.
        task: collates rows and gives their shapes.
        plan: splits steps into micro-batches, and has defaults for most of the other arguments. Without one, each step is
            one list of rows.
        global_batch: rows per step over all ranks. Default: the plan's, else the task's.
        seed: of the order of the rows, and of random numbers drawn by the dataset.
        mix: `window:50` sorts by length over 50 steps, for less padding. Default: every step is drawn at random.
        lengths: of all rows, as an array with one line per row or a function of row numbers. Default: the dataset's
            `shapes`, which a token store has.
        workers: processes that read ahead. Default: the plan's, else 0.
        prefetch: steps that each worker reads ahead. Default: the plan's, else 2.
        pin_memory: page-lock batches, for faster copies to a GPU. Default: the plan's, else off.
        rank: of this process. Default: the launcher's `RANK`, else 0.
        speeds: one for each rank; rows are dealt in proportion. Default: equal, for `WORLD_SIZE` ranks.
        excluded: returns which rows do not fit which ranks (`Stepper.excluded`).
        host_limit_bytes: host RAM to stay within by reading less ahead. Default: the plan's, else the machine's.
        note: called with a message and its figures when workers are lost or reduced. Default: a log warning.
        """
        host = plan.host if plan else None
        self.workers = _first(workers, host.workers if host else None, 0)
        self.prefetch = _first(prefetch, host.prefetch if host else None, PREFETCH)
        self.pin_memory = _first(pin_memory, host.pin_memory if host else None, False)
        _check(self.workers, self.prefetch)
        global_batch = _first(global_batch, plan.global_batch if plan else None, task.global_batch)
        lengths = _as_lengths(dataset, lengths)
        self._sampler = StepSampler(
            len(dataset), global_batch, seed=seed, mix=Mix.parse(mix), lengths=lengths,
            rank=_first(rank, int(os.environ.get("RANK", 0))),
            speeds=_first(speeds, (1.0,) * int(os.environ.get("WORLD_SIZE", 1))), excluded=excluded,
        )  # fmt: skip
        self._reader = StepReader(
            dataset, task, plan.split if plan else None, lengths, step_rows=global_batch, seed=seed,
            layout=plan.row_layout if plan else PADDED,
        )  # fmt: skip
        self._limit_bytes = _first(host_limit_bytes, host.limit_bytes if host else None)
        self._note, self._samples, self._changed = note or _log, 0, False
        self._iterator: Any = None
        self._reading: Iterator[StepRows] = iter(())
        """Reads steps, from the position at which the iteration began or something changed."""
        self._ahead: StepRows | Exception | None = None
        """The next step, or what was raised instead of it."""
        self._lost_at: int | None = None
        self._waiting_since: float | None = None
        self._stall_noted = False

    @property
    def samples(self) -> int:
        """Rows in the steps returned so far, over all ranks."""
        return self._samples

    @property
    def passes(self) -> float:
        """How often the dataset has been gone through."""
        return self._samples / self._sampler.stream.rows

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are running."""
        return [] if self._iterator is None else [worker.pid for worker in self._iterator._workers]

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step returned."""
        return self._sampler.state(self._samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly there, with any workers, processes and plan."""
        self._samples = self._sampler.resume(state)
        self._changed = True

    def deal_by(self, speeds: Sequence[float], excluded: Excluded | None = None) -> None:
        """From the next step on, deal rows by these speeds. Every rank must call it after the same step."""
        self._sampler.speeds, self._sampler.excluded = tuple(speeds), excluded
        self._changed = True

    def reduce_memory(self) -> str | None:
        """Take less host RAM from the next step on: fewer steps ahead, then fewer workers. None when nothing is left."""
        if self.workers == 0:
            return None
        if self.prefetch > 1:
            before, self.prefetch = self.prefetch, self.prefetch // 2
            change = f"each worker reads {show_count(self.prefetch, 'step')} ahead instead of {before}"
        else:
            before, self.workers = self.workers, self.workers // 2
            change = f"{_workers(self.workers)} instead of {before}"
        self._changed = True
        return change

    def __iter__(self) -> Iterator[StepRows]:
        limit_bytes = self._limit_bytes or Host.detect().ram_limit_bytes

        def note(message: str) -> None:
            self._note(message, {"workers": self.workers})

        with Watchdog(limit_bytes, self.reduce_memory, note, also=self._stall):
            stopped = False
            try:
                while True:
                    self._changed, self._ahead, self._reading = False, None, self._steps()
                    while not self._changed and (rows := self._next()) is not None:
                        self._samples = rows.start + rows.step_rows
                        yield rows
            except StoppedWaiting:
                stopped = True  # a stuck worker takes seconds to end, and the training has something to save first
                raise
            finally:
                self._ahead, self._reading = None, iter(())
                if not stopped:
                    self.close()

    def read_ahead(self) -> None:
        """Read the next step now, so that `next` returns it at once: for the time in which a training waits for its device.

        The position stays where it is, and an error is raised by `next`.
        """
        if self._ahead is None and not self._changed:
            try:
                self._ahead = self._next()
            except Exception as error:
                self._ahead = error
            except StoppedWaiting:
                self._changed = True  # the step may just have come, and would be missing
                raise

    def _next(self) -> StepRows | None:
        """The next step; None if there is no more to read from here."""
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        self._waiting_since = time.monotonic()
        try:
            return next(self._reading, None) if ahead is None else ahead
        finally:
            self._waiting_since = None

    def close(self) -> None:
        """End the workers. torch waits 5 s for each that is still reading; what these read is not needed any more."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            timer = threading.Timer(LEAVE_S, lambda: [worker.terminate() for worker in iterator._workers])
            timer.start()
            try:
                iterator._shutdown_workers()
            finally:
                timer.cancel()

    def _steps(self) -> Iterator[StepRows]:
        """Steps from the current position, until something changes or a worker is lost."""
        self.close()
        steps = (self._sampler.step(start) for start in itertools.count(self._samples, self._sampler.global_batch))
        if self.workers == 0:
            for step in steps:
                yield self._finish(self._read_here(step))
            return
        kills, started = oom_kills(), False
        while True:
            try:
                if not started:
                    self._iterator, started = self._start_workers(steps), True
                rows = self._next_of_workers()
            except (RuntimeError, OSError, EOFError) as error:  # the last two: it died while passing on a tensor
                if started and (dead := self._dead_workers()):
                    self._continue_without(dead[0], kills)
                elif is_exhausted(error):
                    self._continue_with_fewer(f"loader workers cannot be used ({in_one_line(error)})")
                else:
                    raise
                return
            if isinstance(rows, ReadError) and rows.exhausted:
                self._continue_with_fewer(rows.message)
                yield self._finish(self._read_here(self._sampler.step(self._samples)))
                return
            yield self._finish(rows)

    def _next_of_workers(self) -> StepRows | PackedStep | ReadError:
        """The next step that the workers have read. One that never comes is an error, with what to do."""
        start = time.monotonic()
        while True:
            try:
                return cast(PackedStep | ReadError, next(self._iterator))
            except RuntimeError as error:
                if "DataLoader timed out" not in str(error):
                    raise
            if time.monotonic() - start > STUCK_S:
                raise TaskError(
                    f"the loader workers have not read {self._next_rows()} in {show_seconds(STUCK_S)}. "
                    "Try: read these rows without workers (workers=0), to see where they hang."
                )

    def _stall(self) -> str | None:
        """A message once a step has kept the training waiting for long; again when the next one does."""
        since = self._waiting_since
        if since is None or time.monotonic() - since < STALL_S:
            self._stall_noted = self._stall_noted and since is not None
            return None
        if self._stall_noted:
            return None
        self._stall_noted = True
        who = f"{_workers(self.workers)} read{'s' * (self.workers == 1)}" if self.workers else "this process reads"
        return f"training has waited {show_seconds(STALL_S)} for its next rows: {who} {self._next_rows()}"

    def _next_rows(self) -> str:
        """Which rows the next step has, as far as they can be listed."""
        step = self._sampler.step(self._samples)
        rows = step.rows[step.mine]
        return f"rows {', '.join(map(str, rows[:_SHOWN_ROWS].tolist()))}{', …' * (len(rows) > _SHOWN_ROWS)}"

    def _read_here(self, step: SampledStep) -> StepRows | ReadError:
        """In this process, a second time if host RAM ran out: what errors and closed workers held is free by then."""
        rows = self._keeping_rng(partial(self._reader.__getitem__, step))
        if isinstance(rows, ReadError) and rows.exhausted:
            gc.collect()
            trim_heap()
            rows = self._keeping_rng(partial(self._reader.__getitem__, step))
        return rows

    def _finish(self, rows: StepRows | PackedStep | ReadError) -> StepRows:
        """What is left to do in this process."""
        if isinstance(rows, PackedStep):
            rows = rows.unpack()
        if isinstance(rows, ReadError):
            advice = " Try: a lower global_batch=, or a machine with more memory." if rows.exhausted else ""
            cause = WorkerTraceback(f"\n{rows.traceback}") if rows.traceback else None
            raise TaskError(rows.message + advice) from cause
        if self._reader.from_store:
            rows = self._keeping_rng(partial(self._reader.collate, rows))
        pinned = self.workers and not self._reader.from_store  # by torch's own thread
        return rows.pin_memory() if self.pin_memory and not pinned else rows

    def _keeping_rng(self, work: Callable[[], T]) -> T:
        """Run work that seeds the generators, and restore those of the training."""
        random_state = RandomState(torch.device("cpu"))
        try:
            return work()
        finally:
            random_state.restore()

    def _start_workers(self, steps: Iterator[SampledStep]) -> Any:
        """torch's workers, with a generator of their own so that starting them draws nothing from the training's.

        torch raises a dead worker's error from a signal handler, in the middle of whatever the training is doing. These
        workers are taken off its list, and a death is noticed when the next step is requested.
        """
        _allow_open_files()
        loader: Any = torch.utils.data.DataLoader(
            cast(Any, self._reader),
            batch_size=None,
            sampler=steps,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            pin_memory=self.pin_memory and not self._reader.from_store,
            collate_fn=cast(Any, pack),
            worker_init_fn=_begin_worker,
            timeout=POLL_S,
            generator=torch.Generator(),
        )
        trim_heap()  # workers would inherit this garbage
        iterator = iter(loader)
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        return iterator

    def _dead_workers(self) -> list[tuple[int, int]]:
        """Process ids and exit codes. A process that the kernel kills takes a moment to end."""
        workers, until = self._iterator._workers, time.monotonic() + REAP_S
        while not (dead := [(worker.pid, worker.exitcode) for worker in workers if worker.exitcode]):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        return dead

    def _continue_with_fewer(self, cause: str) -> None:
        """Give back what was read ahead, and read less of it from now on."""
        self.close()
        before, self.workers, self.prefetch = self.workers, self.workers // 2, 1
        self._note(
            f"{cause.rstrip('. ')}. Training continues with {_workers(self.workers)} instead of {before}; no row is lost",
            {"workers": self.workers},
        )

    def _continue_without(self, dead: tuple[int, int], kills: int | None) -> None:
        pid, code = dead
        before, self.workers = self.workers, self.workers // 2
        cause = exit_cause(code, kills, oom_kills())
        out_of_memory = code in (-signal.SIGBUS, SEND_FAILED) or "RAM ran out" in cause
        if self._samples == self._lost_at and not out_of_memory:
            raise TaskError(
                f"two workers {cause} while reading the same step. Try: read {self._next_rows()} without workers, since one of them crashes its reader."
            )
        self._lost_at = self._samples
        self._note(
            f"loader worker {pid} {cause}. Training continues with {_workers(self.workers)} instead of {before}; no row is lost",
            {"pid": pid, "exit_code": code, "workers": self.workers},
        )


class Watchdog:
    """Checks host RAM every two seconds while a `with` block runs, and reduces it before the kernel kills the run.

    The kernel's out-of-memory killer leaves no exception and no traceback. From 90 % of the limit on, `reduce` lowers one
    thing and returns what, or None when nothing is left to lower (`Loader.reduce_memory`); `note` is given each message.
    """

    def __init__(
        self,
        limit_bytes: int,
        reduce: Callable[[], str | None],
        note: Callable[[str], object],
        *,
        also: Callable[[], str | None] = lambda: None,
        every_s: float | None = None,
        used: Callable[[], int] | None = None,
    ) -> None:
        """`also` is called at every check and may return another message to note."""
        self._also = also
        self._limit_bytes, self._reduce, self._note, self._every_s = limit_bytes, reduce, note, every_s or CHECK_S
        self._used = used or (lambda: held_bytes(limit_bytes))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="brimful-host-ram", daemon=True)
        self._skip, self._warned = 0, False

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        """One check, and what follows from it."""
        if self._skip:
            self._skip -= 1
            return
        used_bytes = self._used()
        if used_bytes < WARN_AT * self._limit_bytes:
            self._warned = False
            return
        change = self._reduce()
        if change is None and self._warned:
            return
        self._warned, self._skip = change is None, SETTLE_CHECKS
        share = f"{show_bytes(used_bytes)} of {show_bytes(self._limit_bytes)} host RAM ({used_bytes / self._limit_bytes:.0%})"
        nothing = "nothing is left to reduce, so the kernel may end this run. Try: a higher host limit"
        self._note(f"{share} in use: {change or nothing}")

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            if message := self._also():
                self._note(message)
            try:
                self.check()
            except Exception as error:  # a check must never stop a training
                self._note(f"host RAM could not be read ({error}) and is no longer watched")
                return


def held_bytes(limit_bytes: int) -> int:
    """What counts against the limit: this job's processes, or what the machine cannot give any more if that is larger."""
    host = Host.detect()
    missing = min(limit_bytes, host.ram_limit_bytes) - host.ram_available_bytes
    several = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1
    launcher = os.getppid() if several else os.getpid()  # all of a job's processes on this machine descend from it
    return max(tree_bytes(launcher), missing)


def exit_cause(code: int, kills_before: int | None, kills_now: int | None) -> str:
    """What ended a worker, as far as can be known."""
    if code == -signal.SIGKILL:
        if kills_now is not None and kills_before is not None and kills_now > kills_before:
            return "was killed by the kernel because host RAM ran out"
        return "was killed, by the kernel for lack of host RAM or by a user"
    if code == -signal.SIGBUS:
        shm = Space.of("/dev/shm")
        space = f" ({show_bytes(shm.free_bytes)} of {show_bytes(shm.total_bytes)} free)" if shm else ""
        return f"died of a bus error because /dev/shm is full{space}; containers take --shm-size 2g"
    if code == SEND_FAILED:
        return "could not pass on its rows"
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _workers(count: int) -> str:
    return f"{count or 'no'} loader worker{'s' * (count != 1)}"


def _log(message: str, details: dict[str, Any]) -> None:
    log.warning(message)


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def _check(workers: int, prefetch: int) -> None:
    problems = [
        f"{name}={value!r} must be a whole number of at least {least}"
        for name, value, least in (("workers", workers, 0), ("prefetch", prefetch, 1))
        if not is_whole(value, least)
    ]
    if problems:
        raise BadOption("; ".join(problems) + ".")


def _as_lengths(dataset: Any, lengths: Any) -> Lengths | None:
    if lengths is None:
        return getattr(dataset, "shapes", None)
    if callable(lengths):
        return cast(Lengths, lengths)
    table = np.asarray(lengths, dtype=np.int64)
    if len(table) != len(dataset):
        raise BadOption(
            f"lengths has {len(table):,} lines, but the dataset has {len(dataset):,} rows. Try: one line per row."
        )
    return table.reshape(len(table), -1).__getitem__


def _allow_open_files() -> None:
    """Raise this process's limit, as far as its owner may. Workers inherit it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _begin_worker(_: int) -> None:
    """Ctrl-C is handled by the parent, so workers print no traceback. A step that cannot be sent ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Queue._on_queue_feeder_error = staticmethod(_cannot_send)  # type: ignore[attr-defined]


def _cannot_send(error: Exception, _: Any) -> None:
    print(f"brimful: loader worker {os.getpid()} cannot pass on its rows ({in_one_line(error)})", file=sys.stderr)
    sys.stderr.flush()
    os._exit(SEND_FAILED)
