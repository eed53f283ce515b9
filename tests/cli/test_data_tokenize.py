"""`brimful data tokenize` as a user types it."""

import json
import resource
import subprocess
import sys

import pytest

from brimful.data.store import Store
from tests.cli.test_cli import run
from tests.data.tokenize_rows import make_tokenizer, rows, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_jsonl(folder / "rows.jsonl", rows(30))
    write_jsonl(folder / "broken.jsonl", rows(3))
    with (folder / "broken.jsonl").open("a") as file:
        file.write("{\n")
    make_tokenizer(folder / "tokenizer")
    return folder


def call(place, output, *flags, capsys, name="rows.jsonl"):
    return run(
        "data", "tokenize", str(place / name), "--tokenizer", str(place / "tokenizer"), "--output", str(output), *flags,
        capsys=capsys,
    )  # fmt: skip


def test_it_prints_one_json_object_and_makes_a_store(place, tmp_path, capsys):
    code, out, err = call(place, tmp_path / "s", "--max-tokens", "9,12", "--json", capsys=capsys)
    report = json.loads(out)
    assert code == 0
    assert (report["rows_in"], report["rows_out"], report["max_tokens"]) == (30, 30, {"prompt": 9, "response": 12})
    assert len(Store.open(tmp_path / "s")) == 30
    assert "tokenized 30 rows" in err


def test_it_prints_a_table(place, tmp_path, capsys):
    code, out, _ = call(place, tmp_path / "s", capsys=capsys)
    assert code == 0
    assert "30 rows of 30" in " ".join(out.split())
    assert "rows truncated" in out and "tokens lost" in out and "measured" in out


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("data", "tokenize", "--help", capsys=capsys)
    flags = {word.strip("│ ,[]") for word in out.split() if word.startswith("--")}
    assert flags - {"--output;"} == {
        "--model", "--tokenizer", "--chat-template", "--train-on", "--output", "--columns", "--max-tokens", "--keep-end", "--host-limit", "--max-bad", "--overwrite", "--json", "--traceback", "--lang",
    }  # fmt: skip


def test_columns_are_taken_as_given(place, tmp_path, capsys):
    _, out, _ = call(place, tmp_path / "s", "--columns", "prompt=response,response=prompt", "--json", capsys=capsys)
    assert json.loads(out)["columns"] == {"prompt": "response", "response": "prompt"}


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("rows.jsonl", ["--max-tokens", "many"], "--max-tokens many"),
        ("rows.jsonl", ["--max-tokens", "1"], "--max-tokens 1"),
        ("rows.jsonl", ["--max-tokens", "9,9,9"], "does not match the 2 fields"),
        ("rows.jsonl", ["--host-limit", "many"], "--host-limit: 'many' is not a size"),
        ("rows.jsonl", ["--host-limit", "1MiB"], "--host-limit 1MiB is too small"),
        ("rows.jsonl", ["--max-bad", "2"], "--max-bad 2"),
        ("broken.jsonl", [], "broken.jsonl, line 4"),
        ("missing.jsonl", [], "missing.jsonl"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence_and_exit_code_2(place, tmp_path, capsys, name, flags, message):
    code, out, err = call(place, tmp_path / "s", *flags, capsys=capsys, name=name)
    assert code == 2
    assert not out
    assert message in err.strip().splitlines()[-1]
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_no_files_is_a_mistake(place, tmp_path, capsys):
    code, _, err = run(
        "data", "tokenize", "--tokenizer", str(place / "tokenizer"), "--output", str(tmp_path / "s"), capsys=capsys
    )
    assert code == 2
    assert "FILES is missing" in err


def test_a_folder_without_a_tokenizer_is_a_mistake(place, tmp_path, capsys):
    code, _, err = run(
        "data", "tokenize", str(place / "rows.jsonl"), "--tokenizer", str(tmp_path), "--output", str(tmp_path / "s"), capsys=capsys
    )  # fmt: skip
    assert code == 2
    assert str(tmp_path) in err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_a_mistake(place, tmp_path, capsys):
    call(place, tmp_path / "s", capsys=capsys)
    code, _, err = call(place, tmp_path / "s", capsys=capsys)
    assert code == 2
    assert "or --overwrite" in err
    assert call(place, tmp_path / "s", "--overwrite", capsys=capsys)[0] == 0


def test_a_full_disk_is_one_sentence_and_leaves_nothing(place, tmp_path):
    write_jsonl(tmp_path / "many.jsonl", rows(2000))
    command = [
        sys.executable, "-m", "brimful", "data", "tokenize", str(tmp_path / "many.jsonl"), "--tokenizer", str(place / "tokenizer"),
        "--output", str(tmp_path / "s"),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000,) * 2),
    )
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith(
            f"{tmp_path / 's'}: a file exceeds what the disk or `ulimit -f` allows. Try: free some space and run the same command again."
        )
    )
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["many.jsonl"]


def test_help_imports_nothing_heavy():
    script = """
import sys, brimful.cli
for command in ("tokenize", "tokenizer"):
    try: brimful.cli.main(["data", command, "--help"])
    except SystemExit: pass
assert not {"torch", "pyarrow", "tokenizers", "transformers", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
