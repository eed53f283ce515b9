"""What a probe may touch is put back bit for bit."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from brimful.memory.ledger import Ledger
from brimful.memory.snapshot import Attributes, Buffers, RandomState, TrainingState

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


def test_refreshed_buffers_are_put_back_as_they_were_at_the_refresh():
    model = small()
    kept = Buffers(model)
    model(torch.randn(6, 4))
    kept.refresh()
    before = copy.deepcopy(dict(model.named_buffers()))
    model(torch.randn(6, 4))
    kept.restore()
    assert same(dict(model.named_buffers()), before)


def test_buffers_can_be_put_back_more_than_once():
    model = small()
    before = copy.deepcopy(dict(model.named_buffers()))
    kept = Buffers(model)
    for _ in range(3):
        model(torch.randn(6, 4))
        kept.restore()
    assert same(dict(model.named_buffers()), before)


def test_a_refresh_takes_no_new_memory():
    model = small()
    kept = Buffers(model)
    with Ledger() as ledger:
        kept.refresh()
        before = ledger.live_bytes
        kept.refresh()
        assert ledger.peak_bytes == ledger.live_bytes == before


def test_the_model_keeps_its_buffers():
    model = small()
    buffers = list(model.buffers())
    kept = Buffers(model)
    model(torch.randn(6, 4))
    kept.restore()
    assert [id(buffer) for buffer in model.buffers()] == [id(buffer) for buffer in buffers]


class Average(nn.Module):
    """Replaces its buffer by a new tensor at every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(dim=0)
        return x - self.mean


def test_a_buffer_replaced_by_a_new_tensor_is_put_back_as_the_tensor_it_was():
    model = nn.Sequential(Average())
    buffer = model[0].mean
    kept = Buffers(model)
    model(torch.ones(3, 2))
    assert model[0].mean is not buffer
    kept.restore()
    assert model[0].mean is buffer
    assert buffer.tolist() == [0.0, 0.0]


def test_a_buffer_changed_in_place_and_then_replaced_has_its_value_again():
    model = Average()
    kept = Buffers(model)
    model.mean.fill_(7.0)
    model(torch.ones(3, 2))
    kept.restore()
    assert model.mean.tolist() == [0.0, 0.0]


def test_a_refresh_after_a_buffer_was_replaced_keeps_the_new_one():
    model = Average()
    kept = Buffers(model)
    model(torch.ones(3, 2))
    replaced = model.mean
    kept.refresh()
    model(torch.ones(3, 2))
    kept.restore()
    assert model.mean is replaced
    assert replaced.tolist() == [0.5, 0.5]


def test_a_refresh_after_a_buffer_was_replaced_by_one_of_another_shape_keeps_the_new_one():
    model = Average()
    kept = Buffers(model)
    model.mean = torch.arange(6.0)  # as a cache of positions that grows
    kept.refresh()
    model.mean.zero_()
    kept.restore()
    assert model.mean.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_buffer_that_two_modules_share_is_still_shared():
    model = nn.Sequential(Average(), Average())
    model[1].mean = model[0].mean
    kept = Buffers(model)
    model(torch.ones(3, 2))
    kept.restore()
    assert model[0].mean is model[1].mean
    assert model[0].mean.tolist() == [0.0, 0.0]


def test_a_buffer_that_is_none_stays_none():
    model = nn.BatchNorm1d(2, track_running_stats=False)
    kept = Buffers(model)
    kept.refresh()
    kept.restore()
    assert model.running_mean is None


def test_a_buffer_made_in_the_meantime_is_none_again():
    model = nn.Module()
    model.register_buffer("mean", None)
    kept = Buffers(model)
    model.mean = torch.ones(2)  # as a module does that takes its statistics from the first batch it sees
    kept.restore()
    assert model.mean is None


def test_a_buffer_that_was_expanded_can_be_put_back():
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(1).expand(4))
    kept = Buffers(model)
    model.mask = torch.ones(4)
    kept.restore()
    assert torch.equal(model.mask, torch.zeros(4))


def test_attributes_in_the_memory_of_a_weight_are_left_to_it():
    """8-bit layers hold their weight twice: 7 GB of an 8B model would be copied to the host."""
    layer = nn.Linear(2, 2)
    layer.alias, layer.own = layer.weight.data, torch.ones(3)
    attributes = Attributes(layer, excluding=layer.parameters())
    layer.alias.fill_(7)
    layer.own.zero_()
    attributes.restore()
    assert layer.own.tolist() == [1, 1, 1] and (layer.weight == 7).all()
