"""`brimful eval` as a user types it."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.cli.test_cli import run
from tests.tasks.tiny import ROWS, the_place


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return the_place(tmp_path_factory)


def call(place, *flags, capsys, model=None, data=None):
    return run(
        "eval", str(model or place.model), str(data or place.raw), "--device", "cpu", *flags, capsys=capsys
    )  # fmt: skip


def test_raw_rows_are_tokenised_on_the_fly_and_nothing_is_left(place, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = call(place, "--json", capsys=capsys)
    report = json.loads(out)
    assert code == 0, err
    assert report["rows"] == report["rows_available"] == 24
    assert report["bleu"] > 50 and report["chrf"] > 50 and report["loss"] < 1
    assert report["tokens"] == place.store.meta.tokens["response"]
    assert report["generation"]["max_new_tokens"] == place.store.longest[1]
    assert len(report["samples"]) == 8
    assert "packed 24 rows" in err
    assert list(tmp_path.iterdir()) == []


def test_a_store_gives_the_same_figures_as_its_rows(place, capsys):
    figures = []
    for data in (place.raw, place.folder / "store"):
        _, out, _ = call(place, "--rows", "6", "--json", capsys=capsys, data=data)
        figures.append([json.loads(out)[name] for name in ("loss", "bleu", "chrf", "tokens")])
    assert figures[0] == figures[1]


def test_a_run_is_measured_on_rows_cut_as_in_training_and_says_so(place, capsys, tmp_path):
    shutil.copytree(place.model, tmp_path / "checkpoints" / "step-00000010" / "model")
    (tmp_path / "model").symlink_to("checkpoints/step-00000010/model")
    asked = json.dumps({"task": "chatlm-sft", "data": "rows", "asked": {"max_tokens": "6"}})
    (tmp_path / "run.json").write_text(asked)
    by_run, by_flag, plain = (
        json.loads(call(place, "--metrics", "loss", "--json", *flags, capsys=capsys, model=model)[1])
        for model, flags in ((tmp_path, []), (place.model, ["--max-tokens", "6"]), (place.model, []))
    )
    assert by_run["loss"] == by_flag["loss"] != plain["loss"]
    assert by_run["max_tokens"] == by_flag["max_tokens"] == {"prompt": 6, "response": 6}
    assert by_run["truncated"] == by_flag["truncated"] and by_run["truncated"]["prompt"] == 24
    assert plain["truncated"] == {"prompt": 0, "response": 0} and plain["max_tokens"]["prompt"] == 256
    _, out, _ = call(place, "--metrics", "loss", capsys=capsys, model=tmp_path)
    assert "longer than 6+6 tokens are cut, as in the model's run: 24 prompts and" in " ".join(out.split())
    _, out, _ = call(place, "--metrics", "loss", capsys=capsys, model=tmp_path, data=place.folder / "store")
    assert "256+256 tokens are cut, when they were packed: no row has one" in " ".join(out.split())


def test_a_memory_limit_is_kept_and_changes_nothing(place, capsys):
    _, plain, _ = call(place, "--json", capsys=capsys)
    code, out, err = call(place, "--json", "--memory-limit", "500KiB", capsys=capsys)
    plain, report = json.loads(plain), json.loads(out)
    assert code == 0, err
    assert report["peak_bytes"] <= report["limit_bytes"] == 500 * 1024
    assert (report["bleu"], report["samples"]) == (plain["bleu"], plain["samples"])
    assert report["forward"]["generation"]["batches"] > plain["forward"]["generation"]["batches"]


def test_it_prints_a_table(place, capsys):
    code, out, _ = call(place, "--rows", "4", capsys=capsys)
    assert code == 0
    assert "BLEU-4" in out and "perplexity" in out and "4 rows, chosen with seed 0 from 24" in " ".join(out.split())


def test_some_rows_and_some_figures(place, capsys):
    _, out, _ = call(place, "--rows", "5", "--metrics", "loss", "--json", capsys=capsys)
    report = json.loads(out)
    assert report["rows"] == 5 and "bleu" not in report and report["samples"] == []
    _, out, _ = call(place, "--rows", "5", "--metrics", "bleu", "--beams", "2", "--json", capsys=capsys)
    report = json.loads(out)
    assert report["loss"] is None and report["bleu"] > 0 and report["generation"]["beams"] == 2


def test_all_answers_go_into_a_file(place, tmp_path, capsys):
    target = tmp_path / "answers.jsonl"
    call(place, "--output", str(target), "--metrics", "loss", "--max-new-tokens", "4", capsys=capsys)
    lines = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [line["row"] for line in lines] == list(range(24))
    assert set(lines[0]) == {"row", "prompt", "response", "reference"}
    assert lines[0]["reference"] == ROWS[0]["response"]
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--metrics", "rouge"], "--metrics rouge: give some of loss, bleu, chrf"),
        (["--rows", "0"], "--rows 0"),
        (["--beams", "0"], "--beams 0"),
        (["--fill", "2"], "--fill 2"),
        (["--memory-limit", "8KiB"], "the model alone does not fit the CPU"),
        (["--memory-limit", "100KiB"], "does not fit"),
        (["--output", "no/such/folder/a.jsonl"], "--output no/such/folder/a.jsonl"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence_and_exit_code_2(place, capsys, flags, said):
    code, out, err = call(place, *flags, capsys=capsys)
    assert code == 2 and not out
    assert said in err.strip().splitlines()[-1]
    assert "Traceback" not in err


def test_a_folder_without_a_model_and_data_that_is_not_there(place, tmp_path, capsys):
    code, _, err = call(place, capsys=capsys, model=tmp_path)
    assert code == 2 and "is no model folder" in err
    code, _, err = call(place, capsys=capsys, data=tmp_path / "none.jsonl")
    assert code == 2 and "none.jsonl" in err


def test_a_failure_leaves_no_file(place, tmp_path, capsys):
    code, _, _ = call(place, "--output", str(tmp_path / "a.jsonl"), capsys=capsys, data=tmp_path / "none.jsonl")
    assert code == 2 and list(tmp_path.iterdir()) == []


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("eval", "--help", capsys=capsys)
    flags = {word.strip("│ ,[]") for word in out.split() if word.startswith("--")}
    assert flags == {
        "--rows", "--seed", "--metrics", "--max-new-tokens", "--beams", "--columns", "--max-tokens", "--output", "--device",
        "--memory-limit", "--host-limit", "--fill", "--json",
    }  # fmt: skip


def test_help_imports_nothing_heavy():
    script = (
        "import sys, brimful.cli\ntry: brimful.cli.main(['eval', '--help'])\n"
        "finally: assert not {'torch', 'pyarrow', 'tokenizers', 'numpy', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
