"""Rows are split over all their lengths into micro-batches that fit and dealt evenly to ranks, and none is lost."""

import random

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from brimful.memory.split import deal, deal_rows, split_by_memory

rows, ranks = st.integers(0, 100_000), st.integers(1, 300)
shapes = st.integers(0, 2).flatmap(lambda lengths: st.lists(st.tuples(*[st.integers(0, 60)] * lengths), max_size=50))
budgets, max_rows_values = st.integers(120, 5000), st.one_of(st.none(), st.integers(1, 20))
overheads = st.one_of(st.none(), st.integers(0, 2000))
works = st.lists(st.integers(1, 1000), min_size=1, max_size=40)
speeds = st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0]), min_size=1, max_size=6)


def cost(rows, shape, *, whole=False):
    """A step's memory in small: something fixed, and for each row its lengths and a little of their squares."""
    return 100 + rows * (2 + sum(shape) + sum(length**2 for length in shape) / 1000)


def padded(shapes, group):
    return tuple(max(lengths) for lengths in zip(*(shapes[row] for row in group), strict=True))


def work(shapes, groups):
    return sum(len(group) * max(1, sum(padded(shapes, group))) for group in groups)


def padding(shapes, groups):
    return 1 - sum(map(sum, shapes)) / work(shapes, groups)


def two_lengths(seed=0):
    """256 sources and targets that have nothing to do with each other: short questions, answers of any length."""
    rng = random.Random(seed)
    return [(min(180, 1 + int(rng.lognormvariate(2.7, 0.8))), rng.randint(10, 187)) for _ in range(256)]


def filled(shapes, order, budget):
    """Micro-batches filled in this order, each as far as it goes."""
    groups = [[]]
    for row in order:
        group = [*groups[-1], row]
        groups[-1:] = [group] if cost(len(group), padded(shapes, group)) <= budget else [groups[-1], [row]]
    return groups


def partitions(items):
    """Every way to put items into groups."""
    if not items:
        yield []
        return
    for groups in partitions(items[1:]):
        yield [[items[0]], *groups]
        for place, group in enumerate(groups):
            yield [*groups[:place], [items[0], *group], *groups[place + 1 :]]


@given(shapes, budgets, max_rows_values, overheads)
def test_every_row_is_in_one_micro_batch(shapes, budget, most, overhead):
    groups = split_by_memory(shapes, cost, budget, max_rows=most, overhead=overhead)
    assert sorted(row for group in groups for row in group) == list(range(len(shapes)))


@given(shapes, budgets, max_rows_values, overheads)
def test_a_micro_batch_of_more_than_one_row_keeps_to_the_budget(shapes, budget, most, overhead):
    groups = split_by_memory(shapes, cost, budget, max_rows=most, overhead=overhead)
    assert all(cost(len(group), padded(shapes, group)) <= budget for group in groups if len(group) > 1)


@given(shapes, budgets, st.integers(1, 20), overheads)
def test_no_micro_batch_has_more_rows_than_allowed(shapes, budget, most, overhead):
    assert all(len(group) <= most for group in split_by_memory(shapes, cost, budget, max_rows=most, overhead=overhead))


@given(shapes, budgets, max_rows_values, overheads)
def test_rows_ascend_within_a_micro_batch(shapes, budget, most, overhead):
    groups = split_by_memory(shapes, cost, budget, max_rows=most, overhead=overhead)
    assert all(group == sorted(group) for group in groups)


@given(shapes, budgets, max_rows_values, overheads)
def test_the_costliest_micro_batch_comes_first(shapes, budget, most, overhead):
    groups = split_by_memory(shapes, cost, budget, max_rows=most, overhead=overhead)
    costs = [cost(len(group), padded(shapes, group)) for group in groups]
    assert costs == sorted(costs, reverse=True)


def test_of_micro_batches_that_cost_the_same_the_larger_comes_first():
    groups = split_by_memory([(1,), (9,), (5,)], lambda rows, shape, whole=False: 10.0, 10, max_rows=1)
    assert groups == [[1], [2], [0]]


@given(st.integers(1, 300), st.integers(1, 60), st.integers(0, 2), max_rows_values)
def test_identical_rows_come_in_the_fewest_micro_batches(count, capacity, lengths, most):
    groups = split_by_memory([(7,) * lengths] * count, lambda rows, shape, whole=False: rows, capacity, max_rows=most)
    assert len(groups) == -(-count // min(capacity, most or capacity))


@given(st.integers(1, 300), st.integers(1, 60), st.integers(0, 2))
def test_identical_rows_come_in_even_runs(count, capacity, lengths):
    groups = split_by_memory([(7,) * lengths] * count, lambda rows, shape, whole=False: rows, capacity)
    assert [row for group in groups for row in group] == list(range(count))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_50_rows_that_fit_34_at_a_time_come_as_25_and_25():
    groups = split_by_memory([(256, 256)] * 50, lambda rows, shape, whole=False: rows, 34)
    assert groups == [list(range(25)), list(range(25, 50))]


@given(st.lists(st.tuples(st.integers(0, 30)), min_size=1, max_size=6), st.integers(135, 400))
@settings(max_examples=40)
def test_one_length_is_split_into_the_fewest_micro_batches_with_the_least_padding(shapes, budget):
    assume(all(cost(1, shape) <= budget for shape in shapes))
    every = [
        (len(groups), work(shapes, groups))
        for groups in partitions(list(range(len(shapes))))
        if all(cost(len(group), padded(shapes, group)) <= budget for group in groups)
    ]
    groups = split_by_memory(shapes, cost, budget)
    assert (len(groups), work(shapes, groups)) == min(every)


@given(st.lists(st.tuples(st.integers(0, 30)), min_size=1, max_size=6), st.integers(150, 400), st.integers(0, 60))
@example([(1,), (0,), (0,), (0,)], 400, 2)
@settings(max_examples=40)
def test_one_length_is_split_at_the_least_overhead_and_work(shapes, budget, overhead):
    every = [
        overhead * len(groups) + work(shapes, groups)
        for groups in partitions(list(range(len(shapes))))
        if all(cost(len(group), padded(shapes, group)) <= budget for group in groups)
    ]
    groups = split_by_memory(shapes, cost, budget, overhead=overhead)
    assert overhead * len(groups) + work(shapes, groups) == min(every)


@pytest.mark.parametrize("budget", [3000, 5000, 7000, 12000, 16000])
@pytest.mark.parametrize("axis", [0, 1])
def test_two_lengths_need_less_padding_and_no_more_micro_batches_than_sorted_by_one(budget, axis):
    for shapes in map(two_lengths, range(4)):
        groups = split_by_memory(shapes, cost, budget)
        by_one = filled(shapes, sorted(range(256), key=lambda row: shapes[row][axis], reverse=True), budget)
        assert len(groups) <= len(by_one)
        assert padding(shapes, groups) < 0.85 * padding(shapes, by_one)


@pytest.mark.parametrize(("budget", "micro_batches", "share"), [(3000, 16, 0.215), (7000, 8, 0.265), (16000, 4, 0.35)])
def test_padding_of_256_rows_of_two_lengths(budget, micro_batches, share):
    shapes = two_lengths()
    groups = split_by_memory(shapes, cost, budget)
    assert len(groups) == micro_batches
    assert padding(shapes, groups) < share


def test_cheap_micro_batches_leave_less_than_5_percent_of_padding():
    shapes = two_lengths()
    assert padding(shapes, split_by_memory(shapes, cost, 16000, overhead=20)) < 0.05


def test_256_rows_take_fewer_than_150_evaluations_of_the_memory_model():
    asked = []

    def counted(rows, shape, *, whole=False):
        asked.append((rows, shape, whole))
        return cost(rows, shape)

    split_by_memory(two_lengths(), counted, 6000)
    assert len(asked) < 150


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=30), st.integers(200, 2000), overheads)
def test_rows_too_large_for_any_micro_batch_come_alone_and_change_nothing_else(shapes, budget, overhead):
    assume(all(cost(1, shape) <= budget for shape in shapes))
    others = split_by_memory(shapes, cost, budget, overhead=overhead)
    spoilt = split_by_memory([(5000, 1), *shapes, (1, 5000)], cost, budget, overhead=overhead)
    last = len(shapes) + 1
    assert [last] in spoilt and [0] in spoilt
    assert [[row - 1 for row in group] for group in spoilt if group not in ([0], [last])] == others


def held(gradients):
    """The cost of one per row, and of the gradients unless the step is whole."""
    return lambda rows, shape, whole=False: rows + (0 if whole else gradients)


def test_a_whole_step_is_one_micro_batch_where_no_two_would_fit():
    assert split_by_memory([(4,), (3,), (9,)], held(10), 5) == [[0, 1, 2]]


def test_a_whole_step_is_kept_whole_rather_than_split_beyond_the_budget():
    assert split_by_memory([(1,), (1,), (100,)], held(10), 5, overhead=1) == [[0, 1, 2]]


def test_a_whole_step_is_kept_whole_where_splitting_it_saves_no_more_than_the_overhead():
    assert split_by_memory([(3,), (1,)], held(1), 2, overhead=1) == [[0], [1]]
    assert split_by_memory([(3,), (1,)], held(1), 2, overhead=2) == [[0, 1]]


def test_a_whole_step_of_more_rows_than_allowed_is_split():
    assert split_by_memory([()] * 4, lambda rows, shape, whole=False: 0.0, 1, max_rows=2) == [[0, 1], [2, 3]]


def test_a_step_that_fits_whole_is_split_where_that_saves_more_than_the_overhead():
    shapes = [(100,), (1,), (1,), (1,)]
    assert split_by_memory(shapes, cost, 1e9, overhead=296) == [[0], [1, 2, 3]]
    assert split_by_memory(shapes, cost, 1e9, overhead=297) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("overhead", [100, 300, 1000])
def test_an_overhead_is_weighed_against_the_padding(overhead):
    for shapes in map(two_lengths, range(4)):
        few, best = split_by_memory(shapes, cost, 16000), split_by_memory(shapes, cost, 16000, overhead=overhead)
        assert len(best) > len(few)
        assert overhead * len(best) + work(shapes, best) < 0.97 * (overhead * len(few) + work(shapes, few))


@given(shapes, budgets)
def test_micro_batches_that_cost_nothing_leave_no_padding(shapes, budget):
    groups = split_by_memory(shapes, cost, budget, overhead=0)
    assert work(shapes, groups) == sum(max(1, sum(shape)) for shape in shapes)


@given(shapes, budgets, max_rows_values, overheads)
def test_the_same_rows_are_always_split_the_same(shapes, budget, most, overhead):
    once = split_by_memory(shapes, cost, budget, max_rows=most, overhead=overhead)
    assert split_by_memory(list(shapes), cost, budget, max_rows=most, overhead=overhead) == once


@given(rows, ranks)
@settings(deadline=None)
def test_every_row_is_dealt_once(rows, ranks):
    assert sum(deal(rows, ranks)) == rows


@given(rows, ranks)
@settings(deadline=None)
def test_every_rank_has_a_share(rows, ranks):
    assert len(deal(rows, ranks)) == ranks


@given(rows, ranks)
@settings(deadline=None)
def test_shares_differ_by_one_row_at_most(rows, ranks):
    assert max(deal(rows, ranks)) - min(deal(rows, ranks)) <= 1


@given(rows, ranks)
@settings(deadline=None)
def test_the_first_rank_has_the_largest_share(rows, ranks):
    assert list(deal(rows, ranks)) == sorted(deal(rows, ranks), reverse=True)


@pytest.mark.parametrize(
    ("rows", "ranks", "shares"),
    [(250, 3, (84, 83, 83)), (256, 1, (256,)), (2, 4, (1, 1, 0, 0)), (8, 4, (2, 2, 2, 2))],
)
def test_rows_dealt_by_hand(rows, ranks, shares):
    assert deal(rows, ranks) == shares


def excluded_pairs(work, speeds):
    return st.sets(st.tuples(st.integers(0, len(work) - 1), st.integers(0, len(speeds) - 1)))


@given(works, speeds, st.data())
def test_every_row_goes_to_one_rank(work, speeds, data):
    dealt = deal_rows(work, speeds, data.draw(excluded_pairs(work, speeds)))
    assert len(dealt) == len(speeds)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(work)))


@given(works, speeds, st.data())
def test_rows_ascend_within_a_rank(work, speeds, data):
    dealt = deal_rows(work, speeds, data.draw(excluded_pairs(work, speeds)))
    assert all(rows == sorted(rows) for rows in dealt)


@given(works, speeds)
def test_no_rank_would_finish_earlier_without_its_least_row(work, speeds):
    assume(len(set(work)) > 1)
    dealt = deal_rows(work, speeds)
    loads = [sum(work[row] for row in rows) for rows in dealt]
    for rows, load, speed in zip(dealt, loads, speeds, strict=True):
        least = min((work[row] for row in rows), default=0)
        others = [(other + least) / at for other, at in zip(loads, speeds, strict=True)]
        assert not rows or load / speed <= min(others) + 1e-9


@given(works, st.integers(1, 6))
def test_equal_ranks_finish_within_one_row_of_the_mean(work, ranks):
    loads = [sum(work[row] for row in rows) for rows in deal_rows(work, [1.0] * ranks)]
    assert max(loads) - sum(loads) / ranks <= max(work)


@given(st.integers(0, 500), st.integers(1, 8))
def test_equal_rows_on_equal_ranks_are_dealt_in_even_runs(count, ranks):
    dealt = deal_rows([3.0] * count, [2.0] * ranks)
    assert [row for rows in dealt for row in rows] == list(range(count))
    assert tuple(map(len, dealt)) == deal(count, ranks)


@given(st.integers(0, 500), speeds)
def test_equal_rows_are_dealt_in_runs_in_proportion_to_the_speeds(count, speeds):
    dealt = deal_rows([1.0] * count, speeds)
    assert [row for rows in dealt for row in rows] == list(range(count))
    assert all(abs(len(rows) - count * speed / sum(speeds)) < 1 for rows, speed in zip(dealt, speeds, strict=True))


def test_what_is_left_over_goes_to_the_largest_remainders():
    assert [len(rows) for rows in deal_rows([1.0] * 10, [1.0, 1.0, 1.4])] == [3, 3, 4]


@given(works, speeds, st.data())
def test_a_row_is_only_dealt_where_it_fits(work, speeds, data):
    excluded = data.draw(excluded_pairs(work, speeds))
    for rank, dealt in enumerate(deal_rows(work, speeds, excluded)):
        for row in dealt:
            assert (row, rank) not in excluded or {(row, other) for other in range(len(speeds))} <= excluded


def test_a_row_that_fits_nowhere_is_dealt_as_if_it_did():
    assert deal_rows([5, 1, 1], [1, 2], {(0, 0), (0, 1)}) == deal_rows([5, 1, 1], [1, 2])


def test_the_longest_rows_are_dealt_first_and_ties_go_to_the_first_rank():
    assert deal_rows([1, 4, 3, 4, 2], [1, 1]) == [[1, 2], [0, 3, 4]]


def test_a_rank_of_twice_the_speed_takes_twice_the_work():
    assert deal_rows([2, 1, 2, 1, 2, 1], [1, 2]) == [[2, 3], [0, 1, 4, 5]]
