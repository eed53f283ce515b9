"""AUROC, AUPR and FPR95 as scikit-learn computes them, ties included; mean, deviation and interval over seeds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from brimful.errors import BadData
from brimful.molecules.metrics import all_metrics, aupr, auroc, fpr95, over_seeds, paired_difference, roc

# Few distinct values, so that most examples have ties within a side and across both.
few = st.lists(st.sampled_from([-1.5, -0.0, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=40)


def drawn(seed, ties):
    rng = np.random.default_rng(seed)
    inside, outside = rng.normal(size=500), rng.normal(0.7, 1.3, size=301)
    return (np.round(inside, 1), np.round(outside, 1)) if ties else (inside, outside)


def as_sklearn(inside, outside, positive):
    truth = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    scores = np.r_[inside, outside]
    return (truth, scores) if positive == "ood" else (1 - truth, -scores)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("positive", ["ood", "id"])
def test_the_figures_are_scikit_learns(positive, ties):
    inside, outside = drawn(0, ties)
    truth, scores = as_sklearn(inside, outside, positive)
    false_rate, true_rate, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    assert aupr(inside, outside, positive) == pytest.approx(average_precision_score(truth, scores), abs=1e-12)
    assert fpr95(inside, outside, positive) == false_rate[np.argmax(true_rate >= 0.95)]


@settings(max_examples=60)
@given(few, few)
def test_auroc_is_the_count_of_pairs(inside, outside):
    won = sum((o > i) + (o == i) / 2 for i in inside for o in outside)
    assert auroc(inside, outside) == won / (len(inside) * len(outside))


@settings(max_examples=60)
@given(few, few, st.sampled_from(["ood", "id"]))
def test_aupr_takes_every_threshold_once(inside, outside, positive):
    wanted, others = (outside, inside) if positive == "ood" else ([-v for v in inside], [-v for v in outside])
    area = reached = 0.0
    for threshold in sorted(set(wanted + others), reverse=True):
        hits, false = sum(v >= threshold for v in wanted), sum(v >= threshold for v in others)
        area += (hits / len(wanted) - reached) * hits / (hits + false)
        reached = hits / len(wanted)
    assert aupr(inside, outside, positive) == pytest.approx(area, abs=1e-12)


@settings(max_examples=60)
@given(few, few)
def test_fpr95_is_the_smallest_false_share_with_95_percent_found(inside, outside):
    def least(wanted, others, called):
        shares = [
            sum(called(v, t) for v in others) / len(others)
            for t in wanted
            if 100 * sum(called(v, t) for v in wanted) >= 95 * len(wanted)
        ]
        return min(shares)

    assert fpr95(inside, outside, "ood") == least(outside, inside, lambda value, t: value >= t)
    assert fpr95(inside, outside, "id") == least(inside, outside, lambda value, t: value <= t)


def test_95_percent_of_20_are_19():
    outside = [-5.0, *range(1, 20)]
    assert fpr95([0.5] * 10, outside, "ood") == 0
    assert fpr95([1.0] * 10, outside, "ood") == 1


def test_swapping_the_sides_and_the_sign_swaps_the_conventions():
    inside, outside = drawn(1, ties=True)
    here, there = all_metrics(inside, outside), all_metrics(-outside, -inside)
    assert here["auroc"] == pytest.approx(there["auroc"])
    assert here["aupr_ood"] == pytest.approx(there["aupr_id"]) and here["fpr95_id"] == there["fpr95_ood"]


@pytest.mark.parametrize("positive", ["ood", "id"])
def test_the_plain_names_are_those_of_the_positive_side(positive):
    found = all_metrics(*drawn(2, ties=False), positive)
    assert found["aupr"] == found[f"aupr_{positive}"] and found["fpr95"] == found[f"fpr95_{positive}"]
    assert found["aupr_ood"] != found["aupr_id"] and found["fpr95_ood"] != found["fpr95_id"]


def test_equal_scores_separate_nothing():
    found = all_metrics([1.0] * 30, [1.0] * 10)
    assert (found["auroc"], found["aupr_ood"], found["aupr_id"], found["fpr95"]) == (0.5, 0.25, 0.75, 1)


def test_an_infinite_score_has_a_rank():
    assert auroc([0.0, -np.inf], [np.inf, 1.0]) == 1
    assert all_metrics([0.0, np.inf], [np.inf, 1.0])["auroc"] == 0.625


@pytest.mark.parametrize("metric", [auroc, aupr, fpr95, all_metrics])
def test_an_empty_side_is_named(metric):
    with pytest.raises(BadData, match="no out-of-distribution scores"):
        metric([1.0], [])
    with pytest.raises(BadData, match="no in-distribution scores"):
        metric([], [1.0])


@pytest.mark.parametrize("metric", [auroc, aupr, fpr95, all_metrics])
def test_a_score_that_is_not_a_number_is_counted(metric):
    with pytest.raises(BadData, match="2 of 3 out-of-distribution scores are NaN"):
        metric([1.0], [np.nan, 0.0, np.nan])


@pytest.mark.parametrize("positive", ["ood", "id"])
def test_the_roc_curve_is_scikit_learns(positive):
    inside, outside = drawn(3, ties=True)
    false_rate, true_rate, _ = roc_curve(*as_sklearn(inside, outside, positive), drop_intermediate=False)
    ours = roc(inside, outside, positive)
    np.testing.assert_allclose(ours[0], false_rate)
    np.testing.assert_allclose(ours[1], true_rate)


# -- over seeds --------------------------------------------------------------------------------------------------------


def by_seed(values):
    return dict(enumerate(values))


NOISE = np.random.default_rng(0).normal(size=10)


def test_the_deviation_is_the_sample_deviation():
    found = over_seeds(by_seed([1.0, 2.0, 6.0]))
    assert (found.mean, found.seeds) == (3, 3)
    assert found.sd == pytest.approx(7**0.5)


def test_the_interval_is_the_percentile_bootstrap():
    rng = np.random.default_rng(1)
    means = NOISE[rng.integers(0, 10, size=(200_000, 10))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    found = over_seeds(by_seed(NOISE)).interval
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02)


def test_the_interval_of_two_seeds_is_their_range():
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


def test_noise_that_both_methods_share_cancels():
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


def test_a_deterministic_method_is_compared_with_every_seed():
    found = paired_difference({0: 0.9, 1: 0.8}, 0.5)
    assert found.seeds == 2 and found.mean == pytest.approx(0.35)
    assert (found.interval.low, found.interval.high) == pytest.approx((0.3, 0.4))
    assert paired_difference(0.5, {0: 0.9, 1: 0.8}).mean == pytest.approx(-0.35)


def test_two_deterministic_methods_differ_without_spread():
    found = paired_difference(0.75, 0.5)
    assert (found.mean, found.sd, found.interval) == (0.25, None, None)
