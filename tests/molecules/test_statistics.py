"""Mean, deviation and bootstrap interval over seeds, and of a difference seed by seed."""

import numpy as np
import pytest

from brimful.molecules.metrics import over_seeds, paired_difference


def by_seed(values):
    return dict(enumerate(values))


NOISE = np.random.default_rng(0).normal(size=10)


def test_the_deviation_is_of_a_sample():
    found = over_seeds(by_seed([1.0, 2.0, 6.0]))
    assert (found.mean, found.seeds) == (3, 3)
    assert found.sd == pytest.approx(7**0.5)


def test_the_interval_is_the_percentile_bootstrap():
    rng = np.random.default_rng(1)
    means = NOISE[rng.integers(0, 10, size=(200_000, 10))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    found = over_seeds(by_seed(NOISE)).interval
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02)


def test_of_two_seeds_the_interval_reaches_from_one_to_the_other():
    found = over_seeds({0: 0.5, 1: 0.75}).interval
    assert (found.low, found.high) == (0.5, 0.75)


def test_the_interval_is_the_same_every_time_and_in_any_order():
    found = over_seeds(by_seed(NOISE))
    assert over_seeds(dict(reversed(by_seed(NOISE).items()))) == found


def test_one_seed_has_no_spread():
    found = over_seeds({3: 0.8})
    assert (found.mean, found.sd, found.interval, found.seeds) == (0.8, None, None, 1)


def test_a_deterministic_method_has_no_spread():
    found = over_seeds({0: 0.8, 1: 0.8}, deterministic=True)
    assert (found.mean, found.sd, found.interval, found.seeds) == (0.8, None, None, 2)


def test_equal_values_have_no_interval():
    found = over_seeds({0: 1.0, 1: 1.0, 2: 1.0})
    assert found.sd == 0 and found.interval is None


def test_noise_that_both_methods_share_falls_out():
    found = paired_difference(by_seed(NOISE + 0.1 + 0.01 * NOISE[::-1]), by_seed(NOISE))
    assert found.mean == pytest.approx(0.1 + 0.01 * NOISE.mean())
    assert found.interval.high - found.interval.low < 0.02
    alone = over_seeds(by_seed(NOISE)).interval
    assert alone.high - alone.low > 0.5


def test_a_difference_draws_the_same_seeds_for_both():
    first, second = NOISE, np.square(NOISE)
    assert paired_difference(by_seed(first), by_seed(second)) == over_seeds(by_seed(first - second))


def test_only_seeds_of_both_are_compared():
    found = paired_difference({0: 0.9, 1: 0.8, 5: 0.1}, {1: 0.7, 0: 0.7, 2: 0.0})
    assert found.seeds == 2 and found.mean == pytest.approx(0.15)


def test_no_seed_in_common_is_no_difference():
    assert paired_difference({0: 0.9}, {1: 0.7}) is None


def test_a_deterministic_method_stands_beside_every_seed():
    found = paired_difference({0: 0.9, 1: 0.8}, 0.5)
    assert found.seeds == 2 and found.mean == pytest.approx(0.35)
    assert (found.interval.low, found.interval.high) == pytest.approx((0.3, 0.4))
    assert paired_difference(0.5, {0: 0.9, 1: 0.8}).mean == pytest.approx(-0.35)


def test_two_deterministic_methods_differ_without_spread():
    found = paired_difference(0.75, 0.5)
    assert (found.mean, found.sd, found.interval) == (0.25, None, None)
