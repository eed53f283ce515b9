"""`brimful data tokenizer` as a user types it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from brimful.cli.app import main
from tests.data.tokenizer.tokenizer_rows import write_rows


def run(*tokens, capsys):
    """Exit code, stdout, stderr of a command run in this process."""
    code = 0
    try:
        main(["data", "tokenizer", *map(str, tokens)])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet", 200)


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("--help", capsys=capsys)
    flags = {word.strip("│ ,[]") for word in out.split() if word.startswith("--")}
    assert flags == {
        "--output", "--vocab-size", "--kind", "--columns", "--host-limit", "--model", "--seed", "--max-bad", "--overwrite",
        "--json", "--traceback", "--lang",
    }  # fmt: skip


def test_it_prints_one_json_object_and_progress_beside_it(rows, tmp_path, capsys):
    code, out, err = run(
        rows, "--output", tmp_path / "t", "--model", "chatlm-tiny", "--vocab-size", 700, "--json", capsys=capsys
    )
    report = json.loads(out)
    assert code == 0
    assert (report["vocab_size"], report["round_trip"], report["total"]["unknown_rate"]) == (700, 1.0, 0.0)
    assert [check["model"] for check in report["ids"]] == [4096, 0, 1, 0]
    assert {
        "rows_seen",
        "rows_used",
        "characters_seen",
        "characters_used",
        "kind",
        "choices",
        "fields",
        "special_ids",
    } <= set(report)
    assert {"characters_per_token", "byte_share", "unknown_rate"} <= set(report["fields"]["prompt"])
    assert "tokenizer: read 200 rows" in err
    assert json.loads((tmp_path / "t" / "report.json").read_text()) == report


def test_overwrite_replaces_a_tokenizer(rows, tmp_path, capsys):
    asked = (rows, "--output", tmp_path / "t", "--vocab-size", 600, "--json")
    _, first, _ = run(*asked, capsys=capsys)
    code, _, err = run(*asked, "--seed", 1, capsys=capsys)
    assert code == 2
    assert "or --overwrite" in err.strip().splitlines()[-1]
    code, second, _ = run(*asked, "--seed", 1, "--overwrite", capsys=capsys)
    assert code == 0
    assert json.loads(first)["fingerprint"] != json.loads(second)["fingerprint"]
    assert json.loads((tmp_path / "t" / "report.json").read_text()) == json.loads(second)


def test_it_prints_a_table(rows, tmp_path, capsys):
    code, out, _ = run(rows, "--output", tmp_path / "t", "--kind", "unigram", "--vocab-size", 700, capsys=capsys)
    assert code == 0
    assert "700 unigram entries" in " ".join(out.split())
    assert "matches" in out and "reason" in out


def test_the_model_of_a_folder_gives_size_and_ids(rows, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    config = {"vocab_size": 640, "pad_token_id": 0, "eos_token_id": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    _, out, _ = run(rows, "--output", tmp_path / "t", "--model", tmp_path / "model", "--json", capsys=capsys)
    report = json.loads(out)
    assert report["vocab_size"] == 640
    assert [check["matches"] for check in report["ids"]] == [True, True, True, None]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--vocab-size", "30000"], "--vocab-size 30000 exceeds the model's vocab_size of 29298"),
        (["--vocab-size", "5000", "--model", "chatlm-tiny"], "vocab_size of 4096"),
        (["--vocab-size", "100"], "--vocab-size 100 must be at least 512"),
        (
            ["--model", "nowhere"],
            "--model nowhere is not known. Try: chatlm-tiny, chatlm-base, causal-tiny, causal-small, or a folder",
        ),
        (["--host-limit", "much"], "--host-limit"),
        (["--host-limit", "50MiB"], "--host-limit 50MiB is too small"),
        (["--kind", "words"], "words"),
        (["--columns", "prompt=nope"], "nope"),
        (["--max-bad", "3"], "--max-bad 3"),
        (["--seed", "-1"], "--seed -1"),
        (["--unknown"], "--unknown"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tokens, message, rows, tmp_path, capsys):
    code, out, err = run(rows, "--output", tmp_path / "t", *tokens, capsys=capsys)
    assert (code, out) == (2, "")
    assert message in err.strip().splitlines()[-1]
    assert err.strip().splitlines()[-1].startswith("brimful: ")
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "message"),
    [("{", "cannot be read"), ("[]", "no vocab_size"), ('{"vocab_size": 4096, "pad_token_id": 5}', "pad_token_id 5")],
)
def test_a_config_that_does_not_fit_is_one_sentence(config, message, rows, tmp_path, capsys):
    (tmp_path / "config.json").write_text(config)
    code, _, err = run(rows, "--output", tmp_path / "t", "--model", tmp_path, capsys=capsys)
    assert code == 2
    assert message in err.strip().splitlines()[-1]


def test_missing_files_are_told(tmp_path, capsys):
    assert run("--output", tmp_path / "t", capsys=capsys)[0] == 2
    code, _, err = run(tmp_path / "nothing.parquet", "--output", tmp_path / "t", capsys=capsys)
    assert code == 2
    assert "nothing.parquet" in err.strip().splitlines()[-1]
    assert not list(tmp_path.iterdir())


def command(*tokens):
    return [sys.executable, "-m", "brimful", "data", "tokenizer", *map(str, tokens)]


def test_another_process_gives_the_same_bytes(rows, tmp_path, capsys):
    options = ("--kind", "unigram", "--vocab-size", 900)
    run(rows, "--output", tmp_path / "one", *options, capsys=capsys)
    other = command(rows, "--output", tmp_path / "two", *options)
    subprocess.run(other, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()


def test_ctrl_c_while_training_leaves_nothing(tmp_path):
    path = write_rows(tmp_path / "rows.parquet", 8_000, words=60_000)
    with subprocess.Popen(
        command(path, "--output", tmp_path / "t"), stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background has it ignored
    ) as running:  # fmt: skip
        while not list(tmp_path.glob(".t.*.part")):
            time.sleep(0.02)
        time.sleep(1.0)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=20)
    assert running.returncode == 130
    assert err.splitlines()[-1].endswith("stopped by Ctrl-C")
    assert [one.name for one in tmp_path.iterdir()] == ["rows.parquet"]
