"""Segments: every row comes back once, in the order of its key."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.data.clean import segments
from brimful.data.clean.segments import bucket_bits, rows_by_key, sort_keys, write_segment


def table(texts):
    return pa.table({"text": pa.array(texts, pa.string())})


@settings(max_examples=30)
@given(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**40), unique=True, max_size=50))
def test_different_rows_have_different_keys(seed, row_ids):
    assert len(set(sort_keys(np.array(row_ids, dtype=np.int64), seed).tolist())) == len(row_ids)


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), bits=st.integers(0, 4), parts=st.integers(1, 3),
    most_open=st.integers(0, 4),
)  # fmt: skip
def test_rows_come_back_once_each_in_the_order_of_their_keys(tmp_path_factory, sizes, bits, parts, most_open):
    folder, paths, first = tmp_path_factory.mktemp("segments"), [], 0
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number}.rows")
        row_ids = np.arange(first, first + size)
        write_segment(paths[-1], table(list(map(str, row_ids))), first, row_ids, seed=5, bits=bits)
        first += size
    dropped = (np.arange(first) % 5 == 0).astype(np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MAX_OPEN", most_open)
        tables = list(rows_by_key(paths, dropped, bits=bits, parts=parts))
    found = [int(text) for part in tables for text in part["text"].to_pylist()]
    kept = np.flatnonzero(dropped == 0)
    assert found == kept[np.argsort(sort_keys(kept, 5))].tolist()


def test_there_are_enough_buckets_for_the_text():
    assert [bucket_bits(size, 100) for size in (0, 99, 100, 101, 800, 801, 10**9)] == [0, 0, 0, 1, 3, 4, 10]
