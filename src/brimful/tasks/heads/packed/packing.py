"""How many runs to train at once: packs of 1, 2, 4 … are tried for a few steps until memory or speed says stop.

Memory is a line in the runs, all of one shape: two small packs predict the rest, and each larger one corrects the line.
Speed is measured: a pack twice as large that does not do clearly more in the same time is not worth its memory. The trials
are real steps of copies of the first runs, which are thrown away.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from brimful.errors import DoesNotFit
from brimful.memory.meter import has_peak_statistics, meter
from brimful.memory.oom import OutOfMemory, attempt
from brimful.tasks.heads.packed.job import Job
from brimful.tasks.heads.packed.pack import Pack
from brimful.tasks.heads.packed.shelf import Shelf
from brimful.tasks.heads.packed.state import State
from brimful.tasks.heads.packed.validate import validation_scores
from brimful.units import show_bytes

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
