"""The features of all datasets and encoders of one width, on the device once, and the order in which runs read them.

Fingerprints stay bytes of 0 and 1, a quarter of their size in fp32. On a CPU, where a product with 2,048 mostly empty
columns is most of a step, they are kept as lists of set bits, about 48 a molecule: the first layer is then a sum of rows of
its weights, 4 times as fast as the dense product (6 runs of 1,024 rows: 0.12 s instead of 0.44).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.molecules.heads import ORDER, Job, Rows, permutations, random_key

SPARSE = 0.1
"""Fingerprints with a smaller share of set bits are summed, not multiplied, on a CPU."""


@dataclass(frozen=True, slots=True)
class Bits:
    """A batch of fingerprints as the columns of their set bits, row after row."""

    columns: Tensor
    offsets: Tensor
    """[rows + 1]"""


class FeatureStore:
    """Rows of one width, by their key."""

    def __init__(self, rows: Mapping[str, Rows], device: torch.device) -> None:
        self.device = device
        self.first: dict[str, int] = {}
        """The first row of each key."""
        count = 0
        for name, dataset in rows.items():
            self.first[name] = count
            count += len(dataset.features)
        self.rows = dict(rows)
        self.features = torch.cat([dataset.features for dataset in rows.values()]).to(device)
        self.labels = _joined_labels(rows).to(device)
        self._bits = _to_bits(self.features) if device.type == "cpu" else None

    @property
    def sparse(self) -> bool:
        """Whether batches are `Bits`."""
        return self._bits is not None

    @property
    def nbytes(self) -> int:
        bits = 0 if self._bits is None else self._bits.columns.nbytes + self._bits.offsets.nbytes
        return self.features.nbytes + self.labels.nbytes + bits

    def take(self, rows: Tensor) -> Tensor | Bits:
        """The features of these rows, [runs, rows], as [runs, rows, inputs] or as bits."""
        if self._bits is None:
            return self.features[rows].float()
        return _take_bits(self._bits, rows.flatten())


def _joined_labels(rows: Mapping[str, Rows]) -> Tensor:
    """[rows, tasks]; −1 where a dataset has fewer tasks than another, or none."""
    tasks = max((dataset.labels.shape[1] for dataset in rows.values() if dataset.labels is not None), default=0)
    padded = []
    for dataset in rows.values():
        own = dataset.labels if dataset.labels is not None else torch.empty(len(dataset.features), 0, dtype=torch.int64)
        padded.append(F.pad(own, (0, tasks - own.shape[1]), value=-1))
    return torch.cat(padded)


def _to_bits(features: Tensor) -> Bits | None:
    if features.dtype != torch.uint8 or int(features.max()) > 1:
        return None
    if int(features.sum(dtype=torch.int64)) > SPARSE * features.numel():
        return None
    rows, columns = features.nonzero(as_tuple=True)
    return Bits(columns, F.pad(torch.bincount(rows, minlength=len(features)).cumsum(0), (1, 0)))


def _take_bits(bits: Bits, rows: Tensor) -> Bits:
    """The bits of these rows, in their order."""
    begin, end = bits.offsets[rows], bits.offsets[rows + 1]
    offsets = F.pad((end - begin).cumsum(0), (1, 0))
    where = torch.repeat_interleave(begin - offsets[:-1], end - begin, output_size=int(offsets[-1]))
    return Bits(bits.columns[where + torch.arange(len(where))], offsets)


class SumOfRows(torch.autograd.Function):
    """Bits times weights [runs, inputs, outputs]: for each row the sum of its bits' weights.

    The gradient of a weight is the sum over the rows that have its bit: the same sum with the two sides exchanged, which
    takes half the time of torch's own backward.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, columns: Tensor, offsets: Tensor) -> Tensor:
        runs, inputs, outputs = weights.shape
        rows = (len(offsets) - 1) // runs
        row = torch.repeat_interleave(torch.arange(runs * rows), offsets.diff(), output_size=len(columns))
        index = columns + row // rows * inputs
        ctx.save_for_backward(index, row)
        ctx.shape = weights.shape
        flat = weights.reshape(runs * inputs, outputs)
        return F.embedding_bag(index, flat, offsets, mode="sum", include_last_offset=True).view(runs, rows, outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        index, row = ctx.saved_tensors
        runs, inputs, outputs = ctx.shape
        order = index.to(torch.int32).argsort(stable=True)
        offsets = F.pad(torch.bincount(index, minlength=runs * inputs).cumsum(0), (1, 0))
        flat = grads[0].reshape(-1, outputs)
        grad = F.embedding_bag(row[order], flat, offsets, mode="sum", include_last_offset=True)
        return grad.view(ctx.shape), None, None


class BatchOrder:
    """Which rows each run of a pack reads in each step.

    Each side is an endless sequence of permutations, read in full batches. A batch may begin in one permutation and end in
    the next, so two are kept for each run and side. A permutation is a function of (seed, side, its number): a run reads
    the same rows whatever else is in the pack, and after a resume.
    """

    def __init__(self, jobs: Sequence[Job], store: FeatureStore, batch: int, step: np.ndarray) -> None:
        self.step = step.copy()
        """The step of each run; the pack increments it."""
        self._batch, self._device = batch, store.device
        keys = list(dict.fromkeys(job.data for job in jobs))
        parts = [
            [store.first[key] + store.rows[key].id["train"], store.first[key] + store.rows[key].ood["train"]]
            for key in keys
        ]
        self._longest = max(len(side) for part in parts for side in part)
        self._table = torch.from_numpy(_padded(parts, self._longest)).to(self._device)
        self._data = torch.tensor([keys.index(job.data) for job in jobs], device=self._device)
        lengths = np.array([[max(1, len(side)) for side in part] for part in parts])
        self._counts = lengths[self._data.cpu().numpy()]
        self._counts_on_device = torch.from_numpy(self._counts).to(self._device)
        self._seeds = torch.tensor([job.seed for job in jobs], device=self._device)
        seen = np.array([[True, job.objective.sees_ood] for job in jobs])
        self.steps_per_epoch = -(-(self._counts * seen).max(1) // batch)
        """Steps that read the larger side once."""
        self._order = torch.empty(len(jobs), 2, 2, self._longest, dtype=torch.int32, device=self._device)
        self._newest = self._needed() - 1
        """The number of the newest permutation kept for each run and side; the one before it is kept as well."""

    def rows(self, step: Tensor, sides: int) -> Tensor:
        """The rows of the next batch, [runs, sides × batch], ID first."""
        self._extend()
        positions = step[:, None, None] * self._batch + torch.arange(self._batch, device=self._device)
        counts = self._counts_on_device[:, :sides, None]
        where = positions // counts % 2 * self._longest + positions % counts
        local = self._order[:, :sides].flatten(2).gather(2, where).long()
        side = torch.arange(sides, device=self._device)[None, :, None]
        return self._table[self._data[:, None, None], side, local].flatten(1)

    def _extend(self) -> None:
        """Make the permutations that the next batch needs and that do not exist yet."""
        needed = self._needed()
        while (late := self._newest <= needed).any():
            runs, sides = late.nonzero()
            self._permute(runs, sides, self._newest[late] + 1)
            self._newest[late] += 1

    def _needed(self) -> np.ndarray:
        """The permutation that the next batch begins in, [runs, sides]."""
        return self.step[:, None] * self._batch // self._counts

    def _permute(self, runs: np.ndarray, sides: np.ndarray, numbers: np.ndarray) -> None:
        run, side, number = (torch.from_numpy(array).to(self._device) for array in (runs, sides, numbers))
        keys = random_key(self._seeds[run], ORDER, side, number)
        self._order[run, side, number % 2] = permutations(keys, self._counts_on_device[run, side], self._longest).int()


def _padded(parts: list[list[np.ndarray]], longest: int) -> np.ndarray:
    """[datasets, sides, longest]; what comes after a side's rows is never read."""
    padded = np.zeros((len(parts), 2, longest), dtype=np.int64)
    for place, part in enumerate(parts):
        for side, rows in enumerate(part):
            padded[place, side, : len(rows)] = rows
    return padded
