"""From first step to last: what a run becomes does not depend on what it shared its steps with, nor on memory."""

import copy
import math

import pytest
import torch

from brimful.errors import DoesNotFit
from brimful.molecules import runner as module
from brimful.molecules.pack import TENSORS, Pack
from brimful.molecules.runner import Runner

from . import made

SMOOTH = {"activation": "silu"}
"""A ReLU at zero goes by the last digit, which is the pack's."""
SHELF = made.shelf(a=made.rows(), b=made.rows(1, train=(70, 25), held=9))


def ten(**changes):
    """Runs that differ in data, loss, seed, length and numbers."""
    names = ("dpo", "bce", "mse", "dpo", "bce")
    return [
        made.job(
            seed, names[seed], data, epochs=2 + seed // 2, lr=1e-3 * (1 + seed), clip=1.0 if seed % 2 else 0.1, **SMOOTH, **changes
        )
        for seed in range(5)
        for data in ("a", "b")
    ]  # fmt: skip


def short_of_memory(monkeypatch, target, name, *calls):
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
def calm():
    """The ten, each alone, with their dropout on."""
    return {name: one for job in ten() for name, one in made.ended(Runner([job], SHELF, 1)).items()}


def test_ten_at_once_are_ten_alone(calm):
    assert len({tuple(one.weights.tolist()) for one in calm.values()}) == 10
    made.same(made.ended(Runner(ten(), SHELF, 10)), calm, within=1e-5)


@pytest.mark.parametrize("slots", [1, 3])
def test_places_taken_again_change_nothing(calm, slots):
    made.same(made.ended(Runner(ten(), SHELF, slots)), calm, within=1e-5)


def test_a_pack_never_has_more_runs_than_places(monkeypatch):
    seen = []
    whole = Pack.__init__
    monkeypatch.setattr(
        Pack, "__init__", lambda self, state, shelf: seen.append(len(state)) or whole(self, state, shelf)
    )
    made.ended(Runner(ten(), SHELF, 3))
    assert max(seen) == 3 and len(seen) > 3


def test_fingerprints_as_bits_are_trained_alike_in_any_pack():
    shelf = made.shelf(a=made.rows(bits=True), b=made.rows(1, train=(70, 25), bits=True))
    alone = {name: one for job in ten() for name, one in made.ended(Runner([job], shelf, 1)).items()}
    assert shelf.sparse
    made.same(made.ended(Runner(ten(), shelf, 7)), alone, within=1e-5)


def test_classifiers_of_all_kinds_are_trained_alike_in_any_pack():
    a, b = made.rows(train=(60, 40), classes=(2, 3)), made.rows(1, train=(30, 70), held=9, classes=(2, 3))
    shelf = made.shelf(a=a, b=b)
    names = ("classify", "classify-oe", "classify-energy-oe")
    jobs = [made.job(0, name, data, classes=(2, 3), **SMOOTH) for data in ("a", "b") for name in names]
    alone = {name: one for job in jobs for name, one in made.ended(Runner([job], shelf, 1)).items()}
    made.same(made.ended(Runner(jobs, shelf, 6)), alone, within=1e-5)


# -- when a run stops ----------------------------------------------------------------------------------------------------


def scripted(monkeypatch, scores):
    """The validation score of each run's epochs, by its seed."""

    def said(pack, places):
        return [scores[pack.jobs[place].seed][len(pack.state.curves[place])] for place in places]

    monkeypatch.setattr(module, "validation_scores", said)


def test_a_run_stops_when_its_patience_is_over_and_keeps_its_best_weights(monkeypatch):
    scripted(monkeypatch, {0: [0.5, 0.7, 0.6, 0.7, 0.9, 0.9], 1: [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]})
    jobs = [made.job(seed, epochs=6, patience=2, **SMOOTH) for seed in range(2)]
    first, second = made.ended(Runner(jobs, SHELF, 2)).values()
    assert (first.epochs, first.best_epoch, first.valid_score) == (4, 2, 0.7)  # an equal score is no better one
    assert (second.epochs, second.best_epoch, second.valid_score) == (6, 6, 0.95)
    assert first.curve == (0.5, 0.7, 0.6, 0.7) and len(first.losses) == 4
    scripted(monkeypatch, {0: [0.5, 0.7]})
    (short,) = made.ended(Runner([made.job(0, epochs=2, patience=2, **SMOOTH)], SHELF, 1)).values()
    assert torch.allclose(first.weights, short.weights, atol=1e-6)


def test_a_run_stops_with_its_last_epoch():
    (found,) = made.ended(Runner([made.job(epochs=3, patience=99)], SHELF, 1)).values()
    assert found.epochs == 3 == len(found.curve) and not found.diverged


def test_a_run_that_has_stopped_is_told_once_though_its_place_is_not_taken_yet():
    jobs = [made.job(seed, epochs=1 if seed == 7 else 3, patience=9) for seed in range(20)]
    looks = [[one.job.seed for one in found] for found in Runner(jobs, SHELF, 20).run()]
    assert looks == [[7], [], [seed for seed in range(20) if seed != 7]]


def test_losses_are_told_as_means_of_their_epochs():
    """Plain losses of the same steps, added up by hand."""
    job = made.job(epochs=2)
    (found,) = made.ended(Runner([job], SHELF, 1)).values()
    pack = Pack(module.State.new([job], made.CPU), SHELF)
    sums = []
    for _ in range(6):
        pack.step()
        sums.append(float(pack.state.loss_sum[0]))
    assert found.losses == pytest.approx((sums[2] / 3, (sums[5] - sums[2]) / 3))


def test_a_run_that_diverges_ends_alone():
    wild, calm = made.job(0, "mse", lr=1e30, epochs=9, patience=9, **SMOOTH), made.job(1, "mse", epochs=9, patience=9, **SMOOTH)  # fmt: skip
    found = made.ended(Runner([wild, calm], SHELF, 2))
    assert found[wild.name].diverged and found[wild.name].epochs < 9
    assert found[wild.name].weights.isfinite().all()  # the best it had, which may be where it began
    assert not math.isfinite(found[wild.name].curve[-1] + found[wild.name].losses[-1])
    made.same({calm.name: found[calm.name]}, made.ended(Runner([calm], SHELF, 1)), within=1e-5)


# -- memory that runs short ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [(1,), (4, 5), (3, 9, 14)])
def test_memory_that_runs_short_in_a_step_changes_nothing_but_speed(calm, calls, monkeypatch):
    short_of_memory(monkeypatch, Pack, "step", *calls)
    runner = Runner(ten(), SHELF, 10)
    made.same(made.ended(runner), calm, within=1e-5)
    assert runner.ooms == len(calls) and runner.slots < 10


@pytest.mark.parametrize("calls", [(1,), (2, 4)])
def test_memory_that_runs_short_in_a_validation_changes_nothing_but_speed(calm, calls, monkeypatch):
    short_of_memory(monkeypatch, module, "validation_scores", *calls)
    runner = Runner(ten(), SHELF, 10)
    made.same(made.ended(runner), calm, within=1e-5)
    assert runner.ooms == len(calls)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_memory_that_runs_short_while_places_are_taken_again_changes_nothing(calm, call, monkeypatch):
    short_of_memory(monkeypatch, Pack, "__init__", call)
    runner = Runner(ten(), SHELF, 4)
    made.same(made.ended(runner), calm, within=1e-5)
    assert runner.ooms == 1


def test_half_of_the_runs_wait(monkeypatch):
    short_of_memory(monkeypatch, Pack, "step", 2)
    runner = Runner(ten(), SHELF, 10)
    next(runner.run())
    assert runner.slots == 5 and sum(runner.progress()) == 10


def test_one_run_that_does_not_fit_is_said_in_one_sentence(monkeypatch):
    short_of_memory(monkeypatch, Pack, "step", *range(1, 99))
    with pytest.raises(
        DoesNotFit, match="one run of 48 features and 16 rows a side does not fit cpu: .* smaller batch"
    ):
        made.ended(Runner(ten(), SHELF, 10))


def test_other_errors_are_not_taken_for_memory(monkeypatch):
    monkeypatch.setattr(Pack, "step", lambda pack: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.ended(Runner(ten(), SHELF, 10))


# -- going on ------------------------------------------------------------------------------------------------------------


def went(runner, times):
    """So many looks at a runner that goes on; what had ended by then."""
    found, running = {}, runner.run()
    for _ in range(times):
        found |= {one.job.name: one for one in next(running)}
    return found


@pytest.mark.parametrize(("times", "slots"), [(1, 10), (4, 4), (5, 10)])
def test_runs_go_on_from_a_state_as_if_nothing_had_been(calm, times, slots):
    before = Runner(ten(), SHELF, slots)
    found = went(before, times)
    state = before.state()
    begun = {job.name for job in state.jobs}
    rest = [job for job in ten() if job.name not in begun | set(found)]
    found |= made.ended(Runner(rest, SHELF, 3, begun=[state]))
    made.same(found, calm, within=1e-5)


def test_runs_that_wait_are_part_of_the_state(monkeypatch):
    short_of_memory(monkeypatch, Pack, "step", 2)
    runner = Runner(ten(), SHELF, 10)
    went(runner, 1)
    assert {job.name for job in runner.state().jobs} == {job.name for job in ten()}


def test_nothing_has_begun_before_the_first_step_or_after_the_last():
    runner = Runner(ten(), SHELF, 10)
    assert runner.state() is None
    made.ended(runner)
    assert runner.state() is None


def test_a_state_is_of_its_moment_whatever_the_runs_do_next():
    runner = Runner(ten(), SHELF, 10)
    went(runner, 2)
    state = runner.state()
    before = copy.deepcopy(state)
    made.ended(runner)
    assert all(torch.equal(getattr(state, name), getattr(before, name)) for name in TENSORS)
    assert state.curves == before.curves and state.losses == before.losses


def test_a_state_can_be_gone_on_from_twice():
    before = Runner(ten(), SHELF, 10)
    went(before, 2)
    state = before.state()
    first, second = (made.ended(Runner([], SHELF, 10, begun=[state])) for _ in range(2))
    made.same(first, second)
