"""What must be on the disk is asked of the disk, and a disk that says no is heard."""

import errno
import os

import pytest

from brimful.files import sync, sync_tree, write_whole


def refusing(monkeypatch, number):
    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)


def test_a_tree_is_synced_from_the_leaves_up(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    log = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: log.append(os.fstat(descriptor).st_ino))
    sync_tree(tmp_path)
    path = tmp_path / "a" / "b" / "file"
    assert log == [one.stat().st_ino for one in (path, path.parent, path.parent.parent, tmp_path)]


def test_a_filesystem_that_cannot_sync_folders_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    refusing(monkeypatch, errno.EINVAL)
    sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "file")


def test_a_broken_disk_is_heard(tmp_path, monkeypatch):
    refusing(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync(tmp_path)


def test_a_file_that_cannot_be_replaced_keeps_its_content(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", "old")
    refusing(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
