"""Steps that a loader read and cut ahead: the same result as the plain loop, also when memory runs out in them."""

import functools

import pytest
import torch

from brimful.data.loader import Loader
from brimful.memory.ledger import simulated_memory
from brimful.planning.planner import plan as make_plan
from brimful.step.stepper import Stepper
from brimful.units import KiB, MiB
from tests.training.small import Words, distance, plain_loop, steps_of_rows

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
DATA = [row for rows in steps_of_rows(steps=3, rows=100) for row in rows]
STEPS = 8


@pytest.fixture(scope="module")
def plan():
    return make_plan(Words(), memory_limit=4 * MiB, global_batch=100, device="cpu", cache=False)


def lengths(indices):
    return torch.tensor([[len(DATA[index]["words"])] for index in indices]).numpy()


def loader(plan, **options):
    return Loader(DATA, Words(), plan, workers=0, lengths=lengths, **options)


@pytest.fixture(scope="module")
def plain(plan):
    steps = [[DATA[row] for row in step.indices] for step, _ in zip(loader(plan), range(STEPS), strict=False)]
    return plain_loop(Words(), steps, ADAMW)


def run(plan, limits=None, rehearse=False, task=None, **options):
    task = task or Words()
    model = task.model()
    stepper = Stepper(model, ADAMW(model.parameters()), task, plan, clip_norm=1.0, **options)
    results = []
    with simulated_memory(4 * MiB) as memory:
        memory.adopt(model.parameters())
        if rehearse:
            stepper.rehearse()
        for number, rows in zip(range(1, STEPS + 1), loader(plan), strict=False):
            memory.limit_bytes = (limits or {}).get(number, memory.limit_bytes)
            results.append(stepper.step(rows))
            del rows
    return model, stepper, results


def test_the_result_is_that_of_the_plain_loop(plan, plain):
    model, stepper, results = run(plan)
    assert distance(plain, model) < 1e-10
    assert stepper.ooms == 0 and {result.rows for result in results} == {100}


def test_the_proposed_cut_is_the_one_that_runs(plan):
    proposed = [len(rows.groups) for rows, _ in zip(loader(plan), range(STEPS), strict=False)]
    _, _, results = run(plan)
    assert [result.micro_batches for result in results] == proposed
    assert max(proposed) > 1


def test_out_of_memory_cuts_the_proposed_micro_batches_and_keeps_the_result(plan, plain):
    model, stepper, results = run(plan, {3: 700 * KiB, 6: 4 * MiB})
    assert stepper.ooms > 0 and distance(plain, model) < 1e-10
    assert results[2].micro_batches > results[0].micro_batches
    assert {result.rows for result in results} == {100}


def test_a_fixed_micro_batch_cuts_what_was_proposed(plan, plain):
    model, _, results = run(plan, micro_batch=7)
    assert max(result.largest_micro_batch for result in results) <= 7 and distance(plain, model) < 1e-10


def test_a_row_can_be_set_aside_from_a_proposed_micro_batch(plan):
    with simulated_memory(64 * MiB):
        model = Words().model()
        stepper = Stepper(model, ADAMW(model.parameters()), Words(), plan, skip_oversized=True)
        rows = next(iter(loader(plan)))
        longest = max(range(len(rows)), key=lambda row: len(DATA[rows.indices[row]]["words"]))
        micro = stepper._rig.micro

        def fails_on_the_longest(batch, over, *more):
            if (batch["id"] == DATA[rows.indices[longest]]["id"]).any():
                raise torch.OutOfMemoryError("out of memory")
            return micro(batch, over, *more)

        stepper._rig.micro = fails_on_the_longest
        result = stepper.step(rows)
    assert result.set_aside == (longest,) and result.rows == 99


def test_rows_that_cannot_be_sliced_are_collated_by_the_step(plan, plain):
    class Ragged(Words):
        """A batch with a tensor that has no row for each row."""

        def collate(self, rows):
            return {**super().collate(rows), "lengths": torch.tensor([len(rows), 0, 0])}

    task = Ragged()
    model = task.model()
    stepper = Stepper(model, ADAMW(model.parameters()), task, plan, clip_norm=1.0)
    steps = Loader(DATA, task, plan, workers=0, lengths=lengths)
    for rows, _ in zip(steps, range(STEPS), strict=False):
        assert not rows.collated
        stepper.step(rows)
    assert distance(plain, model) < 1e-10


def test_a_rehearsal_changes_nothing(plan):
    plainly, rehearsed = (run(plan, task=Words(dropout=0.3, norm=True), rehearse=yes)[0] for yes in (False, True))
    assert all(
        torch.equal(one, other)
        for one, other in zip(plainly.state_dict().values(), rehearsed.state_dict().values(), strict=True)
    )


def test_a_rehearsal_takes_as_much_as_the_largest_micro_batch(plan):
    task = Words()
    model = task.model()
    stepper = Stepper(model, ADAMW(model.parameters()), task, plan)
    with simulated_memory(64 * MiB) as memory:
        memory.adopt(model.parameters())
        assert stepper.rehearse()
        assert memory.peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.25)
    assert not stepper._rig.optimizer.state
    assert stepper.events[-1].sentence.startswith(
        f"the planned micro-batch of {plan.micro_batch} rows of 40 was rehearsed"
    )


def test_a_rehearsal_that_fails_makes_the_first_step_finer():
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
