"""`brimful eval` as a user types it."""

import json
import shutil

import pytest

from brimful.files import FileLock
from tests.cli.test_cli import run
from tests.tasks.tiny import ROWS, tiny_chat, write_jsonl
from tests.tasks.tiny_causal import CONVERSATIONS, tiny_causal


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_chat(tmp_path_factory)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return tiny_causal(tmp_path_factory)


def evaluate(tiny, *flags, capsys, model=None, data=None):
    return run(
        "eval", str(model or tiny.model), str(data or tiny.raw), "--device", "cpu", *flags, capsys=capsys
    )  # fmt: skip


def test_raw_rows_are_tokenized_on_the_fly_and_nothing_is_left(tiny, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = evaluate(tiny, "--json", capsys=capsys)
    report = json.loads(out)
    assert code == 0, err
    assert report["rows"] == report["rows_available"] == 24
    assert report["bleu"] > 50 and report["chrf"] > 50 and report["loss"] < 1
    assert report["tokens"] == tiny.store.meta.tokens["response"]
    assert report["generation"]["max_new_tokens"] == tiny.store.longest[1]
    assert len(report["samples"]) == 8
    assert "tokenized 24" in err
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_evaluation_left_is_removed_and_one_at_work_is_let_alone(tiny, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "brimful-eval-killed" / "store").mkdir(parents=True)
    with FileLock(tmp_path / "brimful-eval-at-work", folder=True):
        evaluate(tiny, "--metrics", "loss", capsys=capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["brimful-eval-at-work"]


def test_a_token_store_gives_the_same_scores_as_its_rows(tiny, capsys):
    scores = []
    for data in (tiny.raw, tiny.folder / "store"):
        _, out, _ = evaluate(tiny, "--rows", "6", "--json", capsys=capsys, data=data)
        scores.append([json.loads(out)[name] for name in ("loss", "bleu", "chrf", "tokens")])
    assert scores[0] == scores[1]


def test_a_run_is_evaluated_on_rows_truncated_as_in_training(tiny, capsys, tmp_path):
    shutil.copytree(tiny.model, tmp_path / "checkpoints" / "step-00000010" / "model")
    (tmp_path / "model").symlink_to("checkpoints/step-00000010/model")
    request = {"task": "sft", "data": "rows", "run": str(tmp_path), "task_options": {"max_tokens": "6"}}
    (tmp_path / "run.json").write_text(json.dumps(request))
    by_run, by_flag, plain = (
        json.loads(evaluate(tiny, "--metrics", "loss", "--json", *flags, capsys=capsys, model=model)[1])
        for model, flags in ((tmp_path, []), (tiny.model, ["--max-tokens", "6"]), (tiny.model, []))
    )
    assert by_run["loss"] == by_flag["loss"] != plain["loss"]
    assert by_run["max_tokens"] == by_flag["max_tokens"] == {"prompt": 6, "response": 6}
    assert by_run["truncated"] == by_flag["truncated"] and by_run["truncated"]["prompt"] == 24
    assert plain["truncated"] == {"prompt": 0, "response": 0} and plain["max_tokens"]["prompt"] == 256
    _, out, _ = evaluate(tiny, "--metrics", "loss", capsys=capsys, model=tmp_path)
    assert "of 24 rows (limit 6+6 tokens, as in the model's run)" in " ".join(out.split())
    _, out, _ = evaluate(tiny, "--metrics", "loss", capsys=capsys, model=tmp_path, data=tiny.folder / "store")
    assert "no row (limit 256+256 tokens, when the token store was made)" in " ".join(out.split())


def test_a_memory_limit_is_kept_and_changes_no_score(tiny, capsys):
    _, plain, _ = evaluate(tiny, "--json", capsys=capsys)
    code, out, err = evaluate(tiny, "--json", "--memory-limit", "500KiB", capsys=capsys)
    plain, report = json.loads(plain), json.loads(out)
    assert code == 0, err
    assert report["peak_bytes"] <= report["limit_bytes"] == 500 * 1024
    assert (report["bleu"], report["samples"]) == (plain["bleu"], plain["samples"])
    assert report["forward"]["generation"]["batches"] > plain["forward"]["generation"]["batches"]


def test_it_prints_a_table(tiny, capsys):
    code, out, _ = evaluate(tiny, "--rows", "4", capsys=capsys)
    assert code == 0
    assert "BLEU-4" in out and "perplexity" in out and "4 of 24 rows (seed 0)" in " ".join(out.split())


def test_some_rows_and_some_metrics(tiny, capsys):
    _, out, _ = evaluate(tiny, "--rows", "5", "--metrics", "loss", "--json", capsys=capsys)
    report = json.loads(out)
    assert report["rows"] == 5 and "bleu" not in report and report["samples"] == []
    _, out, _ = evaluate(tiny, "--rows", "5", "--metrics", "bleu", "--beams", "2", "--json", capsys=capsys)
    report = json.loads(out)
    assert report["loss"] is None and report["bleu"] > 0 and report["generation"]["beams"] == 2


def test_all_answers_go_into_a_file(tiny, tmp_path, capsys):
    target = tmp_path / "answers.jsonl"
    evaluate(tiny, "--output", str(target), "--metrics", "loss", "--max-new-tokens", "4", capsys=capsys)
    lines = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [line["row"] for line in lines] == list(range(24))
    assert set(lines[0]) == {"row", "prompt", "response", "reference"}
    assert lines[0]["reference"] == ROWS[0]["response"]
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--metrics", "rouge"], "--metrics rouge must be names separated by commas"),
        (["--rows", "0"], "--rows 0"),
        (["--beams", "0"], "--beams 0"),
        (["--fill", "2"], "--fill 2"),
        (["--memory-limit", "8KiB"], "the model alone does not fit the CPU"),
        (["--memory-limit", "100KiB"], "does not fit"),
        (["--output", "no/such/folder/a.jsonl"], "--output no/such/folder/a.jsonl"),
    ],
    ids=str,
)
def test_a_mistake_is_one_message_and_exit_code_2(tiny, capsys, flags, message):
    code, out, err = evaluate(tiny, *flags, capsys=capsys)
    assert code == 2 and not out
    assert message in err.strip().splitlines()[-1]
    assert "Traceback" not in err


def test_an_error_of_the_evaluation_is_not_blamed_on_the_file_of_answers(tiny, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="gone"):
        evaluate(tiny, "--output", str(tmp_path / "a.jsonl"), capsys=capsys)


def test_a_missing_model_and_missing_data_are_refused(tiny, tmp_path, capsys):
    code, _, err = evaluate(tiny, capsys=capsys, model=tmp_path)
    assert code == 2 and "is not a model folder" in err
    code, _, err = evaluate(tiny, capsys=capsys, data=tmp_path / "none.jsonl")
    assert code == 2 and "none.jsonl" in err


def test_a_failure_leaves_no_file(tiny, tmp_path, capsys):
    code, _, _ = evaluate(tiny, "--output", str(tmp_path / "a.jsonl"), capsys=capsys, data=tmp_path / "none.jsonl")
    assert code == 2 and list(tmp_path.iterdir()) == []


def test_conversations_are_scored_by_their_last_reply(causal, capsys, tmp_path):
    target = tmp_path / "answers.jsonl"
    code, out, err = evaluate(causal, "--json", "--output", str(target), capsys=capsys)
    report = json.loads(out)
    assert code == 0, err
    assert report["rows"] == 24 and report["loss"] < 0.5 and report["chrf"] == pytest.approx(100)
    assert report["tokens"] == sum(int(row["spans"][1::2].sum()) for row in causal.store), "of replies alone"
    lines = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [line["response"] for line in lines] == [one[-1]["content"] for one in CONVERSATIONS]
    _, out, _ = evaluate(causal, "--json", capsys=capsys, data=causal.folder / "store")
    assert json.loads(out)["loss"] == report["loss"]
    _, out, _ = evaluate(causal, capsys=capsys)
    assert f"mean over {report['tokens']} tokens of replies" in out
    assert "no row (limit 512 tokens, by default)" in " ".join(out.split())


def test_whole_texts_have_loss_and_perplexity_only(causal, capsys, tmp_path):
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": one[-1]["content"]} for one in CONVERSATIONS])
    code, out, err = evaluate(causal, "--json", capsys=capsys, data=texts)
    report = json.loads(out)
    assert code == 0, err
    assert report["perplexity"] > 1 and "bleu" not in report and report["samples"] == []
    code, out, err = evaluate(causal, "--metrics", "bleu", capsys=capsys, data=texts)
    assert code == 2 and "has whole texts, and answers need conversations. Try: --metrics loss" in err


def test_long_conversations_are_counted(causal, capsys):
    _, out, _ = evaluate(causal, "--metrics", "loss", "--max-tokens", "30", capsys=capsys)
    assert "truncated 12 of 20 rows (limit 30 tokens, as requested)" in " ".join(out.split())


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("eval", "--help", capsys=capsys)
    flags = {word.strip("│ ,[]") for word in out.split() if word.startswith("--")}
    assert flags == {
        "--rows", "--seed", "--metrics", "--max-new-tokens", "--beams", "--columns", "--max-tokens", "--chat-template", "--reference", "--output", "--device",
        "--memory-limit", "--host-limit", "--fill", "--json", "--traceback", "--lang",
    }  # fmt: skip
