"""`brimful data rejects` as a user types it."""

import json
import subprocess
import sys

import pytest

from tests.cli.test_cli import run
from tests.tasks.tiny import tiny_chat, write_jsonl


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_chat(tmp_path_factory)


def call(tiny, output, *flags, capsys, data=None):
    common = ["--device", "cpu", "--max-new-tokens", "12", "--output", str(output)]
    common += [] if "--temperature" in flags else ["--temperature", "1.5"]
    return run("data", "rejects", str(tiny.model), str(data or tiny.raw), *common, *flags, capsys=capsys)


def test_it_prints_one_json_object_and_makes_the_file(tiny, tmp_path, capsys):
    code, out, err = call(tiny, tmp_path / "p.jsonl", "--rows", "20", "--json", capsys=capsys)
    report = json.loads(out)
    assert code == 0, err
    assert report["rows_in"] == 24 and report["not_chosen"] == 4 and report["answers"] == 20
    assert report["rows_out"] == len((tmp_path / "p.jsonl").read_text().splitlines()) > 0
    assert report["output"] == str(tmp_path / "p.jsonl")
    assert "answered 20 of 20 prompts" in err or "loading" in err


def test_it_prints_a_table_with_ten_pairs(tiny, tmp_path, capsys):
    code, out, _ = call(tiny, tmp_path / "p.jsonl", "--max-similarity", "0.95", capsys=capsys)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert code == 0
    assert all(
        word in out for word in ("prompt", "chosen", "rejected", "unfinished", "answers/s", "measured", "Saved to")
    )
    shown = [row for row in rows if row["rejected"][:3] in out and row["prompt"][:2] in out]
    assert len(shown) >= min(10, len(rows))


def test_the_table_is_in_chinese(tiny, tmp_path, capsys):
    code, out, _ = call(tiny, tmp_path / "p.jsonl", "--max-similarity", "0.95", "--lang", "zh", capsys=capsys)
    flat = "".join(out.split())
    assert code == 0 and all(word in flat for word in ("读入", "没有结束", "保留", "条回答", "已保存到"))
    assert "columns:" not in flat and "answers/s" not in flat


def test_the_limit_reaches_the_batches(tiny, tmp_path, capsys):
    reports = []
    for number, limit in enumerate(("1GiB", "300KiB")):
        _, out, _ = call(tiny, tmp_path / f"{number}.jsonl", "--memory-limit", limit, "--json", capsys=capsys)
        reports.append(json.loads(out))
    assert reports[1]["forward"]["batches"] > reports[0]["forward"]["batches"]
    assert reports[1]["peak_bytes"] <= 300 * 1024 < reports[0]["peak_bytes"]
    assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("data", "rejects", "--help", capsys=capsys)
    flags = {word.strip("│ ,[];.") for word in out.split() if word.startswith("--")}
    assert flags == {
        "--output", "--rows", "--seed", "--temperature", "--top-p", "--max-new-tokens", "--min-chars", "--max-similarity",
        "--columns", "--chat-template", "--max-bad", "--device", "--memory-limit", "--host-limit", "--fill", "--overwrite",
        "--json", "--traceback", "--lang",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows", "0"], "--rows 0 must be"),
        (["--temperature", "-1"], "--temperature -1.0 must be"),
        (["--max-similarity", "2"], "--max-similarity 2.0 must be"),
        (["--memory-limit", "many"], "many"),
        (["--min-chars", "1000", "--temperature", "0"], "fewer --min-chars"),
        (["--temperature", "0"], "a higher --temperature"),
        (["--chat-template", "chatml"], "--chat-template chatml is for causal models"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tiny, tmp_path, capsys, flags, message):
    code, out, err = call(tiny, tmp_path / "p.jsonl", *flags, capsys=capsys)
    assert code == 2 and not out
    assert message in err.strip().splitlines()[-1]
    assert "Traceback" not in err and not (tmp_path / "p.jsonl").exists()


def test_an_existing_output_is_a_mistake(tiny, tmp_path, capsys):
    write_jsonl(tmp_path / "p.jsonl", [])
    code, _, err = call(tiny, tmp_path / "p.jsonl", capsys=capsys)
    assert code == 2 and "is an existing file. Try: another file, or --overwrite" in err
    assert call(tiny, tmp_path / "p.jsonl", "--overwrite", capsys=capsys)[0] == 0


def test_errors_are_shown_in_chinese(tiny, tmp_path, capsys):
    _, _, err = call(tiny, tmp_path / "p.jsonl", "--temperature", "0", "--lang", "zh", capsys=capsys)
    last = err.strip().splitlines()[-1]
    assert "没有剩下任何一行" in last and "24 条与原回答相同" in last and "--temperature" in last


@pytest.mark.parametrize(
    ("language", "sentence"), [("en", "run the same command again to continue"), ("zh", "再次运行同一命令即可继续")]
)
def test_ctrl_c_says_how_to_continue(tiny, tmp_path, capsys, monkeypatch, language, sentence):
    from brimful.tasks.generate import Generator

    def stop(self, prompts):
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "answer_batch", stop)
    code, _, err = call(tiny, tmp_path / "p.jsonl", "--lang", language, capsys=capsys)
    assert code == 130 and sentence in err


def test_help_imports_nothing_heavy():
    script = """
import sys, brimful.cli
try: brimful.cli.main(["data", "rejects", "--help"])
except SystemExit: pass
assert not {"torch", "pyarrow", "tokenizers", "transformers", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
