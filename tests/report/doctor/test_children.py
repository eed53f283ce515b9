"""Child processes end, whatever they do and whatever happens to the doctor."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from brimful.report.doctor import trial
from brimful.report.doctor.trial import run_children, stop


@pytest.fixture
def program(monkeypatch):
    """Run this code instead of `trial.py`; its arguments follow."""
    return lambda code: monkeypatch.setattr(trial, "PROGRAM", ("-c", code))


def wait_until(condition, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_answers_and_exit_codes_come_back_in_order(program):
    program("import sys, json; print(json.dumps({'n': sys.argv[1]})); print('noise'); sys.exit(int(sys.argv[1]))")
    first, second = run_children([["0"], ["3"]], timeout_s=20)
    assert (first.answer("n"), first.code, second.answer("n"), second.code) == ("0", 0, "3", 3)
    assert first.answer("other") is None


def test_what_a_child_printed_last_is_kept(program):
    program("import sys; sys.exit('first\\nlast words')")
    assert run_children([[]], timeout_s=20)[0].last_line == "last words"


def test_a_child_that_hangs_is_killed_with_its_own_children(program, tmp_path):
    program(
        "import subprocess, sys, time, pathlib\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(one.pid))\n"
        "print('{\"begun\": 1}', flush=True)\n"
        "time.sleep(600)\n"
    )
    (ended,) = run_children([[str(tmp_path / "pid")]], timeout_s=3)
    assert ended.timed_out and ended.code is None and ended.answer("begun") == 1
    grandchild = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == "zombie")


def test_children_that_work_together_end_soon_after_one_has_failed(program):
    program("import sys, time; sys.exit(1) if sys.argv[1] == '0' else time.sleep(600)")
    first, second = run_children([["0"], ["1"]], timeout_s=600, together=True)
    assert first.code == 1 and second.code is None and not second.timed_out


def test_children_that_do_not_work_together_are_not_ended_by_a_failure(program):
    program("import sys, time; sys.exit(1) if sys.argv[1] == '0' else time.sleep(2)")
    assert [one.code for one in run_children([["0"], ["1"]], timeout_s=60)] == [1, 0]


def test_a_doctor_that_is_stopped_kills_them(program):
    program("import time; time.sleep(600)")
    stop.set()
    try:
        (ended,) = run_children([[]], timeout_s=600)
    finally:
        stop.clear()
    assert ended.code is None and not ended.timed_out


def test_variables_of_a_launcher_do_not_reach_them(program, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    program(
        "import os, json; print(json.dumps({'size': os.environ.get('WORLD_SIZE'), 'rank': os.environ.get('RANK')}))"
    )
    one, other = run_children([[], []], timeout_s=20, environments=[{}, {"RANK": 1}])
    assert (one.answer("size"), one.answer("rank"), other.answer("rank")) == (None, None, "1")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them only on Linux")
def test_children_of_a_doctor_that_was_killed_end_too(tmp_path):
    code = (
        "import os, sys, time\n"
        "from brimful.report.doctor import trial\n"
        "trial.end_with_parent()\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    parent = (
        "import sys\n"
        "from brimful.report.doctor import trial\n"
        f"trial.PROGRAM = ('-c', {code!r})\n"
        "trial.run_children([[sys.argv[1]]], timeout_s=600)\n"
    )
    file = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", parent, str(file)], env=dict(os.environ))
    assert wait_until(lambda: file.exists() and file.read_text().isdigit(), 60)
    child = int(Path(file).read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")
