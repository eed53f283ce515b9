"""A run killed at any moment and resumed gives the same losses as one that was left alone, bit for bit."""

import json
import os
import signal
import time

import pytest
import torch

from brimful.training.events import read_events
from tests.training import runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def plan(folder):
    return runs.plan_file(folder)


@pytest.fixture(scope="module")
def whole(folder, plan):
    """The run that nobody disturbs."""
    assert runs.finish(runs.start(folder / "whole", plan)) == [0]
    return folder / "whole"


def same(one, other) -> bool:
    pairs = zip(runs.weights(one).values(), runs.weights(other).values(), strict=True)
    return runs.losses(one) == runs.losses(other) and all(torch.equal(a, b) for a, b in pairs)


def test_a_run_of_random_numbers_is_the_same_twice(folder, plan, whole):
    assert runs.finish(runs.start(folder / "again", plan)) == [0]
    assert same(folder / "again", whole)
    assert sorted(runs.losses(whole)) == list(range(1, runs.STEPS + 1))


def test_killed_and_resumed_it_is_the_same(folder, plan, whole):
    met = runs.killed_and_resumed(folder / "killed", plan, kills=3, seed=3, longest_s=1.2)
    assert met >= 1, "no kill met a live run"
    assert same(folder / "killed", whole)


@pytest.mark.torture
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_twenty_times_it_is_the_same(folder, processes):
    plan, steps = runs.plan_file(folder, processes), {1: 450, 2: 1200}[processes]
    undisturbed = folder / f"whole-{processes}-of-torture"
    assert runs.finish(runs.start(undisturbed, plan, processes, max_steps=steps)) == [0] * processes
    run = folder / f"killed-{processes}-of-torture"
    longest_s = {1: 0.8, 2: 2.5}[processes]
    met = runs.killed_and_resumed(
        run, plan, kills=20, seed=5, longest_s=longest_s, processes=processes, max_steps=steps
    )
    print(f"{met} of 20 kills met a live run of {processes} process(es)")
    assert met >= 10
    assert same(run, undisturbed)


def test_two_processes_killed_and_resumed_are_the_same(folder):
    plan = runs.plan_file(folder, 2)
    assert runs.finish(runs.start(folder / "two", plan, 2)) == [0, 0]
    met = runs.killed_and_resumed(folder / "two-killed", plan, kills=1, seed=8, longest_s=2.5, processes=2)
    assert met == 1
    assert same(folder / "two-killed", folder / "two")


def test_processes_and_workers_change_how_a_step_is_made_and_not_what_it_is(folder):
    """One process; two; and one, then two with a worker each, then one. No dropout: its numbers differ between processes."""
    one, two = runs.plan_file(folder), runs.plan_file(folder, 2)
    how = {"task": runs.Run(dropout=0.0, dtype=torch.float64), "schedule": "constant"}
    assert runs.finish(runs.start(folder / "one", one, **how)) == [0]
    assert runs.finish(runs.start(folder / "both", two, 2, **how)) == [0, 0]
    run = folder / "changed"
    assert runs.finish(runs.start(run, one, max_steps=4, **how)) == [0]
    assert runs.finish(runs.start(run, two, 2, max_steps=8, workers=1, **how)) == [0, 0]
    assert runs.finish(runs.start(run, one, workers=0, **how)) == [0]
    alone = runs.losses(folder / "one")
    assert runs.losses(folder / "both") == pytest.approx(alone, rel=1e-12)
    assert runs.losses(run) == pytest.approx(alone, rel=1e-12)
    samples = [event["samples"] for event in read_events(run / "events.jsonl") if event["event"] == "resume"]
    assert samples == [4 * 16, 8 * 16]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_signal_saves_and_leaves_in_good_order(folder, plan, whole, number):
    run = folder / f"stopped-{number}"
    (process,) = runs.start(run, plan, save_every=100)
    while not (run / "events.jsonl").exists() or b'"step": 2' not in (run / "events.jsonl").read_bytes():
        time.sleep(0.002)
    os.kill(process.pid, number)
    assert runs.finish([process]) == [0]
    end = list(read_events(run / "events.jsonl"))[-1]
    assert end["event"] == "end" and end["reason"] in ("interrupted", "finished")
    assert (run / "checkpoints" / f"step-{end['step']:08}" / "manifest.json").is_file()
    assert runs.finish(runs.start(run, plan)) == [0]
    assert same(run, whole)


@pytest.mark.parametrize(
    ("stop", "workers"), [("SIGTERM", 0), ("SIGTERM", 1), ("SIGINT", 0), ("SIGINT", 1), ("time limit", 0)]
)
def test_a_run_that_waits_for_rows_saves_at_once_what_is_done(folder, plan, whole, stop, workers):
    run = folder / f"waiting-{stop}-{workers}"
    plan, how = runs.with_workers(plan, workers), {"task": runs.Waits(run), "save_every": 100}
    limit = {"time_limit": "4s"} if stop == "time limit" else {}
    (process,) = runs.start(run, plan, **how, **limit)
    while not (run / "waits").exists() and process.is_alive():
        time.sleep(0.01)
    time.sleep(0.3)  # what a worker has read ahead is trained on
    if stop != "time limit":
        os.kill(process.pid, getattr(signal, stop))
    assert runs.finish([process], within_s=30) == [0]
    end = list(read_events(run / "events.jsonl"))[-1]
    assert (end["event"], end["reason"]) == ("end", "time-limit" if limit else "interrupted")
    assert (run / "checkpoints" / f"step-{end['step']:08}" / "manifest.json").is_file() and end["step"] > 0
    (run / "go").touch()
    assert runs.finish(runs.start(run, plan, **how)) == [0]
    assert same(run, whole)


def damaged(run, how) -> str:
    """Hurt the newest checkpoint; the name of what was hurt."""
    newest = max((run / "checkpoints").glob("step-*"))
    if how == "no manifest":
        (newest / "manifest.json").unlink()
    elif how == "missing file":
        (newest / "optimizer.pt").unlink()
    elif how == "truncated":
        os.truncate(newest / "state.pt", 100)
    else:
        file = newest / "model" / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    return newest.name


@pytest.mark.parametrize("how", ["flipped byte", "truncated", "missing file", "no manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(folder, plan, whole, how):
    run = folder / how.replace(" ", "-")
    assert runs.finish(runs.start(run, plan, max_steps=6)) == [0]
    hurt = damaged(run, how)
    assert runs.finish(runs.start(run, plan)) == [0]
    events = list(read_events(run / "events.jsonl"))
    assert any(event["event"] == "note" and hurt in event["sentence"] for event in events)
    assert [event["step"] for event in events if event["event"] == "resume"] == [5]
    assert len(runs.losses(run)) == runs.STEPS


def test_with_every_checkpoint_damaged_nothing_is_started_over(folder, plan):
    run = folder / "all-damaged"
    assert runs.finish(runs.start(run, plan, max_steps=2, keep=1)) == [0]
    damaged(run, "flipped byte")
    assert runs.finish(runs.start(run, plan)) == [2]


def test_another_data_set_is_refused(folder, plan):
    run = folder / "other-data"
    assert runs.finish(runs.start(run, plan, max_steps=2)) == [0]
    assert runs.finish(runs.start(run, plan, task=runs.Other())) == [2]


def test_the_request_is_kept_in_the_run(whole):
    request = json.loads((whole / "run.json").read_text())
    assert request["options"]["max_steps"] == runs.STEPS and request["data"] == "rows"
