"""The plan's table says what to run, how full memory gets, and why."""

import pytest
from rich.console import Console

from brimful.planning.planner import plan as make_plan
from brimful.report.tables import plan_table
from tests.planning.small import Normed, Tagger


def shown(plan):
    console = Console(record=True, width=120, force_terminal=False)
    console.print(plan_table(plan))
    return console.export_text()


@pytest.fixture(scope="module")
def plan():
    return make_plan(Tagger(), memory_limit="4MiB", device="cpu", cache=False)


def test_the_headline_is_what_to_run(plan):
    assert shown(plan).startswith("tagger on the CPU: ")
    assert "= 50 a step" in shown(plan)


def test_every_choice_is_a_row(plan):
    for choice in plan.choices:
        assert choice.name.replace("_", " ") in shown(plan)


def test_a_prediction_is_called_one(plan):
    assert "(predicted), over the budget" in shown(plan)


@pytest.mark.parametrize(("rows", "zone"), [(700, "safe"), (760, "edge"), (860, "danger")])
def test_the_zone_is_named(rows, zone):
    plan = make_plan(
        Normed(), memory_limit="1MiB", device="cpu", cache=False, fill=0.95, micro_batch=rows, global_batch=1200
    )
    assert plan.zone == zone
    assert f"% {zone}" in shown(plan)


def test_a_warning_is_shown():
    assert "warning: BatchNorm" in shown(make_plan(Normed(), memory_limit="4MiB", device="cpu", cache=False))


def test_a_cached_plan_says_so(plan):
    assert "no probe run" in shown(plan.as_cached())
