"""Slow runs: where the time went, why, and what helps; nothing about runs that are fast enough."""

import json
from pathlib import Path
from typing import Any

import pytest

from brimful.report.run_record import RunRecord
from brimful.report.why.run_checks import check_run
from brimful.units import GiB
from tests.planning.small import small_plan
from tests.report.fake_runs import memory_model, plan, tried, write_run


def found(folder: Path, kind: str, **values: Any):
    return next((one for one in check_run(RunRecord(write_run(folder / "run", **values))) if one.kind == kind), None)


def times(
    compute: float = 0.36, data: float = 0.004, communication: float = 0.0, other: float = 0.007
) -> dict[str, float]:
    return {"compute_s": compute, "data_s": data, "communication_s": communication, "other_s": other}


def choices(**requested: Any) -> list[dict[str, Any]]:
    return [
        {**one, **({"requested": requested[one["name"]]} if one["name"] in requested else {})}
        for one in plan()["choices"]
    ]


WAITING = {"times": times(compute=0.2, data=0.2)}


@pytest.mark.parametrize(
    ("host", "workers", "phrase", "certainty", "flag"),
    [
        ({"cpu": 0.97}, 2, "The CPU is busy (97% of 8 cores)", "likely", "brimful data tokenize rows.parquet --tokenizer tokenizer --output store"),
        ({"cpu": 0.37}, 2, "The 2 workers are busy (37% of 8 cores), and there are cores left", "likely", "--workers 4"),
        ({"cpu": 0.1, "read_bytes_per_s": 210e6}, 2, "The CPU is idle (10%) while 200.3 MiB/s are read, so the disk is the limit", "likely", None),
        ({"cpu": 0.1, "read_bytes_per_s": 1e6}, 2, "a disk that answers slowly", "possible", "--workers 4"),
        ({"cpu": 0.2}, 0, "No worker reads ahead", "likely", "--workers 4"),
        ({"cpu": None}, 2, "no samples that tell whether CPU or disk", "possible", "brimful data tokenize rows.parquet --tokenizer tokenizer --output store"),
    ],
)  # fmt: skip
def test_waiting_for_rows_has_a_cause(tmp_path, host, workers, phrase, certainty, flag):
    slow = found(tmp_path, "slow-data", step_values=WAITING, host=host, plan_values={"host": {"workers": workers}})
    assert phrase in slow.cause
    assert slow.certainty == certainty
    assert next(iter(slow.fixes[0].flags.values()), None) == flag
    assert slow.figures["data_share"] == pytest.approx(0.2 / 0.407)


def test_training_on_the_cpu_says_nothing_about_who_keeps_the_cpu_busy(tmp_path):
    slow = found(
        tmp_path,
        "slow-data",
        step_values=WAITING,
        host={"cpu": 0.97},
        plan_values={"device": "cpu", "host": {"workers": 0}},
    )
    assert slow.certainty == "possible"


def test_a_clamped_micro_batch_is_compared_with_what_the_plan_timed(tmp_path):
    timed = [tried(43, 672.0, 15.2 * GiB), tried(8, 301.0, 5 * GiB, chosen=True)]
    slow = found(
        tmp_path, "slow-clamped-micro-batch",
        plan_values={"micro_batch": 8, "accumulation": 32, "tried": timed, "rows_per_s": 301.0, "choices": choices(micro_batch=8)},
    )  # fmt: skip
    assert slow.certainty == "certain"
    assert "The plan timed 43 rows at 672 rows/s, and 8 rows at 301." in slow.cause
    assert slow.fixes[0].title == "Use micro-batches of 43 rows: 2.2 × as fast, with a peak of 15.2 GiB"
    assert slow.fixes[0].flags == {"brimful": "--micro-batch 43"}


def test_a_clamped_micro_batch_that_was_not_timed_against_others_is_only_possibly_slow(tmp_path):
    slow = found(
        tmp_path, "slow-clamped-micro-batch", plan_values={"micro_batch": 8, "choices": choices(micro_batch=8)}
    )
    assert slow.certainty == "possible"
    assert "none of those sizes was timed" in slow.cause


@pytest.mark.parametrize(
    "values",
    [
        {"choices": choices(micro_batch=43)},  # the size that would be chosen anyway
        {"micro_batch": 8, "choices": choices()},  # nobody asked for it
        {"micro_batch": 8, "tried": [tried(8, 301.0, GiB, chosen=True), tried(43, 310.0, GiB)], "largest_micro_batch": 12, "choices": choices(micro_batch=8)},
    ],
)  # fmt: skip
def test_a_micro_batch_that_costs_nothing_is_left_alone(tmp_path, values):
    assert found(tmp_path, "slow-clamped-micro-batch", plan_values=values) is None


def test_an_earlier_plan_of_the_run_knows_faster_sizes(tmp_path):
    run = write_run(
        tmp_path / "run", plan_values={"micro_batch": 8, "rows_per_s": 301.0, "choices": choices(micro_batch=8)}
    )
    earlier = plan(tried=[tried(43, 672.0, 15.2 * GiB, chosen=True)])
    (run / "plans" / "0001.json").write_text(json.dumps(earlier))
    slow = next(one for one in check_run(RunRecord(run)) if one.kind == "slow-clamped-micro-batch")
    assert slow.figures["faster_micro_batch"] == 43


def cut_short(*names: str) -> list[dict[str, Any]]:
    """Choices of a plan whose time was up, as `planning.choices` writes them."""
    reason = f"time ended the search after 19.8 s; not tried: {', '.join(names)}"
    last = {"name": "plan_seconds", "requested": None, "effective": 20.0, "basis": "measured", "reason": reason, "source": "measured"}  # fmt: skip
    return [*choices(), last]


TINY = {"micro_batch": 4, "largest_micro_batch": 4, "accumulation": 64, "memory_model": memory_model()}
RISING = [tried(4, 300.0, 4 * GiB, chosen=True), tried(2, 160.0, 3 * GiB)]


def test_a_plan_that_time_cut_short_says_what_it_left_out(tmp_path):
    values = {**TINY, "tried": RISING, "choices": cut_short("more than 4 rows at once", "checkpointing")}
    slow = found(tmp_path, "slow-plan-cut-short", plan_values=values)
    assert "The plan was cut short: its time was up after micro-batches of 4 rows." in slow.cause
    assert "It did not try: more than 4 rows at once, checkpointing." in slow.cause
    assert "rows/s were still rising, by 1.9 ×" in slow.cause
    assert "Memory has room for 45 rows at once" in slow.cause
    assert slow.fixes[0].flags == {"brimful": "--plan-seconds 120"}
    assert slow.certainty == "likely"


def test_what_the_planner_writes_when_its_time_is_up_is_understood(tmp_path):
    made = small_plan(plan_seconds=1e-6, memory_limit="64MiB", global_batch=500, checkpointing="off").to_json()
    del made["processes"]
    slow = found(tmp_path, "slow-plan-cut-short", plan_values=made)
    assert "rows at once" in slow.cause and slow.fixes[0].flags == {"brimful": "--plan-seconds 60"}


def test_a_small_micro_batch_whose_speed_still_rose_is_named_without_a_cut(tmp_path):
    slow = found(tmp_path, "slow-small-micro-batch", plan_values={**TINY, "tried": RISING})
    assert "Memory has room for 45 rows" in slow.cause
    assert slow.fixes[0].flags == {"brimful": "--micro-batch 22"}


@pytest.mark.parametrize(
    "values",
    [
        {"choices": cut_short("what frozen weights save")},  # nothing that makes a micro-batch larger
        {"choices": cut_short("more than 4 rows at once"), "tried": [tried(4, 300.0, GiB, chosen=True), tried(2, 298.0, GiB)]},
        {"tried": [tried(4, 300.0, GiB, chosen=True), tried(8, 250.0, GiB)]},
        {"choices": cut_short("more than 40 rows at once"), "micro_batch": 40},  # memory has room for five more
    ],
)  # fmt: skip
def test_a_small_micro_batch_that_is_fast_is_left_alone(tmp_path, values):
    for kind in ("slow-plan-cut-short", "slow-small-micro-batch"):
        assert found(tmp_path / kind, kind, plan_values={**TINY, **values}) is None


def test_high_padding(tmp_path):
    slow = found(tmp_path, "slow-padding", step_values={"padding": 0.63})
    assert slow.cause.startswith("63% of the positions computed are padding")
    assert slow.fixes[0].flags == {"brimful": "--mix window:10"}


def test_usual_padding_is_fine(tmp_path):
    assert found(tmp_path, "slow-padding", step_values={"padding": 0.42}) is None


LAUNCHES = {"gpu": {"utilization": 0.45}, "step_values": {"mfu": 0.05}}


def test_an_idle_card_while_everything_computes_is_launch_bound(tmp_path):
    slow = found(tmp_path, "launch-bound", **LAUNCHES)
    assert slow.certainty == "likely"
    assert "busy only 45% of the time" in slow.cause
    assert slow.fixes[0].flags == {"brimful": "--compile on"}


def test_what_compiling_gains_is_taken_from_the_plan_that_timed_it(tmp_path):
    timed = [tried(43, 672.0, 15 * GiB, chosen=True), tried(48, 1284.0, 12 * GiB, compile="on")]
    slow = found(tmp_path, "launch-bound", plan_values={"tried": timed}, **LAUNCHES)
    assert slow.fixes[0].title == "Compile the blocks: timed by the plan at 1.9 × the speed"
    assert slow.fixes[0].basis == "measured"


def test_without_an_mfu_launches_are_only_possibly_the_cause(tmp_path):
    slow = found(tmp_path, "launch-bound", gpu={"utilization": 0.45}, step_values={"mfu": None})
    assert slow.certainty == "possible"


def test_a_busy_card_is_not_launch_bound(tmp_path):
    assert found(tmp_path, "launch-bound", step_values={"mfu": 0.05}) is None


SMALL = {
    "gpu": {"utilization": 0.2}, "plan_values": {"accumulation": 1, "micro_batch": 256},
    "step_values": {"peak_bytes": GiB, "reserved_bytes": GiB, "mfu": 0.01},
}  # fmt: skip


def test_a_card_that_one_run_cannot_fill_is_for_more_runs(tmp_path):
    slow = found(tmp_path, "card-not-full", **SMALL)
    assert "More rows in a step would be another experiment" in slow.cause
    assert slow.figures["runs_at_once"] == 8
    assert [next(iter(fix.flags.values())) for fix in slow.fixes] == [
        "brimful sweep spec.toml",
        "--memory-limit 2.5GiB",
    ]


def test_a_card_that_is_not_full_is_not_launch_bound_too(tmp_path):
    assert found(tmp_path, "launch-bound", **SMALL) is None


def test_a_run_that_accumulates_could_use_larger_micro_batches_instead(tmp_path):
    assert found(tmp_path, "card-not-full", **{**SMALL, "plan_values": {"accumulation": 6}}) is None


def test_communication(tmp_path):
    slow = found(
        tmp_path, "slow-communication", ranks=2, step_values={"times": times(communication=0.2)}, request={"options": {"backend": "gloo"}}
    )  # fmt: skip
    assert slow.fixes[0].flags == {"brimful": "--backend nccl"}


def test_no_card_is_blamed_on_a_cpu(tmp_path):
    cpu = {"ranks": 2, "plan_values": {"device": "cpu"}}
    slow = found(tmp_path / "a", "slow-communication", step_values={"times": times(communication=0.2)}, **cpu)
    ranks = [{"rank": rank, "times": {"compute_s": 0.6 if rank else 0.36}} for rank in range(2)]
    uneven = found(tmp_path / "b", "slow-rank", step_values={"ranks": ranks}, **cpu)
    assert slow.fixes[0].flags == {"brimful": "--processes 1"}
    assert not any("card" in fix.title for one in (slow, uneven) for fix in one.fixes)


def test_a_slow_rank_is_named(tmp_path):
    ranks = [{"rank": rank, "times": {"compute_s": 0.6 if rank == 2 else 0.36}} for rank in range(4)]
    slow = found(tmp_path, "slow-rank", ranks=4, step_values={"ranks": ranks})
    assert "Rank 2 computes 0.60 s in a step, the others 0.36 s" in slow.cause


def pauses(folder: Path, kind: str, event: str, every: int, seconds: float) -> Any:
    """A run whose clock stands still in pauses, as `times` leave them out."""
    events = [
        {"event": event, "step": n, "saved": True, "seconds": seconds, "loss": 2.0} for n in range(every, 300, every)
    ]
    step_s = 1 + seconds / every
    return found(folder, kind, step_values={"times": times(compute=step_s)}, more=events)


def test_saving_too_often(tmp_path):
    slow = pauses(tmp_path, "slow-saves", "checkpoint", 10, 4.0)
    assert slow.certainty == "certain"
    assert slow.fixes[0].flags["brimful"].startswith("--save-every ")
    assert "predicted 5% of the time" in slow.fixes[0].title


def test_evaluating_too_often(tmp_path):
    assert pauses(tmp_path, "slow-evaluations", "eval", 10, 8.0).fixes[0].flags["brimful"].startswith("--eval-every ")


def test_short_pauses_are_fine(tmp_path):
    assert pauses(tmp_path, "slow-saves", "checkpoint", 100, 4.0) is None


def test_others_on_the_card_that_slow_it_down(tmp_path):
    slow = found(
        tmp_path, "others-on-card", gpu={"others_bytes": lambda n: 6 * GiB if n > 150 else 0},
        step_values={"tokens_per_s": lambda n: 50_000 + n % 7 if n > 150 else 78_000 + n % 7},
    )  # fmt: skip
    assert "up to 6 GiB of the card" in slow.cause
    assert "Meanwhile steps ran at 0.64 × the speed." in slow.cause


def test_others_that_cost_no_speed_are_mentioned_without_blame(tmp_path):
    slow = found(tmp_path, "others-on-card", gpu={"others_bytes": lambda n: 6 * GiB if n > 150 else 0})
    assert "Meanwhile" not in slow.cause


def test_a_desktop_on_the_card_is_not_worth_a_word(tmp_path):
    assert found(tmp_path, "others-on-card", gpu={"others_bytes": GiB // 2}) is None


def test_a_hot_card_that_slows_down_may_be_throttled(tmp_path):
    slow = found(
        tmp_path, "hot-card", gpu={"temperature_c": lambda n: 86 if n > 150 else 70},
        step_values={"tokens_per_s": lambda n: 66_000 + n % 7 if n > 150 else 78_000 + n % 7},
    )  # fmt: skip
    assert slow.certainty == "possible"
    assert "0.85 × the speed" in slow.cause


def test_a_hot_card_that_keeps_its_speed_is_fine(tmp_path):
    assert found(tmp_path, "hot-card", gpu={"temperature_c": lambda n: 86 if n > 150 else 70}) is None


def test_swapping(tmp_path):
    slow = found(
        tmp_path, "host-swapping", host={"swap_used_bytes": lambda n: n * GiB // 100, "swap_total_bytes": 8 * GiB}
    )
    assert slow.resource == "host"


def test_a_run_of_seconds_is_not_judged(tmp_path):
    assert found(tmp_path, "slow-data", steps=20, step_values=WAITING) is None
