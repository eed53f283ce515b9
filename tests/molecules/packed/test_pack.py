"""Packed equals alone: each run against the same run written in plain PyTorch, fed with the same batches."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.molecules.feature_store import Order
from brimful.molecules.job import ACTIVATIONS, DROPOUT, kept, key
from brimful.molecules.pack import TENSORS, Pack, State

from . import made

STEPS = 50
ENERGY = ("dpo", "bce", "mse", "hinge")
CLASSES = (2, 3)
CLASSIFIERS = ("classify", "classify-oe", "classify-energy-oe")


def plain_loss(job, out, labels):
    """As a paper would write it, all pairs as a matrix."""
    batch, given = job.training.batch, job.options
    in_dist, out_dist = out[:batch], out[batch:]
    if job.objective in CLASSIFIERS:
        return classifier_loss(job, in_dist, out_dist, labels)
    in_dist, out_dist = in_dist[:, 0], out_dist[:, 0]
    gaps = out_dist[None, :] - in_dist[:, None]
    zeros, ones = torch.zeros_like(in_dist), torch.ones_like(out_dist)
    both = F.binary_cross_entropy_with_logits if job.objective == "bce" else F.mse_loss
    if job.objective == "dpo":
        loss = F.softplus(-given["beta"] * gaps).mean()
    elif job.objective == "hinge":
        loss = F.relu(given["margin"] - gaps).flatten().topk(round(given["hard"] * gaps.numel())).values.mean()
    else:
        loss = (both(in_dist, zeros) + both(out_dist, ones)) / 2
    return loss + given["lam"] * (in_dist.square().mean() + out_dist.square().mean())


def classifier_loss(job, in_dist, out_dist, labels):
    """Two tasks, of two and of three classes; the first task's third output is unused."""
    tasks = [(out[:, :2], out[:, 3:]) for out in (in_dist, out_dist)]
    known = (labels >= 0).sum()
    loss = sum(F.cross_entropy(one, labels[:, task], ignore_index=-1, reduction="sum") for task, one in enumerate(tasks[0])) / known  # fmt: skip
    given = job.options
    if job.objective == "classify-energy-oe":
        inside, outside = (torch.stack([-one.logsumexp(-1) for one in side]) for side in tasks)
        low, high = F.relu(inside - given["margin_in"]), F.relu(given["margin_out"] - outside)
        loss = loss + given["weight"] * (low.square().mean() + high.square().mean())
    return loss


def trained_alone(job, shelf, steps):
    """The run's weights as they are after so many steps, one after the other."""
    torch.manual_seed(job.seed)
    sizes = (job.shape.inputs, *job.shape.hidden, job.shape.outputs)
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes)]
    params = [param for layer in layers for param in layer.parameters()]
    training, activation = job.training, ACTIVATIONS[job.shape.activation]()
    optimizer = torch.optim.AdamW(params, lr=training.lr, weight_decay=training.weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, training.step_size, training.gamma)
    order = Order([job], shelf, training.batch, np.zeros(1, dtype=np.int64))
    for step in range(steps):
        rows = order.rows(torch.tensor([step]), 2 if job.sees_ood else 1)[0]
        order.step += 1
        x = shelf.features[rows].float()
        for layer in layers[:-1]:
            x = activation(layer(x))
        optimizer.zero_grad()
        plain_loss(job, layers[-1](x), shelf.labels[rows[: training.batch]]).backward()
        if training.clip:
            nn.utils.clip_grad_norm_(params, training.clip)
        optimizer.step()
        if (step + 1) % order.an_epoch[0] == 0:
            schedule.step()
    return torch.cat([part.flatten() for layer in layers for part in (layer.weight.detach().t(), layer.bias.detach())])


def packed(jobs, shelf, steps):
    pack = Pack(State.new(jobs, made.CPU), shelf)
    for _ in range(steps):
        pack.step()
    return pack.state


def apart(state, shelf, steps=STEPS):
    """How far each run is from itself trained alone."""
    found = [trained_alone(job, shelf, steps) for job in state.jobs]
    return [float((own - other).abs().max()) for own, other in zip(state.weights, found, strict=True)]


# Without kinks: at a ReLU's zero, or at the margin of a hinge, the last digit of an energy decides which way a gradient goes,
# and one run in ten leaves its twin by more than rounding.
SMOOTH = {"activation": "silu", "dropout": 0.0, "inputs": 96}
FAR = {"margin": 5.0}


def options(name):
    return FAR if name == "hinge" else {}


@pytest.mark.parametrize("bits", [False, True])
def test_twenty_runs_in_one_pack_are_twenty_runs_alone(bits):
    jobs = [made.job(seed, name, options=options(name), **SMOOTH) for seed in range(5) for name in ENERGY]
    shelf = made.shelf(a=made.rows(bits=bits, inputs=96))
    assert shelf.sparse is bits
    state = packed(jobs, shelf, STEPS)
    assert max(apart(state, shelf)) < 1e-5
    moved = (state.weights - State.new(jobs, made.CPU).weights).abs().amax(1)
    assert moved.min() > 1e-2  # they did go somewhere


@pytest.mark.parametrize("bits", [False, True])
def test_runs_of_two_datasets_and_with_numbers_of_their_own_share_a_pack(bits):
    numbers = (
        {"lr": 1e-3, "weight_decay": 0.0, "clip": 1.0, "step_size": 10, "gamma": 0.9},
        {"lr": 5e-4, "weight_decay": 0.1, "clip": 0.05, "step_size": 1, "gamma": 0.8},
        {"lr": 1e-4, "weight_decay": 1.0, "clip": 0.0, "step_size": 2, "gamma": 0.7},
    )
    jobs = [
        made.job(seed, name, data, options=options(name), **SMOOTH, **numbers[seed])
        for seed in range(3)
        for name, data in (("dpo", "a"), ("hinge", "b"), ("bce", "b"))
    ]
    a, b = made.rows(bits=bits, inputs=96), made.rows(1, train=(70, 25), bits=bits, inputs=96)
    shelf = made.shelf(a=a, b=b)
    assert max(apart(packed(jobs, shelf, STEPS), shelf)) < 1e-5


def test_with_kinks_most_runs_agree_as_closely_and_none_goes_far():
    jobs = [made.job(seed, name, dropout=0.0) for seed in range(3) for name in ENERGY]
    shelf = made.shelf(a=made.rows(train=(48, 32)))
    found = sorted(apart(packed(jobs, shelf, STEPS), shelf))
    assert found[6] < 1e-5 and found[-1] < 0.02


def test_classifiers_with_and_without_exposure_share_a_pack():
    names = ("classify", "classify-energy-oe")
    jobs = [made.job(seed, name, classes=CLASSES, **SMOOTH) for seed in range(2) for name in names]
    shelf = made.shelf(a=made.rows(train=(60, 40), inputs=96, classes=CLASSES))
    assert max(apart(packed(jobs, shelf, STEPS), shelf)) < 1e-5


def test_steps_of_a_plain_classifier_do_not_depend_on_ood_rows():
    """Nobody may look at OOD molecules for it, not even through the dropout of a pack with two sides."""
    plain = made.job(0, "classify", classes=CLASSES)
    rows, others = (made.rows(train=(60, 40), classes=CLASSES) for _ in range(2))
    others.features[others.ood["train"]] += 100
    exposed = made.job(1, "classify-oe", classes=CLASSES)
    with_others = packed([plain, exposed], made.shelf(a=others), 20).weights[0]
    assert torch.allclose(packed([plain], made.shelf(a=rows), 20).weights[0], with_others, atol=1e-6)


def test_dropout_is_that_of_the_run_and_the_step():
    """The loss of one step, with the masks drawn by hand."""
    job, shelf = made.job(3, "mse", dropout=0.4), made.shelf()
    pack = Pack(State.new([made.job(0, "mse"), job], made.CPU), shelf)
    pack.step()
    rows = Order([job], shelf, 16, np.ones(1, dtype=np.int64)).rows(torch.ones(1, dtype=torch.int64), 2)
    weights, x, place = pack.state.weights[1].clone(), shelf.features[rows[0]], 0
    sizes = (job.shape.inputs, *job.shape.hidden, 1)
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        weight = weights[place : place + inputs * outputs].view(inputs, outputs)
        x = x @ weight + weights[place + inputs * outputs :][:outputs]
        place += (inputs + 1) * outputs
        if layer < 2:
            drawn = key(key(torch.tensor([3]), DROPOUT, torch.tensor([1])), layer)
            x = x.relu() * kept(drawn, 32, outputs, torch.tensor([0.4]))[0]
    before = float(pack.state.loss_sum[1])
    pack.step()
    assert float(pack.state.loss_sum[1]) - before == pytest.approx(plain_loss(job, x, None).item(), abs=1e-6)


def test_every_run_is_clipped_by_its_own_gradient():
    """A run of wild energies must not slow its neighbours."""
    wild, calm = made.job(1, "mse", options={"lam": 1e6}, **SMOOTH), made.job(0, "mse", clip=0.1, **SMOOTH)
    shelf = made.shelf(a=made.rows(inputs=96))
    assert max(apart(packed([wild, calm], shelf, 10), shelf, 10)) < 1e-5


def test_the_epochs_losses_are_means_over_its_steps_and_begin_anew():
    pack = Pack(State.new([made.job(0), made.job(1)], made.CPU), made.shelf())
    for _ in range(3):
        pack.step()
    whole = pack.state.loss_sum.clone()
    assert pack.epoch_losses([1]) == [pytest.approx(float(whole[1]) / 3)]
    assert pack.state.loss_sum.tolist() == [float(whole[0]), 0.0]


class ShortOfMemory(TorchDispatchMode):
    """Counts the tensors that are asked for; the one with this number cannot be had."""

    def __init__(self, number=0):
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tensors((args, kwargs))}
        if any(one.untyped_storage()._cdata not in given for one in tensors(found)):
            self.count += 1
            if self.count == self.number:
                raise torch.OutOfMemoryError("out of memory, as asked for")
        return found


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [one for part in value for one in tensors(part)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("bits", [False, True])
def test_a_step_that_runs_out_of_memory_at_any_place_has_changed_nothing(bits):
    jobs = [made.job(0), made.job(1, "hinge")]
    shelf = made.shelf(a=made.rows(bits=bits))
    pack, calm = (Pack(State.new(jobs, made.CPU), shelf) for _ in range(2))
    pack.step()
    calm.step()
    before = {name: getattr(pack.state, name).clone() for name in TENSORS}
    with ShortOfMemory() as memory:
        calm.step()
    last = range(memory.count - 20, memory.count + 1)  # the update, where it would hurt
    for number in [*range(1, memory.count - 20, 11), *last]:
        with pytest.raises(torch.OutOfMemoryError), ShortOfMemory(number):
            pack.step()
        assert all(torch.equal(getattr(pack.state, name), one) for name, one in before.items()), number
    pack.step()
    for _ in range(4):
        pack.step()
        calm.step()
    assert all(torch.equal(getattr(pack.state, name), getattr(calm.state, name)) for name in TENSORS)
