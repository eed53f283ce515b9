"""A full disk, a quota, a read-only folder: known before writing where it can be, one sentence where it cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brimful.errors import SaveFailed
from brimful.machine.host import Space
from brimful.training.checkpoint import Checkpoints
from brimful.units import GiB, MiB
from tests.training.saved import names, save

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


@pytest.fixture
def free(monkeypatch):
    """Say how much is free on the disk."""

    def say(free_bytes):
        space = Space(path="/disk", total_bytes=100 * GiB, free_bytes=free_bytes)
        monkeypatch.setattr(Space, "around", classmethod(lambda cls, path: space))

    return say


def test_a_save_that_cannot_fit_writes_nothing(checkpoints, free):
    save(checkpoints, 1)
    free(2 * GiB)
    wrote = []
    with pytest.raises(SaveFailed) as caught:
        checkpoints.save(2, wrote.append, needs_bytes=3 * GiB)
    assert "there is too little space on the disk (3 GiB needed, 2 GiB free)" in str(caught.value)
    assert not wrote and names(checkpoints.folder) == ["step-00000001"]


def test_a_little_more_than_needed_must_be_free(checkpoints, free):
    free(100 * MiB)
    with pytest.raises(SaveFailed, match="too little space"):
        save(checkpoints, 1, needs_bytes=100 * MiB)
    save(checkpoints, 1, needs_bytes=97 * MiB)


def test_a_disk_that_does_not_say_is_tried(checkpoints, monkeypatch):
    monkeypatch.setattr(Space, "around", classmethod(lambda cls, path: None))
    checkpoints.check_space(2**60)
    save(checkpoints, 1, needs_bytes=2**60)


def test_before_a_run_all_that_lie_there_at_once_must_fit(checkpoints, free):
    free(9 * GiB)
    checkpoints.check_space(2 * GiB)
    with pytest.raises(SaveFailed) as caught:
        checkpoints.check_space(3 * GiB)
    assert str(caught.value).startswith("4 checkpoints of 3 GiB (predicted) need 12.24 GiB more in ")
    checkpoints.check_space(3 * GiB, saves=2)
    Checkpoints(checkpoints.folder, keep=1).check_space(int(2.9 * GiB))


def test_those_that_lie_there_already_are_counted_in(checkpoints, free):
    there = sum(save(checkpoints, step).size_bytes for step in (1, 2))
    needed = 4 * (there // 2 + there // 2 // 50 + 64 * 1024)
    free(needed - there)
    checkpoints.check_space(there // 2)
    free(needed - there - 1)
    with pytest.raises(SaveFailed):
        checkpoints.check_space(there // 2)


SAVE_AGAIN = """
import pathlib, resource, signal, sys
from brimful.errors import SaveFailed
from brimful.training.checkpoint import Checkpoints
checkpoints = Checkpoints(pathlib.Path(sys.argv[1]))
def write(size):
    return lambda folder: (folder / "optimizer.pt").write_bytes(b"x" * size)
checkpoints.save(1, write(200_000), needs_bytes=200_000)
limit_bytes = int(sys.argv[2])
if limit_bytes:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
try:
    checkpoints.save(2, write(2_000_000), needs_bytes=100_000)
except SaveFailed as error:
    print(error)
print(checkpoints.newest().checkpoint.step, sorted(path.name for path in checkpoints.folder.iterdir()))
"""


def test_files_that_may_not_grow_are_told(tmp_path):
    command = [sys.executable, "-c", SAVE_AGAIN, str(tmp_path / "c"), "300000"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert not ended.stderr
    sentence, found = ended.stdout.splitlines()
    assert f"to {tmp_path / 'c'}: a file exceeds what the disk or `ulimit -f` allows (" in sentence
    assert found == "1 ['step-00000001']"


def in_a_namespace(script):
    """With mounts of its own; skips where that is not allowed."""
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    if ended.returncode == 77 or "unshare failed" in ended.stderr:
        pytest.skip("no user namespaces here")
    assert not ended.stderr
    return ended.stdout.splitlines()


def test_a_disk_that_is_really_full_is_told_and_the_former_is_whole(tmp_path):
    (tmp_path / "save.py").write_text(SAVE_AGAIN)
    (tmp_path / "disk").mkdir()
    sentence, found = in_a_namespace(
        f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/disk || exit 77; "
        f"{sys.executable} {tmp_path}/save.py {tmp_path}/disk/c 0"
    )
    assert f"to {tmp_path}/disk/c: the disk is full (97.66 KiB needed, " in sentence
    assert found == "1 ['step-00000001']"


WITH_TORCH_AND_SAFETENSORS = """
import pathlib, sys
import safetensors.torch, torch
from brimful.errors import SaveFailed
from brimful.training.checkpoint import Checkpoints
tensors = {"w": torch.zeros(500_000)}
def through_a_file(folder):
    with (folder / "o.pt").open("wb") as file:
        torch.save(tensors, file)
for write in (
    lambda folder: torch.save(tensors, folder / "o.pt"),
    through_a_file,
    lambda folder: safetensors.torch.save_file(tensors, folder / "m.safetensors"),
):
    try:
        Checkpoints(pathlib.Path(sys.argv[1])).save(1, write, needs_bytes=1000)
    except SaveFailed as error:
        print(str(error).split(": ")[1].split(" (")[0])
"""


def test_what_torch_and_safetensors_say_on_a_full_disk_is_understood(tmp_path):
    (tmp_path / "save.py").write_text(WITH_TORCH_AND_SAFETENSORS)
    (tmp_path / "disk").mkdir()
    said = in_a_namespace(
        f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/disk || exit 77; {sys.executable} {tmp_path}/save.py {tmp_path}/disk/c"
    )
    assert said == ["a file was truncated, as on a full disk", "the disk is full", "the disk is full"]


READ_ONLY = """
import pathlib, sys
from brimful.errors import SaveFailed
from brimful.training.checkpoint import Best, Checkpoints
notes = []
checkpoints = Checkpoints(pathlib.Path(sys.argv[1]), keep=1, note=notes.append)
try:
    checkpoints.save(4, lambda folder: None, needs_bytes=0)
except SaveFailed as error:
    print(error)
checkpoints.rotate()
checkpoints.mark_best(Best(step=2, metric="loss", score=1.0))
print(checkpoints.newest().checkpoint.step, [sentence.rpartition("/")[2] for sentence in notes])
"""


def test_a_disk_that_must_not_be_written_is_told_and_can_be_read(checkpoints, tmp_path):
    for step in (1, 2):
        save(checkpoints, step)
    (tmp_path / "look.py").write_text(READ_ONLY)
    sentence, found = in_a_namespace(
        f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path} || exit 77; "
        f"{sys.executable} {tmp_path}/look.py {checkpoints.folder}"
    )
    assert "Read-only file system. Try: make the folder writable" in sentence
    assert found == (
        "2 ['step-00000001 could not be removed (Read-only file system) and still takes up space', "
        "'best.json could not be written (Read-only file system); the next save tries again']"
    )
    assert names(checkpoints.folder) == ["step-00000001", "step-00000002"]


def test_a_place_that_cannot_be_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveFailed, match="Not a directory. Try: make the folder writable"):
        save(Checkpoints(tmp_path / "file" / "checkpoints"), 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_somebody_else_is_one_sentence(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(SaveFailed, match="Permission denied. Try: make the folder writable"):
        save(Checkpoints(tmp_path / "checkpoints"), 1)
