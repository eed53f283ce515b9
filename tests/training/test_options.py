"""What can be set for a run: every value that cannot work is named, all of them at once."""

import math

import pytest

from brimful.errors import BadOption
from brimful.training.options import TrainOptions, parse_duration


def refused(**values):
    with pytest.raises(BadOption) as error:
        TrainOptions(**values)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nothing_has_to_be_set():
    options = TrainOptions()
    assert (options.time_limit_s, options.tracker_names) == (None, ())


@pytest.mark.parametrize("name", ["max_steps", "eval_every", "eval_rows", "save_every", "keep"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_counts_are_whole_numbers_of_at_least_one(name, value):
    assert refused(**{name: value}) == f"{name}={value!r} must be a whole number of at least 1."


def test_rows_to_generate_may_be_none():
    assert TrainOptions(generate_rows=0).generate_rows == 0
    assert refused(generate_rows=-1) == "generate_rows=-1 must be a whole number of at least 0."


@pytest.mark.parametrize("name", ["epochs", "lr", "decay"])
@pytest.mark.parametrize("value", [0, -0.5, math.nan, math.inf, "1e-3", True])
def test_what_must_be_above_zero_is(name, value):
    assert refused(**{name: value}).startswith(f"{name}={value!r} must be a number above 0")


@pytest.mark.parametrize("name", ["weight_decay", "clip_norm", "min_lr"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", None, False])
def test_what_may_be_zero_is_still_a_number(name, value):
    assert refused(**{name: value}).startswith(f"{name}={value!r} must be a number of at least 0")
    assert getattr(TrainOptions(**{name: 0}), name) == 0


@pytest.mark.parametrize("name", ["decay", "min_lr"])
def test_a_share_is_at_most_one(name):
    assert refused(**{name: 1.5}).endswith(" and at most 1.")
    assert getattr(TrainOptions(**{name: 1}), name) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("optimizer", "adamw, adafactor, adamw8bit"),
        ("schedule", "constant, linear, cosine, wsd"),
        ("backend", "auto, nccl, gloo"),
    ],
)
def test_an_unknown_word_is_refused_with_those_that_are_known(name, words):
    assert refused(**{name: "nonsense"}) == f"{name}='nonsense' must be one of {words}."


@pytest.mark.parametrize(
    ("warmup", "steps"),
    [(100, 100), ("100", 100), ("3%", 30), (" 2.5 % ", 25), ("0%", 0), (0, 0), (500, 500), (5000, 500), ("100%", 1000)],
)
def test_a_warmup_is_steps_or_a_share_of_the_run(warmup, steps):
    assert TrainOptions(warmup=warmup).warmup_steps(1000) == steps


@pytest.mark.parametrize("warmup", [-1, "-3", "1.5", "2 percent", "%", "", "101%", True])
def test_another_warmup_is_refused(warmup):
    assert refused(warmup=warmup).startswith(f"warmup={warmup!r} must be steps")


@pytest.mark.parametrize("name", ["resume", "skip_oversized"])
def test_a_switch_is_true_or_false(name):
    assert refused(**{name: "yes"}) == f"{name}='yes' must be True or False."


def test_a_plan_that_is_not_there_is_refused(tmp_path):
    assert "no.json" in refused(plan=str(tmp_path / "no.json"))
    (tmp_path / "yes.json").write_text("{}")
    TrainOptions(plan=str(tmp_path / "yes.json"))


def test_all_mistakes_are_reported_at_once():
    message = refused(max_steps=0, lr=-1, schedule="square", warmup="x", resume=1, time_limit="soon")
    assert all(f"{name}=" in message for name in ("max_steps", "lr", "schedule", "warmup", "resume", "time_limit"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h", 28800), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("2d", 172800), ("1.5h", 5400), (" 1H 30M ", 5400)],
)
def test_a_duration_is_read_as_people_write_it(text, seconds):
    assert parse_duration(text) == seconds == TrainOptions(time_limit=text).time_limit_s


@pytest.mark.parametrize("text", ["", "8", "h", "30m1h", "1h1h", "-1h", "8 hours", "1e3s", "0h0m"])
def test_what_is_not_a_duration_is_refused(text):
    with pytest.raises(BadOption, match="^time_limit="):
        parse_duration(text)


def test_a_mix_is_checked_at_once():
    assert "mix" in refused(mix="shuffle")
    assert TrainOptions(mix="window:5").mix == "window:5"


def test_trackers_are_names_separated_by_commas():
    assert TrainOptions(trackers=" wandb, ,mlflow ").tracker_names == ("wandb", "mlflow")
