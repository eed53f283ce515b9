"""`brimful demo`: its commands can be copied as they are shown."""

import json
import shlex
import subprocess

from brimful.cli import demo as module
from brimful.tasks.demo import questions
from tests.cli.test_cli import run


def test_every_command_is_shown_as_it_can_be_typed(tmp_path, capsys, monkeypatch):
    """The whole way, with the commands told instead of run."""
    answers = [{"response": one.response} for one in questions()]
    ran = []

    def told(words, **_):
        ran.append(words[3:])
        return subprocess.CompletedProcess(words, 0, json.dumps({"answers": answers}))

    monkeypatch.setattr(module.subprocess, "run", told)
    code, out, _ = run("demo", "--run", str(tmp_path / "d 演示"), capsys=capsys)
    shown = [shlex.split(line.removeprefix("$ ")) for line in out.splitlines() if line.startswith("$ ")]
    assert code == 0 and shown == [["brimful", *words] for words in ran]
    assert shlex.split(out.rsplit("talk to it: ", 1)[1]) == ["brimful", "chat", str(tmp_path / "d 演示")]


def test_a_folder_with_a_run_is_refused_by_what_the_demo_can_do(tmp_path, capsys):
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    code, out, err = run("demo", "--run", str(tmp_path), capsys=capsys)
    assert code == 2 and not out
    assert "has a run in it already: name another folder with --run" in err and "--resume" not in err
