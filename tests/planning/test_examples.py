"""What a plan promises, for every example and the chat task: no OOM, within 3 %, within the budget, at the edge.

Small ones run with the tests, the others with `make torture`, which prints the table of bench/RESULTS.md.
"""

from pathlib import Path

import pytest
import torch

import brimful
from brimful.planning.planner import plan as make_plan
from brimful.tasks.load import load_task
from brimful.units import show_bytes

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = ["sft", "causal_lm", "image_classifier", "contrastive", "all_pairs", "unet"]


def load(name):
    if name == "sft":
        return load_task(name, options={"model": "chatlm-tiny", "freeze": "encoder+embeddings"})
    return load_task(f"{EXAMPLES / name}.py:task")


def keeps_its_promise(name, limit, **options):
    plan = make_plan(load(name), memory_limit=limit, device="cpu", cache=False, plan_seconds=600, **options)
    print(
        f"| {name} | {limit} | {plan.micro_batch} × {plan.accumulation} | {plan.largest_micro_batch} of {plan.global_batch} "
        f"| {show_bytes(plan.predicted_peak_bytes)} / {show_bytes(plan.measured_peak_bytes)} "
        f"({plan.predicted_peak_bytes / plan.measured_peak_bytes - 1:+.2%}) "
        f"| {show_bytes(plan.largest_predicted_peak_bytes)} / {show_bytes(plan.largest_measured_peak_bytes)} "
        f"({plan.largest_predicted_peak_bytes / plan.largest_measured_peak_bytes - 1:+.2%}) "
        f"| {plan.ooms} | {plan.probes} | {plan.plan_s:.1f} |"
    )
    assert plan.ooms == 0
    assert plan.predicted_peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.03)
    assert plan.largest_predicted_peak_bytes == pytest.approx(plan.largest_measured_peak_bytes, rel=0.03)
    assert max(plan.measured_peak_bytes, plan.largest_measured_peak_bytes) <= plan.budget_bytes
    if plan.largest_micro_batch < plan.global_batch:
        assert plan.one_more_predicted_peak_bytes > plan.budget_bytes
    return plan


# With checkpointing, a whole step is predicted from probes that held gradients, and whether it is tried depends on the clock.
SMALL = {
    "sft": {"limit": "128MiB", "checkpointing": "off"},
    "causal_lm": {"limit": "64MiB", "lengths": (32,), "checkpointing": "off"},
    "contrastive": {"limit": "512MiB", "lengths": (32,)},
    "all_pairs": {"limit": "512MiB"},
}


@pytest.mark.parametrize("name", SMALL)
def test_at_a_small_limit(name):
    keeps_its_promise(name, **SMALL[name])


def test_graphs_of_uneven_size_are_split_exactly():
    """Batches whose tensors have no common first dimension."""
    plan = keeps_its_promise("graphs", "2MiB", data="400")
    assert plan.accumulation > 1 and plan.choice("exactness").effective == "exact"
    task = load("graphs")
    rows, gradients = task.rows("64"), []
    for micro_batch in (64, 5):
        torch.manual_seed(0)
        model = task.model().double()
        stepper = brimful.Stepper(model, torch.optim.SGD(model.parameters()), task, micro_batch=micro_batch)
        stepper.backward([row.double() for row in rows])
        gradients.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-12)


def test_packed_at_a_small_limit():
    plan = keeps_its_promise("causal_lm", "64MiB", lengths=(32,), checkpointing="off", layout="packed")
    assert plan.layout == "packed"


@pytest.mark.torture
@pytest.mark.parametrize("limit", ["512MiB", "1GiB", "2GiB"])
@pytest.mark.parametrize("name", TASKS)
def test_at_higher_limits(name, limit):
    keeps_its_promise(name, limit)


@pytest.mark.torture
def test_all_pairs_is_right_where_a_straight_line_is_wrong_by_a_factor():
    plan = keeps_its_promise("all_pairs", "512MiB", global_batch=100_000, allow_inexact=True)
    few, more = sorted(plan.memory_model.probes, key=lambda probe: probe.rows)[:3:2]
    slope = (more.peak_bytes - few.peak_bytes) / (more.rows - few.rows)
    assert (plan.budget_bytes - few.peak_bytes) / slope > 5 * plan.largest_micro_batch


def test_the_smallest_hugging_face_task_plans_and_trains(tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join("to be or not to be "[: 3 + n % 16] for n in range(64)))
    options = {"memory_limit": "32MiB", "device": "cpu", "cache": False, "micro_batch": 16, "workers": 0}
    plan = make_plan(load("huggingface"), data=lines, **options)
    assert plan.choice("exactness").effective == "exact"
    ending = brimful.train(load("huggingface"), lines, run=tmp_path / "run", max_steps=3, **options)
    assert (ending.step, ending.reason) == (3, "finished")
