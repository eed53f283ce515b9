"""What the micro-batches add up to: sums and counts by name, in double precision, read once."""

import math
import weakref
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brimful.step.gradients import LossTotals
from brimful.task import Loss


def total_of(*losses: Loss) -> tuple[float, float]:
    totals = LossTotals()
    for loss in losses:
        totals.add({"loss": loss})
    return totals.read()[0]["loss"]


def test_a_step_without_micro_batches_adds_up_to_nothing():
    assert LossTotals().read() == ({}, {})


def test_one_micro_batch_is_its_own_total():
    assert total_of(Loss(torch.tensor(6.0), 3)) == (6.0, 3.0)


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 1000), st.booleans()), min_size=1, max_size=20))
def test_sums_and_counts_add_up_whether_counts_are_tensors_or_numbers(parts):
    losses = [
        Loss(torch.tensor(float(total)), torch.tensor(count) if is_tensor else count)
        for total, count, is_tensor in parts
    ]
    assert total_of(*losses) == (sum(total for total, _, _ in parts), sum(count for _, count, _ in parts))


@pytest.mark.parametrize("nothing", [0, torch.tensor(0)])
def test_a_mean_over_nothing_does_not_spoil_the_rest(nothing):
    assert total_of(Loss(torch.tensor(float("nan")), nothing), Loss(torch.tensor(6.0), 3)) == (6.0, 3.0)


def test_a_loss_that_is_no_number_is_not_hidden():
    assert math.isnan(total_of(Loss(torch.tensor(float("nan")), 2), Loss(torch.tensor(6.0), 3))[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_a_count_may_be_a_tensor_of_any_kind(dtype):
    one, other = torch.tensor(1).to(dtype), torch.tensor(3)
    assert total_of(Loss(torch.tensor(2.0), one), Loss(torch.tensor(2.0), other)) == (4.0, 4.0)


def test_a_count_need_not_be_a_whole_number():
    assert total_of(Loss(torch.tensor(1.0), 0.25), Loss(torch.tensor(1.0), torch.tensor(0.5))) == (2.0, 0.75)


def test_sums_of_half_precision_are_added_in_double():
    """256 + 1 is 256 in bf16."""
    large, small = (torch.tensor(value, dtype=torch.bfloat16) for value in (256.0, 1.0))
    assert total_of(Loss(large, 1), *[Loss(small, 1)] * 9) == (265.0, 10.0)


def test_sums_of_single_precision_are_added_in_double():
    assert total_of(Loss(torch.tensor(2.0**24), 1), *[Loss(torch.tensor(1.0), 1)] * 3) == (2.0**24 + 3, 4.0)


def test_counts_of_half_precision_are_added_in_double():
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    assert total_of(Loss(torch.tensor(0.0), one * 256), *[Loss(torch.tensor(0.0), one)] * 5)[1] == 261.0


def test_counts_beyond_single_precision_are_exact():
    assert (
        total_of(Loss(torch.tensor(0.0), torch.tensor(2**24)), Loss(torch.tensor(0.0), torch.tensor(1)))[1] == 2**24 + 1
    )


def test_sums_of_several_precisions_are_added():
    sums = [torch.tensor(1.5).bfloat16(), torch.tensor(0.25), torch.tensor(2.0).double()]
    assert total_of(*[Loss(one, 1) for one in sums]) == (3.75, 3.0)


def test_sums_and_counts_of_one_element_are_numbers():
    assert total_of(Loss(torch.tensor([3.0]), torch.tensor([[2]])), Loss(torch.tensor([[1.0]]), 1)) == (4.0, 3.0)


def test_terms_are_added_by_name():
    totals = LossTotals()
    totals.add({"tokens": Loss(torch.tensor(10.0), 5), "router": Loss(torch.tensor(1.0), torch.tensor(2))})
    totals.add({"tokens": Loss(torch.tensor(20.0), torch.tensor(7)), "router": Loss(torch.tensor(2.0), 2)})
    assert totals.read()[0] == {"tokens": (30.0, 12.0), "router": (3.0, 4.0)}


def test_a_term_may_be_missing_from_some_micro_batches():
    totals = LossTotals()
    totals.add({"tokens": Loss(torch.tensor(10.0), 5)})
    totals.add({"router": Loss(torch.tensor(2.0), 2), "tokens": Loss(torch.tensor(1.0), 1)})
    assert totals.read()[0] == {"tokens": (11.0, 6.0), "router": (2.0, 2.0)}


def test_what_is_read_are_plain_numbers():
    assert [type(value) for value in total_of(Loss(torch.tensor(1.0), torch.tensor(2)))] == [float, float]


def test_a_sum_that_is_not_a_number_stays_so():
    total, count = total_of(Loss(torch.tensor(float("nan")), 1), Loss(torch.tensor(1.0), 1))
    assert (total != total, count) == (True, 2.0)


class Watched(torch.autograd.Function):
    """Keeps a tensor for its backward, and tells when that is let go."""

    held: ClassVar[list[weakref.ref]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x * 2
        Watched.held.append(weakref.ref(ctx.kept))
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.kept * grad


@pytest.mark.parametrize(
    "part",
    ["sum", "count"],
)
def test_no_graph_is_kept_alive(part):
    weight, totals = torch.ones(3, requires_grad=True), LossTotals()
    Watched.held.clear()
    totals.add({"loss": Loss(**{"sum": torch.tensor(1.0), "count": 1.0, part: Watched.apply(weight)})})
    assert Watched.held[0]() is None


def test_a_count_that_is_part_of_a_graph_can_be_read():
    weight = torch.ones(3, requires_grad=True)
    assert total_of(Loss(weight.sum(), weight.sum())) == (3.0, 3.0)


def test_nothing_is_read_before_it_is_asked_for():
    """On the meta device nothing can be read at all."""
    totals = LossTotals()
    for _ in range(3):
        totals.add({"loss": Loss(torch.ones((), device="meta"), torch.ones((), device="meta"))})


def test_reading_twice_gives_the_same():
    totals = LossTotals()
    totals.add({"loss": Loss(torch.tensor(2.0), torch.tensor(3))})
    assert totals.read() == totals.read()
