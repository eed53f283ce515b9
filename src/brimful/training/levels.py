"""The level of a noisy figure over some steps, and whether it has risen beyond noise.

A figure of single steps is noisy, so what is judged is the median of some steps, with an error. A rise of the loss counts if it
is six errors and matters for what the run has learned so far: a quarter of all progress and a tenth of the level. Both
`brimful why`, after the run, and a task that watches its own training (`Task.watch`) use this rule. Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SURE = 6.0
"""Errors by which two levels must differ."""
OF_PROGRESS, OF_LEVEL = 0.25, 0.10
"""A rise that matters: of what the loss has fallen so far, and of its level."""


@dataclass(frozen=True, slots=True)
class Level:
    """A part of a curve."""

    loss: float
    error: float
    lr: float | None
    first: int
    last: int
    """Steps."""

    @classmethod
    def of(cls, points: Sequence[tuple[int, float, float | None]]) -> "Level":
        """Of steps with their figure and learning rate."""
        losses = [loss for _, loss, _ in points]
        rates = [lr for _, _, lr in points if lr is not None and math.isfinite(lr)]
        error = 1.25 * spread(losses) / math.sqrt(len(losses))
        return cls(median(losses), error, median(rates) if rates else None, points[0][0], points[-1][0])


def spread(values: Sequence[float]) -> float:
    """What the standard deviation would be without outliers."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def rise_matters(low: Level, high_loss: float, high_error: float, *, progress: float) -> bool:
    """Whether a rise from this level is beyond noise and large for a curve that has fallen by `progress`."""
    rise = high_loss - low.loss
    return rise >= max(SURE * math.hypot(low.error, high_error), OF_PROGRESS * progress, OF_LEVEL * abs(low.loss))


def follows_rate(low: Level, later: Sequence[Level]) -> bool:
    """Whether the learning rate rose after the lowest level, as after a restart: then the loss may rise too."""
    rates = [level.lr for level in later if level.lr is not None]
    return low.lr is not None and bool(rates) and max(rates) > 1.05 * low.lr
