"""Mahalanobis distance to the nearest class, with one covariance for all classes (Lee et al., 2018).

A covariance of 2,048 columns from 2,000 molecules is singular, so it has to be shrunk. The amount is Ledoit and Wolf's: a
closed form of the data, so there is no number to tune on a test set and none that fits one encoder only (on HIV it chose
0.10 for ECFP4 and 0.03 to 0.09 for descriptors, each scaled as `distance` says). It pulls towards the mean variance on the
diagonal, so a column that never varies in training gets a variance too, and an unseen bit has a finite distance.

Without labels there is one class. In float64: with a shrinkage of 1e-4 the largest eigenvalue can be 10⁷ times the
smallest, and float32 would lose the Cholesky factor.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData

Singles = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

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
