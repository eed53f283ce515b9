"""The outputs: each row once, row groups that depend on the rows alone; and a full disk."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.data.clean import write
from brimful.data.clean.write import (
    WORK_FOLDER,
    GroupedWriter,
    check_disk_space,
    disk_full_errors,
    predict_disk_bytes,
    split_rows,
    write_splits,
)
from brimful.errors import BadData, BadOption, InternalError
from brimful.units import MiB
from tests.data.clean.clean_rows import cleaned, outcome, varied


def table(texts):
    return pa.table({"text": pa.array(texts, pa.string())})


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(write, "GROUP_ROWS", 10)
    monkeypatch.setattr(write, "GROUP_BYTES", 60)


def groups(path):
    file = pq.ParquetFile(path)
    return [file.read_row_group(number).column("text").to_pylist() for number in range(file.num_row_groups)]


def written(folder, texts, cuts):
    path = folder / "x.parquet"
    with GroupedWriter(path, table([]).schema) as writer:
        for start, end in zip([0, *cuts], [*cuts, len(texts)], strict=True):
            writer.add(table(texts[start:end]))
    return path


@settings(max_examples=15, deadline=None)
@given(st.lists(st.text("ab", max_size=30), max_size=60), st.data())
def test_row_groups_do_not_depend_on_the_tables(tmp_path_factory, texts, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "GROUP_ROWS", 10)
        patch.setattr(write, "GROUP_BYTES", 60)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(texts)), max_size=5)))
        whole = written(tmp_path_factory.mktemp("whole"), texts, []).read_bytes()
        path = written(tmp_path_factory.mktemp("cut"), texts, cuts)
    assert path.read_bytes() == whole
    assert pq.read_table(path).column("text").to_pylist() == texts


def test_a_row_group_ends_after_so_many_rows_or_so_many_bytes(tmp_path, small_groups):
    path = written(tmp_path, ["x"] * 25 + ["y" * 25] * 4 + ["z" * 200] * 2, [7])
    assert [len(group) for group in groups(path)] == [10, 10, 8, 2, 1]


def test_splits_take_the_rows_in_order(tmp_path):
    tables = [table([f"{number}" for number in range(start, start + 7)]) for start in (0, 7, 14)]
    write_splits(tables, {"test": 3, "valid": 8, "train": 10}, tmp_path, ("text",))
    read = {
        name: pq.read_table(tmp_path / f"{name}.parquet")["text"].to_pylist() for name in ("test", "valid", "train")
    }
    assert read == {
        "test": [f"{number}" for number in range(3)],
        "valid": [f"{number}" for number in range(3, 11)],
        "train": [f"{number}" for number in range(11, 21)],
    }


@pytest.mark.parametrize("rows", [4, 6])
def test_too_few_or_too_many_rows_are_a_bug_that_is_reported(tmp_path, rows):
    with pytest.raises(InternalError):
        write_splits([table(["x"] * rows)], {"valid": 2, "train": 3}, tmp_path, ("text",))


@pytest.mark.parametrize(
    ("rows", "valid", "test", "counts"),
    [
        (1000, 0.01, 0, {"valid": 10, "train": 990}),
        (1000, 0.01, 0.5, {"test": 500, "valid": 10, "train": 490}),
        (10, 0.01, 0, {"valid": 1, "train": 9}),
        (1, 0.01, 0, {"train": 1}),
        (10, 1, 0, {"valid": 1, "train": 9}),
    ],
)
def test_shares_and_numbers_become_rows(rows, valid, test, counts):
    assert split_rows(rows, valid=valid, test=test) == counts


@pytest.mark.parametrize(("rows", "valid", "test"), [(10, 10, 0), (10, 5, 5), (2, 0.1, 0.1), (10, 11, 0)])
def test_a_split_that_leaves_nothing_to_train_on_is_refused(rows, valid, test):
    with pytest.raises(BadOption, match=f"{rows} rows are left"):
        split_rows(rows, valid=valid, test=test)


# ── Disk space ────────────────────────────────────────────────────────────────────────────────────────────────────────

REPOSITORY = Path(__file__).parents[3]


def test_what_is_needed_is_predicted_from_the_share_that_was_read():
    tenth = predict_disk_bytes(rows=1000, text_bytes=10**6, sketch_bytes=256, read_share=0.1)
    all_ = predict_disk_bytes(rows=10_000, text_bytes=10**7, sketch_bytes=256, read_share=1.0)
    assert all_ == pytest.approx(0.7 * 10**7)
    assert tenth == pytest.approx(all_ + 9 * (0.8 * 10**6 + 1000 * (64 + 256)))


def test_a_source_of_unknown_size_predicts_what_it_knows():
    assert predict_disk_bytes(rows=1, text_bytes=1000, sketch_bytes=0, read_share=0.0) == pytest.approx(700)


def test_more_than_is_free_is_refused_before_it_is_written(tmp_path):
    check_disk_space(tmp_path, 10)
    with pytest.raises(
        BadData, match=rf"Not enough disk space at {tmp_path}: about 1024 TiB more needed \(predicted\)"
    ):
        check_disk_space(tmp_path, 2**50)


def test_a_clean_that_cannot_fit_is_refused_at_its_first_chunk(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(BadData, match="1000 B free. Try: make room"):
        cleaned(varied(200), tmp_path / "out", chunk_rows=5)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_others_fill_is_noticed_at_the_next_segment(tmp_path, monkeypatch):
    usage, calls = shutil.disk_usage(tmp_path), []

    def shrinking(path):
        calls.append(path)
        return usage if len(calls) < 3 else usage._replace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", shrinking)
    with pytest.raises(BadData, match="1000 B free. Try: make room"):
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
    with pytest.raises(BadData if full else type(error)), disk_full_errors(tmp_path, lambda: 10 * MiB):
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


@pytest.mark.parametrize("most_bytes", [pytest.param(3_000, marks=pytest.mark.torture), 30_000])
def test_files_that_may_not_grow_are_reported_and_the_work_goes_on_later(tmp_path, most_bytes):
    command = [sys.executable, "-c", WITH_SMALL_FILES, str(tmp_path / "out"), str(most_bytes)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert ended.stdout.startswith(f"Not enough disk space at {tmp_path / 'out'}"), ended.stderr
    assert not ended.stderr
    cleaned(varied(300), tmp_path / "out", near=None)
    cleaned(varied(300), tmp_path / "whole", near=None)
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")


ON_A_SMALL_DISK = """
mount -t tmpfs -o size=200k tmpfs {folder} || exit 77
{python} -c '
import pathlib
from brimful.data.clean import clean
from brimful.errors import BadData
from tests.data.clean.clean_rows import cleaned, varied
clean.check_disk_space = lambda folder, needed_bytes: None  # so that it is filled
try:
    cleaned(varied(1000), pathlib.Path("{folder}/out"))
except BadData as error:
    print(error, [path.name for path in pathlib.Path("{folder}/out").iterdir()])
'
"""


def test_a_disk_that_is_really_full_is_reported(tmp_path):
    script = ON_A_SMALL_DISK.format(folder=tmp_path, python=sys.executable)
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    if ended.returncode == 77 or "unshare failed" in ended.stderr:
        pytest.skip("no user namespaces here")
    assert ended.stdout.startswith(f"Not enough disk space at {tmp_path}/out: about"), ended.stderr
    assert ended.stdout.strip().endswith(f"['{WORK_FOLDER}']")
    assert not ended.stderr
