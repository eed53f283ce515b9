"""Flags made from classes of options, a task's own among them, and who wins: a flag over a config file over a recipe."""

import json
import subprocess
import sys
from dataclasses import dataclass, fields

import pytest

from brimful.cli.app import main
from brimful.cli.flags import collect, generic_names, make_flags, parse_lengths, set_flags, task_flags
from brimful.cli.train import build_request, train_command
from brimful.errors import BadOption, TaskError
from brimful.planning.plan_options import PlanOptions
from brimful.tasks.language import LanguageOptions
from brimful.tasks.load import task_option_fields
from brimful.tasks.option_fields import OptionField, option_fields
from brimful.training.options import TrainOptions
from brimful.training.run import Request, RunFolder

OWNERS = [LanguageOptions, TrainOptions, PlanOptions]

MINE = """
from dataclasses import dataclass, field
from typing import Literal
from brimful import Task

@dataclass(frozen=True, kw_only=True)
class Options:
    depth: int = 2
    '''Layers of the network.'''
    kind: Literal["relu", "tanh"] = "relu"
    '''The activation.'''
    rate: float | None = None
    '''Dropout.'''
    wide: bool = False
    '''Use more units.'''
    start: str | None = field(default=None, metadata={"path": True})
    '''A file to start from.'''

class Mine(Task):
    Options = Options

print("printed while it is imported")
"""

OTHER = """
from dataclasses import dataclass
from brimful import Task

@dataclass(frozen=True, kw_only=True)
class Options:
    from_: str = ""
    '''Where to begin.'''

class Other(Task):
    Options = Options
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Some options."""

    from_: str | None = None
    """Where to begin:
    a folder."""
    rate: float = 0.5
    """How fast."""
    twice: bool = False
    """Do it twice."""

    @property
    def doubled(self) -> float:
        """No option."""
        return 2 * self.rate


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A task with options, in a file."""
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(MINE)
    return f"{path}:Mine"


def test_the_help_of_an_option_is_the_docstring_below_its_field():
    helps = {one.name: one.help for one in option_fields(Sample)}
    assert helps == {"from": "Where to begin: a folder.", "rate": "How fast.", "twice": "Do it twice."}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_option_has_its_help(owner):
    assert all(one.help for one in option_fields(owner))


@pytest.mark.parametrize("owner", OWNERS)
def test_no_two_classes_use_one_name(owner):
    others = {field.name for other in OWNERS if other is not owner for field in fields(other)}
    assert not others & {field.name for field in fields(owner)}


def test_only_flags_that_were_given_count():
    flags = make_flags({"Some": option_fields(Sample)})
    assert set_flags(flags()) == {}
    assert set_flags(flags(rate=0.5, twice=False, from_="x")) == {"from": "x", "rate": 0.5, "twice": False}


def test_a_task_cannot_take_the_name_of_a_generic_option():
    own = OptionField(name="lr", type=float, default=1.0, help="")
    with pytest.raises(TaskError, match="option lr is an option of Brimful itself"):
        train_command([own])


def test_the_options_of_a_file_come_from_a_process_of_its_own(mine):
    code = (
        f"import sys; from brimful.tasks.load import task_option_fields as f; print(*[repr(one) for one in f({mine!r})], sep='\\n');"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {one.name: one for one in task_option_fields(mine)}
    assert done.stdout.splitlines() == [repr(one) for one in found.values()]
    assert (found["depth"].type, found["depth"].default, found["depth"].help) == (int, 2, "Layers of the network.")
    assert (found["rate"].type, found["start"].path, found["wide"].default) == (float | None, True, False)
    assert "printed while it is imported" in done.stderr


@pytest.mark.parametrize(
    ("tokens", "asks"),
    [
        (["--lr", "1", "--no-cache", "--run=x"], False),
        (["--depth", "3"], True),
        (["--help"], True),
        (["-h"], True),
        (["--no-wide"], True),
    ],
)
def test_a_file_is_asked_only_for_help_and_unknown_flags(monkeypatch, mine, tokens, asks):
    calls = []
    monkeypatch.setattr("brimful.cli.flags.task_option_fields", lambda spec: calls.append(spec) or ())
    task_flags(["train", mine, "rows", *tokens])
    assert calls == ([mine] if asks else [])


def test_a_task_in_front_of_or_behind_other_flags_is_found(mine):
    assert [one.name for one in task_flags(["plan", "--fill", "0.5", mine, "--depth=3"])][:1] == ["depth"]
    assert task_flags(["machine", mine, "--depth", "3"]) == ()


def refused(capsys, *tokens):
    with pytest.raises(SystemExit) as left:
        main([*map(str, tokens)])
    output = capsys.readouterr()
    assert left.value.code == 2 and not output.out
    return output.err.strip().splitlines()[-1]


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_shows_the_tasks_own_options(capsys, mine, command):
    with pytest.raises(SystemExit):
        main([command, mine, "--help"])
        raise SystemExit(0)
    shown = capsys.readouterr().out
    assert "Options of the task" in shown
    assert all(words in shown for words in ("--depth", "Layers of the network. [default: 2]", "--wide", "relu, tanh"))


def test_an_unknown_flag_is_refused_with_a_suggestion(capsys, mine):
    assert "--dept" in (line := refused(capsys, "train", mine, "rows", "--dept", "3"))
    assert "--depth" in line


@pytest.mark.parametrize(("flag", "value"), [("--depth", "deep"), ("--kind", "sigmoid"), ("--rate", "x")])
def test_a_flag_of_the_wrong_type_is_refused(capsys, mine, flag, value):
    line = refused(capsys, "train", mine, "rows", flag, value)
    assert flag in line and value in line


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def options_of(path=None, recipe=None, task="sft", command="train", **flags):
    made = make_flags(
        {"All": [*option_fields(TrainOptions), *option_fields(PlanOptions), *option_fields(LanguageOptions)]}
    )
    return collect(command, made(**flags), config=path, recipe=recipe, task=lambda: task)


def test_a_file_gives_its_top_and_the_commands_own_table(config):
    path = config('max-steps = 5\nlr = 1\n[train]\nlr = 2\nmodel = "x"\n[plan]\nlr = 3\n')
    assert options_of(path).generic == {"max_steps": 5, "lr": 2}
    assert options_of(path).task == {"model": "x"}
    assert options_of(path, command="plan").generic == {"max_steps": 5, "lr": 3}


def test_a_file_may_hold_the_options_of_a_users_task(config, mine):
    assert options_of(config("depth = 3"), task=mine).task == {"depth": 3}


@pytest.mark.parametrize("text", ["learning-rate = 1", "[train]\nlearning-rate = 1", 'from_ = "x"'])
def test_an_unknown_key_is_refused(config, text):
    with pytest.raises(BadOption, match="config.toml has the unknown option (learning_rate|from_)"):
        options_of(config(text))


def test_a_key_is_called_like_the_flag_without_an_underscore_that_python_needs(config, tmp_path):
    (tmp_path / "other.py").write_text(OTHER)
    task = f"{tmp_path / 'other.py'}:Other"
    assert options_of(config('from = "x"'), task=task).task == {"from": "x"}
    with pytest.raises(BadOption, match="config.toml has the unknown option from_"):
        options_of(config('from_ = "x"'), task=task)


def test_an_unknown_key_has_a_suggestion(config, mine):
    with pytest.raises(BadOption, match="unknown option depht. Try: depth"):
        options_of(config("depht = 3"), task=mine)


@pytest.mark.parametrize("text", ["lr = ", "[train", "lr = 1\nlr = 2"])
def test_a_file_that_is_no_toml_is_refused(config, text):
    with pytest.raises(BadOption, match="config=.*config.toml cannot be read"):
        options_of(config(text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadOption, match="a.toml cannot be read"):
        options_of(tmp_path / "a.toml")
    with pytest.raises(BadOption, match="no.toml cannot be read: No such file or directory"):
        options_of(tmp_path / "no.toml")


@pytest.mark.parametrize("text", ["[trian]\nlr = 1", "train = 1"])
def test_a_misspelt_table_is_refused(config, text):
    with pytest.raises(BadOption):
        options_of(config(text))


def test_an_unknown_recipe_is_refused_with_those_there_are():
    with pytest.raises(BadOption, match="recipe='smal' is unknown. Try: demo, fast, low-memory, pretrain, small"):
        options_of(recipe="smal")


def test_a_flag_wins_over_the_file_and_the_file_over_the_recipe(config):
    recipe = options_of(recipe="fast").generic
    path = config("epochs = 7\n[train]\nglobal-batch = 33\nwarmup = 5\n")
    found = options_of(path, "fast", global_batch=44).generic
    assert (recipe["epochs"], recipe["global_batch"]) != (7, 44)
    assert (found["global_batch"], found["epochs"], found["warmup"]) == (44, 7, 5)
    assert found["lr"] == recipe["lr"] and found["mix"] == recipe["mix"]


def test_a_false_that_was_given_wins_over_a_file(config):
    assert options_of(config("cache = true"), cache=False).generic == {"cache": False}


def test_lengths_come_as_text_or_as_a_list():
    assert parse_lengths("256,320") == parse_lengths([256, 320]) == (256, 320)
    with pytest.raises(BadOption, match="lengths=long must be whole numbers"):
        parse_lengths("long")


def request(mine, tmp_path, config=None, **flags):
    made = make_flags({"All": [*option_fields(TrainOptions), *option_fields(PlanOptions), *task_option_fields(mine)]})
    flags = made(run=str(tmp_path / "run"), **flags)
    return build_request(mine, "rows", flags, recipe=None, config=config, demo_data=False)


def test_only_what_was_given_is_in_the_request(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").touch()
    found = request(mine, tmp_path, lr=0.1, depth=3, start="weights")
    assert (found.options, found.task_options) == ({"lr": 0.1}, {"depth": 3, "start": str(tmp_path / "weights")})
    assert json.loads(json.dumps(found.to_json()))["task_options"]["depth"] == 3
    assert request(mine, tmp_path).task_options == {}


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_value_from_a_file_is_named_with_the_file_and_not_as_a_flag(capsys, mine, config, command):
    path = config('fill = 2\ndepth = "deep"\n')
    line = refused(capsys, command, mine, "rows", "--config", str(path))
    assert f"fill = 2 in {path} must be above 0" in line
    assert "--fill" not in line and "--depth" not in line


def test_a_flag_that_wins_over_a_file_is_named_as_a_flag(capsys, mine, config):
    line = refused(capsys, "train", mine, "rows", "--config", str(config("fill = 2")), "--fill", "3")
    assert "--fill 3.0 must be above 0" in line and "config.toml" not in line


def test_a_value_of_a_recipe_that_a_resumed_run_cannot_take_is_named_with_the_recipe(capsys, mine, tmp_path):
    RunFolder(tmp_path / "run").create()
    RunFolder(tmp_path / "run").write_request(Request(task="sft", data="rows", run=str(tmp_path / "run")))
    line = refused(capsys, "train", "--run", str(tmp_path / "run"), "--resume", "--recipe", "small")
    assert "seed = 23333 in recipe small (it was 0)" in line


def test_a_run_keeps_where_its_options_come_from(mine, tmp_path, config):
    path = config("lr = 0.1\ndepth = 3\nfill = 0.5")
    assert request(mine, tmp_path, path, fill=0.7).origins == {"lr": str(path), "depth": str(path)}


def test_what_a_plan_has_decided_is_dropped_from_a_file_with_a_word(capsys, mine, tmp_path, config):
    (tmp_path / "plan.json").write_text("{}")
    found = request(mine, tmp_path, config("workers = 0\nlr = 0.1"), plan=str(tmp_path / "plan.json"))
    assert "workers" not in found.options and found.options["lr"] == 0.1
    assert "workers" in (said := capsys.readouterr().err) and "config.toml" in said
    with pytest.raises(BadOption, match="plan= cannot be combined with workers="):
        request(mine, tmp_path, plan=str(tmp_path / "plan.json"), workers=0)


def test_a_value_of_the_wrong_type_in_a_file_is_refused(mine, tmp_path, config):
    with pytest.raises(
        BadOption, match=r'depth = "deep" in .* must be a whole number. kind = "x" in .* one of relu, tanh.'
    ):
        request(mine, tmp_path, config('depth = "deep"\nkind = "x"'))


def test_the_generic_options_are_frozen():
    """A name that a script relies on does not change by accident, and none belongs to a particular task."""
    assert sorted(generic_names()) == [
        "allow_inexact", "backend", "best", "cache", "checkpointing", "clip_norm", "compile", "cuda_graphs", "cudnn_attention", "decay",
        "deterministic", "device", "ema",
        "epochs", "eval_every", "eval_rows", "fill", "generate_rows", "global_batch", "host_limit", "keep", "layout", "lengths", "lr",
        "max_steps", "memory_limit", "micro_batch", "min_lr", "mix", "optimizer", "patience", "pin_memory", "plan", "plan_seconds", "precision",
        "prefetch", "processes", "resume", "rollback", "run", "save_every", "schedule", "seed", "skip_oversized", "table", "time_limit",
        "trackers", "valid", "warmup", "weight_decay", "weights", "workers",
    ]  # fmt: skip
