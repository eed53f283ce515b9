"""Every optimizer applies the learning rate and the decay that it is given."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from brimful.errors import MissingExtra
from brimful.training.options import Chosen


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 2))


def make(model, name="adamw", lr=1e-3, weight_decay=0.0):
    return Chosen(name=name, lr=lr, weight_decay=weight_decay)(model)


def backward(model):
    torch.manual_seed(1)
    model(torch.randn(8, 64).to(model[0].weight.dtype)).square().sum().backward()


def updates(name, rates, **how):
    """What each of the steps, at these rates, adds to the first weight; the first rate is the one asked for."""
    model = net().double()
    optimizer, weight, found = make(model, name, rates[0], **how), model[0].weight, []
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        before = weight.detach().clone()
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        found.append(weight.detach() - before)
    return found


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_twice_the_learning_rate_is_twice_the_first_update(name):
    (once,), (twice,) = updates(name, [1e-3]), updates(name, [2e-3])
    assert once.abs().max() > 1e-5
    torch.testing.assert_close(twice, 2 * once, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_schedule_changes_the_update(name):
    kept, lowered = updates(name, [1e-3, 1e-3]), updates(name, [1e-3, 1e-4])
    assert torch.equal(kept[0], lowered[0])
    torch.testing.assert_close(lowered[1], 0.1 * kept[1], rtol=1e-6, atol=1e-12)


def test_adafactors_update_does_not_depend_on_how_large_the_weights_are():
    model = net().double()
    with torch.no_grad():
        model[2].weight.mul_(100)
    before = model[2].weight.detach().clone()
    optimizer = make(model, "adafactor", 1e-3)
    backward(model)
    optimizer.step()
    assert (model[2].weight - before).square().mean().sqrt() <= 1.01e-3


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_weights_are_decayed_and_biases_and_norms_are_not(name):
    model = net()
    optimizer = make(model, name, weight_decay=0.1)
    groups = {group["weight_decay"]: {id(param) for param in group["params"]} for group in optimizer.param_groups}
    matrices = {id(model[0].weight), id(model[2].weight)}
    assert groups == {0.1: matrices, 0.0: {id(param) for param in model.parameters()} - matrices}


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_decay_shrinks_a_weight_by_rate_times_decay(name):
    model = net().double()
    optimizer, weight, bias = make(model, name, lr=0.1, weight_decay=0.5), model[0].weight, model[0].bias
    before, bias_before = weight.detach().clone(), bias.detach().clone()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), 0.95 * before)
    assert torch.equal(bias, bias_before)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_frozen_weights_are_left_out(weight_decay):
    model = net()
    model[0].requires_grad_(False)
    given = [id(param) for group in make(model, weight_decay=weight_decay).param_groups for param in group["params"]]
    assert sorted(given) == sorted(id(param) for part in model[1:] for param in part.parameters())


def test_a_tied_weight_is_stepped_once():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    assert [len(group["params"]) for group in make(model, weight_decay=0.1).param_groups] == [1]


def test_on_the_cpu_adamw_is_not_fused():
    optimizer = make(net())
    assert type(optimizer) is torch.optim.AdamW and not optimizer.param_groups[0]["fused"]


def test_adafactor_keeps_hardly_any_state():
    def state_bytes(name):
        model = nn.Linear(512, 512, bias=False)
        optimizer = make(model, name)
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        values = (value for state in optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    assert state_bytes("adafactor") < state_bytes("adamw") / 100


def test_eight_bits_without_bitsandbytes_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtra) as missing:
        Chosen(name="adamw8bit", lr=1e-3, weight_decay=0.0)  # before there is a model
    assert str(missing.value) == "bitsandbytes is not installed. Try: pip install 'brimful[eightbit]'"


def test_eight_bits_are_bitsandbytes_own_at_the_rate_asked_for(monkeypatch):
    made, installed = [], ModuleType("bitsandbytes")
    installed.__spec__ = ModuleSpec("bitsandbytes", None)
    installed.optim = SimpleNamespace(AdamW8bit=lambda groups, lr: made.append((groups, lr)) or "theirs")
    monkeypatch.setitem(sys.modules, "bitsandbytes", installed)
    assert make(net(), "adamw8bit", lr=0.25, weight_decay=0.1) == "theirs"
    [(groups, lr)] = made
    assert lr == 0.25 and [group["weight_decay"] for group in groups] == [0.1, 0.0]
