"""The loss of several runs at one place: at equal steps, and after equal rows where their steps have other rows.

At equal steps two runs of one seed see the same rows, so their losses are compared step by step and the noise that they share does
not count. After equal rows, and in runs so long that other steps of them were read, noise counts in full.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from brimful.report.run_figures import RunFigures, whole
from brimful.training.events import number
from brimful.training.levels import spread

SURE = 3.0
"""Standard errors by which losses must differ."""
LOSS_STEPS = 50
"""A loss at a step is the mean of at most this many steps up to it, and of at most a tenth of those there are."""
SAME_LOSS = 0.01
"""Losses that differ by less than this share are the same: another dropout mask or rounding makes as much of a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """The loss of every run at one step, or after one number of rows."""

    at: int
    by: Literal["step", "rows"]
    losses: tuple[float | None, ...]
    errors: tuple[float | None, ...]
    """Of the difference to the first run; None for the first, and where it is unknown."""
    steps: tuple[int, ...]
    """How many steps each loss is the mean of."""

    def differs(self, index: int) -> bool | None:
        """Whether this run's loss is another than the first one's, beyond noise."""
        first, loss, error = self.losses[0], self.losses[index], self.errors[index]
        if first is None or loss is None or error is None or not (math.isfinite(first) and math.isfinite(loss)):
            return None
        return abs(loss - first) > max(SURE * error, SAME_LOSS * abs(first))


def rows_only(run: RunFigures) -> tuple[Any, ...]:
    """The rows of its steps; from which step on only if they changed."""
    changes = run.row_changes
    return changes if len(changes) > 1 else tuple(rows for _, rows in changes)


def loss_points(runs: Sequence[RunFigures]) -> list[LossPoint]:
    """The loss at half of the steps that all runs have and at the last of them; where steps have other rows, at equal rows too."""
    points: list[LossPoint] = []
    if any(run.record.step_lines_skipped for run in runs):  # of long runs other steps may have been read
        curves = [[(step, loss) for step, loss in run.losses.items()] for run in runs]
        last = min((curve[-1][0] for curve in curves if curve), default=0)
        points += [_at(curves, at, "step") for at in (last // 2, last) if at and all(curves)]
    else:
        common = sorted(set.intersection(*(set(run.losses) for run in runs)))
        places = dict.fromkeys((common[len(common) // 2 - 1], common[-1]) if len(common) > 1 else common)
        points += [_at_step(runs, common, step) for step in places]
    if len({rows_only(run) for run in runs}) > 1:
        curves = [_by_rows(run) for run in runs]
        points += [_at(curves, min(curve[-1][0] for curve in curves), "rows")] if all(curves) else []
    return points


def _at_step(runs: Sequence[RunFigures], common: Sequence[int], step: int) -> LossPoint:
    until = common[: common.index(step) + 1]
    window = until[-max(1, min(LOSS_STEPS, len(until) // 10)) :]
    columns = [[run.losses[one] for one in window] for run in runs]
    errors: list[float | None] = [None]
    for column in columns[1:]:
        paired = [b - a for a, b in zip(columns[0], column, strict=True)]
        errors.append(
            1.25 * spread(paired) / math.sqrt(len(paired))
            if len(paired) >= 5 and all(map(math.isfinite, paired))
            else None
        )
    losses = tuple(_mean(column) for column in columns)
    return LossPoint(at=step, by="step", losses=losses, errors=tuple(errors), steps=(len(window),) * len(runs))


def _at(curves: Sequence[Sequence[tuple[int, float]]], at: int, by: Literal["step", "rows"]) -> LossPoint:
    """The mean of each curve over the tenth before this place. Steps are not paired, so noise counts in full."""
    windows = [[loss for place, loss in curve if 0.9 * at < place <= at] or [curve[0][1]] for curve in curves]
    errors = [
        1.25 * spread(window) / math.sqrt(len(window)) if len(window) >= 5 and all(map(math.isfinite, window)) else None
        for window in windows
    ]
    differences = [
        None if index == 0 or errors[0] is None or one is None else math.hypot(errors[0], one)
        for index, one in enumerate(errors)
    ]
    losses, steps = tuple(map(_mean, windows)), tuple(map(len, windows))
    return LossPoint(at=at, by=by, losses=losses, errors=tuple(differences), steps=steps)


def _by_rows(run: RunFigures) -> list[tuple[int, float]]:
    """The loss of each step and the rows trained on up to it. Steps that were not read had as many rows as the next one."""
    curve, rows, before = [], 0.0, 0
    for step in run.steps:
        rows += (step["step"] - before) * (whole(step, "rows") or run.rows_per_step or 0)
        before = step["step"]
        loss = number(step, "loss")
        if loss is not None:
            curve.append((round(rows), loss))
    return curve


def _mean(values: Sequence[float]) -> float:
    """NaN if one of them is."""
    return sum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
