"""The sample: uniform, seeded, independent of chunks, within its budget, apart from what is held out."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.data.tokenizer import sample as tokenizer_sample
from brimful.data.tokenizer.sample import LONGEST_TEXT, Sampler, row_hashes


def batch(numbers, length=100):
    """Rows that tell their number, each of `length` characters."""
    return pa.RecordBatch.from_pydict({"text": [f"{number:0{length}d}" for number in numbers]})


def sampled(count, *, budget, seed=0, chunk=64, length=100):
    sampler = Sampler(characters=budget, seed=seed)
    for first in range(0, count, chunk):
        sampler.add(batch(range(first, min(count, first + chunk)), length))
    return sampler.finish()


def numbers(table):
    return [int(text) for text in table["text"].to_pylist()]


@pytest.fixture(autouse=True)
def small_held_out(monkeypatch):
    monkeypatch.setattr(tokenizer_sample, "HELD_OUT_CHARACTERS", 1000)


def test_all_rows_are_used_where_they_fit():
    sample = sampled(300, budget=10**6)
    assert sorted(numbers(sample.rows) + numbers(sample.held_out)) == list(range(300))
    assert len(numbers(sample.held_out)) == 6  # one in 50
    assert (sample.rows_seen, sample.characters_seen, sample.rows_cut) == (300, 30_000, 0)


def test_the_budget_is_kept_and_used():
    sample = sampled(5000, budget=20_050)
    assert sample.rows.num_rows == 200
    assert sample.held_out.num_rows == 10
    assert not set(numbers(sample.rows)) & set(numbers(sample.held_out))
    assert sample.rows_seen == 5000


@settings(max_examples=20, deadline=None)
@given(first=st.integers(20, 700), second=st.integers(20, 700), budget=st.integers(500, 30_000))
def test_chunks_do_not_matter(first, second, budget):
    one, two = (sampled(1500, budget=budget, chunk=chunk) for chunk in (first, second))
    assert (numbers(one.rows), numbers(one.held_out)) == (numbers(two.rows), numbers(two.held_out))


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=50, max_size=400),
    budget=st.integers(400, 9000),
    chunk=st.integers(1, 90),
)
def test_rows_of_any_lengths_are_the_first_by_hash_that_fit(lengths, budget, chunk):
    sampler = Sampler(characters=budget, seed=3)
    texts = ["x" * length for length in lengths]
    for first in range(0, len(texts), chunk):
        sampler.add(pa.RecordBatch.from_pydict({"text": texts[first : first + chunk]}))
    sample = sampler.finish()
    order = np.argsort(row_hashes(0, len(texts), 3))
    rest = [texts[number] for number in order[: len(order) - sample.held_out.num_rows]]
    fitting = np.searchsorted(np.cumsum([len(text) for text in rest]), budget, side="right")
    assert sample.rows["text"].to_pylist() == rest[:fitting]
    held_out = [texts[number] for number in order[len(order) - sample.held_out.num_rows :]]
    assert sample.held_out["text"].to_pylist() == held_out


def test_the_seed_chooses_the_rows():
    one, same, other = (set(numbers(sampled(3000, budget=20_000, seed=seed).rows)) for seed in (1, 1, 2))
    assert one == same
    assert len(one & other) < 40


def test_the_sample_is_uniform():
    chosen = np.array(numbers(sampled(20_000, budget=400_000).rows))
    counts = np.histogram(chosen, bins=10, range=(0, 20_000))[0]
    assert len(chosen) == 4000
    assert counts.min() > 320 and counts.max() < 480


def test_memory_stays_near_the_budget(monkeypatch):
    sampler = Sampler(characters=10_000, seed=0)
    for first in range(0, 20_000, 100):
        sampler.add(batch(range(first, first + 100)))
        assert sum(part.rows.num_rows for part in sampler._parts) <= 1.5 * 110 + 100


def test_no_two_rows_share_a_hash_and_stretches_agree():
    hashes = row_hashes(0, 100_000, 7)
    assert len(np.unique(hashes)) == 100_000
    assert (row_hashes(1000, 50, 7) == hashes[1000:1050]).all()


def test_a_text_without_end_is_cut():
    sampler = Sampler(characters=10**7, seed=0)
    sampler.add(pa.RecordBatch.from_pydict({"a": ["长" * (LONGEST_TEXT + 5), "短"], "b": ["", "x"]}))
    sample = sampler.finish()
    assert sorted(map(len, sample.rows["a"].to_pylist())) == [1, LONGEST_TEXT]
    assert (sample.rows_cut, sample.characters_seen) == (1, LONGEST_TEXT + 7)


def test_what_is_held_out_does_not_keep_the_rest_in_memory():
    held_out = sampled(5000, budget=400_000).held_out
    assert held_out.get_total_buffer_size() < 1.1 * held_out.nbytes
