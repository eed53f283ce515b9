"""Plans of a run side by side: what changed, whether it is another experiment, and the way back."""

import json
import subprocess
import sys

import pytest

from brimful.errors import BadRun
from brimful.training.plan_history import KeptPlan, PlanHistory, compare, rolled_back, show_value
from brimful.training.run import Request, RunFolder
from brimful.units import GiB

CHOICES = {
    "memory_limit": 20 * GiB, "global_batch": 192, "layout": "padded", "micro_batch": 32, "accumulation": 6, "precision": "fp32",
    "checkpointing": "off", "exactness": "exact", "workers": 0, "steps": 300, "optimizer": "adamw at 0.001", "schedule": "cosine",
    "save": "every 10 min",
}  # fmt: skip


def kept(number=1, options=None, requested=(), code="", **changes):
    """A plan with these values instead; None leaves a choice out."""
    values = {**CHOICES, **changes}
    choices = [
        {"name": name, "effective": value, "requested": value if name in requested else None, "reason": "", "basis": "measured"}
        for name, value in values.items()
        if value is not None and name not in ("processes", "data_rows", "device_name")
    ]  # fmt: skip
    fields = {
        name: changes.get(name, value)
        for name, value in (("processes", 1), ("data_rows", 3000), ("device_name", "a card"))
    }
    return KeptPlan(number=number, plan={"choices": choices, **fields}, options=options or {}, code=code)


def verdict(before=None, same_rates=True, steps_done=10, **changes):
    return compare(before or kept(), kept(**changes), steps_done=steps_done, same_rates=same_rates)


def test_nothing_changed_is_the_same_experiment():
    found = verdict()
    assert (found.changes, found.experiment, found.experiment_reasons) == ((), "same", ())


def test_a_run_without_steps_is_new():
    assert verdict(steps_done=0).experiment == "new"
    assert compare(None, kept(), steps_done=0, same_rates=True).experiment == "new"


def test_changes_are_old_and_new_in_the_order_of_the_plan():
    found = verdict(global_batch=144, micro_batch=24)
    assert found.changes == (
        {"name": "global_batch", "old": 192, "new": 144},
        {"name": "micro_batch", "old": 32, "new": 24},
    )
    assert found.number_before == 1


def test_a_choice_that_came_or_went_is_a_change():
    assert verdict(ema=0.999).changes == ({"name": "ema", "old": None, "new": 0.999},)
    assert verdict(kept(ema=0.999)).changes == ({"name": "ema", "old": 0.999, "new": None},)


def test_a_ceiling_of_the_size_that_was_chosen_is_a_change():
    assert verdict(requested=("micro_batch",)).changes == ({"name": "micro_batch", "old": "auto", "new": 32},)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"global_batch": 144}, "a step has 144 rows instead of 192"),
        ({"data_rows": 2999}, "the data have 2,999 rows instead of 3,000"),
        ({"optimizer": "adamw at 0.01"}, "the optimizer is adamw at 0.01 instead of adamw at 0.001"),
        ({"precision": "bf16"}, "the model computes in bf16 instead of fp32"),
        ({"options": {"weight_decay": 0.1}}, "the weight decay is 0.1 instead of 0.01"),
        ({"options": {"clip_norm": 0.5}}, "gradients are clipped at 0.5 instead of 1.0"),
        ({"options": {"mix": "window:4"}}, "rows come in another order (mix is window:4, it was none)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_changes_the_updates_is_another_experiment(changes, reason):
    found = verdict(**changes)
    assert (found.experiment, found.experiment_reasons) == ("other", (reason,))


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch": 16, "accumulation": 12},
        {"layout": "packed"},
        {"processes": 2},
        {"checkpointing": "on"},
        {"workers": 2},
        {"device_name": "another card"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_how_a_step_is_computed_is_the_same_up_to_rounding(changes):
    found = verdict(**changes)
    assert found.experiment == "same" and len(found.changes) == len(changes)
    (reason,) = found.experiment_reasons
    assert "with the same result up to rounding" in reason


def test_a_run_that_got_more_steps_has_the_same_plan():
    assert kept(steps=400).equals(kept()) and not kept(micro_batch=16).equals(kept())


@pytest.mark.parametrize("changes", [{"ema": 0.99}, {"memory_limit": 10 * GiB}, {"options": {"skip_oversized": True}}])
def test_what_changes_no_update_needs_no_reason(changes):
    found = verdict(**changes)
    assert (found.experiment, found.experiment_reasons) == ("same", ())


def test_how_often_it_is_saved_is_no_change():
    assert not verdict(save="every 4 steps").changes


@pytest.mark.parametrize("exactness", ["inexact", "weighted by rows", "not known"])
def test_a_split_that_changes_results_makes_another_experiment(exactness):
    found = verdict(kept(exactness=exactness), exactness=exactness, micro_batch=16)
    assert (found.experiment, found.experiment_reasons) == (
        "other",
        ("results depend on how a step is split (micro batch)",),
    )


def test_more_steps_are_another_experiment_if_the_steps_so_far_had_other_rates():
    assert verdict(steps=400, same_rates=True).experiment == "same"
    found = verdict(steps=400, same_rates=False)
    assert (found.experiment, found.experiment_reasons) == (
        "other",
        ("so far the learning rate followed another curve (steps)",),
    )


def test_a_changed_file_of_the_task_is_not_called_another_experiment_for_certain():
    found = verdict(kept(code="a"), code="b")
    assert (found.changes, found.experiment) == ((), "same")
    assert found.experiment_reasons[0].startswith("the file of the task has changed, and with it perhaps the loss")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("memory_limit", 20 * GiB, "20 GiB"),
        ("memory_limit", None, "all that is free"),
        ("steps", 1000, "1,000"),
        ("ema", None, "none"),
        ("skip_oversized", True, "on"),
    ],
)
def test_values_are_shown_for_people(name, value, text):
    assert show_value(name, value) == text


@pytest.fixture
def run(tmp_path):
    """A run that has trained with three plans."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for number in (1, 2, 3):
        PlanHistory(folder).keep(kept(number, options={"lr": number / 10, "micro_batch": 10 * number}))
    train_with(folder, 3)
    return folder


def train_with(folder, number):
    folder.plan().write_text(json.dumps({"number": number}))


def refused(run, rollback):
    with pytest.raises(BadRun) as error:
        PlanHistory(run).earlier(rollback)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_run_goes_back_to_the_plan_before_the_current_one(run):
    assert PlanHistory(run).earlier(True).number == 2
    train_with(run, 2)
    assert PlanHistory(run).earlier(True).number == 1


def test_a_run_goes_to_any_plan_it_has_kept(run):
    assert [PlanHistory(run).earlier(number).number for number in (3, 1)] == [3, 1]


def test_there_is_none_before_the_first(run):
    train_with(run, 1)
    assert (
        refused(run, True)
        == f"{run.root} trains with its first plan, so there is no earlier one. Try: rollback=2 or 3."
    )
    for path in run.kept_plans()[1:]:
        path.unlink()
    assert refused(run, True).endswith("there is no earlier one. Try: resume=True, which continues with it.")


def test_a_plan_that_is_not_there_is_named_with_those_that_are(run):
    assert refused(run, 7) == f"{run.root} has no plan 7. Try: rollback=1, 2 or 3."


def test_a_run_that_kept_no_plan_says_so(tmp_path):
    assert refused(RunFolder(tmp_path), True).startswith(f"{tmp_path} has kept no plan")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"number": 2}', "\x00\xff"])
def test_a_damaged_plan_is_left_out(run, content):
    run.kept_plan(2).write_text(content, encoding="latin-1")
    assert [one.number for one in PlanHistory(run).all()] == [1, 3]
    assert PlanHistory(run).earlier(True).number == 1


@pytest.mark.parametrize("content", [None, "", "[]", '{"number": [1]}', '{"number": 17}'])
def test_without_a_readable_plan_the_newest_is_the_current_one(run, content):
    run.plan().unlink() if content is None else run.plan().write_text(content)
    assert PlanHistory(run).current().number == 3


def request(**options):
    return Request(task="t", data="rows", run="run", resume=True, options=options)


def test_a_plan_brings_its_options_back(run):
    now = request(lr=0.3, micro_batch=30, save_every=5, max_steps=9, global_batch=7)
    back = rolled_back(now, now, PlanHistory(run).earlier(1))
    assert back.options == {"lr": 0.1, "micro_batch": 10, "save_every": 5, "max_steps": 9}
    assert back.rollback == 1


def test_what_a_call_changes_wins_over_the_plan_it_goes_back_to(run):
    back = rolled_back(request(lr=0.7, micro_batch=30), request(lr=0.3, micro_batch=30), PlanHistory(run).earlier(1))
    assert back.options == {"lr": 0.7, "micro_batch": 10}


def test_going_back_needs_no_torch():
    code = "import sys; import brimful.training.plan_history; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
