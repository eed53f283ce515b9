"""Tables for the terminal: a plan, an evaluation, the machine."""

import math
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from io import StringIO

import pytest
from rich.console import Console

from brimful.languages import set_language
from brimful.machine.gpu import Gpu, GpuProcess
from brimful.machine.host import Host, Space
from brimful.machine.machine import Machine, Software
from brimful.planning.plan import HostPlan, RunTime, Setting, Tried
from brimful.planning.planner import plan as make_plan
from brimful.report.tables import eval_table, machine_table, plan_changes, plan_table, show_clock, tried_table
from brimful.units import GiB, MiB
from tests.planning.small import Normed, Tagger


def render(table, width: int) -> str:
    console = Console(width=width, file=StringIO())
    console.print(table)
    return console.file.getvalue()


def plan_text(plan):
    return render(plan_table(plan), width=120)


@pytest.fixture(scope="module")
def plan():
    return make_plan(Tagger(), memory_limit="4MiB", device="cpu", cache=False)


def test_the_headline_is_what_to_run(plan):
    assert plan_text(plan).startswith("tagger on the CPU: ")
    assert "= 50 per step" in plan_text(plan)


def test_a_prediction_that_is_a_little_too_low_is_not_off_by_minus_nothing(plan):
    measured = replace(plan, measured_peak_bytes=100_000, predicted_peak_bytes=99_990)
    assert "(+0.0%)" in plan_text(measured)


def test_every_choice_is_a_row(plan):
    for choice in plan.choices:
        assert choice.name.replace("_", " ") in plan_text(plan)


def test_the_source_of_a_value_is_in_its_row(plan):
    rows = {line[:15].strip(): line.split() for line in plan_text(plan).splitlines()}
    assert rows["memory limit"][6] == "you"
    assert rows["global batch"][4] == "task"
    assert rows["micro batch"][4] == "measured"


@pytest.mark.parametrize("source", ["config file", "recipe", "you", "default", "predicted"])
def test_no_source_makes_the_table_wider_than_a_prediction(plan, source):
    choices = tuple(replace(choice, source=source) for choice in plan.choices)
    header = next(
        line for line in render(plan_table(replace(plan, choices=choices)), 80).splitlines() if "source" in line
    )
    assert header.index("reason") - header.index("source") <= len("predicted  ")


def test_a_plan_fits_80_columns(plan):
    assert max(map(len, render(plan_table(with_time(plan)), 80).splitlines())) <= 80


def with_time(plan, **values):
    values = {"steps": 300, "steps_per_epoch": 12, "step_s": 0.381, "epoch_s": 4.6, "total_s": 114.0, **values}
    ends = values.pop("ends", datetime.now().astimezone().replace(hour=9, minute=2).isoformat())
    host = HostPlan(predicted_bytes=3 * GiB, limit_bytes=16 * GiB)
    return replace(plan, run_time=RunTime(**values, ends=ends), host=host, simulation_slowdown=1.0)


def facts(plan):
    """The lines below the choices, by their label."""
    lines = plan_text(plan).split("\npeak")[1].splitlines()
    return {
        label: " ".join(value) for label, *value in (line.replace("host RAM", "host-RAM").split() for line in lines)
    }


def test_the_predicted_time_and_host_ram_of_a_run_are_shown(plan):
    shown = facts(with_time(plan))
    assert shown["time"] == "300 steps, 12 per epoch; 0.38 s each, 1 min 54 s in all, until 09:02 (predicted)"
    assert shown["host-RAM"] == "3 GiB of 16 GiB (predicted)"


def test_a_time_that_is_unknown_is_called_so(plan):
    shown = facts(with_time(plan, step_s=None, epoch_s=None, total_s=None, ends=None))
    assert shown["time"] == "300 steps, 12 per epoch; how long they take is unknown"


def test_a_time_that_counts_a_simulated_limit_says_so_beside_rows_per_s_that_do_not(plan):
    slow = replace(with_time(plan), simulation_slowdown=1.63)
    assert "timed without the simulated memory limit, which takes 63% more" in " ".join(plan_text(slow).split())
    assert "simulated" not in plan_text(with_time(plan))


def test_short_steps_are_in_milliseconds(plan):
    assert "; 18 ms each, " in facts(with_time(plan, step_s=0.0184))["time"]


def test_a_plan_that_is_of_no_run_shows_no_time(plan):
    assert "time" not in facts(plan)


@pytest.fixture
def chinese():
    set_language("zh")
    yield
    set_language(None)


def test_in_chinese_the_time_of_a_run_and_its_changes_are_too(plan, chinese):
    lines = render(plan_table(with_time(plan)), 120).splitlines()
    assert any("每轮 12 步；每步 0.38 s，总计 1 min 54 s，09:02 结束（预测）" in line for line in lines)
    assert changes()[0] == "规划 2，变化如下："
    assert changes()[3] == "从这里起是另一个实验：每步 144 行，原来是 192 行"


def test_a_clock_shows_the_date_unless_it_is_today():
    now = datetime(2026, 1, 31, 23, 30, tzinfo=timezone(timedelta(hours=8)))
    assert show_clock("2026-01-31T15:45:00Z", now) == "23:45"
    assert show_clock("2026-01-31T16:45:00Z", now) == "2026-02-01 00:45"


CHANGED = {
    "number": 2, "experiment": "other", "experiment_reasons": ["a step has 144 rows instead of 192"],
    "changes": [{"name": "global_batch", "old": 192, "new": 144}, {"name": "memory_limit", "old": None, "new": 20 * GiB}],
}  # fmt: skip


def changes(**values):
    return [line.rstrip() for line in render(plan_changes({**CHANGED, **values}), 80).splitlines()]


def test_what_changed_is_shown_old_and_new_with_the_verdict():
    assert changes() == [
        "plan 2, with these changes:",
        "  global batch  192 → 144",
        "  memory limit  all that is free → 20 GiB",
        "another experiment from here on: a step has 144 rows instead of 192",
    ]


def test_a_change_that_makes_no_new_plan_has_no_number():
    assert changes(number_before=2)[0] == "changed since the run stopped:"


def test_the_same_experiment_is_called_so():
    assert changes(experiment="same", experiment_reasons=[])[-1] == "the same experiment"


def test_a_prediction_is_called_one(plan):
    assert "(predicted), above the budget" in plan_text(plan)


@pytest.mark.parametrize(("rows", "zone"), [(700, "safe"), (760, "edge"), (860, "danger")])
def test_the_zone_is_named(rows, zone):
    plan = make_plan(
        Normed(), memory_limit="1MiB", device="cpu", cache=False, fill=0.95, micro_batch=rows, global_batch=1200
    )
    assert plan.zone == zone
    assert f"% {zone}" in plan_text(plan)


def test_a_warning_is_plan_text():
    assert "warning: BatchNorm" in plan_text(make_plan(Normed(), memory_limit="4MiB", device="cpu", cache=False))


def test_a_cached_plan_says_so(plan):
    assert "reused from" in plan_text(replace(plan, cached=True))


GPU_SETTINGS = [
    Setting(layout="packed", precision="bf16", compile="on", checkpointing="off"),
    Setting(layout="packed", precision="bf16", compile="on", checkpointing="on"),
    Setting(layout="padded", precision="fp32", compile="off", checkpointing="on"),
    Setting(layout="padded", precision="fp32", compile="off", checkpointing="off"),
]


@pytest.fixture(scope="module")
def compared(plan):
    """The widest figures that a GPU and data give."""
    row = Tried(
        setting=GPU_SETTINGS[0], shape=(120,), micro_batch=230, tokens=(27_600,), accumulation=112, peak_bytes=int(16.53 * GiB),
        reserved_bytes=17 * GiB, basis="measured", fits=True, rows_per_s=2335.0, step_s=0.02, data_rows_per_s=2335.0, chosen=True,
    )  # fmt: skip
    other = replace(row, setting=GPU_SETTINGS[1], rows_per_s=1981.0, data_rows_per_s=1981.0, chosen=False)
    slow = replace(
        other, setting=GPU_SETTINGS[2], shape=(512,), micro_batch=12, tokens=None, basis="predicted", rows_per_s=0.123,
        data_rows_per_s=None, allowed=False,
    )  # fmt: skip
    large = replace(
        slow, setting=GPU_SETTINGS[3], micro_batch=1, peak_bytes=int(23.1 * GiB), fits=False, rows_per_s=None
    )
    skipped = ("packed fp32: no time left",)
    return replace(
        plan, table=True, tried=(row, other, slow, large), not_tried=skipped, data_rows=1_000, global_batch=50
    )


@pytest.mark.parametrize("width", [80, 120])
def test_no_column_of_what_was_tried_is_lost(compared, width):
    text = render(tried_table(compared), width)
    for cell in ("setting", "micro-batch", "accum.", "peak", "rows/s", "1,000 steps", "epoch"):
        assert cell in text
    for cell in ("→ packed", "27,600 tokens", "112", "16.53 GiB ", "2,335", "21.4 s", "checkpointed"):
        assert cell in text
    for cell in ("† padded", "12 rows", "16.53 GiB*", "≥0.123", "112 h 55 min", "2 h 15 min"):
        assert cell in text
    assert max(map(len, text.splitlines())) <= width


def test_of_other_settings_only_the_best_size_is_shown(compared):
    row, other, *_ = compared.tried
    smaller = [replace(one, tokens=(1_234,), rows_per_s=9.0, data_rows_per_s=9.0, chosen=False) for one in (row, other)]
    text = render(tried_table(replace(compared, tried=(row, other, *smaller))), 120)
    assert text.count("1,234 tokens") == 1 and text.count("27,600 tokens") == 2


def test_what_does_not_fit_and_what_was_not_tried_is_below_the_table(compared):
    lines = [" ".join(line.split()) for line in render(tried_table(compared), 120).splitlines()]
    assert "too large padded fp32: needs 23.1 GiB for 1 row, predicted" in lines
    assert "not tried packed fp32: no time left" in lines


def test_a_plan_shows_what_was_tried_only_if_that_was_asked_for(plan, compared):
    assert "1,000 steps" in plan_text(compared) and "1,000 steps" not in plan_text(plan)


PLAN = {
    "batches": 3, "largest_batch": {"rows": 8, "shape": [20, 30]}, "predicted_added_bytes": 3 * 2**20,
    "added_budget_bytes": 50 * 2**20, "because": "85% of 64 MiB, less 4 MiB already allocated",
}  # fmt: skip
REPORT = {
    "model": "runs/a/best", "data": "valid.jsonl", "device_name": "the CPU", "seed": 7, "rows": 1000, "rows_available": 5000,
    "loss": 2.34567, "perplexity": 10.4401, "tokens": 12345, "bleu": 31.239, "chrf": 28.1,
    "signatures": {"bleu": "tok:zh|version:2.6.0", "chrf": "nc:6"},
    "samples": [{"prompt": "问题", "response": "回答\n两行", "reference": "[参考]"}] * 5,
    "forward": {"evaluation": PLAN, "generation": PLAN}, "limit_bytes": 64 * 2**20, "limit_reason": "as requested",
    "max_tokens": {"prompt": 256, "response": 320}, "truncated": {"prompt": 1, "response": 0},
    "max_tokens_reason": "as in the model's run", "peak_bytes": 40 * 2**20, "ooms": 0, "seconds": 12.34, "output": None,
}  # fmt: skip


def eval_text(width=120, **changes):
    return render(eval_table({**REPORT, **changes}), width)


def test_every_score_is_shown_with_what_it_was_computed_from():
    text = eval_text()
    for part in ("2.3457", "10.44", "31.24", "28.10", "12,345 response tokens", "1,000 answers", "tok:zh"):
        assert part in text
    assert "1,000 of 5,000 rows (seed 7)" in text


def test_the_log_probability_of_chosen_replies_is_called_a_mean_over_pairs():
    scores = {"accuracy": 0.5, "margin": 0.1, "rewards/chosen": 0.2, "rewards/rejected": 0.1, "logp_chosen": -5.0743}
    text = eval_text(loss=None, reference=None, preference_loss=None, **scores)
    assert "-5.0743  log-probability of the chosen reply per token; mean over 1,000 pairs" in text


def test_truncated_rows_are_counted():
    where = "(limit 256+320 tokens, as in the model's run)"
    assert f"1 prompt of 5,000 rows {where}" in eval_text()
    both = eval_text(truncated={"prompt": 2, "response": 1200})
    assert f"2 prompts and 1,200 responses of 5,000 rows {where}" in both
    assert f"no row {where}" in eval_text(truncated={"prompt": 0, "response": 0})


def test_memory_is_called_measured_or_predicted():
    text = " ".join(eval_text().split())
    assert "predicted 3 MiB" in text and "measured peak 40 MiB" in text and "no out-of-memory errors" in text
    assert "not measured here" in eval_text(peak_bytes=None)
    assert "1 out-of-memory error" in eval_text(ooms=1) and "1 out-of-memory errors" not in eval_text(ooms=1)


def test_three_answers_are_shown_on_a_line_each():
    text = eval_text()
    assert text.count("回答 两行") == 3
    assert "[参考]" in text


def test_scores_that_were_not_computed_are_not_eval_text():
    text = eval_text(loss=None, perplexity=None, samples=[], signatures={}, bleu=None, chrf=None, truncated={})
    assert not any(word in text for word in ("loss", "perplexity", "BLEU", "chrF", "prompt"))


@pytest.mark.parametrize(("value", "text"), [(None, "above"), (1234567.0, "1.23e+06"), (999.5, "999.50")])
def test_a_perplexity_of_any_size_is_readable(value, text):
    assert text in eval_text(perplexity=value)


def test_a_loss_that_is_not_a_number_has_no_large_perplexity():
    text = eval_text(loss=math.nan, perplexity=None)
    assert "above" not in text and text.count("nan") == 2


def test_all_rows_and_the_file_are_named():
    assert "all 5,000 rows" in eval_text(rows=5000)
    assert "answers.jsonl" in eval_text(output="answers.jsonl")


def test_it_fits_80_columns():
    assert max(len(line) for line in eval_text(width=80).splitlines()) <= 80


def test_long_texts_are_shortened():
    assert eval_text(samples=[{"prompt": "长" * 500, "response": "", "reference": "短"}]).count("长") == 199
    assert "(nothing)" in eval_text(samples=[{"prompt": "长", "response": "", "reference": "短"}])


HOST = Host(
    ram_total_bytes=64 * GiB,
    ram_limit_bytes=64 * GiB,
    ram_limited_by="physical memory",
    ram_available_bytes=50 * GiB,
    swap_total_bytes=0,
    swap_free_bytes=0,
    cores_total=16,
    cores=16,
    cores_limited_by="all cores of the machine",
    open_files_limit=1024,
    locked_memory_limit_bytes=None,
)
SOFTWARE = Software(
    python="3.12.3",
    torch="2.11.0+cu130",
    cuda="13.0",
    driver="580.159.04",
    platform="Linux-6.8",
    in_container=False,
    container_sign=None,
)
GPU = Gpu(
    index=0,
    kind="cuda",
    name="NVIDIA H200",
    uuid="GPU-u",
    total_bytes=140 * GiB,
    free_bytes=79 * GiB,
    used_by_others_bytes=61 * GiB,
    own_bytes=0,
    other_processes=(GpuProcess(pid=4711, name="python3", used_bytes=61 * GiB),),
    driver="580.159.04",
    capability="9.0",
)
MACHINE = Machine(
    gpus=(GPU,),
    host=HOST,
    shm=Space(path="/dev/shm", total_bytes=32 * GiB, free_bytes=32 * GiB),
    disk=Space(path="/data/runs", total_bytes=500 * GiB, free_bytes=80 * GiB),
    software=SOFTWARE,
    notes=(),
)


def lines(machine: Machine) -> dict[str, str]:
    """The lines by their label, on a terminal wide enough not to wrap them."""
    return {
        label: value.strip()
        for label, value in (line.split("  ", 1) for line in render(machine_table(machine), width=250).splitlines())
    }


def host(**changes: object) -> dict[str, str]:
    return lines(replace(MACHINE, host=replace(HOST, **changes)))


def test_a_gpu_shows_what_is_free_and_who_holds_the_rest():
    assert lines(MACHINE)["cuda:0"] == (
        "NVIDIA H200 (capability 9.0): 79 GiB free of 140 GiB; python3 (pid 4711) holds 61 GiB"
    )


def test_a_gpu_of_unknown_use_says_unknown():
    gpu = replace(GPU, free_bytes=None, used_by_others_bytes=None, other_processes=(), capability=None)
    assert lines(replace(MACHINE, gpus=(gpu,)))["cuda:0"] == (
        "NVIDIA H200: free unknown of 140 GiB; who holds the rest is unknown"
    )


def test_no_gpu_is_one_clear_line():
    shown = lines(replace(MACHINE, gpus=(), notes=("torch has no CUDA support.",)))
    assert shown["GPU"] == "none; training runs on the CPU"
    assert shown["note"] == "torch has no CUDA support."


def test_ram_without_a_limit_is_all_usable():
    assert lines(MACHINE)["RAM"] == "64 GiB, all usable; 50 GiB available now"


def test_limited_ram_says_by_what():
    shown = host(ram_limit_bytes=16 * GiB, ram_limited_by="cgroup v2 memory.max of /job", ram_available_bytes=9 * GiB)
    assert shown["RAM"] == "16 GiB usable of 64 GiB (cgroup v2 memory.max of /job); 9 GiB available now"


def test_limited_cores_say_by_what():
    shown = host(cores=2, cores_limited_by="cgroup v2 cpu.max: 2.5 cores")
    assert shown["cores"] == "2 usable of 16 (cgroup v2 cpu.max: 2.5 cores)"


@pytest.mark.parametrize(("total", "shown"), [(0, "none"), (8 * GiB, "8 GiB, 6 GiB free")])
def test_swap(total, shown):
    assert host(swap_total_bytes=total, swap_free_bytes=min(total, 6 * GiB))["swap"] == shown


def test_a_large_shm_has_no_warning():
    assert lines(MACHINE)["/dev/shm"] == "32 GiB, 32 GiB free"


@pytest.mark.parametrize(("total", "free"), [(64 * MiB, 64 * MiB), (32 * GiB, 100 * MiB)])
def test_a_small_or_full_shm_has_a_warning_with_the_reason(total, free):
    shm = Space(path="/dev/shm", total_bytes=total, free_bytes=free)
    assert "DataLoader workers pass batches through it" in lines(replace(MACHINE, shm=shm))["/dev/shm"]


def test_in_a_container_the_fix_for_a_small_shm_is_a_docker_option():
    shm = Space(path="/dev/shm", total_bytes=64 * MiB, free_bytes=64 * MiB)
    software = replace(SOFTWARE, in_container=True, container_sign="/.dockerenv exists")
    assert "--shm-size=8g" in lines(replace(MACHINE, shm=shm, software=software))["/dev/shm"]


def test_a_system_without_shm_has_no_such_line():
    assert "/dev/shm" not in lines(replace(MACHINE, shm=None))


def test_the_disk_is_named_by_the_folder():
    assert lines(MACHINE)["disk"] == "80 GiB free of 500 GiB at /data/runs"


def test_limits_without_a_number_are_no_limit():
    assert lines(MACHINE)["limits"] == "open files 1,024, locked memory no limit"


def test_software_names_build_and_driver():
    assert lines(MACHINE)["software"] == "Python 3.12.3, torch 2.11.0+cu130, CUDA 13.0, driver 580.159.04, Linux-6.8"


def test_a_process_name_with_brackets_is_not_taken_for_markup():
    gpu = replace(GPU, other_processes=(GpuProcess(pid=1, name="[bold]x", used_bytes=61 * GiB),))
    assert "[bold]x (pid 1) holds 61 GiB" in lines(replace(MACHINE, gpus=(gpu,)))["cuda:0"]


def test_no_line_is_wider_than_the_terminal():
    assert max(len(line) for line in render(machine_table(MACHINE), width=60).splitlines()) <= 60


def test_reasons_stand_below_the_choices_where_there_is_no_space_beside_them(plan):
    reason = "segments that can grow are not fragmented"
    choice = replace(plan.choices[0], name="allocator", effective="expandable_segments:True", reason=reason)
    wide, narrow = (render(plan_table(replace(plan, choices=(choice,))), width).splitlines() for width in (120, 70))
    assert any("expandable_segments:True" in line and reason in line for line in wide)
    assert "    " + reason in map(str.rstrip, narrow)
    assert max(map(len, narrow)) <= 70
