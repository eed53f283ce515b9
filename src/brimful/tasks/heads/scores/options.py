"""What the options of the scores may be, asked before anything is trained and once more before anything is scored.

A spec that says `k = 0` would otherwise fail after the hours of training that come before the first score.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from brimful.errors import BadOption


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
