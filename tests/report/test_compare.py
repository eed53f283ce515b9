"""Runs side by side: one experiment or not, faster or as fast, and how to go back."""

import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from brimful.errors import BadOption, BadRun
from brimful.languages import set_language
from brimful.report import run_record
from brimful.report.compare import Comparison, compare_runs
from brimful.report.compare_view import comparison_view
from brimful.training.events import FORMAT
from brimful.units import GiB
from tests.report.fake_runs import plan, write_run
from tests.report.why.test_growth_checks import write_store
from tests.report.why.test_run_checks import damage


def times(seconds: float, noise: float = 0.05, seed: int = 0):
    """Steps that take about as long."""
    rng = random.Random(seed)
    factors = [1 + noise * rng.gauss(0, 1) for _ in range(3000)]
    return lambda step: {"compute_s": seconds * factors[step], "data_s": 0.004, "communication_s": 0.0, "other_s": 0.0}


def loss(offset: float = 0.0, noise: float = 0.1, seed: int = 0):
    rng = random.Random(seed)
    noises = [noise * rng.gauss(0, 1) for _ in range(3000)]
    return lambda step: 2.0 + offset + 6.0 / (1 + step / 20) + noises[step]


def changed(**effective: Any) -> list[dict[str, Any]]:
    return [
        {**one, **({"effective": effective[one["name"]]} if one["name"] in effective else {})}
        for one in plan()["choices"]
    ]


def compared(folder: Path, one: dict[str, Any], two: dict[str, Any]) -> Comparison:
    return compare_runs([write_run(folder / "a", **one), write_run(folder / "b", **two)])


def shown(comparison: Comparison, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(comparison_view(comparison))
    return console.export_text()


# ---- Speed ----------------------------------------------------------------------------------------------------------


def test_a_faster_run_of_the_same_experiment(tmp_path):
    found = compared(
        tmp_path, {"step_values": {"times": times(0.39)}},
        {"step_values": {"times": times(0.3, seed=1), "loss": loss()}, "plan_values": {"micro_batch": 32, "choices": changed(micro_batch=32, workers=4)}},
    )  # fmt: skip
    assert found.verdict.startswith("same experiment, 1.3 × faster")


def test_a_slower_run(tmp_path):
    found = compared(
        tmp_path, {"step_values": {"times": times(0.3)}}, {"step_values": {"times": times(0.6, seed=1), "loss": loss()}}
    )
    assert found.pairs[0].speed == "slower"
    assert "2.0 × slower" in found.verdict


def test_a_difference_within_noise_is_none(tmp_path):
    for seed in range(10):
        found = compared(
            tmp_path / str(seed), {"step_values": {"times": times(0.36, 0.15, seed)}}, {"step_values": {"times": times(0.362, 0.15, 100 + seed)}}
        )  # fmt: skip
        assert found.pairs[0].speed == "as fast"


def test_a_slow_minute_is_noise_too(tmp_path):
    """Steps of a machine that others use are slow together, so many steps do not make a median exact."""

    def slow(step):
        return {"compute_s": 0.4 if 100 < step < 170 else 0.36, "data_s": 0.0, "communication_s": 0.0, "other_s": 0.0}

    found = compared(tmp_path, {"step_values": {"times": times(0.355, 0.01)}}, {"step_values": {"times": slow}})
    assert found.pairs[0].speed == "as fast"


def test_less_than_two_percent_is_as_fast_however_exact(tmp_path):
    found = compared(
        tmp_path, {"step_values": {"times": times(0.36, 0.0)}}, {"step_values": {"times": times(0.365, 0.0)}}
    )
    assert found.pairs[0].speed == "as fast"


def test_speeds_that_vary_by_half_are_not_compared(tmp_path):
    found = compared(tmp_path, {"step_values": {"times": times(0.36, 0.9), "loss": loss()}, "steps": 30}, {"steps": 30})
    assert "speed too noisy to compare" in found.verdict


def test_the_first_steps_do_not_count(tmp_path):
    def slow_start(step):
        return {"compute_s": 30.0 if step < 8 else 0.36, "data_s": 0.0, "communication_s": 0.0, "other_s": 0.0}

    found = compared(tmp_path, {"step_values": {"times": times(0.36)}}, {"step_values": {"times": slow_start}})
    assert found.pairs[0].speed == "as fast"


def test_a_run_of_three_steps_has_no_speed_yet(tmp_path):
    assert "speed not known yet" in compared(tmp_path, {}, {"done": 3, "running": True}).verdict


def slows_down(step):
    return {"compute_s": 0.3 if step <= 40 else 0.6, "data_s": 0.0, "communication_s": 0.0, "other_s": 0.0}


def test_verdict_and_table_compare_the_same_steps(tmp_path):
    found = compared(tmp_path, {"steps": 100, "step_values": {"times": slows_down}}, {"steps": 40, "step_values": {"times": slows_down}})  # fmt: skip
    assert "as fast" in found.verdict and found.timed_up_to == 40
    assert re.search(r"rows/s +853 +853 +× 1\.00", shown(found)) and "steps up to 40" in shown(found)
    rates = [one["rows_per_s"] for one in found.to_json()["runs"]]
    assert rates[0] == rates[1] and found.to_json()["speed_up_to_step"] == 40


def test_runs_of_one_length_are_compared_over_all_steps(tmp_path):
    found = compared(tmp_path, {"steps": 100}, {"steps": 100})
    assert found.timed_up_to is None and "which all have" not in shown(found)


@pytest.mark.parametrize(("peaks", "compared_mfu"), [((4e10, 4.02e10), True), ((4e10, 5e10), False)])
def test_an_mfu_of_another_peak_is_not_compared(tmp_path, peaks, compared_mfu):
    flops = [
        {"more": [{"event": "flops", "step": 1, "sentence": "MFU: counted", "peak_flops": peak}]} for peak in peaks
    ]
    found = compared(tmp_path, {**flops[0]}, {**flops[1], "step_values": {"mfu": 0.36}})
    line = next(line for line in shown(found).splitlines() if line.startswith("MFU"))
    assert ("+5 pp" in line) == compared_mfu
    assert ("0.04, 0.05" in shown(found)) != compared_mfu


# ---- The experiment -------------------------------------------------------------------------------------------------


def test_another_global_batch_is_another_experiment(tmp_path):
    found = compared(
        tmp_path, {"plan_values": {"global_batch": 192, "choices": changed(global_batch=192)}, "step_values": {"rows": 192}},
        {"plan_values": {"global_batch": 144, "choices": changed(global_batch=144)}, "step_values": {"rows": 144}},
    )  # fmt: skip
    assert found.verdict.startswith("different experiment: 192 → 144 rows a step; ")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"request": {"data": "other.parquet"}}, "data rows.parquet → other.parquet"),
        ({"request": {"task": "pretrain"}}, "task sft → pretrain"),
        ({"request": {"task_options": {"model": "chatlm-tiny"}}}, "model – → chatlm-tiny"),
        ({"request": {"options": {"weight_decay": 0.1}}}, "weight decay 0.01 → 0.1"),
        ({"plan_values": {"choices": changed(optimizer="adamw at 0.001")}}, "optimizer adamw at 0.0001 → adamw at 0.001"),
        ({"plan_values": {"choices": changed(precision="fp32")}}, "precision bf16 → fp32"),
        ({"plan_values": {"data_rows": 2000}}, "data rows 3,072 → 2,000"),
    ],
)  # fmt: skip
def test_what_decides_on_the_updates_makes_another_experiment(tmp_path, values, reason):
    pair = compared(tmp_path, {}, values).pairs[0]
    assert [str(one) for one in pair.reasons] == [reason]


@pytest.mark.parametrize(
    "values",
    [
        {"micro_batch": 8, "choices": changed(micro_batch=8, accumulation=32)},
        {"layout": "packed", "choices": changed(layout="packed")},
        {"choices": changed(workers=8)},
        {"choices": changed(memory_limit=40 * GiB)},
        {"device_name": "NVIDIA H200"},
    ],
)
def test_how_a_step_is_computed_does_not(tmp_path, values):
    assert compared(tmp_path, {}, {"plan_values": values, "step_values": {"loss": loss()}}).verdict.startswith(
        "same experiment, as fast"
    )


def test_a_loss_that_looks_across_rows_depends_on_the_split(tmp_path):
    inexact = [{"name": "exactness", "requested": None, "effective": "inexact", "reason": "", "basis": "measured"}]
    one = {"plan_values": {"choices": plan()["choices"] + inexact}}
    two = {"plan_values": {"micro_batch": 8, "choices": changed(micro_batch=8) + inexact}}
    assert compared(tmp_path, one, two).pairs[0].is_other


def test_another_seed_repeats_the_experiment(tmp_path):
    found = compared(tmp_path, {}, {"request": {"options": {"seed": 1}}, "step_values": {"loss": loss()}})
    assert found.verdict.startswith("same experiment with another seed, as fast")


def test_a_default_that_was_written_out_is_no_difference(tmp_path):
    assert (
        compared(tmp_path, {}, {"request": {"options": {"seed": 0, "clip_norm": 1.0, "workers": "auto"}}}).differences
        == []
    )


def test_a_longer_run_at_the_same_rates_is_the_same_experiment(tmp_path):
    constant = {"step_values": {"lr": 1e-4}, "plan_values": {"choices": changed(schedule="constant")}}
    assert not compared(tmp_path, {**constant, "steps": 200}, {**constant, "steps": 300}).pairs[0].is_other


def test_a_longer_cosine_has_other_rates(tmp_path):
    steps = {"name": "steps", "requested": None, "reason": "", "basis": "measured"}
    one, two = (
        {"steps": n, "plan_values": {"choices": [*plan()["choices"], {**steps, "effective": n}]}} for n in (200, 300)
    )
    assert [str(reason) for reason in compared(tmp_path, one, two).pairs[0].reasons] == [
        "another learning rate (steps 200 → 300)"
    ]


# ---- Results --------------------------------------------------------------------------------------------------------


def test_the_same_settings_and_losses_are_equal_to_the_bit(tmp_path):
    found = compared(tmp_path, {}, {})
    assert found.verdict == "the same settings, losses equal to the bit up to step 300; as fast"


def test_the_step_from_which_losses_differ(tmp_path):
    found = compared(
        tmp_path, {"step_values": {"loss": 2.5}}, {"step_values": {"loss": lambda n: 2.5 if n <= 120 else 2.5000001}}
    )
    assert found.pairs[0].equal_up_to == 120
    assert "losses equal to the bit up to step 120" in found.verdict


def test_runs_of_different_length_are_compared_over_the_steps_both_have(tmp_path):
    found = compared(
        tmp_path, {"step_values": {"loss": loss()}}, {"step_values": {"loss": loss()}, "done": 100, "running": True}
    )
    assert [point.at for point in found.points] == [50, 100]
    assert "losses equal to the bit up to step 100" in found.verdict


def test_rounding_is_told_as_an_agreement(tmp_path):
    micro = {
        "plan_values": {"choices": changed(micro_batch=8)},
        "step_values": {"loss": lambda n: loss()(n) * (1 + 1e-6 * (n % 3))},
    }
    assert "losses agree to 2e-06" in compared(tmp_path, {"step_values": {"loss": loss()}}, micro).verdict


def test_another_split_with_the_same_losses_is_told(tmp_path):
    found = compared(tmp_path, {}, {"plan_values": {"choices": changed(workers=3)}})
    assert found.verdict == "same experiment, as fast; losses equal to the bit up to step 300"


def test_losses_that_differ_by_noise_are_the_same(tmp_path):
    found = compared(
        tmp_path, {"step_values": {"loss": loss(seed=1)}}, {"step_values": {"loss": loss(seed=2)}, "plan_values": {"choices": changed(workers=3)}}
    )  # fmt: skip
    assert "the same loss within noise at step 300" in found.verdict


def test_a_higher_loss_is_told(tmp_path):
    found = compared(
        tmp_path, {"step_values": {"loss": loss(seed=1)}},
        {"step_values": {"loss": loss(0.4, seed=2)}, "request": {"options": {"weight_decay": 0.5}}},
    )  # fmt: skip
    assert "its loss is higher at step 300" in found.verdict


def test_another_global_batch_is_compared_at_equal_rows(tmp_path):
    found = compared(
        tmp_path, {"step_values": {"loss": loss()}},
        {"step_values": {"loss": loss(), "rows": 128}, "plan_values": {"global_batch": 128, "choices": changed(global_batch=128)}},
    )  # fmt: skip
    assert [(point.by, point.at) for point in found.points] == [("step", 150), ("step", 300), ("rows", 38_400)]
    assert "after 38,400 rows" in found.verdict


def test_rows_that_change_in_the_middle_are_told(tmp_path):
    """The last plan has as many rows as the other run, since it was rolled back."""
    values = {
        "rows": lambda n: 256 if n < 93 else 384 if n < 280 else 256, "times": lambda n: times(0.4 if n < 93 or n >= 280 else 0.6)(n),
    }  # fmt: skip
    found = compared(tmp_path, {"step_values": {"times": times(0.4)}}, {"step_values": values})
    assert found.verdict.startswith(
        "different experiment: B has 256, from step 93 on 384, from step 280 on 256 rows a step; "
    )
    assert "256, from step 93 on 384" in " ".join(shown(found, 160).split())
    figures = found.to_json()["runs"][1]
    assert figures["rows_per_step"] == 384
    assert figures["step_s"] * figures["rows_per_s"] == pytest.approx(384, rel=0.02)


def test_a_few_smaller_steps_are_no_change(tmp_path):
    found = compared(tmp_path, {}, {"step_values": {"rows": lambda n: 200 if n % 12 == 0 else 256}})
    assert not found.pairs[0].is_other
    assert "from step" not in shown(found)


def test_a_loss_that_is_no_number(tmp_path):
    nan = {"loss": lambda n: None if n > 55 else 3.0, "loss_is": lambda n: "nan" if n > 55 else None}
    found = compared(tmp_path, {}, {"step_values": nan})
    assert "its loss is not a number in step 56" in found.verdict
    assert "NaN" in shown(found)
    assert "NaN" not in json.dumps(found.to_json())


def test_a_run_that_failed_says_so(tmp_path):
    assert "it failed after step 120" in compared(tmp_path, {}, {"done": 120, "end": "failed"}).verdict


def test_less_memory_is_worth_a_word(tmp_path):
    found = compared(
        tmp_path, {}, {"step_values": {"reserved_bytes": 11 * GiB, "peak_bytes": 10 * GiB, "loss": loss()}}
    )
    assert "5.1 GiB less memory" in found.verdict


def test_it_says_how_many_steps_a_loss_is_the_mean_of(tmp_path):
    assert "a loss is the mean of the last 15 to 30 steps up to there" in shown(compared(tmp_path, {}, {}))


def test_the_table_has_everything_that_was_measured(tmp_path):
    text = shown(compared(tmp_path, {"evals": [100, 300], "ooms": [50]}, {"evals": [100, 300]}))
    for name in ("updates", "rows a step", "s/step", "rows/s", "an epoch takes", "waiting for rows", "padding", "MFU", "peak, allocated", "peak, reserved",
                 "host RAM", "OOMs survived", "loss at step 300", "evaluation loss, best"):  # fmt: skip
        assert name in text


def test_what_was_asked_for_is_shown_beside_what_was_used(tmp_path):
    choices = [
        {**one, "requested": 64, "effective": 32} if one["name"] == "micro_batch" else one for one in plan()["choices"]
    ]
    assert "32 (asked: 64)" in shown(compared(tmp_path, {}, {"plan_values": {"choices": choices}}))


def test_two_runs_fit_80_columns(tmp_path):
    text = shown(
        compared(tmp_path, {"evals": [300]}, {"plan_values": {"choices": changed(global_batch=144)}, "evals": [300]})
    )
    table = text.split("What they did")[1].splitlines()
    assert all(len(line) <= 80 for line in table)
    assert not any(line.startswith(" ") and line.strip() and index > 1 for index, line in enumerate(table)), (
        "no cell is broken"
    )


def test_of_a_long_run_only_the_steps_read_are_claimed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "WHOLE_BYTES", 1024)
    monkeypatch.setattr(run_record, "NEWEST_BYTES", 64 * 1024)
    monkeypatch.setattr(run_record.RunRecord.__init__, "__kwdefaults__", {"points": 50})
    found = compared(tmp_path, {"steps": 1500}, {"steps": 1500})
    assert re.fullmatch(
        r"the same settings, losses equal to the bit in \d+ steps up to step 1,500; as fast", found.verdict
    )


def test_long_runs_of_which_other_steps_were_read_are_compared_by_their_levels(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "WHOLE_BYTES", 1024)
    monkeypatch.setattr(run_record.RunRecord.__init__, "__kwdefaults__", {"points": 50})
    one = {"steps": 1500, "step_values": {"loss": loss(seed=1)}}
    two = {
        "steps": 1500,
        "step_values": {"loss": loss(0.8, seed=2), "note": "a longer line"},
        "request": {"options": {"weight_decay": 0.5}},
    }
    assert "its loss is higher at step 1,500" in compared(tmp_path, one, two).verdict


def test_six_runs_side_by_side(tmp_path):
    found = compare_runs([write_run(tmp_path / name, steps=50) for name in "abcdef"])
    assert len(found.verdict.splitlines()) == 5
    assert "F" in shown(found)


def test_of_three_runs_each_is_judged_by_what_differs_from_the_first(tmp_path):
    a, c = write_run(tmp_path / "a"), write_run(tmp_path / "c", plan_values={"choices": changed(workers=3)})
    b = write_run(
        tmp_path / "b",
        step_values={"rows": 128},
        plan_values={"global_batch": 128, "choices": changed(global_batch=128)},
    )
    assert (
        compare_runs([a, b, c]).pairs[1].to_json()["verdict"]
        == "same experiment, as fast; losses equal to the bit up to step 300"
    )


def test_a_run_without_a_plan_is_not_called_another_experiment(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", more=[])
    lines = [line for line in (b / "events.jsonl").read_text().splitlines() if '"event": "plan"' not in line]
    (b / "events.jsonl").write_text("\n".join(lines[:3]) + "\n")
    for path in [b / "plan.json", *(b / "plans").iterdir()]:
        path.write_text("{")
    for runs in ([a, b], [b, a]):
        pair = compare_runs(runs).pairs[0]
        assert not pair.is_other and "unknown whether it is the same experiment" in pair.to_json()["verdict"]


# ---- One run --------------------------------------------------------------------------------------------------------


def resumed(folder: Path, **values: Any) -> Path:
    """A run that goes on with another plan after step 150."""
    second = plan(micro_batch=16, choices=changed(micro_batch=16))
    run = write_run(
        folder, step_values={"times": lambda n: times(0.36)(n) if n <= 150 else times(0.72)(n)},
        more=[{"event": "plan", "step": 150, "number": 2, **second, **values}, {"event": "resume", "step": 150, "sentence": "continuing after step 150"}],
    )  # fmt: skip
    (run / "plans" / "0002.json").write_text(json.dumps(second))
    return run


def test_one_run_is_compared_with_itself_by_its_plans(tmp_path):
    run = resumed(tmp_path / "a")
    found = compare_runs([run])
    assert [side.title for side in found.sides] == [f"{run}, plan 1, steps 1–150", f"{run}, plan 2, steps 151–300"]
    assert found.verdict == "same experiment, 2.0 × slower"
    assert [command for _, command in found.go_back] == [f"brimful train --run {run} --rollback 1"]


def test_losses_of_the_parts_of_a_run_are_not_compared_at_equal_rows(tmp_path):
    """The second part begins with what the first has learnt."""
    run = resumed(tmp_path / "a", global_batch=128, choices=changed(global_batch=128))
    assert compare_runs([run]).points == []


def test_a_resume_from_another_folder_is_no_other_task(tmp_path):
    run = resumed(tmp_path / "a")
    events = (run / "events.jsonl").read_text().splitlines()
    begin = json.loads(events[0])
    begin["request"] = {**begin["request"], "task": "../x/task.py:T", "data": "../rows.parquet"}
    (run / "events.jsonl").write_text("\n".join([json.dumps(begin), *events[1:]]) + "\n")
    assert not compare_runs([run]).pairs[0].is_other


def test_the_relative_and_the_absolute_name_of_a_file_are_the_same(tmp_path):
    one = {"request": {"task": "mini.py:task", "data": "data/rows.txt"}}
    two = {"request": {"task": "/home/me/mini.py:task", "data": "/home/me/data/rows.txt"}}
    assert compared(tmp_path, one, two).differences == []
    other = {"request": {"task": "/home/me/mini.py:other", "data": "/home/me/rows.txt"}}
    assert {one.name for one in compared(tmp_path / "other", one, other).differences} == {"task", "data"}


def test_the_run_has_recorded_that_it_became_another_experiment(tmp_path):
    reasons = ["so far the learning rate followed another curve (steps)"]
    found = compare_runs([resumed(tmp_path / "a", experiment="other", experiment_reasons=reasons)])
    assert found.verdict.startswith("different experiment: so far the learning rate followed another curve (steps); ")


def test_the_same_reason_of_two_resumes_is_told_once(tmp_path):
    reasons = ["so far the learning rate followed another curve (steps)"]
    run = resumed(tmp_path / "a", experiment="other", experiment_reasons=reasons)
    lines = (run / "events.jsonl").read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if json.loads(line).get("step") == 250)
    third = {"event": "plan", "number": 3, **plan(), "step": 250, "experiment": "other", "experiment_reasons": reasons}
    (run / "events.jsonl").write_text("\n".join([*lines[:place], json.dumps(third), *lines[place:]]) + "\n")
    last = compare_runs([run]).pairs[-1]
    assert [str(one) for one in last.verdict].count(f"different experiment: {reasons[0]}") == 1
    assert reasons[0] not in map(str, last.verdict)


def test_in_chinese_the_legend_and_the_settings_are_punctuated_so(tmp_path):
    set_language("zh")
    asked = changed(micro_batch=16)
    next(one for one in asked if one["name"] == "micro_batch")["requested"] = 64
    text = shown(compared(tmp_path, {}, {"plan_values": {"choices": asked}}))
    set_language(None)
    assert "300/300 步，已完成" in text and "16（要求 64）" in text


def test_in_chinese_the_verdict_names_values_as_the_table_does(tmp_path):
    choices = {"choices": changed(optimizer="adamw at 0.001")}
    set_language("zh")
    text = shown(compared(tmp_path, {}, {"plan_values": choices}))
    set_language(None)
    assert "优化器 adamw，0.0001 → adamw，0.001" in text and "adamw at" not in text


def test_in_chinese_a_setting_that_is_on_is_chinese(tmp_path):
    set_language("zh")
    text = shown(compared(tmp_path, {}, {"request": {"options": {"seed": 0, "deterministic": True}}}))
    set_language(None)
    assert "开启" in text and " on" not in text


@pytest.mark.parametrize("long_row", [None, 3])
def test_how_many_rows_may_be_bad_is_another_experiment_only_with_other_rows(tmp_path, long_row):
    """A file with `--max-bad` and a store of its good rows are trained alike."""
    write_store(tmp_path / "a" / "store", Path("rows.jsonl"), None)
    write_store(tmp_path / "b" / "store", Path("rows.jsonl"), long_row)
    request = {"data": "rows", "prepared": {"data": "store"}}
    found = compared(tmp_path, {"request": {**request, "task_options": {"max_bad": 0.01}}}, {"request": request})
    assert found.verdict.startswith("same experiment" if long_row is None else "different experiment")


def test_a_run_in_one_go_has_nothing_to_compare(tmp_path):
    with pytest.raises(BadOption, match="trained in one go"):
        compare_runs([write_run(tmp_path / "a")])


def test_the_last_run_can_go_back_to_its_plan_before(tmp_path):
    run = resumed(tmp_path / "b")
    commands = [command for _, command in compare_runs([write_run(tmp_path / "a"), run]).go_back]
    assert commands[0] == f"brimful train --run {run} --rollback"


def test_a_finished_first_run_is_trained_again_by_a_whole_command(tmp_path):
    options = {"max_steps": 300, "lengths": [256, 256], "skip_oversized": True, "memory_limit": "20 GiB"}
    a = write_run(
        tmp_path / "a", request={"data": "my rows.parquet", "options": options, "task_options": {"model": "runs/p"}}
    )
    (_, command), = compare_runs([a, write_run(tmp_path / "b")]).go_back  # fmt: skip
    assert shlex.split(command) == [
        "brimful", "train", "sft", "my rows.parquet", "--plan", f"{a}/plan.json", "--model", "runs/p", "--max-steps", "300",
        "--lengths", "256,256", "--skip-oversized", "--memory-limit", "20 GiB",
    ]  # fmt: skip


def test_only_a_plan_that_exists_is_offered(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (a / "plan.json").unlink()
    assert f"--plan {a}/plans/0001.json" in compare_runs([a, b]).go_back[0][1]
    (a / "plans" / "0001.json").unlink()
    assert "--plan" not in compare_runs([a, b]).go_back[0][1]


def test_an_unfinished_first_run_is_continued(tmp_path):
    a = write_run(tmp_path / "a", done=100, end="interrupted")
    assert compare_runs([a, write_run(tmp_path / "b")]).go_back[0][1] == f"brimful train --run {a} --resume"


# ---- Bad input ------------------------------------------------------------------------------------------------------


def test_a_run_that_does_not_exist(tmp_path):
    with pytest.raises(BadRun, match="there is no run"):
        compare_runs([write_run(tmp_path / "a"), tmp_path / "nowhere"])


def test_one_run_named_twice(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadOption, match="named twice"):
        compare_runs(["a", run])


def test_too_many_runs(tmp_path):
    with pytest.raises(BadOption, match="at most 6"):
        compare_runs([tmp_path / str(n) for n in range(7)])


def test_a_run_of_a_newer_version(tmp_path):
    run = write_run(tmp_path / "a")
    events = run / "events.jsonl"
    events.write_text(events.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}', 1))
    with pytest.raises(BadRun, match="newer Brimful"):
        compare_runs([run, write_run(tmp_path / "b")])


def test_runs_without_steps_are_compared_by_their_settings(tmp_path):
    found = compared(
        tmp_path,
        {"done": 0, "running": True},
        {"done": 0, "running": True, "plan_values": {"choices": changed(global_batch=144)}},
    )
    assert found.verdict == "different experiment: 256 → 144 rows a step; speed not known yet"
    assert "no steps yet" in shown(found)


def test_a_folder_with_only_a_request(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{")
    assert "no steps yet" in shown(compare_runs([write_run(tmp_path / "a"), tmp_path / "b"]))


def test_damaged_values_never_raise(tmp_path):
    rng = random.Random(0)
    for seed in range(40):
        runs = [write_run(tmp_path / f"{seed}{name}", steps=60, evals=[30], ooms=[20]) for name in ("甲", "b c")]
        for run in runs:
            for name in ("plan.json", "run.json"):
                content = json.loads((run / name).read_text())
                damage(content, rng)
                (run / name).write_text(json.dumps(content))
            lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
            for event in lines:
                damage(event, rng)
            (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
        found = compare_runs(runs)
        shown(found)
        assert found.verdict
        json.dumps(found.to_json())


@pytest.mark.parametrize("content", ['{"event": "begin", "time": "2026', "garbage", ""])
def test_a_half_written_run_has_nothing_to_compare(tmp_path, content):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "events.jsonl").write_text(content)
    with pytest.raises(BadOption, match="nothing to compare"):
        compare_runs([tmp_path / "half"])
    assert compare_runs([tmp_path / "half", write_run(tmp_path / "whole")]).verdict
