"""A full disk: refused before it is full where that can be known, told in one sentence where it cannot."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from brimful.data.clean.segments import FOLDER
from brimful.data.clean.write import check_room, full_disk_told, is_full, still_needed
from brimful.errors import BadData
from brimful.units import MiB
from tests.data.clean.clean_rows import cleaned, outcome, varied

REPOSITORY = Path(__file__).parents[3]


def test_what_is_needed_is_predicted_from_the_share_that_was_read():
    tenth = still_needed(rows=1000, text_bytes=10**6, sketch_bytes=256, read_share=0.1)
    all_ = still_needed(rows=10_000, text_bytes=10**7, sketch_bytes=256, read_share=1.0)
    assert all_ == pytest.approx(0.7 * 10**7)
    assert tenth == pytest.approx(all_ + 9 * (0.8 * 10**6 + 1000 * (64 + 256)))


def test_a_source_of_unknown_size_predicts_what_it_knows():
    assert still_needed(rows=1, text_bytes=1000, sketch_bytes=0, read_share=0.0) == pytest.approx(700)


def test_more_than_is_free_is_refused_before_it_is_written(tmp_path):
    check_room(tmp_path, 10)
    with pytest.raises(
        BadData, match=rf"the disk of {tmp_path} is too full: cleaning needs about 1024 TiB more there \(predicted\)"
    ):
        check_room(tmp_path, 2**50)


def test_a_clean_that_cannot_fit_is_refused_at_its_first_chunk(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(BadData, match="1000 B is free; make room"):
        cleaned(varied(200), tmp_path / "out", chunk_rows=5)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_others_fill_is_noticed_at_the_next_segment(tmp_path, monkeypatch):
    usage, asked = shutil.disk_usage(tmp_path), []

    def shrinking(path):
        asked.append(path)
        return usage if len(asked) < 3 else usage._replace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", shrinking)
    with pytest.raises(BadData, match="1000 B is free; make room"):
        cleaned(varied(400), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.*et"))


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (duckdb.IOException("IO Error: Could not write: No space left on device"), True),
        (duckdb.OutOfMemoryException("failed to offload: limit set by the 'max_temp_directory_size' setting"), True),
        (duckdb.OutOfMemoryException("could not allocate block"), False),
        (ValueError("No space left on device"), False),
    ],
    ids=str,
)
def test_a_full_disk_is_known_by_all_its_names(tmp_path, error, full):
    assert is_full(error) is full
    with pytest.raises(BadData if full else type(error)), full_disk_told(tmp_path, lambda: 10 * MiB):
        raise error


WITH_SMALL_FILES = """
import pathlib, resource, sys
from brimful.errors import BadData
from tests.data.clean.clean_rows import cleaned, varied
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    cleaned(varied(300), pathlib.Path(sys.argv[1]), near=None)
except BadData as error:
    print(error)
"""


@pytest.mark.parametrize("most_bytes", [3_000, 30_000])
def test_files_that_may_not_grow_are_told_and_the_work_goes_on_later(tmp_path, most_bytes):
    command = [sys.executable, "-c", WITH_SMALL_FILES, str(tmp_path / "out"), str(most_bytes)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert ended.stdout.startswith(f"the disk of {tmp_path / 'out'} is too full"), ended.stderr
    assert not ended.stderr
    cleaned(varied(300), tmp_path / "out", near=None)
    cleaned(varied(300), tmp_path / "whole", near=None)
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")


ON_A_SMALL_DISK = """
mount -t tmpfs -o size=200k tmpfs {folder} || exit 77
{python} -c '
import pathlib
from brimful.data.clean import run as clean
from brimful.errors import BadData
from tests.data.clean.clean_rows import cleaned, varied
clean.check_room = lambda folder, needed_bytes: None  # so that it is filled
try:
    cleaned(varied(1000), pathlib.Path("{folder}/out"))
except BadData as error:
    print(error, [path.name for path in pathlib.Path("{folder}/out").iterdir()])
'
"""


def test_a_disk_that_is_really_full_is_told(tmp_path):
    script = ON_A_SMALL_DISK.format(folder=tmp_path, python=sys.executable)
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    if ended.returncode == 77 or "unshare failed" in ended.stderr:
        pytest.skip("no user namespaces here")
    assert ended.stdout.startswith(f"the disk of {tmp_path}/out is too full: cleaning needs about"), ended.stderr
    assert ended.stdout.strip().endswith(f"['{FOLDER}']")
    assert not ended.stderr
