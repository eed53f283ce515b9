"""Steps read ahead by workers, endless, from an exact position, and able to give memory back while it runs.

    loader = Loader(Store.open("store"), task, plan)     # or any map-style data set
    for rows in loader:                                  # one optimizer step's rows of this process
        stepper.step(rows)
    loader.state_dict()                                  # {"samples": 12800, …}: belongs into a checkpoint

Workers, pinning and shared memory are torch's DataLoader's; what is asked of it is a whole step at a time. Because a
position is one number, the workers can be replaced at any step: fewer of them when host RAM runs short (a `watchdog`
looks after that), or after the kernel has killed one. Nothing is lost or read twice, the step that was asked for comes next.

A stored row of 120 tokens costs about 15 µs from file to collated micro-batch, so without workers a process feeds a card
that does 20,000 rows/s and more; workers pay where a data set decodes, augments or waits for a disk.
"""

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data._utils import signal_handling

from brimful.data.batches import Barred, Batches, Lengths, Mix, Step
from brimful.data.reader import Reader, StepRows, Unreadable
from brimful.errors import BadOption, TaskError
from brimful.machine.cgroup import oom_kills
from brimful.machine.host import Host, Space, tree_bytes
from brimful.memory.meter import give_back
from brimful.memory.snapshot import RandomState
from brimful.task import Task
from brimful.units import show_bytes

if TYPE_CHECKING:
    from brimful.planning.plan import Plan

# Warns before the kernel kills, and has the loader give memory back.
#
# The kernel's out-of-memory killer leaves no exception and no traceback. A thread looks every two seconds at what the job's
# processes really hold (see `machine.footprint`) and at what the machine has left. From 90 % of the limit on it says so and
# asks for relief, one measure at a time, and looks for a while what that did before it asks again.


WARN_AT = 0.90
EVERY_S = 2.0
"""Between two looks; one costs some milliseconds."""
SETTLE = 3
"""Looks after a measure before the next: workers must have ended, and the kernel have their pages back."""


class Watchdog:
    """Watches host RAM for as long as a `with` block runs.

    `relieve` lowers something and says what, or returns None when nothing is left to lower (`Loader.relieve`); `warn` hears
    each sentence.
    """

    def __init__(
        self,
        limit_bytes: int,
        relieve: Callable[[], str | None],
        warn: Callable[[str], object],
        *,
        every_s: float | None = None,
        used: Callable[[], int] | None = None,
    ) -> None:
        self._limit_bytes, self._relieve, self._warn, self._every_s = limit_bytes, relieve, warn, every_s or EVERY_S
        self._used = used or (lambda: held_bytes(limit_bytes))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="brimful-host-ram", daemon=True)
        self._wait, self._told_helpless = 0, False

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """One look, and what follows from it."""
        if self._wait:
            self._wait -= 1
            return
        used_bytes = self._used()
        if used_bytes < WARN_AT * self._limit_bytes:
            self._told_helpless = False
            return
        change = self._relieve()
        if change is None and self._told_helpless:
            return
        self._told_helpless, self._wait = change is None, SETTLE
        state = f"host RAM: {show_bytes(used_bytes)} of {show_bytes(self._limit_bytes)} are taken ({used_bytes / self._limit_bytes:.0%})"
        helpless = (
            "there is nothing left to lower here: the kernel may end this run, so save, or give it more --host-limit"
        )
        self._warn(f"{state}; {change or helpless}")

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self.look()
            except Exception as error:  # a look must never stop a training
                self._warn(f"host RAM could not be read ({error}); it is no longer watched")
                return


def held_bytes(limit_bytes: int, root: Path = Path("/")) -> int:
    """What counts against the limit: this job's processes, or all that the machine cannot give any more if that is more."""
    host = Host.detect(root)
    missing = min(limit_bytes, host.ram_limit_bytes) - host.ram_available_bytes
    return max(tree_bytes(_job(), root), missing)


def _job() -> int:
    """The process all of a job's processes on this box descend from: the launcher where there is one."""
    return os.getppid() if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1 else os.getpid()


T = TypeVar("T")

PREFETCH = 2
"""Steps that each worker reads ahead."""
SHOWN = 5
"""Rows of a step that are named."""
REAPED_S = 2.0
"""A worker that failed to answer is given so long to be seen as dead."""

log = logging.getLogger("brimful")

Listener = Callable[[str, dict[str, Any]], object]
"""Hears a sentence and its figures whenever the loader changes something on its own."""


class Loader:
    """An endless iterator over a data set's steps for one process of a job."""

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
        barred: Barred | None = None,
        host_limit_bytes: int | None = None,
        listener: Listener | None = None,
    ) -> None:
        """What is not given is the plan's, else the task's, else the launcher's (`RANK`, `WORLD_SIZE`), else the machine's.

        `lengths` are those of all rows, an array with a line each or a function of row numbers; a token store knows its own.
        """
        host = plan.host if plan else None
        self.workers = _chosen(workers, host.workers if host else None, 0)
        self.prefetch = _chosen(prefetch, host.prefetch if host else None, PREFETCH)
        self.pin_memory = _chosen(pin_memory, host.pin_memory if host else None, False)
        _check(self.workers, self.prefetch)
        rank = _chosen(rank, None, int(os.environ.get("RANK", 0)))
        speeds = _chosen(speeds, None, (1.0,) * int(os.environ.get("WORLD_SIZE", 1)))
        known = _lengths_of(dataset, lengths)
        rows = _chosen(global_batch, plan.global_batch if plan else None, task.global_batch)
        self._batches = Batches(
            len(dataset), rows, seed=seed, mix=Mix.parse(mix), lengths=known, rank=rank, speeds=speeds, barred=barred
        )
        self._reader = Reader(dataset, task, plan.cut if plan else None, known, step_rows=rows, seed=seed)
        self._limit_bytes = _chosen(host_limit_bytes, host.limit_bytes if host else None, None)
        self._listener, self._samples, self._changed = listener or _logged, 0, False
        self._iterator: Any = None
        self._lost_at: int | None = None

    @property
    def samples(self) -> int:
        """Samples of the stream in the steps handed out so far."""
        return self._samples

    @property
    def passes(self) -> float:
        """How often the data set has been gone through."""
        return self._samples / self._batches.stream.rows

    @property
    def worker_pids(self) -> list[int]:
        """Of the workers that read now."""
        return [] if self._iterator is None else [worker.pid for worker in self._iterator._workers]

    @property
    def mix(self) -> Mix:
        return self._batches.mix

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands after the last step handed out."""
        return self._batches.state(self._samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly there, whatever the workers, processes and plan are now."""
        self._samples = self._batches.resume(state)
        self._changed = True

    def deal_by(self, speeds: Sequence[float], barred: Barred | None = None) -> None:
        """From the next step on, rows are dealt by these speeds. Every process must call it after the same step."""
        self._batches.speeds, self._batches.barred = tuple(speeds), barred
        self._changed = True

    def relieve(self) -> str | None:
        """Take less host RAM from the next step on: fewer steps ahead, then fewer workers. None when nothing is left."""
        if self.workers == 0:
            return None
        if self.prefetch > 1:
            before, self.prefetch = self.prefetch, self.prefetch // 2
            told = f"each worker reads {self.prefetch} step{'s' * (self.prefetch > 1)} ahead instead of {before}"
        else:
            before, self.workers = self.workers, self.workers // 2
            told = f"{self.workers or 'no'} loader worker{'s' * (self.workers != 1)} instead of {before}"
        self._changed = True
        return told

    def __iter__(self) -> Iterator[StepRows]:
        limit_bytes = self._limit_bytes or Host.detect().ram_limit_bytes
        with Watchdog(limit_bytes, self.relieve, lambda sentence: self._listener(sentence, {"workers": self.workers})):
            try:
                while True:
                    self._changed = False
                    for rows in self._reading():
                        self._samples = rows.start + rows.step_rows
                        yield rows
                        if self._changed:
                            break
            finally:
                self.close()

    def close(self) -> None:
        """End the workers."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()

    def _reading(self) -> Iterator[StepRows]:
        """Steps from where the run stands, until something changes or a worker is lost."""
        self.close()
        steps = (self._batches.step(start) for start in itertools.count(self._samples, self._batches.global_batch))
        if self.workers == 0:
            yield from (self._finished(self._here(partial(self._reader.__getitem__, step))) for step in steps)
            return
        kills = oom_kills()
        self._iterator = self._start(steps)
        while True:
            try:
                found = next(self._iterator)
            except (RuntimeError, OSError, EOFError):  # the last two: it died with a tensor in its hands
                if not (dead := self._dead_workers()):
                    raise
                self._go_on_without(dead[0], kills)
                return
            yield self._finished(found)

    def _finished(self, found: StepRows | Unreadable) -> StepRows:
        """What is left to do in this process."""
        if isinstance(found, Unreadable):
            raise TaskError(found.sentence)
        if self._reader.stored:
            rows = found
            found = self._here(lambda: self._reader.collated(rows))
        pinned = self.workers and not self._reader.stored  # by torch's own thread
        return found.pin_memory() if self.pin_memory and not pinned else found

    def _here(self, work: Callable[[], T]) -> T:
        """Work that draws random numbers, in this process: the training's own stay what they were."""
        random_state = RandomState(torch.device("cpu"))
        try:
            return work()
        finally:
            random_state.restore()

    def _start(self, steps: Iterator[Step]) -> Any:
        """torch's workers, with a generator of their own so that starting them draws nothing from the training's.

        torch raises a dead worker's error from a signal handler, in the middle of whatever the training is doing. These
        workers are taken off its list, and a death is seen when the next step is asked for.
        """
        loader: Any = torch.utils.data.DataLoader(
            cast(Any, self._reader),
            batch_size=None,
            sampler=steps,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            pin_memory=self.pin_memory and not self._reader.stored,
            collate_fn=_as_it_is,
            worker_init_fn=_leave_ctrl_c_to_the_parent,
            generator=torch.Generator(),
        )
        give_back()  # whatever is garbage now would stay with the workers
        iterator = iter(loader)
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        return iterator

    def _dead_workers(self) -> list[tuple[int, int]]:
        """Process ids and exit codes; what the kernel ends takes a moment to be gone."""
        workers, until = self._iterator._workers, time.monotonic() + REAPED_S
        while not (dead := [(worker.pid, worker.exitcode) for worker in workers if worker.exitcode]):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        return dead

    def _go_on_without(self, dead: tuple[int, int], kills: int | None) -> None:
        """Tell what became of it, and go on with fewer."""
        pid, code = dead
        before, self.workers = self.workers, self.workers // 2
        why = _cause(code, kills, oom_kills())
        if self._samples == self._lost_at and code != -signal.SIGBUS and "RAM ran out" not in why:
            first = self._batches.step(self._samples)
            raise TaskError(
                f"two loader workers in a row {why} while reading the same step: one of the rows "
                f"{', '.join(map(str, first.rows[first.mine][:SHOWN].tolist()))}, … of the data set ends whoever reads it"
            )
        self._lost_at = self._samples
        self._listener(
            f"loader worker {pid} {why}; the run goes on with {self.workers or 'no'} worker{'s' * (self.workers != 1)} instead of {before}, "
            "and no row is lost",
            {"pid": pid, "exit_code": code, "workers": self.workers},
        )


def _logged(sentence: str, details: dict[str, Any]) -> None:
    log.warning(sentence)


def _cause(code: int, kills_before: int | None, kills: int | None) -> str:
    """What ended a worker, as far as can be known."""
    if code == -signal.SIGKILL:
        if kills is not None and kills_before is not None and kills > kills_before:
            return "was killed by the kernel because host RAM ran out"
        return "was killed (by the kernel for want of host RAM, or by somebody)"
    if code == -signal.SIGBUS:
        shm = Space.of("/dev/shm")
        room = f" ({show_bytes(shm.free_bytes)} of {show_bytes(shm.total_bytes)} free)" if shm else ""
        return f"died of a bus error: /dev/shm is full{room}; a container takes --shm-size 2g"
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _chosen(given: Any, planned: Any, otherwise: Any) -> Any:
    return given if given is not None else planned if planned is not None else otherwise


def _check(workers: int, prefetch: int) -> None:
    problems = [
        f"--{name} {value!r}: give a whole number of at least {least}"
        for name, value, least in (("workers", workers, 0), ("prefetch", prefetch, 1))
        if not isinstance(value, int) or isinstance(value, bool) or value < least
    ]
    if problems:
        raise BadOption("; ".join(problems))


def _lengths_of(dataset: Any, given: Any) -> Lengths | None:
    if given is None:
        return getattr(dataset, "shapes", None)
    if callable(given):
        lengths: Lengths = given
        return lengths
    table = np.asarray(given, dtype=np.int64)
    if len(table) != len(dataset):
        raise BadOption(f"lengths has {len(table):,} lines, the data set {len(dataset):,} rows")
    return table.reshape(len(table), -1).__getitem__


def _as_it_is(value: Any) -> Any:
    return value


def _leave_ctrl_c_to_the_parent(_: int) -> None:
    """A worker's traceback on every Ctrl-C tells nobody anything."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
