"""`--lang` on every command, LANG and LC_ALL, and how an error reads in both languages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from brimful.cli.app import main
from brimful.cli.output import error_line
from brimful.languages import VARIABLE, set_language
from tests.cli.test_cli import run

TASK = str(Path(__file__).parents[1] / "planning" / "small.py") + ":Tagger"
LIMIT = ("--memory-limit", "4MiB", "--device", "cpu")


@pytest.mark.parametrize("tokens", [["--lang", "zh", "machine"], ["machine", "--lang", "zh"], ["machine", "--lang=ZH"]])
def test_the_language_may_stand_anywhere(tokens, capsys):
    code, out, _ = run(*tokens, capsys=capsys)
    assert code == 0 and "内存" in out and "RAM" not in out


def test_the_language_reaches_the_processes_that_train(monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "en")
    run("machine", "--lang", "zh", capsys=capsys)
    assert os.environ[VARIABLE] == "zh"


@pytest.mark.parametrize("tokens", [["--lang", "de"], ["--lang=de"], ["--lang"], ["--lang="]])
def test_an_unknown_language_is_one_sentence(tokens, capsys):
    code, out, err = run("machine", *tokens, capsys=capsys)
    assert code == 2 and not out
    assert err.startswith("brimful: error B101: --lang") and err.endswith("Try: --lang en or zh.\n")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("variable", ["LANG", "LC_ALL", "BRIMFUL_LANG"])
def test_the_environment_decides_without_the_flag(variable, monkeypatch, capsys):
    for name in ("BRIMFUL_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "zh_CN.UTF-8")
    assert "内存" in run("machine", capsys=capsys)[1]
    assert "RAM" in run("machine", "--lang", "en", capsys=capsys)[1]


def test_a_plan_is_printed_in_chinese_with_its_progress(capsys):
    code, out, err = run("plan", TASK, *LIMIT, "--lang", "zh", capsys=capsys)
    assert code == 0
    assert out.startswith("tagger（CPU）：") and "理由" in out and "安全" in out
    assert "规划 tagger: 试跑 " in err


def test_json_stays_english(capsys):
    _, out, _ = run("plan", TASK, *LIMIT, "--lang", "zh", "--json", capsys=capsys)
    reasons = {one["name"]: one["reason"] for one in json.loads(out)["choices"]}
    assert reasons["layout"] == "the task has no pack()"


def test_an_error_names_its_code_its_meaning_and_the_page(capsys):
    code, _, err = run("plan", TASK, *LIMIT, "--fill", "2", "--lang", "zh", capsys=capsys)
    assert code == 2
    assert err == ("brimful: 错误 B101（选项不对）：--fill 2.0 必须大于 0 且不超过 1。说明见 docs/zh/errors.md#b101\n")


def test_an_error_without_a_translation_stays_english_under_its_chinese_meaning():
    set_language("zh")
    assert error_line("something nobody has translated.", "B202") == (
        "brimful: 错误 B202（任务代码有问题）：something nobody has translated. 说明见 docs/zh/errors.md#b202"
    )


def test_a_flag_that_does_not_exist_has_the_code_of_a_bad_option(capsys):
    _, _, err = run("machine", "--wrong", capsys=capsys)
    assert err.startswith("brimful: error B101: ")


def test_a_message_that_is_no_users_mistake_has_no_code():
    assert error_line("stopped by Ctrl-C", None) == "brimful: error: stopped by Ctrl-C"


def test_the_code_of_an_error_in_a_training_process_is_shown(tmp_path):
    words = ["train", TASK, "rows", "--run", str(tmp_path / "run"), "--lang", "zh", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-m", "brimful", *words], capture_output=True, text=True, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert last.startswith("brimful: 错误 B202（任务代码有问题）：") and last.endswith("docs/zh/errors.md#b202")


def test_a_terminal_that_cannot_show_chinese_shows_question_marks():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "brimful", "machine", "--lang", "zh"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "?" in done.stdout and "Traceback" not in done.stderr


def test_a_task_of_ones_own_may_stand_behind_the_language(capsys):
    with pytest.raises(SystemExit):
        main(["--lang", "zh", "plan", "nope"])
    assert "没有任务 'nope'" in capsys.readouterr().err
