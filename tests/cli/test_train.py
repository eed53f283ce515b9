"""`brimful train` as a user types it: runs, resumes, and every mistake in one message."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from brimful.cli.app import main
from brimful.cli.flags import make_flags
from brimful.cli.train import build_request
from brimful.cli.train_process import run_request
from brimful.errors import BadOption, BadRun
from brimful.planning.plan_options import PlanOptions
from brimful.tasks.option_fields import option_fields
from brimful.training.events import last_steps, read_events
from brimful.training.options import TrainOptions
from brimful.training.plan_history import KeptPlan, PlanHistory
from brimful.training.run import Request, RunFolder, RunLock
from tests.training import runs

ROOT = Path(__file__).parents[2]
TASK = f"{ROOT / 'tests' / 'training' / 'runs.py'}:Run"
DEVICE = ["--device", "cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}

DEEP = """
from dataclasses import dataclass
import torch
from brimful import Task

@dataclass(frozen=True, kw_only=True)
class Options:
    depth: int = 2
    '''Layers of the network.'''

class Deep(Task):
    Options = Options
    global_batch = 8

    def model(self):
        return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(self.options.depth)))

    def loss(self, model, batch):
        return model(batch).square().mean()

    def rows(self, data):
        return list(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)))
"""


def brimful(*words, launcher=("-m", "brimful"), **how) -> subprocess.CompletedProcess:
    """The program in a process of its own, as from a shell: a Ctrl-C is not ignored."""
    return subprocess.run(
        [sys.executable, *launcher, *map(str, words)], capture_output=True, text=True, env=ENVIRONMENT, timeout=120,
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
    """The one message of a mistake."""
    with pytest.raises(SystemExit) as left:
        main(["train", *map(str, words)])
    output = capsys.readouterr()
    assert left.value.code == 2 and not output.out
    (line,) = output.err.strip().splitlines()
    return line


def test_a_run_prints_one_json_object_and_nothing_else(trained):
    run, done = trained
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["run"] == str(run) and result["reason"] == "finished" and result["step"] == 4
    assert (run / "model" / "model.safetensors").is_file()


def test_the_plan_and_the_steps_are_shown_as_they_come(trained):
    _, done = trained
    assert "reason" in done.stderr and "step 4/4" in done.stderr


def test_a_resume_needs_only_the_folder(trained):
    run, _ = trained
    done = brimful("train", "--run", run, "--resume", "--max-steps", 6)
    assert done.returncode == 0, done.stderr
    assert [event["step"] for event in last_steps(read_events(run / "events.jsonl"))] == [1, 2, 3, 4, 5, 6]
    assert "continuing after step 4" in done.stderr
    assert done.stdout == f"trained 6 steps\nSaved to {run / 'model'}\n"
    names = [choice["name"] for choice in json.loads((run / "plan.json").read_text())["choices"]]
    assert len(names) == len(set(names)) and {"steps", "schedule", "micro_batch"} <= set(names)


DRY = ["--micro-batch", 8, "--max-steps", 3, "--no-cache", *DEVICE]


@pytest.fixture
def deep(tmp_path):
    (tmp_path / "deep.py").write_text(DEEP)
    return f"{tmp_path}/deep.py:Deep"


def test_a_dry_run_prints_the_whole_plan_and_leaves_nothing(deep, tmp_path):
    done = brimful("train", deep, "rows", "--run", tmp_path / "runs" / "a", *DRY, "--dry-run")
    assert done.returncode == 0, done.stderr
    for part in ("micro batch", "optimizer", "schedule", "steps", "host RAM", "time", "3 steps, 3 per epoch; "):
        assert part in done.stdout
    assert "warning: the run has only 3 updates" in done.stdout and "--max-steps" in done.stdout
    assert done.stderr.splitlines()[-1] == "brimful: nothing was trained (--dry-run)"
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_the_plan_as_json_and_nothing_else(deep, tmp_path):
    done = brimful("train", deep, "rows", "--run", tmp_path / "run", *DRY, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["run_time"]["steps"] == 3 and plan["number"] is None and plan["experiment"] == "new"


def test_data_that_a_dry_run_has_prepared_stay_for_the_run(deep, tmp_path):
    prepare = """
    def prepare(self, data, folder, progress, like=None, name="train"):
        folder.mkdir(exist_ok=True)
        with (folder / "made").open("a") as made:
            made.write("once")
        return data
"""
    (tmp_path / "deep.py").write_text(DEEP + prepare)
    run = tmp_path / "run"
    done = brimful("train", deep, "rows", "--run", run, *DRY, "--dry-run")
    assert (
        f"nothing was trained (--dry-run). The prepared data stay in {run}/data; --run {run} uses them" in done.stderr
    )
    assert {path.name for path in run.iterdir()} == {"data", "lock"}
    assert brimful("train", deep, "rows", "--run", run, *DRY).returncode == 0
    assert (run / "data" / "made").read_text() == "onceonce"


def test_a_dry_run_that_cannot_work_is_one_message_and_leaves_nothing(deep, tmp_path):
    done = brimful("train", deep, "rows", "--run", tmp_path / "run", *DRY, "--dry-run", "--memory-limit", "1KiB")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines()[-1].startswith("brimful: error B301: 1 row needs ")
    assert not (tmp_path / "run").exists()


def test_a_launcher_can_run_dry(tmp_path):
    plan = runs.plan_file(tmp_path, 2)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "brimful"]
    words = ["train", TASK, "rows", "--run-dir", tmp_path / "run", "--plan", plan, "--max-steps", 3, *DEVICE]
    done = brimful(*words, "--dry-run", "--json", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["processes"] == 2
    assert not (tmp_path / "run").exists()


def plans_of(run):
    events = [event for event in read_events(run / "events.jsonl") if event["event"] == "plan"]
    return [(event["number"], event["global_batch"], event["micro_batch"]) for event in events]


def test_a_run_goes_back_to_its_plan_before(deep, tmp_path):
    run = tmp_path / "run"
    assert brimful("train", deep, "rows", "--run", run, *DRY).returncode == 0
    words = ["--global-batch", 6, "--micro-batch", 3, "--max-steps", 4]
    done = brimful("train", "--run", run, "--resume", *words)
    assert "  global batch  8 → 6" in done.stderr
    assert "another experiment from here on: a step has 6 rows instead of 8" in done.stderr
    assert f"To go back: brimful train --run {run} --rollback 1" in done.stderr
    done = brimful("train", "--run", run, "--rollback", "--max-steps", 5)
    assert done.returncode == 0, done.stderr
    assert plans_of(run) == [(1, 8, 8), (2, 6, 3), (1, 8, 8)]
    assert "making a new plan" not in done.stderr
    assert RunFolder(run).last_step() == 5
    options = json.loads((run / "run.json").read_text())["options"]
    assert options == {"micro_batch": 8, "max_steps": 5, "device": "cpu", "cache": False}


def test_a_flag_wins_over_the_plan_that_a_run_goes_back_to(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    folder.write_request(Request(task=TASK, data="rows", run=str(tmp_path), options={"lr": 0.3, "micro_batch": 3}))
    for number in (1, 2):
        options = {"lr": number / 10, "micro_batch": number}
        kept = KeptPlan(
            number=number, plan={"choices": []}, options=options, origins={"lr": "recipe x"}, plan_for={"a": number}
        )
        PlanHistory(folder).keep(kept)
    back = request(tmp_path, rollback=True, micro_batch=7)
    assert (back.rollback, back.resume, back.plan_for) == (1, True, {"a": 1})
    assert (back.options, back.origins) == ({"lr": 0.1, "micro_batch": 7}, {"lr": "recipe x"})
    with pytest.raises(BadOption, match="rollback= cannot be combined with plan="):
        request(tmp_path, rollback=2, plan=str(tmp_path / "run.json"))


def test_a_users_task_has_options_of_its_own_and_a_resume_keeps_them(tmp_path, capsys):
    (tmp_path / "deep.py").write_text(DEEP)
    run, words = tmp_path / "run", ["--micro-batch", 8, *DEVICE]
    done = brimful("train", f"{tmp_path}/deep.py:Deep", "rows", "--depth", 3, "--run", run, "--max-steps", 1, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "run.json").read_text())["task_options"] == {"depth": 3}
    assert "cannot change --depth 4 (it was 3)" in refused(capsys, "--run", run, "--resume", "--depth", 4)
    done = brimful("train", "--run", run, "--resume", "--max-steps", 2)
    assert done.returncode == 0, done.stderr  # with two layers, its checkpoint would not fit the model
    assert RunFolder(run).last_step() == 2


def test_the_log_says_how_a_killed_process_ended(tmp_path, plan):
    run = tmp_path / "run"
    words = ["train", TASK, "rows", "--run", run, "--plan", plan, "--max-steps", 100_000, *DEVICE]
    process = subprocess.Popen(
        [sys.executable, "-m", "brimful", *map(str, words)], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    events, end = run / "events.jsonl", time.monotonic() + 60
    while not (events.exists() and b'"step": 3' in events.read_bytes()) and time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    pid = next(event["pid"] for event in read_events(events) if event["event"] == "begin")
    os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert f"the training process (pid {pid}) was killed by SIGKILL" in (run / "log.txt").read_text()


def test_an_error_of_the_task_after_a_checkpoint_is_to_be_fixed_before_the_run_is_continued(tmp_path):
    run, task = tmp_path / "run", tmp_path / "deep.py"
    saved = f"        assert not list(Path({str(run)!r}).glob('checkpoints/step-*')), 'no more'\n"
    task.write_text(
        "from pathlib import Path\n"
        + DEEP.replace("        return model(batch)", f"{saved}        return model(batch)")
    )
    words = [
        "--run",
        run,
        "--max-steps",
        4,
        "--save-every",
        2,
        "--micro-batch",
        8,
        "--workers",
        0,
        "--no-cache",
        *DEVICE,
    ]
    result = brimful("train", f"{task}:Deep", "rows", *words)
    assert result.returncode == 2 and "AssertionError: no more" in result.stderr
    assert f"Fix this first, then continue: brimful train --run {run} --resume" in " ".join(result.stderr.split())


def test_ctrl_c_saves_exits_with_0_and_prints_how_to_continue(tmp_path, plan):
    run = tmp_path / "run"
    words = ["train", TASK, "rows", "--run", run, "--plan", plan, "--max-steps", 100_000, *DEVICE]
    process = subprocess.Popen(
        [sys.executable, "-m", "brimful", *map(str, words)], env=ENVIRONMENT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    events, end = run / "events.jsonl", time.monotonic() + 60
    while not (events.exists() and b'"step": 3' in events.read_bytes()) and time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"To continue: brimful train --run {run} --resume" in out
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


def test_gradients_that_are_not_numbers_end_in_one_message(tmp_path, plan):
    words = ["--run", tmp_path / "run", "--plan", plan, "--lr", 1e30, "--clip-norm", 0, "--max-steps", 40]
    done = brimful("train", TASK, "rows", *words, *DEVICE)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("brimful: error B401: ") and "learning rate" in last and "--resume" not in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "TASK is missing"),
        ([TASK], "DATA is missing"),
        (["--resume", "--run", "nowhere"], "nowhere has nothing to resume"),
        ([TASK, "--resume", "--run", "nowhere"], "nowhere has nothing to resume"),
        ([TASK, "rows", "--resume"], "runs/ has no run of"),
        (["--rollback", "--run", "nowhere"], "nowhere has no plan to go back to: there is no such folder. Try: --run"),
        ([TASK, "rows", "--rollback", "2", "--run", "nowhere"], "nowhere has no plan to go back to"),
        (["--rollback"], "runs/ has no run to resume"),
        (["--rollback", "0", "--run", "nowhere"], "--rollback 0 must be the number of a plan"),
        (["--rollback=some", "--run", "nowhere"], "--rollback some must be a whole number"),
        (["chatlm-stf", "rows"], "Try: sft"),
        ([TASK, "rows", "--max-steps", "0"], "--max-steps 0"),
        ([TASK, "rows", "--epochs", "-1", "--global-batch", "-4"], "--epochs -1"),
        ([TASK, "rows", "--epochs", "-1", "--global-batch", "-4"], "--global-batch -4"),
        ([TASK, "rows", "--mix", "window:0"], "--mix"),
        ([TASK, "rows", "--warmup", "200%"], "--warmup"),
        ([TASK, "rows", "--schedule", "staircase"], "staircase"),
        ([TASK, "rows", "--time-limit", "soon"], "--time-limit"),
        ([TASK, "rows", "--recipe", "soup"], "Try: demo, fast, low-memory, pretrain, small"),
        ([TASK, "rows", "--plan", "no.json"], "--plan no.json"),
        (["sft", "rows", "--valid", "no.jsonl"], "--valid no.jsonl does not exist"),
        ([TASK, "rows", "--demo-data"], "--demo-data cannot be combined with rows"),
        (["sft", "rows", "--wrong", "1"], "--wrong"),
        ([TASK, "a.jsonl", "b.jsonl", "c.jsonl"], "b.jsonl c.jsonl came after a.jsonl. Try: a folder"),
        ([TASK, "rows", "--best", "bleu"], "--best needs rows to evaluate on"),
        (["sft", "rows", "--recipe", "small", "--eval-every", "5"], "--eval-every needs rows to evaluate on"),
        (["sft", "rows", "--model", "nowhere"], "--model nowhere does not exist"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message_before_anything_is_started(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *words)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_run_is_not_trained_over(trained, capsys):
    run, _ = trained
    assert "already has a run in it" in refused(capsys, TASK, "rows", "--run", run)


def test_a_folder_in_use_is_left_alone(trained, capsys):
    run, _ = trained
    with RunLock(run):
        assert "is in use by another process" in refused(capsys, "--run", run, "--resume")


def test_what_makes_a_run_the_run_it_is_cannot_change(trained, capsys):
    run, _ = trained
    before = (run / "run.json").read_text()
    assert "--seed 3 (it was 0)" in refused(capsys, "--run", run, "--resume", "--seed", 3)
    assert "is a run of" in refused(capsys, "sft", "--run", run, "--resume")
    assert (run / "run.json").read_text() == before


def test_a_plan_and_what_it_decides_are_not_given_together(plan, capsys, tmp_path):
    words = ["--plan", plan, "--micro-batch", 2, "--run", tmp_path / "run"]
    assert "--plan cannot be combined with --micro-batch" in refused(capsys, TASK, "rows", *words)


def request(run, task=None, data=None, *, recipe=None, **flags) -> Request:
    """The request of this command line."""
    made = make_flags({"All": [*option_fields(TrainOptions), *option_fields(PlanOptions)]})
    flags = made(run=str(run), **flags)
    return build_request(task, data, flags, recipe=recipe, config=None, demo_data=False)


def test_a_lost_request_can_be_given_again(tmp_path):
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(BadRun, match="task, data and all options again"):
        request(tmp_path, resume=True)
    found = request(tmp_path, TASK, "rows", resume=True, lr=0.01)
    assert (found.task, found.data, found.resume, found.options) == (TASK, "rows", True, {"lr": 0.01})


def test_notes_name_flags(tmp_path, plan, capsys):
    words = request(tmp_path / "run", TASK, "rows", plan=plan, max_steps=4, warmup="1024", device="cpu")
    run_request(words)
    note = next(line for line in capsys.readouterr().err.splitlines() if "is lowered" in line)
    assert note.startswith("--warmup 1024 is lowered to 2") and note.endswith("such as --warmup 3%")


def test_data_that_are_no_file_reach_a_users_task_as_they_were_typed_on_a_resume_too(tmp_path):
    (tmp_path / "deep.py").write_text(DEEP)
    words = {"micro_batch": 8, "max_steps": 1, "device": "cpu", "valid": "4"}
    run_request(request(tmp_path / "run", f"{tmp_path}/deep.py:Deep", "3", **words))
    resumed = request(tmp_path / "run", resume=True)
    assert (resumed.data, resumed.options["valid"]) == ("3", "4")


@pytest.fixture
def bare(tmp_path):
    """A run with a model and tokenized rows of its own; all that it was made from is gone."""
    run = tmp_path / "runs" / "s"
    for place in ("model", "checkpoints/step-00000002", "data/train-0/tokenizer", "data/valid-0"):
        (run / place).mkdir(parents=True)
    gone = {name: str(tmp_path / "models" / name) for name in ("model", "tokenizer")}
    before = Request(
        task="sft", data=str(tmp_path / "rows.jsonl"), run=str(run), options={"valid": str(tmp_path / "valid.jsonl")},
        task_options={**gone, "max_tokens": 256}, prepared={"data": "data/train-0", "valid": "data/valid-0"},
    )  # fmt: skip
    RunFolder(run).write_request(before)
    return run


def test_a_run_that_has_all_of_its_own_is_resumed_from_its_folder_alone(bare):
    found = request(bare, resume=True)
    assert found.data == str(bare / "data" / "train-0")
    assert found.options["valid"] == str(bare / "data" / "valid-0")


def test_tokenized_rows_are_used_if_only_the_tokenizer_is_gone(bare):
    (bare.parents[1] / "rows.jsonl").touch()
    assert request(bare, resume=True).data == str(bare / "data" / "train-0")


def test_a_run_that_was_copied_has_its_own_rows(bare):
    before = RunFolder(bare).read_request()
    (bare.parent / "other" / "train-0").mkdir(parents=True)
    RunFolder(bare).write_request(replace(before, data=str(bare.parent / "other" / "train-0")))
    assert request(bare, resume=True).data == str(bare / "data" / "train-0")


def test_without_a_model_of_its_own_a_run_needs_the_one_it_began_with(bare):
    (bare / "model").rmdir()
    with pytest.raises(BadOption, match="models/model' does not exist"):
        request(bare, resume=True)


def test_data_that_were_in_memory_must_come_from_python(bare):
    RunFolder(bare).write_request(replace(RunFolder(bare).read_request(), data=None))
    with pytest.raises(BadRun, match="trained on data in memory. Try: brimful.train"):
        request(bare, resume=True)


def test_a_path_given_now_must_exist(bare):
    with pytest.raises(BadOption, match="valid='new.jsonl' does not exist"):
        request(bare, resume=True, valid="new.jsonl")


def test_a_recipe_that_evaluates_says_so_if_nothing_is_evaluated(capsys, tmp_path):
    request(tmp_path / "run", "pretrain", "rows", recipe="pretrain")
    assert "nothing is evaluated" in capsys.readouterr().err


def test_a_users_task_may_be_named_by_another_path(bare, tmp_path, monkeypatch):
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    RunFolder(bare).write_request(replace(RunFolder(bare).read_request(), task="mine.py:Tagger", task_options={}))
    assert request(bare, "moved/mine.py:Tagger", resume=True).task == "moved/mine.py:Tagger"
    with pytest.raises(BadOption, match="is a run of mine.py:Tagger, not of moved/mine.py:Other"):
        request(bare, "moved/mine.py:Other", resume=True)
