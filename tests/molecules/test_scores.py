"""Scores: higher for what looks out of distribution, fitted on training molecules only."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf
from sklearn.neighbors import LocalOutlierFactor

from brimful.errors import BadData, BadOption, MissingExtra
from brimful.molecules import scores as distance
from brimful.molecules.metrics import auroc
from brimful.molecules.scores import RANGES, classifier_scores, distance_scores, option_problems, shrunk_covariance
from brimful.molecules.spec import METHODS

DISTANCES = ("mahalanobis", "knn", "lof")


def cloud(rows, seed=0, columns=6, shift=0.0):
    return (np.random.default_rng(seed).normal(size=(rows, columns)) + shift).astype(np.float32)


def bits(rows, seed=0, columns=64, share=0.2):
    return (np.random.default_rng(seed).random((rows, columns)) < share).astype(np.uint8)


def standardised(x, train):
    return (x - train.mean(0)) / train.std(0)


# -- distances ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", DISTANCES)
def test_what_lies_outside_scores_higher(method):
    train = cloud(200)
    inside, outside = cloud(50, seed=1), cloud(50, seed=2, shift=4.0)
    found = distance_scores(method, train, np.concatenate([inside, outside]))
    assert found.dtype == np.float64 and auroc(found[:50], found[50:]) > 0.99


@pytest.mark.parametrize("method", DISTANCES)
def test_the_chunks_change_nothing(method, monkeypatch):
    train, x = bits(100), bits(23, seed=1)
    whole = distance_scores(method, train, x)
    monkeypatch.setattr(distance, "CHUNK_ROWS", 5)
    np.testing.assert_allclose(distance_scores(method, train, x), whole, rtol=1e-6)


@pytest.mark.parametrize("method", DISTANCES)
def test_the_unit_of_a_column_changes_nothing(method):
    train, x = cloud(100), cloud(20, seed=1)
    units = np.array([1e-3, 1, 1e5, 1, 10, 0.1], dtype=np.float32)
    np.testing.assert_allclose(
        distance_scores(method, train * units + units, x * units + units),
        distance_scores(method, train, x),
        rtol=1e-3,
    )


@pytest.mark.parametrize("method", DISTANCES)
def test_columns_that_never_vary_do_no_harm(method):
    train, x = cloud(100), cloud(20, seed=1)
    train[:, 2], x[:, 2] = 0, 0
    for rows in (train, x):
        rows[:, 4] = np.where(rows[:, 0] > 0, np.float32(1000.1), np.nextafter(np.float32(1000.1), np.float32(0)))
    found = distance_scores(method, train, x)
    rest = [0, 1, 3, 5]
    assert np.isfinite(found).all()
    assert np.corrcoef(found, distance_scores(method, train[:, rest], x[:, rest]))[0, 1] > 0.99


def mixed(rows, seed=0, shift=0.0):
    """Columns that go together: distances along one direction and another differ."""
    return cloud(rows, seed, shift=shift) @ np.random.default_rng(99).normal(size=(6, 6)).astype(np.float32)


def nearest_class(train, x, labels, scaled_by):
    rows, asked = standardised(train, scaled_by), standardised(x, scaled_by)
    means = {label: rows[labels == label].mean(0) for label in set(labels)}
    residuals = np.concatenate([rows[labels == label] - mean for label, mean in means.items()])
    inverse = np.linalg.inv(ledoit_wolf(residuals, assume_centered=True)[0])
    apart = [asked - mean for mean in means.values()]
    return np.min([np.einsum("ij,jk,ik->i", one, inverse, one) for one in apart], axis=0)


def test_mahalanobis_without_labels_is_one_gaussian():
    train, x = mixed(300), mixed(20, seed=1)
    expected = nearest_class(train, x, np.zeros(300), train)
    np.testing.assert_allclose(distance_scores("mahalanobis", train, x), expected, rtol=1e-4)


def test_mahalanobis_takes_the_nearest_class_and_one_covariance():
    train = np.concatenate([mixed(100), mixed(60, seed=1, shift=5.0)])
    labels = np.repeat([7, 2], [100, 60])
    x = np.concatenate([mixed(10, seed=2), mixed(10, seed=3, shift=5.0), mixed(10, seed=4, shift=2.5)])
    found = distance_scores("mahalanobis", train, x, labels=labels)
    np.testing.assert_allclose(found, nearest_class(train, x, labels, train), rtol=1e-4)
    # Between the classes is outside of both, yet the middle of a single Gaussian.
    alone = distance_scores("mahalanobis", train, x)
    assert auroc(found[:20], found[20:]) > 0.95 > 0.7 > auroc(alone[:20], alone[20:])


@pytest.mark.parametrize("unknown", [np.nan, -1])
def test_molecules_without_a_label_belong_to_no_class(unknown):
    train, x = mixed(120), mixed(20, seed=1)
    train[:50] += 3
    train[100:] -= 5
    labels = np.r_[np.zeros(50), np.ones(50), np.full(20, unknown)]
    found = distance_scores("mahalanobis", train, x, labels=labels)
    np.testing.assert_allclose(found, nearest_class(train[:100], x, labels[:100], train), rtol=1e-4)
    np.testing.assert_array_equal(distance_scores("mahalanobis", train, x, labels=labels[:, None]), found)


def test_several_label_columns_make_no_class():
    train, x = cloud(100), cloud(20, seed=1)
    labels = np.random.default_rng(0).integers(0, 2, size=(100, 12))
    one = distance_scores("mahalanobis", train, x)
    np.testing.assert_array_equal(distance_scores("mahalanobis", train, x, labels=labels), one)
    np.testing.assert_array_equal(distance_scores("mahalanobis", train, x, labels=np.full(100, -1)), one)


@pytest.mark.parametrize("shape", [(40, 10), (40, 100), (300, 5)])
def test_the_shrinkage_is_ledoit_and_wolfs(shape):
    rows = np.random.default_rng(0).normal(size=shape) * np.linspace(1, 3, shape[1])
    rows -= rows.mean(0)
    covariance, shrinkage = shrunk_covariance(rows)
    expected, amount = ledoit_wolf(rows, assume_centered=True)
    assert shrinkage == pytest.approx(amount)
    np.testing.assert_allclose(covariance, expected, atol=1e-12)


def test_mirrored_rows_leave_no_singular_matrix():
    row = cloud(1)
    found = distance_scores("mahalanobis", np.concatenate([row, -row, row, -row]), cloud(5, seed=1))
    assert np.isfinite(found).all()


def test_more_columns_than_molecules_is_no_trouble():
    train, x = bits(40, columns=200), bits(10, seed=1, columns=200)
    assert np.isfinite(distance_scores("mahalanobis", train, x)).all()


def test_molecules_all_alike_have_no_covariance():
    with pytest.raises(BadData, match="same features"):
        distance_scores("mahalanobis", np.ones((5, 3), dtype=np.float32) * 2, cloud(2, columns=3))


@pytest.mark.parametrize("k", [1, 3, 30])
def test_knn_is_the_distance_to_the_kth_neighbour(k):
    train, x = cloud(30), cloud(9, seed=1)
    rows, asked = standardised(train, train), standardised(x, train)
    expected = np.sort(np.linalg.norm(asked[:, None] - rows[None], axis=2), axis=1)[:, k - 1]
    np.testing.assert_allclose(distance_scores("knn", train, x, k=k), expected, rtol=1e-4)


def test_fingerprints_are_compared_by_angle():
    train, x = bits(30), bits(9, seed=1)
    rows, asked = (m / np.linalg.norm(m, axis=1, keepdims=True) for m in (train, x))
    expected = np.sort(np.sqrt(2 - 2 * asked @ rows.T), axis=1)[:, 4]
    np.testing.assert_allclose(distance_scores("knn", train, x), expected, rtol=1e-5)
    np.testing.assert_array_equal(distance_scores("knn", train.astype(np.float32), x), distance_scores("knn", train, x))


def test_a_copy_of_a_training_molecule_is_at_distance_nought():
    train = bits(500, columns=512)
    assert not distance_scores("knn", train, train[:50], k=1).any()


def test_a_fingerprint_without_a_bit_has_a_distance():
    empty = np.zeros((1, 64), dtype=np.uint8)
    assert distance_scores("knn", np.concatenate([bits(20), empty]), empty, k=1) == [0]


def test_lof_is_scikit_learns():
    train, x = cloud(60), cloud(9, seed=1)
    fitted = LocalOutlierFactor(n_neighbors=7, novelty=True).fit(standardised(train, train))
    expected = -fitted.score_samples(standardised(x, train))
    np.testing.assert_allclose(distance_scores("lof", train, x, neighbours=7), expected, rtol=1e-4)


def test_lof_without_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.neighbors", None)
    with pytest.raises(MissingExtra, match=r"scikit-learn.*brimful\[mol\]"):
        distance_scores("lof", cloud(30), cloud(3))


@pytest.mark.parametrize("method", DISTANCES)
def test_features_that_are_no_numbers_are_counted(method):
    broken = cloud(30)
    broken[3, 1], broken[5, 0] = np.nan, np.inf
    for train, x in ((broken, cloud(30)), (cloud(30), broken)):
        with pytest.raises(BadData, match="2 of 30 molecules are NaN or infinite"):
            distance_scores(method, train, x)


@pytest.mark.parametrize(("method", "option", "most"), [("knn", "k", 10), ("lof", "neighbours", 9)])
def test_more_neighbours_than_molecules_are_refused(method, option, most):
    assert len(distance_scores(method, cloud(10), cloud(3), **{option: most})) == 3
    with pytest.raises(BadOption, match=f"use at most {most}$"):
        distance_scores(method, cloud(10), cloud(3), **{option: most + 1})


def test_a_single_training_molecule_is_refused():
    with pytest.raises(BadData, match="at least 2 training molecules, and there are 1"):
        distance_scores("knn", cloud(1), cloud(3), k=1)


def test_nothing_to_score_is_no_score():
    assert distance_scores("knn", cloud(10), cloud(0)).shape == (0,)


# -- a trained classifier ----------------------------------------------------------------------------------------------


class Head:
    """A linear head of two tasks, 3 and 2 classes; dropout by the number of the pass, as the packed heads have it."""

    classes = torch.tensor([3, 2])

    def __init__(self, columns=5, dropout=0.5):
        self.weight = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(0), requires_grad=True)
        self.dropout = dropout
        self.passes = []

    def __call__(self, x, dropout, sample):
        assert x.dtype == torch.float32
        self.passes.append((dropout, sample))
        if dropout:
            masks = torch.rand(x.shape, generator=torch.Generator().manual_seed(sample))
            x = x * (masks >= self.dropout) / (1 - self.dropout)
        return torch.einsum("nd,tcd->ntc", x, self.weight)

    def probabilities(self, x, temperature=1.0, sample=None):
        """Of each task, in float64, of its own classes only."""
        found = self(x, sample is not None, sample).detach().double() / temperature
        return [found[:, task, : int(count)].softmax(-1) for task, count in enumerate(self.classes)]


X = torch.from_numpy(cloud(20, columns=5))


def scored(method, head=None, x=X, **options):
    return classifier_scores(method, head or Head(), x, classes=Head.classes, **options)


def test_msp_is_one_less_the_mean_of_the_largest_probabilities():
    first, second = Head().probabilities(X)
    expected = 1 - (first.amax(-1) + second.amax(-1)) / 2
    np.testing.assert_allclose(scored("msp"), expected, rtol=1e-6)


def test_energy_is_of_the_classes_in_use():
    found = Head()(X, False, 0).detach().double()
    for temperature in (1.0, 3.0):
        sums = [
            (found[:, 0] / temperature).exp().sum(-1).log(),
            (found[:, 1, :2] / temperature).exp().sum(-1).log(),
        ]
        expected = -temperature * (sums[0] + sums[1]) / 2
        np.testing.assert_allclose(scored("energy", temperature=temperature), expected, rtol=1e-6)


def test_logits_that_are_masked_already_give_the_same():
    class Masked(Head):
        def __call__(self, x, dropout, sample):
            found = super().__call__(x, dropout, sample)
            return torch.cat([found[:, :1], found[:, 1:].masked_fill(torch.arange(3) == 2, float("-inf"))], dim=1)

    for method in ("msp", "odin", "energy", "mc-dropout"):
        np.testing.assert_allclose(scored(method, Masked()), scored(method), rtol=1e-6)


def test_odin_takes_a_step_that_makes_the_prediction_surer():
    temperature, epsilon, head = 10.0, 0.05, Head()
    moved = X.clone()
    for row in range(len(X)):
        start = X[row].clone().double().requires_grad_()
        logits = torch.einsum("d,tcd->tc", start, head.weight.detach().double()) / temperature
        surest = logits[0].log_softmax(-1).max() + logits[1, :2].log_softmax(-1).max()
        moved[row] += epsilon * torch.autograd.grad(surest, start)[0].sign().float()
    first, second = head.probabilities(moved, temperature)
    expected = 1 - (first.amax(-1) + second.amax(-1)) / 2
    np.testing.assert_allclose(scored("odin", temperature=temperature, epsilon=epsilon), expected, rtol=1e-6)
    assert (expected.numpy() < scored("odin", temperature=temperature, epsilon=0)).all()


def test_odin_at_its_temperature_keeps_small_differences_apart():
    steps = torch.linspace(0, 1e-3, 50)

    def head(x, dropout, sample):
        return torch.stack([x[:, :1], -x[:, :1]], dim=-1)

    found = classifier_scores("odin", head, steps[:, None], classes=torch.tensor([2]), temperature=1000, epsilon=0)
    assert (np.diff(found) < 0).all()


def test_odin_works_where_gradients_are_off_and_leaves_none_behind():
    head = Head()
    with torch.no_grad():
        scored("odin", head)
    asked = X.clone().requires_grad_()
    np.testing.assert_array_equal(scored("odin", head, asked), scored("odin"))
    assert asked.grad is None
    assert head.weight.grad is None and not X.requires_grad


def test_mc_dropout_is_the_entropy_of_the_mean_prediction():
    head = Head()
    passes = [head.probabilities(X, sample=sample) for sample in range(4)]
    entropies = [-(mean * mean.log()).sum(-1) for mean in (sum(one[task] for one in passes) / 4 for task in (0, 1))]
    np.testing.assert_allclose(scored("mc-dropout", samples=4), (entropies[0] + entropies[1]) / 2, rtol=1e-6)


def test_every_pass_of_mc_dropout_has_its_number():
    head = Head()
    scored("mc-dropout", head, samples=3, rows=10)
    assert head.passes == [(True, 0), (True, 1), (True, 2)] * 2
    for method in ("msp", "odin", "energy"):
        head = Head()
        scored(method, head)
        assert {dropout for dropout, _ in head.passes} == {False}


@pytest.mark.parametrize("method", ["msp", "energy", "mc-dropout"])
def test_a_score_without_a_slope_keeps_no_graph(method):
    def head(x, dropout, sample):
        assert not torch.is_grad_enabled()
        return Head()(x, dropout, sample)

    assert len(scored(method, head)) == len(X)


@pytest.mark.parametrize("method", ["msp", "odin", "energy"])
def test_rows_at_a_time_change_nothing(method):
    head = Head()
    np.testing.assert_allclose(scored(method, head, rows=7), scored(method), rtol=1e-6)
    assert len(head.passes) == (6 if method == "odin" else 3)


@pytest.mark.parametrize("method", [m.name for m in METHODS.values() if m.kind == "classifier"])
def test_every_method_of_a_classifier_is_scored(method):
    options = METHODS[method].scored
    found = scored(method, x=torch.from_numpy(bits(20, columns=5)), **options)
    assert found.shape == (20,) and found.dtype == np.float64 and np.isfinite(found).all()
    assert classifier_scores(method, Head(), X[:0], classes=Head.classes, **options).shape == (0,)


def test_outlier_exposure_changes_the_training_not_the_score():
    np.testing.assert_array_equal(scored("msp-oe"), scored("msp"))


# -- options -----------------------------------------------------------------------------------------------------------


def test_every_option_of_a_score_has_a_range():
    scores = {m.name: set(m.scored) for m in METHODS.values() if m.kind != "energy"}
    assert scores == {name: set(RANGES[name.removesuffix("-oe")]) for name in scores}


def test_the_defaults_are_those_of_the_methods():
    train, x = cloud(60), cloud(9, seed=1)
    for name in DISTANCES:
        stated = distance_scores(name, train, x, **METHODS[name].scored)
        np.testing.assert_array_equal(distance_scores(name, train, x), stated)
    for name in ("odin", "energy", "mc-dropout"):
        np.testing.assert_array_equal(scored(name), scored(name, **METHODS[name].scored))


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("knn", "k", 0),
        ("knn", "k", 2.5),
        ("lof", "neighbours", -1),
        ("odin", "temperature", 0.0),
        ("odin-oe", "epsilon", -0.1),
        ("energy", "temperature", float("nan")),
        ("energy-oe", "temperature", float("inf")),
        ("mc-dropout", "samples", 0),
        ("mc-dropout", "samples", "many"),
    ],
)
def test_an_option_out_of_range_is_told_before_and_refused(method, option, value):
    assert option_problems(method, {option: value, "lr": -1})[0].startswith(f"{method}: {option} = {value} is not a ")
    with pytest.raises(BadOption, match=f"^{method}: {option} = "):
        if method in DISTANCES:
            distance_scores(method, cloud(30), cloud(3), **{option: value})
        else:
            scored(method, **{option: value})


def test_all_problems_come_at_once():
    with pytest.raises(BadOption, match="temperature = 0 .*; odin: epsilon = -1 "):
        scored("odin", temperature=0, epsilon=-1)


def test_a_method_of_the_other_kind_is_refused():
    with pytest.raises(BadOption, match='"msp" is no distance: use one of mahalanobis, knn, lof'):
        distance_scores("msp", cloud(5), cloud(5))
    with pytest.raises(BadOption, match='"knn" is no score of a classifier: use one of msp, odin, energy, mc-dropout'):
        scored("knn")


def test_checking_options_needs_no_torch():
    code = "import sys, brimful.molecules.scores; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
