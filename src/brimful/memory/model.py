"""Peak bytes as a function of rows and lengths, learnt from a few readings and corrected by every further one.

One polynomial per phase (see `bare`), the peak their maximum: from 1 and 4 rows to 32 such a fit was off by 0.8 %
where one line through the step's own peak was off by 24.6 %. What is fitted is allocated memory; reserved memory, which
a limit bounds, is that times a measured ratio, because it jumps with what the caching allocator happened to keep.

Peaks of a fixed sequence of operations are convex in the rows, so a fit to small batches can only predict too little.
`margin` makes up for it: the model is raised until no reading near the top of its range lies above it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brimful.memory.context import FIRST_PHASES
from brimful.task import Shape

# Polynomials in rows and lengths with non-negative coefficients, fitted to few points.
#
# Memory only grows with rows and lengths, so the coefficients cannot be negative: that alone keeps a fit to ten points
# monotonic and sane beyond them. Terms enter one at a time, each only if the points call for it, because a square that
# merely mops up rounding at 8 rows is a gigabyte at 8,000.


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


NEAR_THE_TOP = 0.5
"""Readings above this share of the highest one count for `margin` and for the reserved ratio."""
DOMINANCE = 8
"""A phase at 90 % of the step's peak weighs 0.9 to this power, less than half, in its own fit."""
LEAST = 0.1
"""The least that any reading weighs, so that a phase is not lost where it comes to the top later."""
TOO_HIGH = 1.01
"""A phase's fit may not exceed the peak of a step that was read by more than this."""
WHOLE_STEP_PHASES = frozenset((*FIRST_PHASES, "optimizer"))
"""What a step of a single micro-batch goes through: it never holds gradients during a forward."""


def work(rows: int, shape: Shape) -> float:
    """Rows × padded lengths; a row is work too."""
    return float(rows * (1 + sum(shape)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One metered step."""

    rows: int
    shape: Shape
    phases: dict[str, int]
    """Peak allocated bytes of each phase."""
    reserved_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())

    def merged(self, later: "Probe") -> "Probe":
        """Both readings of one size: the higher of each phase, and the reserved bytes of the one that knows them."""
        names = {**self.phases, **later.phases}
        return Probe(
            rows=self.rows,
            shape=self.shape,
            phases={name: max(self.phases.get(name, 0), later.phases.get(name, 0)) for name in names},
            reserved_bytes=later.reserved_bytes or self.reserved_bytes,
        )

    def highest(self, among: frozenset[str] | None) -> int:
        """The highest of some phases, or of all."""
        return max(peak for name, peak in self.phases.items() if among is None or name in among)

    @property
    def cost_bytes(self) -> int:
        """What counts against a limit: reserved bytes where they are known."""
        return max(self.reserved_bytes or 0, self.peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Predicts the peak of a step from the rows and lengths of its micro-batches."""

    phases: dict[str, Polynomial]
    margin: float
    """Factor that lifts the fit above every reading near the top of its range; 1 when the fit is exact."""
    reserved_ratio: float
    """Reserved over allocated bytes at the largest readings; 1 where nothing is reserved beyond what is allocated."""
    error: float
    """How far the model was off, relative, on readings it had not seen; on its own readings before there were any."""
    probes: tuple[Probe, ...]

    @classmethod
    def fit(cls, probes: Iterable[Probe], *, error: float = 0.0) -> "MemoryModel":
        """The model of these readings. `error` is the worst miss known from before."""
        readings = tuple(probes)
        varied = len({probe.shape for probe in readings}) > 1
        terms = candidates(len(readings[0].shape), lengths_vary=varied)
        phases = {
            name: _fit_phase(name, [probe for probe in readings if name in probe.phases], terms)
            for name in dict.fromkeys(name for probe in readings for name in probe.phases)
        }
        phases.update(_without_gradients(phases, readings))
        plain = cls(phases=phases, margin=1.0, reserved_ratio=1.0, error=error, probes=readings)
        top = [probe for probe in readings if probe.peak_bytes >= NEAR_THE_TOP * max(p.peak_bytes for p in readings)]
        return cls(
            phases=phases,
            margin=max(1.0, *(probe.peak_bytes / plain._of(probe) for probe in top)),
            reserved_ratio=max((p.reserved_bytes / p.peak_bytes for p in top if p.reserved_bytes), default=1.0),
            error=error or max(abs(plain._of(probe) / probe.peak_bytes - 1) for probe in readings),
            probes=readings,
        )

    def peak_bytes(self, rows: int, shape: Shape, *, whole: bool = False) -> int:
        """Allocated bytes at the peak. `whole`: the step has no other micro-batch, so no gradients wait in it."""
        point = (rows, *shape)
        values = {name: phase(point) for name, phase in self.phases.items()}
        first = [value for name, value in values.items() if name in WHOLE_STEP_PHASES]
        later = [value for name, value in values.items() if name not in FIRST_PHASES]
        if "forward" not in values:  # only whole steps were read
            return round(self.margin * max(first))
        if whole and "first_forward" in values:  # read at fewer sizes, so what a later micro-batch takes bounds it
            return round(self.margin * min(max(first), max(later)))
        return round(self.margin * max(later))

    def cost_bytes(self, rows: int, shape: Shape, *, whole: bool = False) -> int:
        """What counts against a limit: reserved bytes."""
        return round(self.reserved_ratio * self.peak_bytes(rows, shape, whole=whole))

    def measure(self, rows: int, shape: Shape, *, whole: bool = False, factor: float = 1.0) -> float:
        """Cost times a factor, and a byte for each unit of work: that keeps rising where the optimizer makes the peak flat."""
        return factor * self.cost_bytes(rows, shape, whole=whole) + work(rows, shape)

    def largest(self, shape: Shape, budget_bytes: float, most: int) -> int:
        """The most rows of this shape that fit the budget, 0 if not one does. At `most` the step is whole."""
        if self.cost_bytes(most, shape, whole=True) <= budget_bytes:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.cost_bytes(middle, shape) <= budget_bytes else (low, middle)
        return low

    def _of(self, probe: Probe) -> float:
        """What the fit says of a size that was read."""
        return max(self.phases[name]((probe.rows, *probe.shape)) for name in probe.phases)

    def to_json(self) -> dict[str, Any]:
        return {
            "phases": {
                name: [{"powers": list(powers), "bytes": value} for powers, value in phase.terms.items()]
                for name, phase in self.phases.items()
            },
            "margin": self.margin,
            "reserved_ratio": self.reserved_ratio,
            "error": self.error,
            "probes": [
                {"rows": p.rows, "shape": list(p.shape), "phases": p.phases, "reserved_bytes": p.reserved_bytes}
                for p in self.probes
            ],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "MemoryModel":
        return cls(
            phases={
                name: Polynomial({tuple(term["powers"]): term["bytes"] for term in terms})
                for name, terms in value["phases"].items()
            },
            margin=value["margin"],
            reserved_ratio=value["reserved_ratio"],
            error=value["error"],
            probes=tuple(
                Probe(rows=p["rows"], shape=tuple(p["shape"]), phases=p["phases"], reserved_bytes=p["reserved_bytes"])
                for p in value["probes"]
            ),
        )


def _without_gradients(phases: dict[str, Polynomial], probes: Sequence[Probe]) -> dict[str, Polynomial]:
    """Phases of a first micro-batch that were read at too few shapes to tell one length from another.

    Such a phase is the later one less the gradients that are held there, the same number of bytes at every size. Fitted by
    itself it would follow one length alone: 66 rows of 29+186 were predicted at 4.4 GiB, and 7 were not enough.
    """
    found: dict[str, Polynomial] = {}
    for first in FIRST_PHASES:
        later = first.removeprefix("first_")
        if first not in phases or later not in phases:
            continue
        both = [probe for probe in probes if first in probe.phases and later in probe.phases]
        shapes, all_shapes = ({probe.shape for probe in probes if name in probe.phases} for name in (first, later))
        if both and len(shapes) < len(all_shapes):
            held = min(probe.phases[later] - probe.phases[first] for probe in both)
            terms = dict(phases[later].terms)
            constant = (0,) * (1 + len(probes[0].shape))
            terms[constant] = terms.get(constant, 0.0) - held
            found[first] = Polynomial(terms)
    return found


def _fit_phase(name: str, probes: Sequence[Probe], terms: Sequence[tuple[int, ...]]) -> Polynomial:
    """A phase counts most where it sets the peak; elsewhere its own kinks would only bend the fit.

    Unless that fit rises above a peak that was read: then every reading of the phase counts alike.
    """
    points = [(probe.rows, *probe.shape) for probe in probes]
    values = [probe.phases[name] for probe in probes]
    peaks = [probe.highest(WHOLE_STEP_PHASES if name in FIRST_PHASES else None) for probe in probes]
    dominance = [max(LEAST, (value / peak) ** DOMINANCE) for value, peak in zip(values, peaks, strict=True)]
    found = fit_polynomial(points, values, terms, dominance)
    if any(found(point) > TOO_HIGH * peak for point, peak in zip(points, peaks, strict=True)):
        return fit_polynomial(points, values, terms)
    return found
