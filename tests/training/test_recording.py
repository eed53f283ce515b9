"""What a run records: of itself when it begins, of every rank in every step, of the machine meanwhile, and for people."""

import os
import socket
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import brimful
from brimful.training import metrics
from brimful.training.events import FORMAT, last_steps, read_events
from brimful.units import GiB
from tests.training import runs

ROWS = [torch.arange(1, 2 + place % 9) for place in range(24)]


class Lengths(brimful.Task):
    """Rows of 1 to 9 tokens, padded."""

    global_batch = 8
    worst_shape = (9,)

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 16))

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        return {"ids": nn.utils.rnn.pad_sequence(list(rows), batch_first=True)}

    def loss(self, model, batch):
        mask = batch["ids"] > 0
        return brimful.Loss((model(batch["ids"]).square().sum(-1) * mask).sum(), mask.sum())


@pytest.fixture(autouse=True, scope="module")
def _small_matrices():
    """The peak of the CPU takes longer to measure than these runs to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "MATRIX", {"cpu": 64})
        patch.setattr(metrics, "TIMED_S", 0.001)
        yield


def train(folder, task=None, **options):
    options = {
        "run": folder,
        "max_steps": 4,
        "device": "cpu",
        "micro_batch": 4,
        "cache": False,
        "quiet": True,
        **options,
    }
    return brimful.train(task or Lengths(), ROWS, **options)


@pytest.fixture(scope="module")
def heard():
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory, heard):
    folder = tmp_path_factory.mktemp("recording") / "run"
    train(folder, memory_limit="256MiB", listeners=[heard.append])
    return folder


@pytest.fixture(scope="module")
def events(run):
    return list(read_events(run / "events.jsonl"))


def of_kind(events, kind):
    return [event for event in events if event["event"] == kind]


def test_a_run_begins_with_what_and_where_it_is(events):
    (begin,) = of_kind(events, "begin")
    assert (begin["format"], begin["version"]) == (FORMAT, brimful.__version__)
    assert (begin["host"], begin["pid"], begin["gpus"]) == (socket.gethostname(), os.getpid(), [])
    assert begin["cores"] >= 1 and begin["ram_limit_bytes"] > GiB


def test_a_step_has_the_memory_of_its_rank(events):
    for step in of_kind(events, "step"):
        (rank,) = step["ranks"]
        assert rank["peak_bytes"] == step["peak_bytes"] > 0
        assert rank["reserved_bytes"] is step["reserved_bytes"] is None  # nobody counts them on a CPU
        assert (rank["rank"], rank["micro_batches"], rank["limit_bytes"]) == (0, step["micro_batches"], 256 * 2**20)
        assert (rank["times"], rank["padding"]) == (step["times"], step["padding"])


def test_the_time_of_a_step_is_split(events):
    for step in of_kind(events, "step"):
        times = step["times"]
        assert set(times) == {"compute_s", "data_s", "communication_s", "other_s"}
        assert all(value >= 0 for value in times.values())
        assert (times["compute_s"], times["communication_s"]) == (pytest.approx(step["seconds"], abs=1e-6), 0.0)


class Counts(Lengths):
    """Counts what goes through the model."""

    def __init__(self):
        super().__init__()
        self.real = self.computed = 0

    def loss(self, model, batch):
        self.real += int((batch["ids"] > 0).sum())
        self.computed += batch["ids"].numel()
        return super().loss(model, batch)


class NotesPadding(brimful.Hook):
    def __init__(self):
        self.shares = []

    def before(self, loop):
        loop.task.real = loop.task.computed = 0

    def after_step(self, loop, result):
        self.shares.append(1 - loop.task.real / loop.task.computed)
        self.before(loop)


def test_padding_is_what_went_through_the_model_for_nothing(tmp_path):
    hook = NotesPadding()
    train(
        tmp_path / "run", Counts(), hooks=[hook], deterministic=True, memory_limit="1GiB"
    )  # else micro-batches of one length may be faster
    steps = last_steps(read_events(tmp_path / "run" / "events.jsonl"))
    assert [step["padding"] for step in steps] == pytest.approx(hook.shares)
    assert max(hook.shares) > 0


def test_every_step_has_the_hosts_memory_as_it_was_sampled(events):
    sampled = {(one["host"]["tree_bytes"], one["host"]["machine_bytes"]) for one in of_kind(events, "sample")}
    assert {(step["host_bytes"], step["machine_bytes"]) for step in of_kind(events, "step")} <= sampled
    assert all(tree > 10 * 2**20 and machine > 0 for tree, machine in sampled)


def test_the_host_is_sampled_by_rank_0(events):
    sample = of_kind(events, "sample")[0]
    assert (sample["rank"], sample["gpu"]) == (0, None)
    names = {"tree_bytes", "machine_bytes", "limit_bytes", "limited_by", "swap_used_bytes", "swap_total_bytes", "workers", "cpu", "read_bytes_per_s"}  # fmt: skip
    assert set(sample["host"]) == names


def test_samples_come_before_the_end(events):
    assert events[-1]["event"] == "end"


def test_listeners_are_not_called_from_the_thread_that_samples(run, events, heard):
    assert [event["event"] for event in heard] == [event["event"] for event in events if event["event"] != "sample"]


def test_the_log_has_the_plan_the_steps_and_the_ending(run):
    text = (run / "log.txt").read_text()
    for words in (f"training in {run}: 4 steps", "plan: micro batch 4", "step 1/4", "step 4/4", "finished: trained 4"):
        assert words in text


def test_the_log_of_a_resumed_run_is_appended_to(tmp_path):
    train(tmp_path / "run", max_steps=2)
    before = (tmp_path / "run" / "log.txt").read_text()
    train(tmp_path / "run", max_steps=4, resume=True)
    after = (tmp_path / "run" / "log.txt").read_text()
    assert after.startswith(before) and "step 2: continuing after step 2" in after[len(before) :]


class Breaks(brimful.Hook):
    def after_step(self, loop, result):
        if loop.step == 2:
            raise ZeroDivisionError("in a hook")


def test_a_failure_of_any_kind_ends_the_journal_and_leaves_its_traceback(tmp_path):
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", hooks=[Breaks()])
    end = list(read_events(tmp_path / "run" / "events.jsonl"))[-1]
    assert (end["event"], end["reason"], end["sentence"]) == ("end", "failed", "ZeroDivisionError: in a hook")
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "failed: ZeroDivisionError: in a hook\nTraceback" in text and "raise ZeroDivisionError" in text


def test_a_mistake_that_is_found_before_the_first_step_leaves_no_folder(tmp_path):
    with pytest.raises(brimful.BrimfulError):
        train(tmp_path / "run", memory_limit="1KiB")
    assert not (tmp_path / "run").exists()


def test_a_log_that_cannot_be_written_does_not_stop_the_training(tmp_path, caplog):
    (tmp_path / "run" / "log.txt").mkdir(parents=True)
    assert train(tmp_path / "run").step == 4
    assert any("log.txt cannot be written" in message for message in caplog.messages)


class Slow(Lengths):
    """An evaluation takes 1,000 s of the clock of the figures, and a step 1 s."""

    clock = 0.0

    def loss(self, model, batch):
        Slow.clock += 1.0 * model.training
        return super().loss(model, batch)

    def evaluate(self, model, rows, context):
        Slow.clock += 1000.0
        return {"score": 1.0}


class SlowHook(brimful.Hook):
    def before(self, loop):
        Slow.clock += 7000.0

    def after_save(self, loop, folder):
        Slow.clock += 5000.0


def test_the_time_left_leaves_out_what_comes_before_the_first_step_evaluations_and_saves(tmp_path, monkeypatch):
    def tick():
        Slow.clock += 1e-4  # else measuring the peak would never end
        return Slow.clock

    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=tick))
    folder = tmp_path / "run"
    options = {
        "eval_every": 1,
        "save_every": 1,
        "micro_batch": 8,
        "deterministic": True,
        "memory_limit": "1GiB",
    }  # one micro-batch
    train(folder, Slow(), valid=ROWS[:4], hooks=[SlowHook()], **options)
    steps = last_steps(read_events(folder / "events.jsonl"))
    assert [step["eta_s"] for step in steps] == pytest.approx([3.0, 2.0, 1.0, 0.0], abs=0.1)
    assert len(of_kind(read_events(folder / "events.jsonl"), "eval")) == 5


# ---- Two ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return runs.plan_file(tmp_path_factory.mktemp("plans"), 2)


@pytest.fixture(scope="module")
def two(tmp_path_factory, plan):
    folder = tmp_path_factory.mktemp("two") / "run"
    assert runs.finish(runs.start(folder, plan, 2)) == [0, 0]
    return folder, list(read_events(folder / "events.jsonl"))


def test_a_step_has_the_figures_of_both_ranks(two):
    steps = of_kind(two[1], "step")
    assert len(steps) == runs.STEPS
    for step in steps:
        assert [rank["rank"] for rank in step["ranks"]] == [0, 1]
        computed = [rank["times"]["compute_s"] for rank in step["ranks"]]
        assert all(0 < seconds < step["seconds"] * 2 for seconds in computed)
        assert step["times"]["compute_s"] == pytest.approx(sum(computed) / 2, abs=1e-5)
        assert all(0 <= rank["padding"] < 1 and rank["micro_batches"] >= 1 for rank in step["ranks"])


def test_two_ranks_communicate(two):
    assert all(step["times"]["communication_s"] > 0 for step in of_kind(two[1], "step"))


def test_the_host_is_sampled_once_for_both_ranks(two):
    samples = of_kind(two[1], "sample")
    assert {sample["rank"] for sample in samples} == {0}


class FailsOnOneRank(runs.Run):
    """After some steps, on rank 1 alone."""

    name = "run"

    def loss(self, model, batch):
        self.forwards = getattr(self, "forwards", 0) + model.training
        if os.environ.get("RANK") == "1" and self.forwards > 40:
            raise ArithmeticError("a bad row")
        return super().loss(model, batch)


def test_the_log_names_the_rank_that_failed_with_its_traceback(tmp_path, plan):
    codes = runs.finish(runs.start(tmp_path / "run", plan, 2, task=FailsOnOneRank(), max_steps=200))
    assert 0 not in codes
    text = (tmp_path / "run" / "log.txt").read_text()
    assert " rank 1 of 2 failed: " in text and "ArithmeticError: a bad row" in text
    assert 'raise ArithmeticError("a bad row")' in text  # the line of the user's code
    assert " rank 0 of 2 failed: ProcessLost" in text
