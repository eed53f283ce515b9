"""Distances to the nearest training molecules: the k-th of them, and the local outlier factor.

knn is the distance to the k-th neighbour, as Sun et al. (2022) have it, not the mean of the first k. They take k = 50 of
50,000 training images; our training sets are of some 2,000, and k = 5 is the default here. A small k asks "is there anything
like it", a large one "is it in a crowd".

lof compares the density around a molecule with that around its neighbours (Breunig et al., 2000), by scikit-learn with
`novelty=True`: fitted on training molecules, asked about others.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from brimful.errors import BadOption, MissingExtra

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
