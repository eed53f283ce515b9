"""Runs of packed rows on the CPU: they learn, evaluate on padded rows, and end with the same bits after a stop."""

import pytest
import torch

import brimful
from brimful.data.tokenizer.folder import TokenizerFacts
from brimful.planning.plan import Plan
from brimful.tasks.language import LanguageOptions, Pretrain
from brimful.training import metrics
from brimful.training.events import last_steps, read_events
from tests.packing.small import Lines, draw_rows
from tests.tasks.tiny import make_model, save, tiny_chat
from tests.training import runs

HOW = {
    "max_steps": 6, "lr": 1e-2, "schedule": "constant", "device": "cpu", "cache": False, "quiet": True, "workers": 0,
    "layout": "packed", "generate_rows": 2,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _small_matrices():
    """The peak of the CPU takes longer to measure than these runs to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "MATRIX", {"cpu": 64})
        patch.setattr(metrics, "TIMED_S", 0.001)
        yield


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """The chat task with a T5 of two blocks that has dropout and has learnt nothing, its rows, and its packed plan."""
    tiny = tiny_chat(tmp_path_factory)
    folder = tmp_path_factory.mktemp("packed")
    vocabulary = TokenizerFacts.read(tiny.tokenizer).vocab_size
    model = save(make_model(vocabulary, dropout_rate=0.1), folder / "model", tiny.tokenizer)
    task, store = Pretrain(LanguageOptions(model=str(model))), str(tiny.folder / "store")
    options = {"global_batch": 12, "micro_batch": 5, "layout": "packed", "workers": 0, "memory_limit": "256MiB"}
    brimful.plan(task, data=store, device="cpu", cache=False, **options).save(folder / "plan.json")
    return task, store, folder


def train(chat, name, **options):
    task, store, folder = chat
    options = {**HOW, "plan": folder / "plan.json", **options}
    ending = brimful.train(task, store, run=folder / name, **options)
    assert ending.step == options["max_steps"]
    return folder / name


@pytest.fixture(scope="module")
def whole(chat):
    return train(chat, "whole", valid=chat[1], eval_every=3)


def test_the_run_follows_its_packed_plan(whole):
    plan = Plan.load(whole / "plan.json")
    assert plan.layout == "packed"
    steps = last_steps(read_events(whole / "events.jsonl"))
    assert {event["micro_batches"] for event in steps} == {3}


def test_what_is_computed_for_nothing_is_the_fill(whole):
    """Tokens are filled up to a multiple of 64, for encoder and decoder, in three micro-batches at least."""
    for step in last_steps(read_events(whole / "events.jsonl")):
        computed = step["tokens"] / (1 - step["padding"])
        assert 0 < step["padding"] < 1 and computed == pytest.approx(round(computed / 64) * 64)


def test_the_loss_falls(whole):
    losses = list(runs.losses(whole).values())
    assert losses[-1] < 0.9 * losses[0]


def test_evaluation_runs_on_padded_rows_in_the_same_run(chat, whole):
    """Its loss is that of the saved model over all rows at once, in transformers' own forward."""
    task, store, _ = chat
    evaluated = [event for event in read_events(whole / "events.jsonl") if event["event"] == "eval"]
    assert [event["step"] for event in evaluated] == [0, 3, 6]
    model = type(task.model()).from_pretrained(whole / "model").eval()
    with torch.no_grad():
        loss = task.loss(model, task.collate([*task.rows(store)]))
    assert evaluated[-1]["loss"] == pytest.approx(float(loss.sum / loss.count), rel=1e-5)


def test_stopped_and_resumed_it_ends_with_the_same_bits(chat, whole):
    run = train(chat, "stopped", max_steps=3)
    train(chat, "stopped", resume=True)
    assert runs.losses(run) == runs.losses(whole)
    pairs = zip(runs.weights(run).values(), runs.weights(whole).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_workers_pass_on_the_same_rows(chat, whole):
    assert runs.losses(train(chat, "workers", workers=2)) == runs.losses(whole)


def test_rows_of_a_list_are_packed_too(tmp_path):
    rows = draw_rows(40)
    ending = brimful.train(Lines(), rows, run=tmp_path / "run", **{**HOW, "max_steps": 8, "valid": rows[:8]})
    losses = list(runs.losses(tmp_path / "run").values())
    assert ending.step == 8 and losses[-1] < losses[0]
    assert Plan.load(tmp_path / "run" / "plan.json").choice("layout").requested == "packed"
