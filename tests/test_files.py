"""Files on a disk that may be slow, full or broken: atomic writes, sync, locks, hashes."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pytest

from brimful import files
from brimful.files import (
    FileLock,
    atomic_path,
    block_hashes,
    damage,
    disk_full,
    file_sha256,
    json_sha256,
    parse_object,
    read_json,
    sha256,
    sync,
    sync_tree,
    write_atomic,
)


def failing_sync(monkeypatch, number):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)


def test_a_tree_is_synced_from_the_leaves_up(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    log = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: log.append(os.fstat(descriptor).st_ino))
    sync_tree(tmp_path)
    path = tmp_path / "a" / "b" / "file"
    assert log == [one.stat().st_ino for one in (path, path.parent, path.parent.parent, tmp_path)]


def test_a_filesystem_that_cannot_sync_folders_is_accepted(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    failing_sync(monkeypatch, errno.EINVAL)
    sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "file")


def test_a_broken_disk_is_reported(tmp_path, monkeypatch):
    failing_sync(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync(tmp_path)


@pytest.mark.parametrize("content", ["Grüße\n", b"\x00\xff"], ids=["text", "bytes"])
def test_a_file_is_written_as_given(tmp_path, content):
    write_atomic(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == (content.encode() if isinstance(content, str) else content)


def test_a_file_that_cannot_be_replaced_keeps_its_content(tmp_path, monkeypatch):
    write_atomic(tmp_path / "file", "old")
    failing_sync(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_a_draft_appears_under_its_name_only_when_it_is_complete(tmp_path):
    with atomic_path(tmp_path / "file") as draft:
        draft.write_text("new")
        assert not (tmp_path / "file").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_lock_keeps_others_out_until_it_is_closed(tmp_path, folder):
    with FileLock(tmp_path / "lock", folder=folder) as first, pytest.raises(BlockingIOError):
        FileLock(first.path, folder=folder)
    FileLock(tmp_path / "lock", folder=folder).close()


def test_a_lock_is_held_until_a_child_that_has_it_ends(tmp_path):
    lock = FileLock(tmp_path / "lock")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fd]) as child:
        lock.close()
        with pytest.raises(BlockingIOError):
            FileLock(tmp_path / "lock")
        child.communicate(b"\n")
    FileLock(tmp_path / "lock").close()


def test_a_lock_on_a_folder_that_was_renamed_meanwhile_is_taken_on_a_new_one(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    path, calls = tmp_path / "part", []

    def rename_first(descriptor, operation):
        calls.append(operation)
        if len(calls) == 1:
            path.rename(tmp_path / "output")

    monkeypatch.setattr(fcntl, "flock", rename_first)
    with FileLock(path, folder=True) as lock:
        assert os.fstat(lock.fd).st_ino == path.stat().st_ino
    assert len(calls) == 2


def test_a_filesystem_without_locks_is_reported(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FileLock(tmp_path / "lock") as lock:
        assert not lock.supported


class DuckDBError(Exception):
    __module__ = "_duckdb"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "x"), "the disk is full"),
        (OSError(errno.EDQUOT, "x"), "the disk quota is used up"),
        (OSError(errno.EFBIG, "x"), "a file exceeds what the disk or `ulimit -f` allows"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (OSError("Error writing bytes. Detail: [errno 28] No space left"), "the disk is full"),
        (RuntimeError("unexpected pos 640 vs 598"), "a file was truncated, as on a full disk"),
        (DuckDBError("Out of memory: max_temp_directory_size exceeded"), "the disk is full"),
        (OSError(errno.EACCES, "x"), None),
        (RuntimeError("No space left"), None),
    ],
    ids=str,
)
def test_a_full_disk_is_recognised(error, cause):
    assert disk_full(error) == cause


def test_the_first_error_of_a_chain_names_the_cause():
    error = RuntimeError("unexpected pos 640 vs 598")
    error.__context__ = OSError(errno.EDQUOT, "x")
    assert disk_full(error) == "the disk quota is used up"


def test_hashes_of_texts_files_and_json(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    expected = hashlib.sha256(b"abc").hexdigest()
    assert (sha256("abc"), sha256(b"abc"), file_sha256(tmp_path / "file")) == (expected,) * 3
    assert json_sha256({"a": 1, "b": 2}) == json_sha256({"b": 2, "a": 1})


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """A file of three blocks, and its hashes."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 1000)
    content = bytes(range(256)) * 9
    (tmp_path / "file").write_bytes(content)
    return tmp_path, content, block_hashes([tmp_path / "file"])[0]


def test_a_file_is_hashed_block_by_block_with_any_number_of_threads(hashed):
    folder, content, hashes = hashed
    (folder / "empty").touch()
    expected = tuple(hashlib.sha256(content[start : start + 1000]).hexdigest() for start in (0, 1000, 2000))
    assert block_hashes([folder / "file", folder / "empty"], threads=3) == [expected, ()]
    assert hashes == expected


def test_an_intact_file_has_no_damage(hashed):
    folder, content, hashes = hashed
    assert damage(folder, "file", len(content), hashes) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path, content: path.write_bytes(content[:-1]), "file is truncated: 2,303 bytes instead of 2,304"),
        (lambda path, content: path.write_bytes(content + b"x"), "file is too long: 2,305 bytes instead of 2,304"),
        (lambda path, content: path.unlink(), "file is missing"),
        (
            lambda path, content: path.write_bytes(content[:2100] + b"!" + content[2101:]),
            "file is damaged between bytes 2,000 and 2,304: its checksum differs",
        ),
    ],
    ids=["truncated", "too long", "missing", "damaged"],
)
def test_damage_is_described(hashed, change, message):
    folder, content, hashes = hashed
    change(folder / "file", content)
    assert damage(folder, "file", len(content), hashes) == message


# ---------------------------------------------------------------- JSON of our own


@dataclass(frozen=True)
class Part:
    sizes: tuple[int, ...]
    share: float = 0.5


@dataclass(frozen=True)
class Whole:
    name: str
    parts: tuple[Part, ...]
    notes: dict[str, str | None]
    kind: Literal["a", "b"]
    extra: Any = None


WHOLE = Whole("x", (Part((1, 2)), Part((), 1)), {"y": None}, "b")


def test_an_object_comes_back_as_it_was():
    assert parse_object(Whole, read_json(json.dumps(asdict(WHOLE)))) == WHOLE


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 5},
        {"parts": {}},
        {"parts": [{}]},
        {"parts": [{"sizes": [True]}]},
        {"parts": [{"sizes": [], "share": "1"}]},
        {"notes": {"y": 1}},
        {"kind": "c"},
        {"kind": ["a"]},
        {"more": 1},
    ],
    ids=str,
)
def test_an_object_of_other_types_is_a_value_error(changes):
    with pytest.raises(ValueError):
        parse_object(Whole, {**json.loads(json.dumps(asdict(WHOLE))), **changes})


@pytest.mark.parametrize(
    "text",
    ["", "5", "[]", b"\xff", pytest.param("[" * 100_000, id="list"), pytest.param('{"a":' * 100_000, id="object")],
)
def test_what_is_no_object_is_a_value_error(text):
    with pytest.raises(ValueError):
        read_json(text)
