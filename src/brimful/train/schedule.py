"""The learning rate of every step, as a share of the one asked for: a function of the step and nothing else.

    constant   1 after the warm-up
    linear     down to `floor` in a straight line
    cosine     down to `floor` along half a cosine
    wsd        1 until the last `decay` of the run, then down to `floor` along 1 − √share: a run can be made longer
               without having been decayed in the middle

The warm-up rises in a straight line from 1/warm-up. Because nothing is counted along, a resumed run needs no state, and
one that is given more steps follows the longer curve from there on.
"""

import math
from dataclasses import dataclass
from typing import Literal

Curve = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Shares of the learning rate over a run of so many steps."""

    curve: Curve
    steps: int
    warmup: int
    """Steps."""
    decay: float = 0.2
    """The share of the run that `wsd` decays in."""
    floor: float = 0.0
    """The share that is left at the end."""

    def share(self, step: int) -> float:
        """Of optimizer step `step`, counted from 1."""
        if step <= self.warmup:
            return step / self.warmup
        after = self.steps - self.warmup
        begins = self.warmup if self.curve != "wsd" else self.steps - round(self.decay * after)
        if self.curve == "constant" or step <= begins:
            return 1.0
        gone = min(1.0, (step - begins) / max(1, self.steps - begins))
        left = {"linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2, "wsd": 1 - math.sqrt(gone)}[
            self.curve
        ]
        return self.floor + (1 - self.floor) * left


def as_steps(given: int | float | str, steps: int) -> int:
    """`100` steps, or `3%` of the run; what is asked beyond the run is the run."""
    if isinstance(given, str) and given.strip().endswith("%"):
        return min(steps, round(float(given.strip()[:-1]) / 100 * steps))
    return min(steps, int(given))
