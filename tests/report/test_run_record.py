"""A run folder is read completely when it is short, in samples when it is long, and never twice."""

import json
import math

import pytest

from brimful.errors import BadRun
from brimful.report import run_record
from brimful.report.run_record import RunRecord, newest_run_folder
from brimful.training.events import FORMAT
from tests.report.fake_runs import sample_event, step_event, write_run


def append(run, *events):
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        for event in events:
            file.write(json.dumps({"event": event["event"], "time": "2026-01-31T10:00:00.000Z", **event}) + "\n")


def test_a_short_run_is_read_whole(tmp_path):
    run = RunRecord(write_run(tmp_path / "a", steps=50, ooms=[20], evals=[25], checkpoints=[25, 50]))
    assert [event["step"] for event in run.steps] == list(range(1, 51))
    assert [event["event"] for event in run.events] == [
        "begin",
        "plan",
        "oom",
        "eval",
        "checkpoint",
        "checkpoint",
        "end",
    ]
    assert run.samples and not run.step_lines_skipped


def test_a_long_run_keeps_rare_events_and_some_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "WHOLE_BYTES", 64 * 1024)
    monkeypatch.setattr(run_record, "NEWEST_BYTES", 16 * 1024)
    monkeypatch.setattr(run_record, "_CHUNK_BYTES", 10_000)  # many chunk borders within lines
    rare = [3, 777, 1501, 2998]
    run = RunRecord(write_run(tmp_path / "a", steps=3000, ooms=rare), points=100)
    assert [event["step"] for event in run.of_kind("oom")] == rare
    assert run.step_lines_skipped and 100 <= len(run.steps) < 300
    assert run.steps[0]["step"] == 1 and run.last["step"] == 3000
    assert max(b["step"] - a["step"] for a, b in zip(run.steps, run.steps[1:], strict=False)) < 90


def test_refresh_reads_what_was_appended(tmp_path):
    folder = write_run(tmp_path / "a", steps=10, done=5, running=True)
    run = RunRecord(folder)
    assert not run.refresh()
    append(folder, step_event(6, steps=10))
    assert run.refresh() and run.last["step"] == 6


def test_a_partial_line_waits_for_its_end(tmp_path):
    folder = write_run(tmp_path / "a", steps=10, done=5, running=True)
    run = RunRecord(folder)
    line = json.dumps({"time": "x", **step_event(6, steps=10)}) + "\n"
    with (folder / "events.jsonl").open("a") as file:
        file.write(line[:40])
        file.flush()
        assert not run.refresh() and run.last["step"] == 5
        file.write(line[40:])
    assert run.refresh() and run.last["step"] == 6


def test_a_resume_undoes_the_steps_after_its_checkpoint(tmp_path):
    folder = write_run(tmp_path / "a", steps=10, done=8, end=None)
    append(
        folder, {"event": "resume", "step": 4, "sentence": "continuing after step 4"}, step_event(5, steps=10, loss=1.0)
    )
    run = RunRecord(folder)
    assert [event["step"] for event in run.steps] == [1, 2, 3, 4, 5] and run.last["loss"] == 1.0


@pytest.mark.parametrize("reason", ["finished", "interrupted", "time-limit", "failed"])
def test_an_ended_run_says_how(tmp_path, reason):
    assert RunRecord(write_run(tmp_path / "a", steps=3, end=reason)).state == reason


def test_a_run_whose_process_is_gone_was_killed(tmp_path):
    assert RunRecord(write_run(tmp_path / "a", steps=3, done=2, end=None)).state == "killed"


def test_a_run_that_trains_is_running(tmp_path):
    assert RunRecord(write_run(tmp_path / "a", steps=3, done=2, running=True)).state == "running"
    assert RunRecord(write_run(tmp_path / "b", steps=3, done=0, running=True)).state == "preparing"


def test_nan_is_read_as_nan(tmp_path):
    folder = write_run(tmp_path / "a", steps=2, end=None)
    append(folder, step_event(3, steps=3, loss=None, loss_is="nan"))
    assert math.isnan(RunRecord(folder).column("loss")[-1])


def test_a_run_of_a_newer_version_is_refused(tmp_path):
    folder = write_run(tmp_path / "a", steps=2)
    append(folder, {"event": "begin", "step": 0, "format": FORMAT + 1})
    with pytest.raises(BadRun, match="newer Brimful"):
        RunRecord(folder)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(BadRun, match="there is no run at"):
        RunRecord(tmp_path / "missing")
    with pytest.raises(BadRun, match="is not a run"):
        RunRecord(tmp_path)


def test_binary_rubbish_in_the_events_is_skipped(tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b"\x00\xff\xfe{}\n[1]\n" + b'{"event": 3}\n')
    assert RunRecord(folder).last["step"] == 3


def test_a_folder_with_spaces_and_chinese_in_its_name_is_read(tmp_path):
    assert RunRecord(write_run(tmp_path / "第一次 训练", steps=3)).name == "第一次 训练"


def test_what_is_kept_of_a_run_that_is_watched_for_days_stays_bounded(tmp_path):
    folder = write_run(tmp_path / "a", steps=100_000, done=10, running=True)
    run = RunRecord(folder, points=50)
    for first in range(11, 1011, 50):
        append(folder, *(step_event(number, steps=100_000) for number in range(first, first + 50)), sample_event(first))
        run.refresh()
    assert len(run.steps) <= 250 and run.last["step"] == 1010 and run.steps[0]["step"] == 1


def test_the_newest_run_is_the_one_that_wrote_last(tmp_path):
    import os

    old, new = (write_run(tmp_path / name, steps=2) for name in ("old", "new"))
    os.utime(old / "events.jsonl", (1, 1))
    assert newest_run_folder(tmp_path) == new
    with pytest.raises(BadRun, match="has no run"):
        newest_run_folder(tmp_path / "empty")
