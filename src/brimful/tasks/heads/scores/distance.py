"""Scores that need no training: how far a molecule's features lie from those of the ID training molecules.

    mahalanobis   squared distance to the nearest class of a Gaussian with one shrunk covariance (`gaussian`)
    knn           distance to the k-th nearest training molecule (`neighbours`)
    lof           local outlier factor: how much sparser it is here than around the neighbours (`neighbours`)

All three add up columns, so columns need one unit. 0/1 fingerprints are scaled to length 1 by row, as Sun et al. (2022) do
for nearest neighbours: between raw ones the distance grows with the size of the molecules. Any other features are scaled to
mean 0 and deviation 1 by column, since descriptors run from shares to molecular weights. AUROC on two scaffold splits of HIV
(2,000 training, 1,000 + 1,000 test molecules), raw → scaled:

                  ECFP4                      RDKit descriptors
    mahalanobis   .75, .75 → .77, .75        .58, .56 → .66, .60
    knn           .60, .61 → .70, .68        .52, .53 → .65, .61
    lof           .62, .64 → .67, .65        .56, .57 → .63, .59

What is scored passes in chunks of 512 rows, so memory grows with train + x and never with train × x.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption
from brimful.tasks.heads.features.bits import only_bits
from brimful.tasks.heads.scores.gaussian import fit_gaussians
from brimful.tasks.heads.scores.neighbours import fit_knn, fit_lof
from brimful.tasks.heads.scores.options import check_options

Matrix = npt.NDArray[Any]
Singles = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

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
