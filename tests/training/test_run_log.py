"""A run in lines: what is shown of its events, and log.txt, which keeps them whatever happens."""

import logging
import os
import re
import time

import pytest

from brimful.step.result import Events
from brimful.training import run_log as module
from brimful.training.events import Journal
from brimful.training.run_log import UNKNOWN, RunLog, event_line
from brimful.units import GiB
from tests.training.shown import EVALUATION, step, summary_of
from tests.training.test_events import disk_of

log = logging.getLogger("brimful")


def items_of(*events):
    return dict(summary_of(*events).items())


def test_a_step_is_one_line_with_every_metric():
    assert summary_of(step(7)).line() == (
        "step 7/100  loss 2.0000  lr 1.00e-04  epoch 0.50  700 rows/s  70,000 tokens/s  MFU 12.3%  data wait 1.0%  "
        "checkpoint –  memory 15 GiB of 20 GiB, 75%  ETA 1 min 15 s"
    )


def test_what_a_loss_logs_is_shown_beside_it():
    line = summary_of(step(7, log={"accuracy": 0.75, "margin": None, "margin_is": "nan"})).line()
    assert "loss 2.0000  accuracy 0.7500  margin nan  lr" in line


def test_tokens_are_not_mentioned_where_there_are_none():
    assert "tokens/s" not in summary_of(step(7, tokens_per_s=None)).line()


def test_what_is_not_known_is_a_dash():
    unknown = step(7, **dict.fromkeys(("mfu", "tokens_per_s", "peak_bytes", "eta_s", "grad_norm", "epoch")))
    summary = summary_of(unknown)
    assert {name for name, value in summary.items() if value == UNKNOWN} == {"MFU", "epoch", "checkpoint"}
    assert (summary.memory, summary.eta) == (UNKNOWN, UNKNOWN)


def test_the_loss_is_the_last_one_and_the_mean_of_the_recent_ones():
    losses = [100.0] + [1.0, 3.0] * 10
    assert items_of(*(step(i, loss=loss) for i, loss in enumerate(losses)))["loss"] == "3.0000 (mean 2.0000)"


def test_a_loss_that_is_not_finite_is_shown_and_left_out_of_the_mean():
    assert items_of(step(1), step(2, loss=4.0), step(3, loss=None, loss_is="nan"))["loss"] == "nan (mean 3.0000)"


def test_a_rate_is_the_median_of_the_recent_steps():
    rates = [9.0] * 20 + [50.0] * 11 + [1.0] * 9
    assert items_of(*(step(i, rows_per_s=rate) for i, rate in enumerate(rates)))["rows/s"] == "50"


def test_data_wait_is_a_share_of_the_recent_time():
    assert (
        items_of(step(1, data_wait_s=0.0, seconds=2.0), step(2, data_wait_s=1.0, seconds=1.0))["data wait"] == "25.0%"
    )


def test_memory_is_the_highest_recent_peak_and_the_ooms_survived():
    summary = summary_of(step(1, peak_bytes=18 * GiB), step(2, ooms=2), step(3))
    assert summary.memory == "18 GiB of 20 GiB, 90%, 2 OOMs survived"


def test_the_best_evaluation_and_the_last_checkpoint_stay():
    summary = summary_of(
        EVALUATION,
        {**EVALUATION, "step": 60, "best": False},
        {"event": "checkpoint", "step": 60, "saved": True},
        {"event": "checkpoint", "step": 70, "saved": False},
    )
    assert summary.best["step"] == 50
    assert dict(summary.items())["checkpoint"] == "step 60"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (EVALUATION, "step 50: evaluation on 1,000 rows in 3.0 s: loss 2.5000, perplexity 12.18, best so far"),
        ({"event": "oom", "step": 1231, "sentence": "out of memory"}, "step 1,231: out of memory"),
        ({"event": "note", "step": 0, "sentence": "a remark"}, "a remark"),
        ({"event": "note", "step": None, "sentence": "a remark"}, "a remark"),
        ({"event": "grow", "step": 3, "sentence": "more"}, ""),
        ({"event": "plan"}, ""),
        ({"event": "checkpoint", "step": 5, "saved": True, "size_bytes": 2 * GiB, "seconds": 1.5, "path": "r/c"}, "step 5: saved r/c (2 GiB in 1.5 s)"),
        ({"event": "checkpoint", "step": 5, "saved": False, "sentence": "the disk is full"}, "step 5: checkpoint not saved: the disk is full"),
        ({"event": "begin", "step": 0, "run": "r", "steps": 5000, "processes": 2}, "training in r: 5,000 steps on 2 processes"),
        ({"event": "end", "step": 9, "reason": "finished", "sentence": "all 9 steps are done"}, ""),  # printed by the parent process
    ],
)  # fmt: skip
def test_an_event_is_one_line(event, line):
    assert event_line(event) == line


def rank(number, **values):
    return {"rank": number, "peak_bytes": 10 * GiB, "reserved_bytes": 12 * GiB, "limit_bytes": 20 * GiB, **values}


def test_memory_is_reserved_bytes_where_they_are_known():
    assert summary_of(step(1, reserved_bytes=17 * GiB)).memory == "17 GiB of 20 GiB, 85%"


def test_memory_is_that_of_the_rank_closest_to_its_limit():
    small = rank(1, reserved_bytes=7 * GiB, limit_bytes=8 * GiB)
    summary = summary_of(step(1, reserved_bytes=12 * GiB, ranks=[rank(0), small]), step(2, ranks=[rank(0), rank(1)]))
    assert (summary.memory, summary.used) == ("7 GiB of 8 GiB, 88%", 7 / 8)


def test_without_a_limit_memory_is_the_highest_peak():
    ranks = [rank(0, limit_bytes=None)]
    summary = summary_of(step(1, limit_bytes=None, reserved_bytes=12 * GiB, ranks=ranks))
    assert (summary.memory, summary.used) == ("12 GiB", None)


# ---- log.txt ---------------------------------------------------------------------------------------------------------

STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d ")
BEGIN = {"event": "begin", "step": 0, "run": "r", "steps": 100, "processes": 1}
PLAN = {
    "event": "plan", "step": 0, "warnings": ["the card is shared"],
    "choices": [
        {"name": "memory_limit", "effective": 20 * GiB, "reason": "as requested"},
        {"name": "micro_batch", "effective": 43, "reason": ""},
    ],
}  # fmt: skip
END = {"event": "end", "step": 2, "reason": "finished", "sentence": "trained 2 steps"}


def lines(run) -> list[str]:
    """Without their times."""
    found = (run / "log.txt").read_text().splitlines()
    assert all(STAMP.match(line) for line in found)
    return [STAMP.sub("", line, count=1) for line in found]


def write(run, *events, **how) -> list[str]:
    with RunLog(run, **how) as run_log:
        for event in events:
            run_log(event)
    return lines(run)


def test_every_line_has_its_time(tmp_path):
    before = time.strftime("%Y-%m-%d %H:%M:%S")
    write(tmp_path, BEGIN)
    assert before <= (tmp_path / "log.txt").read_text()[:19] <= time.strftime("%Y-%m-%d %H:%M:%S")


def test_it_has_what_a_run_prints_the_plan_and_the_ending(tmp_path):
    warning = {"event": "note", "step": 0, "level": "warning", "sentence": "the card is shared"}
    assert write(tmp_path, BEGIN, PLAN, warning, step(1), EVALUATION, END) == [
        "training in r: 100 steps on 1 process",
        "plan: memory limit 20 GiB (as requested)",
        "plan: micro batch 43",
        "warning: the card is shared",
        summary_of(step(1)).line(),
        event_line(EVALUATION),
        "finished: trained 2 steps",
    ]


def test_the_plan_of_a_resumed_run_is_not_repeated(tmp_path):
    assert len(write(tmp_path, {**BEGIN, "resumed": True}, PLAN)) == 1


def test_what_a_resume_changes_is_told(tmp_path):
    changes = [{"name": "global_batch", "old": 64, "new": 32}, {"name": "memory_limit", "old": 2**30, "new": None}]
    plan = {**PLAN, "number": 2, "changes": changes, "experiment": "other", "experiment_reasons": ["a step has 32 rows instead of 64"]}  # fmt: skip
    lines = [line.rstrip() for line in write(tmp_path, {**BEGIN, "resumed": True}, plan)[1:]]
    assert lines == [
        "plan 2: global batch 64 → 32", "plan 2: memory limit 1 GiB → all that is free",
        "another experiment from here on: a step has 32 rows instead of 64",
    ]  # fmt: skip


def test_steps_come_at_intervals_and_always_the_first_and_the_last(tmp_path):
    found = write(tmp_path, *map(step, range(1, 41)), every_s=1000.0)
    assert [line.split("  ")[0] for line in found] == ["step 1/100", "step 40/100"]


def test_what_is_being_prepared_comes_at_intervals(tmp_path):
    with RunLog(tmp_path) as run_log:
        run_log.status("reading")
        run_log.status("reading more")
    assert lines(tmp_path) == ["reading"]


@pytest.mark.parametrize(
    "event",
    [{"event": "oom", "step": 3, "sentence": "a"}, {"event": "note", "step": 3, "level": "warning", "sentence": "a"}],
)
def test_a_warning_is_called_one(tmp_path, event):
    assert write(tmp_path, event) == ["warning: step 3: a"]


def test_warnings_of_the_library_are_in_it_and_events_of_a_step_once(tmp_path):
    with RunLog(tmp_path):
        log.warning("the disk is %s", "slow")
        Events(None).add("oom", 3, "out of memory")  # it also comes as an event of the journal
    log.warning("too late")
    assert lines(tmp_path) == ["warning: the disk is slow"]


def test_a_warning_still_goes_where_it_went(tmp_path, capfd):
    """Without any handler logging writes to standard error, and a quiet run has none."""
    handlers, log.handlers = log.handlers, []
    root = logging.getLogger()
    of_root, root.handlers = root.handlers, []
    try:
        with RunLog(tmp_path):
            log.warning("the disk is slow")
    finally:
        log.handlers, root.handlers = handlers, of_root
    assert capfd.readouterr().err == "the disk is slow\n"


def test_notes_and_warnings_are_in_the_users_words(tmp_path):
    with RunLog(tmp_path, wording=lambda line: line.replace("fill=", "--fill ")) as run_log:
        run_log({"event": "note", "step": 0, "sentence": "fill=2"})
        log.warning("fill=3")
    assert lines(tmp_path) == ["--fill 2", "warning: --fill 3"]


def test_a_resumed_run_appends(tmp_path):
    write(tmp_path, BEGIN)
    assert len(write(tmp_path, {**BEGIN, "resumed": True}, END)) == 3


def fail(run, error):
    with pytest.raises(type(error)), RunLog(run) as run_log:
        run_log(step(1))
        raise error
    return (run / "log.txt").read_text()


def test_a_failure_is_written_with_its_traceback(tmp_path):
    text = fail(tmp_path, ValueError("no such column"))
    head, first, *_, last = text.splitlines()[1:]
    assert STAMP.sub("", head) == "failed: ValueError: no such column"
    assert first == "Traceback (most recent call last):"
    assert last == "ValueError: no such column"
    assert "raise error" in text


def test_a_failure_names_its_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert " rank 1 of 2 failed: KeyError: 'ids'\nTraceback" in fail(tmp_path, KeyError("ids"))


def test_lines_of_other_ranks_name_them(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with RunLog(tmp_path) as run_log:
        run_log({"event": "oom", "step": 3, "sentence": "out of memory"})
        log.warning("slow")
    assert lines(tmp_path) == ["rank 1: warning: step 3: out of memory", "rank 1: warning: slow"]


def test_ctrl_c_is_written_too(tmp_path):
    assert "failed: KeyboardInterrupt" in fail(tmp_path, KeyboardInterrupt())


def test_a_process_that_leaves_in_order_has_not_failed(tmp_path):
    assert "failed" not in fail(tmp_path, SystemExit(0))


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path, caplog):
    with RunLog(tmp_path) as run_log:
        run_log(BEGIN)
        with disk_of((tmp_path / "log.txt").stat().st_size + 10):
            run_log(EVALUATION)
            run_log(END)
    assert [message.split(" (")[0] for message in caplog.messages] == ["log.txt cannot be written"]
    assert "training in r" in (tmp_path / "log.txt").read_text()


def test_lines_that_met_a_full_disk_are_written_when_it_has_room(tmp_path):
    with RunLog(tmp_path) as run_log:
        with disk_of(0):
            run_log(BEGIN)
        run_log(END)
    assert lines(tmp_path) == ["training in r: 100 steps on 1 process", "warning: log.txt cannot be written (OSError: [Errno 27] File too large); training continues without it", "finished: trained 2 steps"]  # fmt: skip


def test_a_file_that_cannot_be_written_harms_nobody(tmp_path, caplog):
    (tmp_path / "log.txt").mkdir()
    with RunLog(tmp_path) as run_log:
        run_log(BEGIN)
        run_log(END)
    assert len(caplog.messages) == 1 and "Is a directory" in caplog.messages[0]


def test_a_folder_that_rank_0_has_yet_to_create_is_waited_for(tmp_path, caplog):
    run = tmp_path / "later"
    with RunLog(run) as run_log:
        run_log(BEGIN)
        run.mkdir()
        run_log(END)
    assert len(lines(run)) == 2 and not caplog.messages


def test_a_folder_that_is_gone_is_not_made_again(tmp_path):
    with pytest.raises(ValueError), RunLog(tmp_path / "gone"):
        raise ValueError
    assert not (tmp_path / "gone").exists()


def test_an_entry_is_one_write(tmp_path, monkeypatch):
    written, real = [], os.write
    monkeypatch.setattr(module.os, "write", lambda file, data: written.append(data) or real(file, data))
    fail(tmp_path, ValueError("x"))
    assert len(written) == 2  # a step, and a traceback of many lines


def test_an_event_it_does_not_know_harms_nobody(tmp_path):
    with RunLog(tmp_path) as run_log:
        journal = Journal(None, [run_log])
        journal.write("eval", step=1)
        journal.write("flops", step=0, sentence="x")
        journal.write("end", step=1, reason="failed", sentence="显存不足")
    assert lines(tmp_path)[-1] == "failed: 显存不足"
