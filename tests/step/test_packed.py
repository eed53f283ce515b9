"""Packed steps: the weights of the padded step for any split, through out-of-memory errors and on several ranks."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from brimful.data.loader import Loader
from brimful.errors import DoesNotFit, TaskError
from brimful.memory.ledger import simulated_memory
from brimful.planning.planner import plan as make_plan
from brimful.step.stepper import Stepper
from brimful.units import MiB
from tests.packing.small import Lines, draw_rows
from tests.planning.small import small_plan
from tests.step.fleet import Fleet
from tests.step.small import distance, out_of_memory, plain_loop

LIMIT = 8 * MiB
STEPS = [draw_rows(24, seed=seed) for seed in range(3)]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


@pytest.fixture(scope="module")
def plan():
    """Of the whole step: what is timed decides nothing."""
    task = Lines(torch.float64)
    return make_plan(task, layout="packed", memory_limit=LIMIT, device="cpu", cache=False, deterministic=True)


@pytest.fixture(scope="module")
def padded():
    """The weights of the plain loop over padded batches."""
    return plain_loop(Lines(torch.float64), STEPS, ADAMW)


def stepper_of(plan, **options):
    task = Lines(torch.float64)
    model = task.model()
    return Stepper(model, ADAMW(model.parameters()), task, plan, clip_norm=1.0, **options)


def train(stepper, steps=STEPS):
    return [stepper.step(rows) for rows in steps]


@pytest.mark.parametrize("micro_batch", [None, 1, 5, 23])
def test_any_split_gives_the_weights_of_the_padded_step(plan, padded, micro_batch):
    stepper = stepper_of(plan, micro_batch=micro_batch)
    results = train(stepper)
    assert distance(padded, stepper.model) < 1e-10
    assert {result.micro_batches for result in results} == {1 if micro_batch is None else -(-24 // micro_batch)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_splits_by_tokens_and_the_step_is_the_same(plan, workers):
    small = replace(plan, micro_batch=3, accumulation=8)
    stepper, rows = stepper_of(small), [row for step in STEPS for row in step]
    taken = []
    for step, _ in zip(Loader(rows, Lines(), small, workers=workers), STEPS, strict=False):
        assert stepper.step(step).micro_batches == len(step.groups) > 1
        taken.append([rows[index] for index in step.indices])
    assert distance(plain_loop(Lines(torch.float64), taken, ADAMW), stepper.model) < 1e-10


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_packs_so_the_step_need_not(plan, workers, monkeypatch):
    small = replace(plan, micro_batch=3, accumulation=8)
    stepper = stepper_of(small)
    loader = Loader(draw_rows(48, seed=0), Lines(), small, workers=workers)
    steps = iter(loader)
    stepper.step(next(steps))
    rows = next(steps)
    monkeypatch.setattr(Lines, "pack", lambda *_: pytest.fail("packed in the step"))
    assert stepper.step(rows).applied
    steps.close()


def test_micro_batches_of_the_loader_that_are_split_further_are_packed_again(plan):
    rows = draw_rows(24, seed=0)
    small = replace(plan, micro_batch=3, accumulation=8)
    stepper = stepper_of(small, micro_batch=2)
    steps = iter(Loader(rows, Lines(), small))
    step = next(steps)
    assert stepper.step(step).micro_batches == sum(-(-len(group) // 2) for group in step.groups)
    steps.close()
    taken = [rows[index] for index in step.indices]
    assert distance(plain_loop(Lines(torch.float64), [taken], ADAMW), stepper.model) < 1e-10


def test_a_batch_is_refused_in_one_message(plan):
    batch = Lines().collate(STEPS[0])
    with pytest.raises(TaskError) as refusal:
        stepper_of(plan).step(batch)
    assert str(refusal.value) == (
        "the plan packs rows, and this step was given a dict. Try: pass a list of rows, or layout='padded'."
    )


# Out of memory


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("micro_batch", [None, 7])
def test_an_error_in_mid_step_leaves_the_same_weights(plan, padded, place, micro_batch):
    stepper = stepper_of(plan, micro_batch=micro_batch)
    calls = iter(range(1000))

    def fail_once(_module, _inputs, output):
        if next(calls) == (0 if micro_batch is None else 2):
            output.register_hook(out_of_memory) if place == "backward" else out_of_memory()

    stepper.model.transformer.h[0].mlp.register_forward_hook(fail_once)
    results = train(stepper)
    assert [result.ooms for result in results] == [1, 0, 0]
    assert distance(padded, stepper.model) < 1e-10


def test_the_event_counts_tokens(plan):
    stepper = stepper_of(plan)
    handle = stepper.model.transformer.wte.register_forward_hook(out_of_memory)
    stepper.model.transformer.wte.register_forward_hook(lambda *_: handle.remove(), always_call=True)
    tokens = sum(map(len, STEPS[0]))
    stepper.step(STEPS[0])
    (event,) = [event for event in stepper.events if event.event == "oom"]
    assert event.sentence.startswith("out of memory in forward, micro-batch 1 of 1 (24 rows with ")
    shown = int(event.sentence.partition("24 rows with ")[2].split(" tokens)")[0].replace(",", ""))
    assert tokens <= shown < tokens + 64 + 24


def under_limits(plan, limits, steps, **options):
    """The limit is lowered or raised before the steps named."""
    stepper = stepper_of(plan, **options)
    with simulated_memory(LIMIT) as memory:
        memory.adopt(stepper.model.parameters())
        results = []
        for number, rows in enumerate(steps, start=1):
            memory.limit_bytes = limits.get(number, memory.limit_bytes)
            results.append(stepper.step(rows))
    return stepper, results


def test_after_an_error_micro_batches_are_smaller_and_later_restored(plan):
    steps = [draw_rows(24, seed=seed) for seed in range(12)]
    fixed = plan.memory_model.peak_bytes(1, (1,))
    low = fixed + (plan.measured_peak_bytes - fixed) // 3
    stepper, results = under_limits(plan, {4: low, 6: LIMIT}, steps, grow_after=3)
    counts = [result.micro_batches for result in results]
    assert counts[:3] == [1, 1, 1] and counts[4] > 1 and counts[-1] == 1
    events = [event.event for event in stepper.events if event.event in ("oom", "grow")]
    assert events[0] == "oom" and events[-1] == "grow"
    assert distance(plain_loop(Lines(torch.float64), steps, ADAMW), stepper.model) < 1e-10


@pytest.mark.parametrize("workers", [None, 0], ids=["listed", "loaded"])
def test_after_an_error_micro_batches_are_not_filled_up_to_a_size_that_does_not_fit(plan, workers):
    """Rows of half the size would take all of its memory, again and again."""
    filled = replace(plan, fixed_tokens=(512,), fixed_rows=24)
    stepper = stepper_of(filled, grow_after=2)
    tokens = []

    def fail_when_filled(_module, inputs):
        tokens.append(inputs[0].numel())
        if tokens[-1] >= 512 and len(tokens) <= 2:
            out_of_memory()

    stepper.model.transformer.wte.register_forward_pre_hook(fail_when_filled)
    rows = [row for step in range(6) for row in draw_rows(24, seed=step)]
    steps = iter(Loader(rows, Lines(), filled)) if workers is not None else None
    taken, results = [], []
    for step in range(6):
        listed = next(steps) if steps is not None else rows[24 * step : 24 * step + 24]
        taken.append([rows[index] for index in listed.indices] if steps is not None else listed)
        results.append(stepper.step(listed))
    if steps is not None:
        steps.close()
    assert [result.ooms for result in results] == [1, 0, 0, 0, 0, 0]
    assert tokens[0] == 512 and max(tokens[1:3]) < 512, "the retry is smaller"
    assert tokens[-1] == 512, "after clean steps the planned size is back"
    assert distance(plain_loop(Lines(torch.float64), taken, ADAMW), stepper.model) < 1e-10


class GraphGivenBack:
    """Stands for a CUDA graph, which gives its memory back when memory runs out."""

    pool_bytes, problem = 0, ""

    def run(self, context, batch, divisor, plain):
        return plain()

    def drop(self, *, out_of_memory=False):
        return out_of_memory


def test_an_error_beside_a_graph_is_tried_again_at_the_same_size_without_it(plan, padded):
    stepper = stepper_of(plan)
    stepper._context.graphs = GraphGivenBack()
    calls = iter(range(1000))
    stepper.model.transformer.wte.register_forward_pre_hook(lambda *_: out_of_memory() if next(calls) == 0 else None)
    with simulated_memory(2 * LIMIT) as memory:
        memory.adopt(stepper.model.parameters())
        results = train(stepper)
    assert [(result.ooms, result.micro_batches) for result in results] == [(1, 1), (0, 1), (0, 1)]
    assert "the memory of its CUDA graph is given back; trying the step again" in stepper.events[0].sentence
    assert distance(padded, stepper.model) < 1e-10


class OneTooLarge(Lines):
    """Memory runs out whenever the row of 100 words is in the batch, alone too."""

    name = "lines"

    def loss(self, model, batch):
        lengths = batch["packed_rows"].starts.diff() if "packed_rows" in batch else torch.zeros(1)
        return out_of_memory() if (lengths == 100).any() else super().loss(model, batch)


def with_a_large_row(plan, **options):
    task = OneTooLarge(torch.float64)
    model = task.model()
    stepper = Stepper(model, ADAMW(model.parameters()), task, plan, clip_norm=1.0, **options)
    return stepper, [*STEPS[0], np.arange(100) % 50 + 2]


def test_a_row_too_large_alone_is_set_aside(plan):
    stepper, rows = with_a_large_row(plan, skip_oversized=True)
    result = stepper.step(rows)
    assert result.set_aside == (24,) and result.rows == 24
    assert distance(plain_loop(Lines(torch.float64), STEPS[:1], ADAMW), stepper.model) < 1e-10


def test_a_row_too_large_alone_stops_the_run_by_name(plan):
    stepper, rows = with_a_large_row(plan)
    with pytest.raises(
        DoesNotFit, match=r"row 24 of step 1 \(lengths 100\) cannot be split and needs about .* \(predicted\)"
    ):
        stepper.step(rows)


@pytest.fixture(scope="module")
def tight():
    return small_plan(
        Lines(), data=draw_rows(100), global_batch=8, layout="packed", memory_limit="400KiB", workers=0,
        checkpointing="on", deterministic=True,
    )  # fmt: skip


def step_within(tight, lengths, **options):
    """A step of short rows and rows of these lengths, in no more memory than the plan was made for."""
    task = Lines()
    model = task.model()
    rows = [*draw_rows(6, seed=2), *(np.arange(length) % 50 + 2 for length in lengths)]
    with simulated_memory(tight.limit_bytes) as memory:
        memory.adopt(model.parameters())
        stepper = Stepper(model, task.optimizer(model), task, tight, **options)
        stepper.step(draw_rows(8))  # the optimizer's state exists from here on
        return stepper.step(rows)


def test_a_row_over_the_planned_limit_is_not_tried_again(tight):
    """Each try is a whole step, and no moment is long enough for it."""
    assert tight.memory_model.peak_bytes(1, (128,)) > tight.limit_bytes
    result = step_within(tight, [128], skip_oversized=True)
    assert result.set_aside == (6,) and result.ooms == 1


def test_a_row_that_fits_only_without_gradients_is_set_aside_too(tight):
    """The first of two such rows fits, so that the second used to end the run."""
    roomier = replace(tight, limit_bytes=455 * 1024)
    result = step_within(roomier, [128, 128], skip_oversized=True)
    assert len(result.set_aside) == 1 and result.rows == 7
    with pytest.raises(DoesNotFit, match="because the gradients of earlier rows take up part of it"):
        step_within(roomier, [128, 128])


# Several ranks


@pytest.fixture(scope="module")
def pair():
    fleet = Fleet(2)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("faults", [[], [(1, 2, 1, "forward"), (0, 3, 0, "backward")]], ids=["undisturbed", "faults"])
def test_two_ranks_have_the_weights_of_one_process(plan, padded, pair, faults, tmp_path):
    plan.save(tmp_path / "plan.json")
    answers = pair.train(faults, packed_plan=str(tmp_path / "plan.json"), steps=3, rows=24, micro_batch=5)
    for rank, answer in enumerate(answers):
        assert "error" not in answer, answer
        assert sorted(answer["fired"]) == sorted(fault[1:] for fault in faults if fault[0] == rank)
        for mine, other in zip(answer["weights"], padded.parameters(), strict=True):
            assert torch.allclose(torch.from_numpy(mine), other, rtol=0, atol=1e-10)
