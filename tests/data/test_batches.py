"""Steps: the same rows whatever the processes, plans and workers; every row once a pass; a position that is a number."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.data.batches import Batches, Mix
from brimful.errors import BadOption

LENGTHS = np.random.default_rng(0).integers(1, 200, (1000, 2))


def made(rows=1000, global_batch=64, **options):
    return Batches(rows, global_batch, lengths=LENGTHS[:rows].__getitem__, **options)


def taken(batches, steps, start=0):
    return [batches.step(start + number * batches.global_batch) for number in range(steps)]


@settings(max_examples=20)
@given(
    rows=st.integers(1, 300),
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
    members = [made(rows, global_batch, rank=rank, speeds=speeds, **options) for rank in range(processes)]
    for number in range(whole):
        if number == resume_at:  # all leave, and others come in their place
            state = members[0].state(position)
            members = [made(rows, global_batch, rank=rank, speeds=speeds, **options) for rank in range(processes)]
            (position,) = {member.resume(state) for member in members}
        shares = [member.step(position) for member in members]
        for share in shares:
            found.update(share.rows[share.mine].tolist())
        position += global_batch
    assert found == Counter(members[0].stream.take(0, position).tolist())


@given(processes=st.integers(1, 5), number=st.integers(0, 30))
def test_a_step_holds_the_same_rows_on_any_number_of_processes(processes, number):
    alone = made().step(number * 64).rows
    members = [made(rank=rank, speeds=[1.0] * processes) for rank in range(processes)]
    shares = [member.step(number * 64) for member in members]
    assert sorted(row for share in shares for row in share.rows[share.mine]) == sorted(alone)


def test_a_step_is_the_next_rows_of_the_stream():
    batches = made()
    assert [step.rows.tolist() for step in taken(batches, 3)] == batches.stream.take(0, 192).reshape(3, 64).tolist()


def test_rows_are_dealt_by_work_and_speed():
    slow, fast = (made(global_batch=200, rank=rank, speeds=[1.0, 3.0]).step(0) for rank in (0, 1))
    work = [(1 + LENGTHS[step.rows[step.mine]].sum(axis=1)).sum() for step in (slow, fast)]
    assert work[1] / work[0] == pytest.approx(3, rel=0.05)


def test_a_row_too_long_for_one_process_goes_to_the_other():
    def barred(lengths):
        return [(row, 0) for row, length in enumerate(lengths.sum(axis=1)) if length > 100]

    step = made(rank=0, speeds=[1.0, 1.0], barred=barred).step(0)
    assert LENGTHS[step.rows[step.mine]].sum(axis=1).max() <= 100
    assert len(step.mine)


def test_rows_of_unknown_length_are_dealt_evenly():
    members = [Batches(100, 10, rank=rank, speeds=[1.0] * 3) for rank in range(3)]
    assert [len(member.step(0).mine) for member in members] == [4, 3, 3]


def test_a_window_holds_the_rows_of_its_steps_and_no_others():
    plain, sorted_ = made(), made(mix=Mix(5))
    for window in range(3):
        before, after = (taken(batches, 5, window * 320) for batches in (plain, sorted_))
        assert sorted(r for s in after for r in s.rows) == sorted(r for s in before for r in s.rows)


def test_steps_of_a_window_have_rows_of_all_lengths():
    means = [LENGTHS[step.rows].sum(axis=1).mean() for step in taken(made(rows=1000, global_batch=64, mix=Mix(15)), 15)]
    assert max(means) < 1.5 * min(means)


def test_neighbours_in_a_window_are_alike():
    def spread(batches):
        return np.mean([LENGTHS[step.rows].reshape(8, 8, 2).std(axis=1).mean() for step in taken(batches, 15)])

    assert spread(made(mix=Mix(15))) < 0.3 * spread(made())


def test_a_window_can_be_entered_in_its_middle():
    whole = taken(made(mix=Mix(5)), 10)
    assert made(mix=Mix(5)).step(7 * 64).rows.tolist() == whole[7].rows.tolist()


def test_another_global_batch_goes_on_at_the_same_sample():
    before, after = made(global_batch=64), made(global_batch=100)
    position = after.resume(before.state(3 * 64))
    assert after.step(position).rows.tolist() == before.stream.take(192, 100).tolist()


def test_a_change_inside_a_window_is_refused_and_at_its_end_taken():
    old = made(mix=Mix(5))
    with pytest.raises(BadOption, match="keep --global-batch 64 --mix window:5 for 2 more steps"):
        made(global_batch=32, mix=Mix(5)).resume(old.state(3 * 64))
    new = made(global_batch=48, mix=Mix(2))
    assert new.resume(old.state(5 * 64)) == 320
    rows = [row for step in taken(new, 2, 320) for row in step.rows]
    assert sorted(rows) == sorted(old.stream.take(320, 96))


@pytest.mark.parametrize(
    ("change", "said"), [({"rows": 999}, "1000 before, 999 now"), ({"seed": 1}, "0 before, 1 now")]
)
def test_another_data_set_or_seed_is_no_resume(change, said):
    with pytest.raises(BadOption, match=said):
        made(**change).resume(made().state(64))


@pytest.mark.parametrize("text", ["window", "window:0", "window:-1", "window:x", "sorted", "window:1.5"])
def test_a_mix_that_is_none_says_what_to_write(text):
    with pytest.raises(BadOption, match="write none, or window:N"):
        Mix.parse(text)


def test_mixes_as_written():
    assert [Mix.parse(text).window for text in (None, "none", "window:1", "window:50")] == [1, 1, 1, 50]
    assert "once a pass" in Mix.parse("window:50").sentence


def test_a_window_needs_lengths():
    with pytest.raises(BadOption, match="does not tell its rows' lengths"):
        Batches(100, 10, mix=Mix(5))


def test_all_problems_are_told_at_once():
    with pytest.raises(BadOption, match="--global-batch 0.*no rows to draw from"):
        Batches(0, 0)


def test_every_process_gets_a_row():
    with pytest.raises(BadOption, match="3 processes need at least a row each"):
        Batches(100, 2, speeds=[1.0] * 3)
