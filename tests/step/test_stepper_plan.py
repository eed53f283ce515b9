"""With a plan a step is split by predicted bytes, by the stepper or ahead by a loader; one error teaches the next size."""

import functools
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from brimful.data.loader import Loader
from brimful.memory.ledger import simulated_memory
from brimful.planning.planner import plan as make_plan
from brimful.step.stepper import Stepper
from brimful.task import Loss, Task
from brimful.units import KiB, MiB
from tests.step.small import Words, distance, plain_loop, steps_of_rows

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


def test_real_rows_split_by_the_plan_never_run_out_of_memory(plan, plain):
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
    assert event.details["available_bytes"] <= 1 * MiB < event.details["predicted_bytes"]
    assert "micro-batches now use 85% of that" in event.sentence


def test_when_memory_comes_back_so_does_the_size(plan):
    _, stepper, results = run(plan, {5: 1 * MiB, 8: LIMIT}, grow_after=3)
    counts = [result.micro_batches for result in results]
    assert counts[5] > counts[0] and max(counts[-4:]) <= max(counts[:4])
    assert [event.event for event in stepper.events if event.event != "note"] == ["oom", "grow"]


def test_while_memory_stays_away_nothing_is_tried_in_vain(plan):
    _, stepper, _ = run(plan, {5: 1 * MiB}, grow_after=2)
    assert stepper.ooms == 1


def test_when_half_of_it_comes_back_micro_batches_grow_half_the_way(plan):
    _, stepper, _ = run(plan, {4: 1 * MiB, 6: 3 * MiB // 2}, grow_after=2)
    (grown,) = [event for event in stepper.events if event.event == "grow"]
    assert re.fullmatch(
        r"the device has room for 1.[45]\d* MiB again, micro-batches may use 85% of that", grown.sentence
    )
    assert stepper.ooms == 1


def test_a_micro_batch_that_the_user_fixed_is_never_exceeded():
    fixed = make_plan(Words(), memory_limit=LIMIT, global_batch=200, micro_batch=7, device="cpu", cache=False)
    assert all(result.largest_micro_batch == 7 for result in run(fixed)[2])


def test_a_model_of_memory_that_is_too_low_is_raised(plan, plain):
    """It predicts five eighths of the truth, so what is left of the memory seems to be enough for the largest size."""
    low = replace(plan.memory_model, margin=plan.memory_model.margin / 1.6)
    model, stepper, _ = run(replace(plan, micro_batch=plan.largest_micro_batch, memory_model=low), {5: 3 * MiB})
    first = next(event for event in stepper.events if event.event == "oom")
    assert first.details["predicted_bytes"] < 0.85 * first.details["available_bytes"]
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


def test_a_whole_step_that_fails_is_split_even_where_its_parts_are_predicted_to_take_more():
    task = Heavy()
    task.most = 8
    plan = make_plan(task, memory_limit="64MiB", device="cpu", cache=False, deterministic=True)
    task.most = 4
    model = task.model()
    result = Stepper(model, task.optimizer(model), task, plan).step(torch.randn(8, 1000))
    assert (plan.accumulation, result.rows, result.ooms) == (1, 8, 1)


# Steps that a loader read and split.


DATA = [row for rows in steps_of_rows(steps=3, rows=100) for row in rows]
LOADED = 8
"""Steps of a loader."""


@pytest.fixture(scope="module")
def loader_plan():
    return make_plan(Words(), memory_limit=4 * MiB, global_batch=100, device="cpu", cache=False)


def lengths(indices):
    return torch.tensor([[len(DATA[index]["words"])] for index in indices]).numpy()


def loader(plan, **options):
    return Loader(DATA, Words(), plan, workers=0, lengths=lengths, **options)


@pytest.fixture(scope="module")
def loader_plain(loader_plan):
    steps = [[DATA[row] for row in step.indices] for step, _ in zip(loader(loader_plan), range(LOADED), strict=False)]
    return plain_loop(Words(), steps, ADAMW)


def run_loader(plan, limits=None, rehearse=False, task=None, **options):
    task = task or Words()
    model = task.model()
    stepper = Stepper(model, ADAMW(model.parameters()), task, plan, clip_norm=1.0, **options)
    results = []
    with simulated_memory(4 * MiB) as memory:
        memory.adopt(model.parameters())
        if rehearse:
            stepper.rehearse()
        for number, rows in zip(range(1, LOADED + 1), loader(plan), strict=False):
            memory.limit_bytes = (limits or {}).get(number, memory.limit_bytes)
            results.append(stepper.step(rows))
            del rows
    return model, stepper, results


def test_loaded_steps_give_the_result_of_the_plain_loop(loader_plan, loader_plain):
    model, stepper, results = run_loader(loader_plan)
    assert distance(loader_plain, model) < 1e-10
    assert stepper.ooms == 0 and {result.rows for result in results} == {100}


def test_the_proposed_split_is_the_one_that_runs(loader_plan):
    proposed = [len(rows.groups) for rows, _ in zip(loader(loader_plan), range(LOADED), strict=False)]
    _, _, results = run_loader(loader_plan)
    assert [result.micro_batches for result in results] == proposed
    assert max(proposed) > 1


def test_out_of_memory_splits_the_proposed_micro_batches_and_keeps_the_result(loader_plan, loader_plain):
    model, stepper, results = run_loader(loader_plan, {3: 700 * KiB, 6: 4 * MiB})
    assert stepper.ooms > 0 and distance(loader_plain, model) < 1e-10
    assert results[2].micro_batches > results[0].micro_batches
    assert {result.rows for result in results} == {100}


def test_a_fixed_micro_batch_splits_what_was_proposed(loader_plan, loader_plain):
    model, _, results = run_loader(loader_plan, micro_batch=7)
    assert max(result.largest_micro_batch for result in results) <= 7 and distance(loader_plain, model) < 1e-10


def test_a_row_can_be_set_aside_from_a_proposed_micro_batch(loader_plan):
    with simulated_memory(64 * MiB):
        model = Words().model()
        stepper = Stepper(model, ADAMW(model.parameters()), Words(), loader_plan, skip_oversized=True)
        rows = next(iter(loader(loader_plan)))
        longest = max(range(len(rows)), key=lambda row: len(DATA[rows.indices[row]]["words"]))
        words = DATA[rows.indices[longest]]["words"]

        def fails_on_the_longest(_module, inputs):
            if any(torch.equal(row[: len(words)], words) for row in inputs[0]):
                raise torch.OutOfMemoryError("out of memory")

        model.register_forward_pre_hook(fails_on_the_longest)
        result = stepper.step(rows)
    assert result.set_aside == (longest,) and result.rows == 99


def test_rows_that_cannot_be_sliced_are_collated_by_the_step(loader_plan, loader_plain):
    class Ragged(Words):
        """A batch with a tensor that has no row for each row."""

        def collate(self, rows):
            return {**super().collate(rows), "lengths": torch.tensor([len(rows), 0, 0])}

    task = Ragged()
    model = task.model()
    stepper = Stepper(model, ADAMW(model.parameters()), task, loader_plan, clip_norm=1.0)
    steps = Loader(DATA, task, loader_plan, workers=0, lengths=lengths)
    for rows, _ in zip(steps, range(LOADED), strict=False):
        assert not rows.collated
        stepper.step(rows)
    assert distance(loader_plain, model) < 1e-10


def test_a_rehearsal_changes_nothing(loader_plan):
    plainly, rehearsed = (
        run_loader(loader_plan, task=Words(dropout=0.3, norm=True), rehearse=rehearse)[0] for rehearse in (False, True)
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip(plainly.state_dict().values(), rehearsed.state_dict().values(), strict=True)
    )


def test_a_rehearsal_takes_as_much_as_the_largest_micro_batch(loader_plan):
    task = Words()
    model = task.model()
    optimizer = ADAMW(model.parameters())
    stepper = Stepper(model, optimizer, task, loader_plan)
    with simulated_memory(64 * MiB) as memory:
        memory.adopt(model.parameters())
        assert stepper.rehearse()
        assert memory.peak_bytes == pytest.approx(loader_plan.measured_peak_bytes, rel=0.25)
    assert not optimizer.state
    assert f"({loader_plan.micro_batch} rows of 40) fits" in stepper.events[-1].sentence


def test_a_rehearsal_that_fails_makes_the_first_micro_batches_smaller():
    task = Words()
    plan = make_plan(
        task, memory_limit=4 * MiB, global_batch=100, micro_batch=50, device="cpu", cache=False
    )  # not the fastest
    model = task.model()
    stepper = Stepper(model, ADAMW(model.parameters()), task, plan, clip_norm=1.0)
    with simulated_memory(700 * KiB) as memory:
        memory.adopt(model.parameters())
        assert not stepper.rehearse()
        rows = next(iter(loader(plan)))
        result = stepper.step(rows)
    assert stepper.events[0].event == "oom" and result.ooms == 0
    assert result.micro_batches > len(rows.groups) >= 2


def test_without_a_plan_there_is_nothing_to_rehearse():
    model = Words().model()
    assert Stepper(model, ADAMW(model.parameters()), Words()).rehearse()
