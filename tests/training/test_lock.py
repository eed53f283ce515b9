"""One process at a time in a run folder, however the last one ended."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brimful.errors import BadRun
from brimful.training import run as lock_module
from brimful.training.run import RunLock

HOLD = """
import sys, time
from pathlib import Path
from brimful.errors import BadRun
from brimful.training.run import RunLock
sys.stdin.readline()
try:
    lock = RunLock(Path("run"))
except BadRun as error:
    print("refused:", error, flush=True)
else:
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holders(tmp_path, monkeypatch):
    """Processes that try to take the lock when they get a line."""
    monkeypatch.chdir(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", HOLD], **pipes) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_of_two_processes_that_race_one_is_refused(holders):
    for process in holders:
        process.stdin.write("\n")
        process.stdin.flush()
    said = sorted(process.stdout.readline() for process in holders)
    assert said[0] == "held\n"
    assert said[1].startswith("refused: run is in use by another process")


def test_a_refusal_tells_who_holds_the_folder(tmp_path):
    with RunLock(tmp_path), pytest.raises(BadRun) as caught:
        RunLock(tmp_path)
    assert f"{tmp_path} is in use by another process (pid {os.getpid()}, since 20" in str(caught.value)
    assert str(caught.value).endswith("): wait for it, stop it, or name another --run")


def test_a_killed_holder_is_no_obstacle(holders):
    first, second = holders
    for process in holders:
        process.stdin.write("\n")
        process.stdin.flush()
        if process is first:
            assert process.stdout.readline() == "held\n"
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert second.stdout.readline() == "held\n"


def test_the_lock_is_held_until_everybody_who_has_the_file_is_gone(tmp_path):
    lock = RunLock(tmp_path)
    heir = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fd])
    stranger = subprocess.Popen(["sleep", "60"])
    lock.close()
    with pytest.raises(BadRun, match="is in use by another process"):
        RunLock(tmp_path)
    heir.kill()
    heir.wait()
    RunLock(tmp_path).close()
    stranger.kill()
    stranger.wait()


def test_a_forked_child_that_lets_go_does_not_unlock(tmp_path):
    lock = RunLock(tmp_path)
    if (pid := os.fork()) == 0:
        lock.close()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(BadRun, match="is in use"):
        RunLock(tmp_path)
    lock.close()


@pytest.mark.parametrize("left", ["", "{", "[1]", '{"pid": 1, "host": "elsewhere", "since": "2020-01-01"}', "x" * 999])
def test_what_an_earlier_process_wrote_is_no_obstacle_and_is_replaced(tmp_path, left):
    (tmp_path / "lock").write_text(left)
    with RunLock(tmp_path):
        said = json.loads((tmp_path / "lock").read_text())
    assert (said["pid"], sorted(said)) == (os.getpid(), ["host", "pid", "since"])


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ("", "in use by another process: wait"),
        (
            '{"pid": 7, "host": "elsewhere", "since": "noon"}',
            "in use by another process (pid 7 on elsewhere, since noon): ",
        ),
    ],
)
def test_a_refusal_says_as_much_as_the_file_does(tmp_path, monkeypatch, left, words):
    monkeypatch.setattr(lock_module, "_SIGN_S", 0.01)
    with RunLock(tmp_path):
        (tmp_path / "lock").write_text(left)
        with pytest.raises(BadRun) as caught:
            RunLock(tmp_path)
    assert words in str(caught.value)


def test_the_folder_is_made(tmp_path):
    RunLock(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b" / "lock").exists()


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(BadRun, match=r"run cannot be written \(File exists\); name another one with --run"):
        RunLock(tmp_path / "run")


def test_a_folder_that_cannot_be_written_is_refused_even_if_its_lock_can(tmp_path, monkeypatch):
    (tmp_path / "lock").write_text("")

    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root, whom tests may run as, is denied nothing
    with pytest.raises(BadRun, match=r"cannot be written \(Permission denied\)"):
        RunLock(tmp_path)


@pytest.mark.parametrize(("code", "goes_on"), [(errno.ENOLCK, True), (errno.EOPNOTSUPP, True), (errno.EIO, False)])
def test_without_locks_in_the_filesystem_it_tells_and_goes_on(tmp_path, monkeypatch, code, goes_on):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    told = []
    monkeypatch.setattr(fcntl, "flock", refuse)
    if goes_on:
        with RunLock(tmp_path, tell=told.append) as lock:
            assert lock.fd >= 0
        assert "nothing keeps a second run out" in told[0]
    else:
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(BadRun, match="cannot be locked"):
            RunLock(tmp_path)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
