"""What a run adds to its plan: sources, the predicted time, warnings."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest

from brimful.planning.plan import Choice
from brimful.training.optimizer import Schedule, with_optimizer
from brimful.training.options import TrainOptions
from brimful.training.plan_history import KeptPlan
from brimful.training.run import Request
from brimful.training.run_plan import same_rates, with_choices, with_run_warnings, with_sources, with_time
from tests.planning.small import Tagger, small_plan

ROWS = range(1000)


@pytest.fixture(scope="module")
def plan():
    return replace(small_plan(), data_rows=1000, step_s=0.5, global_batch=64)


def sources(plan, request, task=None):
    """By choice, where its value comes from."""
    task = with_optimizer(task or Tagger(), request.train_options)
    plan = with_choices(plan, ROWS, task=task, request=request, note=print)
    return {one.name: one.source for one in with_sources(plan, request.origins, request.values).choices}


def request(origins=None, task_options=None, **options):
    return Request(
        task="tagger", data="rows", run="run", options=options, origins=origins or {}, task_options=task_options or {}
    )


def test_of_what_nobody_set_the_source_is_task_default_measured_or_predicted(plan):
    found = sources(plan, request())
    found.pop("plan_seconds", None)  # on a busy machine, time may end the search
    assert found.pop("checkpointing") in ("measured", "predicted")
    assert found == {
        "device": "measured", "memory_limit": "you", "global_batch": "task", "layout": "measured", "micro_batch": "measured",
        "accumulation": "measured", "compile": "measured", "precision": "task", "exactness": "measured",
        "workers": "default", "prefetch": "default", "pin_memory": "measured", "steps": "default", "optimizer": "default",
        "schedule": "default", "warmup": "default", "save": "default",
    }  # fmt: skip


def test_flags_and_arguments_are_yours(plan):
    found = sources(plan, request(epochs=2, lr=0.1, schedule="linear", warmup=3, save_every=5, ema=0.9))
    assert {found[name] for name in ("steps", "optimizer", "schedule", "warmup", "save", "ema")} == {"you"}


def test_a_value_from_a_file_names_the_recipe_or_the_config_file(plan):
    origins = {"max_steps": "recipe small", "schedule": "my.toml", "lr": "recipe small"}
    found = sources(plan, request(origins, max_steps=5, schedule="linear", lr=0.1, save_every=3))
    assert (found["steps"], found["schedule"], found["optimizer"], found["save"]) == (
        "recipe",
        "config file",
        "recipe",
        "you",
    )


def test_an_optimizer_of_yours_at_a_rate_of_a_recipe_is_yours(plan):
    found = sources(plan, request({"lr": "recipe small"}, optimizer="adamw", lr=0.1))
    assert found["optimizer"] == "you"


def test_a_flag_that_repeats_what_a_file_said_is_yours(plan):
    choice = Choice.of("global_batch", 64, 64, "as requested", "asked").set_in("recipe small")
    saved = replace(plan, choices=(choice,))
    (found,) = with_sources(saved, {}, {"global_batch": 64}).choices
    assert (found.source, found.reason) == ("you", "as requested")


def test_a_file_is_named_once(plan):
    choice = Choice.of("global_batch", 64, 64, "as requested", "asked").set_in("recipe small").set_in("my.toml")
    assert choice.reason == "set in my.toml; as requested"
    assert choice.cells[3] == "config"


class Remarking(Tagger):
    """Tells of an option of its own, and of something it found."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        width: int = 1
        """Units."""

    def remarks(self, rows):
        return [("width", None, 1, "the default"), ("rows", 1000, 1000, "none dropped")]


def test_a_tasks_remarks_are_its_options_or_what_it_found(plan):
    found = sources(plan, request(), Remarking())
    assert (found["width"], found["rows"]) == ("task", "measured")
    assert sources(plan, request(task_options={"width": 1}), Remarking())["width"] == "you"


def test_the_time_of_a_run_follows_from_that_of_a_step(plan):
    time = with_time(plan, ROWS, steps=300, done=0).run_time
    assert (time.steps, time.steps_per_epoch, time.step_s, time.total_s) == (300, 16, 0.5, 150.0)
    assert time.epoch_s == pytest.approx(1000 / 64 * 0.5)


def test_the_end_is_that_of_the_steps_that_are_left(plan):
    before = datetime.now(UTC)
    ends = datetime.fromisoformat(with_time(plan, ROWS, steps=300, done=100).run_time.ends)
    after = datetime.now(UTC)
    assert (ends - after).total_seconds() <= 100.0 and (ends - before).total_seconds() >= 99.0  # whole seconds


@pytest.mark.parametrize("changes", [{"step_s": None}, {"data_rows": 7}], ids=["not timed", "of other rows"])
def test_the_time_is_unknown_if_nothing_measured_it(plan, changes):
    time = with_time(replace(plan, **changes), ROWS, steps=300, done=0).run_time
    assert (time.steps, time.steps_per_epoch) == (300, 16)
    assert time.step_s is time.epoch_s is time.total_s is time.ends is None


def test_a_run_that_outlives_the_calendar_has_no_end(plan):
    assert with_time(replace(plan, step_s=1e12), ROWS, steps=10**6, done=0).run_time.ends is None


def warnings(plan, steps, more=(), **options):
    return with_run_warnings(plan, TrainOptions(**options), steps=steps, more=list(more)).warnings


def test_a_run_of_few_updates_is_a_warning(plan):
    (warning,) = warnings(plan, 99)
    assert warning == (
        "the run has only 99 updates, too few to learn much. Try: more epochs=, or a smaller global_batch="
    )
    assert warnings(plan, 1, max_steps=1)[0].endswith("1 update, too few to learn much. Try: a higher max_steps=")
    assert not warnings(plan, 100)


def test_warnings_of_the_run_that_a_plan_was_saved_in_are_replaced(plan):
    saved = replace(plan, warnings=("BatchNorm", *warnings(plan, 12), "1 of 2 GPUs stands idle, because"))
    assert warnings(saved, 300) == ("BatchNorm",)
    assert warnings(saved, 13, ["2 of 3 GPUs stand idle"])[1:] == (*warnings(plan, 13), "2 of 3 GPUs stand idle")


def rates(curve, before, now, done, **options):
    options = {"schedule": curve, **options}
    kept = KeptPlan(number=1, plan={"choices": [{"name": "steps", "effective": before}]}, options=options)
    return same_rates(kept, Schedule.of(TrainOptions(**options), now), done=done)


@pytest.mark.parametrize(
    ("curve", "done", "same"),
    [("constant", 100, True), ("cosine", 50, False), ("linear", 50, False), ("wsd", 50, True), ("wsd", 100, False)],
)
def test_more_steps_leave_the_rates_so_far_what_they_were_or_not(curve, done, same):
    assert rates(curve, 100, 200, done, warmup=5) is same


def test_a_warmup_that_is_a_share_of_the_run_grows_with_it():
    assert rates("constant", 1000, 2000, 500, warmup="2%") is False
    assert rates("constant", 1000, 2000, 500, warmup=20) is True


def test_nothing_is_said_of_a_scheduler_of_the_task():
    assert same_rates(KeptPlan(number=1, plan={"choices": []}), None, done=5)
