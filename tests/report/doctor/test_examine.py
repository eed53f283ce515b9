"""The whole examination: once for real, otherwise with parts that misbehave."""

import io
import json
import os

import psutil
import pytest
from rich.console import Console

from brimful.cli.output import show
from brimful.languages import say, set_language
from brimful.report.doctor import examine as examining
from brimful.report.doctor import trial
from brimful.report.doctor.checks import GROUPS, Check, Examination, Findings, doctor_table
from brimful.report.doctor.examine import examine
from brimful.report.doctor.trial import Ended
from brimful.training.run import Request, RunFolder
from tests.report.doctor.fake_machine import only


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """This machine."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    phrases = []
    before = set(psutil.Process().children(recursive=True))
    result = examine(run=folder / "run", data=str(folder / "rows.jsonl"), timeout_s=120, progress=phrases.append)
    after = set(psutil.Process().children(recursive=True))
    return result, phrases, after - before, sorted(path.name for path in folder.iterdir())


def test_this_machine_is_examined_from_end_to_end(real):
    found = {str(check.name): check for check in real[0].checks}
    names = (
        "Python",
        "packages",
        "torch",
        "compiler",
        "/dev/shm",
        "RAM",
        "cores",
        "open files",
        "swap",
        "run folder",
        "locks",
    )
    assert set(names) <= set(found)
    assert found["torch"].status == "ok" and found["Python"].status == "ok" and found["data"].status == "ok"


def test_two_processes_here_add_up_one_number(real):
    check = only(list(real[0].checks), "all_reduce")
    assert check.status in ("ok", "not checked")  # the latter where there is one card
    assert check.figures.get("ranks", 2) >= 2


def test_every_warning_and_failure_has_something_to_try(real):
    assert all(check.fix is not None for check in real[0].checks if check.status in ("warning", "failed"))


def test_no_process_and_no_file_is_left_behind(real):
    assert not real[2] and real[3] == ["rows.jsonl"]


def test_progress_is_told(real):
    assert real[1][0] == "torch" and len(real[1]) >= 3


def test_the_json_has_every_check_in_english(real):
    set_language("zh")
    try:
        content = json.loads(json.dumps(real[0].to_json()))
    finally:
        set_language(None)
    assert len(content["checks"]) == len(real[0].checks)
    assert set(content["checks"][0]) == {"group", "name", "status", "text", "fix", "figures"}
    assert not any("\u4e00" <= letter <= "\u9fff" for letter in str(content))
    assert sum(content["counts"].values()) == len(content["checks"])


def test_checks_come_in_the_order_of_their_groups(real):
    places = [GROUPS.index(check.group) for check in real[0].checks]
    assert places == sorted(places)


@pytest.fixture
def quick(monkeypatch):
    """No child processes and no disks, so that only one part is under test."""
    monkeypatch.setattr(
        examining, "run_children", lambda *args, **options: [Ended(code=1, errors="ImportError: no torch")]
    )
    monkeypatch.setattr(examining, "speed_checks", lambda *args: Findings("Folders"))
    monkeypatch.setattr(examining, "swap_checks", lambda *args: Findings("Host"))


def test_a_torch_that_cannot_be_imported_does_not_end_the_examination(quick, tmp_path):
    result = examine(run=tmp_path, data=None, timeout_s=5)
    assert result.failed and "no torch" in str(only(list(result.checks), "torch").text)
    assert only(list(result.checks), "RAM").status in ("ok", "warning")


def test_a_check_that_breaks_is_reported_as_not_checked(quick, tmp_path, monkeypatch):
    def broken(host):
        raise KeyError("MemTotal")

    monkeypatch.setattr(examining, "ram_checks", broken)
    check = only(list(examine(run=tmp_path, data=None, timeout_s=5).checks), "RAM")
    assert check.status == "not checked" and "KeyError: 'MemTotal'" in str(check.text)


def test_a_mount_that_hangs_fails_and_is_left_behind(quick, tmp_path, monkeypatch):
    import threading

    monkeypatch.setattr(examining, "HANG_S", 0.2)
    monkeypatch.setattr(examining, "LEAVE_S", 0.1)
    monkeypatch.setattr(examining, "data_checks", lambda data: threading.Event().wait(30))
    check = only(list(examine(run=tmp_path, data="rows", timeout_s=5).checks), "data")
    assert check.status == "failed" and "df -h" in str(check.fix)


def test_the_data_of_an_existing_run_are_checked_without_being_named(quick, tmp_path):
    RunFolder(tmp_path / "run").create()
    RunFolder(tmp_path / "run").write_request(Request(task="sft", data="gone/rows.jsonl", run=str(tmp_path / "run")))
    check = only(list(examine(run=tmp_path / "run", data=None, timeout_s=5).checks), "data")
    assert "rows.jsonl" in str(check.text)


def test_ctrl_c_kills_the_children(quick, tmp_path, monkeypatch):

    monkeypatch.setattr(trial, "PROGRAM", ("-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(examining, "run_children", trial.run_children)

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(examining, "read_nvidia", interrupted)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt):
        examine(run=tmp_path, data=None, timeout_s=600)
    assert not set(psutil.Process(os.getpid()).children(recursive=True)) - before


# ---- How it looks ----


def shown(*checks: Check, width=80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(doctor_table(Examination(checks=checks, seconds=3.2)))
    return console.export_text()


def sample(status, **values):
    fix = {"fix": say("`unset {name}`", name="X")} if status in ("warning", "failed") else {}
    return Check(group="Environment", name="X", status=status, text=say("{n} things", n=3), **fix, **values)


def test_a_failure_shows_its_sign_and_what_to_try_below_it():
    lines = shown(sample("failed")).splitlines()
    assert lines[1].startswith("✗ X") and "3 things" in lines[1]
    assert lines[2].strip() == "Try: unset X"


LONG = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126 'brimful[molecules,text,page]'"


@pytest.mark.parametrize(
    "fix", [say("`{command}`", command=LONG), say("stop the others, then `{command}`", command=LONG)]
)
def test_a_command_wider_than_the_terminal_stays_on_one_line(fix, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    torch, other = (
        Check(group="Software", name=name, status="failed", text=say("{n} things", n=3), fix=fix) for name in "ab"
    )
    show(doctor_table(Examination(checks=(torch, sample("ok"), other), seconds=3.2)), {}, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert sum(LONG in line for line in lines) == 2
    assert all(len(line) <= 80 for line in lines if LONG not in line)
    assert next(line for line in lines if LONG in line).startswith("  Try: ")


def test_a_command_in_what_was_found_stays_on_one_line_too(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = say("installed: {have}. For the others: `{command}`", have="data, eval, hub, lightning, lora, mol", command="pip install 'brimful[plots,serve]'")  # fmt: skip
    check = Check(group="Software", name="extras", status="ok", text=text)
    show(doctor_table(Examination(checks=(check,), seconds=3.2)), {}, as_json=False)
    assert "pip install 'brimful[plots,serve]'" in capsys.readouterr().out


def test_what_was_not_checked_says_why():
    assert "not checked: 3 things" in shown(sample("not checked"))


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        (("ok", "ok"), "All is well; 2 ok, 0 not checked, 3.2 s"),
        (("ok", "warning"), "Nothing failed, 1 to look at; 1 ok"),
        (("failed", "warning"), "1 failed, 1 to look at; 0 ok"),
    ],
)
def test_the_last_line_counts(statuses, verdict):
    assert verdict in shown(*(sample(status) for status in statuses))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(real, width):
    assert all(len(line) <= width for line in shown(*real[0].checks, width=width).splitlines())
