"""`brimful demo` trains a model that answers its three questions, with commands that can be copied."""

import json
import shlex
import subprocess
import sys

import pytest

from brimful.tasks.demo import questions
from tests.cli.test_cli import run


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo, run as a user would: the one chat model that the tests train to its end. Returns folder and output."""
    folder = tmp_path_factory.mktemp("demo") / "d 演示"
    command = [sys.executable, "-m", "brimful", "demo", "--run", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return folder, process.stdout


def test_all_answers_are_correct(demo):
    _, out = demo
    assert out.count("✓") == 3 and "3 of 3 answers are correct" in out
    assert all(question.prompt in out and question.response in out for question in questions())


def test_every_command_is_shown_as_it_can_be_typed(demo):
    folder, out = demo
    shown = [shlex.split(line.removeprefix("$ ")) for line in out.splitlines() if line.startswith("$ ")]
    assert [words[:2] for words in shown] == [["brimful", command] for command in ("train", "eval", "chat")]
    assert all(str(folder) in words for words in shown)
    assert shlex.split(out.rsplit("Try: ", 1)[1]) == ["brimful", "chat", str(folder)]


def test_training_tokenizes_plans_evaluates_and_keeps_the_best_model(demo):
    folder, _ = demo
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "eval"]
    assert [event["step"] for event in steps] == list(range(1, 501))
    assert evaluations[-1]["loss"] < 0.5 < 5 < evaluations[0]["loss"]
    assert evaluations[-1]["bleu"] > 70
    assert (folder / "best").exists() and (folder / "plan.json").exists() and list((folder / "data").glob("train-*"))


def test_eval_of_the_run_gives_the_loss_that_training_printed(demo, capsys):
    """The same rows, truncated alike, with the same tokenizer."""
    from brimful.tasks.demo import valid_file

    folder, _ = demo
    best = json.loads((folder / "checkpoints" / "best.json").read_text())
    _, out, _ = run(
        "eval", str(folder), str(valid_file()), "--metrics", "loss", "--device", "cpu", "--json", capsys=capsys
    )
    assert json.loads(out)["loss"] == pytest.approx(-best["score"], rel=1e-4)


def test_a_folder_with_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    code, out, err = run("demo", "--run", str(tmp_path), capsys=capsys)
    assert code == 2 and not out
    assert "already has a run in it. Try: another folder with --run" in err


def test_in_chinese_the_result_is_chinese(monkeypatch, tmp_path, capsys):
    answers = [{"response": question.response} for question in questions()]
    monkeypatch.setattr("brimful.cli.demo._run_command", lambda *_, **__: json.dumps({"answers": answers}))
    _, out, _ = run("demo", "--run", str(tmp_path / "d"), "--lang", "zh", capsys=capsys)
    assert "3 个回答对了 3 个。已保存到" in out and "建议：brimful chat" in out
