"""The stream: every row once per pass, in an order that a seed fixes and nothing keeps."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.data.batches import Stream


@settings(max_examples=12)
@given(rows=st.integers(1, 3000), seed=st.integers(0, 2**70), number=st.integers(0, 2**40))
def test_a_pass_holds_every_row_once(rows, seed, number):
    assert sorted(Stream(rows, seed).take(number * rows, rows).tolist()) == list(range(rows))


@settings(max_examples=30)
@given(rows=st.integers(1, 500), start=st.integers(0, 2000), counts=st.lists(st.integers(0, 300), max_size=6))
def test_pieces_are_the_same_stream_however_it_is_taken(rows, start, counts):
    stream = Stream(rows, 7)
    ends = list(itertools.accumulate(counts, initial=start))
    pieces = [stream.take(here, count) for here, count in zip(ends, counts, strict=False)]
    assert np.concatenate([[], *pieces]).tolist() == stream.take(start, sum(counts)).tolist()


@pytest.mark.parametrize("rows", [2**18, 2**18 + 1, 1_000_003])
def test_many_rows_are_permuted_too(rows):
    taken = Stream(rows, 1).take(0, rows)
    seen = np.zeros(rows, dtype=bool)
    seen[taken] = True
    assert seen.all()


def test_passes_and_seeds_have_orders_of_their_own():
    orders = [tuple(Stream(50, seed).take(number * 50, 50)) for seed in range(3) for number in range(3)]
    assert len(set(orders)) == 9


def test_neighbours_in_the_stream_are_no_neighbours_in_the_data():
    taken = Stream(10_007, 5).take(0, 10_007).astype(float)
    assert abs(np.corrcoef(taken[:-1], taken[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(taken, np.arange(len(taken)))[0, 1]) < 0.05


@pytest.mark.parametrize("rows", [4, 5])
def test_all_orders_of_a_few_rows_are_equally_likely(rows):
    passes = 5000
    found = Counter(map(tuple, Stream(rows, 0).take(0, rows * passes).reshape(passes, rows).tolist()))
    orders = math.factorial(rows)
    expected = passes / orders
    chi_square = sum((found[order] - expected) ** 2 / expected for order in itertools.permutations(range(rows)))
    assert chi_square < orders - 1 + 4 * math.sqrt(2 * (orders - 1))


def test_the_order_is_frozen():
    """A change here would move every run that is resumed."""
    assert Stream(10, 0).take(0, 20).tolist() == [5, 8, 4, 1, 3, 0, 6, 2, 7, 9, 6, 7, 3, 2, 4, 9, 5, 1, 0, 8]
