"""`--lang` on every command, LANG and LC_ALL, and how an error reads in both languages."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from brimful.cli.app import main
from brimful.cli.output import error_line
from brimful.languages import VARIABLE, set_language, tr, translate
from brimful.molecules.results import conventions
from brimful.molecules.terminal import SweepProgress
from brimful.serving.chat import COMMANDS, HELP
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
    assert "规划 tagger：试跑 " in err


def test_what_estimate_traces_is_told_in_chinese():
    set_language("zh")
    assert translate("trace padded bf16 2 of 6: 128 rows of 256+256") == "追踪 padded bf16 2/6：128 行（长 256+256）"


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
        "brimful: 错误 B202（任务代码有问题）：something nobody has translated.\n说明见 docs/zh/errors.md#b202"
    )


def test_a_flag_that_does_not_exist_has_the_code_of_a_bad_option(capsys):
    _, _, err = run("machine", "--wrong", capsys=capsys)
    assert err.startswith("brimful: error B101: ")


@pytest.mark.parametrize(
    ("words", "english", "chinese"),
    [
        ("tran", "tran is not a command. Try: brimful train.", "没有 tran 这个命令。建议：brimful train。"),
        ("zzz", "zzz is not a command. Try: brimful --help.", "没有 zzz 这个命令。建议：brimful --help。"),
        ("watch --onec", "unknown option --onec. Did you mean --once?", "没有 --onec 这个选项。是不是 --once？"),
        ("watch --far=2", "unknown option --far. Try: brimful watch --help.", "没有 --far 这个选项。建议：brimful watch --help。"),
        ("watch --every", "--every needs a value. Try: brimful watch --help.", "--every 后面要写一个值。建议：brimful watch --help。"),
        ("eval", "MODEL is missing. Try: brimful eval --help.", "缺少 MODEL。建议：brimful eval --help。"),
        ("watch a b", "b has no place in this command. Try: brimful watch --help.", "这个命令用不上 b。建议：brimful watch --help。"),
        ("report --format x", "--format x must be one of html, md, json.", "--format x 必须是以下之一：html, md, json。"),
        ("machine --json --json", "--json was given more than once. Try: brimful machine --help.", "--json 写了不止一次。建议：brimful machine --help。"),
    ],
)  # fmt: skip
def test_a_command_line_that_cannot_be_read_is_answered_in_both_languages(words, english, chinese, capsys):
    assert run(*words.split(), capsys=capsys)[2] == f"brimful: error B101: {english}\n"
    answer = run(*words.split(), "--lang", "zh", capsys=capsys)[2]
    assert answer.startswith(f"brimful: 错误 B101（选项不对）：{chinese}")


def test_nothing_follows_a_command_on_its_line(capsys):
    """So that the line can be copied."""
    lines = run("train", "sft", "rows", "--learn_rate", "1", "--lang", "zh", capsys=capsys)[2].splitlines()
    assert lines[0].endswith("建议：brimful train sft rows --lr 1") and lines[1].startswith("说明见 ")


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


ENGLISH = re.compile(r"[a-z']{2,} [a-z']{2,} [a-z']{2,}")
"""Three words of a sentence."""


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """On a wide terminal: three hundred rows, one of which is not JSON and one empty."""
    monkeypatch.setenv("COLUMNS", "200")
    good = [
        {"instruction": "问题" * (1 + n % 40) + str(n), "output": "答案是这样的" * (1 + n % 70) + str(n * n)}
        for n in range(300)
    ]
    lines = [
        *(json.dumps(row, ensure_ascii=False) for row in good),
        "not JSON",
        json.dumps({"instruction": "", "output": "x"}),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_data_commands_speak_chinese(rows, tmp_path, capsys):
    clean, tokenizer, store = (tmp_path / name for name in ("clean", "tokenizer", "store"))
    commands = {
        "check": (rows, "--max-bad", "0.1"),
        "clean": (rows, "--output", clean, "--max-bad", "0.1"),
        "tokenizer": (clean / "train.parquet", "--output", tokenizer, "--vocab-size", "600"),
        "tokenize": (clean / "train.parquet", "--tokenizer", tokenizer, "--output", store),
    }
    for name, words in commands.items():
        code, out, _ = run("data", name, *map(str, words), "--lang", "zh", capsys=capsys)
        assert code == 0, name
        text = out.replace(str(tmp_path), "").replace("Expecting value", "")
        assert not ENGLISH.search(text), f"{name}: {ENGLISH.search(text)}"


def test_english_tables_of_the_data_commands_are_as_they_were(rows, capsys):
    out = run("data", "check", str(rows), "--max-bad", "0.1", "--lang", "en", capsys=capsys)[1]
    assert "300 of 302 rows can be used  read in " in out and "columns: found instruction+input and output" in out
    assert "over-long" in out and "prompt in characters, mean " in out


@pytest.mark.parametrize(
    ("message", "chinese"),
    [
        ("output='c' already has train.parquet. Try: overwrite=True, or another folder.", "--output c 里已有 train.parquet。建议：--overwrite，或换一个文件夹。"),
        ("a.csv, line 7: the header has 'x' twice. Try: rename one of the columns.", "a.csv，第 7 行：表头里 'x' 出现两次。建议：给其中一列改名。"),
        ("a.json: column 'x' holds numbers, not text. Try: another one with columns=.", "a.json：列 'x' 里是数字，不是文本。建议：用 --columns 换一列。"),
        ("a.jsonl, line 4: not JSON: Expecting value at character 1. Try: repair that row, or drop such rows with max_bad=0.01.", "a.jsonl，第 4 行：不是 JSON，第 1 个字符处：Expecting value。建议：修复这一行，或用 --max-bad 0.01 丢弃这样的行。"),
        ("mine.py is a file. Try: mine.py:name, with the name of the task in it.", "mine.py 是文件。建议：mine.py:名字，即其中任务的名字。"),
        ("/m needs trust_remote_code: its model type 'foo' is defined by code of its own, which Brimful does not run. Try: a model that transformers knows.", "/m 需要 trust_remote_code：它的模型类型 'foo' 由自带代码定义，Brimful 不运行这样的代码。建议：transformers 认识的模型。"),
    ],
)  # fmt: skip
def test_errors_of_data_and_models_are_translated(message, chinese):
    set_language("zh")
    assert error_line(message, "B201") == f"brimful: 错误 B201（数据读不了）：{chinese}说明见 docs/zh/errors.md#b201"


@pytest.mark.parametrize("manner", HELP)
def test_the_help_of_a_chat_is_translated(manner):
    set_language("zh")
    assert not ENGLISH.search(translate(HELP[manner]))


def test_the_commands_of_a_chat_are_translated():
    set_language("zh")
    assert not any(ENGLISH.search(tr(text)) for text in COMMANDS.values())


def test_what_a_sweep_prints_is_translated(capsys):
    set_language("zh")
    with SweepProgress() as progress:
        grid = "3 datasets × 2 encoders × 7 methods × 3 seeds = 126 runs"
        progress({"event": "begin", "heads": 126, "known": 0, "grid": grid, "device": "the CPU"})
        progress({"event": "resume", "heads": 4})
    err = capsys.readouterr().err
    assert "3 个数据集 × 2 个编码器" in err and "继续训练 4 个头" in err and not ENGLISH.search(err)
    about = "scaffold split, 1,000 ID and 1,000 OOD test molecules, best trivial baseline rings"
    assert translate(about) == "scaffold 划分，测试分子 1,000 ID 和 1,000 OOD，最好的简单基线是 rings"
    for sentence in conventions([{"positive": "ood", "chosen": True, "settings": "", "valid_auroc": None}]):
        assert not ENGLISH.search(translate(sentence)), sentence
