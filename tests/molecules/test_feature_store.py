"""Features on the device once, fingerprints on a CPU as lists of their bits, and the rows that each run reads."""

import numpy as np
import pytest
import torch

from brimful.molecules.feature_store import BatchOrder, Bits, FeatureStore, SumOfRows
from brimful.molecules.heads import Rows

from . import support


def of(features, labels=None):
    return Rows(features=features, labels=labels, id={}, ood={})


def store_of(*rows):
    return FeatureStore({str(place): one for place, one in enumerate(rows)}, support.CPU)


def test_datasets_are_concatenated():
    one, two = support.rows(), support.rows(1, train=(50, 60))
    both = support.store(a=one, b=two)
    assert both.first == {"a": 0, "b": len(one.features)}
    assert torch.equal(both.take(torch.tensor([[0], [len(one.features) + 5]]))[1, 0], two.features[5])


def test_labels_are_unknown_where_a_dataset_has_fewer_or_none():
    two = torch.tensor([[0, 1]])
    found = store_of(of(torch.zeros(2, 3)), of(torch.zeros(1, 3), two), of(torch.zeros(1, 3), two[:, :1])).labels
    assert found.tolist() == [[-1, -1], [-1, -1], [0, 1], [0, -1]]


@pytest.mark.parametrize(
    ("features", "sparse"),
    [
        (torch.zeros(4, 30, dtype=torch.uint8), True),
        (torch.eye(30, dtype=torch.uint8), True),
        (torch.eye(30, dtype=torch.uint8) * 2, False),  # counts, not bits
        (torch.ones(4, 30, dtype=torch.uint8), False),  # too many
        (torch.eye(30), False),
    ],
)
def test_only_sparse_fingerprints_are_kept_as_bits(features, sparse):
    assert store_of(of(features)).sparse is sparse


def test_dense_rows_become_floats():
    features = torch.arange(30, dtype=torch.uint8).view(5, 6)
    found = store_of(of(features)).take(torch.tensor([[1, 1], [4, 0]]))
    assert found.dtype == torch.float32 and torch.equal(found[1, 0], features[4].float())


def test_bits_come_in_the_order_of_the_rows():
    features = support.rows(bits=True).features
    features[[0, 9]] = 0  # a molecule without a set bit
    chosen = torch.tensor([[9, 3, 0], [3, 7, 9]])
    found = store_of(of(features)).take(chosen)
    assert isinstance(found, Bits)
    built = torch.zeros(6, features.shape[1])
    for row in range(6):
        built[row, found.columns[found.offsets[row] : found.offsets[row + 1]]] = 1
    assert torch.equal(built, features[chosen.flatten()].float())


def test_the_sum_of_rows_and_its_gradient_equal_the_product():
    features = support.rows(bits=True).features
    features[[3, 5]] = 0
    chosen = torch.tensor([[9, 3, 0, 9], [3, 7, 9, 5]])  # one of them twice, and the last one empty
    bits = store_of(of(features)).take(chosen)
    weights = torch.randn(2, features.shape[1], 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ours, theirs = SumOfRows.apply(weights, bits.columns, bits.offsets), features[chosen].float() @ weights
    slopes = torch.linspace(-1, 1, theirs.numel()).view_as(theirs)
    assert torch.allclose(ours, theirs, atol=1e-6)
    found = [torch.autograd.grad(out, weights, slopes)[0] for out in (ours, theirs)]
    assert torch.allclose(*found, atol=1e-6)


def read(jobs, store, steps, begin=0, batch=16, sides=2):
    """[steps, runs, sides × batch]"""
    order = BatchOrder(jobs, store, batch, np.full(len(jobs), begin))
    found = []
    for step in range(begin, begin + steps):
        found.append(order.rows(torch.full((len(jobs),), step), sides))
        order.step += 1
    return torch.stack(found)


def sides(found, batch=16):
    """The rows of one run, in the order they were read: ID and OOD."""
    return found[:, :batch].flatten().tolist(), found[:, batch:].flatten().tolist()


@pytest.mark.parametrize("train", [(40, 40), (37, 16), (16, 50), (160, 17)])
def test_each_permutation_has_every_row_once(train):
    store = support.store(a=support.rows(train=train))
    found = read([support.job()], store, steps=35)[:, 0]
    for rows, side in zip(sides(found), ("id", "ood"), strict=True):
        own = getattr(store.rows["a"], side)["train"]
        for begin in range(0, len(rows) - len(own), len(own)):
            assert sorted(rows[begin : begin + len(own)]) == own.tolist()


def test_rows_are_read_equally_often():
    found = read([support.job()], support.store(a=support.rows(train=(37, 23))), steps=50)[:, 0]
    for rows in sides(found):
        counts = np.unique(rows, return_counts=True)[1]
        assert counts.max() - counts.min() <= 1


def test_permutations_differ_by_seed_side_and_number():
    store = support.store(a=support.rows(train=(32, 32)))
    found = read([support.job(0), support.job(1)], store, steps=4)
    begin = torch.tensor([store.rows["a"].id["train"][0], store.rows["a"].ood["train"][0]])
    orders = [
        tuple(rows[first : first + 32] - begin[side])
        for run in range(2)
        for side, rows in enumerate(torch.tensor(sides(found[:, run])))
        for first in (0, 32)
    ]
    assert len({tuple(map(int, order)) for order in orders}) == 8


def test_a_run_reads_the_same_rows_in_any_pack():
    a, b = support.rows(train=(40, 30)), support.rows(1, train=(90, 64))
    crowd = [support.job(0, data="b"), support.job(3, "bce"), support.job(1, data="b"), support.job(0)]
    together = read(crowd, support.store(b=b, a=a), steps=20)
    for place in (1, 3):
        alone = read([crowd[place]], support.store(a=a), steps=20)[:, 0]
        assert torch.equal(together[:, place] - len(b.features), alone)


@pytest.mark.parametrize("begin", [1, 7, 12])
def test_a_resumed_run_reads_the_next_rows(begin):
    jobs, store = [support.job(0), support.job(1)], support.store(a=support.rows(train=(37, 23)))
    whole = read(jobs, store, steps=20)
    assert torch.equal(read(jobs, store, steps=20 - begin, begin=begin), whole[begin:])


def test_runs_of_one_pack_may_be_at_different_steps():
    jobs, store = [support.job(0), support.job(1)], support.store(a=support.rows(train=(37, 23)))
    whole = read(jobs, store, steps=12)
    order = BatchOrder(jobs, store, 16, np.array([9, 2]))
    found = order.rows(torch.tensor([9, 2]), 2)
    assert torch.equal(found[0], whole[9, 0]) and torch.equal(found[1], whole[2, 1])


def test_an_epoch_reads_the_larger_side_that_the_run_sees():
    store = support.store(a=support.rows(train=(40, 100), classes=(2,)))
    jobs = [support.job(0, name, classes=(2,)) for name in ("classify", "classify-oe")]
    assert BatchOrder(jobs, store, 16, np.zeros(2, dtype=np.int64)).steps_per_epoch.tolist() == [3, 7]


def test_the_argument_is_not_changed():
    step = np.zeros(1, dtype=np.int64)
    order = BatchOrder([support.job()], support.store(), 16, step)
    order.step += 1
    assert step[0] == 0
