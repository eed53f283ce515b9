"""A run in plain words, and the checklist of the guide filled in."""

import shutil

import pytest

from brimful.report.page.report_figures import ReportFigures
from brimful.report.page.summary import checklist, key_figures, next_steps, percent, summary
from brimful.report.run_record import RunRecord
from brimful.report.why.diagnosis import Diagnosis, Fix
from brimful.units import GiB

from .rich_runs import rich_run


def figures(folder, **values) -> ReportFigures:
    return ReportFigures(RunRecord(rich_run(folder, **values)))


def words(folder, **values) -> str:
    return " ".join(sentence for _, sentence in summary(figures(folder, **values)))


def check(folder, key, **values):
    return next(one for one in checklist(figures(folder, **values)) if one.key == key)


def test_the_first_sentence_says_what_was_trained_and_how_long(tmp_path):
    first = summary(figures(tmp_path / "a"))[0][1]
    assert first.startswith("sft was trained on NVIDIA GeForce RTX 3080: 300 steps (25 epochs, 76,800 rows) in ")


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("interrupted", "was stopped on"),
        ("time-limit", "reached its time limit on"),
        ("failed", "failed on"),
        (None, "was killed on"),
    ],
)
def test_a_run_that_did_not_finish_says_how_it_ended(tmp_path, end, expected):
    sentence = words(tmp_path / "a", end=end, done=200)
    assert expected in sentence and "step 200 of 300" in sentence


def test_a_run_that_trains_says_so(tmp_path):
    assert "is being trained on" in words(tmp_path / "a", running=True, done=200)


def test_out_of_memory_errors_are_told_with_their_steps(tmp_path):
    assert "It ran out of memory 2 times at steps 120 and 180" in words(tmp_path / "a")
    assert "It never ran out of memory." in words(tmp_path / "b", ooms=[])


def test_many_errors_are_told_by_the_first_and_the_last(tmp_path):
    assert "8 times, first at step 10 and last at step 17," in words(tmp_path / "a", ooms=range(10, 18))


def test_memory_is_told_with_its_zone_and_the_prediction(tmp_path):
    sentence = words(tmp_path / "a", step_values={"reserved_bytes": int(18.5 * GiB)})
    assert "18.5 GiB of 20 GiB" in sentence and "in danger" in sentence and "the plan predicted 15.4 GiB" in sentence


def test_the_last_message_of_a_failure_is_told(tmp_path):
    assert "Its last message: trained 200 steps" in words(tmp_path / "a", end="failed", done=200)


def test_key_figures_begin_with_the_memory(tmp_path):
    first = key_figures(figures(tmp_path / "a"))[0]
    assert (first.key, first.value) == ("memory", "16.1 GiB") and "predicted 15.4 GiB" in first.below


@pytest.mark.parametrize(
    ("end", "command"),
    [
        ("finished", "brimful chat "),
        ("interrupted", "brimful train --run "),
        ("time-limit", "brimful train --run "),
        ("failed", "brimful why "),
        (None, "brimful why "),
    ],
)
def test_what_to_do_next_is_a_command(tmp_path, end, command):
    step = next_steps(figures(tmp_path / "a", end=end))[0]
    assert step.command.startswith(command) and str(tmp_path / "a") in step.command


def test_a_path_with_a_space_is_quoted_in_a_command(tmp_path):
    step = next_steps(figures(tmp_path / "my run"))[0]
    assert f"'{tmp_path / 'my run'}'" in step.command


def test_the_best_fix_of_a_finding_is_something_to_do(tmp_path):
    fix = Fix(title="Pack the rows", flags={"brimful": "--layout packed"})
    finding = Diagnosis(resource="none", kind="slow-padding", cause="29 % is padding.", fixes=(fix,))
    last = next_steps(figures(tmp_path / "a"), [finding])[-1]
    assert (last.sentence, last.command) == ("Pack the rows", "brimful train sft rows.parquet --seed 0 --layout packed")


def test_a_fix_that_is_no_flag_is_its_command(tmp_path):
    fix = Fix(title="Measure how fast the cards reach each other", flags={"shell": "brimful doctor"})
    assert advice(tmp_path / "a", fix).command == "brimful doctor"


FEWER_ROWS = Fix(title="Use 4 rows a step", costs="another experiment", flags={"brimful": "--global-batch 4"})


def advice(folder, fix=FEWER_ROWS, **values):
    finding = Diagnosis(resource="none", kind="few-updates", cause="Too few.", fixes=(fix,))
    return next_steps(figures(folder, **values), [finding])[-1]


def test_advice_tells_its_price(tmp_path):
    assert advice(tmp_path / "a").sentence == "Use 4 rows a step (costs another experiment)"


def test_a_flag_replaces_what_the_run_was_given(tmp_path):
    given = {"options": {"global_batch": 16, "max_steps": 60}}
    assert (
        advice(tmp_path / "a", request=given).command
        == "brimful train sft rows.parquet --max-steps 60 --global-batch 4"
    )


def test_a_run_with_steps_left_goes_on_with_the_flag(tmp_path):
    step = advice(tmp_path / "a", done=100, end="interrupted")
    assert step.command == f"brimful train --run {tmp_path / 'a'} --resume --global-batch 4"


def test_a_run_that_was_given_its_rows_in_python_is_advised_the_flag_alone(tmp_path):
    assert advice(tmp_path / "a", request={"data": None}).command == "--global-batch 4"


def test_words_in_the_place_of_a_flag_are_no_command(tmp_path):
    words = Fix(title="Grow segments", flags={"brimful": "(set by the command line)"})
    assert advice(tmp_path / "a", words).command is None


# ---- The checklist


def test_the_checklist_has_the_five_lines_of_the_guide(tmp_path):
    keys = [one.key for one in checklist(figures(tmp_path / "a"))]
    assert keys == ["gpu-utilization", "peak-memory", "out-of-memory", "epoch-time", "total-time"]


def test_utilisation_is_the_median_of_the_samples(tmp_path):
    one = check(tmp_path / "a", "gpu-utilization")
    assert (one.verdict, one.measured) == ("pass", pytest.approx(0.93))


def test_a_run_without_a_gpu_has_no_verdict_on_it(tmp_path):
    folder = rich_run(tmp_path / "a", steps=20)
    lines = [line for line in (folder / "events.jsonl").read_text().splitlines() if '"sample"' not in line]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    one = checklist(ReportFigures(RunRecord(folder)))[0]
    assert one.verdict == "unknown" and one.note == "The run has no samples of a GPU."


@pytest.mark.parametrize(
    ("reserved", "verdict"),
    [(0.2, "warn"), (0.32, "pass"), (0.85, "pass"), (0.86, "warn"), (0.91, "fail")],
)
def test_peak_memory_should_be_in_the_safe_range(tmp_path, reserved, verdict):
    values = {"reserved_bytes": int(reserved * 20 * GiB)}
    assert check(tmp_path / "a", "peak-memory", step_values=values).verdict == verdict


def test_little_memory_is_fine_where_the_whole_step_fits_at_once(tmp_path):
    values = {"step_values": {"reserved_bytes": GiB}, "plan_values": {"accumulation": 1}}
    one = check(tmp_path / "a", "peak-memory", **values)
    assert one.verdict == "pass" and "whole step" in one.note


@pytest.mark.parametrize(
    ("ooms", "end", "verdict"), [([], "finished", "pass"), ([9], "finished", "warn"), ([9], "failed", "fail")]
)
def test_a_survived_error_is_worth_a_look(tmp_path, ooms, end, verdict):
    assert check(tmp_path / "a", "out-of-memory", ooms=ooms, end=end).verdict == verdict


def test_an_epoch_as_long_as_planned_is_fine_however_long_it_takes(tmp_path):
    step = {"times": {"compute_s": 60.0, "data_s": 0.0, "communication_s": 0.0, "other_s": 0.0}}
    planned = {"run_time": {"epoch_s": 720.0, "total_s": 3600.0}}
    one = check(tmp_path / "a", "epoch-time", step_values=step, plan_values=planned)
    assert one.verdict == "pass" and one.measured == pytest.approx(720, rel=0.01)


def test_an_epoch_slower_than_planned_is_worth_a_look(tmp_path):
    step = {"times": {"compute_s": 60.0, "data_s": 0.0, "communication_s": 0.0, "other_s": 0.0}}
    one = check(tmp_path / "a", "epoch-time", step_values=step, plan_values={"run_time": {"epoch_s": 300.0}})
    assert one.verdict == "warn" and "2.4 × the planned time" in one.note


def test_a_long_epoch_without_a_prediction_has_no_verdict(tmp_path):
    step = {"times": {"compute_s": 60.0, "data_s": 0.0, "communication_s": 0.0, "other_s": 0.0}}
    assert check(tmp_path / "a", "epoch-time", step_values=step, plan_values={"run_time": None}).verdict == "unknown"


def test_a_run_that_did_not_finish_is_not_praised_for_its_time(tmp_path):
    assert check(tmp_path / "a", "total-time", end="interrupted", done=50).verdict == "unknown"


def test_small_shares_have_a_decimal():
    assert [percent(share) for share in (0, 0.004, 0.0949, 0.5, None)] == ["0\u00a0%", "0.4\u00a0%", "9.5\u00a0%", "50\u00a0%", "–"]  # fmt: skip


def test_a_loss_that_became_nan_says_when(tmp_path):
    nan = {"loss": lambda n: None if n > 1 else 5.79, "loss_is": lambda n: "nan" if n > 1 else None}
    assert "The loss was 5.79 at first and is not a number from step 2 on." in words(
        tmp_path / "a", step_values=nan, evals=[]
    )
    loss = next(one for one in key_figures(figures(tmp_path / "a", step_values=nan, evals=[])) if one.key == "loss")
    assert (loss.value, loss.below) == ("NaN", "from step 2 on; at first 5.79")


def test_many_times_the_planned_time_is_to_be_looked_at_however_short(tmp_path):
    planned = {"run_time": {"steps": 300, "step_s": 0.016, "epoch_s": 0.2, "total_s": 5.0}}
    assert check(tmp_path / "a", "total-time", plan_values=planned).verdict == "warn"
    assert check(tmp_path / "a", "epoch-time", plan_values=planned).verdict == "warn"


def test_checkpoints_that_were_removed_are_told(tmp_path):
    run = rich_run(tmp_path / "a")
    shutil.rmtree(run / "checkpoints" / "step-00000100")
    ooms = next(one for one in key_figures(ReportFigures(RunRecord(run))) if one.key == "ooms")
    assert ooms.below == "checkpoints: 3 saved, 2 kept"


def test_a_run_without_its_events_says_so(tmp_path):
    run = rich_run(tmp_path / "a")
    (run / "events.jsonl").unlink()
    first = summary(ReportFigures(RunRecord(run)))[0][1]
    assert first == "sft has checkpoints, but its events.jsonl is missing: nothing is known about its steps."
    assert ReportFigures(RunRecord(run)).state_label == "no record"
