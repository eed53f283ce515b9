"""The sample: uniform, seeded, independent of chunks, apart from held-out rows, and within the predicted memory."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.data.tokenizer import sample as tokenizer_sample
from brimful.data.tokenizer.sample import (
    BYTES_PER_PAIR,
    BYTES_PER_WORD_CHARACTER,
    LONGEST_TEXT,
    MAX_CHARACTERS,
    MIN_TRAINING_BYTES,
    OVERHEAD_BYTES,
    Sampler,
    TrainingMemory,
    available_memory,
    row_hashes,
    rows_that_fit,
)
from brimful.errors import BadOption
from brimful.machine.host import Host
from brimful.units import GiB, MiB
from tests.data.tokenizer.tokenizer_rows import texts


def batch(numbers, length=100):
    """Rows that tell their number, each of `length` characters."""
    return pa.RecordBatch.from_pydict({"text": [f"{number:0{length}d}" for number in numbers]})


def sampled(count, *, budget, seed=0, chunk=64, length=100):
    """The rows to train on and those held out, by their numbers."""
    sampler = Sampler(characters=budget, seed=seed)
    for first in range(0, count, chunk):
        sampler.add(batch(range(first, min(count, first + chunk)), length))
    return tuple(numbers(table) for table in sampler.finish())


def numbers(table):
    return [int(text) for text in table["text"].to_pylist()]


@pytest.fixture(autouse=True)
def small_held_out(monkeypatch):
    monkeypatch.setattr(tokenizer_sample, "HELD_OUT_CHARACTERS", 1000)


def test_all_rows_are_used_where_they_fit():
    rows, held_out = sampled(300, budget=10**6)
    assert sorted(rows + held_out) == list(range(300))
    assert len(held_out) == 6  # one in 50


def test_the_budget_is_kept_and_used():
    rows, held_out = sampled(5000, budget=20_050)
    assert (len(rows), len(held_out)) == (200, 10)
    assert not set(rows) & set(held_out)


@settings(max_examples=10, deadline=None)
@given(first=st.integers(20, 700), second=st.integers(20, 700), budget=st.integers(500, 30_000))
def test_chunks_do_not_matter(first, second, budget):
    assert sampled(1500, budget=budget, chunk=first) == sampled(1500, budget=budget, chunk=second)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=50, max_size=400),
    budget=st.integers(400, 9000),
    chunk=st.integers(1, 90),
)
def test_rows_of_any_lengths_are_the_first_by_hash_that_fit(lengths, budget, chunk):
    sampler = Sampler(characters=budget, seed=3)
    rows = ["x" * length for length in lengths]
    for first in range(0, len(rows), chunk):
        sampler.add(pa.RecordBatch.from_pydict({"text": rows[first : first + chunk]}))
    sample, held_out = sampler.finish()
    order = np.argsort(row_hashes(0, len(rows), 3))
    training = [rows[number] for number in order[: len(order) - held_out.num_rows]]
    count = np.searchsorted(np.cumsum([len(text) for text in training]), budget, side="right")
    assert sample["text"].to_pylist() == training[:count]
    assert held_out["text"].to_pylist() == [rows[number] for number in order[len(order) - held_out.num_rows :]]


def test_the_seed_chooses_the_rows():
    one, same, other = (set(sampled(3000, budget=20_000, seed=seed)[0]) for seed in (1, 1, 2))
    assert one == same
    assert len(one & other) < 40


def test_the_sample_is_uniform():
    rows, _ = sampled(20_000, budget=400_000)
    counts = np.histogram(rows, bins=10, range=(0, 20_000))[0]
    assert len(rows) == 4000
    assert counts.min() > 320 and counts.max() < 480


def test_what_was_seen_is_counted():
    sampler = Sampler(characters=10**7, seed=0)
    sampler.add(pa.RecordBatch.from_pydict({"a": ["长" * (LONGEST_TEXT + 5), "短"], "b": ["", "x"]}))
    sample, _ = sampler.finish()
    assert sorted(map(len, sample["a"].to_pylist())) == [1, LONGEST_TEXT]
    assert (sampler.rows_seen, sampler.rows_truncated, sampler.characters_seen) == (2, 1, LONGEST_TEXT + 7)


def test_memory_stays_near_the_budget():
    sampler, before = Sampler(characters=10_000, seed=0), pa.total_allocated_bytes()
    for first in range(0, 20_000, 100):
        sampler.add(batch(range(first, first + 100)))
        assert pa.total_allocated_bytes() - before < 150_000
    assert sampler.characters_seen == 2_000_000


def test_no_two_rows_share_a_hash_and_parts_agree():
    hashes = row_hashes(0, 100_000, 7)
    assert len(np.unique(hashes)) == 100_000
    assert (row_hashes(1000, 50, 7) == hashes[1000:1050]).all()


def test_held_out_rows_do_not_keep_the_rest_in_memory():
    sampler = Sampler(characters=400_000, seed=0)
    sampler.add(batch(range(5000)))
    _, held_out = sampler.finish()
    assert held_out.get_total_buffer_size() < 1.1 * held_out.nbytes


def test_no_more_is_read_than_could_be_used():
    assert Sampler.within(3200, seed=0).budget == 100
    assert Sampler.within(1000 * GiB, seed=0).budget == MAX_CHARACTERS


def test_distinct_words_and_their_pairs_count_once():
    memory = TrainingMemory()
    memory.add(["天地玄黄，宇宙", "天地玄黄 1234 ok ok"])
    memory.add(["宇宙。天地玄黄"])
    assert memory.word_characters == sum(map(len, ["天地玄黄", "宇宙", " ok"]))
    assert memory.bytes == BYTES_PER_WORD_CHARACTER * 9 + BYTES_PER_PAIR * (3 + 1 + 2)


def test_digits_and_punctuation_take_no_memory():
    memory = TrainingMemory()
    memory.add(["12，34。——\n", ""])
    assert memory.bytes == 0


def fit(rows, training_bytes=GiB, kind="bpe"):
    return rows_that_fit(pa.table({"text": rows}), training_bytes, kind, lambda phrase: None)


def test_a_smaller_limit_takes_the_first_rows_that_fit():
    rows = texts(10_000, words=5000)
    whole, whole_bytes = fit(rows)
    half, half_bytes = fit(rows, whole_bytes // 2)
    assert whole["text"].to_pylist() == rows
    assert half.num_rows < len(rows) and half["text"].to_pylist() == rows[: half.num_rows]
    assert 0.3 * whole_bytes < half_bytes <= 0.5 * whole_bytes
    assert half.get_total_buffer_size() < 1.01 * half.nbytes  # the others are freed


def test_unigram_takes_a_tenth_more_and_repeated_rows_no_more():
    rows = texts(500)
    assert fit(rows, kind="unigram")[1] == pytest.approx(1.1 * fit(rows)[1])
    assert fit(rows * 3)[1] == fit(rows)[1]


def test_the_least_memory_holds_the_longest_rows_there_can_be():
    rows = ["".join(chr(0x4E00 + (7 * n * n + row) % 20_000) for n in range(100_000)) for row in range(3)]
    table = pa.table({field: [text] for field, text in zip("abc", rows, strict=True)})
    assert rows_that_fit(table, MIN_TRAINING_BYTES, "unigram", lambda phrase: None)[0].num_rows == 1


def available(limit, free):
    return available_memory(limit, 100 * MiB, replace(Host.detect(), ram_available_bytes=free))


def test_the_limit_is_what_was_requested_or_what_is_free():
    assert available(2 * GiB, 8 * GiB) == (2 * GiB, 2 * GiB - 100 * MiB - OVERHEAD_BYTES)
    assert available(4 * GiB, GiB) == (GiB + 100 * MiB, GiB - OVERHEAD_BYTES)


def test_too_little_says_how_much_is_needed():
    least = 100 * MiB + OVERHEAD_BYTES + MIN_TRAINING_BYTES
    assert available(least, 8 * GiB)[1] == MIN_TRAINING_BYTES
    with pytest.raises(BadOption, match=f"Try: {least // MiB}MiB or more"):
        available(least - 1, 8 * GiB)
    with pytest.raises(BadOption, match="of which 300 MiB are free"):
        available(4 * GiB, 200 * MiB)
