"""Packed equals alone: each run against the same run written in plain PyTorch, fed with the same batches."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.molecules.feature_store import BatchOrder, FeatureStore
from brimful.molecules.heads import ACTIVATIONS, DROPOUT, HeadShape, Job, Rows, dropout_factors, new_head, random_key
from brimful.molecules.methods import METHODS
from brimful.molecules.pack import TENSORS, Pack, State, initial_weights, validation_scores
from brimful.molecules.spec import TrainSpec

from . import support

JOBS = [support.job(seed) for seed in range(5)]


def numbered():
    """Five runs whose every number is the run's own."""
    state = State.new(JOBS, support.CPU)
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


def test_take_keeps_the_order_of_its_argument():
    holds(numbered().take([3, 0]), [3, 0])


def test_joined_runs_come_after_the_others():
    whole = numbered()
    holds(whole.take([4, 1]).joined(whole.take([0, 2])), [4, 1, 0, 2])


def test_take_copies():
    whole = numbered()
    part = whole.take([1, 2])
    whole.weights.zero_()
    holds(part, [1, 2])


def test_initial_weights_are_those_of_linear_layers_with_that_seed():
    torch.manual_seed(3)
    layers = [nn.Linear(48, 16), nn.Linear(16, 8), nn.Linear(8, 1)]
    expected = torch.cat([part for one in layers for part in (one.weight.t().flatten(), one.bias)])
    assert torch.equal(initial_weights(support.job().shape, 3), expected)


def test_a_new_head_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    new_head(support.job().shape, 7)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_new_run_starts_from_zero():
    state = State.new(JOBS[:2], support.CPU)
    assert not state.step.any() and not state.first.any() and not state.second.any() and not state.best_epoch.any()
    assert state.best_score.isneginf().all() and state.curves == ([], []) and torch.equal(state.best, state.weights)
    assert state.best.data_ptr() != state.weights.data_ptr()


STEPS = 30
ENERGY = ("dpo", "bce", "mse", "hinge")
CLASSES = (2, 3)
CLASSIFIERS = ("classify", "classify-oe", "classify-energy-oe")


def plain_loss(job, out, labels):
    """As a paper would write it, all pairs as a matrix."""
    batch, options = job.training.batch, job.options
    in_dist, out_dist = out[:batch], out[batch:]
    if job.objective.name in CLASSIFIERS:
        return classifier_loss(job, in_dist, out_dist, labels)
    in_dist, out_dist = in_dist[:, 0], out_dist[:, 0]
    gaps = out_dist[None, :] - in_dist[:, None]
    zeros, ones = torch.zeros_like(in_dist), torch.ones_like(out_dist)
    both = F.binary_cross_entropy_with_logits if job.objective.name == "bce" else F.mse_loss
    if job.objective.name == "dpo":
        loss = F.softplus(-options["beta"] * gaps).mean()
    elif job.objective.name == "hinge":
        loss = F.relu(options["margin"] - gaps).flatten().topk(round(options["hard"] * gaps.numel())).values.mean()
    else:
        loss = (both(in_dist, zeros) + both(out_dist, ones)) / 2
    return loss + options["lam"] * (in_dist.square().mean() + out_dist.square().mean())


def classifier_loss(job, in_dist, out_dist, labels):
    """Two tasks, of two and of three classes; the first task's third output is unused."""
    tasks = [(out[:, :2], out[:, 3:]) for out in (in_dist, out_dist)]
    known = (labels >= 0).sum()
    loss = sum(F.cross_entropy(one, labels[:, task], ignore_index=-1, reduction="sum") for task, one in enumerate(tasks[0])) / known  # fmt: skip
    options = job.options
    if job.objective.name == "classify-energy-oe":
        inside, outside = (torch.stack([-one.logsumexp(-1) for one in side]) for side in tasks)
        low, high = F.relu(inside - options["margin_in"]), F.relu(options["margin_out"] - outside)
        loss = loss + options["weight"] * (low.square().mean() + high.square().mean())
    return loss


def trained_alone(job, store, steps):
    """The run's weights as they are after this many steps, one after the other."""
    torch.manual_seed(job.seed)
    sizes = (job.shape.inputs, *job.shape.hidden, job.shape.outputs)
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes)]
    params = [param for layer in layers for param in layer.parameters()]
    training, activation = job.training, ACTIVATIONS[job.shape.activation]()
    optimizer = torch.optim.AdamW(params, lr=training.lr, weight_decay=training.weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, training.step_size, training.gamma)
    order = BatchOrder([job], store, training.batch, np.zeros(1, dtype=np.int64))
    for step in range(steps):
        rows = order.rows(torch.tensor([step]), 2 if job.objective.sees_ood else 1)[0]
        order.step += 1
        x = store.features[rows].float()
        for layer in layers[:-1]:
            x = activation(layer(x))
        optimizer.zero_grad()
        plain_loss(job, layers[-1](x), store.labels[rows[: training.batch]]).backward()
        if training.clip:
            nn.utils.clip_grad_norm_(params, training.clip)
        optimizer.step()
        if (step + 1) % order.steps_per_epoch[0] == 0:
            schedule.step()
    return torch.cat([part.flatten() for layer in layers for part in (layer.weight.detach().t(), layer.bias.detach())])


def packed(jobs, store, steps):
    pack = Pack(State.new(jobs, support.CPU), store)
    for _ in range(steps):
        pack.step()
    return pack.state


def apart(state, store, steps=STEPS):
    """How far each run is from itself trained alone."""
    found = [trained_alone(job, store, steps) for job in state.jobs]
    return [float((own - other).abs().max()) for own, other in zip(state.weights, found, strict=True)]


# Without kinks: at a ReLU's zero, or at the margin of a hinge, the last digit of an energy decides which way a gradient goes,
# and one run in ten leaves its twin by more than rounding.
SMOOTH = {"activation": "silu", "dropout": 0.0, "inputs": 96}
FAR = {"margin": 5.0}


def far_margin(name):
    return FAR if name == "hinge" else {}


@pytest.mark.parametrize("bits", [False, True])
def test_eight_runs_in_one_pack_are_eight_runs_alone(bits):
    jobs = [support.job(seed, name, options=far_margin(name), **SMOOTH) for seed in range(2) for name in ENERGY]
    store = support.store(a=support.rows(bits=bits, inputs=96))
    assert store.sparse is bits
    state = packed(jobs, store, STEPS)
    assert max(apart(state, store)) < 1e-5
    moved = (state.weights - State.new(jobs, support.CPU).weights).abs().amax(1)
    assert moved.min() > 1e-2  # they did go somewhere


@pytest.mark.parametrize("bits", [False, True])
def test_runs_with_different_datasets_and_numbers_share_a_pack(bits):
    numbers = (
        {"lr": 1e-3, "weight_decay": 0.0, "clip": 1.0, "step_size": 10, "gamma": 0.9},
        {"lr": 5e-4, "weight_decay": 0.1, "clip": 0.05, "step_size": 1, "gamma": 0.8},
        {"lr": 1e-4, "weight_decay": 1.0, "clip": 0.0, "step_size": 2, "gamma": 0.7},
    )
    jobs = [
        support.job(seed, name, data, options=far_margin(name), **SMOOTH, **numbers[seed])
        for seed in range(3)
        for name, data in (("dpo", "a"), ("hinge", "b"), ("bce", "b"))
    ]
    a, b = support.rows(bits=bits, inputs=96), support.rows(1, train=(70, 25), bits=bits, inputs=96)
    store = support.store(a=a, b=b)
    assert max(apart(packed(jobs, store, STEPS), store)) < 1e-5


def test_with_relu_most_runs_agree_and_none_goes_far():
    jobs = [support.job(seed, name, dropout=0.0) for seed in range(3) for name in ENERGY]
    store = support.store(a=support.rows(train=(48, 32)))
    found = sorted(apart(packed(jobs, store, STEPS), store))
    assert found[6] < 1e-5 and found[-1] < 0.02


def test_classifiers_with_and_without_exposure_share_a_pack():
    names = ("classify", "classify-energy-oe")
    jobs = [support.job(seed, name, classes=CLASSES, **SMOOTH) for seed in range(2) for name in names]
    store = support.store(a=support.rows(train=(60, 40), inputs=96, classes=CLASSES))
    assert max(apart(packed(jobs, store, STEPS), store)) < 1e-5


def test_steps_of_a_plain_classifier_do_not_depend_on_ood_rows():
    """OOD molecules have no influence, not even through the dropout of a pack with two sides."""
    plain = support.job(0, "classify", classes=CLASSES)
    rows, others = (support.rows(train=(60, 40), classes=CLASSES) for _ in range(2))
    others.features[others.ood["train"]] += 100
    exposed = support.job(1, "classify-oe", classes=CLASSES)
    with_others = packed([plain, exposed], support.store(a=others), 20).weights[0]
    assert torch.allclose(packed([plain], support.store(a=rows), 20).weights[0], with_others, atol=1e-6)


def test_dropout_is_a_function_of_run_and_step():
    """The loss of one step, with the masks drawn by hand."""
    job, store = support.job(3, "mse", dropout=0.4), support.store()
    pack = Pack(State.new([support.job(0, "mse"), job], support.CPU), store)
    pack.step()
    rows = BatchOrder([job], store, 16, np.ones(1, dtype=np.int64)).rows(torch.ones(1, dtype=torch.int64), 2)
    weights, x, place = pack.state.weights[1].clone(), store.features[rows[0]], 0
    sizes = (job.shape.inputs, *job.shape.hidden, 1)
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        weight = weights[place : place + inputs * outputs].view(inputs, outputs)
        x = x @ weight + weights[place + inputs * outputs :][:outputs]
        place += (inputs + 1) * outputs
        if layer < 2:
            drawn = random_key(random_key(torch.tensor([3]), DROPOUT, torch.tensor([1])), layer)
            x = x.relu() * dropout_factors(drawn, 32, outputs, torch.tensor([0.4]))[0]
    before = float(pack.state.loss_sum[1])
    pack.step()
    assert float(pack.state.loss_sum[1]) - before == pytest.approx(plain_loss(job, x, None).item(), abs=1e-6)


def test_every_run_is_clipped_by_its_own_gradient_norm():
    """A run of wild energies must not slow its neighbours."""
    wild, calm = support.job(1, "mse", options={"lam": 1e6}, **SMOOTH), support.job(0, "mse", clip=0.1, **SMOOTH)
    store = support.store(a=support.rows(inputs=96))
    assert max(apart(packed([wild, calm], store, 10), store, 10)) < 1e-5


def test_the_loss_of_an_epoch_is_the_mean_of_its_steps():
    pack = Pack(State.new([support.job(0), support.job(1)], support.CPU), support.store())
    for _ in range(3):
        pack.step()
    whole = pack.state.loss_sum.clone()
    assert pack.finish_epoch([1]) == [pytest.approx(float(whole[1]) / 3)]
    assert pack.state.loss_sum.tolist() == [float(whole[0]), 0.0]


class ShortOfMemory(TorchDispatchMode):
    """Counts allocations; the one with this number fails."""

    def __init__(self, number=0):
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {one.untyped_storage()._cdata for one in tensors((args, kwargs))}
        if any(one.untyped_storage()._cdata not in inputs for one in tensors(result)):
            self.count += 1
            if self.count == self.number:
                raise torch.OutOfMemoryError("out of memory")
        return result


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [one for part in value for one in tensors(part)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("bits", [False, True])
def test_a_step_that_runs_out_of_memory_anywhere_changes_nothing(bits):
    jobs = [support.job(0), support.job(1, "hinge")]
    store = support.store(a=support.rows(bits=bits))
    pack, calm = (Pack(State.new(jobs, support.CPU), store) for _ in range(2))
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


META = torch.device("meta")
SIDE = {"train": np.arange(32), "valid": np.arange(32, 40), "test": np.arange(40, 50)}


@pytest.fixture
def on_meta(monkeypatch):
    """What is read back to the host is zeros; everything else stays where it is."""
    read = torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda one: torch.zeros(one.shape, dtype=one.dtype) if one.is_meta else read(one)
    )
    monkeypatch.setattr(torch.Tensor, "tolist", lambda one: np.zeros(one.shape).tolist())


@pytest.mark.parametrize(
    ("methods", "classes"), [(("dpo", "bce", "mse", "hinge"), ()), (("msp", "msp-oe", "energy-oe"), (2, 3))]
)
def test_a_step_and_a_validation_stay_on_the_device(methods, classes, on_meta):
    other = {name: part + 50 for name, part in SIDE.items()}
    rows = Rows(features=torch.rand(100, 16), labels=torch.zeros(100, 2, dtype=torch.int64), id=SIDE, ood=other)
    jobs = [
        Job(
            name=name, data="a", objective=METHODS[name].objective, options=support.defaults(METHODS[name].training_options), seed=1,
            shape=HeadShape(inputs=16, hidden=(8, 4), classes=classes), training=TrainSpec(batch=16),
        )
        for name in methods
    ]  # fmt: skip
    pack = Pack(State.new(jobs, META), FeatureStore({"a": rows}, META))
    for _ in range(3):
        pack.step()
    assert pack.state.weights.is_meta and len(validation_scores(pack, range(len(jobs)))) == len(jobs)
    assert pack.state.take([0]).joined(pack.state).weights.shape[0] == 1 + len(jobs)
