"""`check_run` says what is wrong with a run, and nothing of a healthy one."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from brimful.report.run_record import RunRecord
from brimful.report.why import run_checks
from brimful.report.why.diagnosis import TITLES
from brimful.report.why.run_checks import check_run
from brimful.units import GiB
from tests.report.fake_runs import sample_event, step_event, write_run


def kinds(folder: Path) -> list[str]:
    return [diagnosis.kind for diagnosis in check_run(RunRecord(folder))]


def first(folder: Path):
    return check_run(RunRecord(folder))[0]


HEALTHY = {
    "finished": {"evals": [50, 100, 150], "checkpoints": [100, 200, 300]},
    "several ranks": {"ranks": 4},
    "running": {"done": 150, "running": True},
    "stopped by Ctrl-C": {"done": 150, "end": "interrupted"},
    "paused by its time limit": {"done": 150, "end": "time-limit"},
    "just begun": {"done": 3, "running": True},
    "on a CPU": {"plan_values": {"device": "cpu", "device_name": "the CPU"}},
    "without samples and times": {"step_values": {"times": {}, "padding": None, "host_bytes": None}, "gpu": {"utilization": None}},
    "uneven memory": {"step_values": {"peak_bytes": lambda n: int((9 + 5 * random.Random(n).random()) * GiB)}},
    "a cache that fills": {"step_values": {"host_bytes": lambda n: int((2 + 1.5 * min(n, 90) / 90) * GiB)}},
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_nothing_wrong(tmp_path, name):
    assert kinds(write_run(tmp_path / "run", **HEALTHY[name])) == []


def test_a_run_without_steps_has_nothing_wrong(tmp_path):
    assert kinds(write_run(tmp_path / "run", done=0, running=True)) == []


def test_a_failed_run_tells_its_error_and_the_advice_in_it(tmp_path):
    sentence = "row 4 of step 2 cannot be split and needs about 21 GiB (predicted). Try: shorter rows."
    run = write_run(tmp_path / "run", done=150, end=None, checkpoints=[100])
    append(run, {"event": "end", "step": 150, "reason": "failed", "sentence": sentence})
    diagnosis = first(run)
    assert diagnosis.kind == "run-failed"
    assert diagnosis.resource == "gpu"
    assert (
        diagnosis.cause
        == "The run failed after step 150. Row 4 of step 2 cannot be split and needs about 21 GiB (predicted)."
    )
    assert [fix.title for fix in diagnosis.fixes] == ["Shorter rows", "Continue from the checkpoint of step 100"]


def test_a_killed_run_near_its_host_limit_was_probably_killed_by_the_kernel(tmp_path):
    run = write_run(
        tmp_path / "run", done=150, end=None, host={"machine_bytes": lambda n: int((6 + n / 15.5) * GiB), "tree_bytes": 9 * GiB}
    )  # fmt: skip
    diagnosis = first(run)
    assert (diagnosis.kind, diagnosis.resource, diagnosis.certainty) == ("host-killed", "host", "likely")
    assert "of 16 GiB (9" in diagnosis.cause
    assert any(fix.flags.get("brimful") == "--workers 1" for fix in diagnosis.fixes)


def test_a_killed_run_with_free_ram_has_an_unknown_cause(tmp_path):
    diagnosis = first(write_run(tmp_path / "run", done=150, end=None, checkpoints=[100]))
    assert (diagnosis.kind, diagnosis.certainty) == ("run-killed", "possible")
    assert "6 GiB of 16 GiB" in diagnosis.cause
    assert diagnosis.fixes[0].flags["shell"].endswith("--resume")


def test_a_killed_run_without_samples_claims_nothing_about_ram(tmp_path):
    run = write_run(
        tmp_path / "run", done=1, end=None, step_values={"machine_bytes": None}, host={"machine_bytes": None}
    )
    assert "not known whether the kernel ended it" in first(run).cause


@pytest.mark.parametrize(
    ("why", "kind", "certainty"),
    [
        ("because host memory ran out (the kernel's out-of-memory counter went from 3 to 4)", "host-killed", "certain"),
        ("(not by the kernel's out-of-memory killer)", "run-killed", "certain"),
    ],
)
def test_the_kernels_counter_decides_over_the_samples(tmp_path, why, kind, certainty):
    run = write_run(tmp_path / "run", done=150, end=None, host={"machine_bytes": int(15.5 * GiB)})
    (run / "log.txt").write_text(
        f"2026-01-31 09:02:00 step 150\n2026-01-31 09:02:01 the training process (pid 7) was killed by SIGKILL {why}\n"
    )
    diagnosis = first(run)
    assert (diagnosis.kind, diagnosis.certainty) == (kind, certainty)


LOG = """2026-01-31 09:02:00 step 150
Traceback (most recent call last):
  File "task.py", line 12, in loss
    return model(batch)["logits"]
KeyError: 'logits'
"""


def test_an_error_of_the_task_is_read_from_the_end_of_the_log(tmp_path):
    run = write_run(tmp_path / "run", done=150, end=None)
    (run / "log.txt").write_text(LOG)
    diagnosis = first(run)
    assert diagnosis.kind == "run-crashed"
    assert "KeyError: 'logits'" in diagnosis.cause


def test_an_error_in_the_tasks_own_code_is_fixed_before_the_run_is_continued(tmp_path):
    run = write_run(tmp_path / "run", done=150, end=None, checkpoints=[100])
    (run / "log.txt").write_text(LOG)
    titles = [fix.title for fix in first(run).fixes]
    assert titles[1:] == [
        "Fix this error first: the same step would fail in the same way",
        "Then continue from the checkpoint of step 100",
    ]


def test_an_error_in_a_library_is_not_said_to_come_again(tmp_path):
    run = write_run(tmp_path / "run", done=150, end=None, checkpoints=[100])
    (run / "log.txt").write_text(LOG.replace("task.py", "/usr/lib/python3/site-packages/torch/nn/module.py"))
    assert [fix.title for fix in first(run).fixes][1:] == ["Continue from the checkpoint of step 100"]


@pytest.mark.parametrize(
    ("values", "titles"),
    [
        ({"repeats": True}, ["Fix this error first: the same step would fail in the same way", "Then continue from the checkpoint of step 100"]),
        ({"repeats": True, "sentence": "row 7 is not JSON. Try: repair it."}, ["Repair it", "Then continue from the checkpoint of step 100"]),
        ({"repeats": False, "sentence": "[Errno 28] No space left on device"}, ["Continue from the checkpoint of step 100"]),
    ],
    ids=["repeats", "with advice", "disk full"],
)  # fmt: skip
def test_a_failure_that_would_come_again_is_not_simply_resumed(tmp_path, values, titles):
    run = write_run(tmp_path / "run", done=150, end=None, checkpoints=[100])
    sentence = "task Net: loss() failed at mine.py:12: KeyError: 'logits'."
    append(run, {"event": "end", "step": 150, "reason": "failed", "sentence": sentence, **values})
    assert [fix.title for fix in first(run).fixes] == titles


def test_a_traceback_that_the_run_survived_is_not_its_end(tmp_path):
    run = write_run(tmp_path / "run", done=150, end=None)
    (run / "log.txt").write_text(LOG + "".join(f"2026-01-31 09:03:00 step {n}\n" for n in range(10)))
    assert first(run).kind == "run-killed"


def test_a_checkpoint_that_could_not_be_saved(tmp_path):
    failed = {
        "event": "checkpoint",
        "step": 200,
        "saved": False,
        "sentence": "the disk is full. Try: a folder on another disk.",
    }
    diagnosis = first(write_run(tmp_path / "run", checkpoints=[100], more=[failed]))
    assert (diagnosis.kind, diagnosis.resource) == ("save-failed", "disk")
    assert "The newest one is that of step 100." in diagnosis.cause
    assert diagnosis.fixes[0].title == "A folder on another disk"


def test_the_most_important_comes_first(tmp_path):
    run = write_run(tmp_path / "run", done=200, end=None, ooms=[120], step_values={"padding": 0.7})
    assert kinds(run) == ["run-killed", "gpu-out-of-memory", "slow-padding"]


def test_speed_is_judged_by_the_newest_plan(tmp_path):
    waiting = {"compute_s": 0.2, "data_s": 0.2, "communication_s": 0.0, "other_s": 0.0}
    fine = {"compute_s": 0.36, "data_s": 0.004, "communication_s": 0.0, "other_s": 0.0}
    run = write_run(
        tmp_path / "run", step_values={"times": lambda n: waiting if n <= 100 else fine},
        more=[{"event": "resume", "step": 100, "sentence": "continuing after step 100"}],
    )  # fmt: skip
    assert kinds(run) == []


def test_every_kind_has_a_title():
    source = "".join(path.read_text() for path in Path(run_checks.__file__).parent.glob("*_checks.py"))
    named = set(re.findall(r'kind="([a-z-]+)"', source)) | set(
        re.findall(r'(?:_slow|finding)\(\s*(?:[\d.]+[^",]*, )?"([a-z-]+)"', source)
    )
    assert len(named) > 25
    assert named - {"host-killed", "gpu-out-of-memory"} <= TITLES.keys()


def test_torch_is_not_imported(tmp_path):
    run = write_run(tmp_path / "run", ooms=[120])
    code = "import sys; from brimful.report.why.run_checks import check_run; from brimful.report.run_record import RunRecord; check_run(RunRecord(sys.argv[1])); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


JUNK = (None, "", "many", -1, 0, float("inf"), [], [None], {}, {"a": 1}, True, 1e308, "2026")


def test_damaged_values_never_raise(tmp_path):
    """Every field of every event, of the plan and of the request, replaced by something of another type."""
    rng = random.Random(0)
    for seed in range(60):
        run = write_run(
            tmp_path / str(seed), steps=120, ooms=[40], evals=[60], checkpoints=[80], ranks=2,
            more=[{"event": "oversized", "step": 50, "rows": [3], "shape": [900, 900], "sentence": "row 3 …; set aside"},
                  {"event": "grow", "step": 70, "sentence": "restored"}, {"event": "end", "step": 120, "reason": "failed", "sentence": "x"}],
        )  # fmt: skip
        for name in ("plan.json", "run.json"):
            content = json.loads((run / name).read_text())
            damage(content, rng)
            (run / name).write_text(json.dumps(content))
        lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        for event in lines:
            damage(event, rng)
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines) + '{"event": "st')
        for diagnosis in check_run(RunRecord(run)):
            assert diagnosis.cause
            json.dumps(diagnosis.to_json())


def damage(value, rng: random.Random) -> None:
    """One field in twenty, at any depth; what makes it an event stays."""
    places = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for place, one in places:
        if place in ("event", "step"):
            continue
        if rng.random() < 0.05:
            value[place] = rng.choice(JUNK)
        elif isinstance(one, (dict, list)):
            damage(one, rng)


def append(run: Path, event: dict) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_fake_events_have_the_fields_that_the_checks_read():
    assert {"times", "ranks", "padding", "host_bytes", "machine_bytes"} <= step_event(1, steps=2).keys()
    assert {"gpu", "host"} <= sample_event(1).keys()
