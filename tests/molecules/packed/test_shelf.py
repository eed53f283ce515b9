"""Features on the device once; fingerprints on a CPU as lists of their bits."""

import pytest
import torch

from brimful.molecules.feature_store import Bits, Shelf, SumOfRows
from brimful.molecules.job import Rows

from . import made


def of(features, labels=None):
    return Rows(features=features, labels=labels, id={}, ood={})


def shelf(*rows):
    return Shelf({str(place): one for place, one in enumerate(rows)}, made.CPU)


def test_datasets_lie_one_after_the_other():
    one, two = made.rows(), made.rows(1, train=(50, 60))
    both = made.shelf(a=one, b=two)
    assert both.first == {"a": 0, "b": len(one.features)}
    assert torch.equal(both.take(torch.tensor([[0], [len(one.features) + 5]]))[1, 0], two.features[5])


def test_labels_are_unknown_where_a_dataset_has_fewer_or_none():
    two = torch.tensor([[0, 1]])
    found = shelf(of(torch.zeros(2, 3)), of(torch.zeros(1, 3), two), of(torch.zeros(1, 3), two[:, :1])).labels
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
def test_only_thin_fingerprints_are_kept_as_bits(features, sparse):
    assert shelf(of(features)).sparse is sparse


def test_dense_rows_are_floats_whatever_they_were():
    features = torch.arange(30, dtype=torch.uint8).view(5, 6)
    found = shelf(of(features)).take(torch.tensor([[1, 1], [4, 0]]))
    assert found.dtype == torch.float32 and torch.equal(found[1, 0], features[4].float())


def test_bits_of_chosen_rows_are_theirs_in_order():
    features = made.rows(bits=True).features
    features[[0, 9]] = 0  # a molecule without a set bit
    chosen = torch.tensor([[9, 3, 0], [3, 7, 9]])
    found = shelf(of(features)).take(chosen)
    assert isinstance(found, Bits)
    built = torch.zeros(6, features.shape[1])
    for row in range(6):
        built[row, found.places[found.offsets[row] : found.offsets[row + 1]]] = 1
    assert torch.equal(built, features[chosen.flatten()].float())


def test_the_sum_of_rows_is_the_product_and_so_are_its_gradients():
    features = made.rows(bits=True).features
    features[[3, 5]] = 0
    chosen = torch.tensor([[9, 3, 0, 9], [3, 7, 9, 5]])  # one of them twice, and the last one empty
    bits = shelf(of(features)).take(chosen)
    weights = torch.randn(2, features.shape[1], 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ours, theirs = SumOfRows.apply(weights, bits.places, bits.offsets), features[chosen].float() @ weights
    slopes = torch.linspace(-1, 1, theirs.numel()).view_as(theirs)
    assert torch.allclose(ours, theirs, atol=1e-6)
    found = [torch.autograd.grad(out, weights, slopes)[0] for out in (ours, theirs)]
    assert torch.allclose(*found, atol=1e-6)
