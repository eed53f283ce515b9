"""The numbers of a run: worked out from its record, None where the record has nothing."""

import json
import re
from datetime import timedelta

import numpy as np
import pytest

from brimful.errors import BadRun
from brimful.report.compare import figures_of
from brimful.report.page.report_figures import ReportFigures
from brimful.report.page.run_charts import losses_chart, memory_chart, speed_chart, split_chart
from brimful.report.run_figures import RunFigures
from brimful.report.run_record import RunRecord
from brimful.report.watch.watcher import Watcher
from brimful.units import GiB
from tests.report.fake_runs import START, write_run

from .rich_runs import rich_run


def figures(folder, **values) -> ReportFigures:
    return ReportFigures(RunRecord(rich_run(folder, **values)))


def test_reserved_bytes_count_against_the_limit(tmp_path):
    one = figures(tmp_path / "a")
    assert one.used_bytes == one.reserved_bytes == int(16.1 * GiB)
    assert one.used == pytest.approx(0.805) and one.zone == "safe"


def test_without_reserved_bytes_allocated_ones_count(tmp_path):
    one = figures(tmp_path / "a", step_values={"reserved_bytes": None})
    assert one.used_bytes == one.peak_bytes == int(15.2 * GiB)


def test_the_highest_step_is_the_peak(tmp_path):
    one = figures(tmp_path / "a", step_values={"peak_bytes": lambda step: 5 * GiB + (step == 77) * GiB})
    assert one.peak_bytes == 6 * GiB


def test_time_shares_add_up(tmp_path):
    shares = figures(tmp_path / "a").time_shares
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["compute_s"] == pytest.approx(0.36 / 0.371)


def test_rows_are_counted_over_all_steps(tmp_path):
    assert figures(tmp_path / "a").rows == 300 * 256


def test_rows_of_steps_that_were_not_read_count_too(tmp_path):
    folder = rich_run(tmp_path / "a", steps=6000)
    run = RunRecord(folder, points=50)
    assert run.step_lines_skipped and len(run.steps) < 3000
    assert ReportFigures(run).rows == 6000 * 256


def test_the_night_between_two_sessions_is_not_run_time(tmp_path):
    folder = rich_run(tmp_path / "a", steps=100, evals=[], ooms=[], checkpoints=[])
    before = ReportFigures(RunRecord(folder)).clock.total_s
    lines = (folder / "events.jsonl").read_text().splitlines()
    later = START + timedelta(hours=12)
    stamp = lambda seconds: (later + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")  # noqa: E731  # fmt: skip
    step = json.loads(lines[-2])
    assert step["event"] == "step"
    more = [
        {"event": "begin", "time": stamp(0), "step": 100, "steps": 101, "processes": 1, "resumed": True},
        {"event": "resume", "time": stamp(1), "step": 100, "sentence": "continuing after step 100"},
        {**step, "time": stamp(8), "step": 101},
    ]
    (folder / "events.jsonl").write_text("\n".join([*lines, *map(json.dumps, more)]) + "\n")
    clock = ReportFigures(RunRecord(folder)).clock
    assert len(clock.sessions) == 2
    assert clock.total_s == pytest.approx(before + 8)
    with Watcher(folder) as watcher:
        assert watcher.look().trained_s == pytest.approx(clock.total_s)
    assert RunFigures(RunRecord(folder)).wall_s < clock.total_s
    one = ReportFigures(RunRecord(folder))
    for chart in (memory_chart(one), split_chart(one), speed_chart([one], ["a"])):  # nothing is drawn across the pause
        paths = re.findall(r'<path class="(?:line|thin|area) [^"]*" d="([^"]*)"', chart)
        assert paths and all(path.count("M") == 2 for path in paths)
    views = losses_chart([one, one], ["a", "b"]).split('<div class="view')[1:]
    pieces = {
        re.search(r'data-x="(\w+)"', view)[1]: {
            path.count("M") for path in re.findall(r'<path class="line [^"]*" d="([^"]*)"', view)
        }
        for view in views
    }
    assert pieces == {"step": {1}, "rows": {1}, "seconds": {2}}


FLOPS = {"event": "flops", "step": 0, "sentence": "MFU: counted"}
FAILED = {"event": "end", "step": 0, "reason": "failed", "sentence": "there is no rows.jsonl"}


@pytest.mark.parametrize("before", [FLOPS, FAILED], ids=["flops", "a resume that failed before it began"])
@pytest.mark.parametrize("end", [None, "interrupted"], ids=["killed", "stopped"])
def test_what_a_resume_writes_before_it_begins_does_not_lengthen_the_session_before(tmp_path, before, end):
    folder = rich_run(tmp_path / "a", steps=100, end=end, evals=[], ooms=[], checkpoints=[])
    worked = ReportFigures(RunRecord(folder)).clock.total_s
    later = lambda seconds: (START + timedelta(hours=12, seconds=seconds)).isoformat()  # noqa: E731
    more = [{**before, "time": later(0)}, {"event": "begin", "time": later(1), "step": 0, "steps": 100}]
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in more)
    clock = ReportFigures(RunRecord(folder)).clock
    assert (len(clock.sessions), clock.total_s) == (2, pytest.approx(worked))
    with Watcher(folder) as watcher:
        assert watcher.look().trained_s == pytest.approx(worked)


def test_report_and_compare_agree_on_the_speed(tmp_path):
    seconds = lambda n: {"compute_s": 0.2 + 0.01 * (n % 7), "data_s": 0.0, "communication_s": 0.0, "other_s": 0.0}  # noqa: E731
    values = {"times": seconds, "mfu": lambda n: 0.3 + 0.01 * (n % 5), "padding": lambda n: 0.9 if n < 9 else 0.2 + 0.01 * (n % 3)}  # fmt: skip
    run = rich_run(tmp_path / "a", step_values=values)
    one, two = ReportFigures(RunRecord(run)), figures_of(RunFigures(RunRecord(run)))
    assert (one.rows_per_s, one.step_s, one.seconds_per_epoch) == (two["rows_per_s"], two["step_s"], two["epoch_s"])
    assert (one.mfu, one.padding, one.host_bytes) == (two["mfu"], two["padding"], two["host_bytes"])
    assert one.time_shares["data_s"] == two["data_share"]


def test_each_card_has_figures_of_its_own(tmp_path):
    one = figures(tmp_path / "a", ranks=2)
    assert [card.rank for card in one.cards] == [0, 1]
    assert one.cards[1].utilization == pytest.approx(0.93)


def test_each_rank_has_its_padding_and_its_time_split(tmp_path):
    def ranks(_):
        times = ({"compute_s": 0.3, "data_s": 0.1}, {"compute_s": 0.1, "data_s": 0.3})
        return [{"rank": rank, "padding": 0.1 + rank, "times": times[rank], "peak_bytes": 7} for rank in range(2)]

    one = figures(tmp_path / "a", ranks=2, step_values={"ranks": ranks})
    assert [rank.padding for rank in one.ranks] == pytest.approx([0.1, 1.1])
    assert [rank.time_shares["data_s"] for rank in one.ranks] == pytest.approx([0.25, 0.75])
    assert [rank.peak_bytes for rank in one.ranks] == [7, 7]


def test_energy_is_power_times_time(tmp_path):
    one = figures(tmp_path / "a")
    assert one.energy_kwh == pytest.approx(287.0 * one.clock.total_s / 3.6e6)


def test_the_last_loss_is_a_mean_of_the_end(tmp_path):
    one = figures(tmp_path / "a", step_values={"loss": lambda step: 4.0 if step % 2 else 2.0})
    assert one.losses == (4.0, pytest.approx(3.0, abs=0.1))


def test_a_loss_that_is_no_number_is_counted_and_left_out(tmp_path):
    loss = {"loss": lambda step: None if step == 5 else 3.0, "loss_is": lambda step: "nan" if step == 5 else None}
    one = figures(tmp_path / "a", step_values=loss)
    assert one.bad_losses == 1 and one.losses == (3.0, 3.0)


def test_what_was_not_recorded_is_none(tmp_path):
    bare = dict.fromkeys(("times", "peak_bytes", "reserved_bytes", "padding", "rows_per_s", "mfu", "ranks"))
    folder = write_run(tmp_path / "a", steps=5)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kept = [{**line, **bare} if line["event"] == "step" else line for line in lines if line["event"] != "sample"]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    one = ReportFigures(RunRecord(folder))
    unknown = (one.peak_bytes, one.used, one.zone, one.padding, one.rows_per_s, one.mfu, one.utilization, one.host_limit_bytes and None)  # fmt: skip
    assert unknown == (None,) * 8 and one.cards == [] and one.time_shares == {}


def test_the_json_has_every_series_and_no_nan(tmp_path):
    values = {"loss": lambda step: None, "loss_is": "inf", "padding": lambda step: float("nan")}
    content = figures(tmp_path / "a", evals=[], step_values=values).to_json()
    assert {"steps", "samples"} == set(content["series"])
    assert "peak_bytes" in content["series"]["steps"] and "gpu_utilization" in content["series"]["samples"]
    assert "padding" not in content["series"]["steps"]  # nothing of it is known
    json.dumps(content["series"], allow_nan=False)


def test_a_sweep_is_refused_before_its_page_is_overwritten(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "begin", "time": "2026-01-31T09:00:00Z", "heads": 12}\n')
    with pytest.raises(BadRun, match="is a sweep"):
        ReportFigures(RunRecord(tmp_path))


def test_an_integer_of_a_thousand_digits_is_no_figure(tmp_path):
    one = figures(tmp_path / "a", steps=20, step_values={"peak_bytes": 10**1000, "rows": 10**1000})
    assert one.peak_bytes is None and one.rows is None
    assert np.isnan(one.column("peak_bytes")).all()
