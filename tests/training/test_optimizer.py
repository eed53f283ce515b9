"""Every optimizer applies the learning rate and the decay that it is given, along the curve that was chosen."""

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from brimful.errors import MissingExtra
from brimful.task import Task
from brimful.training.optimizer import NamedOptimizer, Schedule, optimizer_choice, with_optimizer
from brimful.training.options import TrainOptions


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 2))


def make(model, name="adamw", lr=1e-3, weight_decay=0.0):
    return NamedOptimizer(name=name, lr=lr, weight_decay=weight_decay)(model)


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
        NamedOptimizer(name="adamw8bit", lr=1e-3, weight_decay=0.0)  # before there is a model
    assert str(missing.value) == "bitsandbytes is not installed. Try: pip install 'brimful[eightbit]'."


def test_eight_bits_are_bitsandbytes_own_at_the_rate_asked_for(monkeypatch):
    made, installed = [], ModuleType("bitsandbytes")
    installed.__spec__ = ModuleSpec("bitsandbytes", None)
    installed.optim = SimpleNamespace(AdamW8bit=lambda groups, lr: made.append((groups, lr)) or "theirs")
    monkeypatch.setitem(sys.modules, "bitsandbytes", installed)
    assert make(net(), "adamw8bit", lr=0.25, weight_decay=0.1) == "theirs"
    [(groups, lr)] = made
    assert lr == 0.25 and [group["weight_decay"] for group in groups] == [0.1, 0.0]


class Own(Task):
    """A task with an optimizer of its own."""

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.parametrize("task", [Task(), Own()], ids=["default", "own optimizer"])
def test_the_callers_task_keeps_its_optimizer(task):
    before = task.optimizer
    changed = with_optimizer(task, TrainOptions(lr=0.125))
    assert task.optimizer == before and "optimizer" not in vars(task)
    assert {group["lr"] for group in changed.optimizer(net()).param_groups} == {0.125}
    again = with_optimizer(task, TrainOptions())
    assert {group["lr"] for group in again.optimizer(net()).param_groups} == {0.5 if type(task) is Own else 1e-4}


def test_a_tasks_own_optimizer_is_kept_unless_another_is_named():
    assert type(with_optimizer(Own(), TrainOptions()).optimizer(net())) is torch.optim.SGD
    named = with_optimizer(Own(), TrainOptions(optimizer="adamw"))
    assert type(named.optimizer(net())) is torch.optim.AdamW
    shown = [optimizer_choice(task, TrainOptions()).effective for task in (named, Own())]
    assert shown == ["adamw at 0.0001", "the task's"]


CURVES = ("constant", "linear", "cosine", "wsd")


def shares(curve, steps=100, warmup=10, upto=None, **how):
    schedule = Schedule(curve=curve, steps=steps, warmup=warmup, **how)
    return {step: schedule.share(step) for step in range(1, (upto or steps) + 1)}


@pytest.mark.parametrize("curve", CURVES)
def test_the_warm_up_rises_in_a_straight_line_to_all_of_it(curve):
    found = shares(curve)
    assert [found[step] for step in range(1, 11)] == pytest.approx([step / 10 for step in range(1, 11)])


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("steps", [1, 3, 100])
def test_without_a_warm_up_the_first_step_has_the_whole_rate(curve, steps):
    assert shares(curve, steps=steps, warmup=0, decay=1.0)[1] == 1.0


@pytest.mark.parametrize("curve", CURVES[1:])
def test_without_a_warm_up_the_last_step_has_the_floor(curve):
    assert shares(curve, steps=3, warmup=0, decay=1.0, floor=0.1)[3] == 0.1


@pytest.mark.parametrize("curve", CURVES)
def test_no_step_of_the_warm_up_is_without_a_rate(curve):
    assert min(shares(curve, steps=5, warmup=5).values()) == pytest.approx(0.2)


@pytest.mark.parametrize("curve", CURVES[1:])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_last_step_has_the_floor_and_later_ones_stay_there(curve, floor):
    found = shares(curve, upto=130, floor=floor)
    assert found[99] > floor
    assert {found[step] for step in range(100, 131)} == {floor}


def test_constant_stays_whole_whatever_the_floor_and_however_long():
    found = shares("constant", upto=130, floor=0.1)
    assert {found[step] for step in range(10, 131)} == {1.0}


def test_linear_is_half_way_down_in_the_middle():
    found = shares("linear", floor=0.2)
    assert found[55] == pytest.approx(0.6)
    assert found[32] - found[33] == pytest.approx(found[88] - found[89])


def test_cosine_is_flat_at_both_ends_and_steep_in_the_middle():
    found = shares("cosine", floor=0.2)
    assert found[55] == pytest.approx(0.6)
    assert found[11] - found[12] < 0.01 * 0.8 < found[55] - found[56]
    assert found[98] - found[99] < 0.01 * 0.8


def test_wsd_is_flat_until_the_last_part_and_then_falls_by_the_root():
    found = shares("wsd", decay=0.2)
    assert {found[step] for step in range(10, 83)} == {1.0}
    assert [found[step] for step in (83, 91, 100)] == pytest.approx([1 - math.sqrt(1 / 18), 1 - math.sqrt(0.5), 0.0])


def test_wsd_may_fall_all_the_way_from_the_warm_up():
    assert shares("wsd", decay=1.0)[11] == pytest.approx(1 - math.sqrt(1 / 90))


@pytest.mark.parametrize("curve", CURVES[1:])
def test_after_the_warm_up_a_share_never_rises(curve):
    found = shares(curve, upto=120)
    assert all(found[step] >= found[step + 1] for step in range(10, 120))


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 3)])
def test_the_shortest_runs_have_shares_too(curve, steps, warmup):
    found = shares(curve, steps=steps, warmup=warmup, upto=steps + 2)
    assert all(0.0 <= share <= 1.0 for share in found.values())


def test_with_more_steps_a_run_follows_the_longer_curve_from_there_on():
    shorter, longer = (Schedule(curve="linear", steps=steps, warmup=10) for steps in (100, 190))
    assert shorter.share(100) == 0.0
    assert longer.share(100) == pytest.approx(0.5)


def test_a_wsd_run_made_longer_before_it_falls_was_never_decayed():
    shorter, longer = (Schedule(curve="wsd", steps=steps, warmup=10) for steps in (100, 200))
    assert [shorter.share(step) for step in range(1, 83)] == [longer.share(step) for step in range(1, 83)]
    assert longer.share(100) == 1.0


@pytest.mark.parametrize(
    ("curve", "warmup", "rates"),
    [("cosine", 4, "0.25 in the first step, 1 at most, 1 in the last"), ("linear", 0, "1 in the first step, 1 at most, 0 in the last")],
)  # fmt: skip
def test_the_rates_described_are_those_of_the_steps(curve, warmup, rates):
    assert Schedule(curve=curve, steps=4, warmup=warmup).describe(1.0) == f"learning rate {rates}"
