"""Rows are dealt evenly and none is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.memory.cut import deal

rows, processes = st.integers(0, 100_000), st.integers(1, 300)


@given(rows, processes)
@settings(deadline=None)
def test_every_row_is_dealt_once(rows, processes):
    assert sum(deal(rows, processes)) == rows


@given(rows, processes)
@settings(deadline=None)
def test_every_process_has_a_share(rows, processes):
    assert len(deal(rows, processes)) == processes


@given(rows, processes)
@settings(deadline=None)
def test_shares_differ_by_one_row_at_most(rows, processes):
    assert max(deal(rows, processes)) - min(deal(rows, processes)) <= 1


@given(rows, processes)
@settings(deadline=None)
def test_the_first_process_has_the_largest_share(rows, processes):
    assert list(deal(rows, processes)) == sorted(deal(rows, processes), reverse=True)


@pytest.mark.parametrize(
    ("rows", "processes", "shares"),
    [(250, 3, (84, 83, 83)), (256, 1, (256,)), (2, 4, (1, 1, 0, 0)), (8, 4, (2, 2, 2, 2))],
)
def test_rows_dealt_by_hand(rows, processes, shares):
    assert deal(rows, processes) == shares
