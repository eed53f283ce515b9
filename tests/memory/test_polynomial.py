"""A fit to few points finds the terms that are there, invents none, and never falls."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.memory.model import Polynomial, candidates, fit_polynomial

ROWS_ONLY = candidates(0, lengths_vary=False)
ONE_LENGTH = candidates(1, lengths_vary=True)
TWO_LENGTHS = candidates(2, lengths_vary=True)
SMALL_ROWS = [(1,), (2,), (4,), (8,), (16,)]
GRID = [(rows, length) for rows in (1, 2, 4, 8) for length in (32, 64, 128)]

sizes = st.integers(10**6, 10**9)
"""Bytes that a term contributes at the largest point: a megabyte to a gigabyte."""
large = st.integers(10**8, 10**9)
"""None so small beside another that the points could do without it."""


def fitted(truth: dict[tuple[int, ...], float], points, terms) -> Polynomial:
    return fit_polynomial(points, [Polynomial(truth)(point) for point in points], terms)


def test_a_polynomial_is_the_sum_of_its_terms():
    assert Polynomial({(0, 0): 5.0, (1, 1): 2.0, (1, 2): 0.5})((3, 4)) == 5 + 2 * 3 * 4 + 0.5 * 3 * 16


def test_without_lengths_the_terms_are_powers_of_the_rows():
    assert ROWS_ONLY == [(0,), (1,), (2,)]


def test_lengths_that_never_vary_are_not_modelled():
    assert candidates(2, lengths_vary=False) == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


def test_the_terms_of_one_length():
    assert set(ONE_LENGTH) == {(0, 0), (1, 1), (1, 0), (1, 2), (0, 2), (0, 1), (2, 0)}


def test_two_lengths_also_meet_each_other():
    assert {(1, 1, 1), (0, 1, 1)} <= set(TWO_LENGTHS)


@pytest.mark.parametrize("terms", [ROWS_ONLY, ONE_LENGTH, TWO_LENGTHS])
def test_the_constant_comes_first_the_square_of_the_rows_last_and_none_twice(terms):
    assert set(terms[0]) == {0}
    assert terms[-1] == (2, *terms[0][1:])
    assert len(set(terms)) == len(terms)


@given(large, st.one_of(st.just(0), large), st.one_of(st.just(0), large))
@settings(deadline=None)
def test_coefficients_in_the_rows_are_recovered_from_exact_values(constant, linear, square):
    truth = {(0,): constant, (1,): linear // 16, (2,): square // 256}
    found = fitted(truth, SMALL_ROWS, ROWS_ONLY)
    assert {powers: found.terms.get(powers, 0.0) for powers in truth} == pytest.approx(truth, rel=1e-6, abs=1e-3)


@given(sizes, sizes, st.sets(st.integers(1, 64), min_size=2, max_size=6))
@settings(deadline=None)
def test_a_linear_truth_never_yields_a_square(constant, slope, rows):
    found = fitted({(0,): constant, (1,): slope}, [(n,) for n in rows], ROWS_ONLY)
    assert (2,) not in found.terms
    assert found((10_000,)) == pytest.approx(constant + slope * 10_000, rel=1e-6)


def test_a_square_is_recognised_and_holds_a_thousandfold_beyond():
    found = fitted({(0,): 50_000_000, (1,): 20_000, (2,): 300}, [(n,) for n in (256, 512, 1024, 2048)], ROWS_ONLY)
    assert found.terms == pytest.approx({(0,): 50_000_000, (1,): 20_000, (2,): 300}, rel=1e-6)
    assert found((2_000_000,)) == pytest.approx(50e6 + 20e3 * 2e6 + 300 * 4e12, rel=1e-6)


def test_a_square_is_not_told_from_a_line_by_two_points():
    found = fitted({(0,): 10, (2,): 10}, [(1,), (4,)], ROWS_ONLY)
    assert (2,) not in found.terms


def test_rounding_to_allocator_blocks_yields_no_square():
    rounded = [(20_000_000 + 1_234_567 * rows + 511) // 512 * 512 for rows in (1, 2, 4, 8)]
    found = fit_polynomial([(rows,) for rows in (1, 2, 4, 8)], rounded, ROWS_ONLY)
    assert (2,) not in found.terms
    assert found((8000,)) == pytest.approx(20_000_000 + 1_234_567 * 8000, rel=0.001)


def test_values_that_do_not_vary_are_a_constant():
    assert fit_polynomial(SMALL_ROWS, [7e6] * 5, ROWS_ONLY).terms == {(0,): pytest.approx(7e6)}


def test_values_that_fall_are_a_constant_among_them():
    found = fit_polynomial([(1,), (2,), (4,)], [9e6, 8e6, 7e6], ROWS_ONLY)
    assert list(found.terms) == [(0,)]
    assert 7e6 <= found((1,)) <= 9e6


@given(st.lists(st.integers(1, 10**10), min_size=5, max_size=5))
@settings(deadline=None)
def test_a_fit_to_any_values_never_falls_with_the_rows(values):
    found = fit_polynomial(SMALL_ROWS, values, ROWS_ONLY)
    predicted = [found((rows,)) for rows in range(1, 100)]
    assert predicted == sorted(predicted)


@given(st.lists(st.integers(1, 10**10), min_size=len(GRID), max_size=len(GRID)))
@settings(deadline=None, max_examples=50)
def test_a_fit_to_any_values_has_no_negative_term(values):
    assert all(weight > 0 for weight in fit_polynomial(GRID, values, ONE_LENGTH).terms.values())


@given(large, large, st.sampled_from(ONE_LENGTH[1:]))
@settings(deadline=None)
def test_any_single_term_beside_the_constant_is_recovered(constant, size, term):
    weight = size / Polynomial({term: 1.0})(GRID[-1])
    found = fitted({(0, 0): constant, term: weight}, GRID, ONE_LENGTH)
    assert found.terms == pytest.approx({(0, 0): constant, term: weight}, rel=1e-6)


@given(large, large, large)
@settings(deadline=None)
def test_attention_is_recovered_linear_and_square_in_the_length(constant, linear, square):
    truth = {(0, 0): constant, (1, 1): linear / (8 * 128), (1, 2): square / (8 * 128**2)}
    found = fitted(truth, GRID, ONE_LENGTH)
    assert found((64, 512)) == pytest.approx(Polynomial(truth)((64, 512)), rel=1e-3)


LADDER = [(2, 64), (4, 64), (2, 128), (4, 128), (2, 256), (4, 256), (8, 256)]
"""What a survey of rows up to 256 long reads first."""
TRUTHS = {
    "1, rows*L, rows*L^2, L^2": {(0, 0): 845_699_078, (1, 2): 4416, (1, 1): 644_708, (0, 2): 13_832},
    "1, rows, L": {(0, 0): 721_000_000, (1, 0): 62_000_000, (0, 1): 4_200_000},
    "1, rows, rows*L^2": {(0, 0): 500_000_000, (1, 0): 60_000_000, (1, 2): 2000},
    "1, L, rows^2": {(0, 0): 500_000_000, (0, 1): 5_000_000, (2, 0): 5_000_000},
}


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS.keys())
def test_exact_values_of_a_few_terms_are_reproduced(truth):
    found = fitted(truth, GRID, ONE_LENGTH)
    assert [found(point) for point in GRID] == pytest.approx([Polynomial(truth)(point) for point in GRID], rel=1e-3)


LADDER_TRUTHS = {
    "1, L, rows*L": {(0, 0): 692_297_661, (0, 1): 700_019, (1, 1): 321_663},
    "1, rows, L, rows^2": {(0, 0): 487_828_327, (1, 0): 119_324_287, (0, 1): 2_996_337, (2, 0): 7_012_961},
    "1, rows*L^2, L^2, rows^2": {(0, 0): 533_867_119, (1, 2): 1849, (0, 2): 1135, (2, 0): 5_833_949},
}


@pytest.mark.parametrize("truth", LADDER_TRUTHS.values(), ids=LADDER_TRUTHS.keys())
def test_seven_small_probes_tell_of_four_times_the_rows(truth):
    found = fitted(truth, LADDER, ONE_LENGTH)
    assert [found(point) for point in LADDER] == pytest.approx([Polynomial(truth)(p) for p in LADDER], rel=1e-3)
    assert found((32, 256)) == pytest.approx(Polynomial(truth)((32, 256)), rel=1e-3)


def test_two_lengths_are_told_apart():
    truth = {(0, 0, 0): 500_000_000, (1, 1, 0): 900_000, (1, 0, 1): 2_500_000}
    points = [(rows, *lengths) for rows in (2, 4) for lengths in itertools.product((16, 64), repeat=2)]
    found = fitted(truth, points, TWO_LENGTHS)
    assert found.terms == pytest.approx(truth, rel=1e-6)


def test_a_reading_of_little_weight_hardly_bends_the_fit():
    points, values = [(1,), (2,), (4,), (8,)], [100e6, 14e6, 18e6, 26e6]
    found = fit_polynomial(points, values, ROWS_ONLY, [1e-6, 1, 1, 1])
    assert found((64,)) == pytest.approx(10e6 + 2e6 * 64, rel=1e-3)
