"""What a run's folder says becomes one frozen snapshot; what it does not say is None."""

import json
import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.report import run_record
from brimful.report.run_figures import parse_time
from brimful.report.run_record import RunRecord
from brimful.report.watch.run_snapshot import SERIES_POINTS, take
from brimful.report.watch.watch_screen import frame
from brimful.training.run import lock_holder
from brimful.units import GiB
from tests.report.fake_runs import START, sample_event, write_run

NOW = START + timedelta(minutes=10)


def snapshot(folder, state="running", now=NOW):
    return take(RunRecord(folder), state, lock_holder(folder / "lock"), now)


def test_the_head_of_a_run(tmp_path):
    taken = snapshot(write_run(tmp_path / "a", steps=300, done=24, running=True))
    assert (taken.name, taken.task, taken.step, taken.steps, taken.epoch, taken.epochs) == ("a", "sft", 24, 300, 2.0, 25.0)  # fmt: skip
    assert (taken.begun, taken.host, taken.pid) == (START, "box", 4711)


def test_the_time_left_counts_from_the_last_step(tmp_path):
    folder = write_run(tmp_path / "a", steps=300, done=100, running=True, step_values={"eta_s": 300.0})
    last = RunRecord(folder).last["time"]
    taken = snapshot(folder, now=parse_time(last) + timedelta(seconds=60))
    assert taken.eta_s == pytest.approx(240.0)
    assert taken.ends == parse_time(last) + timedelta(seconds=300)


def test_slow_steps_move_the_seconds_per_step_no_more_than_the_time_left(tmp_path):
    """Both are medians of the last 20 steps: see `Speedometer`."""

    def times(step):
        return {"compute_s": 2.5 if step % 3 == 0 else 0.6, "data_s": 0.0, "communication_s": 0.0, "other_s": 0.0}

    assert snapshot(write_run(tmp_path / "a", done=100, running=True, step_values={"times": times})).step_s == 0.6


def test_an_ended_run_has_no_time_left(tmp_path):
    taken = snapshot(write_run(tmp_path / "a", steps=10), "finished")
    assert taken.eta_s is None and taken.ended is not None and taken.sentence == "trained 10 steps"


def test_the_time_between_an_end_and_a_resume_does_not_count(tmp_path):
    folder = write_run(tmp_path / "a", steps=20, done=10, end="interrupted")
    trained = snapshot(folder, "interrupted").trained_s
    later = [{"event": "begin", "step": 10, "time": "2026-02-03T12:00:00Z"}, {"event": "end", "step": 10, "reason": "finished", "time": "2026-02-03T12:01:00Z"}]  # fmt: skip
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in later)
    assert snapshot(folder, "finished").trained_s == pytest.approx(trained + 60)


def test_a_card_is_in_the_zone_of_its_reserved_bytes(tmp_path):
    values = {"ranks": [{"rank": 0, "peak_bytes": 15 * GiB, "reserved_bytes": 18.5 * GiB}]}
    (card,) = snapshot(write_run(tmp_path / "a", steps=5, step_values=values)).cards
    assert (card.used, card.zone, card.allocated_bytes) == (0.925, "danger", 15 * GiB)


def test_without_reserved_bytes_the_allocated_ones_count(tmp_path):
    values = {"ranks": [{"rank": 0, "peak_bytes": 17.5 * GiB, "reserved_bytes": None}]}
    (card,) = snapshot(write_run(tmp_path / "a", steps=5, step_values=values)).cards
    assert (card.used, card.zone) == (0.875, "edge")


def test_a_card_shows_the_highest_peak_of_the_recent_steps(tmp_path):
    def ranks(step):
        return [{"rank": 0, "reserved_bytes": (19 if step == 90 else 18 if step == 5 else 12) * GiB}]

    (card,) = snapshot(write_run(tmp_path / "a", steps=100, step_values={"ranks": ranks})).cards
    assert card.reserved_bytes == 19 * GiB


def test_a_card_knows_what_others_hold_and_what_the_plan_predicts(tmp_path):
    folder = write_run(tmp_path / "a", steps=5, more=[sample_event(5, gpu={"others_bytes": 3 * GiB, "used_bytes": 18 * GiB})])  # fmt: skip
    (card,) = snapshot(folder).cards
    assert (card.others_bytes, card.held_bytes) == (3 * GiB, 15 * GiB)
    assert card.predicted_bytes == int(15.4 * GiB)


def test_each_rank_has_its_card_and_the_slowest_is_marked(tmp_path):
    def ranks(_):
        return [
            {"rank": rank, "reserved_bytes": 10 * GiB, "times": {"compute_s": 0.41 if rank == 2 else 0.36}}
            for rank in range(4)
        ]

    cards = snapshot(write_run(tmp_path / "a", steps=30, ranks=4, step_values={"ranks": ranks})).cards
    assert [card.label for card in cards] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert [card.slowest for card in cards] == [False, False, True, False]


def test_ranks_of_one_speed_have_no_slowest(tmp_path):
    cards = snapshot(write_run(tmp_path / "a", steps=30, ranks=4)).cards
    assert not any(card.slowest for card in cards)


def test_cards_of_several_machines_are_told_apart_by_rank(tmp_path):
    samples = [sample_event(5, rank=rank, gpu={"index": rank % 2}) for rank in range(4)]
    cards = snapshot(write_run(tmp_path / "a", steps=5, ranks=4, more=samples)).cards
    assert [card.label for card in cards] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_a_run_on_the_cpu_has_a_line_too(tmp_path):
    folder = write_run(tmp_path / "a", steps=5, plan_values={"device": "cpu"}, step_values={"ranks": None})
    text = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in text if '"sample"' not in line))
    assert snapshot(folder).cards[0].label == "CPU"


def test_host_memory_counts_what_binds(tmp_path):
    host = {"tree_bytes": 3 * GiB, "machine_bytes": 15 * GiB, "limited_by": "cgroup v2 memory.max", "workers": 4}
    ram = snapshot(write_run(tmp_path / "a", steps=5, more=[sample_event(5, host=host)])).ram
    assert (ram.tree_bytes, ram.used, ram.zone, ram.workers) == (3 * GiB, 15 / 16, "danger", 4)
    assert (ram.limited_by, ram.predicted_bytes) == ("cgroup v2 memory.max", 3 * GiB)


def test_the_time_of_a_step_is_split(tmp_path):
    taken = snapshot(write_run(tmp_path / "a", steps=30, ranks=2))
    assert dict(taken.times) == pytest.approx({"compute": 0.36, "data": 0.004, "communication": 0.01, "other": 0.007})
    assert taken.step_s == pytest.approx(0.381)


def test_curves_keep_their_ends_and_extremes(tmp_path):
    values = {"loss": lambda n: 100.0 if n == 777 else 3.0}
    loss = snapshot(write_run(tmp_path / "a", steps=2000, step_values=values)).loss
    assert len(loss.points) <= SERIES_POINTS and (loss.points[0][0], loss.points[-1][0]) == (1, 2000)
    assert (loss.minimum, loss.maximum, loss.last) == (3.0, 100.0, 3.0)


def test_a_loss_that_is_not_a_number_is_counted_and_leaves_a_gap(tmp_path):
    values = {"loss": lambda n: None if n >= 8 else 2.0, "loss_is": lambda n: "nan" if n >= 8 else None}
    loss = snapshot(write_run(tmp_path / "a", steps=10, step_values=values)).loss
    assert math.isnan(loss.last) and loss.not_finite == 3 and loss.maximum == 2.0


def test_the_last_evaluation_and_the_best(tmp_path):
    worse = {"event": "eval", "step": 9, "loss": 9.0, "bleu": 12.0, "rows": 5, "seconds": 1.0, "best": False}
    taken = snapshot(write_run(tmp_path / "a", steps=10, evals=[5], more=[worse]))
    assert (taken.evaluation.step, taken.evaluation.metrics) == (9, (("loss", 9.0), ("bleu", 12.0)))
    assert taken.best.step == 5


def test_a_failed_save_is_told_until_one_succeeds(tmp_path):
    failed = {"event": "checkpoint", "step": 7, "saved": False, "sentence": "no space left"}
    taken = snapshot(write_run(tmp_path / "a", steps=10, checkpoints=[5], more=[failed]))
    assert (taken.checkpoint.step, taken.failed_save.failure) == (5, "no space left")
    assert snapshot(write_run(tmp_path / "b", steps=10, checkpoints=[5, 9], more=[failed])).failed_save is None


def oom(step, **values):
    return {"event": "oom", "step": step, "process": 0, "sentence": "out of memory in backward, micro-batch 2 of 6 (43 rows): micro-batches now have at most 22 rows", "change": "micro-batches now have at most 22 rows", **values}  # fmt: skip


def grow(step, **values):
    return {"event": "grow", "step": step, "process": 0, "sentence": "micro-batch size restored to 43 rows after 10 clean steps", **values}  # fmt: skip


def test_an_error_says_what_ran_what_changed_and_when_it_was_undone(tmp_path):
    taken = snapshot(write_run(tmp_path / "a", steps=40, more=[oom(10), grow(21), oom(30)]))
    first, second = taken.ooms
    assert (first.what, first.change) == ("backward, micro-batch 2 of 6 (43 rows)", "micro-batches now have at most 22 rows")  # fmt: skip
    assert (first.restored_step, first.restored) == (21, "micro-batch size restored to 43 rows after 10 clean steps")
    assert second.restored_step is None and taken.ooms_survived == 2


def test_a_growth_of_another_rank_undoes_nothing(tmp_path):
    taken = snapshot(write_run(tmp_path / "a", steps=40, ranks=2, more=[oom(10, process=1), grow(21, process=0)]))
    assert taken.ooms[0].restored_step is None


def test_an_error_that_stops_the_run_was_not_survived(tmp_path):
    taken = snapshot(write_run(tmp_path / "a", steps=40, more=[oom(10), oom(11, change="the run stops")]), "failed")
    assert taken.ooms_survived == 1


def test_notes_keep_their_order_and_say_which_are_warnings(tmp_path):
    notes = [{"event": "note", "step": 1, "sentence": "one"}, {"event": "note", "step": 2, "sentence": "two", "level": "warning"}, {"event": "skip", "step": 3, "sentence": "three"}]  # fmt: skip
    taken = snapshot(write_run(tmp_path / "a", steps=5, more=notes))
    assert [(note.sentence, note.warning) for note in taken.notes] == [("one", False), ("two", True), ("three", True)]


@pytest.mark.parametrize(("state", "expected"), [("interrupted", True), ("killed", True), ("failed", True), ("finished", False), ("running", False)])  # fmt: skip
def test_a_run_that_can_be_continued_has_the_command(tmp_path, state, expected):
    folder = write_run(tmp_path / "a b", steps=10, checkpoints=[5])
    command = snapshot(folder, state).resume_command
    assert (command == f"brimful train --run '{folder}' --resume") is expected


def test_a_run_without_a_checkpoint_cannot_be_continued(tmp_path):
    assert snapshot(write_run(tmp_path / "a", steps=10), "killed").resume_command is None


def test_a_run_on_rows_in_memory_has_no_command(tmp_path):
    folder = write_run(tmp_path / "a", steps=10, checkpoints=[5], request={"data": None})
    assert snapshot(folder, "killed").resume_command is None


def test_a_running_run_that_writes_nothing_is_noticed(tmp_path):
    folder = write_run(tmp_path / "a", steps=100, done=50, running=True)
    last = parse_time(RunRecord(folder).samples[-1]["time"])
    assert snapshot(folder, now=last + timedelta(seconds=200)).silent_s == pytest.approx(200, abs=10)
    assert snapshot(folder, now=last + timedelta(seconds=20)).silent_s is None


def test_the_json_is_plain(tmp_path):
    values = {"loss": lambda n: None if n == 3 else 2.0, "loss_is": lambda n: "inf" if n == 3 else None}
    folder = write_run(tmp_path / "a", steps=3, ooms=[2], evals=[2], checkpoints=[2], step_values=values)
    content = json.loads(json.dumps(snapshot(folder).to_json(), allow_nan=False))
    assert content["loss"]["last"] is None and content["loss"]["points"][:2] == [[1, 2.0], [2, 2.0]]
    assert content["cards"][0]["zone"] == "safe" and content["cards"][0]["limit_bytes"] == 20 * GiB
    assert content["begun"] == "2026-01-31T09:00:00+00:00" and set(content["times"]) == {"compute", "data", "communication", "other"}  # fmt: skip


def test_a_long_run_costs_no_more_than_a_short_one(tmp_path, monkeypatch):
    """Lines that are decoded, and what is kept, are bounded: the time is printed by `test_a_million_events`."""
    monkeypatch.setattr(run_record, "WHOLE_BYTES", 64 * 1024)
    decoded = 0
    real = run_record.decode_event

    def counting(line):
        nonlocal decoded
        decoded += 1
        return real(line)

    folder = write_run(tmp_path / "a", steps=30_000, ooms=[10, 20_000])
    monkeypatch.setattr(run_record, "decode_event", counting)
    record = RunRecord(folder, points=200)
    assert decoded < 2_500
    taken = take(record, "running", None, NOW)
    assert len(taken.loss.points) <= SERIES_POINTS and taken.ooms_survived == 2
    decoded = 0
    with (folder / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"event": "note", "time": "2026-01-31T10:00:00Z", "step": 30_000, "sentence": "x"}) + "\n"
        )
    assert record.refresh() and decoded == 1


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**18) | st.floats() | st.text(max_size=8) | st.sampled_from(["nan", "\x1b[2J", "中文", "2026-01-31T09:00:00Z"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rank", "compute_s", "loss", "index", "used_bytes", "tree_bytes", "times", "ranks", "uuid", "name"]), inner, max_size=4),
    max_leaves=6,
)  # fmt: skip
fields = st.dictionaries(
    st.sampled_from(["loss", "loss_is", "rows_per_s", "eta_s", "epoch", "steps", "ranks", "times", "gpu", "host", "rank", "sentence", "change", "process", "saved", "best", "reason", "gpus", "processes", "limit_bytes", "reserved_bytes", "peak_bytes", "choices", "layout", "device", "global_batch", "micro_batches", "lr", "padding", "mfu", "time", "pid"]),
    junk, max_size=8,
)  # fmt: skip
kinds = st.sampled_from(["begin", "plan", "step", "sample", "eval", "checkpoint", "oom", "grow", "note", "resume", "end", "new kind"])  # fmt: skip


@given(st.lists(st.tuples(kinds, st.integers(0, 9), fields), max_size=12))
def test_no_content_of_a_run_is_a_traceback(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("run")
    lines = (json.dumps({"event": kind, "time": "2026-01-31T09:00:00Z", **values, "step": step}) for kind, step, values in events)  # fmt: skip
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for state in ("running", "failed"):
        taken = snapshot(folder, state)
        json.dumps(taken.to_json(), allow_nan=False)
        for width, height in ((80, 24), (200, 60), (20, 5)):
            lines = frame(taken, width, height, footer="q")
            assert len(lines) <= height and all(line.cell_len <= width and "\x1b" not in line.plain for line in lines)


def test_before_the_first_step_each_planned_process_has_its_line(tmp_path):
    folder = write_run(tmp_path / "a", done=0, ranks=3, end=None, running=True, plan_values={"device": "cpu"})
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kept = [{**one, "gpus": []} if one["event"] == "begin" else one for one in events if one["event"] != "sample"]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    assert [card.label for card in snapshot(folder, "preparing").cards] == ["rank 0", "rank 1", "rank 2"]
