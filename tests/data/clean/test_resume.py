"""Killed at any moment: no half file, and the next run ends with the same bytes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brimful.data.clean.clean import clean
from brimful.data.clean.prepare import CleanOptions
from brimful.data.clean.write import WORK_FOLDER, WorkFolder
from tests.data.clean.clean_rows import SMALL, Rows, cleaned, outcome, read_back, varied, with_copies

ROWS = with_copies(200)[0]
OPTIONS = {"valid": 0.1, "test": 10, "near": 0.95}
"""0.95 needs 8 bands instead of the 16 of 0.85."""
SCRIPT = """
import os, pathlib, signal, sys
from tests.data.clean.clean_rows import cleaned, with_copies
output, phrase, times = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def die_at(message):
    global times
    times -= message.startswith(phrase)
    if times == 0:
        os.kill(os.getpid(), signal.SIGKILL)
move = pathlib.Path.replace
def moved(path, target):
    done = move(path, target)
    die_at(f"moved {target.name}" if target.parent == output else "")
    return done
pathlib.Path.replace = moved
cleaned(with_copies(200)[0], output, progress=die_at, valid=0.1, test=10, near=0.95)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return cleaned(ROWS, folder, **OPTIONS), outcome(folder)


def kill(folder, phrase, times):
    command = [sys.executable, "-c", SCRIPT, str(folder), phrase, str(times)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.parametrize(
    ("phrase", "times", "message"),
    [
        ("read", 1, "resuming after 50 rows"),
        pytest.param("read", 3, "resuming after 150 rows", marks=pytest.mark.torture),
        ("finding near duplicates", 4, f"resuming after {len(ROWS)} rows"),
        pytest.param("writing", 3, f"resuming after {len(ROWS)} rows", marks=pytest.mark.torture),
        ("moved train", 1, "moving the remaining files"),
    ],
    ids=lambda value: str(value).replace(" ", "-")[:20],
)
def test_a_killed_clean_resumes_to_the_same_bytes(whole, tmp_path, phrase, times, message):
    kill(tmp_path, phrase, times)
    report, files = whole
    assert {path.name for path in tmp_path.iterdir()} == {WORK_FOLDER} | (
        {"train.parquet"} if "moved" in phrase else set()
    )
    messages = []
    again = cleaned(ROWS, tmp_path, progress=messages.append, **OPTIONS)
    assert messages[0].startswith(message)
    assert outcome(tmp_path) == files
    assert (again.dropped, again.problems, again.files) == (report.dropped, report.problems, report.files)
    assert json.loads((tmp_path / "clean.json").read_text())["rows_out"] == report.rows_out
    assert not (tmp_path / WORK_FOLDER).exists()


def stop_at(phrase):
    def stop(message):
        if message.startswith(phrase):
            raise KeyboardInterrupt

    return stop


def interrupt(folder, phrase, rows=ROWS, **options):
    with pytest.raises(KeyboardInterrupt):
        cleaned(rows, folder, progress=stop_at(phrase), **OPTIONS | options)


def test_finished_bands_are_not_looked_at_again(whole, tmp_path):
    interrupt(tmp_path, "finding near duplicates, band 5")
    messages = []
    cleaned(ROWS, tmp_path, progress=messages.append, **OPTIONS)
    assert messages[1] == "finding near duplicates, band 5 of 8"
    assert outcome(tmp_path) == whole[1]


def test_rows_already_read_are_not_read_again(whole, tmp_path):
    interrupt(tmp_path, "finding duplicates")
    messages = []
    report = cleaned(ROWS, tmp_path, progress=messages.append, **OPTIONS)
    assert not [phrase for phrase in messages if phrase.startswith("read")]
    assert report.resumed_rows == len(ROWS) and report.notes == (f"resuming after {len(ROWS)} rows",)
    assert report.rows_per_s is None


def test_an_interruption_before_the_first_segment_leaves_nothing(tmp_path):
    interrupt(tmp_path / "out", "read", rows=varied(3))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", [{"seed": 1}, {"near": None}, {"max_chars": 250}, {"min_chars": 2}], ids=str)
def test_work_for_other_options_is_not_resumed(tmp_path, other):
    interrupt(tmp_path, "finding duplicates")
    messages = []
    report = cleaned(ROWS, tmp_path, progress=messages.append, **OPTIONS | other)
    assert messages[0].startswith("starting over") and report.notes == (messages[0],)
    assert report.resumed_rows == 0 and report.rows_in == len(ROWS)


def test_what_comes_after_starting_over_has_nothing_of_what_was_before(tmp_path):
    interrupt(tmp_path / "one", "finding near duplicates, band 3")
    for name in ("one", "two"):
        cleaned(ROWS, tmp_path / name, seed=3, **OPTIONS)
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")


def test_work_for_other_rows_is_not_resumed(tmp_path):
    interrupt(tmp_path, "finding duplicates")
    report = cleaned(ROWS[:100], tmp_path, **OPTIONS)
    assert report.notes[0].startswith("starting over") and report.rows_in == 100


def test_files_that_were_all_read_are_not_opened_again(tmp_path):
    class Closed(Rows):
        def chunks(self, *, skip=0):
            raise AssertionError("read again")

    interrupt(tmp_path, "finding duplicates")
    report = clean(Closed(ROWS), output=tmp_path, options=CleanOptions(**OPTIONS), memory=SMALL)
    assert report.rows_in == len(ROWS)


@pytest.fixture
def about_to_move(tmp_path, monkeypatch):
    """A folder with outputs that are whole and listed, and not yet moved."""
    monkeypatch.setattr(WorkFolder, "finish", lambda work: stop_at("")(""))
    interrupt(tmp_path, "never")
    monkeypatch.undo()
    return tmp_path


def test_another_split_message_the_work(about_to_move):
    report = cleaned(ROWS, about_to_move, valid=5, near=0.95)
    assert report.resumed_rows == len(ROWS)
    assert len(read_back(about_to_move, "valid")) == 5 and not (about_to_move / "test.parquet").exists()


def test_outputs_of_other_options_are_not_moved(about_to_move):
    report = cleaned(ROWS, about_to_move, **OPTIONS | {"near": None})
    assert report.dropped["near_duplicate"] == 0 and report.notes[0].startswith("starting over")


def test_signatures_behind_the_last_whole_segment_are_thrown_away(whole, tmp_path):
    interrupt(tmp_path, "read 150")
    with (tmp_path / WORK_FOLDER / "segments" / "signatures").open("ab") as file:
        file.write(b"half a segment")
    (tmp_path / WORK_FOLDER / "segments" / "00003.rows").write_bytes(b"half a segment")
    cleaned(ROWS, tmp_path, **OPTIONS)
    assert outcome(tmp_path) == whole[1]
