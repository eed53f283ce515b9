"""Trains jobs of one kin to their end: a pack of so many at a time, a new one in the place of each that stops.

A run stops when its validation score has not risen for its patience, or its epochs are over, or it is no number any more.
Memory that runs short in the middle changes nothing but speed: half of the pack waits with all it has, and comes back when
others are done. What a run becomes does not depend on any of this.
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
from brimful.memory.meter import has_peak_statistics, meter
from brimful.memory.oom import OutOfMemory, attempt, empty_cache
from brimful.molecules.feature_store import Shelf
from brimful.molecules.job import Job
from brimful.molecules.pack import Pack, State, validation_scores
from brimful.units import show_bytes

# How many runs to train at once: packs of 1, 2, 4 … are tried for a few steps until memory or speed says stop.
#
# Memory is a line in the runs, all of one shape: two small packs predict the rest, and each larger one corrects the line.
# Speed is measured: a pack twice as large that does not do clearly more in the same time is not worth its memory. The trials
# are real steps of copies of the first runs, which are thrown away.


WORTH = 1.1
"""Twice the runs must do so many times as much."""
STEPS, LONGEST_S = 4, 1.0
"""A trial is so many steps, or as many as fit this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A pack that was tried."""

    runs: int
    steps_per_s: float
    """Steps of one run in a second, over all runs."""
    peak_bytes: int
    """Measured: what the process reserved on a card; on a CPU what the ledger counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The size of a pack, and why."""

    runs: int
    reason: str
    trials: tuple[Trial, ...]


def choose(jobs: Sequence[Job], shelf: Shelf, budget_bytes: int | None, *, most: int | None = None) -> Packing:
    """For jobs of one kin. `most` is asked for by the user; the budget counts all that the process holds on the device."""
    limit = min(len(jobs), most or len(jobs))
    trials: list[Trial] = []
    runs = 1
    while True:
        if (stop := _too_much(trials, runs, budget_bytes)) is not None:
            return _chosen(trials, stop)
        trial = attempt(lambda runs=runs: _tried(jobs[:runs], shelf), shelf.device)  # type: ignore[misc]
        if isinstance(trial, OutOfMemory):
            if not trials:
                raise too_large(jobs[0], shelf.device)
            return _chosen(trials, f"{runs} ran out of memory")
        if trials and not _worth_it(trial, trials[-1]):  # once more: the machine may have been busy
            again = attempt(lambda runs=runs: _tried(jobs[:runs], shelf), shelf.device)  # type: ignore[misc]
            trial = trial if isinstance(again, OutOfMemory) else max(trial, again, key=lambda one: one.steps_per_s)
        if budget_bytes is not None and trial.peak_bytes > budget_bytes and trials:
            return _chosen(
                trials, f"{runs} took {show_bytes(trial.peak_bytes)}, measured, of {show_bytes(budget_bytes)}"
            )
        trials.append(trial)
        if len(trials) > 1 and not _worth_it(trial, trials[-2]):
            gain = trial.steps_per_s / trials[-2].steps_per_s
            return _chosen(trials, f"{runs} at once do {gain:.2f} times as much as {trials[-2].runs}, measured")
        if runs == limit:
            return _chosen(
                trials, f"as many as asked for with --pack {most}" if most == limit else "all runs of this shape"
            )
        runs = min(2 * runs, limit)


def _worth_it(trial: Trial, before: Trial) -> bool:
    """Whether the larger pack does clearly more; one that is hardly larger need do hardly more."""
    return trial.steps_per_s >= before.steps_per_s * WORTH ** math.log2(trial.runs / before.runs)


def _tried(jobs: Sequence[Job], shelf: Shelf) -> Trial:
    """A few steps and a validation of these runs."""
    device = shelf.device
    measured = meter(device, reserved=True)
    with measured:
        measured.phase("step")
        pack = Pack(State.new(jobs, device), shelf)
        pack.step()
        validation_scores(pack, range(len(pack)))
    seconds, steps = _timed(pack.step, device)
    found = measured.reading()
    held = 0 if has_peak_statistics(device) else shelf.nbytes  # the ledger counts what is new to it
    peak = held + (found.reserved_bytes or found.peak_bytes)
    return Trial(runs=len(jobs), steps_per_s=len(jobs) * steps / seconds, peak_bytes=peak)


def _timed(step: Callable[[], None], device: torch.device) -> tuple[float, int]:
    _wait(device)
    begin, done = time.perf_counter(), 0
    while done < STEPS and time.perf_counter() - begin < LONGEST_S:
        step()
        _wait(device)
        done += 1
    return time.perf_counter() - begin, done


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _too_much(trials: Sequence[Trial], runs: int, budget_bytes: int | None) -> str | None:
    """Why so many would not fit; None where they would."""
    if budget_bytes is None or len(trials) < 2:
        return None
    small, large = trials[-2:]
    a_run = (large.peak_bytes - small.peak_bytes) / (large.runs - small.runs)
    predicted = large.peak_bytes + a_run * (runs - large.runs)
    if predicted <= budget_bytes:
        return None
    return f"{runs} would take {show_bytes(predicted)}, predicted, of {show_bytes(budget_bytes)}"


def too_large(job: Job, device: torch.device) -> DoesNotFit:
    """When not even one run fits."""
    return DoesNotFit(
        f"one run of {job.shape.inputs:,} features and {job.training.batch:,} rows a side does not fit {device}: "
        "give more --memory-limit, or [train] a smaller batch",
        needed_bytes=0,
    )


def _chosen(trials: Sequence[Trial], reason: str) -> Packing:
    """The smallest of those that ran which no larger one beats clearly."""
    best = trials[0]
    for trial in trials[1:]:
        best = trial if _worth_it(trial, best) else best
    return Packing(runs=best.runs, reason=reason, trials=tuple(trials))


WORTH_A_REBUILD = 16
"""A pack is put together anew when one in so many of its runs has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run at its end."""

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
    """Jobs that can share a pack, and those of them that wait."""

    def __init__(self, jobs: Sequence[Job], shelf: Shelf, slots: int, *, begun: Sequence[State] = ()) -> None:
        """`begun`: runs that go on from where they stood; they are not among the jobs."""
        self.shelf, self.slots = shelf, slots
        self.ooms = self.judged = 0
        """Out-of-memory errors so far; runs whose epoch ended with the last message."""
        self._queue = deque(jobs)
        self._parked = list(begun)
        self._pack: Pack | None = None
        self._stopped: set[int] = set()

    def state(self) -> State | None:
        """All runs that have begun and have not stopped, on the CPU: what a killed sweep needs to go on."""
        parts = [state.to("cpu") for state in self._parked]
        if self._pack is not None and (alive := self._alive()):
            parts.append(self._pack.state.to("cpu").take(alive))
        return reduce(State.joined, parts) if parts else None

    def run(self) -> Iterator[list[Finished]]:
        """Trains; yields between epochs, with the runs that have just stopped, often none."""
        while self._fill():
            assert self._pack is not None
            scores = attempt(self._epoch, self.shelf.device)
            if isinstance(scores, OutOfMemory):
                self._shrink()
            else:
                yield self._judged(scores)

    def progress(self) -> tuple[int, int]:
        """Runs that are training, and runs that wait."""
        return len(self._alive()), len(self._queue) + sum(map(len, self._parked))

    def _epoch(self) -> dict[int, float]:
        """Steps until some run's epoch ends; the validation scores of those where it does."""
        assert self._pack is not None
        while not (due := self._pack.due()):
            self._pack.step()
        return dict(zip(due, validation_scores(self._pack, due), strict=True))

    def _fill(self) -> bool:
        """A pack with every place taken, as far as there are runs; whether there is one at all."""
        if self._pack is not None and not self._worth_it():
            return True
        if self._pack is not None and not self._alive():
            self._pack, self._stopped = None, set()
        if isinstance(attempt(self._rebuild, self.shelf.device), OutOfMemory):
            self.ooms += 1
            self._park()  # two packs at a time did not fit, one may
            while isinstance(attempt(self._rebuild, self.shelf.device), OutOfMemory):
                self._shrink()
        return self._pack is not None

    def _worth_it(self) -> bool:
        """Whether to put the pack together anew."""
        assert self._pack is not None
        alive, waiting = self.progress()
        if not alive or (waiting and alive < self.slots and not self._stopped):
            return True
        return bool(self._stopped) and len(self._stopped) * WORTH_A_REBUILD >= len(self._pack)

    def _rebuild(self) -> None:
        """Parked runs first, then new ones, beside those that run. Nothing is forgotten should memory run out on the way."""
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
            states.append(state.take(range(len(state))).to(self.shelf.device))  # a pack trains in place
        jobs = [self._queue[place] for place in range(min(max(0, free), len(self._queue)))]
        states += [State.new(jobs, self.shelf.device)] if jobs else []
        pack = Pack(reduce(State.joined, states), self.shelf) if states else None
        self._pack, self._parked, self._stopped = pack, parked, set()
        for _ in jobs:
            self._queue.popleft()

    def _alive(self) -> list[int]:
        return [] if self._pack is None else [place for place in range(len(self._pack)) if place not in self._stopped]

    def _shrink(self) -> None:
        """After an out-of-memory error: what ran waits on the host, and half as many may run at once."""
        self.ooms += 1
        running = len(self._alive()) or self.slots
        if running == 1:
            waits = self._pack.jobs if self._pack is not None else [*(job for one in self._parked for job in one.jobs), *self._queue]  # fmt: skip
            raise too_large(waits[0], self.shelf.device)
        self.slots = max(1, min(self.slots, running) // 2)
        self._park()

    def _park(self) -> None:
        """What runs waits on the host."""
        if alive := self._alive():
            assert self._pack is not None
            self._parked.append(self._pack.state.to("cpu").take(alive))
        self._pack, self._stopped = None, set()
        empty_cache(self.shelf.device)

    def _judged(self, scores: dict[int, float]) -> list[Finished]:
        """The runs that stop with the epoch that has ended. One that had stopped before trains on unheard."""
        assert self._pack is not None
        pack, state = self._pack, self._pack.state
        losses = dict(zip(scores, pack.epoch_losses(list(scores)), strict=True))
        before = dict(zip(scores, state.best_score[list(scores)].tolist(), strict=True))
        better = [place for place, score in scores.items() if score > before[place]]
        state.best[better] = state.weights[better]
        self.judged = len(set(scores) - self._stopped)
        found = []
        for place, score in scores.items():
            state.curves[place].append(score)
            state.losses[place].append(losses[place])
            if place in better:
                state.best_score[place], state.best_epoch[place] = score, pack.epochs(place)
            if place not in self._stopped and self._stops(place, score, losses[place]):
                self._stopped.add(place)
                found.append(_finished(state, place, pack.epochs(place)))
        return found

    def _stops(self, place: int, score: float, loss: float) -> bool:
        assert self._pack is not None
        job, epochs = self._pack.jobs[place], self._pack.epochs(place)
        late = epochs - int(self._pack.state.best_epoch[place]) >= job.training.patience
        return late or epochs >= job.training.epochs or not (math.isfinite(score) and math.isfinite(loss))


def _finished(state: State, place: int, epochs: int) -> Finished:
    curve, losses = tuple(state.curves[place]), tuple(state.losses[place])
    return Finished(
        job=state.jobs[place],
        weights=state.best[place].cpu().clone(),
        best_epoch=int(state.best_epoch[place]),
        valid_score=float(state.best_score[place]),
        epochs=epochs,
        curve=curve,
        losses=losses,
        diverged=not math.isfinite(curve[-1] + losses[-1]),
    )
