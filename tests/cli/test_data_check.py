"""`brimful data check` as a user types it."""

import json
import subprocess
import sys

import pytest

from tests.cli.test_cli import run


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"question": f"第{number}问", "answer": "答" * (number % 50 + 1)}) for number in range(200)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("data", "check", "--help", capsys=capsys)
    flags = {word.strip("│ ,[]") for word in out.split() if word.startswith("--")}
    assert flags == {
        "--columns",
        "--model",
        "--chat-template",
        "--tokenizer",
        "--max-chars",
        "--max-tokens",
        "--host-limit",
        "--max-bad",
        "--valid",
        "--json",
        "--traceback",
        "--lang",
    }


def test_help_of_check_and_clean_imports_nothing_heavy():
    script = """
import contextlib, sys, brimful.cli
for command in ("check", "clean"):
    with contextlib.suppress(SystemExit):
        brimful.cli.main(["data", command, "--help"])
assert not {"torch", "pyarrow", "duckdb", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_prints_one_json_object(rows, capsys):
    code, out, _ = run("data", "check", str(rows), "--json", capsys=capsys)
    found = json.loads(out)
    assert code == 0
    assert (found["rows_in"], found["rows_out"]) == (200, 200)
    assert found["dropped"] == {"broken": 0, "empty": 0, "over_long": 0, "duplicate": 0}
    assert found["columns"] == {"prompt": "question", "response": "answer"}


def test_check_prints_a_table_and_progress(rows, capsys):
    code, out, err = run("data", "check", str(rows), capsys=capsys)
    assert code == 0
    assert "200 of 200 rows can be used" in " ".join(out.split())
    assert "check: read 200 rows, " in err


def test_check_names_what_it_did_not_read(rows, capsys):
    (rows.parent / "more.jsonl.lz4").write_text("x")
    note = "not read: more.jsonl.lz4 (unknown format)"
    _, out, _ = run("data", "check", str(rows.parent), "--json", capsys=capsys)
    assert json.loads(out)["skipped"] == [f"{rows.parent}/more.jsonl.lz4 (unknown format)"]
    _, out, _ = run("data", "check", str(rows.parent), capsys=capsys)
    assert note.replace(" ", "") in "".join(out.split()).replace(f"{rows.parent}/", "")


def test_columns_and_limits_reach_the_check(rows, capsys):
    _, out, _ = run(
        "data",
        "check",
        str(rows),
        "--columns",
        "text=answer",
        "--max-chars",
        "40",
        "--max-bad",
        "1",
        "--json",
        capsys=capsys,
    )
    found = json.loads(out)
    assert found["columns"] == {"text": "answer"}
    assert found["dropped"]["over_long"] == 40
    assert found["max_bad"] == 1


def test_too_many_unusable_rows_are_exit_code_2_below_the_whole_report(rows, capsys):
    rows.write_text(rows.read_text() + "{broken\n" * 3)
    code, out, err = run("data", "check", str(rows), "--json", capsys=capsys)
    assert code == 2
    assert json.loads(out)["dropped"]["broken"] == 3
    message = err.strip().splitlines()[-1]
    assert message.startswith(
        "brimful: error B201: 3 of 203 rows cannot be used (3 broken), more than --max-bad 0.01 allows. Try: repair them, starting with "
    )
    assert f"{rows}, line 201: not JSON" in message
    code, _, _ = run("data", "check", str(rows), "--max-bad", "0.02", capsys=capsys)
    assert code == 0


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "FILES is missing"),
        (["nope.jsonl"], "nope.jsonl does not exist"),
        (["rows.jsonl", "--columns", "prompt=nope"], "has no column nope. Try: one of question, answer"),
        (["rows.jsonl", "--max-chars", "x"], "--max-chars x"),
        (["rows.jsonl", "--max-tokens", "9"], "--tokenizer"),
        (["rows.jsonl", "--tokenizer", "nowhere"], "nowhere has no tokenizer.json"),
        (["rows.jsonl", "--max-bad", "7"], "--max-bad 7"),
        (["rows.jsonl", "--max-bad", "x"], "max-bad"),
        (["rows.jsonl", "--wrong"], "--wrong"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(tokens, message, rows, monkeypatch, capsys):
    monkeypatch.chdir(rows.parent)
    code, out, err = run("data", "check", *tokens, capsys=capsys)
    assert code == 2
    assert not out
    assert message in err.strip().splitlines()[-1]
    assert "Traceback" not in err
    assert [path.name for path in rows.parent.iterdir()] == ["rows.jsonl"]
