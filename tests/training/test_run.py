"""A run's folder: when a run begins in it, when it continues, when it is refused, and who holds it."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from brimful.errors import BadOption, BadRun
from brimful.training import run as module
from brimful.training.events import Journal
from brimful.training.run import (
    Request,
    RunFolder,
    RunLock,
    lock_holder,
    merge,
    new_run,
    newest_run,
    open_run,
    same_task,
)

REQUEST = Request(task="sft", data="rows.jsonl", run="run", options={"lr": 0.1})


@pytest.fixture
def run(tmp_path):
    """A run that was requested; nothing is trained yet."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_request(REQUEST)
    return folder


def write(run, *events):
    journal = Journal(run.events)
    for event, fields in events:
        journal.write(event, **fields)
    journal.close()


def refused(root, **how):
    with pytest.raises(BadRun) as error:
        open_run(root, **how)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_new_folder_begins_a_run(tmp_path):
    folder, resumed = open_run(tmp_path / "run", resume=False)
    assert (folder.root, resumed) == (tmp_path / "run", False)
    assert not folder.root.exists()


def test_a_folder_of_something_else_may_be_used(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert open_run(tmp_path, resume=False) == (RunFolder(tmp_path), False)


@pytest.mark.parametrize(("place", "problem"), [("rows", "is a file"), ("rows/x", "is inside the file")])
def test_a_file_is_not_a_folder_for_a_run(tmp_path, place, problem):
    (tmp_path / "rows").write_text("mine")
    assert refused(tmp_path / place, resume=False).startswith(f"run='{tmp_path / place}' {problem}")


def test_resume_without_a_run_says_so(tmp_path):
    root = tmp_path / "run"
    assert refused(root, resume=True).startswith(f"{root} has nothing to resume: there is no such folder")
    assert refused(tmp_path, resume=True).startswith(f"{tmp_path} has nothing to resume: no run was started in it")


@pytest.mark.parametrize(
    "left", [(), ("lock",), ("lock", "plan.json")], ids=["nothing", "while planning", "before step 1"]
)
def test_a_run_killed_before_its_first_step_begins_by_the_command_that_resumes_it(tmp_path, left):
    root, notes = tmp_path / "run", []
    for name in left:
        root.mkdir(exist_ok=True)
        (root / name).touch()
    assert open_run(root, resume=True, may_begin=True, note=notes.append) == (RunFolder(root), False)
    assert len(notes) == 1 and notes[0].startswith(f"{root} has nothing to resume (")


def test_a_run_that_was_begun_is_resumed_on_request(run):
    assert open_run(run.root, resume=True) == (run, True)


def test_a_run_whose_request_is_lost_is_resumed_on_request(run):
    write(run, ("begin", {}), ("step", {"step": 1}))
    run.request_file.unlink()
    assert open_run(run.root, resume=True) == (run, True)


def test_a_run_that_was_begun_is_not_trained_over(run):
    write(run, ("begin", {}), ("step", {"step": 6}), ("step", {"step": 7}))
    assert refused(run.root, resume=False).startswith(
        f"{run.root} already has a run in it (up to step 7). Try: resume=True"
    )


def test_a_run_without_a_step_has_nothing_to_lose_and_begins_again(run):
    write(run, ("begin", {}), ("end", {"reason": "failed"}))
    assert open_run(run.root, resume=False) == (run, False)


def test_a_checkpoint_is_not_trained_over_either(run):
    (run.checkpoints / "step-00000000").mkdir()
    assert refused(run.root, resume=False).startswith(f"{run.root} already has a run in it. Try: resume=True")


def test_a_paused_run_continues_by_the_same_command(run):
    write(run, ("begin", {}), ("step", {"step": 1}), ("end", {"reason": "time-limit"}), ("note", {"sentence": "later"}))
    assert open_run(run.root, resume=False) == (run, True)


@pytest.mark.parametrize("reason", ["finished", "interrupted", "failed"])
def test_a_run_that_ended_otherwise_does_not(run, reason):
    write(run, ("begin", {}), ("step", {"step": 1}), ("end", {"reason": reason}))
    assert "already has a run in it (up to step 1)" in refused(run.root, resume=False)


@pytest.mark.parametrize("after", ["begin", "step"])
def test_a_run_that_was_killed_after_its_pause_is_not_paused(run, after):
    write(run, ("step", {"step": 1}), ("end", {"reason": "time-limit"}), (after, {"step": 2}))
    assert run.ending() is None
    refused(run.root, resume=False)


def test_the_ending_is_the_last_end_line(run):
    assert run.ending() is None
    write(run, ("end", {"reason": "time-limit"}), ("begin", {}), ("end", {"reason": "finished", "step": 5}))
    assert {key: run.ending()[key] for key in ("reason", "step")} == {"reason": "finished", "step": 5}


def test_a_folder_is_created_with_what_training_writes_into(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.create()
    folder.create()
    assert [path.name for path in folder.root.iterdir()] == ["checkpoints"]


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadRun, match="run is not writable .Not a directory."):
        RunFolder(tmp_path / "file" / "run").create()


def test_a_folder_that_turned_read_only_is_refused(run, monkeypatch):
    def read_only(path):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", read_only)
    with pytest.raises(BadRun, match="is not writable .Read-only file system."):
        run.create()


def test_a_request_comes_back(run):
    request = replace(REQUEST, run=str(run.root), plan_for={"fill": 0.5}, task_options={"depth": 3})
    run.write_request(request)
    assert run.read_request() == request
    assert sorted(path.name for path in run.root.iterdir()) == ["checkpoints", "run.json"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder to work in, with rows, a task and a run of it, all named as from within."""
    folder = tmp_path / "project"
    (folder / "elsewhere").mkdir(parents=True)
    for name in ("rows.jsonl", "valid.jsonl", "mine.py", "weights"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    run = RunFolder(Path("runs/m"))
    run.create()
    options = {"valid": "valid.jsonl", "lr": 0.1}
    task_options = {"from": str(folder / "weights"), "base": "owner/name"}
    run.write_request(
        Request(task="mine.py:Tagger", data="rows.jsonl", run="runs/m", options=options, task_options=task_options)
    )
    return folder


def places(request):
    return request.task, request.data, request.options["valid"], *request.task_options.values()


def test_a_run_can_be_resumed_from_any_folder(project, monkeypatch):
    monkeypatch.chdir("elsewhere")
    expected = [f"{project}/{name}" for name in ("mine.py:Tagger", "rows.jsonl", "valid.jsonl", "weights")]
    assert places(RunFolder(Path("../runs/m")).read_request()) == (*expected, "owner/name")


def test_what_was_moved_together_with_the_run_is_found(project, monkeypatch):
    moved = project.rename(project.parent / "moved")
    monkeypatch.chdir(moved)
    (moved / "valid.jsonl").unlink()
    expected = (f"{moved}/mine.py:Tagger", f"{moved}/rows.jsonl", f"{project}/valid.jsonl", f"{moved}/weights")
    assert places(RunFolder(Path("runs/m")).read_request()) == (*expected, "owner/name")


def test_the_newest_run_of_a_task_is_found_by_any_name_of_its_file(project):
    assert newest_run("mine.py:Tagger") == newest_run("elsewhere/../mine.py:Tagger") == Path("runs/m")
    with pytest.raises(BadRun):
        newest_run("other.py:Tagger")


@pytest.mark.parametrize(
    ("now", "same"),
    [("../mine.py:Tagger", True), ("mine.py:Other", False), ("Tagger", False), ("sft", False)],
)
def test_a_task_whose_file_moved_is_the_same_by_its_name(now, same):
    assert same_task("/a/mine.py:Tagger", now, moved=True) is same


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"task": "x"}',
        '{"task": "x", "data": "y", "run": "z", "options": 5}',
        '{"task": "x", "data": "y", "run": "z", "prepared": []}',
        '{"task": "x", "data": "y", "run": "z", "prepared": {"data": 5}}',
        '{"task": "x", "data": "y", "run": "z", "plan_for": "all"}',
        '{"task": ["x"], "data": "y", "run": "z"}',
        '{"task": "x", "data": "y", "run": "z", "more": 1}',
        pytest.param('{"task": ' + "[" * 100_000, id="deep"),
    ],
)
def test_a_damaged_request_is_refused_with_a_way_out(run, content):
    run.request_file.write_text(content)
    with pytest.raises(BadRun, match="run.json cannot be read .*Try: task, data and all options again"):
        run.read_request()


def test_a_rank_has_rank_zeros_plan_unless_it_has_its_own(run):
    assert run.plan(1) == run.root / "plan.json"
    (run.root / "plan-1.json").write_text("{}")
    assert [run.plan(rank).name for rank in (1, 2, 0)] == ["plan-1.json", "plan.json", "plan.json"]


@pytest.mark.parametrize(("task", "stem"), [("sft", "sft"), ("my/tasks.py:Mine", "Mine")])
def test_a_new_run_is_named_after_task_and_time_and_never_like_another(tmp_path, monkeypatch, task, stem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.time, "strftime", lambda form: "20261116-210500")
    names = []
    for _ in range(3):
        path = new_run(task)
        path.mkdir(parents=True)
        names.append(str(path))
    first = f"runs/{stem}-20261116-210500"
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_the_newest_run_is_the_one_changed_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, (name, task) in enumerate([("c", "sft"), ("a", "sft"), ("b", "other")]):
        run = RunFolder(Path("runs") / name)
        run.create()
        run.write_request(replace(REQUEST, task=task))
        os.utime(run.request_file, (1000 + age, 1000 + age))
    assert newest_run(None) == Path("runs/b")
    run.request_file.write_text("{")  # one that cannot be read does not hide the others
    assert newest_run("sft") == Path("runs/a")
    with pytest.raises(BadRun, match="runs/ has no run of pretrain to resume"):
        newest_run("pretrain")


def test_without_any_run_there_is_no_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRun, match="runs/ has no run to resume"):
        newest_run(None)


def before(options=None, task_options=None):
    return replace(REQUEST, options=options or {}, task_options=task_options or {})


def test_options_given_now_win_over_those_of_the_run():
    was = before({"lr": 0.1, "max_steps": 5, "seed": 3, "plan": "yesterday.json"})
    assert merge(was, {"lr": 0.2, "seed": 3}, {}).options == {"lr": 0.2, "max_steps": 5, "seed": 3}
    assert merge(was, {"plan": "new.json"}, {}).options["plan"] == "new.json"


def test_the_seed_and_the_tasks_own_options_cannot_change():
    with pytest.raises(BadOption, match=r"cannot change seed=5 \(it was 0\)"):
        merge(before(), {"seed": 5}, {})
    with pytest.raises(BadOption, match=r"weights=bf16 \(it was not given\)"):
        merge(before(), {"weights": "bf16"}, {})
    with pytest.raises(BadOption, match=r"cannot change depth=4 \(it was 3\)"):
        merge(before(task_options={"depth": 3}), {}, {"depth": 4})
    with pytest.raises(BadOption, match=r"cannot change depth=4 \(it was not given\)"):
        merge(before(), {}, {"depth": 4})


def test_a_number_of_a_recipe_may_be_given_again_as_a_flag():
    assert merge(before(task_options={"max_tokens": 256}), {}, {"max_tokens": "256"}).task_options == {
        "max_tokens": 256
    }


def test_a_folder_that_was_moved_may_be_named_again(tmp_path):
    was = before(task_options={"from": str(tmp_path / "v1")})
    (tmp_path / "v2").mkdir()
    assert merge(was, {}, {"from": str(tmp_path / "v2")}).task_options["from"] == str(tmp_path / "v2")
    (tmp_path / "v1").mkdir()
    with pytest.raises(BadOption, match="cannot change"):
        merge(was, {}, {"from": str(tmp_path / "v2")})


def test_a_folder_that_is_gone_may_be_given_again_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    was = before(task_options={"from": str(tmp_path / "v1")})
    assert merge(was, {}, {"from": "v1"}).task_options["from"] == str(tmp_path / "v1")


def test_the_command_that_continues_can_be_pasted_into_a_shell(run):
    assert run.resume_command == f"brimful train --run {run.root} --resume"
    assert RunFolder(Path("runs/my run")).resume_command == "brimful train --run 'runs/my run' --resume"


HOLD = """
import sys, time
from pathlib import Path
from brimful.errors import BadRun
from brimful.training.run import RunLock
sys.stdin.readline()
try:
    lock = RunLock(Path("run"))
except BadRun as error:
    print("refused:", error, flush=True)
else:
    print("held", flush=True)
    time.sleep(60)
"""


def test_of_two_processes_that_race_one_is_refused_and_a_killed_holder_is_no_obstacle(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    processes = [subprocess.Popen([sys.executable, "-c", HOLD], **pipes) for _ in range(2)]
    try:
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        lines = {process.stdout.readline(): process for process in processes}
        held, refused = sorted(lines)
        assert held == "held\n" and refused.startswith("refused: run is in use by another process")
        lines[held].send_signal(signal.SIGKILL)
        lines[held].wait()
        RunLock(tmp_path / "run").close()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_refusal_names_who_holds_the_folder(tmp_path):
    with RunLock(tmp_path), pytest.raises(BadRun) as caught:
        RunLock(tmp_path)
    assert f"{tmp_path} is in use by another process (pid {os.getpid()}, since 20" in str(caught.value)


def test_the_lock_is_held_until_every_process_with_the_file_is_gone(tmp_path):
    lock = RunLock(tmp_path)
    heir = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fd])
    stranger = subprocess.Popen(["sleep", "60"])
    lock.close()
    with pytest.raises(BadRun, match="is in use by another process"):
        RunLock(tmp_path)
    heir.kill()
    heir.wait()
    RunLock(tmp_path).close()
    stranger.kill()
    stranger.wait()


@pytest.mark.parametrize("left", ["", "{", "[1]", '{"pid": 1, "host": "elsewhere", "since": "2020-01-01"}', "x" * 999])
def test_what_an_earlier_process_wrote_is_no_obstacle_and_is_replaced(tmp_path, left):
    (tmp_path / "lock").write_text(left)
    with RunLock(tmp_path):
        holder = json.loads((tmp_path / "lock").read_text())
    assert (holder["pid"], sorted(holder)) == (os.getpid(), ["host", "pid", "since", "started"])


def test_a_process_that_has_the_number_of_the_one_that_ended_is_not_taken_for_it(tmp_path):
    with RunLock(tmp_path):
        assert not lock_holder(tmp_path / "lock").has_ended
        signed = json.loads((tmp_path / "lock").read_text())
        (tmp_path / "lock").write_text(json.dumps({**signed, "started": signed["started"] - 100}))
        assert lock_holder(tmp_path / "lock").has_ended


def test_a_process_that_nobody_has_collected_has_ended(tmp_path):
    sign = f"from pathlib import Path; from brimful.training.run import RunLock; RunLock(Path({str(tmp_path)!r}))"
    with subprocess.Popen([sys.executable, "-c", sign]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        holder = lock_holder(tmp_path / "lock")
        assert (holder.pid, holder.has_ended) == (process.pid, True)


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ("", "in use by another process. Try"),
        ('{"pid": 7, "host": "elsewhere", "since": "noon"}', "another process (pid 7 on elsewhere, since noon). "),
    ],
)
def test_a_refusal_says_as_much_as_the_file_does(tmp_path, monkeypatch, left, words):
    monkeypatch.setattr(module, "_SIGN_S", 0.01)
    with RunLock(tmp_path):
        (tmp_path / "lock").write_text(left)
        with pytest.raises(BadRun) as caught:
            RunLock(tmp_path)
    assert words in str(caught.value)


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(BadRun, match=r"run is not writable \(File exists\)"):
        RunLock(tmp_path / "run")


def test_a_folder_that_is_not_writable_is_refused_even_if_its_lock_is(tmp_path, monkeypatch):
    (tmp_path / "lock").write_text("")

    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root, who may run the tests, is denied nothing
    with pytest.raises(BadRun, match=r"is not writable \(Permission denied\)"):
        RunLock(tmp_path)


def test_a_filesystem_without_locks_is_noted(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    notes = []
    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunLock(tmp_path, note=notes.append) as lock:
        assert lock.fd >= 0
    assert "nothing keeps a second run out" in notes[0]


# ---------------------------------------------------------------- what is left behind


def test_a_job_removes_what_a_killed_one_left_in_the_run(run):
    (run.root / ".job-killed").mkdir()
    (run.root / ".job-killed" / "rank-0.json").write_text("{}")
    with run.job_folder() as folder:
        assert folder.parent == run.root
        assert list(run.root.glob(".job-*")) == [folder]
    assert not list(run.root.glob(".job-*"))


def test_a_run_that_was_not_begun_leaves_no_folder(tmp_path):
    run = RunFolder(tmp_path / "runs" / "new")
    with pytest.raises(OSError), run.removed_if_not_begun():
        run.create()
        raise OSError
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_begun_stays(tmp_path):
    run = RunFolder(tmp_path / "runs" / "new")
    with run.removed_if_not_begun():
        run.create()
        (run.checkpoints / "step-00000001").mkdir()
    assert run.has_checkpoint


def test_a_folder_that_was_there_stays(run):
    with run.removed_if_not_begun():
        pass
    assert run.root.is_dir()
