"""What the options of the scores may be, asked before anything is trained and once more before anything is scored.

A spec that says `k = 0` would otherwise fail after the hours of training that come before the first score.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption, MissingExtra
from brimful.molecules.features.encoder import only_bits

# Distances to the nearest training molecules: the k-th of them, and the local outlier factor.
#
# knn is the distance to the k-th neighbour, as Sun et al. (2022) have it, not the mean of the first k. They take k = 50 of
# 50,000 training images; our training sets are of some 2,000, and k = 5 is the default here. A small k asks "is there anything
# like it", a large one "is it in a crowd".
#
# lof compares the density around a molecule with that around its neighbours (Breunig et al., 2000), by scikit-learn with
# `novelty=True`: fitted on training molecules, asked about others.


Singles = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]


def fit_knn(train: Singles, *, k: float = 5) -> Callable[[Singles], Floats]:
    """The distance to the k-th nearest row of `train`."""
    _check_enough(len(train), "k", k, most=len(train))
    lengths = np.einsum("ij,ij->i", train, train)
    nth = int(k) - 1

    def score(x: Singles) -> Floats:
        squares = lengths - 2 * (x @ train.T)  # less |x|², which does not change who is near
        nearest = np.argpartition(squares, nth, axis=1)[:, nth]
        # The difference itself, not of squares: those leave 3e-4 between two copies of one molecule in float32.
        return np.sqrt(np.square(x - train[nearest]).sum(axis=1, dtype=np.float64))

    return score


def fit_lof(train: Singles, *, neighbours: float = 20) -> Callable[[Singles], Floats]:
    """The local outlier factor: about 1 inside a cluster, larger outside."""
    try:
        from sklearn.neighbors import LocalOutlierFactor
    except ImportError:
        raise MissingExtra("scikit-learn", "mol") from None
    # A training molecule is no neighbour of its own.
    _check_enough(len(train), "neighbours", neighbours, most=len(train) - 1)
    fitted = LocalOutlierFactor(n_neighbors=int(neighbours), novelty=True).fit(train)

    def score(x: Singles) -> Floats:
        return -fitted.score_samples(x).astype(np.float64)

    return score


def _check_enough(molecules: int, name: str, asked: float, *, most: int) -> None:
    if asked > most:
        raise BadOption(f"{name} = {asked:g} is more than {molecules} training molecules allow: use at most {most}")


# Mahalanobis distance to the nearest class, with one covariance for all classes (Lee et al., 2018).
#
# A covariance of 2,048 columns from 2,000 molecules is singular, so it has to be shrunk. The amount is Ledoit and Wolf's: a
# closed form of the data, so there is no number to tune on a test set and none that fits one encoder only (on HIV it chose
# 0.10 for ECFP4 and 0.03 to 0.09 for descriptors, each scaled as `distance` says). It pulls towards the mean variance on the
# diagonal, so a column that never varies in training gets a variance too, and an unseen bit has a finite distance.
#
# Without labels there is one class. In float64: with a shrinkage of 1e-4 the largest eigenvalue can be 10⁷ times the
# smallest, and float32 would lose the Cholesky factor.


# Where all training rows lie mirrored about their mean, Ledoit and Wolf's amount is nought and a singular matrix stays so.
LEAST_SHRINKAGE = 1e-6


def fit_gaussians(train: Singles, *, classes: npt.NDArray[np.int64] | None = None) -> Callable[[Singles], Floats]:
    """Squared distance to the nearest class mean. `classes` is −1 where unknown: those rows are left out of the fit."""
    if classes is None:
        classes = np.zeros(len(train), dtype=np.int64)
    known = classes >= 0
    _, members = np.unique(classes[known], return_inverse=True)
    rows = train[known].astype(np.float64)
    means = np.stack([rows[members == group].mean(axis=0) for group in range(members.max() + 1)])
    rows -= means[members]
    whiten = _whitening(rows)
    centres = means @ whiten

    def score(x: Singles) -> Floats:
        placed = x.astype(np.float64) @ whiten
        return np.min([np.square(placed - centre).sum(axis=1) for centre in centres], axis=0)

    return score


def shrunk_covariance(residuals: Floats) -> tuple[Floats, float]:
    """The covariance of centred rows, shrunk towards its mean variance, and by how much (Ledoit and Wolf, 2004)."""
    count, columns = residuals.shape
    covariance = residuals.T @ residuals / count
    mean_variance = float(np.trace(covariance)) / columns
    size = float(np.square(covariance).sum())
    spread = size - columns * mean_variance**2  # of the covariance about its target
    lengths = np.einsum("ij,ij->i", residuals, residuals)
    noise = (float(np.square(lengths).mean()) - size) / count  # of the covariance about the true one
    shrinkage = min(max(noise / spread, LEAST_SHRINKAGE), 1.0) if spread > 0 else 1.0
    covariance *= 1 - shrinkage
    covariance[np.diag_indices(columns)] += shrinkage * mean_variance
    return covariance, shrinkage


def _whitening(residuals: Floats) -> Floats:
    """W such that the covariance of residuals @ W is the identity."""
    covariance, _ = shrunk_covariance(residuals)
    if not covariance[0, 0] > 0:
        raise BadData(
            "all training molecules of a class have the same features, so no distance has a unit: look at the encoder"
        )
    return np.linalg.inv(np.linalg.cholesky(covariance)).T


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A number from `low` on, or above it; whole where it counts something."""

    low: float
    open: bool = False
    whole: bool = False

    def holds(self, value: float) -> bool:
        enough = value > self.low if self.open else value >= self.low
        return math.isfinite(value) and enough and (not self.whole or value == int(value))

    def __str__(self) -> str:
        kind = "whole number" if self.whole else "number"
        return f"a {kind} above {self.low:g}" if self.open else f"a {kind} of {self.low:g} or more"


_COUNT = Range(low=1, whole=True)
_TEMPERATURE = Range(low=0, open=True)

RANGES: Mapping[str, Mapping[str, Range]] = {
    "mahalanobis": {},
    "knn": {"k": _COUNT},
    "lof": {"neighbours": _COUNT},
    "msp": {},
    "odin": {"temperature": _TEMPERATURE, "epsilon": Range(low=0)},
    "energy": {"temperature": _TEMPERATURE},
    "mc-dropout": {"samples": _COUNT},
}


def base_of(method: str) -> str:
    """`msp-oe` scores as `msp` does: outlier exposure changes the training, not the score."""
    return method.removesuffix("-oe")


def option_problems(method: str, options: Mapping[str, float]) -> list[str]:
    """Every score option that cannot work, each in a few words; options of the training are not looked at."""
    ranges = RANGES.get(base_of(method), {})
    return [
        f"{method}: {name} = {value} is not {ranges[name]}"
        for name, value in options.items()
        if name in ranges and not (isinstance(value, int | float) and ranges[name].holds(value))
    ]


def check_options(method: str, options: Mapping[str, float]) -> None:
    """Raises BadOption with all problems at once."""
    problems = option_problems(method, options)
    if problems:
        raise BadOption("; ".join(problems))


# Scores that need no training: how far a molecule's features lie from those of the ID training molecules.
#
#     mahalanobis   squared distance to the nearest class of a Gaussian with one shrunk covariance (`gaussian`)
#     knn           distance to the k-th nearest training molecule (`neighbours`)
#     lof           local outlier factor: how much sparser it is here than around the neighbours (`neighbours`)
#
# All three add up columns, so columns need one unit. 0/1 fingerprints are scaled to length 1 by row, as Sun et al. (2022) do
# for nearest neighbours: between raw ones the distance grows with the size of the molecules. Any other features are scaled to
# mean 0 and deviation 1 by column, since descriptors run from shares to molecular weights. AUROC on two scaffold splits of HIV
# (2,000 training, 1,000 + 1,000 test molecules), raw → scaled:
#
#                   ECFP4                      RDKit descriptors
#     mahalanobis   .75, .75 → .77, .75        .58, .56 → .66, .60
#     knn           .60, .61 → .70, .68        .52, .53 → .65, .61
#     lof           .62, .64 → .67, .65        .56, .57 → .63, .59
#
# What is scored passes in chunks of 512 rows, so memory grows with train + x and never with train × x.


Matrix = npt.NDArray[Any]

DISTANCES = ("mahalanobis", "knn", "lof")
CHUNK_ROWS = 512


def distance_scores(method: str, train: Matrix, x: Matrix, *, labels: Matrix | None = None, **options: float) -> Floats:
    """How far each row of `x` is from the rows of `train`, the features of the ID training molecules.

    `labels` are the classes of the training molecules, [n] or [n, 1], NaN or negative where unknown; mahalanobis alone
    reads them. Several label columns make no single class of a molecule, so they are not used.
    """
    if method not in DISTANCES:
        raise BadOption(f'"{method}" is no distance: use one of {", ".join(DISTANCES)}')
    check_options(method, options)
    if len(train) < 2:
        raise BadData(f"a distance needs at least 2 training molecules, and there are {len(train)}: enlarge the split")
    scaled = _scaling(train)
    score = _fit(method, scaled(train), labels, options)
    parts = [score(scaled(x[start : start + CHUNK_ROWS])) for start in range(0, len(x), CHUNK_ROWS)]
    return np.concatenate([np.empty(0), *parts])


def _fit(
    method: str, train: Singles, labels: Matrix | None, options: Mapping[str, float]
) -> Callable[[Singles], Floats]:
    if method == "mahalanobis":
        return fit_gaussians(train, classes=_classes(labels), **options)
    return fit_knn(train, **options) if method == "knn" else fit_lof(train, **options)


def _scaling(train: Matrix) -> Callable[[Matrix], Singles]:
    """What brings rows to one unit, by what the training rows are like."""
    _check_finite(train)
    if only_bits(train):
        return _to_length_one
    mean, deviation = train.mean(axis=0, dtype=np.float64), train.std(axis=0, dtype=np.float64)
    # A column that never varies has no unit of its own; what float32 makes of an equal value is no variation.
    steady = deviation <= 1e-6 * np.abs(mean)
    unit = np.where(steady, 1.0, deviation)

    def standardised(rows: Matrix) -> Singles:
        _check_finite(rows)
        return ((rows - mean) / unit).astype(np.float32)

    return standardised


def _to_length_one(rows: Matrix) -> Singles:
    _check_finite(rows)
    floats = rows.astype(np.float32)
    length = np.sqrt(np.einsum("ij,ij->i", floats, floats))
    floats /= np.where(length == 0, 1, length)[:, None]
    return floats


def _check_finite(rows: Matrix) -> None:
    if not np.issubdtype(rows.dtype, np.floating):
        return
    broken = int(np.count_nonzero(~np.isfinite(rows).all(axis=1)))
    if broken:
        raise BadData(
            f"the features of {broken} of {len(rows)} molecules are NaN or infinite: leave those molecules out or mend the "
            "features"
        )


def _classes(labels: Matrix | None) -> npt.NDArray[np.int64] | None:
    """One class a molecule, −1 where unknown; None where molecules have no single class."""
    if labels is None or (labels.ndim == 2 and labels.shape[1] != 1):
        return None
    column = np.nan_to_num(labels.reshape(-1).astype(np.float64), nan=-1).astype(np.int64)
    return column if bool((column >= 0).any()) else None


# Scores of a classifier trained on ID labels: how unsure it is of a molecule.
#
# A head has T tasks of up to C classes each (one binary column: 1 × 2; tox21: 12 × 2); each score is a mean over the tasks.
#
#     msp          1 − the largest probability                                        Hendrycks and Gimpel, 2017
#     odin         the same at a temperature, after a step of the input, of length    Liang et al., 2018
#                  epsilon in each column, that makes the prediction surer: ID inputs gain more by it
#     energy       −temperature · logsumexp(logits / temperature)                     Liu et al., 2020
#     mc-dropout   entropy of the mean prediction over passes with dropout on         Gal and Ghahramani, 2016
#
# For mc-dropout the entropy of the mean is taken, not what the passes disagree about: it needs fewer passes. On HIV (3 heads of
# 256–128, dropout 0.1, ECFP4) two times 10 passes put 2,000 molecules in the same order to a rank correlation of .996 by
# entropy, .98 by variance and .94 by mutual information, and the AUROC of the three was the same within .004.
#
# The head computes in float32 on its device; its logits are reduced in float64 on the CPU, where they are small. At ODIN's
# temperature of 1,000 two classes have probabilities of 0.5 ± 0.00025 × margin, and float32 would merge all margins closer
# than 2e-4 into one score.


if TYPE_CHECKING:
    from torch import Tensor

    Logits = Callable[[Tensor, bool, int], Tensor]
    """(x [n, d], dropout on?, number of the pass) → logits [n, tasks, classes]. The pass alone fixes the dropout masks."""
    Score = Callable[..., Tensor]

CHUNK_ROWS_CLASSIFIER = 8192


def classifier_scores(
    method: str,
    logits: "Logits",
    x: "Tensor",
    *,
    classes: "Tensor",
    rows: int = CHUNK_ROWS_CLASSIFIER,
    **options: float,
) -> npt.NDArray[np.float64]:
    """The score of each row of `x`; `classes` says how many of the logits of each task are in use.

    `rows` at a time go through the head. With dropout the masks of a pass belong to its rows, so the scores of mc-dropout
    are a function of the head's seed and of `rows`.
    """
    import torch

    base = base_of(method)
    if base not in SCORES:
        raise BadOption(f'"{method}" is no score of a classifier: use one of {", ".join(SCORES)}')
    check_options(method, options)
    unused = _unused(classes)

    def masked(part: "Tensor", dropout: bool, sample: int) -> "Tensor":
        found = logits(part, dropout, sample)
        return found.masked_fill(unused[..., : found.shape[-1]].to(found.device), float("-inf"))

    with torch.no_grad():
        parts = [SCORES[base](masked, part, **options).numpy() for part in _chunks(x, rows)]
    return np.concatenate([np.empty(0), *parts])


def _msp(logits: "Logits", x: "Tensor", *, temperature: float = 1.0) -> "Tensor":
    return 1 - _probabilities(logits(x, False, 0), temperature).amax(dim=-1).mean(dim=-1)


def _odin(logits: "Logits", x: "Tensor", *, temperature: float = 1000.0, epsilon: float = 0.0014) -> "Tensor":
    import torch

    with torch.enable_grad():
        start = x.detach().requires_grad_()
        surest = (logits(start, False, 0) / temperature).log_softmax(dim=-1).amax(dim=-1)
        (slope,) = torch.autograd.grad(
            surest.sum(), start
        )  # rows do not touch each other: the sum's slope is each row's
    return _msp(logits, x + epsilon * slope.sign(), temperature=temperature)


def _energy(logits: "Logits", x: "Tensor", *, temperature: float = 1.0) -> "Tensor":
    found = _in_float64(logits(x, False, 0))
    return -temperature * (found / temperature).logsumexp(dim=-1).mean(dim=-1)


def _mc_dropout(logits: "Logits", x: "Tensor", *, samples: float = 20) -> "Tensor":
    import torch

    passes = int(samples)
    mean = sum(_probabilities(logits(x, True, sample)) for sample in range(passes)) / passes
    return torch.special.entr(mean).sum(dim=-1).mean(dim=-1)  # entr(0) is 0, where p · log p would be NaN


SCORES: Mapping[str, "Score"] = {"msp": _msp, "odin": _odin, "energy": _energy, "mc-dropout": _mc_dropout}


def _probabilities(logits: "Tensor", temperature: float = 1.0) -> "Tensor":
    return (_in_float64(logits) / temperature).softmax(dim=-1)


def _in_float64(logits: "Tensor") -> "Tensor":
    return logits.detach().cpu().double()


def _unused(classes: "Tensor") -> "Tensor":
    """[tasks, most classes]: True where a task has fewer classes."""
    import torch

    return torch.arange(int(classes.max()), device=classes.device) >= classes[:, None]


def _chunks(x: "Tensor", rows: int) -> "Iterator[Tensor]":
    """Pieces of `x` in float32; fingerprints lie there as bytes."""
    for start in range(0, len(x), rows):
        yield x[start : start + rows].float()
