"""A run is a row of the state: it can be taken out and put in anywhere."""

import torch
from torch import nn

from brimful.molecules.job import made as new_head
from brimful.molecules.pack import TENSORS, State, flat

from . import made

JOBS = [made.job(seed) for seed in range(5)]


def numbered():
    """Five runs whose every number is the run's own."""
    state = State.new(JOBS, made.CPU)
    for name in TENSORS:
        one = getattr(state, name)
        one.copy_(torch.arange(5).view(-1, *[1] * (one.dim() - 1)).expand_as(one))
    for place in range(5):
        state.curves[place].append(float(place))
        state.losses[place].append(-float(place))
    return state


def holds(state, runs):
    assert [job.seed for job in state.jobs] == runs and len(state) == len(runs)
    for name in TENSORS:
        assert [float(one.reshape(-1)[0]) for one in getattr(state, name)] == runs, name
    assert [curve[0] for curve in state.curves] == runs == [-losses[0] for losses in state.losses]


def test_runs_are_taken_in_the_order_asked_for():
    holds(numbered().take([3, 0]), [3, 0])


def test_joined_runs_stand_behind_the_others():
    whole = numbered()
    holds(whole.take([4, 1]).joined(whole.take([0, 2])), [4, 1, 0, 2])


def test_what_is_taken_is_a_copy():
    whole = numbered()
    part = whole.take([1, 2])
    whole.weights.zero_()
    holds(part, [1, 2])


def test_first_weights_are_those_of_linear_layers_with_that_seed():
    torch.manual_seed(3)
    layers = [nn.Linear(48, 16), nn.Linear(16, 8), nn.Linear(8, 1)]
    expected = torch.cat([part for one in layers for part in (one.weight.t().flatten(), one.bias)])
    assert torch.equal(flat(made.job().shape, 3), expected)


def test_making_a_head_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    new_head(made.job().shape, 7)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_new_run_has_nothing_behind_it():
    state = State.new(JOBS[:2], made.CPU)
    assert not state.step.any() and not state.first.any() and not state.second.any() and not state.best_epoch.any()
    assert state.best_score.isneginf().all() and state.curves == ([], []) and torch.equal(state.best, state.weights)
    assert state.best.data_ptr() != state.weights.data_ptr()
