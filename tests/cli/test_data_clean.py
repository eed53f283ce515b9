"""`brimful data clean` as it is typed."""

import json

import pyarrow.parquet as pq
import pytest

from tests.cli.test_cli import run
from tests.data.clean.clean_rows import varied


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = varied(40)
    path.write_text(
        "\n".join(json.dumps({"prompt": prompt, "response": response}) for prompt, response in [*rows, rows[0]])
    )
    return path


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("data", "clean", "--help", capsys=capsys)
    flags = {word.strip("│ ,[]") for word in out.split() if word.startswith("--")}
    assert flags == {
        "--output", "--columns", "--tokenizer", "--min-chars", "--max-chars", "--max-tokens", "--near", "--no-near",
        "--valid", "--test", "--seed", "--host-limit", "--max-bad", "--overwrite", "--json", "--traceback", "--lang",
    }  # fmt: skip


def test_rows_are_cleaned_and_the_report_is_one_json_object(data, tmp_path, capsys):
    out = tmp_path / "out"
    code, text, err = run("data", "clean", str(data), "--output", str(out), "--valid", "5", "--json", capsys=capsys)
    report = json.loads(text)
    assert code == 0
    assert (report["rows_in"], report["rows_out"], report["dropped"]["duplicate"]) == (41, 40, 1)
    assert {"rows_in", "rows_out", "dropped", "columns", "files", "seconds", "peak_bytes"} <= set(report)
    assert report == json.loads((out / "clean.json").read_text())
    assert pq.read_metadata(report["files"]["valid"]["path"]).num_rows == 5
    assert "clean: read" in err


def test_the_table_says_what_was_dropped(data, tmp_path, capsys):
    code, text, _ = run("data", "clean", str(data), "--output", str(tmp_path / "out"), capsys=capsys)
    assert code == 0
    assert "duplicate" in text and "−1" in text and "peak memory" in text


def test_what_was_not_read_is_a_note(data, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(data.read_bytes())
    (folder / "more.lz4").write_text("x")
    _, text, _ = run("data", "clean", str(folder), "--output", str(tmp_path / "out"), "--json", capsys=capsys)
    assert json.loads(text)["notes"] == [f"not read: {folder}/more.lz4 (unknown format)"]


def test_near_duplicates_can_be_kept(data, tmp_path, capsys):
    row = json.loads(data.read_text().splitlines()[0])
    with data.open("a") as file:
        file.write("\n" + json.dumps(row | {"response": row["response"] + "x"}))
    _, text, _ = run(
        "data", "clean", str(data), "--output", str(tmp_path / "a"), "--near", "0.8", "--json", capsys=capsys
    )
    assert json.loads(text)["dropped"]["near_duplicate"] == 1
    _, text, _ = run("data", "clean", str(data), "--output", str(tmp_path / "b"), "--no-near", "--json", capsys=capsys)
    assert json.loads(text)["dropped"]["near_duplicate"] == 0


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--near", "0.2"], "--near 0.2"),
        (["--valid", "100"], "40 rows are left"),
        (["--valid", "1.5"], "--valid 1.5"),
        (["--host-limit", "1MiB"], "--host-limit 1MiB"),
        (["--max-chars", "1,2,3"], "--max-chars 1,2,3"),
        (["--max-tokens", "9"], "--tokenizer"),
        (["--tokenizer", "nowhere", "--max-tokens", "9"], "nowhere"),
        (["--columns", "prompt=nope"], "nope"),
        (["--max-bad", "3"], "--max-bad 3"),
        (["--seed", "-4"], "--seed -4"),
        (["--wrong"], "--wrong"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_message_exit_code_2_and_no_output(data, tmp_path, capsys, tokens, message):
    code, text, err = run("data", "clean", str(data), "--output", str(tmp_path / "out"), *tokens, capsys=capsys)
    message = err.strip().splitlines()[-1]
    assert (code, text) == (2, "")
    assert message.startswith("brimful: error B") and message in message
    assert "Traceback" not in err
    assert not list(tmp_path.glob("out/*.*et"))


def test_files_and_a_folder_must_be_named(data, tmp_path, capsys):
    code, _, err = run("data", "clean", "--output", str(tmp_path / "out"), capsys=capsys)
    assert code == 2 and "FILES is missing" in err
    code, _, err = run("data", "clean", str(data), capsys=capsys)
    assert code == 2 and "--output" in err


def test_a_broken_line_is_named_and_leaves_nothing(data, tmp_path, capsys):
    with data.open("a") as file:
        file.write('\n{"prompt": "a", "resp')
    code, _, err = run("data", "clean", str(data), "--output", str(tmp_path / "out"), capsys=capsys)
    assert code == 2 and f"{data}, line 42" in err
    assert not (tmp_path / "out").exists()
    code, text, _ = run(
        "data", "clean", str(data), "--output", str(tmp_path / "out"), "--max-bad", "0.1", "--json", capsys=capsys
    )
    assert code == 0 and json.loads(text)["dropped"]["broken"] == 1


def test_ctrl_c_says_how_to_continue(data, tmp_path, capsys, monkeypatch):
    from brimful.data.clean import clean

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(clean, "write_splits", stop)
    code, _, err = run("data", "clean", str(data), "--output", str(tmp_path / "out"), capsys=capsys)
    assert code == 130 and "run the same command again to continue" in err
    monkeypatch.undo()
    code, text, _ = run("data", "clean", str(data), "--output", str(tmp_path / "out"), "--json", capsys=capsys)
    assert code == 0 and json.loads(text)["notes"] == ["resuming after 41 rows"]
