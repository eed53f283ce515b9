"""What a plan promises, for every example and the chat task: no OOM, within 3 %, within the budget, at the edge.

The smallest limit runs with the tests, the others with `make torture`, which prints the table of bench/RESULTS.md.
"""

from pathlib import Path

import pytest

import brimful
from brimful.planning.planner import plan as make_plan
from brimful.tasks.load import load_task
from brimful.units import show_bytes

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = ["chatlm-sft", "causal_lm", "image_classifier", "contrastive", "all_pairs", "unet"]


def load(name):
    return (
        load_task(name, options={"size": "tiny"}) if name == "chatlm-sft" else load_task(f"{EXAMPLES / name}.py:task")
    )


def keeps_its_promise(name, limit, **options):
    plan = make_plan(load(name), memory_limit=limit, device="cpu", cache=False, **options)
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


SLOW = ("image_classifier", "unet", "causal_lm")
"""Five to ten seconds each: `make torture` has them at this limit too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.torture) if name in SLOW else name for name in TASKS]
)
def test_at_512_mib(name):
    # With checkpointing a whole step is predicted from probes that held gradients; whether it is tried depends on timings.
    keeps_its_promise(name, "512MiB", checkpointing="off" if name == "chatlm-sft" else "auto")


@pytest.mark.torture
@pytest.mark.parametrize("limit", ["1GiB", "2GiB"])
@pytest.mark.parametrize("name", TASKS)
def test_at_higher_limits(name, limit):
    keeps_its_promise(name, limit)


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
