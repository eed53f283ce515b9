"""Trains jobs of one kin to their end: a pack of so many at a time, a new one in the place of each that stops.

A run stops when its validation score has not risen for its patience, or its epochs are over, or it is no number any more.
Memory that runs short in the middle changes nothing but speed: half of the pack waits with all it has, and comes back when
others are done. What a run becomes does not depend on any of this.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from brimful.memory.oom import OutOfMemory, attempt, empty_cache
from brimful.tasks.heads.packed.job import Job
from brimful.tasks.heads.packed.pack import Pack
from brimful.tasks.heads.packed.packing import too_large
from brimful.tasks.heads.packed.shelf import Shelf
from brimful.tasks.heads.packed.state import State
from brimful.tasks.heads.packed.validate import validation_scores

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
