"""With a plan a step is cut by predicted bytes, and one out-of-memory error is enough to find the next size."""

import functools
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from brimful.memory.ledger import simulated_memory
from brimful.planning.planner import plan as make_plan
from brimful.step.stepper import Stepper
from brimful.task import Loss, Task
from brimful.units import KiB, MiB
from tests.training.small import Words, distance, plain_loop, steps_of_rows

LIMIT = 4 * MiB
STEPS = steps_of_rows(steps=16, rows=200)
WORDS = [[row["words"].tolist() for row in rows] for rows in STEPS]
"""Rows made anew for each step and dropped after it: on the CPU they count against the limit too."""
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


@pytest.fixture(scope="module")
def plan():
    return make_plan(Words(), memory_limit=LIMIT, global_batch=200, device="cpu", cache=False)


@pytest.fixture(scope="module")
def plain():
    return plain_loop(Words(), STEPS, ADAMW)


def run(plan, limits=None, **options):
    """The limit is lowered or raised before the steps named."""
    task = Words()
    model = task.model()
    stepper = Stepper(model, ADAMW(model.parameters()), task, plan, clip_norm=1.0, **options)
    results = []
    with simulated_memory(LIMIT) as memory:
        memory.adopt(model.parameters())
        for number, rows in enumerate(STEPS, start=1):
            memory.limit_bytes = (limits or {}).get(number, memory.limit_bytes)
            copies = [{**row, "words": torch.tensor(words)} for row, words in zip(rows, WORDS[number - 1], strict=True)]
            results.append(stepper.step(copies))
            del copies
    return model, stepper, results


def test_real_rows_cut_by_the_plan_never_run_out_of_memory(plan, plain):
    model, stepper, results = run(plan)
    assert stepper.ooms == 0 and distance(plain, model) < 1e-10
    assert all(result.micro_batches > 1 for result in results)


def test_more_short_rows_than_the_planned_worst_ones_go_at_once(plan):
    _, _, results = run(plan)
    assert max(result.largest_micro_batch for result in results) > plan.micro_batch


def test_when_memory_goes_one_error_teaches_the_new_size(plan, plain):
    model, stepper, results = run(plan, {5: 1 * MiB})
    assert [result.ooms for result in results] == [0] * 4 + [1] + [0] * 11
    assert distance(plain, model) < 1e-10
    (event,) = [event for event in stepper.events if event.event == "oom"]
    assert event.details["room_bytes"] <= 1 * MiB < event.details["predicted_bytes"]
    assert "so micro-batches stay within 85% of that" in event.sentence


def test_when_memory_comes_back_so_does_the_cut(plan):
    _, stepper, results = run(plan, {5: 1 * MiB, 8: LIMIT}, grow_after=3)
    cuts = [result.micro_batches for result in results]
    assert cuts[5] > cuts[0] and max(cuts[-4:]) <= max(cuts[:4])
    assert [event.event for event in stepper.events if event.event != "note"] == ["oom", "grow"]


def test_while_memory_stays_away_nothing_is_tried_in_vain(plan):
    _, stepper, _ = run(plan, {5: 1 * MiB}, grow_after=2)
    assert stepper.ooms == 1


def test_when_half_of_it_comes_back_the_cut_grows_half_the_way(plan):
    _, stepper, _ = run(plan, {4: 1 * MiB, 6: 3 * MiB // 2}, grow_after=2)
    (grown,) = [event for event in stepper.events if event.event == "grow"]
    assert re.fullmatch(r"the device has room for 1.[45]\d* MiB again, and micro-batches grow with it", grown.sentence)
    assert stepper.ooms == 1


def test_a_micro_batch_that_the_user_fixed_is_never_exceeded():
    fixed = make_plan(Words(), memory_limit=LIMIT, global_batch=200, micro_batch=7, device="cpu", cache=False)
    assert all(result.largest_micro_batch == 7 for result in run(fixed)[2])


def test_a_model_of_memory_that_is_too_low_is_raised(plan, plain):
    """It predicts five eighths of the truth, so what is left of the memory seems to be enough for the largest size."""
    low = replace(plan.memory_model, margin=plan.memory_model.margin / 1.6)
    model, stepper, _ = run(replace(plan, micro_batch=plan.largest_micro_batch, memory_model=low), {5: 3 * MiB})
    first = next(event for event in stepper.events if event.event == "oom")
    assert first.details["predicted_bytes"] < 0.85 * first.details["room_bytes"]
    assert re.search(r"the memory model was too low and is raised by \d+%", first.sentence)
    assert distance(plain, model) < 1e-10


def test_the_limit_of_the_plan_is_kept(plan):
    model = Words().model()
    with simulated_memory(LIMIT) as memory:
        memory.adopt(model.parameters())
        stepper = Stepper(model, ADAMW(model.parameters()), Words(), plan)
        for rows in STEPS[:3]:
            stepper.step(rows)
    assert memory.peak_bytes <= plan.budget_bytes + 64 * KiB


class Heavy(Task):
    """Large weights and small rows: gradients that wait through a forward cost more than half the rows."""

    name = "heavy"
    global_batch = 8

    def model(self):
        return nn.Linear(1000, 1000, bias=False)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        if torch.is_grad_enabled() and len(batch) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Loss(model(batch).square().sum(), len(batch))

    def dummy(self, rows, shape):
        return torch.randn(rows, 1000)


def test_a_whole_step_that_fails_is_cut_even_where_its_parts_are_predicted_to_take_more():
    task = Heavy()
    task.most = 8
    plan = make_plan(task, memory_limit="64MiB", device="cpu", cache=False)
    task.most = 4
    model = task.model()
    result = Stepper(model, task.optimizer(model), task, plan).step(torch.randn(8, 1000))
    assert (plan.accumulation, result.rows, result.ooms) == (1, 8, 1)
