"""What a probe may touch is put back bit for bit."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from brimful.memory.snapshot import Buffers, RandomState, TrainingState

CPU = torch.device("cpu")
STREAMS = {
    "python": random.random,
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,  # keeps every second draw for later
    "torch": lambda: torch.rand(1).item(),
    "torch normal": lambda: torch.randn(1).item(),
}


@pytest.mark.parametrize("draw", STREAMS.values(), ids=STREAMS.keys())
def test_a_stream_of_random_numbers_goes_on_as_if_nothing_was_drawn(draw):
    draw()
    state = RandomState(CPU)
    drawn = [draw() for _ in range(5)]
    state.restore()
    assert [draw() for _ in range(5)] == drawn


def test_random_state_can_be_put_back_more_than_once():
    state = RandomState(CPU)
    drawn = []
    for _ in range(3):
        state.restore()
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert len(set(drawn)) == 1


def test_random_state_is_put_back_after_a_new_seed():
    state = RandomState(CPU)
    drawn = torch.rand(3)
    torch.manual_seed(99)
    state.restore()
    assert torch.equal(torch.rand(3), drawn)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 1e-2},
            {"params": [*model[1].parameters(), *model[4].parameters()], "lr": 1e-3, "weight_decay": 0.3},
        ]
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """So many steps; the last one leaves its gradients."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Everything there is, copied."""
    return copy.deepcopy(
        {
            "weights": dict(model.named_parameters()),
            "buffers": dict(model.named_buffers()),
            "grads": {name: p.grad for name, p in model.named_parameters()},
            "modes": {name: module.training for name, module in model.named_modules()},
            "optimizer": optimizer.state_dict(),
        }
    )


def same(one, other) -> bool:
    """Equal to the last bit, tensors and all."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


PARTS = ["weights", "buffers", "grads", "modes", "optimizer"]


@pytest.fixture(scope="module")
def three() -> tuple[dict, dict, dict]:
    """All state before, after an excursion that changes every part of it, and after putting it back."""
    model = small()
    optimizer = adamw(model)
    train(model, optimizer, 3)
    model[4].bias.grad = None
    model[1].eval()
    before = state_of(model, optimizer)
    kept = TrainingState(model, optimizer)
    model.train()
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.param_groups[1]["betas"] = (0.1, 0.2)
    train(model, optimizer, 4)
    model.eval()
    during = state_of(model, optimizer)
    kept.restore()
    return before, during, state_of(model, optimizer)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_put_back_bit_for_bit(three, part):
    before, during, after = three
    assert not same(before[part], during[part])
    assert same(before[part], after[part])


def test_a_weight_without_a_gradient_has_none_again(three):
    before, during, after = three
    assert [state["grads"]["4.bias"] is None for state in (before, during, after)] == [True, False, True]


def test_a_fresh_optimizer_is_empty_again():
    model = small()
    optimizer = adamw(model)
    kept = TrainingState(model, optimizer)
    train(model, optimizer, 2)
    kept.restore()
    assert dict(optimizer.state) == {}
    assert all(p.grad is None for p in model.parameters())


def test_each_group_has_its_options_again():
    model = small()
    optimizer = adamw(model)
    kept = TrainingState(model, optimizer)
    for group in optimizer.param_groups:
        group.update(lr=9.0, weight_decay=0.0, betas=(0.0, 0.0))
    kept.restore()
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (1e-2, 1e-2, (0.9, 0.999)),
        (1e-3, 0.3, (0.9, 0.999)),
    ]


def test_the_groups_keep_their_weights():
    model = small()
    optimizer = adamw(model)
    kept = TrainingState(model, optimizer)
    kept.restore()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in model.parameters()]


def test_training_goes_on_as_if_nothing_had_happened():
    ends = []
    for excursion in (False, True):
        model = small()
        optimizer = adamw(model)
        train(model, optimizer, 3)
        if excursion:
            kept, stream = TrainingState(model, optimizer), RandomState(CPU)
            train(model, optimizer, 4)
            kept.restore()
            stream.restore()
        train(model, optimizer, 3)
        ends.append(state_of(model, optimizer))
    assert same(*ends)


def test_what_was_put_back_can_be_put_back_again():
    model = small()
    optimizer = adamw(model)
    train(model, optimizer, 3)
    before = state_of(model, optimizer)
    kept = TrainingState(model, optimizer)
    for _ in range(2):
        model(torch.randn(6, 4)).sum().backward()  # adds to the gradients that are there
        optimizer.step()
        kept.restore()
    assert [part for part in PARTS if not same(state_of(model, optimizer)[part], before[part])] == []


def test_a_learning_rate_that_is_a_tensor_can_be_put_back_again():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    kept = TrainingState(model, optimizer)
    for _ in range(2):
        optimizer.param_groups[0]["lr"].fill_(9.0)  # as torch's schedulers do
        kept.restore()
    assert optimizer.param_groups[0]["lr"].item() == 0.25


def test_the_model_keeps_its_tensors():
    model = small()
    optimizer = adamw(model)
    tensors = [*model.parameters(), *model.buffers()]
    kept = TrainingState(model, optimizer)
    train(model, optimizer, 1)
    kept.restore()
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == [id(t) for t in tensors]


def test_weights_shared_by_two_layers_are_put_back():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = model[0].weight.detach().clone()
    kept = TrainingState(model, optimizer)
    train(model, optimizer, 2)
    kept.restore()
    assert torch.equal(model[0].weight, before)
    assert model[1].weight is model[0].weight


def test_an_optimizer_with_lists_in_its_state_is_put_back():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(5, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = state_of(model, optimizer)
    kept = TrainingState(model, optimizer)
    optimizer.step(closure)
    assert not same(state_of(model, optimizer), before)
    kept.restore()
    assert same(state_of(model, optimizer), before)


def test_buffers_are_put_back_bit_for_bit():
    model = small()
    model(torch.randn(6, 4))
    before = copy.deepcopy(dict(model.named_buffers()))
    kept = Buffers(model)
    model(torch.randn(6, 4))
    assert not same(dict(model.named_buffers()), before)
    kept.restore()
    assert same(dict(model.named_buffers()), before)


def test_buffers_leave_the_weights_as_they_are():
    model = small()
    kept = Buffers(model)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    kept.restore()
    assert bool((model[0].weight == 3.0).all())
