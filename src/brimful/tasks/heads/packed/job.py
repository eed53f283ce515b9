"""What one run is: its data, its objective, its head and its numbers. Nothing here depends on what else is trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from brimful.tasks.heads.packed.head import HeadShape
from brimful.tasks.heads.spec.asked import TrainSpec
from brimful.tasks.heads.spec.methods import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One dataset's rows of one encoder's features, and which are for what. Indices point into `features`."""

    features: Tensor
    """[rows, inputs], float32 or, for fingerprints of 0 and 1, uint8."""
    labels: Tensor | None = None
    """[rows, tasks], int64, −1 where a label is not known."""
    id: Mapping[str, np.ndarray]
    """train, valid, test"""
    ood: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One head to be trained."""

    name: str
    """Unique in a sweep, and a file's name."""
    data: str
    """The key of its `Rows`."""
    objective: Objective
    options: Mapping[str, float] = field(default_factory=dict)
    seed: int
    shape: HeadShape
    training: TrainSpec = field(default_factory=TrainSpec)
    dropout: float = 0.1

    @property
    def kin(self) -> tuple[Any, ...]:
        """Jobs with the same one can share a pack."""
        return self.shape, self.training.batch

    @property
    def sees_ood(self) -> bool:
        return self.objective != "classify"
