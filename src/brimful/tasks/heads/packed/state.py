"""Where each of a pack's runs stands, stacked: one row a run. It can be taken apart and put together in any way.

A run leaves when it stops and another takes its place; memory runs short and half of them wait; a sweep is killed and goes
on: all of these take rows from here and put rows here. Since everything random is a function of seed and step (`chance`), a
row is all there is to a run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from brimful.tasks.heads.packed.head import HeadShape, made
from brimful.tasks.heads.packed.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Of so many runs."""

    jobs: tuple[Job, ...]
    weights: Tensor
    """[runs, parameters], in the order of `Head.parameters()`."""
    first: Tensor
    second: Tensor
    """AdamW's moments."""
    best: Tensor
    """The weights that did best on the validation molecules."""
    step: Tensor
    loss_sum: Tensor
    """Of the epoch that has begun."""
    best_score: Tensor
    best_epoch: Tensor
    """Epochs count from 1; 0 before the first."""
    curves: tuple[list[float], ...]
    """Validation score of each epoch."""
    losses: tuple[list[float], ...]
    """Mean training loss of each epoch."""

    @classmethod
    def new(cls, jobs: Sequence[Job], device: torch.device) -> "State":
        weights = torch.stack([flat(job.shape, job.seed) for job in jobs]).to(device)
        count = len(jobs)
        return cls(
            jobs=tuple(jobs),
            weights=weights,
            first=torch.zeros_like(weights),
            second=torch.zeros_like(weights),
            best=weights.clone(),
            step=torch.zeros(count, dtype=torch.int64, device=device),
            loss_sum=torch.zeros(count, dtype=torch.float64, device=device),
            best_score=torch.full((count,), -torch.inf, dtype=torch.float64, device=device),
            best_epoch=torch.zeros(count, dtype=torch.int64, device=device),
            curves=tuple([] for _ in jobs),
            losses=tuple([] for _ in jobs),
        )

    def __len__(self) -> int:
        return len(self.jobs)

    def take(self, places: Sequence[int]) -> "State":
        """Some of the runs."""
        index = torch.tensor(list(places), dtype=torch.int64, device=self.step.device)
        return self._made(places, lambda one: one[index])

    def joined(self, other: "State") -> "State":
        """These runs, then those."""
        found: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in LISTS}
        found |= {
            name: torch.cat([one := getattr(self, name), getattr(other, name).to(one.device)]) for name in TENSORS
        }
        return State(**found)

    def to(self, device: torch.device | str) -> "State":
        return self._made(range(len(self)), lambda one: one.to(device))

    def _made(self, places: Sequence[int], tensors: Callable[[Tensor], Tensor]) -> "State":
        """Curves are copied: those of runs that go on grow."""
        found: dict[str, Any] = {"jobs": tuple(self.jobs[place] for place in places)}
        found |= {name: tuple(list(getattr(self, name)[place]) for place in places) for name in ("curves", "losses")}
        found |= {name: tensors(getattr(self, name)) for name in TENSORS}
        return State(**found)


LISTS = ("jobs", "curves", "losses")
TENSORS = tuple(field.name for field in fields(State) if field.name not in LISTS)


@lru_cache(maxsize=32)  # every dataset and loss begins with the same ten seeds
def flat(shape: HeadShape, seed: int) -> Tensor:
    """The first weights of a run, one after the other."""
    return torch.cat([param.detach().flatten() for param in made(shape, seed).parameters()])
