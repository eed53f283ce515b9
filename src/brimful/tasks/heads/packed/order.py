"""Which rows each run of a pack reads in each step: an endless row of shufflings a side, cut into full batches.

A batch may begin in one shuffling and end in the next, so two of them are at hand for each run and side. A shuffling is
a function of (seed, side, its number): a run reads the same rows whatever else is in the pack, and after a resume.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from brimful.tasks.heads.packed.chance import ORDER, key, orders
from brimful.tasks.heads.packed.job import Job
from brimful.tasks.heads.packed.shelf import Shelf


class Order:
    """The rows of some runs, from the steps where they stand."""

    def __init__(self, jobs: Sequence[Job], shelf: Shelf, batch: int, step: np.ndarray) -> None:
        self.step = step.copy()
        """Of each run; the pack counts it up."""
        self._batch, self._device = batch, shelf.device
        keys = list(dict.fromkeys(job.data for job in jobs))
        parts = [
            [shelf.first[one] + shelf.rows[one].id["train"], shelf.first[one] + shelf.rows[one].ood["train"]]
            for one in keys
        ]
        self._longest = max(len(side) for part in parts for side in part)
        self._table = torch.from_numpy(_padded(parts, self._longest)).to(self._device)
        self._data = torch.tensor([keys.index(job.data) for job in jobs], device=self._device)
        lengths = np.array([[max(1, len(side)) for side in part] for part in parts])
        self._counts = lengths[self._data.cpu().numpy()]
        self._on_device = torch.from_numpy(self._counts).to(self._device)
        self._seeds = torch.tensor([job.seed for job in jobs], device=self._device)
        seen = np.array([[True, job.sees_ood] for job in jobs])
        self.an_epoch = -(-(self._counts * seen).max(1) // batch)
        """Steps that go over the larger side once."""
        self._order = torch.empty(len(jobs), 2, 2, self._longest, dtype=torch.int32, device=self._device)
        self._made = self._wanted() - 1
        """The newest shuffling at hand; the one before it is there as well."""

    def rows(self, step: Tensor, sides: int) -> Tensor:
        """The rows of the next batch, [runs, sides × batch], ID first."""
        self._shuffle()
        places = step[:, None, None] * self._batch + torch.arange(self._batch, device=self._device)
        counts = self._on_device[:, :sides, None]
        where = places // counts % 2 * self._longest + places % counts
        local = self._order[:, :sides].flatten(2).gather(2, where).long()
        side = torch.arange(sides, device=self._device)[None, :, None]
        return self._table[self._data[:, None, None], side, local].flatten(1)

    def _shuffle(self) -> None:
        """Make the shufflings that the next batch may need and that are not there yet."""
        wanted = self._wanted()
        while (late := self._made <= wanted).any():
            runs, sides = late.nonzero()
            self._make(runs, sides, self._made[late] + 1)
            self._made[late] += 1

    def _wanted(self) -> np.ndarray:
        """The shuffling that the next batch begins in, [runs, sides]."""
        return self.step[:, None] * self._batch // self._counts

    def _make(self, runs: np.ndarray, sides: np.ndarray, numbers: np.ndarray) -> None:
        on, side, number = (torch.from_numpy(one).to(self._device) for one in (runs, sides, numbers))
        keys = key(self._seeds[on], ORDER, side, number)
        self._order[on, side, number % 2] = orders(keys, self._on_device[on, side], self._longest).int()


def _padded(parts: list[list[np.ndarray]], longest: int) -> np.ndarray:
    """[datasets, sides, longest]; what lies beyond a side's rows is never read."""
    found = np.zeros((len(parts), 2, longest), dtype=np.int64)
    for place, part in enumerate(parts):
        for side, rows in enumerate(part):
            found[place, side, : len(rows)] = rows
    return found
