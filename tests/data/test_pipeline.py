"""Threads keep the order within bounds; an output folder appears whole or not at all, and loses nothing of the user's."""

import errno
import threading
import time

import pytest

from brimful.data.pipeline import OutputFolder, in_order, read_ahead, writing_to
from brimful.errors import BadData, BadOption


def test_results_come_in_order_whoever_is_first():
    def work(number):
        time.sleep(0.002 * (number % 3 == 0))
        return number * 2

    assert list(in_order(work, range(20), threads=4, in_flight=6)) == [number * 2 for number in range(20)]


def test_no_more_than_in_flight_are_started_and_not_taken():
    started, taken = [], 0
    for _ in in_order(started.append, iter(range(20)), threads=2, in_flight=3):
        taken += 1
        assert len(started) - taken <= 3
    assert len(started) == taken == 20


def test_work_overlaps_with_its_consumer():
    release = threading.Event()
    results = in_order(lambda number: release.wait(5) if number else True, range(2), threads=1, in_flight=2)
    assert next(results) is True  # the second waits for us: it was started in another thread
    release.set()
    assert list(results) == [True]


def test_an_error_comes_out_in_its_place():
    def work(number):
        if number == 2:
            raise ValueError("two")
        return number

    results = in_order(work, range(9), threads=2, in_flight=3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(results)


def test_an_error_of_the_source_comes_out():
    def source():
        yield 1
        raise ValueError("unreadable")

    items = read_ahead(source(), in_flight=2)
    with pytest.raises(ValueError, match="unreadable"):
        list(items)


def test_read_ahead_gives_everything_once_and_reads_before_it_is_asked():
    read = []

    def source():
        for number in range(1, 6):
            read.append(number)
            yield number

    items = read_ahead(source(), in_flight=2)
    assert next(items) == 1
    deadline = time.monotonic() + 5
    while read == [1] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(read) == 2
    assert list(items) == [2, 3, 4, 5]


def test_threads_end_when_the_consumer_stops():
    before = threading.active_count()
    results = in_order(lambda number: number, range(100), threads=3, in_flight=4)
    next(results)
    results.close()
    assert threading.active_count() == before


def folder(path, *, overwrite=False):
    return OutputFolder(path=path, kind="tokenizer", marker="tokenizer.json", overwrite=overwrite)


def filled(path, content="new"):
    path.mkdir()
    (path / "tokenizer.json").write_text(content)
    return path


def content(path):
    return (path / "tokenizer.json").read_text()


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_of_another_kind_is_never_replaced(overwrite, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    for name, kind in (("file", "existing file"), ("folder", "existing folder that is not a tokenizer")):
        with pytest.raises(BadOption, match=kind):
            folder(tmp_path / name, overwrite=overwrite).check()


def test_one_of_its_kind_is_replaced_only_with_overwrite(tmp_path):
    filled(tmp_path / "t", "old")
    part = filled(tmp_path / ".part")
    with pytest.raises(BadOption, match="Try: another folder, or overwrite=True"):
        folder(tmp_path / "t").publish(part)
    folder(tmp_path / "t", overwrite=True).publish(part)
    assert content(tmp_path / "t") == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_an_empty_folder_is_replaced(tmp_path):
    (tmp_path / "t").mkdir()
    folder(tmp_path / "t").publish(filled(tmp_path / ".part"))
    assert content(tmp_path / "t") == "new"


def test_a_rename_that_fails_restores_the_old_one(tmp_path, monkeypatch):
    filled(tmp_path / "t", "old")
    part = filled(tmp_path / ".part")
    rename = type(tmp_path).rename

    def failing(path, target):
        if path == part:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", failing)
    output = folder(tmp_path / "t", overwrite=True)
    with pytest.raises(BadData, match="Input/output error. Try: another output="), writing_to(tmp_path / "t"):
        output.publish(part)
    assert content(tmp_path / "t") == "old"


def test_a_hidden_folder_of_another_kind_is_never_removed(tmp_path):
    filled(tmp_path / "t", "old")
    (tmp_path / ".t.old").mkdir()
    (tmp_path / ".t.old" / "mine").write_text("x")
    output = folder(tmp_path / "t", overwrite=True)
    with pytest.raises(BadData, match="Directory not empty"), writing_to(tmp_path / "t"):
        output.publish(filled(tmp_path / ".part"))
    assert (tmp_path / ".t.old" / "mine").read_text() == "x"
    assert content(tmp_path / "t") == "old"


def test_what_a_killed_process_left_is_removed(tmp_path):
    filled(tmp_path / "t", "old")
    filled(tmp_path / ".t.old", "older")
    folder(tmp_path / "t", overwrite=True).publish(filled(tmp_path / ".part"))
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_file_that_appears_meanwhile_is_not_lost(tmp_path):
    output = folder(tmp_path / "t")
    output.check()
    (tmp_path / "t").write_text("mine")
    with pytest.raises(BadOption, match="existing file"):
        output.publish(filled(tmp_path / ".part"))
    assert (tmp_path / "t").read_text() == "mine"


def test_a_full_disk_is_one_sentence(tmp_path):
    with pytest.raises(BadData, match="/t: the disk is full. Try: free some space"), writing_to(tmp_path / "t"):
        raise OSError(errno.ENOSPC, "No space left on device")
