"""Which rows a run reads: shufflings one after the other, whatever else is in the pack."""

import numpy as np
import pytest
import torch

from brimful.molecules.feature_store import Order

from . import made


def read(jobs, shelf, steps, begin=0, batch=16, sides=2):
    """[steps, runs, sides × batch]"""
    order = Order(jobs, shelf, batch, np.full(len(jobs), begin))
    found = []
    for step in range(begin, begin + steps):
        found.append(order.rows(torch.full((len(jobs),), step), sides))
        order.step += 1
    return torch.stack(found)


def sides(found, batch=16):
    """The rows of one run, in the order they were read: ID and OOD."""
    return found[:, :batch].flatten().tolist(), found[:, batch:].flatten().tolist()


@pytest.mark.parametrize("train", [(40, 40), (37, 16), (16, 50), (160, 17)])
def test_each_shuffling_has_every_row_once(train):
    shelf = made.shelf(a=made.rows(train=train))
    found = read([made.job()], shelf, steps=35)[:, 0]
    for rows, side in zip(sides(found), ("id", "ood"), strict=True):
        own = getattr(shelf.rows["a"], side)["train"]
        for begin in range(0, len(rows) - len(own), len(own)):
            assert sorted(rows[begin : begin + len(own)]) == own.tolist()


def test_no_row_is_read_oftener_than_another_by_more_than_one():
    found = read([made.job()], made.shelf(a=made.rows(train=(37, 23))), steps=50)[:, 0]
    for rows in sides(found):
        counts = np.unique(rows, return_counts=True)[1]
        assert counts.max() - counts.min() <= 1


def test_shufflings_differ_by_seed_by_side_and_by_number():
    shelf = made.shelf(a=made.rows(train=(32, 32)))
    found = read([made.job(0), made.job(1)], shelf, steps=4)
    begin = torch.tensor([shelf.rows["a"].id["train"][0], shelf.rows["a"].ood["train"][0]])
    orders = [
        tuple(rows[first : first + 32] - begin[side])
        for run in range(2)
        for side, rows in enumerate(torch.tensor(sides(found[:, run])))
        for first in (0, 32)
    ]
    assert len({tuple(map(int, order)) for order in orders}) == 8


def test_a_run_reads_the_same_rows_in_any_company():
    a, b = made.rows(train=(40, 30)), made.rows(1, train=(90, 64))
    crowd = [made.job(0, data="b"), made.job(3, "bce"), made.job(1, data="b"), made.job(0)]
    together = read(crowd, made.shelf(b=b, a=a), steps=20)
    for place in (1, 3):
        alone = read([crowd[place]], made.shelf(a=a), steps=20)[:, 0]
        assert torch.equal(together[:, place] - len(b.features), alone)


@pytest.mark.parametrize("begin", [1, 7, 12])
def test_a_resumed_run_reads_on(begin):
    jobs, shelf = [made.job(0), made.job(1)], made.shelf(a=made.rows(train=(37, 23)))
    whole = read(jobs, shelf, steps=20)
    assert torch.equal(read(jobs, shelf, steps=20 - begin, begin=begin), whole[begin:])


def test_runs_of_one_pack_stand_at_different_steps():
    jobs, shelf = [made.job(0), made.job(1)], made.shelf(a=made.rows(train=(37, 23)))
    whole = read(jobs, shelf, steps=12)
    order = Order(jobs, shelf, 16, np.array([9, 2]))
    found = order.rows(torch.tensor([9, 2]), 2)
    assert torch.equal(found[0], whole[9, 0]) and torch.equal(found[1], whole[2, 1])


def test_an_epoch_goes_over_the_larger_side_that_the_run_sees():
    shelf = made.shelf(a=made.rows(train=(40, 100), classes=(2,)))
    jobs = [made.job(0, name, classes=(2,)) for name in ("classify", "classify-oe")]
    assert Order(jobs, shelf, 16, np.zeros(2, dtype=np.int64)).an_epoch.tolist() == [3, 7]


def test_the_steps_given_are_not_changed():
    step = np.zeros(1, dtype=np.int64)
    order = Order([made.job()], made.shelf(), 16, step)
    order.step += 1
    assert step[0] == 0
