"""Out-of-memory errors of a run are explained with its own figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from brimful.report.run_record import RunRecord
from brimful.report.why.diagnosis import Diagnosis
from brimful.report.why.run_checks import check_run
from brimful.units import GiB
from tests.report.fake_runs import memory_model, tried, write_run

PLAN = {
    "memory_model": memory_model(),
    "tried": [
        tried(43, 672.0, 15.2 * GiB, chosen=True),
        tried(32, 598.0, 12.2 * GiB),
        tried(64, 430.0, 7.1 * GiB, checkpointing="on"),
    ],
}


def oom(
    step: int = 120, *, rows: int = 43, shape: tuple[int, ...] = (228, 256), needed: float, room: float, **values: Any
) -> dict[str, Any]:
    change = "the device has room for 13 GiB, micro-batches now use 85% of that"
    return {
        "event": "oom", "step": step, "sentence": f"out of memory in backward, micro-batch 2 of 6 (43 rows of 228+256): {change}",
        "process": 0, "phase": "backward", "rows": rows, "shape": list(shape), "predicted_bytes": int(needed * GiB),
        "available_bytes": int(room * GiB), "change": change, **values,
    }  # fmt: skip


def diagnose(folder: Path, *events: dict[str, Any], **values: Any) -> Diagnosis:
    plan = {**PLAN, **values.pop("plan", {})}
    run = write_run(folder / "run", more=events, plan_values=plan, **values)
    return next(one for one in check_run(RunRecord(run)) if one.kind in ("gpu-out-of-memory", "cpu-out-of-memory"))


def test_it_says_what_ran_what_was_there_and_what_changed(tmp_path):
    diagnosis = diagnose(tmp_path, oom(needed=16.3, room=13.0))
    assert diagnosis.resource == "gpu"
    assert "in step 120 (backward, 43 rows of 228+256)" in diagnosis.cause
    assert "predicted to need 16.3 GiB and the device had room for only 13 GiB" in diagnosis.cause
    assert "from then on: the device has room for 13 GiB, micro-batches now use 85% of that." in diagnosis.cause


MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.58 GiB of which 1.06 GiB is free."
)


def test_it_names_the_line_of_the_model_and_the_tensor_that_did_not_fit(tmp_path):
    config = tmp_path / "run/checkpoints/step-00000100/model/config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"vocab_size": 40960, "d_model": 768, "d_ff": 3072, "num_heads": 12}))
    place = "T5ForConditionalGeneration.forward (modeling_t5.py:1009)"
    error = oom(rows=32, shape=(200, 252), needed=16.3, room=13.0, message=MESSAGE, place=place)
    diagnosis = diagnose(tmp_path, error)
    assert f"1.23 GiB did not fit in {place}." in diagnosis.cause
    assert "The block is likely the fp32 logits: 1.23 GiB = 32 × 252 × 40,960 × 4 bytes." in diagnosis.cause
    assert diagnosis.figures["block"]["factors"] == [32, 252, 40960]


def test_without_the_sizes_of_the_model_no_tensor_is_named(tmp_path):
    diagnosis = diagnose(tmp_path, oom(rows=32, shape=(200, 252), needed=16.3, room=13.0, message=MESSAGE))
    assert "1.23 GiB did not fit." in diagnosis.cause
    assert "likely the" not in diagnosis.cause


def test_it_says_when_the_micro_batch_size_was_restored(tmp_path):
    grow = {"event": "grow", "step": 140, "sentence": "micro-batch size restored to 43 rows after 10 clean steps"}
    diagnosis = diagnose(tmp_path, oom(needed=16.3, room=13.0), grow)
    assert "restored in step 140" in diagnosis.cause
    assert diagnosis.figures["restored_at_step"] == 140


def test_it_says_that_it_was_not_restored(tmp_path):
    assert "not restored up to step 300" in diagnose(tmp_path, oom(needed=16.3, room=13.0)).cause


def test_a_smaller_micro_batch_is_predicted_by_the_memory_model_for_the_room_there_was(tmp_path):
    fix = diagnose(tmp_path, oom(needed=16.3, room=13.0)).fixes[0]
    assert fix.title == "Use micro-batches of at most 26 rows of 228+256: predicted 10.92 GiB"
    assert fix.flags == {"brimful": "--micro-batch 26"}
    assert fix.basis == "predicted"
    assert fix.global_batch == "unchanged: 256 rows in 10 micro-batches"
    assert fix.saves == "5.36 GiB"


def test_its_cost_is_what_the_plan_timed(tmp_path):
    assert diagnose(tmp_path, oom(needed=16.3, room=15.0)).fixes[0].costs == "11% of the rows/s, as timed by the plan"


def test_without_a_memory_model_nothing_is_predicted(tmp_path):
    fixes = diagnose(tmp_path, oom(needed=16.3, room=13.0), plan={"memory_model": {}}).fixes
    assert not any(fix.basis == "predicted" for fix in fixes)


def test_checkpointing_has_the_figures_of_the_plan_that_tried_it(tmp_path):
    fix = diagnose(tmp_path, oom(needed=16.3, room=13.0)).fixes[-1]
    assert fix.title == "Recompute activations in backward: 64 rows took 7.1 GiB"
    assert (fix.saves, fix.costs, fix.basis) == ("8.1 GiB", "36% of the rows/s, as timed by the plan", "measured")


def test_checkpointing_that_was_not_tried_is_a_range(tmp_path):
    fix = diagnose(tmp_path, oom(needed=16.3, room=13.0), plan={"tried": []}).fixes[-1]
    assert (fix.flags, fix.basis) == ({"brimful": "--checkpointing on"}, "range")


def test_other_programs_on_the_card_are_named_with_what_they_hold(tmp_path):
    others = {"others_bytes": lambda step: 5 * GiB if step > 100 else 0}
    diagnosis = diagnose(tmp_path, oom(needed=16.3, room=13.0), gpu=others)
    assert diagnosis.certainty == "likely"
    assert "while other programs held 5 GiB" in diagnosis.cause
    assert diagnosis.fixes[0].flags == {"brimful": "--memory-limit 13GiB"}


def test_other_programs_are_named_once(tmp_path):
    run = write_run(
        tmp_path / "run", more=[oom(needed=16.3, room=13.0)], plan_values=PLAN, gpu={"others_bytes": 5 * GiB}
    )
    assert [one.kind for one in check_run(RunRecord(run))] == ["gpu-out-of-memory"]


def test_others_that_had_left_before_are_not_blamed(tmp_path):
    diagnosis = diagnose(
        tmp_path, oom(needed=16.3, room=13.0), gpu={"others_bytes": lambda step: 5 * GiB if step < 40 else 0}
    )
    assert "other programs" not in diagnosis.cause


def test_enough_room_means_that_the_prediction_was_too_low(tmp_path):
    diagnosis = diagnose(tmp_path, oom(needed=15.0, room=19.0))
    assert "too low or memory was fragmented" in diagnosis.cause
    flags = [flag for fix in diagnosis.fixes for flag in fix.flags.values()]
    assert "--fill 0.75" in flags
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True" in flags


def test_rows_longer_than_planned_are_the_cause(tmp_path):
    diagnosis = diagnose(tmp_path, oom(rows=12, shape=(228, 900), needed=18.1, room=17.0))
    assert "longer than the 228+256 that the plan was made for" in diagnosis.cause
    assert any(fix.flags.get("brimful") == "--lengths 228,900" for fix in diagnosis.fixes)


def test_the_long_row_is_named_by_file_and_line(tmp_path):
    diagnosis = diagnose(tmp_path, oom(rows=12, shape=(228, 900), needed=18.1, room=17.0, file="rows.jsonl", line=4711))
    assert "It is line 4,711 of rows.jsonl." in diagnosis.cause


def test_an_error_right_after_an_evaluation_says_so(tmp_path):
    assert "first step after an evaluation" in diagnose(tmp_path, oom(needed=16.3, room=13.0), evals=[119]).cause


def test_several_errors_are_one_diagnosis(tmp_path):
    diagnosis = diagnose(tmp_path, oom(120, needed=16.3, room=13.0), oom(121, needed=16.0, room=13.0))
    assert diagnosis.cause.startswith("Memory ran out 2 times, from step 120 to step 121")
    assert diagnosis.figures["ooms"] == 2


def test_an_error_without_figures_has_no_certain_cause(tmp_path):
    diagnosis = diagnose(tmp_path, ooms=[120])
    assert diagnosis.certainty == "possible"
    assert "predicted" not in diagnosis.cause


def test_an_error_that_ended_the_run_is_the_second_thing_to_know(tmp_path):
    run = write_run(tmp_path / "run", done=119, end="failed", plan_values=PLAN, more=[oom(119, needed=16.3, room=13.0)])
    found = check_run(RunRecord(run))
    assert [one.kind for one in found] == ["run-failed", "gpu-out-of-memory"]
    assert found[1].cause.endswith("The run ended with it.")


def test_rows_that_were_set_aside_are_counted(tmp_path):
    aside = {
        "event": "oversized",
        "step": 30,
        "rows": [7],
        "shape": [3000, 9000],
        "sentence": "row 7 of step 30 …; set aside",
    }
    run = write_run(tmp_path / "run", more=[aside, {**aside, "step": 50}], plan_values=PLAN)
    diagnosis = next(one for one in check_run(RunRecord(run)) if one.kind == "oversized-rows")
    assert diagnosis.cause.startswith(
        "2 rows did not fit even alone and were left out of training, the first in step 30."
    )


def test_a_simulated_limit_on_the_cpu_is_host_memory(tmp_path):
    diagnosis = diagnose(tmp_path, oom(needed=16.3, room=13.0), plan={"device": "cpu"})
    assert (diagnosis.kind, diagnosis.resource) == ("cpu-out-of-memory", "host")


def test_it_is_json(tmp_path):
    assert (
        json.loads(json.dumps(diagnose(tmp_path, oom(needed=16.3, room=13.0)).to_json()))["kind"] == "gpu-out-of-memory"
    )


@pytest.mark.parametrize("room", [17.0, 9.5])  # of a few long rows the room that is measured is small too
def test_a_task_without_shape_is_the_cause_if_the_plan_warned_of_it(tmp_path, room):
    warning = "task words has no shape(), and its rows have from 9 to 310 values (32 rows were compared), so long rows may need more"
    plan = {"shape": [], "warnings": [warning], "memory_model": {}}
    diagnosis = diagnose(tmp_path, oom(shape=(), needed=9.0, room=room), plan=plan)
    assert "The task has no shape() although its rows differ in size" in diagnosis.cause
    assert "prediction was too low" not in diagnosis.cause
    assert diagnosis.fixes[0].title.startswith("Define shape(row) in the task")
    assert not any("--fill" in flag for fix in diagnosis.fixes for flag in fix.flags.values())
