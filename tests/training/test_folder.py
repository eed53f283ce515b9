"""A run's folder: when a run begins in it, when it goes on, and when it is refused."""

import os
from pathlib import Path

import pytest

from brimful.errors import BadOption, BadRun
from brimful.training import run as module
from brimful.training.events import Journal
from brimful.training.run import RunFolder, go_on, new_run, newest_run, opened, same_task

REQUEST = {"task": "chatlm-sft", "data": "rows.jsonl", "asked": {"lr": 0.1}}


@pytest.fixture
def run(tmp_path):
    """A run that was asked for; nothing is trained yet."""
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.remember(REQUEST)
    return folder


def write(run, *events):
    journal = Journal(run.events)
    for event, fields in events:
        journal.write(event, **fields)
    journal.close()


def refused(root, **how):
    with pytest.raises(BadRun) as told:
        opened(root, **how)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_new_folder_begins_a_run(tmp_path):
    folder, resumed = opened(tmp_path / "run", resume=False)
    assert (folder.root, resumed) == (tmp_path / "run", False)
    assert not folder.root.exists()


def test_a_folder_of_something_else_may_be_used(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert opened(tmp_path, resume=False) == (RunFolder(tmp_path), False)


def test_resume_without_a_folder_says_so(tmp_path):
    root = tmp_path / "run"
    assert refused(root, resume=True) == (
        f"--resume: nothing to resume in {root}: there is no such folder; leave --resume out to begin a run"
    )


def test_resume_in_a_folder_without_a_run_says_so(tmp_path):
    assert refused(tmp_path, resume=True) == (
        f"--resume: nothing to resume in {tmp_path}: no run was ever begun in it; leave --resume out to begin a run"
    )


def test_a_run_that_was_begun_is_resumed_when_asked(run):
    assert opened(run.root, resume=True) == (run, True)


def test_a_run_whose_request_is_lost_is_resumed_when_asked(run):
    write(run, ("begin", {}), ("step", {"step": 1}))
    (run.root / "run.json").unlink()
    assert opened(run.root, resume=True) == (run, True)
    assert not run.knows_its_request


def test_a_run_that_was_begun_is_not_trained_over(run):
    write(run, ("begin", {}), ("step", {"step": 6}), ("step", {"step": 7}))
    assert refused(run.root, resume=False) == (
        f"{run.root} has a run in it already (up to step 7): add --resume to go on with it, or name another folder with --run"
    )


def test_a_run_without_a_step_has_nothing_to_lose_and_is_begun_anew(run):
    write(run, ("begin", {}), ("end", {"reason": "failed"}))
    assert opened(run.root, resume=False) == (run, False)


def test_a_checkpoint_is_not_trained_over_either(run):
    (run.checkpoints / "step-00000000").mkdir()
    assert refused(run.root, resume=False).startswith(f"{run.root} has a run in it already: add --resume")


@pytest.mark.parametrize("reason", ["time-limit", "window"])
def test_a_paused_run_goes_on_by_the_same_command(run, reason):
    write(run, ("begin", {}), ("step", {"step": 1}), ("end", {"reason": reason}), ("note", {"sentence": "later"}))
    assert opened(run.root, resume=False) == (run, True)


@pytest.mark.parametrize("reason", ["finished", "interrupted", "failed"])
def test_a_run_that_ended_otherwise_does_not(run, reason):
    write(run, ("begin", {}), ("step", {"step": 1}), ("end", {"reason": reason}))
    assert "has a run in it already (up to step 1)" in refused(run.root, resume=False)


@pytest.mark.parametrize("after", ["begin", "step"])
def test_a_run_that_was_killed_after_its_pause_is_not_paused(run, after):
    write(run, ("step", {"step": 1}), ("end", {"reason": "window"}), (after, {"step": 2}))
    assert run.ending() is None
    refused(run.root, resume=False)


def test_the_ending_is_the_last_end_line(run):
    write(run, ("end", {"reason": "window"}), ("begin", {}), ("end", {"reason": "finished", "step": 5}))
    assert {key: run.ending()[key] for key in ("reason", "step")} == {"reason": "finished", "step": 5}


def test_a_run_that_never_ended_has_no_ending(run):
    assert run.ending() is None


def test_a_folder_is_made_with_what_training_writes_into(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.make()
    folder.make()
    assert [path.name for path in folder.root.iterdir()] == ["checkpoints"]


def test_a_folder_in_a_place_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    root = tmp_path / "file" / "run"
    with pytest.raises(BadRun) as told:
        RunFolder(root).make()
    assert str(told.value) == f"{root} cannot be written (Not a directory): name a folder of yours with --run"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody may make a folder")
def test_a_place_that_nobody_may_write_is_refused():
    with pytest.raises(BadRun, match="^/proc/self/run cannot be written \\("):
        RunFolder(Path("/proc/self/run")).make()


def test_a_folder_that_turned_read_only_is_refused(run, monkeypatch):
    def read_only(path):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", read_only)
    with pytest.raises(BadRun, match="cannot be written \\(Read-only file system\\)"):
        run.make()


def test_what_was_asked_comes_back(run):
    assert run.remembered() == REQUEST
    run.remember({**REQUEST, "plan_for": {"fill": 0.5}})
    assert run.remembered() == {**REQUEST, "plan_for": {"fill": 0.5}}
    assert sorted(path.name for path in run.root.iterdir()) == ["checkpoints", "run.json"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder to work in, with rows, a task and a run of it, all named as from within."""
    folder = tmp_path / "project"
    (folder / "elsewhere").mkdir(parents=True)
    for name in ("rows.jsonl", "valid.jsonl", "mine.py"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    run = RunFolder(Path("runs/m"))
    run.make()
    asked = {"run": "runs/m", "valid": "valid.jsonl", "from": "owner/name", "lr": 0.1}
    run.remember({"task": "mine.py:Tagger", "data": "rows.jsonl", "asked": asked})
    return folder


def places(request):
    return request["task"], request["data"], request["asked"]["valid"], request["asked"]["from"]


def test_a_run_can_be_resumed_from_any_folder(project, monkeypatch):
    monkeypatch.chdir("elsewhere")
    expected = (f"{project}/mine.py:Tagger", f"{project}/rows.jsonl", f"{project}/valid.jsonl", "owner/name")
    assert places(RunFolder(Path("../runs/m")).remembered()) == expected


def test_what_was_moved_together_with_the_run_is_found(project, monkeypatch):
    there = project.rename(project.parent / "moved")
    monkeypatch.chdir(there)
    (there / "valid.jsonl").unlink()
    expected = (f"{there}/mine.py:Tagger", f"{there}/rows.jsonl", f"{project}/valid.jsonl", "owner/name")
    assert places(RunFolder(Path("runs/m")).remembered()) == expected


def test_the_newest_run_of_a_task_is_found_by_any_name_of_its_file(project):
    assert newest_run("mine.py:Tagger") == newest_run("elsewhere/../mine.py:Tagger") == Path("runs/m")
    with pytest.raises(BadRun):
        newest_run("other.py:Tagger")


@pytest.mark.parametrize(
    ("now", "same"),
    [("../mine.py:Tagger", True), ("mine.py:Other", False), ("Tagger", False), ("chatlm-sft", False)],
)
def test_a_task_whose_file_moved_is_the_same_by_its_name(now, same):
    assert same_task("/a/mine.py:Tagger", now, moved=True) is same


@pytest.mark.parametrize("content", ["", "{", "[]", '{"task": "x"}', '{"task": "x", "data": "y", "asked": 5}'])
def test_a_damaged_request_is_refused_with_a_way_out(run, content):
    (run.root / "run.json").write_text(content)
    with pytest.raises(BadRun) as told:
        run.remembered()
    assert str(told.value).startswith(f"{run.root / 'run.json'} cannot be read (")
    assert str(told.value).endswith("): give task, data and options again together with --resume")


def test_a_process_has_the_firsts_plan_unless_it_has_its_own(run):
    assert run.plan(1) == run.root / "plan.json"
    (run.root / "plan-1.json").write_text("{}")
    assert (run.plan(1), run.plan(2), run.plan()) == (
        run.root / "plan-1.json",
        run.root / "plan.json",
        run.root / "plan.json",
    )


@pytest.mark.parametrize(("task", "stem"), [("chatlm-sft", "chatlm-sft"), ("my/tasks.py:Mine", "Mine")])
def test_a_new_run_is_called_after_task_and_time_and_never_like_another(tmp_path, monkeypatch, task, stem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.time, "strftime", lambda form: "20261116-210500")
    names = []
    for _ in range(3):
        path = new_run(task)
        path.mkdir(parents=True)
        names.append(str(path))
    first = f"runs/{stem}-20261116-210500"
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_the_newest_run_is_the_one_touched_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, (name, task) in enumerate([("c", "chatlm-sft"), ("a", "chatlm-sft"), ("b", "other")]):
        run = RunFolder(Path("runs") / name)
        run.make()
        run.remember({**REQUEST, "task": task})
        os.utime(run.root / "run.json", (1000 + age, 1000 + age))
    assert newest_run(None) == Path("runs/b")
    assert newest_run("chatlm-sft") == Path("runs/a")
    with pytest.raises(BadRun) as told:
        newest_run("chatlm-pretrain")
    assert str(told.value) == ("--resume: there is no run of chatlm-pretrain below runs/; name its folder with --run")


def test_without_any_run_there_is_no_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRun, match="^--resume: there is no run below runs/; name its folder with --run$"):
        newest_run(None)


def test_a_damaged_run_does_not_hide_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("good", "bad"):
        run = RunFolder(Path("runs") / name)
        run.make()
        run.remember(REQUEST)
    (run.root / "run.json").write_text("{")
    assert newest_run("chatlm-sft") == Path("runs/good")


def test_what_is_said_now_wins_over_what_was_asked_before():
    before = {"asked": {"lr": 0.1, "max_steps": 5, "seed": 3, "plan": "yesterday.json"}}
    assert go_on(before, {"lr": 0.2, "seed": 3}) == {"lr": 0.2, "max_steps": 5, "seed": 3}
    assert go_on(before, {"plan": "new.json"})["plan"] == "new.json"


@pytest.mark.parametrize("name", ["size", "from", "freeze", "tokenizer", "columns", "max_tokens", "seed"])
def test_what_would_make_it_another_run_cannot_be_changed(name):
    with pytest.raises(BadOption) as told:
        go_on({"asked": {name: "a"}}, {name: "b"})
    assert str(told.value) == (
        f"--resume: --{name.replace('_', '-')} b (it was a): that would be another run; begin one with another --run, "
        "--from this one if you like"
    )


def test_a_number_of_a_recipe_may_be_said_again_as_a_flag():
    assert go_on({"asked": {"max_tokens": 256}}, {"max_tokens": "256"})["max_tokens"] == "256"


@pytest.mark.parametrize("name", ["from", "tokenizer"])
def test_a_folder_that_was_moved_may_be_named_anew(name, tmp_path):
    before = {"asked": {name: str(tmp_path / "v1")}}
    (tmp_path / "v2").mkdir()
    assert go_on(before, {name: str(tmp_path / "v2")})[name] == str(tmp_path / "v2")
    (tmp_path / "v1").mkdir()
    with pytest.raises(BadOption, match="that would be another run"):
        go_on(before, {name: str(tmp_path / "v2")})


def test_a_folder_that_is_gone_may_be_said_again_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert go_on({"asked": {"from": str(tmp_path / "v1")}}, {"from": "v1"})["from"] == str(tmp_path / "v1")


@pytest.mark.parametrize(("name", "value"), [("seed", 5), ("freeze", "none"), ("size", "tiny")])
def test_neither_can_what_was_left_to_its_default(name, value):
    with pytest.raises(BadOption):
        go_on({"task": "chatlm-sft", "asked": {}}, {name: value})


def test_the_command_that_goes_on_names_the_folder(run):
    assert run.resume_command == f"brimful train --run {run.root} --resume"


def test_the_command_that_goes_on_can_be_pasted_into_a_shell():
    assert RunFolder(Path("runs/my run")).resume_command == "brimful train --run 'runs/my run' --resume"
