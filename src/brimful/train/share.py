"""Which rows of a step this process takes.

Rows given as the whole step's, the same on every process, are dealt by work and by each one's measured speed, and a row
too long for a small card goes to a larger one. Rows given as this process's own are all its. Either way the gradients'
weights come from what was counted, so any deal gives the same result; only the time to finish differs.
"""

import statistics
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from brimful.errors import BadOption
from brimful.memory.cut import deal_rows
from brimful.memory.model import MemoryModel
from brimful.plan.plan import Plan
from brimful.task import Shape
from brimful.train.processes import Solo
from brimful.train.rows import Ahead, Listed, Rows

RowsAre = Literal["global", "local"]
"""What is handed to a step on each process: the whole step's rows, or this process's own."""
MEASURED_STEPS = 5
"""Unlike devices without a plan take equal shares for so many steps, and are timed."""
CONTENT, DEEPEST = 4096, 4
"""How much of a row is compared between processes: so many numbers of a tensor, so many levels of objects."""
ALIKE = 1.1
"""Speeds within this factor of each other count as equal."""


@dataclass(frozen=True, slots=True)
class Member:
    """What the others know of a process."""

    device_name: str
    speed: float | None
    """Rows/s as its plan measured them; None without a plan."""
    model: MemoryModel | None
    limit_bytes: float
    """The memory that its plan may use; without end where there is no plan."""

    def holds(self, shape: Shape) -> bool:
        return self.model is None or self.model.cost_bytes(1, shape) <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class Share:
    """This process's rows of a step."""

    rows: Rows
    indices: list[int]
    """Which of the rows given."""
    step_rows: int | None
    """Rows of the whole step; None where only all processes together know."""

    @property
    def work(self) -> float:
        return float(sum(1 + sum(self.rows.shapes[index]) for index in self.indices))


class Dealer:
    """Deals each step's rows, the same way on every process."""

    def __init__(
        self, group: Solo, device: torch.device, plan: Plan | None, limit_bytes: float, rows_are: RowsAre
    ) -> None:
        self._group, self._rows_are = group, rows_are
        name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
        me = Member(name, plan.rows_per_s if plan else None, plan.memory_model if plan else None, limit_bytes)
        self._members: list[Member] = group.gather_objects(me)
        known = [member.speed for member in self._members if member.speed]
        self.speeds = known if len(known) == group.size else [1.0] * group.size
        unlike = len({member.device_name for member in self._members}) > 1
        self._samples: list[float] | None = [] if unlike and len(known) < group.size and rows_are == "global" else None
        self._compared = False

    @property
    def measuring(self) -> bool:
        """Whether the next steps are to be timed."""
        return self._samples is not None

    def share(self, rows: Rows, given: Any) -> Share:
        """This process's part of what it was given."""
        everything = list(range(len(rows)))
        if isinstance(rows, Ahead):  # a loader has dealt already
            return Share(rows, everything, rows.step_rows)
        if self._group.size == 1 or self._rows_are == "local":
            return Share(rows, everything, len(rows) if self._group.size == 1 else None)
        if not self._compared:
            self._compare(rows, given)
        work = [1.0 + sum(shape) for shape in rows.shapes]
        dealt = deal_rows(work, self.speeds, self.barred(rows.shapes))
        return Share(rows, dealt[self._group.rank], len(rows))

    def timed(self, work: float, seconds: float) -> str | None:
        """A clean step took so long. After a few of them rows are dealt by speed; says so when that changes anything."""
        assert self._samples is not None
        self._samples.append(seconds / max(work, 1.0))
        if len(self._samples) < MEASURED_STEPS:
            return None
        speeds = [1 / row[0] for row in self._group.gather([statistics.median(self._samples)])]
        self._samples = None
        if max(speeds) <= ALIKE * min(speeds):
            return None
        self.speeds = [speed / sum(speeds) for speed in speeds]
        shares = ", ".join(
            f"{member.device_name} {speed:.0%}" for member, speed in zip(self._members, self.speeds, strict=True)
        )
        return f"rows are dealt by measured speed from here on: {shares}"

    def barred(self, shapes: list[Shape]) -> list[tuple[int, int]]:
        """(row, process) where the row alone does not fit the process."""
        worst = tuple(max(lengths) for lengths in zip(*shapes, strict=True))
        small = [rank for rank, member in enumerate(self._members) if not member.holds(worst)]
        return [
            (row, rank) for rank in small for row, shape in enumerate(shapes) if not self._members[rank].holds(shape)
        ]

    def _compare(self, rows: Rows, given: Any) -> None:
        """Once: does everybody have the same rows in hand?"""
        self._compared = True
        found = self._group.gather([float(len(rows)), _fingerprint(rows, given)])
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            raise BadOption(
                f"process {other} was given other rows than process 0 ({found[other][0]:.0f} and {found[0][0]:.0f} of them): give "
                'every process the whole step\'s rows, or say Stepper(..., rows_are="local") where each has its own'
            )


def _fingerprint(rows: Rows, given: Any) -> float:
    """A number from the content of the first, middle and last row."""
    some = sorted({0, len(rows) // 2, len(rows) - 1})
    listed = isinstance(rows, Listed)
    return float(zlib.crc32("".join(_told(given[row] if listed else rows.batch([row])) for row in some).encode()))


def _told(value: Any, depth: int = 0) -> str:
    """The same words for equal rows in any process, which pickle and hashes do not give."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{value.detach().cpu().flatten()[:CONTENT].tolist()}"
    if isinstance(value, np.ndarray):
        return f"{value.shape}{value.ravel()[:CONTENT].tolist()}"
    if isinstance(value, Mapping):
        return str(sorted(f"{key!r}: {_told(part, depth + 1)}" for key, part in value.items()))
    if isinstance(value, (list, tuple)):
        return str([_told(part, depth + 1) for part in value[:CONTENT]])
    if isinstance(value, (str, bytes, int, float, bool, type(None))):
        return repr(value)
    inside = getattr(value, "__dict__", None)
    return type(value).__name__ + (_told(inside, depth + 1) if inside and depth < DEEPEST else "")
