"""How many runs at once: each way to stop, and what is said of it."""

import pytest
import torch

from brimful.errors import DoesNotFit
from brimful.memory.ledger import simulated_memory
from brimful.molecules import runner
from brimful.molecules.runner import Trial, choose
from brimful.units import MiB

from . import made

JOBS = [made.job(seed) for seed in range(10)]


def trials(monkeypatch, speed, a_run_bytes=MiB, fits=99):
    """Packs that never ran: `speed` says how many steps a second a pack does; more than `fits` run out of memory."""
    asked = []

    def tried(jobs, shelf):
        asked.append(len(jobs))
        if len(jobs) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Trial(runs=len(jobs), steps_per_s=speed(len(jobs)), peak_bytes=(10 + len(jobs)) * a_run_bytes)

    monkeypatch.setattr(runner, "_tried", tried)
    return asked


def test_packs_double_until_all_runs_are_in_one(monkeypatch):
    asked = trials(monkeypatch, float)
    found = choose(JOBS, made.shelf(), None)
    assert asked == [1, 2, 4, 8, 10] == [trial.runs for trial in found.trials]
    assert (found.runs, found.reason) == (10, "all runs of this shape")


def test_no_more_than_asked_for(monkeypatch):
    asked = trials(monkeypatch, float)
    found = choose(JOBS, made.shelf(), None, most=5)
    assert asked == [1, 2, 4, 5] and (found.runs, found.reason) == (5, "as many as asked for with --pack 5")


def test_asking_for_more_than_there_are_is_no_limit(monkeypatch):
    trials(monkeypatch, float)
    found = choose(JOBS, made.shelf(), None, most=50)
    assert (found.runs, found.reason) == (10, "all runs of this shape")


def test_a_pack_that_does_no_more_is_the_last_to_be_tried(monkeypatch):
    asked = trials(monkeypatch, lambda runs: min(runs, 2.1))
    found = choose(JOBS, made.shelf(), None)
    assert set(asked) == {1, 2, 4} and found.reason == "4 at once do 1.05 times as much as 2, measured"


def test_a_pack_that_is_slower_is_not_taken(monkeypatch):
    trials(monkeypatch, {1: 1.0, 2: 2.0, 4: 1.5}.get)
    found = choose(JOBS, made.shelf(), None)
    assert (found.runs, found.reason) == (2, "4 at once do 0.75 times as much as 2, measured")


def test_a_slow_trial_gets_a_second_chance(monkeypatch):
    speeds = iter([1.0, 0.5, 2.0, 4.0, 8.0, 10.0])
    asked = trials(monkeypatch, lambda runs: next(speeds))
    found = choose(JOBS, made.shelf(), None)
    assert asked == [1, 2, 2, 4, 8, 10] and found.runs == 10


def test_a_last_pack_that_is_hardly_larger_need_not_do_much_more(monkeypatch):
    trials(monkeypatch, float)
    found = choose([made.job(seed) for seed in range(17)], made.shelf(), None)
    assert (found.runs, found.reason) == (17, "all runs of this shape")


def test_memory_is_predicted_and_not_tried(monkeypatch):
    asked = trials(monkeypatch, float)
    found = choose(JOBS, made.shelf(), 17 * MiB)
    assert asked == [1, 2, 4] and (found.runs, found.reason) == (4, "8 would take 18 MiB, predicted, of 17 MiB")


def test_a_pack_that_took_more_than_the_budget_is_not_taken(monkeypatch):
    asked = trials(monkeypatch, float)
    found = choose(JOBS, made.shelf(), 11 * MiB + MiB // 2)
    assert asked == [1, 2] and (found.runs, found.reason) == (1, "2 took 12 MiB, measured, of 11.5 MiB")


def test_a_budget_that_just_holds_is_used(monkeypatch):
    trials(monkeypatch, float)
    assert choose(JOBS, made.shelf(), 20 * MiB).runs == 10


def test_a_pack_that_runs_out_of_memory_is_not_taken(monkeypatch):
    asked = trials(monkeypatch, float, fits=5)
    found = choose(JOBS, made.shelf(), None)
    assert asked == [1, 2, 4, 8] and (found.runs, found.reason) == (4, "8 ran out of memory")


def test_not_even_one_fits(monkeypatch):
    trials(monkeypatch, float, fits=0)
    with pytest.raises(DoesNotFit, match="one run of 48 features and 16 rows a side does not fit cpu"):
        choose(JOBS, made.shelf(), None)


def test_a_real_trial_tells_speed_and_memory_and_leaves_the_runs_alone():
    small, large = (runner._tried(JOBS[:runs], made.shelf()) for runs in (1, 4))
    weights = made.job().shape.inputs * 16 * 4
    assert small.steps_per_s > 0 and large.peak_bytes - small.peak_bytes > 3 * 6 * weights
    # weights, two moments, the best and gradients are six times the weights at least


def test_memory_is_a_line_in_the_runs():
    shelf = made.shelf()
    two, four, eight = (runner._tried(JOBS[:runs], shelf) for runs in (2, 4, 8))
    predicted = four.peak_bytes + 4 * (four.peak_bytes - two.peak_bytes) / 2
    assert eight.peak_bytes == pytest.approx(predicted, rel=0.03)


def test_a_virtual_limit_stops_the_trials(monkeypatch):
    monkeypatch.setattr(runner, "WORTH", 0.0)  # speed is not to stop them
    shelf = made.shelf()
    four = runner._tried(JOBS[:4], shelf)
    with simulated_memory(four.peak_bytes + shelf.features.nbytes) as memory:
        found = choose(JOBS, shelf, None)
    assert (
        memory.ooms == 1
        and found.reason == "8 ran out of memory"
        and {trial.runs for trial in found.trials} == {1, 2, 4}
    )
