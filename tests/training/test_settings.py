"""What can be asked of a run: every nonsense is named with its flag and a way out, all of it at once."""

import math
import subprocess
import sys

import pytest

from brimful.errors import BadOption
from brimful.training.options import TrainOptions


def refused(**asked):
    with pytest.raises(BadOption) as told:
        TrainOptions.of(asked)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_nothing_has_to_be_asked_for():
    options = TrainOptions()
    assert (options.hours, options.limit_s, options.tracker_names) == (None, None, ())


@pytest.mark.parametrize("name", ["max_steps", "eval_every", "eval_rows", "save_every", "keep", "gpus"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_what_is_counted_is_a_whole_number_of_at_least_one(name, value):
    assert refused(**{name: value}) == (f"--{name.replace('_', '-')} {value!r}: give a whole number of at least 1")


def test_no_answers_at_all_may_be_asked_for():
    assert TrainOptions(generate_rows=0).generate_rows == 0
    assert refused(generate_rows=-1) == "--generate-rows -1: give a whole number of at least 0"


@pytest.mark.parametrize("name", ["epochs", "lr", "decay"])
@pytest.mark.parametrize("value", [0, -0.5, math.nan, math.inf, "1e-3", True])
def test_what_must_be_above_zero_is(name, value):
    assert refused(**{name: value}).startswith(f"--{name} {value!r}: give a number above 0")


@pytest.mark.parametrize("name", ["weight_decay", "clip_norm", "min_lr"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", None, False])
def test_what_may_be_zero_is_still_a_number(name, value):
    assert refused(**{name: value}).startswith(f"--{name.replace('_', '-')} {value!r}: give a number of at least 0")
    assert getattr(TrainOptions(**{name: 0}), name) == 0


@pytest.mark.parametrize(("name", "flag"), [("decay", "--decay"), ("min_lr", "--min-lr")])
def test_a_share_is_at_most_the_whole(name, flag):
    assert refused(**{name: 1.5}).startswith(f"{flag} 1.5: ") and refused(**{name: 1.5}).endswith(", up to 1")
    assert getattr(TrainOptions(**{name: 1}), name) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("optimizer", "adamw, adafactor, adamw8bit"),
        ("schedule", "constant, linear, cosine, wsd"),
        ("backend", "auto, nccl, gloo"),
    ],
)
def test_a_word_that_is_none_is_told_the_words_there_are(name, words):
    assert refused(**{name: "nonsense"}) == f"--{name} nonsense: one of {words}"


@pytest.mark.parametrize("warmup", [0, 100, "100", "2%", "2.5%", " 3 % "])
def test_a_warm_up_is_steps_or_a_share(warmup):
    assert TrainOptions(warmup=warmup).warmup == warmup


@pytest.mark.parametrize("warmup", [-1, "-3", "1.5", "2 percent", "%", "", "101%", True])
def test_another_warm_up_is_refused(warmup):
    assert refused(warmup=warmup) == (
        f"--warmup {warmup!r}: give steps, such as 100, or a share of the run, such as 2%"
    )


@pytest.mark.parametrize("name", ["resume", "skip_oversized"])
def test_a_switch_is_true_or_false(name):
    assert refused(**{name: "yes"}) == f"--{name.replace('_', '-')} 'yes': give true or false"


def test_a_plan_that_is_not_there_is_refused(tmp_path):
    assert refused(plan=str(tmp_path / "no.json")) == f"--plan {tmp_path / 'no.json'}: there is no such file"
    (tmp_path / "yes.json").write_text("{}")
    TrainOptions(plan=str(tmp_path / "yes.json"))


def test_all_mistakes_are_told_at_once():
    told = refused(max_steps=0, lr=-1, schedule="square", warmup="x", resume=1)
    assert [part.split(" ")[0] for part in told.split("; ")] == [
        "--max-steps",
        "--lr",
        "--schedule",
        "--warmup",
        "--resume",
    ]


def test_an_unknown_word_is_named_with_those_that_are_known():
    told = refused(learning_rate=1, steps=2)
    assert told.startswith("unknown option 'learning_rate', 'steps'; train takes run, resume, max_steps, ")


def test_times_are_read_when_they_are_asked_for():
    options = TrainOptions(time_limit="1h30m", window="21:00-09:00")
    assert options.limit_s == 5400
    assert str(options.hours) == "21:00-09:00"


@pytest.mark.parametrize(("name", "flag"), [("time_limit", "--time-limit"), ("window", "--window")])
def test_a_time_that_is_none_is_refused_at_once(name, flag):
    assert refused(**{name: "soon"}).startswith(f"{flag} 'soon'")


def test_a_mix_that_is_none_is_refused_at_once():
    assert refused(mix="shuffle").startswith("--mix shuffle")
    assert TrainOptions(mix="window:5").mix == "window:5"


def test_trackers_are_names_with_commas_between():
    assert TrainOptions(trackers=" wandb, ,mlflow ").tracker_names == ("wandb", "mlflow")


def test_what_the_parent_reads_imports_no_torch():
    parts = ("settings", "folder", "signals", "schedule")
    script = (
        f"import sys\nfor part in {parts}: __import__('brimful.train.' + part)\n"
        "sys.modules['brimful.training.options'].TrainOptions(mix='window:5', window='21-9')\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
