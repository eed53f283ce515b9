"""How many runs at once, and that a run does not depend on its pack, on memory or on a resume."""

import copy
import math

import pytest
import torch

from brimful.errors import DoesNotFit
from brimful.memory.ledger import simulated_memory
from brimful.molecules import runner as module
from brimful.molecules.pack import TENSORS, Pack, State
from brimful.molecules.runner import PackTrial, Runner, choose_pack_size
from brimful.units import MiB

from . import support

JOBS = [support.job(seed) for seed in range(10)]


def trials(monkeypatch, speed, a_run_bytes=MiB, fits=99):
    """Packs that never ran: `speed` says how many steps a second a pack does; more than `fits` run out of memory."""
    asked = []

    def tried(jobs, store):
        asked.append(len(jobs))
        if len(jobs) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return PackTrial(runs=len(jobs), steps_per_s=speed(len(jobs)), peak_bytes=(10 + len(jobs)) * a_run_bytes)

    monkeypatch.setattr(module, "_try", tried)
    return asked


def test_packs_double_until_all_runs_are_in_one(monkeypatch):
    asked = trials(monkeypatch, float)
    found = choose_pack_size(JOBS, support.store(), None)
    assert asked == [1, 2, 4, 8, 10] == [trial.runs for trial in found.trials]
    assert (found.runs, found.reason) == (10, "all runs of this shape")


def test_the_requested_size_is_the_most(monkeypatch):
    asked = trials(monkeypatch, float)
    found = choose_pack_size(JOBS, support.store(), None, most=5)
    assert asked == [1, 2, 4, 5] and (found.runs, found.reason) == (5, "requested with pack=5")


def test_a_request_above_the_number_of_runs_is_no_limit(monkeypatch):
    trials(monkeypatch, float)
    found = choose_pack_size(JOBS, support.store(), None, most=50)
    assert (found.runs, found.reason) == (10, "all runs of this shape")


def test_a_pack_that_does_no_more_is_the_last_to_be_tried(monkeypatch):
    asked = trials(monkeypatch, lambda runs: min(runs, 2.1))
    found = choose_pack_size(JOBS, support.store(), None)
    assert set(asked) == {1, 2, 4} and found.reason == "4 at once do 1.05 times the work of 2 (measured)"


def test_a_pack_that_is_slower_is_not_taken(monkeypatch):
    trials(monkeypatch, {1: 1.0, 2: 2.0, 4: 1.5}.get)
    found = choose_pack_size(JOBS, support.store(), None)
    assert (found.runs, found.reason) == (2, "4 at once do 0.75 times the work of 2 (measured)")


def test_a_slow_trial_gets_a_second_chance(monkeypatch):
    speeds = iter([1.0, 0.5, 2.0, 4.0, 8.0, 10.0])
    asked = trials(monkeypatch, lambda runs: next(speeds))
    found = choose_pack_size(JOBS, support.store(), None)
    assert asked == [1, 2, 2, 4, 8, 10] and found.runs == 10


def test_a_last_pack_that_is_hardly_larger_needs_little_gain(monkeypatch):
    trials(monkeypatch, float)
    found = choose_pack_size([support.job(seed) for seed in range(17)], support.store(), None)
    assert (found.runs, found.reason) == (17, "all runs of this shape")


def test_a_pack_predicted_too_large_is_not_tried(monkeypatch):
    asked = trials(monkeypatch, float)
    found = choose_pack_size(JOBS, support.store(), 17 * MiB)
    assert asked == [1, 2, 4] and (found.runs, found.reason) == (4, "8 would take 18 MiB (predicted) of 17 MiB")


def test_a_pack_that_took_more_than_the_budget_is_not_taken(monkeypatch):
    asked = trials(monkeypatch, float)
    found = choose_pack_size(JOBS, support.store(), 11 * MiB + MiB // 2)
    assert asked == [1, 2] and (found.runs, found.reason) == (1, "2 took 12 MiB (measured) of 11.5 MiB")


def test_a_budget_that_just_fits_is_used(monkeypatch):
    trials(monkeypatch, float)
    assert choose_pack_size(JOBS, support.store(), 20 * MiB).runs == 10


def test_a_pack_that_runs_out_of_memory_is_not_taken(monkeypatch):
    asked = trials(monkeypatch, float, fits=5)
    found = choose_pack_size(JOBS, support.store(), None)
    assert asked == [1, 2, 4, 8] and (found.runs, found.reason) == (4, "8 ran out of memory")


def test_not_even_one_fits(monkeypatch):
    trials(monkeypatch, float, fits=0)
    with pytest.raises(DoesNotFit, match="one run of 48 features and 16 rows per side does not fit cpu"):
        choose_pack_size(JOBS, support.store(), None)


def test_a_trial_measures_speed_and_memory():
    small, large = (module._try(JOBS[:runs], support.store()) for runs in (1, 4))
    weights = support.job().shape.inputs * 16 * 4
    assert small.steps_per_s > 0 and large.peak_bytes - small.peak_bytes > 3 * 6 * weights
    # weights, two moments, the best and gradients are six times the weights at least


def test_memory_is_linear_in_the_runs():
    store = support.store()
    two, four, eight = (module._try(JOBS[:runs], store) for runs in (2, 4, 8))
    predicted = four.peak_bytes + 4 * (four.peak_bytes - two.peak_bytes) / 2
    assert eight.peak_bytes == pytest.approx(predicted, rel=0.03)


def test_a_simulated_limit_stops_the_trials(monkeypatch):
    monkeypatch.setattr(module, "MIN_GAIN", 0.0)  # speed is not to stop them
    store = support.store()
    four = module._try(JOBS[:4], store)
    with simulated_memory(four.peak_bytes + store.features.nbytes) as memory:
        found = choose_pack_size(JOBS, store, None)
    assert (
        memory.ooms == 1
        and found.reason == "8 ran out of memory"
        and {trial.runs for trial in found.trials} == {1, 2, 4}
    )


SMOOTH = {"activation": "silu"}
"""A ReLU at zero goes by the last digit, which is the pack's."""
SHELF = support.store(a=support.rows(), b=support.rows(1, train=(70, 25), held=9))


def ten(**changes):
    """Runs that differ in data, loss, seed, length and numbers."""
    names = ("dpo", "bce", "mse", "dpo", "bce")
    return [
        support.job(
            seed, names[seed], data, epochs=2 + seed // 2, lr=1e-3 * (1 + seed), clip=1.0 if seed % 2 else 0.1, **SMOOTH, **changes
        )
        for seed in range(5)
        for data in ("a", "b")
    ]  # fmt: skip


def fail_calls(monkeypatch, target, name, *calls):
    """These calls of a function fail for lack of memory."""
    whole, count = getattr(target, name), 0

    def failing(*args, **kwargs):
        nonlocal count
        count += 1
        if count in calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(*args, **kwargs)

    monkeypatch.setattr(target, name, failing)


@pytest.fixture(scope="module")
def alone():
    """The ten, each alone, with their dropout on."""
    return {name: one for job in ten() for name, one in support.run_all(Runner([job], SHELF, 1)).items()}


def test_ten_at_once_are_ten_alone(alone):
    assert len({tuple(one.weights.tolist()) for one in alone.values()}) == 10
    support.assert_same(support.run_all(Runner(ten(), SHELF, 10)), alone, within=1e-5)


@pytest.mark.parametrize("slots", [1, 3])
def test_slots_used_again_change_nothing(alone, slots):
    support.assert_same(support.run_all(Runner(ten(), SHELF, slots)), alone, within=1e-5)


def test_a_pack_never_has_more_runs_than_slots(monkeypatch):
    seen = []
    whole = Pack.__init__
    monkeypatch.setattr(
        Pack, "__init__", lambda self, state, store: seen.append(len(state)) or whole(self, state, store)
    )
    support.run_all(Runner(ten(), SHELF, 3))
    assert max(seen) == 3 and len(seen) > 3


def test_fingerprints_are_trained_the_same_in_any_pack():
    store = support.store(a=support.rows(bits=True), b=support.rows(1, train=(70, 25), bits=True))
    alone = {name: one for job in ten() for name, one in support.run_all(Runner([job], store, 1)).items()}
    assert store.sparse
    support.assert_same(support.run_all(Runner(ten(), store, 7)), alone, within=1e-5)


def test_classifiers_are_trained_the_same_in_any_pack():
    a, b = support.rows(train=(60, 40), classes=(2, 3)), support.rows(1, train=(30, 70), held=9, classes=(2, 3))
    store = support.store(a=a, b=b)
    names = ("classify", "classify-oe", "classify-energy-oe")
    jobs = [support.job(0, name, data, classes=(2, 3), **SMOOTH) for data in ("a", "b") for name in names]
    alone = {name: one for job in jobs for name, one in support.run_all(Runner([job], store, 1)).items()}
    support.assert_same(support.run_all(Runner(jobs, store, 6)), alone, within=1e-5)


# -- when a run stops ----------------------------------------------------------------------------------------------------


def scripted(monkeypatch, scores):
    """The validation score of each run's epochs, by its seed."""

    def scores_of(pack, places):
        return [scores[pack.jobs[place].seed][len(pack.state.curves[place])] for place in places]

    monkeypatch.setattr(module, "validation_scores", scores_of)


def test_a_run_stops_when_its_patience_is_over_and_keeps_its_best_weights(monkeypatch):
    scripted(monkeypatch, {0: [0.5, 0.7, 0.6, 0.7, 0.9, 0.9], 1: [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]})
    jobs = [support.job(seed, epochs=6, patience=2, **SMOOTH) for seed in range(2)]
    first, second = support.run_all(Runner(jobs, SHELF, 2)).values()
    assert (first.epochs, first.best_epoch, first.valid_score) == (4, 2, 0.7)  # an equal score is no better one
    assert (second.epochs, second.best_epoch, second.valid_score) == (6, 6, 0.95)
    assert first.curve == (0.5, 0.7, 0.6, 0.7) and len(first.losses) == 4
    scripted(monkeypatch, {0: [0.5, 0.7]})
    (short,) = support.run_all(Runner([support.job(0, epochs=2, patience=2, **SMOOTH)], SHELF, 1)).values()
    assert torch.allclose(first.weights, short.weights, atol=1e-6)


def test_a_run_stops_with_its_last_epoch():
    (found,) = support.run_all(Runner([support.job(epochs=3, patience=99)], SHELF, 1)).values()
    assert found.epochs == 3 == len(found.curve) and not found.diverged


def test_a_run_that_stops_is_reported_once():
    jobs = [support.job(seed, epochs=1 if seed == 7 else 3, patience=9) for seed in range(20)]
    looks = [[one.job.seed for one in found] for found in Runner(jobs, SHELF, 20).run()]
    assert looks == [[7], [], [seed for seed in range(20) if seed != 7]]


def test_losses_are_means_over_an_epoch():
    """Plain losses of the same steps, added up by hand."""
    job = support.job(epochs=2)
    (found,) = support.run_all(Runner([job], SHELF, 1)).values()
    pack = Pack(State.new([job], support.CPU), SHELF)
    sums = []
    for _ in range(6):
        pack.step()
        sums.append(float(pack.state.loss_sum[0]))
    assert found.losses == pytest.approx((sums[2] / 3, (sums[5] - sums[2]) / 3))


def test_a_run_that_diverges_does_not_affect_others():
    wild, alone = support.job(0, "mse", lr=1e30, epochs=9, patience=9, **SMOOTH), support.job(1, "mse", epochs=9, patience=9, **SMOOTH)  # fmt: skip
    found = support.run_all(Runner([wild, alone], SHELF, 2))
    assert found[wild.name].diverged and found[wild.name].epochs < 9
    assert found[wild.name].weights.isfinite().all()  # the best it had, which may be where it began
    assert not math.isfinite(found[wild.name].curve[-1] + found[wild.name].losses[-1])
    support.assert_same({alone.name: found[alone.name]}, support.run_all(Runner([alone], SHELF, 1)), within=1e-5)


# -- memory that runs short ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [(1,), (3, 9, 14)])
def test_running_out_of_memory_in_a_step_changes_no_result(alone, calls, monkeypatch):
    fail_calls(monkeypatch, Pack, "step", *calls)
    runner = Runner(ten(), SHELF, 10)
    support.assert_same(support.run_all(runner), alone, within=1e-5)
    assert runner.ooms == len(calls) and runner.slots < 10


@pytest.mark.parametrize("calls", [(1,), (2, 4)])
def test_running_out_of_memory_in_a_validation_changes_no_result(alone, calls, monkeypatch):
    fail_calls(monkeypatch, module, "validation_scores", *calls)
    runner = Runner(ten(), SHELF, 10)
    support.assert_same(support.run_all(runner), alone, within=1e-5)
    assert runner.ooms == len(calls)


@pytest.mark.parametrize("call", [1, 3])
def test_running_out_of_memory_in_a_rebuild_changes_no_result(alone, call, monkeypatch):
    fail_calls(monkeypatch, Pack, "__init__", call)
    runner = Runner(ten(), SHELF, 4)
    support.assert_same(support.run_all(runner), alone, within=1e-5)
    assert runner.ooms == 1


def test_half_of_the_runs_wait(monkeypatch):
    fail_calls(monkeypatch, Pack, "step", 2)
    runner = Runner(ten(), SHELF, 10)
    next(runner.run())
    assert runner.slots == 5 and sum(runner.progress()) == 10


def test_one_run_that_does_not_fit_is_an_error(monkeypatch):
    fail_calls(monkeypatch, Pack, "step", *range(1, 99))
    with pytest.raises(
        DoesNotFit, match="one run of 48 features and 16 rows per side does not fit cpu. .* smaller batch"
    ):
        support.run_all(Runner(ten(), SHELF, 10))


def test_other_errors_are_not_treated_as_out_of_memory(monkeypatch):
    monkeypatch.setattr(Pack, "step", lambda pack: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        support.run_all(Runner(ten(), SHELF, 10))


# -- going on ------------------------------------------------------------------------------------------------------------


def run_epochs(runner, times):
    """Runs that have stopped after this many results."""
    found, running = {}, runner.run()
    for _ in range(times):
        found |= {one.job.name: one for one in next(running)}
    return found


@pytest.mark.parametrize(("times", "slots"), [(1, 10), (4, 4), (5, 10)])
def test_runs_resume_from_a_state_exactly(alone, times, slots):
    before = Runner(ten(), SHELF, slots)
    found = run_epochs(before, times)
    state = before.state()
    begun = {job.name for job in state.jobs}
    rest = [job for job in ten() if job.name not in begun | set(found)]
    found |= support.run_all(Runner(rest, SHELF, 3, resumed=[state]))
    support.assert_same(found, alone, within=1e-5)


def test_waiting_runs_are_part_of_the_state(monkeypatch):
    fail_calls(monkeypatch, Pack, "step", 2)
    runner = Runner(ten(), SHELF, 10)
    run_epochs(runner, 1)
    assert {job.name for job in runner.state().jobs} == {job.name for job in ten()}


def test_there_is_no_state_before_the_first_step_or_after_the_last():
    runner = Runner(ten(), SHELF, 10)
    assert runner.state() is None
    support.run_all(runner)
    assert runner.state() is None


def test_a_state_does_not_change_while_its_runs_continue():
    runner = Runner(ten(), SHELF, 10)
    run_epochs(runner, 2)
    state = runner.state()
    before = copy.deepcopy(state)
    support.run_all(runner)
    assert all(torch.equal(getattr(state, name), getattr(before, name)) for name in TENSORS)
    assert state.curves == before.curves and state.losses == before.losses


def test_a_state_can_be_resumed_twice():
    before = Runner(ten(), SHELF, 10)
    run_epochs(before, 2)
    state = before.state()
    first, second = (support.run_all(Runner([], SHELF, 10, resumed=[state])) for _ in range(2))
    support.assert_same(first, second)
