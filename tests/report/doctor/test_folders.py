"""The run's folder, the data and their disks."""

import errno
import os
from pathlib import Path

import pytest

from brimful.machine.host import Space
from brimful.report.doctor import host_checks
from brimful.report.doctor.host_checks import (
    Speed,
    cache_checks,
    data_checks,
    filesystem,
    read_speed,
    run_folder_checks,
    speed_checks,
    write_and_read_speed,
)
from brimful.units import GiB, MiB
from tests.report.doctor.fake_machine import only


def space(free, total=500 * GiB):
    return Space(path="/", total_bytes=total, free_bytes=free)


def test_a_new_run_folder_is_checked_at_its_nearest_parent(tmp_path):
    check = only(run_folder_checks(tmp_path / "runs" / "a", space=space(100 * GiB)), "run folder")
    assert check.status in ("ok", "warning")  # a warning where the tests run in RAM
    assert check.figures["path"] == str(tmp_path)


def test_a_folder_that_cannot_be_written_to_fails(tmp_path, monkeypatch):
    def refuse(**options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(host_checks.tempfile, "TemporaryFile", refuse)
    check = only(run_folder_checks(tmp_path))
    assert check.status == "failed" and "Read-only" in str(check.text)


def test_a_file_in_place_of_the_folder_fails(tmp_path):
    (tmp_path / "run").touch()
    assert only(run_folder_checks(tmp_path / "run")).status == "failed"


def test_a_folder_in_ram_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(host_checks, "filesystem", lambda *_: "tmpfs")
    check = only(run_folder_checks(tmp_path, space=space(GiB * 100)), "run folder")
    assert check.status == "warning" and "RAM" in str(check.text)


def test_the_type_of_the_innermost_mount_counts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / /data\\040set rw - nfs4 server:/x rw\n"
    )
    assert filesystem(Path("/data set/rows"), tmp_path) == "nfs4"
    assert filesystem(Path("/home"), tmp_path) == "ext4"


@pytest.mark.parametrize(("free", "status"), [(100 * GiB, "ok"), (5 * GiB, "warning"), (MiB, "failed")])
def test_disk_space(tmp_path, free, status):
    assert only(run_folder_checks(tmp_path, space=space(free)), "disk space").status == status


@pytest.mark.parametrize(("free", "status"), [(200 * GiB, "ok"), (50 * GiB, "warning"), (15 * GiB, "failed")])
def test_space_is_compared_with_the_runs_own_checkpoints(tmp_path, monkeypatch, free, status):
    monkeypatch.setattr(host_checks, "_largest_checkpoint", lambda _: 20 * GiB)
    check = only(run_folder_checks(tmp_path, space=space(free)), "disk space")
    assert check.status == status


def test_the_size_of_a_checkpoint_is_that_of_its_files(tmp_path):
    (tmp_path / "checkpoints/step-00000010").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000010/model").write_bytes(b"x" * 5000)
    check = only(run_folder_checks(tmp_path, space=space(4000)), "disk space")
    assert check.status == "failed" and check.figures["checkpoint_bytes"] == 5000


def test_locks_that_work_are_ok(tmp_path):
    assert only(run_folder_checks(tmp_path, space=space(GiB * 100)), "locks").status == "ok"


def test_a_filesystem_without_locks_is_a_warning(tmp_path, monkeypatch):
    import fcntl

    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    check = only(run_folder_checks(tmp_path, space=space(GiB * 100)), "locks")
    assert check.status == "warning" and "local disk" in str(check.fix)


def test_the_cache_and_the_temporary_folder_are_writable_here():
    assert [check.status for check in cache_checks()] == ["ok", "ok"]


def test_a_cache_that_cannot_be_written_to_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BRIMFUL_CACHE", str(tmp_path / "file"))
    check = only(cache_checks(), "cache folder")
    assert check.status == "warning" and "BRIMFUL_CACHE" in str(check.fix)


def test_nothing_is_left_in_a_folder_that_was_checked(tmp_path):
    run_folder_checks(tmp_path)
    speed_checks(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


# ---- Data ----


def test_data_that_is_there_is_ok(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 3000)
    (tmp_path / "b").write_bytes(b"x" * 5000)
    found, files = data_checks(str(tmp_path))
    assert only(found).status == "ok" and only(found).figures["bytes"] == 8000
    assert [file.name for file in files] == ["b", "a"]


@pytest.mark.parametrize("name", ["no/such/rows.jsonl", "./rows"])
def test_missing_data_fails(name):
    assert only(data_checks(name)[0]).status == "failed"


def test_a_name_on_the_hub_is_not_checked():
    assert only(data_checks("owner/name")[0]).status == "not checked"


def test_empty_data_fails(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    assert only(data_checks(str(tmp_path / "rows.jsonl"))[0]).status == "failed"


def test_data_that_cannot_be_read_fails(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("x")
    monkeypatch.setattr(os, "access", lambda *_: False)
    check = only(data_checks(str(tmp_path))[0])
    assert check.status == "failed" and "chmod" in str(check.fix)


def test_without_data_it_is_not_checked():
    assert only(data_checks(None)[0]).status == "not checked"


# ---- Speed ----


def test_reading_stops_at_the_limit_and_says_how_it_was_measured(tmp_path):
    (tmp_path / "rows").write_bytes(os.urandom(16 * MiB))
    speed = read_speed([tmp_path / "rows"], limit_bytes=8 * MiB)
    assert speed is not None and speed.bytes_per_s > 0
    assert ("around" if speed.direct else "through") in str(speed.phrase)


def test_a_filesystem_that_refuses_direct_reads_is_read_through_the_cache(tmp_path, monkeypatch):
    (tmp_path / "rows").write_bytes(os.urandom(8 * MiB))
    real = os.open

    def refuse(path, flags, *args, **options):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    speed = read_speed([tmp_path / "rows"])
    assert speed is not None and not speed.direct and "page cache" in str(speed.phrase)


def test_too_little_data_is_not_timed(tmp_path):
    (tmp_path / "rows").write_bytes(b"x" * 1000)
    found = speed_checks(tmp_path, [tmp_path / "rows"])
    assert only(found, "data speed").status == "not checked"


@pytest.mark.parametrize(
    ("speed", "status"),
    [
        (Speed(bytes_per_s=900 * MiB, direct=True, seek_s=0.0001), "ok"),
        (Speed(bytes_per_s=12 * MiB, direct=True), "warning"),
        (Speed(bytes_per_s=150 * MiB, direct=True, seek_s=0.009), "warning"),
    ],
)
def test_slow_data_is_a_warning(tmp_path, monkeypatch, speed, status):
    monkeypatch.setattr(host_checks, "read_speed", lambda files: speed)
    assert only(speed_checks(tmp_path, [tmp_path / "rows"]), "data speed").status == status


def test_a_run_folder_is_written_and_read(tmp_path):
    write, read = write_and_read_speed(tmp_path, limit_bytes=8 * MiB)
    assert write.bytes_per_s > 0 and read.bytes_per_s > 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rate", "status"), [(500 * MiB, "ok"), (5 * MiB, "warning")])
def test_a_slow_run_folder_is_a_warning(tmp_path, monkeypatch, rate, status):
    speed = Speed(bytes_per_s=rate, direct=True)
    monkeypatch.setattr(host_checks, "write_and_read_speed", lambda _: (speed, speed))
    assert only(speed_checks(tmp_path, []), "run folder speed").status == status
