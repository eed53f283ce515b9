"""Killed before anything it asks of the disk, or at random moments, a save leaves a whole checkpoint to be found.

The first set is complete: Python reports every open, mkdir, rename and removal, so a child is killed before the first
of them, another before the second, and so on, until one gets through.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brimful.training.checkpoint import Checkpoint, Checkpoints
from tests.training.saved import is_right, names, save

REPOSITORY = Path(__file__).parents[2]

KILLED_BEFORE_EACH_CALL = """
import os, pathlib, shutil, signal, sys, threading
from brimful.training.checkpoint import Checkpoints
from tests.training.saved import is_right, save

os.fsync = lambda descriptor: None  # a killed process loses nothing it wrote, and a busy disk would take its time
base, step = pathlib.Path(sys.argv[1]), int(sys.argv[2])
ON_DISK = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}

def before():
    folder = base / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base / "former", folder)
    return folder

def killed_at(call, folder):
    calls, lock = [0], threading.Lock()
    def hook(event, arguments):
        if event in ON_DISK:
            with lock:
                calls[0] += 1
                if calls[0] == call:
                    os.kill(os.getpid(), 9)
    child = os.fork()
    if child == 0:
        sys.addaudithook(hook)
        save(Checkpoints(folder, keep=1), step, "new")
        os._exit(0)
    return os.waitpid(child, 0)[1] == 9

def verdict(folder):
    found = Checkpoints(folder).newest().checkpoint
    assert found is not None, "nothing was found"
    assert (found.step, found.facts["mark"]) in {(2, "old"), (step, "new")}, found
    assert is_right(found.path, found.step, found.facts["mark"]), found
    return found.step, found.facts["mark"]

for one in (1, 2):
    save(Checkpoints(base / "former", keep=1), one, "old")
call, seen = 0, []
while True:
    call += 1
    folder = before()
    was_killed = killed_at(call, folder)
    seen.append(verdict(folder))
    Checkpoints(folder).clean()
    assert verdict(folder) == seen[-1], "cleaning lost it"
    assert not [path for path in folder.iterdir() if path.name.startswith(".step-")]
    if not was_killed:
        break
print(call - 1, seen.count((2, "old")), seen.count((step, "new")), seen == sorted(seen, key=seen.index))
"""


@pytest.mark.parametrize("step", [2, 3], ids=["the same step again", "a new step"])
def test_killed_before_any_call_to_the_disk_one_whole_one_is_found(tmp_path, step):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED_BEFORE_EACH_CALL, str(tmp_path), str(step)],
        capture_output=True, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    killed, old, new, turned_once = ended.stdout.split()
    assert int(killed) > 30 and int(old) > 20 and int(new) > 5
    assert turned_once == "True"


SAVE_FOR_EVER = """
import itertools, pathlib, sys
from brimful.training.checkpoint import Best, Checkpoints
from tests.training.saved import save
checkpoints = Checkpoints(pathlib.Path(sys.argv[1]), keep=2)
checkpoints.clean()
found = checkpoints.newest().checkpoint
for step in itertools.count(found.step if found else 1):
    save(checkpoints, step, "x" * 500)
    if step % 3 == 0:
        checkpoints.mark_best(Best(step=step, metric="loss", score=1.0))
    print(step, flush=True)
"""


def killed_at_random(folder, delay_s):
    """The last step that was said to be saved."""
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as child:
        first = child.stdout.readline()
        time.sleep(delay_s)
        os.kill(child.pid, signal.SIGKILL)
        said = [first, *child.stdout.read().splitlines()]
    assert child.returncode == -signal.SIGKILL
    return int(said[-1])


def check_random_kills(folder, times):
    chance, last = random.Random(5), 0
    for _ in range(times):
        said = killed_at_random(folder, chance.uniform(0, 0.1))
        checkpoints = Checkpoints(folder)
        found = checkpoints.newest().checkpoint
        assert found.step in (said, said + 1) and found.step >= last
        assert is_right(found.path, found.step, "x" * 500)
        best = checkpoints.best()
        assert best is None or Checkpoint.read(checkpoints.path(best.step)).step == best.step
        last = found.step
    Checkpoints(folder).clean()
    assert len([name for name in names(folder) if name.startswith("step-")]) <= 4
    assert not [name for name in names(folder) if name.startswith(".step-")]


def test_killed_at_random_what_was_said_to_be_saved_is_there(tmp_path):
    check_random_kills(tmp_path / "checkpoints", 4)


@pytest.mark.torture
def test_killed_at_random_many_times_what_was_said_to_be_saved_is_there(tmp_path):
    check_random_kills(tmp_path / "checkpoints", 50)


def test_the_former_is_found_while_it_is_replaced(tmp_path, monkeypatch):
    """The same at the one moment that matters, without a kill: between the two renames."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    save(checkpoints, 1, "old")
    rename, found = os.rename, []

    def looking(old, new):
        rename(old, new)
        found.append(Checkpoints(checkpoints.folder).newest().checkpoint.facts["mark"])

    monkeypatch.setattr(os, "rename", looking)
    save(checkpoints, 1, "new")
    assert found == ["old", "new", "new"]
