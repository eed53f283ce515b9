"""The outputs: each row once, row groups that depend on the rows alone."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.data.clean import write
from brimful.data.clean import write as clean_write
from brimful.data.clean.clean import CleanReport
from brimful.data.clean.write import (
    GroupedWriter,
    bits_for,
    in_key_order,
    keys,
    split_rows,
    write_segment,
    write_splits,
)
from brimful.errors import BadOption, InternalError


def table(texts):
    return pa.table({"text": pa.array(texts, pa.string())})


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(clean_write, "GROUP_ROWS", 10)
    monkeypatch.setattr(clean_write, "GROUP_BYTES", 60)


def groups(path):
    file = pq.ParquetFile(path)
    return [file.read_row_group(number).column("text").to_pylist() for number in range(file.num_row_groups)]


def written(folder, texts, cuts):
    path = folder / "x.parquet"
    with GroupedWriter(path, table([]).schema) as writer:
        for start, end in zip([0, *cuts], [*cuts, len(texts)], strict=True):
            writer.add(table(texts[start:end]))
    return path


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text("ab", max_size=30), max_size=60), st.data())
def test_row_groups_do_not_depend_on_the_tables(tmp_path_factory, texts, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clean_write, "GROUP_ROWS", 10)
        patch.setattr(clean_write, "GROUP_BYTES", 60)
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
def test_too_few_or_too_many_rows_are_a_bug_that_is_told(tmp_path, rows):
    with pytest.raises(InternalError):
        write_splits([table(["x"] * rows)], {"valid": 2, "train": 3}, tmp_path, ("text",))


def test_a_report_whose_numbers_do_not_add_up_cannot_be_made():
    fields = {
        "output": "out", "columns": {}, "reason": "", "rows_in": 10, "files": {"train": 7, "valid": 2}, "places": {},
        "resumed_rows": 0, "notes": (), "seconds": 1.0, "stage_s": {}, "peak_bytes": 0,
        "dropped": {"broken": 1, "empty": 0, "too_short": 0, "over_long": 0, "duplicate": 0, "near_duplicate": 0},
    }  # fmt: skip
    assert CleanReport(**fields).rows_out == 9
    with pytest.raises(InternalError, match="lost count"):
        CleanReport(**fields | {"rows_in": 11})
    with pytest.raises(InternalError, match="lost count"):
        CleanReport(**fields | {"dropped": {"broken": 1}})


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


@given(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**40), unique=True, max_size=50))
def test_different_rows_have_different_keys(seed, slots):
    assert len(set(keys(np.array(slots, dtype=np.int64), seed).tolist())) == len(slots)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), bits=st.integers(0, 4), parts=st.integers(1, 3),
    most_open=st.integers(0, 4),
)  # fmt: skip
def test_rows_come_back_once_each_in_the_order_of_their_keys(tmp_path_factory, sizes, bits, parts, most_open):
    folder, paths, first = tmp_path_factory.mktemp("segments"), [], 0
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number}.rows")
        slots = np.arange(first, first + size)
        write_segment(paths[-1], table(list(map(str, slots))), first, slots, seed=5, bits=bits)
        first += size
    dropped = (np.arange(first) % 5 == 0).astype(np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "MAX_OPEN", most_open)
        tables = list(in_key_order(paths, dropped, bits=bits, parts=parts))
    found = [int(text) for part in tables for text in part["text"].to_pylist()]
    kept = np.flatnonzero(dropped == 0)
    assert found == kept[np.argsort(keys(kept, 5))].tolist()


def test_there_are_enough_buckets_for_the_text():
    assert [bits_for(size, 100) for size in (0, 99, 100, 101, 800, 801, 10**9)] == [0, 0, 0, 1, 3, 4, 10]
