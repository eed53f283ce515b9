"""Steps: the same rows whatever the processes, plans and workers; every row once a pass; a position that is a number."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brimful.data.batches import Mix, StepSampler, Stream
from brimful.errors import BadOption

LENGTHS = np.random.default_rng(0).integers(1, 200, (1000, 2))


def sampler(rows=1000, global_batch=64, **options):
    return StepSampler(rows, global_batch, lengths=LENGTHS[:rows].__getitem__, **options)


def take_steps(sampler, count, start=0):
    return [sampler.step(start + number * sampler.global_batch) for number in range(count)]


@settings(max_examples=8)
@example(rows=9, global_batch=3, window=1, processes=2, resume_at=1, seed=0)
@given(
    rows=st.integers(40, 300),
    global_batch=st.integers(1, 80),
    window=st.integers(1, 6),
    processes=st.integers(1, 4),
    resume_at=st.integers(0, 9),
    seed=st.integers(0, 5),
)
def test_every_row_comes_once_a_pass_for_any_processes_and_resume_point(
    rows, global_batch, window, processes, resume_at, seed
):
    global_batch = max(global_batch, processes)
    options = {"seed": seed, "mix": Mix(window)}
    speeds = [1.0 + rank for rank in range(processes)]
    whole = window * (12 // window + 1)  # whole windows, so that the count below is exact
    found, position = Counter(), 0
    members = [sampler(rows, global_batch, rank=rank, speeds=speeds, **options) for rank in range(processes)]
    for number in range(whole):
        if number == resume_at:  # all leave, and others come in their place
            state = members[0].state(position)
            members = [sampler(rows, global_batch, rank=rank, speeds=speeds, **options) for rank in range(processes)]
            (position,) = {member.resume(state) for member in members}
        shares = [member.step(position) for member in members]
        for share in shares:
            found.update(share.rows[share.mine].tolist())
        position += global_batch
    assert found == Counter(members[0].stream.take(0, position).tolist())


def test_rows_without_lengths_are_dealt_evenly_and_none_is_excluded():
    """Whatever lengths the memory model knows, it is not asked about rows whose lengths are unknown."""

    def excluded(lengths):
        raise AssertionError("called without lengths")

    assert len(StepSampler(100, 8, rank=1, speeds=[1.0, 1.0], excluded=excluded).step(0).mine) == 4


@settings(max_examples=30)
@given(processes=st.integers(1, 5), number=st.integers(0, 30))
def test_a_step_holds_the_same_rows_on_any_number_of_processes(processes, number):
    alone = sampler().step(number * 64).rows
    members = [sampler(rank=rank, speeds=[1.0] * processes) for rank in range(processes)]
    shares = [member.step(number * 64) for member in members]
    assert sorted(row for share in shares for row in share.rows[share.mine]) == sorted(alone)


def test_a_step_is_the_next_rows_of_the_stream():
    batches = sampler()
    assert [step.rows.tolist() for step in take_steps(batches, 3)] == batches.stream.take(0, 192).reshape(
        3, 64
    ).tolist()


def test_rows_are_dealt_by_work_and_speed():
    slow, fast = (sampler(global_batch=200, rank=rank, speeds=[1.0, 3.0]).step(0) for rank in (0, 1))
    work = [(1 + LENGTHS[step.rows[step.mine]].sum(axis=1)).sum() for step in (slow, fast)]
    assert work[1] / work[0] == pytest.approx(3, rel=0.05)


def test_a_row_too_long_for_one_process_goes_to_the_other():
    def excluded(lengths):
        return [(row, 0) for row, length in enumerate(lengths.sum(axis=1)) if length > 100]

    step = sampler(rank=0, speeds=[1.0, 1.0], excluded=excluded).step(0)
    assert LENGTHS[step.rows[step.mine]].sum(axis=1).max() <= 100
    assert len(step.mine)


def test_rows_of_unknown_length_are_dealt_evenly():
    members = [StepSampler(100, 10, rank=rank, speeds=[1.0] * 3) for rank in range(3)]
    assert [len(member.step(0).mine) for member in members] == [4, 3, 3]


def test_a_window_holds_the_rows_of_its_steps_and_no_others():
    plain, sorted_ = sampler(), sampler(mix=Mix(5))
    for window in range(3):
        before, after = (take_steps(batches, 5, window * 320) for batches in (plain, sorted_))
        assert sorted(r for s in after for r in s.rows) == sorted(r for s in before for r in s.rows)


def test_steps_of_a_window_have_rows_of_all_lengths():
    means = [
        LENGTHS[step.rows].sum(axis=1).mean()
        for step in take_steps(sampler(rows=1000, global_batch=64, mix=Mix(15)), 15)
    ]
    assert max(means) < 1.5 * min(means)


def test_neighbours_in_a_window_are_alike():
    def spread(batches):
        return np.mean([LENGTHS[step.rows].reshape(8, 8, 2).std(axis=1).mean() for step in take_steps(batches, 15)])

    assert spread(sampler(mix=Mix(15))) < 0.3 * spread(sampler())


def test_a_window_can_be_entered_in_its_middle():
    whole = take_steps(sampler(mix=Mix(5)), 10)
    assert sampler(mix=Mix(5)).step(7 * 64).rows.tolist() == whole[7].rows.tolist()


def test_another_global_batch_goes_on_at_the_same_sample():
    before, after = sampler(global_batch=64), sampler(global_batch=100)
    position = after.resume(before.state(3 * 64))
    assert after.step(position).rows.tolist() == before.stream.take(192, 100).tolist()


def test_a_change_inside_a_window_is_refused_and_at_its_end_accepted():
    old = sampler(mix=Mix(5))
    with pytest.raises(BadOption, match="global_batch=64 and mix='window:5' for 2 more steps"):
        sampler(global_batch=32, mix=Mix(5)).resume(old.state(3 * 64))
    new = sampler(global_batch=48, mix=Mix(2))
    assert new.resume(old.state(5 * 64)) == 320
    rows = [row for step in take_steps(new, 2, 320) for row in step.rows]
    assert sorted(rows) == sorted(old.stream.take(320, 96))


@pytest.mark.parametrize(
    ("change", "said"), [({"rows": 999}, "1000 before, 999 now"), ({"seed": 1}, "0 before, 1 now")]
)
def test_another_data_set_or_seed_is_no_resume(change, said):
    with pytest.raises(BadOption, match=said):
        sampler(**change).resume(sampler().state(64))


@pytest.mark.parametrize("text", ["window", "window:0", "window:-1", "window:x", "sorted", "window:1.5"])
def test_a_wrong_mix_says_what_to_write(text):
    with pytest.raises(BadOption, match="must be none, or window:N"):
        Mix.parse(text)


def test_mixes_as_written():
    assert [Mix.parse(text).window for text in (None, "none", "window:1", "window:50")] == [1, 1, 1, 50]


def test_a_window_needs_lengths():
    with pytest.raises(BadOption, match="needs the lengths of the rows"):
        StepSampler(100, 10, mix=Mix(5))


def test_all_problems_are_reported_at_once():
    with pytest.raises(BadOption, match="global_batch=0 must be at least 1.*has no rows"):
        StepSampler(0, 0)


def test_every_process_gets_a_row():
    with pytest.raises(BadOption, match="less than one row for each of 3 processes"):
        StepSampler(100, 2, speeds=[1.0] * 3)


@settings(max_examples=12)
@example(rows=9, seed=0, number=0)
@given(rows=st.integers(40, 3000), seed=st.integers(0, 2**70), number=st.integers(0, 2**40))
def test_a_pass_holds_every_row_once(rows, seed, number):
    assert sorted(Stream(rows, seed).take(number * rows, rows).tolist()) == list(range(rows))


@settings(max_examples=15)
@given(rows=st.integers(40, 500), start=st.integers(0, 2000), counts=st.lists(st.integers(0, 300), max_size=6))
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
    passes = 1500
    found = Counter(map(tuple, Stream(rows, 0).take(0, rows * passes).reshape(passes, rows).tolist()))
    orders = math.factorial(rows)
    expected = passes / orders
    chi_square = sum((found[order] - expected) ** 2 / expected for order in itertools.permutations(range(rows)))
    assert chi_square < orders - 1 + 4 * math.sqrt(2 * (orders - 1))


def test_the_order_is_frozen():
    """A change here would move every run that is resumed."""
    assert Stream(10, 0).take(0, 20).tolist() == [5, 8, 4, 1, 3, 0, 6, 2, 7, 9, 6, 7, 3, 2, 4, 9, 5, 1, 0, 8]
