"""Several processes give the one-process result, whichever of them runs out of memory, where and how often."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.fleet import Fleet
from tests.training.small import PLACES, Branches, TwoTerms, Words, plain_loop, steps_of_rows

STEPS = 4


@functools.cache
def reference(task=Words, rows=12):
    model = plain_loop(task(), steps_of_rows(STEPS, rows), functools.partial(torch.optim.AdamW, lr=1e-2))
    return [param.detach().numpy() for param in model.parameters()]


@pytest.fixture(scope="module", params=[2, 3])
def fleet(request):
    fleet = Fleet(request.param)
    yield fleet
    fleet.close()


def distance(expected, found):
    a, b = (np.concatenate([weight.ravel() for weight in weights]) for weights in (expected, found))
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def check(answers, expected):
    """All processes hold the same bits, and those are the one-process run's within 1e-10."""
    assert not [answer["error"] for answer in answers if "error" in answer]
    for answer in answers[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(answers[0]["weights"], answer["weights"], strict=True))
    assert distance(expected, answers[0]["weights"]) < 1e-10


def test_without_faults_the_weights_are_those_of_one_process(fleet):
    check(fleet.train(), reference())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("who", ["one", "all"])
def test_an_oom_on_one_or_on_all_is_survived(fleet, who, place):
    ranks = range(fleet.size) if who == "all" else [fleet.size - 1]
    answers = fleet.train([(rank, step, 0, place) for rank in ranks for step in (2, 3)])
    check(answers, reference())
    assert [answer["ooms"] for answer in answers] == [2 if rank in ranks else 0 for rank in range(fleet.size)]


def test_repeated_ooms_on_the_same_process_are_survived(fleet):
    faults = [
        (0, 2, 0, "forward"),
        (0, 2, 1, "forward"),
        (0, 2, 0, "backward"),
        (1, 2, 1, "backward"),
        (0, 2, 0, "clip"),
    ]
    check(fleet.train(faults), reference())


def test_only_the_process_that_failed_cuts_finer(fleet):
    answers = fleet.train([(0, 2, 0, "forward")], micro_batch=None, rows_are="local")
    check(answers, reference())
    assert answers[0]["micro_batches"][1] > 1
    assert all(answer["micro_batches"][1] == 1 for answer in answers[1:])


def test_rows_of_their_own_do_as_well_as_rows_that_are_dealt(fleet):
    check(fleet.train([(1, 3, 0, "backward")], rows_are="local"), reference())


def test_fewer_rows_than_processes_are_exact(fleet):
    answers = fleet.train(rows=fleet.size - 1)
    check(answers, reference(rows=fleet.size - 1))
    assert 0 in answers[0]["micro_batches"] + answers[-1]["micro_batches"]


def test_everybody_tells_the_loss_and_the_rows_of_the_whole_step(fleet):
    answers = fleet.train()
    assert all(answer["losses"] == answers[0]["losses"] for answer in answers)
    assert all(answer["rows"] == [12] * STEPS for answer in answers)


@pytest.mark.parametrize("bucket_bytes", [256, 1024])
def test_gradients_larger_than_a_bucket_are_summed_too(fleet, bucket_bytes):
    check(fleet.train(bucket_bytes=bucket_bytes), reference())


def test_a_parameter_that_only_some_rows_reach_is_exact(fleet):
    """Long rows alone use the branch, and all those may be with one process."""
    check(fleet.train([(0, 2, 0, "backward")], task="Branches", micro_batch=1), reference(Branches))


def test_terms_with_different_counts_are_summed_over_processes(fleet):
    check(fleet.train([(1, 2, 0, "forward")], task="TwoTerms"), reference(TwoTerms))


def test_other_rows_on_each_process_are_refused_unless_said(fleet):
    answers = fleet.train(own_rows=True)
    assert all(
        "process 1 was given other rows than process 0 (12 and 12 of them)" in answer["error"] for answer in answers
    )


def schedules(size):
    """Up to three faults for a process in a step: more could be a row that does not fit alone."""
    fault = st.tuples(st.integers(0, 3), st.sampled_from(PLACES))
    one = st.lists(fault, max_size=3, unique=True)
    return st.lists(one, min_size=size * STEPS, max_size=size * STEPS)


def run_schedule(fleet, schedule, **how):
    faults = [
        (index % fleet.size, 1 + index // fleet.size, micro, place)
        for index, some in enumerate(schedule)
        for micro, place in some
    ]
    check(fleet.train(faults, **how), reference())


def any_schedule(fleet, examples):
    @settings(max_examples=examples, deadline=None)
    @given(schedules(fleet.size), st.sampled_from([1, 2, 3, None]), st.sampled_from(["global", "local"]))
    def holds(schedule, micro_batch, rows_are):
        run_schedule(fleet, schedule, micro_batch=micro_batch, rows_are=rows_are)

    holds()


def test_any_schedule_of_faults_is_survived_with_the_same_weights(fleet):
    any_schedule(fleet, 6)


@pytest.mark.torture
def test_two_hundred_schedules_of_faults_are_survived_with_the_same_weights(fleet):
    any_schedule(fleet, 100)
