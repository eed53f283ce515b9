"""`brimful train` as a user types it: runs, resumes, and every mistake in one sentence."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brimful.cli.app import main
from brimful.cli.train import KNOWN, _request
from brimful.errors import BadOption
from brimful.training.events import last_steps, read_events
from brimful.training.run import RunFolder
from tests.training import runs

ROOT = Path(__file__).parents[2]
TASK = f"{ROOT / 'tests' / 'train' / 'runs.py'}:Run"
DEVICE = ["--device", "cpu"]


def brimful(*words, launcher=("-m", "brimful"), **how) -> subprocess.CompletedProcess:
    """The program in a process of its own, as from a shell: a Ctrl-C is not ignored."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *launcher, *map(str, words)], capture_output=True, text=True, env=environment, timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **how,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return runs.plan_file(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, plan):
    """A run of four steps, and what it printed."""
    run = tmp_path_factory.mktemp("cli") / "run"
    words = ["--run", run, "--plan", plan, "--max-steps", 4, "--save-every", 2, "--lr", 0.01, *DEVICE, "--json"]
    return run, brimful("train", TASK, "rows", *words)


def refused(capsys, *words) -> str:
    """The one sentence of a mistake."""
    with pytest.raises(SystemExit) as left:
        main(["train", *map(str, words)])
    said = capsys.readouterr()
    assert left.value.code == 2 and not said.out
    (line,) = said.err.strip().splitlines()
    return line


def test_a_run_prints_one_json_object_and_nothing_else(trained):
    run, done = trained
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["run"] == str(run) and result["reason"] == "finished" and result["step"] == 4
    assert (run / "model" / "model.safetensors").is_file()


def test_the_plan_and_the_steps_are_told_as_they_come(trained):
    _, done = trained
    assert "because" in done.stderr and "step 4/4" in done.stderr


def test_a_resume_needs_nothing_but_the_folder(trained):
    run, _ = trained
    done = brimful("train", "--run", run, "--resume", "--max-steps", 6)
    assert done.returncode == 0, done.stderr
    assert [event["step"] for event in last_steps(read_events(run / "events.jsonl"))] == [1, 2, 3, 4, 5, 6]
    assert "going on after step 4" in done.stderr
    names = [choice["name"] for choice in json.loads((run / "plan.json").read_text())["choices"]]
    assert len(names) == len(set(names)) and {"steps", "schedule", "micro_batch"} <= set(names)


def test_ctrl_c_saves_leaves_with_0_and_says_how_to_go_on(tmp_path, plan):
    run, environment = tmp_path / "run", {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = ["train", TASK, "rows", "--run", run, "--plan", plan, "--max-steps", 100_000, *DEVICE]
    process = subprocess.Popen(
        [sys.executable, "-m", "brimful", *map(str, words)], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    events, end = run / "events.jsonl", time.monotonic() + 60
    while not (events.exists() and b'"step": 3' in events.read_bytes()) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"brimful train --run {run} --resume" in out
    step = list(read_events(events))[-1]["step"]
    assert (run / "checkpoints" / f"step-{step:08}" / "manifest.json").is_file()


def test_under_torchrun_the_same_command_trains_on_all_processes(tmp_path):
    run, plan = tmp_path / "run", runs.plan_file(tmp_path, 2)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "brimful"]
    words = ["train", TASK, "rows", "--run-dir", run, "--plan", plan, "--max-steps", 3, *DEVICE]
    done = brimful(*words, launcher=launcher)
    assert done.returncode == 0, done.stderr
    steps = [event["step"] for event in read_events(run / "events.jsonl") if event["event"] == "step"]
    assert steps == [1, 2, 3]


def test_gradients_that_are_no_numbers_end_in_one_sentence(tmp_path, plan):
    words = ["--run", tmp_path / "run", "--plan", plan, "--lr", 1e30, "--clip-norm", 0, "--max-steps", 40]
    done = brimful("train", TASK, "rows", *words, *DEVICE)
    assert done.returncode == 2
    assert re.search(
        r"brimful: the gradients' norm is (nan|inf).*lower the learning rate", done.stderr.splitlines()[-1]
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name the task"),
        ([TASK], "name the rows"),
        ([TASK, "rows", "--resume", "--run", "nowhere"], "nothing to resume in nowhere"),
        ([TASK, "rows", "--resume"], "there is no run of"),
        ([TASK, "rows", "--max-steps", "0"], "--max-steps 0"),
        ([TASK, "rows", "--epochs", "-1", "--global-batch", "-4"], "--epochs -1"),
        ([TASK, "rows", "--epochs", "-1", "--global-batch", "-4"], "--global-batch -4"),
        ([TASK, "rows", "--mix", "window:0"], "--mix window:0"),
        ([TASK, "rows", "--warmup", "200%"], "--warmup"),
        ([TASK, "rows", "--schedule", "staircase"], "staircase"),
        ([TASK, "rows", "--window", "25:00-3:00"], "--window"),
        ([TASK, "rows", "--time-limit", "soon"], "--time-limit"),
        ([TASK, "rows", "--recipe", "soup"], "there are demo, fast, low-memory, pretrain, small"),
        ([TASK, "rows", "--plan", "no.json"], "--plan no.json"),
        ([TASK, "rows", "--valid", "no.jsonl"], "--valid no.jsonl: there is no such file"),
        ([TASK, "rows", "--gpus", "2", "--processes", "3"], "they mean the same"),
        ([TASK, "rows", "--demo-data"], "leave rows out"),
        ([TASK, "rows", "--wrong", "1"], "--wrong"),
        ([TASK, "a.jsonl", "b.jsonl", "c.jsonl"], "b.jsonl c.jsonl came after a.jsonl: put the files into a folder"),
        ([TASK, "rows", "--best", "bleu"], "--best: nothing is evaluated without --valid"),
        ([TASK, "rows", "--recipe", "small", "--eval-every", "5"], "--eval-every: nothing is evaluated without --valid"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_before_anything_is_started(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, *words)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_run_is_not_trained_over(trained, capsys):
    run, _ = trained
    assert "has a run in it already" in refused(capsys, TASK, "rows", "--run", run)


def test_a_folder_in_use_is_left_alone(trained, capsys):
    from brimful.training.run import RunLock

    run, _ = trained
    with RunLock(run):
        assert "is in use by another process" in refused(capsys, "--run", run, "--resume")


def test_what_makes_a_run_the_run_it_is_cannot_change(trained, capsys):
    run, _ = trained
    before = (run / "run.json").read_text()
    assert "--seed 3 (it was 0)" in refused(capsys, "--run", run, "--resume", "--seed", 3)
    assert "is a run of" in refused(capsys, "chatlm-sft", "--run", run, "--resume")
    assert (run / "run.json").read_text() == before


def test_a_plan_and_what_it_decides_are_not_given_together(plan, capsys, tmp_path):
    words = ["--plan", plan, "--micro-batch", 2, "--run", tmp_path / "run"]
    assert "--plan with --micro-batch" in refused(capsys, TASK, "rows", *words)


def test_a_lost_request_can_be_said_again(trained, capsys):
    run, _ = trained
    kept = (run / "run.json").read_text()
    (run / "run.json").write_text("{")
    try:
        assert "give task, data and options again" in refused(capsys, "--run", run, "--resume")
        done = brimful("train", TASK, "rows", "--run", run, "--resume", "--max-steps", 7, *DEVICE, "--lr", 0.01)
        assert done.returncode == 0, done.stderr
    finally:
        (run / "run.json").write_text(kept)


@pytest.fixture
def bare(tmp_path):
    """A run with a model and packed rows of its own; all that it was made from is gone."""
    run = tmp_path / "runs" / "s"
    for place in ("model", "checkpoints/step-00000002", "data/train-0", "data/valid-0"):
        (run / place).mkdir(parents=True)
    gone = {"valid": "valid.jsonl", "from": "models/v1/base", "tokenizer": "models/v1/tokenizer"}
    asked = {name: str(tmp_path / path) for name, path in gone.items()}
    request = {"task": "chatlm-sft", "data": str(tmp_path / "rows.jsonl"), "asked": {**asked, "max_tokens": 256}}
    RunFolder(run).remember({**request, "prepared": {"data": "data/train-0", "valid": "data/valid-0"}})
    return run


def resumed(run, task=None, data=None, **said):
    return _request(task, data, None, None, False, {"run": str(run), "resume": True, **said})


def test_a_run_that_has_all_of_its_own_is_resumed_from_its_folder_alone(bare):
    request = resumed(bare)
    assert request["data"] == str(bare / "data" / "train-0")
    assert request["asked"]["valid"] == str(bare / "data" / "valid-0")


def test_packed_rows_serve_where_the_tokenizer_alone_is_gone(bare):
    (bare.parents[1] / "rows.jsonl").touch()
    assert resumed(bare)["data"] == str(bare / "data" / "train-0")


def test_a_run_that_was_copied_has_its_own_rows(bare):
    request = json.loads((bare / "run.json").read_text())
    (bare.parent / "other" / "train-0").mkdir(parents=True)
    RunFolder(bare).remember({**request, "data": str(bare.parent / "other" / "train-0")})
    assert resumed(bare)["data"] == str(bare / "data" / "train-0")


def test_without_a_model_of_its_own_a_run_needs_the_one_to_begin_with(bare):
    (bare / "model").rmdir()
    with pytest.raises(BadOption, match="^--from .*/models/v1/base: there is no such file or folder$"):
        resumed(bare)
    (bare.parents[1] / "v2").mkdir()
    assert resumed(bare, **{"from": str(bare.parents[1] / "v2")})["asked"]["from"].endswith("v2")


def test_what_is_named_now_and_not_there_is_refused(bare):
    with pytest.raises(BadOption, match="--valid new.jsonl: there is no such file"):
        resumed(bare, valid="new.jsonl")


def test_a_recipe_that_evaluates_says_so_where_nothing_is_evaluated(capsys, tmp_path):
    _request(TASK, "rows", "pretrain", None, False, {"run": str(tmp_path / "run")})
    assert "nothing is evaluated" in capsys.readouterr().err


def test_a_task_of_one_s_own_may_be_named_by_another_path(bare):
    request = json.loads((bare / "run.json").read_text())
    RunFolder(bare).remember({**request, "task": "mine.py:Tagger"})
    assert resumed(bare, "../mine.py:Tagger")["task"] == "../mine.py:Tagger"
    with pytest.raises(BadOption, match="is a run of mine.py:Tagger, not of mine.py:Other"):
        resumed(bare, "mine.py:Other")


def test_the_options_are_frozen():
    """A name that a script relies on does not change by accident."""
    assert sorted(set(KNOWN)) == [
        "allow_inexact", "backend", "best", "cache", "checkpointing", "clip_norm", "columns", "cudnn_attention", "decay", "device",
        "epochs", "eval_every", "eval_rows", "fill", "freeze", "from", "generate_rows", "global_batch", "gpus",
        "host_limit", "keep", "label_smoothing", "lengths", "lr", "max_steps", "max_tokens", "memory_limit",
        "micro_batch", "min_lr", "mix", "optimizer", "pin_memory", "plan", "precision", "prefetch", "processes",
        "random_weights", "resume", "run", "save_every", "schedule", "seed", "size", "skip_oversized", "time_limit",
        "tokenizer", "trackers", "valid", "warmup", "weight_decay", "window", "workers",
    ]  # fmt: skip


def test_every_option_is_a_flag(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
        raise SystemExit(0)
    shown = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]+", capsys.readouterr().out))
    assert {f"--{name.replace('_', '-')}" for name in KNOWN} | {
        "--run-dir",
        "--recipe",
        "--config",
        "--demo-data",
    } <= shown
