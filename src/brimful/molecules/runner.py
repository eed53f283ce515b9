"""Trains jobs that can share a pack: chooses how many at once, replaces runs that stop, survives out-of-memory errors.

A run stops when its validation score has not improved for its patience, its epochs are over, or its loss is not finite.
After an out-of-memory error half of the pack waits on the host and continues when others are done. None of this changes
what a run becomes.

The size of a pack is found by trying 1, 2, 4 … runs for a few steps, on copies that are thrown away. Memory is linear in
the number of runs: two small packs predict the next, and each larger one corrects the line. Speed is measured: a pack twice
as large must do at least 1.1 times the work.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from brimful.errors import DoesNotFit
from brimful.memory.meter import has_peak_statistics, meter, synchronize
from brimful.memory.oom import OutOfMemory, attempt, empty_cache
from brimful.molecules.feature_store import FeatureStore
from brimful.molecules.heads import Job
from brimful.molecules.pack import Pack, State, validation_scores
from brimful.units import show_bytes

MIN_GAIN = 1.1
"""Twice the runs must do this many times the work."""
TRIAL_STEPS, TRIAL_S = 4, 1.0
"""A trial is this many steps, or as many as fit this time."""
REBUILD_SHARE = 16
"""A pack is rebuilt when one in this many of its runs has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTrial:
    """A pack that was tried."""

    runs: int
    steps_per_s: float
    """Steps of one run in a second, over all runs."""
    peak_bytes: int
    """Measured: reserved bytes of the process on a GPU, the ledger's count on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSize:
    """How many runs to train at once, and why."""

    runs: int
    reason: str
    trials: tuple[PackTrial, ...]


def choose_pack_size(
    jobs: Sequence[Job], store: FeatureStore, budget_bytes: int | None, *, most: int | None = None
) -> PackSize:
    """For jobs with one pack key. `most` is the user's limit; the budget includes everything that the process holds on the device."""
    limit = min(len(jobs), most or len(jobs))
    trials: list[PackTrial] = []
    runs = 1
    while True:
        if (reason := _predicted_too_large(trials, runs, budget_bytes)) is not None:
            return _best_size(trials, reason)
        trial = attempt(lambda runs=runs: _try(jobs[:runs], store), store.device)  # type: ignore[misc]
        if isinstance(trial, OutOfMemory):
            if not trials:
                raise too_large(jobs[0], store.device)
            return _best_size(trials, f"{runs} ran out of memory")
        if trials and not _worth_it(trial, trials[-1]):  # once more: the machine may have been busy
            again = attempt(lambda runs=runs: _try(jobs[:runs], store), store.device)  # type: ignore[misc]
            trial = (
                trial
                if isinstance(again, OutOfMemory)
                else max(trial, again, key=lambda candidate: candidate.steps_per_s)
            )
        if budget_bytes is not None and trial.peak_bytes > budget_bytes and trials:
            return _best_size(
                trials, f"{runs} took {show_bytes(trial.peak_bytes)} (measured) of {show_bytes(budget_bytes)}"
            )
        trials.append(trial)
        if len(trials) > 1 and not _worth_it(trial, trials[-2]):
            gain = trial.steps_per_s / trials[-2].steps_per_s
            return _best_size(trials, f"{runs} at once do {gain:.2f} times the work of {trials[-2].runs} (measured)")
        if runs == limit:
            return _best_size(trials, f"requested with pack={most}" if most == limit else "all runs of this shape")
        runs = min(2 * runs, limit)


def _worth_it(trial: PackTrial, before: PackTrial) -> bool:
    """Whether the larger pack does clearly more; one that is hardly larger needs to do hardly more."""
    return trial.steps_per_s >= before.steps_per_s * MIN_GAIN ** math.log2(trial.runs / before.runs)


def _try(jobs: Sequence[Job], store: FeatureStore) -> PackTrial:
    """A few steps and a validation of these runs."""
    device = store.device
    measured = meter(device, reserved=True)
    with measured:
        measured.phase("step")
        pack = Pack(State.new(jobs, device), store)
        pack.step()
        validation_scores(pack, range(len(pack)))
    seconds, steps = _time_steps(pack.step, device)
    reading = measured.reading()
    held = 0 if has_peak_statistics(device) else store.nbytes  # the ledger counts what is new to it
    peak = held + (reading.reserved_bytes or reading.peak_bytes)
    return PackTrial(runs=len(jobs), steps_per_s=len(jobs) * steps / seconds, peak_bytes=peak)


def _time_steps(step: Callable[[], None], device: torch.device) -> tuple[float, int]:
    synchronize(device)
    begin, done = time.perf_counter(), 0
    while done < TRIAL_STEPS and time.perf_counter() - begin < TRIAL_S:
        step()
        synchronize(device)
        done += 1
    return time.perf_counter() - begin, done


def _predicted_too_large(trials: Sequence[PackTrial], runs: int, budget_bytes: int | None) -> str | None:
    if budget_bytes is None or len(trials) < 2:
        return None
    small, large = trials[-2:]
    run_bytes = (large.peak_bytes - small.peak_bytes) / (large.runs - small.runs)
    predicted = large.peak_bytes + run_bytes * (runs - large.runs)
    if predicted <= budget_bytes:
        return None
    return f"{runs} would take {show_bytes(predicted)} (predicted) of {show_bytes(budget_bytes)}"


def _best_size(trials: Sequence[PackTrial], reason: str) -> PackSize:
    """The smallest that no larger one clearly beats."""
    best = trials[0]
    for trial in trials[1:]:
        best = trial if _worth_it(trial, best) else best
    return PackSize(runs=best.runs, reason=reason, trials=tuple(trials))


def too_large(job: Job, device: torch.device) -> DoesNotFit:
    """Not even one run fits."""
    return DoesNotFit(
        f"one run of {job.shape.inputs:,} features and {job.training.batch:,} rows per side does not fit {device}. "
        "Try: a higher memory_limit=, or a smaller batch under [train].",
        needed_bytes=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run that has stopped."""

    job: Job
    weights: Tensor
    """The best ones, on the CPU."""
    best_epoch: int
    valid_score: float
    epochs: int
    curve: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: bool = False


class Runner:
    """Trains jobs with one pack key: some train, others wait."""

    def __init__(self, jobs: Sequence[Job], store: FeatureStore, slots: int, *, resumed: Sequence[State] = ()) -> None:
        """`slots`: runs at once. `resumed`: runs that continue; they are not among the jobs."""
        self.store, self.slots = store, slots
        self.ooms = 0
        self.validated = 0
        """Runs whose epoch ended with the last result."""
        self._queue = deque(jobs)
        self._parked = list(resumed)
        self._pack: Pack | None = None
        self._stopped: set[int] = set()

    def state(self) -> State | None:
        """All runs that have begun and not stopped, on the CPU: what a killed sweep needs to resume."""
        parts = [state.to("cpu") for state in self._parked]
        if self._pack is not None and (alive := self._alive()):
            parts.append(self._pack.state.to("cpu").take(alive))
        return reduce(State.joined, parts) if parts else None

    def run(self) -> Iterator[list[FinishedRun]]:
        """Train. After each epoch it yields the runs that have just stopped, often none."""
        while self._fill():
            assert self._pack is not None
            scores = attempt(self._epoch, self.store.device)
            if isinstance(scores, OutOfMemory):
                self._shrink()
            else:
                yield self._record(scores)

    def progress(self) -> tuple[int, int]:
        """Runs that train, and runs that wait."""
        return len(self._alive()), len(self._queue) + sum(map(len, self._parked))

    def _epoch(self) -> dict[int, float]:
        """Steps until some run's epoch ends; the validation scores of those where it does."""
        assert self._pack is not None
        while not (due := self._pack.due()):
            self._pack.step()
        return dict(zip(due, validation_scores(self._pack, due), strict=True))

    def _fill(self) -> bool:
        """A pack with every slot used, as far as there are runs; False when none is left."""
        if self._pack is not None and not self._needs_rebuild():
            return True
        if self._pack is not None and not self._alive():
            self._pack, self._stopped = None, set()
        if isinstance(attempt(self._rebuild, self.store.device), OutOfMemory):
            self.ooms += 1
            self._park()  # two packs at a time did not fit, one may
            while isinstance(attempt(self._rebuild, self.store.device), OutOfMemory):
                self._shrink()
        return self._pack is not None

    def _needs_rebuild(self) -> bool:
        assert self._pack is not None
        alive, waiting = self.progress()
        if not alive or (waiting and alive < self.slots and not self._stopped):
            return True
        return bool(self._stopped) and len(self._stopped) * REBUILD_SHARE >= len(self._pack)

    def _rebuild(self) -> None:
        """A pack of the runs that train, then parked ones, then new ones. If it runs out of memory midway, nothing is lost."""
        alive = self._alive()
        states = [self._pack.state.take(alive)] if self._pack is not None and alive else []
        free = self.slots - len(alive)
        parked = list(self._parked)
        while free > 0 and parked:
            state = parked.pop()
            if len(state) > free:
                parked.append(state.take(range(free, len(state))))
                state = state.take(range(free))
            free -= len(state)
            states.append(state.take(range(len(state))).to(self.store.device))  # a copy: a pack trains in place
        jobs = [self._queue[place] for place in range(min(max(0, free), len(self._queue)))]
        states += [State.new(jobs, self.store.device)] if jobs else []
        pack = Pack(reduce(State.joined, states), self.store) if states else None
        self._pack, self._parked, self._stopped = pack, parked, set()
        for _ in jobs:
            self._queue.popleft()

    def _alive(self) -> list[int]:
        return [] if self._pack is None else [place for place in range(len(self._pack)) if place not in self._stopped]

    def _shrink(self) -> None:
        """After an out-of-memory error: move all runs to the host and halve the number that may train at once."""
        self.ooms += 1
        running = len(self._alive()) or self.slots
        if running == 1:
            waiting = [*(job for state in self._parked for job in state.jobs), *self._queue]
            raise too_large((self._pack.jobs if self._pack is not None else waiting)[0], self.store.device)
        self.slots = max(1, min(self.slots, running) // 2)
        self._park()

    def _park(self) -> None:
        """Move the runs that train to the host."""
        if alive := self._alive():
            assert self._pack is not None
            self._parked.append(self._pack.state.to("cpu").take(alive))
        self._pack, self._stopped = None, set()
        empty_cache(self.store.device)

    def _record(self, scores: dict[int, float]) -> list[FinishedRun]:
        """Note the scores of an epoch; returns the runs that stop with it. Runs that had stopped are ignored."""
        assert self._pack is not None
        pack, state = self._pack, self._pack.state
        losses = dict(zip(scores, pack.finish_epoch(list(scores)), strict=True))
        before = dict(zip(scores, state.best_score[list(scores)].tolist(), strict=True))
        better = [place for place, score in scores.items() if score > before[place]]
        state.best[better] = state.weights[better]
        self.validated = len(set(scores) - self._stopped)
        finished = []
        for place, score in scores.items():
            state.curves[place].append(score)
            state.losses[place].append(losses[place])
            if place in better:
                state.best_score[place], state.best_epoch[place] = score, pack.epochs(place)
            if place not in self._stopped and self._should_stop(place, score, losses[place]):
                self._stopped.add(place)
                finished.append(_finished_run(state, place, pack.epochs(place)))
        return finished

    def _should_stop(self, place: int, score: float, loss: float) -> bool:
        assert self._pack is not None
        job, epochs = self._pack.jobs[place], self._pack.epochs(place)
        no_gain = epochs - int(self._pack.state.best_epoch[place]) >= job.training.patience
        return no_gain or epochs >= job.training.epochs or not (math.isfinite(score) and math.isfinite(loss))


def _finished_run(state: State, place: int, epochs: int) -> FinishedRun:
    curve, losses = tuple(state.curves[place]), tuple(state.losses[place])
    return FinishedRun(
        job=state.jobs[place],
        weights=state.best[place].cpu().clone(),
        best_epoch=int(state.best_epoch[place]),
        valid_score=float(state.best_score[place]),
        epochs=epochs,
        curve=curve,
        losses=losses,
        diverged=not math.isfinite(curve[-1] + losses[-1]),
    )
