"""How fast a step was: rows, tokens, the device's arithmetic, and how long it waited for data.

Tokens and arithmetic are those of the rows as they are; padding is waste and counts for nothing.
"""

import time
from collections import deque
from statistics import median
from typing import Any

import numpy as np

from brimful.data.reader import StepRows
from brimful.task import Dataset
from brimful.train.flops import FlopModel, utilisation
from brimful.train.processes import Solo
from brimful.train.result import StepResult

WINDOW = 20
"""The time left is told from the median of so many steps."""


class Speedometer:
    """Makes a step's figures."""

    def __init__(
        self, rows: Dataset, group: Solo, *, flops: FlopModel | None, peak_flops: float | None, limit_bytes: int | None
    ) -> None:
        self._shapes = getattr(rows, "shapes", None)
        self._group, self._flops, self._limit_bytes = group, flops, limit_bytes
        self._peak = peak_flops
        self._took: deque[float] = deque(maxlen=WINDOW)
        self._last = time.perf_counter()

    def of(self, rows: StepRows, result: StepResult, waited_s: float, *, steps_left: int) -> dict[str, Any]:
        lengths = self._lengths(rows)
        mine = [float(sum(map(sum, lengths))), 0.0 if self._flops is None else self._flops.of(lengths)]
        tokens, flops = (sum(column) for column in zip(*self._group.gather(mine), strict=True))
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self._took.append(took)
        return {
            "tokens": int(tokens) or None,
            "seconds": result.seconds,
            "data_wait_s": waited_s,
            "peak_bytes": result.peak_bytes,
            "limit_bytes": self._limit_bytes,
            "rows_per_s": result.rows / (result.seconds + waited_s),
            "tokens_per_s": tokens / (result.seconds + waited_s) if tokens else None,
            "mfu": utilisation(flops, result.seconds, self._peak, self._group.size),
            "eta_s": steps_left * median(self._took),
        }

    def _lengths(self, rows: StepRows) -> list[tuple[int, ...]]:
        """The data set's own, where it tells those that the task has; else as long as their micro-batch."""
        padded = [tuple(shape) for group, shape in zip(rows.groups, rows.shapes, strict=True) for _ in group]
        own = np.asarray(self._shapes(rows.indices)) if padded and callable(self._shapes) else None
        return padded if own is None or own.shape != np.shape(padded) else [tuple(one) for one in own.tolist()]
