"""Polynomials in rows and lengths with non-negative coefficients, fitted to few points.

Memory only grows with rows and lengths, so the coefficients cannot be negative: that alone keeps a fit to ten points
monotonic and sane beyond them. Terms enter one at a time, each only if the points call for it, because a square that
merely mops up rounding at 8 rows is a gigabyte at 8,000.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Powers = tuple[int, ...]
"""Exponents of (rows, length 1, length 2, …): (1, 2) is rows × length²."""

GOOD_ENOUGH = 2e-5
"""Residual, as a share of the largest value, below which no further term is looked for."""
WORTH_A_TERM = 0.6
"""A further term must bring the residual below this share of what it was."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    terms: dict[Powers, float]

    def __call__(self, point: Sequence[int]) -> float:
        """Written out: a cut asks for a few hundred values a step, and generators took three times as long."""
        total = 0.0
        for powers, value in self.terms.items():
            for power, length in zip(powers, point, strict=True):
                if power:
                    value *= length if power == 1 else length**power
            total += value
        return total


def candidates(lengths: int, *, lengths_vary: bool) -> list[Powers]:
    """The terms a step's memory is made of, the likeliest first: where two explain the points alike, the first is taken.

    Rows × length comes before rows alone: most of what a row holds is as long as the row.
    """
    one, rows, rows_squared = ((power, *_powers(lengths, {})) for power in range(3))
    if not lengths_vary:
        return [one, rows, rows_squared]
    axes, pairs = range(lengths), list(combinations(range(lengths), 2))
    return [
        one,
        *((1, *_powers(lengths, {i: 1})) for i in axes),
        rows,
        *((1, *_powers(lengths, {i: 2})) for i in axes),
        *((1, *_powers(lengths, {i: 1, j: 1})) for i, j in pairs),
        *((0, *_powers(lengths, {i: 2})) for i in axes),
        *((0, *_powers(lengths, {i: 1, j: 1})) for i, j in pairs),
        *((0, *_powers(lengths, {i: 1})) for i in axes),
        rows_squared,
    ]


def fit_polynomial(
    points: Sequence[Sequence[int]],
    values: Sequence[float],
    terms: Sequence[Powers],
    weights: Sequence[float] | None = None,
) -> Polynomial:
    """The fewest of these terms that reproduce the values, the constant always among them.

    Larger values weigh more: phases are convex, and what lies beyond the points continues their upper end. `weights`
    come on top of that.
    """
    matrix = np.array([[_monomial(powers, point) for powers in terms] for point in points], dtype=float)
    target = np.array(values, dtype=float)
    weight = 0.1 + 0.9 * (target - target.min()) / (np.ptp(target) or 1.0)
    weight *= np.ones(len(points)) if weights is None else np.array(weights)
    weight /= weight.max()
    scale = matrix.max(axis=0)
    matrix, target = matrix / scale * weight[:, None], target * weight
    usable = [i for i, powers in enumerate(terms) if _can_tell(powers, points)]
    chosen, (factors, residual) = [0], _solve(matrix, target, [0])
    most = max(2, len(points) - 1)
    while residual > GOOD_ENOUGH * target.max() and len(chosen) < most:
        trials = [(i, *_solve(matrix, target, [*chosen, i])) for i in usable if i not in chosen]
        best = min((left for _, _, left in trials), default=residual)
        if best > WORTH_A_TERM * residual:
            break
        enough = max(1.2 * best, GOOD_ENOUGH * target.max())
        added, factors, residual = next(trial for trial in trials if trial[2] <= enough)
        chosen = [*chosen, added]
    if residual > GOOD_ENOUGH * target.max():
        from_all = _eliminated(matrix, target, usable, most)
        if from_all[2] <= WORTH_A_TERM * residual:
            chosen, factors, residual = from_all
    return Polynomial({terms[i]: float(w / scale[i]) for i, w in zip(chosen, factors, strict=True) if w > 0})


def _eliminated(
    matrix: NDArray[np.float64], target: NDArray[np.float64], usable: list[int], most: int
) -> tuple[list[int], NDArray[np.float64], float]:
    """From all terms down, the unlikeliest first: finds sets of which no single term is worth anything by itself."""
    factors, residual = _solve(matrix, target, usable)
    chosen = [i for i, factor in zip(usable, factors, strict=True) if factor > 0 or i == 0]
    factors, residual = _solve(matrix, target, chosen)
    good = GOOD_ENOUGH * target.max()
    while len(chosen) > 1:
        fewer = [[j for j in chosen if j != i] for i in reversed(chosen) if i != 0]
        trials = [(columns, *_solve(matrix, target, columns)) for columns in fewer]
        best = min(left for _, _, left in trials)
        if best > max(good, residual / WORTH_A_TERM) and len(chosen) <= most:
            break
        chosen, factors, residual = next(trial for trial in trials if trial[2] <= max(1.2 * best, good))
    return chosen, factors, residual


def _can_tell(powers: Powers, points: Sequence[Sequence[int]]) -> bool:
    """A term can be told from a constant by two values of each of its variables, a square from a line by three."""
    return all(power == 0 or len({point[axis] for point in points}) > power for axis, power in enumerate(powers))


def _solve(
    matrix: NDArray[np.float64], target: NDArray[np.float64], columns: list[int]
) -> tuple[NDArray[np.float64], float]:
    """Non-negative weights of these columns and the root mean square of what they leave over."""
    part = matrix[:, columns]
    weights = _non_negative(part, target)
    return weights, float(np.sqrt(np.mean((part @ weights - target) ** 2)))


def _non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative weights (the active-set method of Lawson and Hanson)."""
    count = matrix.shape[1]
    weights, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = matrix.T @ (target - matrix @ weights)
        gradient[free] = -np.inf
        if gradient.max() <= 1e-9 * abs(target).max():
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if (trial[free] >= 0).all():
                weights = trial
                break
            falling = free & (trial < 0)
            step = (weights[falling] / (weights[falling] - trial[falling])).min()
            weights = weights + step * (trial - weights)
            free &= weights > 1e-12 * max(weights.max(), 1e-300)
    return weights


def _monomial(powers: Powers, point: Sequence[int]) -> float:
    value = 1.0
    for base, power in zip(point, powers, strict=True):
        value *= float(base) ** power
    return value


def _powers(size: int, where: dict[int, int]) -> Powers:
    return tuple(where.get(i, 0) for i in range(size))
