"""`brimful eval MODEL PAIRS`: how well a model tells chosen from rejected."""

import json

import pytest

from brimful.cli.app import main
from brimful.errors import BadOption
from brimful.tasks.load import load_task
from brimful.tasks.pair_scores import PairEvaluation
from tests.tasks.pair_runs import KINDS, Pairs, events, pairs
from tests.tasks.tiny import write_jsonl


@pytest.fixture(scope="module")
def made(tmp_path_factory, request):
    models = {"t5": request.getfixturevalue("tiny").model, "qwen2": request.getfixturevalue("causal").model}
    return {kind: Pairs(kind, model, tmp_path_factory.mktemp(f"scores-{kind}")) for kind, model in models.items()}


def scores(capsys, *tokens):
    main(["eval", *map(str, tokens), "--device", "cpu", "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"loss": "ipo", "beta": 0.3}, {"loss": "simpo"}, {"lora": "r=4"}], ids=str)
def test_a_run_of_dpo_has_the_scores_of_its_own_evaluations(made, kind, options, capsys):
    one = made[kind]
    name = "-".join(map(str, options.values())) or "plain"
    run, _ = one.train(f"run-{name}", one.task(**options), valid=str(one.file), max_steps=6, lr=5e-3)
    own, report = events(run, "eval")[-1], scores(capsys, run, one.file)
    for figure in ("loss", "accuracy", "margin", "logp_chosen"):
        assert report[figure] == pytest.approx(own[figure], rel=1e-4, abs=1e-6), figure
    assert (report["reference"] is None) == ("simpo" in options.values())


def test_an_adapter_trained_further_is_scored_against_its_beginning(made, capsys, tmp_path):
    one = made["qwen2"]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "甲的花？", "response": "白色。"}] * 8)
    one.train(tmp_path / "sft", load_task("sft", {"model": str(one.model), "lora": "r=4"}), rows, lr=1e-2)
    further = Pairs("qwen2", tmp_path / "sft", tmp_path)
    run, _ = further.train("dpo", valid=str(further.file), lr=1e-2)
    own, report = events(run, "eval")[-1], scores(capsys, run, further.file)
    assert report["margin"] == pytest.approx(own["margin"], rel=1e-4, abs=1e-6)
    assert report["reference"] == str(tmp_path / "sft")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_no_dpo_run_compares_log_probabilities_per_token(made, kind, capsys):
    one = made[kind]
    report = scores(capsys, one.model, one.file)
    assert (report["loss"], report["reference"]) == (None, None)
    assert report["rewards/chosen"] == pytest.approx(report["logp_chosen"], rel=1e-6)
    assert report["accuracy"] < 0.05  # its own answers are the rejected ones
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs(kind)]
    better = scores(capsys, one.model, write_jsonl(one.folder / "swapped.jsonl", swapped))
    assert better["accuracy"] == pytest.approx(1 - report["accuracy"])


def test_some_rows_are_scored_and_only_those_by_the_reference(made, capsys):
    one = made["qwen2"]
    report = scores(capsys, one.model, one.file, "--rows", 5, "--reference", one.model)
    assert report["rows"] == 5
    assert (report["margin"], report["accuracy"]) == pytest.approx((0, 0.5), abs=1e-5)


def test_a_memory_limit_changes_no_score(made, capsys):
    one = made["qwen2"]
    whole = scores(capsys, one.model, one.file, "--reference", one.model)
    tight = scores(capsys, one.model, one.file, "--reference", one.model, "--memory-limit", "3MiB")
    assert tight["batches"] > whole["batches"]
    assert tight["logp_chosen"] == pytest.approx(whole["logp_chosen"], rel=1e-5)


def test_the_table_says_what_rewards_are_relative_to(made, capsys):
    one = made["qwen2"]
    main(["eval", str(one.model), str(one.file), "--device", "cpu"])
    out = " ".join(capsys.readouterr().out.split())
    assert "accuracy" in out and "share of pairs with a higher reward for chosen" in out and "BLEU" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--metrics", "bleu"), "--metrics bleu is for rows with replies"),
        (("--output", "a.jsonl"), "--output a.jsonl is for rows with replies"),
        (("--reference", "gone"), "--reference gone does not exist"),
    ],
)
def test_what_cannot_work_is_one_message(made, capsys, flags, message):
    one = made["qwen2"]
    with pytest.raises(SystemExit) as exit_:
        main(["eval", str(one.model), str(one.file), *flags])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_reference_is_for_preferences(made, causal, capsys):
    with pytest.raises(SystemExit):
        main(["eval", str(causal.model), str(causal.raw), "--reference", "none"])
    assert "--reference none is for preferences" in capsys.readouterr().err


def test_a_run_of_new_weights_has_no_reference_that_was_kept(made, tmp_path):
    one = made["qwen2"]
    run, _ = one.train(tmp_path / "new", one.task(model="causal-tiny"), max_steps=1, global_batch=4)
    with pytest.raises(BadOption, match="began with new weights, which are its reference and were not kept"):
        PairEvaluation(run / "model")
    assert PairEvaluation(run / "model", reference="none").reference is None
