"""Planning keeps to its time however slow the model is, returns only what ran, and says that time decided."""

import pytest
import torch

from brimful.errors import BadOption
from brimful.planning.plan_options import PlanOptions
from brimful.planning.plan_time import ACCELERATOR_S, CPU_S, PlanTime
from tests.planning.clock import Clock
from tests.planning.small import Pairs, Tagger, small_plan


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("brimful.planning.plan_time.time", clock)
    return clock


def slow(task, clock, row_s, step_s=0.0):
    """The task on a machine that takes this long for each row and for each call."""

    class Slow(task):
        def loss(self, model, batch):
            rows = len(batch["ids"]) if isinstance(batch, dict) else len(batch)
            length = batch["ids"].shape[1] / 64 if isinstance(batch, dict) else 1.0
            clock.seconds += step_s + row_s * rows * length
            return super().loss(model, batch)

    return Slow()


@pytest.mark.parametrize("row_s", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("options", [{}, {"memory_limit": None}, {"memory_limit": "1MiB"}], ids=str)
def test_a_plan_of_a_slow_model_ends_in_time(clock, row_s, options):
    plan = small_plan(slow(Tagger, clock, row_s), plan_seconds=20, global_batch=500, **options)
    assert clock.seconds <= 20
    ran = {probe.rows for probe in plan.memory_model.probes if probe.shape == plan.shape}
    assert plan.micro_batch in ran and plan.largest_micro_batch in ran


def test_the_plan_says_that_time_decided_and_what_was_not_tried(clock):
    choice = small_plan(slow(Tagger, clock, 0.2), memory_limit="64MiB", global_batch=500).choice("plan_seconds")
    assert (choice.requested, choice.effective) == (None, CPU_S)
    assert "time ended the search after" in choice.reason and "rows at once" in choice.reason


def test_more_time_finds_a_larger_size(clock):
    short, long = (small_plan(slow(Tagger, clock, 0.2), plan_seconds=s, checkpointing="off") for s in (10, 1000))
    assert short.largest_micro_batch < long.largest_micro_batch


def test_a_model_that_is_slower_than_any_budget_is_planned_with_what_a_plan_needs(clock):
    plan = small_plan(slow(Tagger, clock, 100.0), plan_seconds=1)
    assert plan.micro_batch >= 1 and "time ended the search" in plan.choice("plan_seconds").reason


def test_a_step_that_must_stay_whole_is_tried_whole_however_long_it_takes(clock):
    plan = small_plan(slow(Pairs, clock, 1.0), plan_seconds=1, memory_limit="64MiB", global_batch=500)
    assert (plan.micro_batch, plan.accumulation) == (500, 1)


def test_a_plan_that_had_time_enough_says_so_only_if_it_was_set(clock):
    fast = slow(Tagger, clock, 0.001)
    assert "were enough" in small_plan(fast, plan_seconds=5, global_batch=4).choice("plan_seconds").reason
    assert "plan_seconds" not in [choice.name for choice in small_plan(fast, global_batch=4).choices]


def test_the_time_of_a_probe_is_predicted_from_the_nearest_that_ran():
    time = PlanTime(100.0)
    time.record(2, (16, 8), 0.5)
    assert time.predict_s(8, (16, 8)) == 2.0 and time.predict_s(2, (32, 8)) == 1.0
    time.record(8, (16, 8), 0.6)
    assert time.predict_s(16, (16, 8)) == pytest.approx(1.2)


def test_by_default_a_gpu_has_more_time_than_a_cpu():
    cpu, gpu = (PlanTime.of(None, torch.device(kind), deterministic=False).limit_s for kind in ("cpu", "cuda"))
    assert (cpu, gpu) == (CPU_S, ACCELERATOR_S)


@pytest.mark.parametrize(
    "options", [{"plan_seconds": 0}, {"plan_seconds": "9"}, {"plan_seconds": 9, "deterministic": True}]
)
def test_a_time_that_cannot_be_kept_is_refused(options):
    with pytest.raises(BadOption, match="plan_seconds="):
        PlanOptions(**options)


def test_what_ran_before_the_search_does_not_count(clock):
    """Kernels were loaded and blocks compiled in it: a pass of 15 s had left no time for any larger one."""
    plan_time = PlanTime.of(None, torch.device("cuda"), deterministic=False)
    plan_time.record(32, (27, 107), 15.0)
    plan_time.start()
    assert plan_time.predict_s(256, (27, 107)) == 0
    assert plan_time.allows(256, (27, 107), 7, "larger sizes") and not plan_time.skipped


def test_on_an_accelerator_part_of_a_pass_does_not_grow(clock):
    on_gpu = PlanTime.of(None, torch.device("cuda"), deterministic=False)
    on_cpu = PlanTime.of(None, torch.device("cpu"), deterministic=False)
    for plan_time in (on_gpu, on_cpu):
        plan_time.start()
        plan_time.record(2, (64,), 0.5)
    assert on_gpu.predict_s(32, (256,)) == pytest.approx(0.5)
    assert on_cpu.predict_s(32, (256,)) == pytest.approx(0.5 * 16 * 4)
