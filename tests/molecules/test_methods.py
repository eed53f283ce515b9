"""Scores: higher for what looks out of distribution, fitted on training molecules only."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf
from sklearn.neighbors import LocalOutlierFactor

from brimful.errors import BadData, BadOption, MissingExtra
from brimful.molecules import methods
from brimful.molecules.dataset import Molecules, molecules_from
from brimful.molecules.methods import METHODS, TRIVIAL_BASELINES, classifier_scores, distance_scores, shrunk_covariance
from brimful.molecules.metrics import auroc
from brimful.molecules.splits import Parts, Split

from . import support

DISTANCES = ("mahalanobis", "knn", "lof")


def cloud(rows, seed=0, columns=6, shift=0.0):
    return (np.random.default_rng(seed).normal(size=(rows, columns)) + shift).astype(np.float32)


def bits(rows, seed=0, columns=64, share=0.2):
    return (np.random.default_rng(seed).random((rows, columns)) < share).astype(np.uint8)


def standardised(x, train):
    return (x - train.mean(0)) / train.std(0)


# -- distances ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", DISTANCES)
def test_molecules_outside_score_higher(method):
    train = cloud(200)
    inside, outside = cloud(50, seed=1), cloud(50, seed=2, shift=4.0)
    found = distance_scores(method, train, np.concatenate([inside, outside]))
    assert found.dtype == np.float64 and auroc(found[:50], found[50:]) > 0.99


@pytest.mark.parametrize("method", DISTANCES)
def test_the_chunk_size_changes_nothing(method, monkeypatch):
    train, x = bits(100), bits(23, seed=1)
    whole = distance_scores(method, train, x)
    monkeypatch.setattr(methods, "CHUNK_ROWS", 5)
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
def test_constant_columns_change_nothing(method):
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
    rows, queries = standardised(train, scaled_by), standardised(x, scaled_by)
    means = {label: rows[labels == label].mean(0) for label in set(labels)}
    residuals = np.concatenate([rows[labels == label] - mean for label, mean in means.items()])
    inverse = np.linalg.inv(ledoit_wolf(residuals, assume_centered=True)[0])
    apart = [queries - mean for mean in means.values()]
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


def test_several_label_columns_are_ignored():
    train, x = cloud(100), cloud(20, seed=1)
    labels = np.random.default_rng(0).integers(0, 2, size=(100, 12))
    one = distance_scores("mahalanobis", train, x)
    np.testing.assert_array_equal(distance_scores("mahalanobis", train, x, labels=labels), one)
    np.testing.assert_array_equal(distance_scores("mahalanobis", train, x, labels=np.full(100, -1)), one)


@pytest.mark.parametrize("shape", [(40, 10), (40, 100), (300, 5)])
def test_the_shrinkage_is_that_of_ledoit_and_wolf(shape):
    rows = np.random.default_rng(0).normal(size=shape) * np.linspace(1, 3, shape[1])
    rows -= rows.mean(0)
    covariance, shrinkage = shrunk_covariance(rows)
    expected, amount = ledoit_wolf(rows, assume_centered=True)
    assert shrinkage == pytest.approx(amount)
    np.testing.assert_allclose(covariance, expected, atol=1e-12)


def test_mirrored_rows_do_not_make_a_singular_matrix():
    row = cloud(1)
    found = distance_scores("mahalanobis", np.concatenate([row, -row, row, -row]), cloud(5, seed=1))
    assert np.isfinite(found).all()


def test_there_may_be_more_columns_than_molecules():
    train, x = bits(40, columns=200), bits(10, seed=1, columns=200)
    assert np.isfinite(distance_scores("mahalanobis", train, x)).all()


def test_equal_molecules_have_no_covariance():
    with pytest.raises(BadData, match="same features"):
        distance_scores("mahalanobis", np.ones((5, 3), dtype=np.float32) * 2, cloud(2, columns=3))


@pytest.mark.parametrize("k", [1, 3, 30])
def test_knn_is_the_distance_to_the_kth_neighbour(k):
    train, x = cloud(30), cloud(9, seed=1)
    rows, queries = standardised(train, train), standardised(x, train)
    expected = np.sort(np.linalg.norm(queries[:, None] - rows[None], axis=2), axis=1)[:, k - 1]
    np.testing.assert_allclose(distance_scores("knn", train, x, k=k), expected, rtol=1e-4)


def test_fingerprints_are_compared_by_angle():
    train, x = bits(30), bits(9, seed=1)
    rows, queries = (m / np.linalg.norm(m, axis=1, keepdims=True) for m in (train, x))
    expected = np.sort(np.sqrt(2 - 2 * queries @ rows.T), axis=1)[:, 4]
    np.testing.assert_allclose(distance_scores("knn", train, x), expected, rtol=1e-5)
    np.testing.assert_array_equal(distance_scores("knn", train.astype(np.float32), x), distance_scores("knn", train, x))


def test_a_copy_of_a_training_molecule_is_at_distance_zero():
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
def test_features_that_are_not_finite_are_counted(method):
    broken = cloud(30)
    broken[3, 1], broken[5, 0] = np.nan, np.inf
    for train, x in ((broken, cloud(30)), (cloud(30), broken)):
        with pytest.raises(BadData, match="2 of 30 molecules are NaN or infinite"):
            distance_scores(method, train, x)


@pytest.mark.parametrize(("method", "option", "most"), [("knn", "k", 10), ("lof", "neighbours", 9)])
def test_more_neighbours_than_molecules_are_refused(method, option, most):
    assert len(distance_scores(method, cloud(10), cloud(3), **{option: most})) == 3
    with pytest.raises(BadOption, match=f"at most {most}.$"):
        distance_scores(method, cloud(10), cloud(3), **{option: most + 1})


def test_a_single_training_molecule_is_refused():
    with pytest.raises(BadData, match="at least 2 training molecules, not 1"):
        distance_scores("knn", cloud(1), cloud(3), k=1)


def test_no_molecules_have_no_scores():
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
        unused = torch.arange(3) >= self.classes[:, None]
        return torch.einsum("nd,tcd->ntc", x, self.weight).masked_fill(unused, -torch.inf)

    def probabilities(self, x, temperature=1.0, sample=None):
        """Of each task, in float64, of its own classes only."""
        found = self(x, sample is not None, sample).detach().double() / temperature
        return [found[:, task, : int(count)].softmax(-1) for task, count in enumerate(self.classes)]


X = torch.from_numpy(cloud(20, columns=5))


def scored(method, head=None, x=X, **options):
    return classifier_scores(method, head or Head(), x, **options)


def test_msp_is_one_less_the_mean_of_the_largest_probabilities():
    first, second = Head().probabilities(X)
    expected = 1 - (first.amax(-1) + second.amax(-1)) / 2
    np.testing.assert_allclose(scored("msp"), expected, rtol=1e-6)


def test_energy_uses_the_classes_of_each_task():
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


def test_odin_takes_a_step_that_raises_the_confidence():
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

    found = classifier_scores("odin", head, steps[:, None], temperature=1000, epsilon=0)
    assert (np.diff(found) < 0).all()


def test_odin_works_where_gradients_are_off_and_leaves_none_behind():
    head = Head()
    with torch.no_grad():
        scored("odin", head)
    queries = X.clone().requires_grad_()
    np.testing.assert_array_equal(scored("odin", head, queries), scored("odin"))
    assert queries.grad is None
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
def test_scores_without_gradients_keep_no_graph(method):
    def head(x, dropout, sample):
        assert not torch.is_grad_enabled()
        return Head()(x, dropout, sample)

    assert len(scored(method, head)) == len(X)


@pytest.mark.parametrize("method", ["msp", "odin", "energy"])
def test_the_number_of_rows_at_a_time_changes_nothing(method):
    head = Head()
    np.testing.assert_allclose(scored(method, head, rows=7), scored(method), rtol=1e-6)
    assert len(head.passes) == (6 if method == "odin" else 3)


@pytest.mark.parametrize("method", [m.name for m in METHODS.values() if m.kind == "classifier"])
def test_every_method_of_a_classifier_is_scored(method):
    options = support.defaults(METHODS[method].score_options)
    found = scored(method, x=torch.from_numpy(bits(20, columns=5)), **options)
    assert found.shape == (20,) and found.dtype == np.float64 and np.isfinite(found).all()
    assert classifier_scores(method, Head(), X[:0], **options).shape == (0,)


def test_outlier_exposure_changes_the_training_not_the_score():
    np.testing.assert_array_equal(scored("msp-oe"), scored("msp"))


# -- the registry ------------------------------------------------------------------------------------------------------


def test_the_defaults_of_the_registry_are_those_of_the_functions():
    train, x = cloud(60), cloud(9, seed=1)
    for name in DISTANCES:
        stated = distance_scores(name, train, x, **support.defaults(METHODS[name].score_options))
        np.testing.assert_array_equal(distance_scores(name, train, x), stated)
    for name in ("odin", "energy", "mc-dropout"):
        np.testing.assert_array_equal(scored(name), scored(name, **support.defaults(METHODS[name].score_options)))


def test_every_default_is_in_its_range():
    for method in METHODS.values():
        assert all(option.accepts(option.default) for option in method.options.values()), method.name


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("knn", "k", 0),
        ("knn", "k", 2.5),
        ("knn", "k", True),
        ("lof", "neighbours", -1),
        ("odin", "temperature", 0.0),
        ("odin-oe", "epsilon", -0.1),
        ("hinge", "hard", 1.5),
        ("energy", "temperature", float("nan")),
        ("energy-oe", "temperature", float("inf")),
        ("mc-dropout", "samples", 1),
        ("mc-dropout", "samples", "many"),
    ],
)
def test_values_out_of_range_are_not_accepted(method, option, value):
    assert not METHODS[method].options[option].accepts(value)


def test_a_range_is_described():
    ranges = {name: str(option) for name, option in METHODS["hinge"].options.items()}
    assert ranges == {
        "margin": "a number of at least 0",
        "hard": "a number above 0 and at most 1",
        "lam": "a number of at least 0",
    }
    assert str(METHODS["knn"].options["k"]) == "a whole number of at least 1"
    assert str(METHODS["energy-oe"].options["margin_in"]) == "a number"


def test_mahalanobis_reads_labels_and_does_not_need_them():
    reads = {method.name for method in METHODS.values() if method.reads_labels and not method.needs_labels}
    assert reads == {"mahalanobis"}


# -- trivial baselines -------------------------------------------------------------------------------------------------

# ID are benzenes with a chain, OOD piperidines; longer chains in the ID validation molecules than in the OOD ones.
ID = ["c1ccccc1C", "c1ccccc1CC", "c1ccccc1CCC", "c1ccccc1CCCC", "c1ccccc1CCCCC", "c1ccccc1CCCCCC"]
OOD = ["C1CCNCC1", "C1CCNCC1C", "OC1CCNCC1", "FC1CCNCC1", "C1CC1C1CCNCC1", "C1CCNCC1"]


@pytest.fixture(scope="module")
def case() -> tuple[Molecules, Split]:
    pytest.importorskip("rdkit")
    at = np.arange(12).reshape(2, 3, 2)
    ids, ood = (Parts(train=side[0], valid=side[1], test=side[2]) for side in at)
    return molecules_from("here", ID + OOD, columns={}), Split(kind="random", id=ids, ood=ood)


def test_a_count_is_signed_so_that_ood_is_higher_on_the_validation_molecules(case):
    ids, ood, remark = TRIVIAL_BASELINES["heavy-atoms"](*case)
    assert ids.tolist() == [-11.0, -12.0] and ood.tolist() == [-9.0, -6.0]
    assert remark == "fewer heavy atoms look OOD (on the validation molecules: AUROC 1.000)"


def test_the_test_molecules_do_not_decide_the_sign(case):
    molecules, split = case
    rings = molecules.facts.rings.copy()
    rings[split.id.valid], rings[split.ood.valid] = 5, 9
    rings[split.id.test], rings[split.ood.test] = 20, 0
    changed = replace(molecules, facts=replace(molecules.facts, rings=rings))
    ids, ood, remark = TRIVIAL_BASELINES["rings"](changed, split)
    assert ids.tolist() == [20.0, 20.0] and ood.tolist() == [0.0, 0.0]
    assert remark.startswith("more rings look OOD")


def test_nearest_train_is_one_less_the_similarity_to_the_nearest_id_training_molecule(case):
    from rdkit import Chem, DataStructs
    from rdkit.Chem import rdFingerprintGenerator

    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=2048)
    bits = [generator.GetFingerprint(Chem.MolFromSmiles(one)) for one in ID + OOD]
    ids, ood, remark = TRIVIAL_BASELINES["nearest-train"](*case)
    for place, score in zip([4, 5, 10, 11], [*ids, *ood], strict=True):
        nearest = max(DataStructs.TanimotoSimilarity(bits[place], bits[known]) for known in (0, 1))
        assert score == pytest.approx(1 - nearest)
    assert max(ids) < min(ood)
    assert "2048 bits) to the nearest of 2 ID training molecules" in remark


def test_a_training_molecule_itself_is_at_distance_zero(case):
    molecules, split = case
    same = replace(split, id=replace(split.id, train=split.id.test))
    assert TRIVIAL_BASELINES["nearest-train"](molecules, same)[0].tolist() == [0.0, 0.0]
