"""One polynomial per phase, the peak their maximum; a fit to few points finds the terms that are there and never falls."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.memory.model import (
    FIRST_PHASES,
    MICRO_PHASES,
    MemoryModel,
    Polynomial,
    Probe,
    candidates,
    fit_polynomial,
)

# Measured on one H200: T5 of 187.7 M parameters, bf16 autocast, AdamW (foreach), 256+256 tokens a row. Bytes.
H200 = {
    1: {"forward": 3298012160, "head": 3326221312, "early": 3290265600, "late": 3276826112, "optimizer": 3843326976},
    4: {"forward": 4841305088, "head": 4891870720, "early": 4648567808, "late": 3893412352, "optimizer": 3905080320},
    8: {"forward": 6867340288, "head": 6968471040, "early": 6433891328, "late": 4673761792, "optimizer": 3952948224},
    16: {
        "forward": 10942089216,
        "head": 11144579584,
        "early": 10029727744,
        "late": 6253239296,
        "optimizer": 3988019200,
    },
    32: {
        "forward": 18947918848,
        "head": 19352899072,
        "early": 17078191104,
        "late": 9316770816,
        "optimizer": 3890093056,
    },
}
H200_RESERVED = {1: 4424990720, 4: 5127536640, 8: 7142899712, 16: 11460935680, 32: 20369637376}
SHAPE = (256, 256)


def h200(*rows: int, reserved: bool = False) -> list[Probe]:
    return [
        Probe(rows=n, shape=SHAPE, phases=H200[n], reserved_bytes=H200_RESERVED[n] if reserved else None) for n in rows
    ]


def probes(rows: list[int], **phases) -> list[Probe]:
    """Readings of phases given as functions of the rows."""
    return [Probe(rows=n, shape=(), phases={name: round(f(n)) for name, f in phases.items()}) for n in rows]


def off(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1)


def test_4_8_and_16_rows_of_an_h200_predict_32_to_one_and_a_half_percent():
    model = MemoryModel.fit(h200(4, 8, 16))
    assert off(model.peak_bytes(32, SHAPE), 19352899072) < 0.015


def test_1_and_4_rows_of_an_h200_predict_32_to_one_and_a_half_percent():
    model = MemoryModel.fit(h200(1, 4))
    assert off(model.peak_bytes(32, SHAPE), 19352899072) < 0.015


def test_a_line_through_the_peaks_of_1_and_4_rows_is_off_by_more_than_20_percent():
    at_1, at_4 = (max(H200[rows].values()) for rows in (1, 4))
    line = at_1 + (at_4 - at_1) / 3 * 31
    assert off(line, 19352899072) > 0.20


def test_reserved_bytes_of_an_h200_are_predicted_to_four_percent_by_a_ratio():
    model = MemoryModel.fit(h200(4, 8, 16, reserved=True))
    assert off(model.cost_bytes(32, SHAPE), H200_RESERVED[32]) < 0.04


def test_the_peak_is_the_highest_phase_at_every_size():
    model = MemoryModel.fit(probes([1, 2, 4, 8], forward=lambda n: 100 + 50 * n, optimizer=lambda n: 1000))
    assert [model.peak_bytes(rows, ()) for rows in (1, 10, 18, 19, 100)] == [1000, 1000, 1000, 1050, 5100]


def test_the_square_of_the_rows_is_recognised():
    sizes = [256, 512, 1024, 2048]
    model = MemoryModel.fit(probes(sizes, forward=lambda n: 50e6 + 20e3 * n + 300 * n * n, optimizer=lambda n: 60e6))
    assert off(model.peak_bytes(16384, ()), 50e6 + 20e3 * 16384 + 300 * 16384**2) < 1e-4


def test_rows_and_lengths_are_modelled_together():
    def truth(rows: int, length: int) -> int:
        return 10**8 + 40_000 * rows * length + 60 * rows * length**2

    read = [
        Probe(rows=n, shape=(length,), phases={"forward": truth(n, length)})
        for n in (2, 4, 8)
        for length in (64, 128, 256)
    ]
    assert off(MemoryModel.fit(read).peak_bytes(64, (512,)), truth(64, 512)) < 1e-3


def test_a_kink_where_another_phase_sets_the_peak_hardly_bends_the_fit():
    def forward(rows: int) -> float:
        return 100e6 + 10e6 * rows + (40e6 if rows == 16 else 0)

    model = MemoryModel.fit(probes([2, 4, 8, 16, 32, 64], forward=forward, optimizer=lambda n: 400e6))
    assert off(model.peak_bytes(256, ()), 100e6 + 10e6 * 256) < 0.005


def test_a_fit_above_a_peak_that_was_read_gives_way_to_one_where_every_reading_counts_alike():
    def forward(rows: int) -> float:
        return 1e6 + 20e6 * rows + (100e6 if rows >= 4 else 0)

    read = probes([1, 2, 4, 8, 16], forward=forward, optimizer=lambda n: 100e6)
    points, terms = [(probe.rows,) for probe in read], candidates(0, lengths_vary=False)
    alike = fit_polynomial(points, [probe.phases["forward"] for probe in read], terms)
    assert MemoryModel.fit(read).phases["forward"] == alike


def test_a_phase_that_only_some_readings_have_is_fitted_to_those():
    read = [
        *probes([2, 4], first_forward=lambda n: 5 + 10 * n, forward=lambda n: 1000 + 10 * n, optimizer=lambda n: 900),
        *probes([8, 16], forward=lambda n: 1000 + 10 * n),
    ]
    model = MemoryModel.fit(read)
    assert model.peak_bytes(100, ()) == 2000
    assert model.peak_bytes(100, (), whole=True) == 1005


def both(n: int) -> list[Probe]:
    """Readings of full steps: the first micro-batch holds no gradients, later ones hold 500 bytes of them."""
    return probes(
        [1, 2, 4, n], first_forward=lambda n: 100 + 10 * n, forward=lambda n: 600 + 10 * n, optimizer=lambda n: 650
    )


def test_a_whole_step_holds_no_gradients_in_its_forward():
    model = MemoryModel.fit(both(64))
    assert (model.peak_bytes(64, (), whole=True), model.peak_bytes(64, ())) == (740, 1240)


def test_a_whole_step_still_has_its_optimizer():
    assert MemoryModel.fit(both(64)).peak_bytes(1, (), whole=True) == 650


def test_where_only_whole_steps_were_read_any_step_is_predicted_as_whole():
    model = MemoryModel.fit(probes([1, 2, 4], first_forward=lambda n: 100 + 10 * n, optimizer=lambda n: 50))
    assert model.peak_bytes(8, ()) == model.peak_bytes(8, (), whole=True) == 180


def test_where_only_later_micro_batches_were_read_a_whole_step_is_predicted_like_them():
    model = MemoryModel.fit(probes([1, 2, 4], forward=lambda n: 100 + 10 * n, head=lambda n: 90 + 10 * n))
    assert model.peak_bytes(8, (), whole=True) == model.peak_bytes(8, ()) == 180


def test_the_optimizer_alone_does_not_stand_for_a_whole_step():
    model = MemoryModel.fit(h200(4, 8, 16))
    assert model.peak_bytes(32, SHAPE, whole=True) > 0.9 * 19352899072


def test_a_whole_step_is_never_predicted_above_a_cut_one():
    read = probes([1, 2, 4], first_forward=lambda n: 900 * n, forward=lambda n: 500 + 10 * n, optimizer=lambda n: 1)
    model = MemoryModel.fit(read)
    assert all(model.peak_bytes(rows, (), whole=True) <= model.peak_bytes(rows, ()) for rows in range(1, 50))


def test_an_exact_fit_has_no_margin_and_no_error():
    model = MemoryModel.fit(probes([1, 2, 4, 8], forward=lambda n: 100 + 50 * n, optimizer=lambda n: 1000))
    assert (model.margin, model.error) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))


@given(st.lists(st.tuples(st.integers(10**6, 10**10), st.integers(10**6, 10**10)), min_size=3, max_size=6))
@settings(deadline=None)
def test_no_reading_near_the_top_lies_above_the_model(peaks):
    read = [
        Probe(rows=2**index, shape=(), phases={"forward": forward, "optimizer": optimizer})
        for index, (forward, optimizer) in enumerate(peaks)
    ]
    model, top = MemoryModel.fit(read), max(probe.peak_bytes for probe in read)
    for probe in read:
        if probe.peak_bytes >= top / 2:
            assert model.peak_bytes(probe.rows, ()) >= probe.peak_bytes - 1


def test_a_reading_above_the_line_near_the_top_lifts_the_model():
    model = MemoryModel.fit(probes([1, 2, 4, 8, 10], forward=lambda n: 1e6 + 1e6 * n + (n == 8) * 1e6))
    assert model.margin > 1.01
    assert model.peak_bytes(8, ()) >= 10e6


def test_a_reading_above_the_line_far_from_the_top_does_not():
    model = MemoryModel.fit(probes([1, 2, 50, 100], forward=lambda n: 1e6 + 1e6 * n + (n == 1) * 1e6))
    assert model.margin == pytest.approx(1.0, abs=0.005)


def test_the_error_is_the_worst_miss_on_the_readings():
    model = MemoryModel.fit(probes([1, 2], forward=lambda n: {1: 200, 2: 100}[n]))
    predicted = model.phases["forward"]((1,))
    assert model.error == pytest.approx(max(off(predicted, 200), off(predicted, 100)))
    assert model.error > 0.3


def test_an_error_known_from_before_is_kept():
    assert MemoryModel.fit(h200(4, 8, 16), error=0.07).error == 0.07


def test_the_reserved_ratio_is_that_of_the_largest_readings():
    read = [
        Probe(rows=1, shape=(), phases={"forward": 100}, reserved_bytes=900),
        Probe(rows=8, shape=(), phases={"forward": 800}, reserved_bytes=840),
        Probe(rows=10, shape=(), phases={"forward": 1000}, reserved_bytes=1030),
    ]
    assert MemoryModel.fit(read).reserved_ratio == 1.05


def test_nothing_reserved_costs_what_is_allocated():
    model = MemoryModel.fit(h200(4, 8, 16))
    assert model.cost_bytes(32, SHAPE) == model.peak_bytes(32, SHAPE)


def test_one_reading_is_predicted_as_it_was_read():
    assert MemoryModel.fit(h200(4)).peak_bytes(4, SHAPE) == max(H200[4].values())


phase_names = st.sampled_from(["optimizer", *FIRST_PHASES, *MICRO_PHASES])


@st.composite
def models(draw) -> MemoryModel:
    """Any model over rows and one length that fitting might give."""
    weight = st.floats(0, 1e9, allow_subnormal=False)
    powers = st.tuples(st.integers(0, 2), st.integers(0, 2))
    phase = st.dictionaries(powers, weight, max_size=4).map(Polynomial)
    reading = st.builds(
        Probe,
        rows=st.integers(1, 9),
        shape=st.tuples(st.integers(1, 9)),
        phases=st.dictionaries(phase_names, st.integers(1, 2**40), min_size=1),
        reserved_bytes=st.none() | st.integers(1, 2**40),
    )
    return MemoryModel(
        phases={"forward": draw(phase), **draw(st.dictionaries(phase_names, phase))},
        margin=draw(st.floats(1, 1.3)),
        reserved_ratio=draw(st.floats(1, 1.3)),
        error=draw(st.floats(0, 1)),
        probes=tuple(draw(st.lists(reading, max_size=3))),
    )


@given(models())
@settings(deadline=None)
def test_a_model_comes_back_from_json_as_it_was(model):
    assert MemoryModel.from_json(json.loads(json.dumps(model.to_json()))) == model


def test_a_fitted_model_predicts_the_same_after_json():
    model = MemoryModel.fit(h200(1, 4, 8, 16, reserved=True))
    again = MemoryModel.from_json(json.loads(json.dumps(model.to_json())))
    assert [again.cost_bytes(n, SHAPE) for n in range(1, 99)] == [model.cost_bytes(n, SHAPE) for n in range(1, 99)]


@given(models(), st.integers(1, 50), st.integers(1, 50), st.booleans())
@settings(deadline=None)
def test_the_cost_never_falls_with_the_rows(model, one, other, whole):
    few, many = sorted((one, other))
    assert model.cost_bytes(few, (7,), whole=whole) <= model.cost_bytes(many, (7,), whole=whole)


@given(models(), st.floats(0, 1e13), st.integers(1, 3000))
@settings(deadline=None)
def test_the_largest_fits_and_one_more_would_not(model, budget, most):
    rows = model.largest((7,), budget, most)
    assert 0 <= rows <= most
    assert rows == 0 or model.cost_bytes(rows, (7,), whole=rows == most) <= budget
    assert rows == most or model.cost_bytes(rows + 1, (7,), whole=rows + 1 == most) > budget


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 255])
def test_the_largest_at_the_cost_of_some_rows_is_these_rows_and_one_byte_less_is_one_row_less(rows):
    read = [
        replace(probe, phases={"head": probe.phases["head"], "forward": probe.phases["forward"]})
        for probe in h200(8, 16, 32, reserved=True)
    ]
    model = MemoryModel.fit(read)
    cost = model.cost_bytes(rows, SHAPE)
    assert model.largest(SHAPE, cost, 256) == rows
    assert model.largest(SHAPE, cost - 1, 256) == rows - 1


def test_the_last_row_fits_where_the_step_is_whole():
    model = MemoryModel.fit(both(64))
    whole = model.cost_bytes(64, (), whole=True)
    assert model.largest((), whole, 64) == 64
    assert model.largest((), whole, 65) == 14  # 600 + 10 × 14 = 740, with gradients held


def test_nothing_fits_a_budget_below_one_row():
    assert MemoryModel.fit(h200(4, 8, 16)).largest(SHAPE, 10**9, 256) == 0


def test_merged_readings_keep_the_higher_of_each_phase():
    one = Probe(rows=4, shape=(9,), phases={"forward": 10, "head": 30}, reserved_bytes=99)
    other = Probe(rows=4, shape=(9,), phases={"forward": 20, "optimizer": 5})
    merged = one.merged(other)
    assert merged.phases == {"forward": 20, "head": 30, "optimizer": 5}
    assert (merged.rows, merged.shape) == (4, (9,))


@pytest.mark.parametrize(
    ("before", "after", "kept"), [(99, None, 99), (None, 70, 70), (99, 70, 70), (None, None, None)]
)
def test_merged_readings_keep_the_reserved_bytes_that_are_known_and_the_later_of_two(before, after, kept):
    one, other = (Probe(rows=4, shape=(), phases={"head": 10}, reserved_bytes=n) for n in (before, after))
    assert one.merged(other).reserved_bytes == kept


@pytest.mark.parametrize(("reserved", "cost"), [(None, 30), (45, 45), (20, 30)])
def test_a_reading_costs_its_reserved_bytes_where_they_are_known_and_never_less_than_its_peak(reserved, cost):
    assert Probe(rows=1, shape=(), phases={"forward": 10, "head": 30}, reserved_bytes=reserved).cost_bytes == cost


def test_a_first_micro_batch_read_at_equal_lengths_only_is_known_at_others_too():
    """It is the later one less the gradients held there. Fitted alone it followed one length only."""

    def later(rows, source, target):
        return 5_000_000 + rows * (2_000 * source + 30_000 * target)

    both = [(2, (16, 16)), (2, (64, 64)), (8, (64, 64))]
    others = [(4, (64, 16)), (4, (16, 64)), (4, (32, 64))]
    probes = [
        Probe(
            rows=rows,
            shape=shape,
            phases={"first_forward": later(rows, *shape) - 900_000, "forward": later(rows, *shape)},
        )
        for rows, shape in both
    ] + [Probe(rows=rows, shape=shape, phases={"forward": later(rows, *shape)}) for rows, shape in others]
    model = MemoryModel.fit(probes)
    assert model.peak_bytes(66, (29, 186), whole=True) == pytest.approx(later(66, 29, 186) - 900_000, rel=0.01)
    assert model.peak_bytes(66, (29, 186)) == pytest.approx(later(66, 29, 186), rel=0.01)


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


def test_packed_rows_of_one_shape_predict_rows_of_others_by_their_tokens():
    """A run packs rows of any length, also after a plan that had no time for a second one."""
    readings = [Probe(rows=n, shape=(20, 30), phases={"forward": 1000 + 100 * n}) for n in (1, 4)]
    model = MemoryModel.fit(readings, packed=True)
    assert model.peak_bytes(2, (20, 30)) == 1200
    assert model.peak_bytes(1, (40, 60)) == 1200
    assert model.peak_bytes(1, (20, 130)) == 1300
