"""What several seeds say together: mean, standard deviation, and a bootstrap interval; and the same of a difference.

The interval is the percentile bootstrap of the mean: seeds are drawn with replacement 10,000 times, and the middle 95 % of
the means is given. It is honest about the seeds tried and no more: for normal values we measured that it covers the true
mean in 74 % of cases with 3 seeds, 83 % with 5, 89 % with 10 and 93 % with 20. So the number of seeds stands beside it.

Two methods are compared seed by seed, over the seeds both have, since a seed fixes weights and batches for both: the
noise they share falls out, and resampling a difference draws the same seeds for the two. The draws are a function of the
number of seeds alone, so the same results give the same interval every time.

Where a value cannot vary there is nothing to resample: a deterministic method has no deviation and no interval, and values
that are all equal have no interval, since one of width nought would claim a certainty that nobody has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """The middle 95 % of the resampled means."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSeeds:
    """One figure over seeds; None where it has no meaning."""

    mean: float
    sd: float | None
    """Standard deviation, with n − 1."""
    interval: Interval | None
    seeds: int
    """How many seeds stand behind it."""


def over_seeds(values: Mapping[int, float], *, deterministic: bool = False) -> OverSeeds:
    """One figure of one method, by seed."""
    assert values, "a method without a finished seed has no row"
    # In order of the seed, so that the order in which runs finished changes nothing.
    return _summary(np.array([values[seed] for seed in sorted(values)], dtype=np.float64), deterministic=deterministic)


def paired_difference(first: Mapping[int, float] | float, second: Mapping[int, float] | float) -> OverSeeds | None:
    """first − second, over the seeds both have; None where they share none.

    A plain number stands for a deterministic method, which has this value under every seed. Two of those differ by a plain
    number too, with one seed and no spread.
    """
    known = [set(values) for values in (first, second) if isinstance(values, Mapping)]
    if not known:
        return _summary(np.array([_at(first, 0) - _at(second, 0)]), deterministic=True)
    seeds = sorted(set.intersection(*known))
    if not seeds:
        return None
    differences = np.array([_at(first, seed) - _at(second, seed) for seed in seeds], dtype=np.float64)
    return _summary(differences, deterministic=False)


def _at(values: Mapping[int, float] | float, seed: int) -> float:
    return values[seed] if isinstance(values, Mapping) else values


def _summary(values: npt.NDArray[np.float64], *, deterministic: bool) -> OverSeeds:
    alone = deterministic or len(values) < 2
    return OverSeeds(
        mean=float(values.mean()),
        sd=None if alone else float(values.std(ddof=1)),
        interval=None if alone or np.ptp(values) == 0 else _interval(values),
        seeds=len(values),
    )


def _interval(values: npt.NDArray[np.float64]) -> Interval:
    means = _draws(len(values)) @ values
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


@lru_cache(maxsize=4)  # a table asks for the same number of seeds in every cell: drawing took 6 ms, using it 0.5 ms
def _draws(count: int) -> npt.NDArray[np.float64]:
    """How often each seed was drawn in each resample, as a share."""
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return drawn / count
