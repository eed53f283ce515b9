"""`deterministic=True`: nothing that is timed decides on a plan, and two trainings end with the same bits."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import brimful
from brimful.errors import DeviceBusy
from brimful.machine.host import Host
from brimful.planning.plan import Plan
from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import STEADY, find_target
from tests.planning.clock import LyingClock
from tests.planning.small import Normed, Pairs, Tagger, Texts, small_plan, texts

ROWS = texts(*(3 + 7 * n % 30 for n in range(60)))
TIMED = {"rows_per_s", "step_s", "simulation_slowdown", "plan_s", "created", "choices", "host", "tried"}
"""Fields that hold times, or reasons with times in them."""


class Dropped(Texts):
    """A model with dropout, whose masks depend on how a step is split."""

    name = "dropped"

    def model(self):
        model = super().model()
        model.body = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)])
        return model


@pytest.fixture
def lie(monkeypatch):
    return lambda seed: monkeypatch.setattr("brimful.planning.plan_time.time", LyingClock(seed))


def what_affects_training(plan):
    values = {field.name: getattr(plan, field.name) for field in fields(Plan) if field.name not in TIMED}
    choices = {choice.name: choice.effective for choice in plan.choices}
    loader = (plan.host.workers, plan.host.prefetch, plan.host.pin_memory)
    return values, choices, loader, plan.split([(n,) * len(plan.shape) for n in range(1, 33)])


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (Dropped, {"data": ROWS, "memory_limit": "700KiB"}),
        (Tagger, {}),
        (Tagger, {"table": True}),
        (Tagger, {"memory_limit": "600KiB", "global_batch": 16}),
        (Normed, {"memory_limit": "70KiB", "global_batch": 16}),
        (Pairs, {"memory_limit": "64MiB", "global_batch": 300}),
    ],
    ids=["data", "dummy", "table", "tight", "batch-norm", "across-rows"],
)
def test_plans_made_with_clocks_that_lie_differently_are_equal(lie, task, options):
    plans = []
    for seed in range(2):
        lie(seed)
        plans.append(small_plan(task(), deterministic=True, **options))
    first, *others = (what_affects_training(plan) for plan in plans)
    assert all(other == first for other in others)


def test_such_clocks_decide_on_a_plan_that_is_not_deterministic(lie):
    plans = []
    for seed in range(4):
        lie(seed)
        plans.append(small_plan(Dropped(), data=ROWS, memory_limit="700KiB", plan_seconds=1e9))
    assert len({(plan.micro_batch, plan.overhead) for plan in plans}) > 1


def test_trainings_with_dropout_end_with_the_same_bits_whatever_the_clock_says(lie, tmp_path):
    weights = []
    for seed in range(2):
        lie(seed)
        run = tmp_path / str(seed)
        brimful.train(
            Dropped(), ROWS, run=run, max_steps=4, memory_limit="700KiB", device="cpu", deterministic=True, cache=False
        )
        weights.append((run / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_the_plan_says_so():
    choice = small_plan(deterministic=True).choice("deterministic")
    assert choice.effective is True and "deterministic algorithms" in choice.reason


def test_torchs_deterministic_algorithms_are_used_and_switched_off_again():
    seen = set()

    class Watched(Tagger):
        def loss(self, model, batch):
            seen.add(torch.are_deterministic_algorithms_enabled())
            return super().loss(model, batch)

    small_plan(Watched(), deterministic=True)
    assert seen == {True} and not torch.are_deterministic_algorithms_enabled()


def test_without_a_limit_it_is_for_a_fixed_share_of_the_memory(monkeypatch):
    host = Host.detect()
    monkeypatch.setattr(Host, "detect", lambda: replace(host, ram_available_bytes=int(0.9 * host.ram_limit_bytes)))
    target = find_target(PlanOptions(device="cpu", deterministic=True))
    assert target.limit_bytes == int(STEADY * host.ram_limit_bytes)
    monkeypatch.setattr(Host, "detect", lambda: replace(host, ram_available_bytes=host.ram_limit_bytes // 2))
    with pytest.raises(
        DeviceBusy, match=r"deterministic=True plans for 75% of the memory of the CPU.*Try: memory_limit="
    ):
        find_target(PlanOptions(device="cpu", deterministic=True))
