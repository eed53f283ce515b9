"""The clock of planning, and how long a plan may take: 20 s on a CPU, 30 s on a GPU unless the user sets it.

On a CPU that others use too, planning a tiny model took up to 380 s. So before a probe runs, its time is predicted from
those that ran: it is taken to grow with the rows and the lengths. A probe that would leave no time to
time and verify its size is skipped. The fewest rows of the planned lengths run in any case, since a plan needs them. Time
counts from the first step on: on a machine with four programs for each core, imports, model and first step took 21 s.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from brimful.task import Shape

CPU_S, ACCELERATOR_S = 20.0, 30.0
ACCELERATOR_OVERHEAD_S = 0.5
"""On an accelerator this much of a pass does not grow with its size: launches, allocations, kernels that are loaded. On an
H200 a plan of T5 base, whose passes took 15 s while kernels were compiled, had no time left for any larger one."""
SEARCH_SHARE = 0.8
"""The rest is for the loader, which is measured last."""
FINISH = 5
"""Passes through the model that follow for a size that is chosen: three to time it, two to verify it."""


def now() -> float:
    """Seconds on the only clock that planning reads."""
    return time.perf_counter()


class PlanTime:
    """What is left of the time, what a probe would take of it, and what was skipped for want of it."""

    def __init__(self, limit_s: float | None, *, overhead_s: float = 0.0) -> None:
        self.limit_s = limit_s
        """None for no limit."""
        self._overhead_s = overhead_s
        self.skipped: list[str] = []
        self._started = now()
        self._passes: dict[tuple[int, Shape], float] = {}

    @classmethod
    def of(cls, plan_seconds: float | None, device: torch.device, *, deterministic: bool) -> "PlanTime":
        """The time requested, or the default of the device. Time decides nothing in a deterministic plan."""
        default_s, overhead_s = (CPU_S, 0.0) if device.type == "cpu" else (ACCELERATOR_S, ACCELERATOR_OVERHEAD_S)
        return cls(None if deterministic else plan_seconds or default_s, overhead_s=overhead_s)

    def start(self) -> None:
        """Count from now: after the imports, the model and the first step, which training needs as well.

        What ran before says nothing of later passes: kernels were loaded and blocks compiled in it.
        """
        self._started = now()
        self._passes.clear()

    @property
    def elapsed_s(self) -> float:
        return now() - self._started

    def record(self, rows: int, shape: Shape, seconds: float) -> None:
        """One forward and backward of this size took so long. Metered ones are slower, so the slowest counts."""
        self._passes[rows, shape] = max(seconds, self._passes.get((rows, shape), 0.0))

    def predict_s(self, rows: int, shape: Shape) -> float:
        """What one forward and backward of this size takes, judging by each that ran; 0 if none did."""
        return min(
            (
                min(seconds, self._overhead_s)
                + max(0.0, seconds - self._overhead_s) * max(1.0, rows / other_rows) * _growth(shape, other)
                for (other_rows, other), seconds in self._passes.items()
            ),
            default=0.0,
        )

    def allows(self, rows: int, shape: Shape, passes: int, skipping: str) -> bool:
        """Whether there is time for this many passes of this size. If not, `skipping` is noted as not done."""
        if self.limit_s is None:
            return True
        if self.elapsed_s + passes * self.predict_s(rows, shape) <= SEARCH_SHARE * self.limit_s:
            return True
        if skipping not in self.skipped:
            self.skipped.append(skipping)
        return False

    @contextmanager
    def trying(self, setting: object) -> Iterator[None]:
        """What is skipped in the block is remembered with the setting that was tried."""
        before, self.skipped = self.skipped, []
        try:
            yield
        finally:
            self.skipped = [*before, *(f"{name} ({setting})" for name in self.skipped)]


def _growth(new: Shape, old: Shape) -> float:
    return max((max(1.0, a / b) for a, b in zip(new, old, strict=True)), default=1.0)
