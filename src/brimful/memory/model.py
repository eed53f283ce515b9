"""Peak bytes as a function of rows and lengths, fitted to a few readings and corrected by every further one.

One polynomial per phase (see `memory/context.py`), the peak their maximum: from 1 and 4 rows to 32 such a fit was off by
0.8 %, where one line through the step's own peak was off by 24.6 %. The fit is to allocated memory. Reserved memory,
which a limit bounds, is that times a measured ratio, because it jumps with what the caching allocator happened to keep.

Peaks of a fixed sequence of operations are convex in the rows, so a fit to small batches can only predict too little.
`margin` corrects for it: the model is raised until no reading near the top of its range lies above it.

Memory only grows with rows and lengths, so the coefficients of a polynomial are not negative. That alone keeps a fit to
ten points monotonic and plausible beyond them. Terms enter one at a time, each only if the points require it, because a
square that merely absorbs rounding at 8 rows is a gigabyte at 8,000.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brimful.task import Shape

Powers = tuple[int, ...]
"""Exponents of (rows, length 1, length 2, …): (1, 2) is rows × length²."""

MICRO_PHASES = ("forward", "head", "early", "late")
FIRST_PHASES = tuple(f"first_{phase}" for phase in MICRO_PHASES)
"""Of the first micro-batch of a step. They are defined here, because this module needs no torch: views predict with it too."""
NEAR_THE_TOP = 0.5
"""Readings above this share of the highest one count for `margin` and for the reserved ratio."""
DOMINANCE = 8
"""A phase at 90 % of the step's peak weighs 0.9 to this power, less than half, in its own fit."""
LEAST_WEIGHT = 0.1
"""Every reading weighs at least this, so that a phase is known where it sets the peak only later."""
TOO_HIGH = 1.01
"""The fit of a phase may not exceed the measured peak of a step by more than this."""
WHOLE_STEP_PHASES = frozenset((*FIRST_PHASES, "optimizer"))
"""The phases of a step of a single micro-batch: it never holds gradients during a forward."""
GOOD_ENOUGH = 2e-5
"""No further term is added when the residual, as a share of the largest value, is below this."""
WORTH_A_TERM = 0.6
"""A further term must reduce the residual below this share of what it was."""


def work(rows: int, shape: Shape) -> float:
    """Rows × padded lengths, and one for each row."""
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
        """Two readings of one size: the higher of each phase, and the reserved bytes of the one that has them."""
        names = {**self.phases, **later.phases}
        return Probe(
            rows=self.rows,
            shape=self.shape,
            phases={name: max(self.phases.get(name, 0), later.phases.get(name, 0)) for name in names},
            reserved_bytes=later.reserved_bytes or self.reserved_bytes,
        )

    def highest(self, among: frozenset[str] | None) -> int:
        """The highest peak of some phases, or of all."""
        return max(peak for name, peak in self.phases.items() if among is None or name in among)

    @property
    def cost_bytes(self) -> int:
        """What counts against a limit: reserved bytes if they are known."""
        return max(self.reserved_bytes or 0, self.peak_bytes)


@dataclass(frozen=True, slots=True)
class Polynomial:
    terms: dict[Powers, float]

    def __call__(self, point: Sequence[int]) -> float:
        """Written out: a split needs a few hundred values per step, and generators took three times as long."""
        total = 0.0
        for powers, value in self.terms.items():
            for power, length in zip(powers, point, strict=True):
                if power:
                    value *= length if power == 1 else length**power
            total += value
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Predicts the peak of a step from the rows and lengths of its micro-batches."""

    phases: dict[str, Polynomial]
    margin: float
    """Factor that raises the fit above every reading near the top of its range; 1 if the fit is exact."""
    reserved_ratio: float
    """Reserved over allocated bytes at the largest readings; 1 if nothing more is reserved."""
    error: float
    """Relative error on readings the model was not fitted to; on its own readings before there were any."""
    probes: tuple[Probe, ...]

    @classmethod
    def fit(cls, probes: Iterable[Probe], *, error: float = 0.0, packed: bool = False) -> "MemoryModel":
        """The model of these readings. `error` is the largest relative error known from before.

        `packed`: bytes grow with the tokens in all, however many rows they belong to.
        """
        readings = tuple(probes)
        varied = len({probe.shape for probe in readings}) > 1
        lengths = len(readings[0].shape)
        terms = candidates(lengths, lengths_vary=varied)
        if packed:
            terms = token_terms(lengths) if varied else terms[:2]
        phases = {
            name: _fit_phase(name, [probe for probe in readings if name in probe.phases], terms)
            for name in dict.fromkeys(name for probe in readings for name in probe.phases)
        }
        if packed and not varied:
            phases = {name: _in_tokens(phase, readings[0].shape) for name, phase in phases.items()}
        phases.update(_without_gradients(phases, readings))
        plain = cls(phases=phases, margin=1.0, reserved_ratio=1.0, error=error, probes=readings)
        top = [probe for probe in readings if probe.peak_bytes >= NEAR_THE_TOP * max(p.peak_bytes for p in readings)]
        return cls(
            phases=phases,
            margin=max(1.0, *(probe.peak_bytes / plain._fitted(probe) for probe in top)),
            reserved_ratio=max((p.reserved_bytes / p.peak_bytes for p in top if p.reserved_bytes), default=1.0),
            error=error or max(abs(plain._fitted(probe) / probe.peak_bytes - 1) for probe in readings),
            probes=readings,
        )

    def peak_bytes(self, rows: int, shape: Shape, *, whole: bool = False) -> int:
        """Allocated bytes at the peak. `whole`: the step has no other micro-batch, so it holds no gradients meanwhile."""
        point = (rows, *shape)
        values = {name: phase(point) for name, phase in self.phases.items()}
        first = [value for name, value in values.items() if name in WHOLE_STEP_PHASES]
        later = [value for name, value in values.items() if name not in FIRST_PHASES]
        if "forward" not in values:  # only whole steps were measured
            return round(self.margin * max(first))
        if whole and "first_forward" in values:  # measured at fewer sizes, so a later micro-batch bounds it
            return round(self.margin * min(max(first), max(later)))
        return round(self.margin * max(later))

    def cost_bytes(self, rows: int, shape: Shape, *, whole: bool = False) -> int:
        """What counts against a limit: reserved bytes."""
        return round(self.reserved_ratio * self.peak_bytes(rows, shape, whole=whole))

    def rising_cost(self, rows: int, shape: Shape, *, whole: bool = False, factor: float = 1.0) -> float:
        """The cost times a factor, and a byte for each unit of work: rises also where the optimizer makes the peak flat."""
        return factor * self.cost_bytes(rows, shape, whole=whole) + work(rows, shape)

    def largest(self, shape: Shape, budget_bytes: float, step_rows: int) -> int:
        """The most rows of this shape that fit the budget, 0 if not one does; `step_rows` are the whole step."""
        if self.cost_bytes(step_rows, shape, whole=True) <= budget_bytes:
            return step_rows
        low, high = 0, step_rows
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.cost_bytes(middle, shape) <= budget_bytes else (low, middle)
        return low

    def _fitted(self, probe: Probe) -> float:
        """The fitted peak of a size that was measured."""
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
    """Phases of a first micro-batch that were measured at too few sizes to tell what they grow with.

    Such a phase is the later one less the gradients held there, which are the same bytes at every size. Fitted by itself
    to too few shapes it would follow one length alone: 66 rows of 29+186 were predicted at 4.4 GiB, and 7 were not
    enough. Fitted to a single number of rows it would not grow at all: 100 rows were predicted at what 40 took.
    """
    corrected: dict[str, Polynomial] = {}
    for first in FIRST_PHASES:
        later = first.removeprefix("first_")
        if first not in phases or later not in phases:
            continue
        both = [probe for probe in probes if first in probe.phases and later in probe.phases]
        shapes, all_shapes = ({probe.shape for probe in probes if name in probe.phases} for name in (first, later))
        rows, all_rows = ({probe.rows for probe in probes if name in probe.phases} for name in (first, later))
        if both and (len(shapes) < len(all_shapes) or len(rows) == 1 < len(all_rows)):
            gradient_bytes = min(probe.phases[later] - probe.phases[first] for probe in both)
            terms = dict(phases[later].terms)
            constant = (0,) * (1 + len(probes[0].shape))
            terms[constant] = terms.get(constant, 0.0) - gradient_bytes
            corrected[first] = Polynomial(terms)
    return corrected


def _fit_phase(name: str, probes: Sequence[Probe], terms: Sequence[tuple[int, ...]]) -> Polynomial:
    """Weight a phase most where it sets the peak; elsewhere its own kinks would only bend the fit.

    If that fit exceeds a measured peak, every reading of the phase counts alike.
    """
    points = [(probe.rows, *probe.shape) for probe in probes]
    values = [probe.phases[name] for probe in probes]
    peaks = [probe.highest(WHOLE_STEP_PHASES if name in FIRST_PHASES else None) for probe in probes]
    dominance = [max(LEAST_WEIGHT, (value / peak) ** DOMINANCE) for value, peak in zip(values, peaks, strict=True)]
    polynomial = fit_polynomial(points, values, terms, dominance)
    if any(polynomial(point) > TOO_HIGH * peak for point, peak in zip(points, peaks, strict=True)):
        return fit_polynomial(points, values, terms)
    return polynomial


def token_terms(lengths: int) -> list[Powers]:
    """The terms of packed rows: a constant, and the tokens of each length.

    There is none for the longest row: attention of packed rows keeps no scores, neither in the kernels nor in the plain
    implementation, so a row takes its tokens whatever its length. A plan made for the mean row predicted 246 MiB for 31 rows of
    20+30 tokens and one of 20+1,500, and 246 were measured.
    """
    return [_powers(1 + lengths, {}), *((1, *_powers(lengths, {axis: 1})) for axis in range(lengths))]


def _in_tokens(phase: Polynomial, shape: Shape) -> Polynomial:
    """The same for rows of this shape, and for others: what a row takes is taken by its tokens, of each length alike."""
    rows, terms, tokens = _powers(1 + len(shape), {0: 1}), dict(phase.terms), sum(shape)
    if rows in terms and tokens:
        each = terms.pop(rows) / tokens
        terms.update(dict.fromkeys(token_terms(len(shape))[1:], each))
    return Polynomial(terms)


def candidates(lengths: int, *, lengths_vary: bool) -> list[Powers]:
    """The terms of a step's memory, the likeliest first: of two that explain the points alike, the first is taken.

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
    """The fewest of these terms that reproduce the values, always with the constant.

    Larger values weigh more: phases are convex, and what lies beyond the points continues their upper end. `weights`
    are multiplied in.
    """
    matrix = np.array([[_monomial(powers, point) for powers in terms] for point in points], dtype=float)
    target = np.array(values, dtype=float)
    weight = 0.1 + 0.9 * (target - target.min()) / (np.ptp(target) or 1.0)
    weight *= np.ones(len(points)) if weights is None else np.array(weights)
    weight /= weight.max()
    scale = matrix.max(axis=0)
    matrix, target = matrix / scale * weight[:, None], target * weight
    usable = [i for i, powers in enumerate(terms) if _identifiable(powers, points)]
    chosen, (factors, residual) = [0], _solve(matrix, target, [0])
    max_terms = max(2, len(points) - 1)
    while residual > GOOD_ENOUGH * target.max() and len(chosen) < max_terms:
        trials = [(i, *_solve(matrix, target, [*chosen, i])) for i in usable if i not in chosen]
        best = min((left for _, _, left in trials), default=residual)
        if best > WORTH_A_TERM * residual:
            break
        enough = max(1.2 * best, GOOD_ENOUGH * target.max())
        added, factors, residual = next(trial for trial in trials if trial[2] <= enough)
        chosen = [*chosen, added]
    if residual > GOOD_ENOUGH * target.max():
        from_all = _eliminate(matrix, target, usable, max_terms)
        if from_all[2] <= WORTH_A_TERM * residual:
            chosen, factors, residual = from_all
    return Polynomial({terms[i]: float(w / scale[i]) for i, w in zip(chosen, factors, strict=True) if w > 0})


def _eliminate(
    matrix: NDArray[np.float64], target: NDArray[np.float64], usable: list[int], max_terms: int
) -> tuple[list[int], NDArray[np.float64], float]:
    """Remove terms from all of them, the unlikeliest first: finds sets in which no single term helps by itself."""
    factors, residual = _solve(matrix, target, usable)
    chosen = [i for i, factor in zip(usable, factors, strict=True) if factor > 0 or i == 0]
    factors, residual = _solve(matrix, target, chosen)
    good = GOOD_ENOUGH * target.max()
    while len(chosen) > 1:
        fewer = [[j for j in chosen if j != i] for i in reversed(chosen) if i != 0]
        trials = [(columns, *_solve(matrix, target, columns)) for columns in fewer]
        best = min(left for _, _, left in trials)
        if best > max(good, residual / WORTH_A_TERM) and len(chosen) <= max_terms:
            break
        chosen, factors, residual = next(trial for trial in trials if trial[2] <= max(1.2 * best, good))
    return chosen, factors, residual


def _identifiable(powers: Powers, points: Sequence[Sequence[int]]) -> bool:
    """Telling a term from a constant takes two values of each of its variables, a square from a line three."""
    return all(power == 0 or len({point[axis] for point in points}) > power for axis, power in enumerate(powers))


def _solve(
    matrix: NDArray[np.float64], target: NDArray[np.float64], columns: list[int]
) -> tuple[NDArray[np.float64], float]:
    """Non-negative weights of these columns, and the root mean square of the residual."""
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
