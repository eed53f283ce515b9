"""The share of the learning rate at every step of a run, its corners above all."""

import math

import pytest

from brimful.training.options import Schedule, as_steps

CURVES = ("constant", "linear", "cosine", "wsd")


def shares(curve, steps=100, warmup=10, upto=None, **how):
    schedule = Schedule(curve=curve, steps=steps, warmup=warmup, **how)
    return {step: schedule.share(step) for step in range(1, (upto or steps) + 1)}


@pytest.mark.parametrize("curve", CURVES)
def test_the_warm_up_rises_in_a_straight_line_to_all_of_it(curve):
    found = shares(curve)
    assert [found[step] for step in range(1, 11)] == pytest.approx([step / 10 for step in range(1, 11)])


@pytest.mark.parametrize("curve", CURVES)
def test_without_a_warm_up_the_first_step_is_already_on_the_curve(curve):
    first = {"constant": 1.0, "linear": 0.99, "cosine": (1 + math.cos(math.pi / 100)) / 2, "wsd": 1.0}
    assert shares(curve, warmup=0)[1] == pytest.approx(first[curve])


@pytest.mark.parametrize("curve", CURVES)
def test_no_step_of_the_warm_up_is_without_a_rate(curve):
    assert min(shares(curve, steps=5, warmup=5).values()) == pytest.approx(0.2)


@pytest.mark.parametrize("curve", CURVES[1:])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_last_step_has_the_floor_and_later_ones_stay_there(curve, floor):
    found = shares(curve, upto=130, floor=floor)
    assert found[99] > floor
    assert {found[step] for step in range(100, 131)} == {floor}


def test_constant_stays_whole_whatever_the_floor_and_however_long():
    found = shares("constant", upto=130, floor=0.1)
    assert {found[step] for step in range(10, 131)} == {1.0}


def test_linear_is_half_way_down_in_the_middle():
    found = shares("linear", floor=0.2)
    assert found[55] == pytest.approx(0.6)
    assert found[32] - found[33] == pytest.approx(found[88] - found[89])


def test_cosine_is_flat_at_both_ends_and_steep_in_the_middle():
    found = shares("cosine", floor=0.2)
    assert found[55] == pytest.approx(0.6)
    assert found[11] - found[12] < 0.01 * 0.8 < found[55] - found[56]
    assert found[98] - found[99] < 0.01 * 0.8


def test_wsd_is_flat_until_the_last_part_and_then_falls_by_the_root():
    found = shares("wsd", decay=0.2)
    assert {found[step] for step in range(10, 83)} == {1.0}
    assert [found[step] for step in (83, 91, 100)] == pytest.approx([1 - math.sqrt(1 / 18), 1 - math.sqrt(0.5), 0.0])


def test_wsd_may_fall_all_the_way_from_the_warm_up():
    assert shares("wsd", decay=1.0)[11] == pytest.approx(1 - math.sqrt(1 / 90))


@pytest.mark.parametrize("curve", CURVES[1:])
def test_after_the_warm_up_a_share_never_rises(curve):
    found = shares(curve, upto=120)
    assert all(found[step] >= found[step + 1] for step in range(10, 120))


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 3)])
def test_the_shortest_runs_have_shares_too(curve, steps, warmup):
    found = shares(curve, steps=steps, warmup=warmup, upto=steps + 2)
    assert all(0.0 <= share <= 1.0 for share in found.values())


def test_with_more_steps_a_run_follows_the_longer_curve_from_there_on():
    shorter, longer = (Schedule(curve="linear", steps=steps, warmup=10) for steps in (100, 190))
    assert shorter.share(100) == 0.0
    assert longer.share(100) == pytest.approx(0.5)


def test_a_wsd_run_made_longer_before_it_falls_was_never_decayed():
    shorter, longer = (Schedule(curve="wsd", steps=steps, warmup=10) for steps in (100, 200))
    assert [shorter.share(step) for step in range(1, 83)] == [longer.share(step) for step in range(1, 83)]
    assert longer.share(100) == 1.0


@pytest.mark.parametrize(
    ("given", "steps"),
    [(100, 100), ("100", 100), ("3%", 30), (" 2.5 % ", 25), ("0%", 0), (0, 0), (5000, 1000), ("250%", 1000)],
)
def test_a_warm_up_is_given_in_steps_or_as_a_share_of_the_run(given, steps):
    assert as_steps(given, 1000) == steps
