"""Each log in tests/logs has the diagnosis that expected.toml gives it; causes are told from consequences."""

import json
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

import brimful
from brimful.errors import BadOption

LOGS = Path(__file__).parents[2] / "logs"
EXPECTED = tomllib.loads((LOGS / "expected.toml").read_text(encoding="utf-8"))
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.64 GiB of which "
    "1.06 GiB is free. Including non-PyTorch memory, this process has 22.57 GiB memory in use. Of the allocated memory 21.40 GiB is "
    "allocated by PyTorch, and 601.00 MiB is reserved by PyTorch but unallocated.\n"
)
TIMEOUT = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=15, "
    "OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600041 milliseconds before timing out.\n"
)
KILL = "[98123.77] Memory cgroup out of memory: Killed process 14410 (python) total-vm:58226044kB, anon-rss:32811204kB, file-rss:0kB\n"
DISK = "OSError: [Errno 28] No space left on device: 'out/model.bin'\n"
STEP = "{{'loss': 2.{step:04}, 'grad_norm': 0.91, 'learning_rate': 1.8e-05, 'epoch': 0.4}}\n"


def training(steps):
    return "".join(STEP.format(step=step % 10_000) for step in range(steps))


def matches(value, expected):
    if isinstance(expected, int) and abs(expected) > 10_000:
        return value == pytest.approx(expected, rel=0.005)
    return value == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_has_its_diagnosis(name):
    expected = EXPECTED[name]
    diagnosis = brimful.diagnose(LOGS / f"{name}.log")
    assert (diagnosis.resource, diagnosis.kind) == (expected["resource"], expected["kind"])
    assert diagnosis.certainty == expected.get("certainty", "certain")
    assert expected.get("cause", "") in diagnosis.cause and expected.get("evidence", "") in (diagnosis.evidence or "")
    for figure, value in expected.get("figures", {}).items():
        assert matches(diagnosis.figures.get(figure), value), (figure, diagnosis.figures.get(figure))
    titles = [fix.title for fix in diagnosis.fixes]
    assert not expected.get("first") or titles[0].startswith(expected["first"])
    for title in expected.get("fixes", ()):
        assert any(title in one for one in titles), title
    for title in expected.get("absent", ()):
        assert not any(title in one for one in titles), title
    assert diagnosis.others == ()


def test_every_log_is_expected_and_there_are_many():
    assert {path.stem for path in LOGS.glob("*.log")} == set(EXPECTED)
    assert len(EXPECTED) >= 55


@pytest.mark.parametrize("name", [name for name in EXPECTED if EXPECTED[name]["kind"] != "unknown"])
def test_the_evidence_is_a_line_of_the_log(name):
    place, _, line = (brimful.diagnose(LOGS / f"{name}.log").evidence or "").partition(": ")
    lines = (LOGS / f"{name}.log").read_text(encoding="utf-8").replace("\r", "\n").splitlines()
    number = int(place.removeprefix("line ").replace(",", ""))
    assert " ".join(line.split())[:30] in " ".join(
        lines[number - 1].replace("\x1b[1;91m", "").replace("\x1b[0m", "").split()
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_a_diagnosis_is_json_and_reads_as_text(name):
    diagnosis = brimful.diagnose(LOGS / f"{name}.log")
    assert json.loads(json.dumps(diagnosis.to_json()))["kind"] == diagnosis.kind
    assert diagnosis.cause in str(diagnosis) and "None" not in str(diagnosis)


def test_the_timeouts_of_other_ranks_follow_from_one_rank_out_of_memory():
    log = TIMEOUT.format(rank=0) + "[rank2]: " + OOM + "".join(TIMEOUT.format(rank=rank) for rank in (1, 3, 4))
    diagnosis = brimful.diagnose(log)
    assert diagnosis.kind == "gpu-out-of-memory" and diagnosis.figures["rank"] == 2
    assert diagnosis.figures["consequences"] == ["nccl-timeout"] and not diagnosis.others


def test_the_ranks_that_ran_out_of_memory_are_listed():
    diagnosis = brimful.diagnose("".join(f"[rank{rank}]: {OOM}" for rank in (3, 1, 0)))
    assert diagnosis.figures["ranks"] == [0, 1, 3]


def test_the_kernel_explains_the_exit_code():
    log = "RuntimeError: DataLoader worker (pid 14410) is killed by signal: Killed. \nexit code: 137\n" + KILL
    diagnosis = brimful.diagnose(log)
    assert diagnosis.kind == "host-killed" and diagnosis.certainty == "certain" and diagnosis.figures["pid"] == 14410


def test_a_kill_by_the_kernel_is_no_consequence_of_a_full_gpu():
    diagnosis = brimful.diagnose(OOM + KILL)
    assert diagnosis.kind == "gpu-out-of-memory" and [other.kind for other in diagnosis.others] == ["host-killed"]


def test_the_last_incident_ended_the_run():
    log = OOM + training(6000) + "Traceback (most recent call last):\n" + DISK
    assert len(log) > 300_000
    diagnosis = brimful.diagnose(log)
    assert diagnosis.kind == "disk-full" and [other.kind for other in diagnosis.others] == ["gpu-out-of-memory"]


def test_an_old_nan_is_told_beside_the_failure():
    diagnosis = brimful.diagnose("{'loss': nan, 'grad_norm': nan}\n" * 5 + training(10) + OOM)
    assert diagnosis.kind == "gpu-out-of-memory" and [other.kind for other in diagnosis.others] == ["nan-loss"]


def test_what_is_not_known_is_not_made_up():
    diagnosis = brimful.diagnose(OOM)
    assert "block" not in diagnosis.figures and "phase" not in diagnosis.figures


def test_settings_may_be_given():
    diagnosis = brimful.diagnose(
        OOM, settings={"micro_batch": 8, "accumulation": 4, "processes": 2, "lengths": 1024, "vocab": 49152}
    )
    assert diagnosis.figures["block"]["factors"] == [8, 1024, 49152]
    (fix,) = [fix for fix in diagnosis.fixes if "micro-batches" in fix.title]
    assert fix.global_batch == "unchanged: 4 × 8 × 2 = 64"


def test_a_setting_that_is_not_known_is_refused():
    with pytest.raises(BadOption, match="settings= has no 'nosuch'. Try: micro_batch, "):
        brimful.diagnose(OOM, settings={"nosuch": 32})


@pytest.mark.parametrize(
    "settings", [{"micro_batch": "32"}, {"micro_batch": [32]}, {"lengths": (256, -1)}, {"heads": 1.5}]
)
def test_a_setting_that_is_no_count_is_refused(settings):
    with pytest.raises(BadOption, match="not a positive whole number"):
        brimful.diagnose(OOM, settings=settings)


def test_the_settings_of_the_last_start_count():
    log = "per_device_train_batch_size=16\n" + training(3) + "per_device_train_batch_size=8\n" + OOM
    (fix,) = [fix for fix in brimful.diagnose(log).fixes if "micro-batches" in fix.title]
    assert "instead of 8 rows" in fix.title


def test_nothing_recognised_tells_the_last_error_and_what_was_looked_for():
    diagnosis = brimful.diagnose(
        "Traceback (most recent call last):\n  File 'a.py'\nzlib.error: bad\nIndexError: list index out of range\n"
    )
    assert diagnosis.kind == "unknown" and diagnosis.evidence == "IndexError: list index out of range"
    assert any("torch" in what for what in diagnosis.figures["looked_for"])


def test_an_error_that_the_log_goes_on_after_is_not_its_last():
    error = "ERROR loader: ValueError: a bad row\n"
    assert brimful.diagnose(error + training(20)).evidence is None
    assert brimful.diagnose(training(20) + error).evidence == error.strip()


def test_a_caught_error_is_told_beside_the_kill_that_ended_the_run():
    log = "WARNING: caught CUDA out of memory on batch 101, skipping batch\n" + training(6000)
    diagnosis = brimful.diagnose(log + "failed (exitcode: -9) local_rank: 0 (pid: 33) of binary: /usr/bin/python3\n")
    assert diagnosis.kind == "host-killed" and [other.kind for other in diagnosis.others] == ["gpu-out-of-memory"]


def test_a_run_that_went_on_did_not_die_of_what_came_before():
    log = DISK + training(4) + "run.sh: line 3:  4117 Segmentation fault      python train.py\n"
    diagnosis = brimful.diagnose(log)
    assert diagnosis.kind == "crashed" and [other.kind for other in diagnosis.others] == ["disk-full"]
    assert diagnosis.others[0].certainty == "likely"


def test_a_process_larger_than_the_card_is_none():
    figures = brimful.diagnose(LOGS / "torch-2.7-odd-process.log").figures
    assert "others_bytes" not in figures


def test_a_log_that_just_ends_may_have_been_killed():
    (fix,) = brimful.diagnose(training(20)).fixes
    assert "dmesg" in fix.flags["shell"]


def test_an_illegal_access_is_never_to_be_retried():
    diagnosis = brimful.diagnose("RuntimeError: CUDA error: an illegal memory access was encountered\n" + OOM)
    assert diagnosis.kind == "gpu-fault" and diagnosis.fixes[0].title.startswith("Do not retry")


def test_an_error_that_brimful_survived_is_no_failure():
    line = "step 120: out of memory in the backward of 43 rows; micro-batches of at most 32 rows from here\n"
    assert brimful.diagnose(training(3) + line + training(3)).kind == "unknown"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("训练进程（pid 11040）被 SIGKILL 杀死", "host-killed"),
        ("训练进程（pid 11040）被 SIGKILL 杀死，因为主机内存耗尽（内核的 OOM 计数从 1 变为 2）", "host-killed"),
        ("训练进程（pid 11040）被 SIGKILL 杀死（不是内核的 OOM killer）", "killed"),
        ("训练进程（pid 11040）被 SIGSEGV 杀死", "crashed"),
        ("训练进程（pid 11040）被 SIGBUS 杀死（常因 /dev/shm 已满）", "shm-full"),
    ],
)
def test_brimfuls_chinese_words_for_a_kill_are_known(words, kind):
    assert brimful.diagnose(f"第 3/20 步\nbrimful: 错误：{words}。\n").kind == kind


def test_brimfuls_own_word_for_a_kill_is_known():
    diagnosis = brimful.diagnose("brimful: error: rank 1 (pid 4711) was killed by SIGKILL.\n")
    assert diagnosis.kind == "host-killed" and diagnosis.certainty == "likely"


def test_the_example_runs(capsys, monkeypatch):
    example = Path(__file__).parents[3] / "examples" / "diagnose_log.py"
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    assert "1.23 GiB = 32 × 252 × 40,960 × 4 bytes" in out and "16 × 4 × 3 = 192" in out
