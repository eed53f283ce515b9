"""Loss curves: what is wrong with them, and silence about healthy ones."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from brimful.report.run_record import RunRecord
from brimful.report.why.diagnosis import Diagnosis
from brimful.report.why.loss_checks import NEW_WEIGHTS
from brimful.report.why.run_checks import check_run
from brimful.tasks.presets import PRESETS
from tests.report.fake_runs import plan, write_run
from tests.report.why.loss_curves import HEALTHY, SICK, Curve


def found(folder: Path, kind: str, **values: Any) -> Diagnosis | None:
    return next((one for one in check_run(RunRecord(write_run(folder / "run", **values))) if one.kind == kind), None)


def run_of(folder: Path, curve: Curve) -> RunRecord:
    """A run that has only its losses and rates."""
    losses, rates = curve
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    events = [
        {"event": "begin", "step": 0, "steps": len(losses)},
        {"event": "plan", "step": 0, "global_batch": 8, "data_rows": 10**6},
    ]
    events += [
        {
            "event": "step",
            "step": step,
            "steps": len(losses),
            "loss": loss,
            "lr": rate,
            "applied": True,
            "grad_norm": 1.0,
        }
        for step, (loss, rate) in enumerate(zip(losses, rates, strict=True), 1)
    ]
    events.append({"event": "end", "step": len(losses), "reason": "finished"})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return RunRecord(folder)


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_a_healthy_curve_is_left_alone(tmp_path, make):
    for seed in range(12):
        assert [one.kind for one in check_run(run_of(tmp_path / str(seed), make(random.Random(seed))))] == []


@pytest.mark.parametrize("make", SICK, ids=lambda make: make.__name__)
def test_a_sick_curve_is_named(tmp_path, make):
    named = [
        any(one.kind == SICK[make] for one in check_run(run_of(tmp_path / str(seed), make(random.Random(seed)))))
        for seed in range(12)
    ]
    assert sum(named) >= (7 if make.__name__ == "flat" else 12)


@pytest.mark.torture
def test_few_of_many_healthy_curves_are_called_sick_and_none_for_certain(tmp_path):
    sick = []
    for make in HEALTHY:
        for seed in range(300):
            sick += check_run(run_of(tmp_path / make.__name__ / str(seed), make(random.Random(seed))))
    assert len(sick) <= 0.002 * 300 * len(HEALTHY)
    assert all(one.certainty == "possible" for one in sick)


def test_a_loss_above_its_start_has_likely_diverged(tmp_path):
    losses = [5 * math.exp(-n / 30) + 1 if n < 150 else 1 + 0.06 * (n - 150) for n in range(300)]
    diverging = found(tmp_path, "loss-diverging", step_values={"loss": lambda n: losses[n - 1]})
    assert diverging.certainty == "likely"
    assert diverging.fixes[0].flags == {"brimful": "--lr 3e-05"}


def test_a_rise_below_the_start_may_have_another_reason(tmp_path):
    losses = [5 * math.exp(-n / 30) + 1 if n < 150 else 1 + 0.02 * (n - 150) for n in range(300)]
    assert found(tmp_path, "loss-diverging", step_values={"loss": lambda n: losses[n - 1]}).certainty == "possible"


def test_a_constant_loss_learns_nothing_for_certain(tmp_path):
    flat = found(tmp_path, "loss-flat", step_values={"loss": 0.6931})
    assert flat.certainty == "certain"
    assert "exactly 0.6931 in all 300 updates" in flat.cause


def test_zero_gradients_are_a_certain_reason(tmp_path):
    flat = found(tmp_path, "loss-flat", step_values={"loss": lambda n: 2 + 1e-3 * (n % 5), "grad_norm": 0.0})
    assert flat.certainty == "certain"
    assert "All gradients are zero" in flat.cause


def test_weights_that_were_trained_before_may_stay_where_they_are(tmp_path):
    values = {"step_values": {"loss": lambda n: 2 + 1e-3 * (n % 5)}, "request": {"task_options": {"model": "runs/p"}}}
    assert found(tmp_path, "loss-flat", **values) is None


def test_the_new_weights_of_a_preset_must_learn(tmp_path):
    values = {
        "step_values": {"loss": lambda n: 2 + 1e-3 * (n % 5)},
        "request": {"task_options": {"model": "chatlm-tiny"}},
    }
    assert found(tmp_path, "loss-flat", **values) is not None


def test_evaluations_that_improve_contradict_a_flat_loss(tmp_path):
    evals = [{"event": "eval", "step": 50 * n, "loss": 3 - 0.2 * n} for n in range(1, 6)]
    assert found(tmp_path, "loss-flat", step_values={"loss": lambda n: 2 + 1e-3 * (n % 5)}, more=evals) is None


def nan_from(first: int, last: int = 10**9, norm: float = 1.2) -> dict[str, Any]:
    """Steps whose loss is no number."""
    return {
        "loss": lambda n: None if first <= n <= last else 2 + 6 / n,
        "loss_is": lambda n: "nan" if first <= n <= last else None,
        "applied": lambda n: not first <= n <= last,
        "grad_norm": lambda n: None if first <= n <= last else norm if n >= first - 5 else 1.2,
    }


def test_a_run_that_ended_in_nan(tmp_path):
    nan = found(tmp_path, "nan-loss", done=200, steps=300, end="failed", step_values=nan_from(195))
    assert nan.certainty == "certain"
    assert "in 6 of 200 steps, first in step 195" in nan.cause


def test_a_gradient_that_rose_before_points_to_the_learning_rate(tmp_path):
    nan = found(tmp_path, "nan-loss", done=200, end="failed", step_values=nan_from(195, norm=400.0))
    assert "The gradient norm had risen before, from 1.2 to 400." in nan.cause
    assert nan.fixes[0].flags == {"brimful": "--lr 3e-05"}


def test_steps_of_nan_between_finite_ones_are_blamed_on_rows(tmp_path):
    values = {"loss": lambda n: None if n % 20 == 0 else 2.0, "loss_is": lambda n: "nan" if n % 20 == 0 else None, "applied": lambda n: n % 20 != 0}  # fmt: skip
    nan = found(tmp_path, "nan-loss", step_values=values)
    assert "single rows are a likelier cause" in nan.cause and nan.fixes[0].title.startswith("Look at the rows of step")


def test_nan_from_the_first_step_is_not_blamed_on_the_learning_rate(tmp_path):
    nan = found(tmp_path, "nan-loss", done=6, end="failed", step_values=nan_from(1))
    assert "not the learning rate" in nan.cause
    assert not any("--lr" in fix.flags.get("brimful", "") for fix in nan.fixes)


def test_one_skipped_step_of_many_is_only_mentioned(tmp_path):
    nan = found(tmp_path, "nan-loss", step_values=nan_from(77, 77))
    assert nan.cause.startswith("Loss or gradients were NaN or infinite in step 77.")
    assert nan.certainty == "likely"


def test_fp16_may_skip_steps_while_its_scale_settles(tmp_path):
    levers = {**plan()["levers"], "precision": "fp16"}
    assert found(tmp_path, "nan-loss", step_values=nan_from(1, 8), plan_values={"levers": levers}) is None


def test_a_rate_of_zero_changes_nothing(tmp_path):
    rate = found(tmp_path, "learning-rate-not-applied", step_values={"lr": 0.0})
    assert rate.certainty == "certain"


def test_a_constant_rate_although_it_should_fall(tmp_path):
    rate = found(tmp_path, "learning-rate-not-applied", step_values={"lr": 1e-4})
    assert "0.0001 in every step, although the schedule is cosine" in rate.cause


@pytest.mark.parametrize("schedule", ["constant", "the task's own"])
def test_a_constant_rate_that_was_asked_for_is_fine(tmp_path, schedule):
    choices = [{**one, "effective": schedule} if one["name"] == "schedule" else one for one in plan()["choices"]]
    assert (
        found(tmp_path, "learning-rate-not-applied", step_values={"lr": 1e-4}, plan_values={"choices": choices}) is None
    )


def test_wsd_is_constant_until_its_last_part(tmp_path):
    choices = [{**one, "effective": "wsd"} if one["name"] == "schedule" else one for one in plan()["choices"]]
    values = {"step_values": {"lr": 1e-4}, "plan_values": {"choices": choices}}
    assert found(tmp_path / "a", "learning-rate-not-applied", done=240, running=True, **values) is None
    assert found(tmp_path / "b", "learning-rate-not-applied", **values) is not None


def test_too_few_updates_come_with_the_numbers_that_would_do(tmp_path):
    few = found(tmp_path, "few-updates", steps=36)
    assert "only 36 updates" in few.cause
    assert few.fixes[0].title == "Use 46 rows a step: 201 updates over the same rows"
    assert few.fixes[0].flags == {"brimful": "--global-batch 46"}
    assert few.fixes[1].flags == {"brimful": "--epochs 6"}


def test_fewer_rows_a_step_come_with_the_steps_that_see_as_many_rows(tmp_path):
    few = found(tmp_path, "few-updates", steps=36, request={"options": {"max_steps": 36}})
    assert few.fixes[0].flags == {"brimful": "--global-batch 46 --max-steps 201"}


def test_a_long_run_that_has_just_begun_has_enough_updates_to_come(tmp_path):
    assert found(tmp_path, "few-updates", steps=3000, done=36, running=True) is None


def test_a_batch_as_large_as_the_data(tmp_path):
    batch = found(tmp_path, "batch-exceeds-data", plan_values={"global_batch": 8192, "data_rows": 2000})
    assert "A step has 8,192 rows and the data only 2,000" in batch.cause
    assert batch.fixes[0].flags == {"brimful": "--global-batch 100"}


def test_new_weights_are_told_by_the_names_of_the_presets():
    assert tuple(PRESETS) == NEW_WEIGHTS
