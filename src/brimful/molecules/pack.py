"""Runs of one shape trained together, each exactly as it would be alone.

A step gathers every run's own rows, sends them through all heads at once (`torch.func`), applies each run's own loss, clips
each run's own gradient and updates all weights with each run's own learning rate:

    rows      [runs, rows]            the next batch of each run's own permutation
    energies  [runs, rows]            one forward for all
    loss      [runs]                  runs with the same objective together
    gradient  [runs, parameters]      of the sum, which is each run's own since they share nothing

One run of 512 pairs leaves a GPU idle between launches: in a prototype 100 at once did 60 times the work of one fed from
the host. A step that runs out of memory has changed nothing, because the update allocates everything before it begins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from brimful.molecules.feature_store import BatchOrder, Bits, FeatureStore, SumOfRows
from brimful.molecules.heads import (
    DROPOUT,
    Head,
    HeadShape,
    Job,
    classifier_loss,
    cross_entropy,
    dropout_factors,
    energy_loss,
    new_head,
    random_key,
)
from brimful.molecules.methods import Objective, energy_of, msp_of

BETAS, EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Some runs, stacked: one row per run.

    Replacing a run that has stopped, parking half of a pack on the host and resuming a killed sweep all move rows of this
    table. Random numbers are functions of seed and step, so a row holds everything that a run needs.
    """

    jobs: tuple[Job, ...]
    weights: Tensor
    """[runs, parameters], in the order of `Head.parameters()`."""
    first: Tensor
    second: Tensor
    """AdamW's moments."""
    best: Tensor
    """The weights with the best validation score."""
    step: Tensor
    loss_sum: Tensor
    """The sum of the losses in the current epoch."""
    best_score: Tensor
    best_epoch: Tensor
    """Counted from 1; 0 before the first."""
    curves: tuple[list[float], ...]
    """Validation score of each epoch."""
    losses: tuple[list[float], ...]
    """Mean training loss of each epoch."""

    @classmethod
    def new(cls, jobs: Sequence[Job], device: torch.device) -> "State":
        weights = torch.stack([initial_weights(job.shape, job.seed) for job in jobs]).to(device)
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
        return self._copy(places, lambda tensor: tensor[index])

    def joined(self, other: "State") -> "State":
        """These runs, then those."""
        parts: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in LISTS}
        parts |= {
            name: torch.cat([own := getattr(self, name), getattr(other, name).to(own.device)]) for name in TENSORS
        }
        return State(**parts)

    def to(self, device: torch.device | str) -> "State":
        return self._copy(range(len(self)), lambda tensor: tensor.to(device))

    def _copy(self, places: Sequence[int], convert: Callable[[Tensor], Tensor]) -> "State":
        """Curves are copied: those of runs that continue grow."""
        parts: dict[str, Any] = {"jobs": tuple(self.jobs[place] for place in places)}
        parts |= {name: tuple(list(getattr(self, name)[place]) for place in places) for name in ("curves", "losses")}
        parts |= {name: convert(getattr(self, name)) for name in TENSORS}
        return State(**parts)


LISTS = ("jobs", "curves", "losses")
TENSORS = tuple(field.name for field in fields(State) if field.name not in LISTS)


@lru_cache(maxsize=32)  # every dataset and loss begins with the same ten seeds
def initial_weights(shape: HeadShape, seed: int) -> Tensor:
    """The initial parameters of a run, flattened."""
    return torch.cat([param.detach().flatten() for param in new_head(shape, seed).parameters()])


class Pack:
    """Some runs on a device, between two steps."""

    def __init__(self, state: State, store: FeatureStore) -> None:
        self.state, self.store, self.device = state, store, store.device
        self.jobs = state.jobs
        self.batch, self.shape = self.jobs[0].training.batch, self.jobs[0].shape
        self._head = Head(self.shape).to("meta")
        self._order = BatchOrder(self.jobs, store, self.batch, state.step.cpu().numpy())
        self._sides = 2 if any(job.objective.sees_ood for job in self.jobs) else 1
        self._groups = _group_by_objective(self.jobs, self.device)
        self._seeds = torch.tensor([job.seed for job in self.jobs], device=self.device)
        self._dropout = torch.tensor([job.dropout for job in self.jobs], device=self.device)
        self._has_dropout = any(job.dropout for job in self.jobs)
        self._numbers = {name: self._number(name) for name in ("lr", "weight_decay", "clip", "step_size", "gamma")}
        self._steps_per_epoch = torch.from_numpy(self._order.steps_per_epoch).to(self.device)

    def __len__(self) -> int:
        return len(self.jobs)

    def _number(self, name: str) -> Tensor:
        values = [getattr(job.training, name) for job in self.jobs]
        return torch.tensor(values, dtype=torch.float32, device=self.device)[:, None]

    def step(self) -> None:
        """One step of every run."""
        params = self._params()
        loss = self.loss(params, self._order.rows(self.state.step, self._sides))
        grads = torch.autograd.grad(loss.sum(), list(params.values()))
        self._update(torch.cat([grad.flatten(1) for grad in grads], 1))
        self.state.loss_sum.add_(loss.detach())
        self.state.step.add_(1)
        self._order.step += 1

    def loss(self, params: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """The loss of each run on these rows, [runs, sides × batch], ID first."""
        outputs = self._forward(params, rows, self._dropout_factors(rows.shape[1]))
        losses = outputs.new_empty(len(self))
        for group in self._groups:
            own = outputs[group.runs] if len(self._groups) > 1 else outputs
            of_id, of_ood = own[:, : self.batch], own[:, self.batch :]
            if not self.shape.classes:
                loss = energy_loss(group.objective.name, of_id.squeeze(-1), of_ood.squeeze(-1), group.options)
            else:
                labels = self.store.labels[rows[group.runs, : self.batch], : len(self.shape.classes)]
                loss = classifier_loss(
                    group.objective.name, self.shape.logits(of_id), labels, self.shape.logits(of_ood), group.options
                )
            losses = losses.index_put((group.runs,), loss)
        return losses

    def outputs(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """The heads' outputs for these rows, [runs, rows], without dropout: energies, or logits [..., tasks, classes]."""
        with torch.no_grad():
            outputs = self._forward(self._params(weights), rows, ())
        return self.shape.logits(outputs) if self.shape.classes else outputs.squeeze(-1)

    def finish_epoch(self, places: Sequence[int]) -> list[float]:
        """Mean losses of the epoch that these runs have just ended."""
        losses = (self.state.loss_sum / self._steps_per_epoch)[places].tolist()
        self.state.loss_sum[places] = 0
        return losses

    def due(self) -> list[int]:
        """The runs whose epoch has ended and has not been validated yet."""
        ended = (self._order.step % self._order.steps_per_epoch == 0).nonzero()[0].tolist()
        return [place for place in ended if self.epochs(place) > len(self.state.curves[place])]

    def epochs(self, place: int) -> int:
        """Epochs that this run has completed."""
        return int(self._order.step[place] // self._order.steps_per_epoch[place])

    def _params(self, weights: Tensor | None = None) -> dict[str, Tensor]:
        """The stacked parameters by name, as views; leaves of their own graph."""
        own, params, place = self.state.weights if weights is None else weights, {}, 0
        for name, param in self._head.named_parameters():
            view = own[:, place : place + param.numel()].unflatten(1, param.shape)
            params[name] = view.detach().requires_grad_(weights is None)
            place += param.numel()
        return params

    def _forward(self, params: Mapping[str, Tensor], rows: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
        x = self.store.take(rows)
        sparse = isinstance(x, Bits)
        if isinstance(x, Bits):
            weight, bias = params["layers.0.weight"], params["layers.0.bias"]
            x = SumOfRows.apply(weight, x.columns, x.offsets) + bias[:, None]

        def one_run(own: dict[str, Tensor], x: Tensor, *factors: Tensor) -> Tensor:
            return functional_call(self._head, own, (x, factors), {"after_first": sparse})

        return vmap(one_run)(dict(params), x, *factors)

    def _dropout_factors(self, rows: int) -> tuple[Tensor, ...]:
        if not self._has_dropout:
            return ()
        keys = random_key(self._seeds, DROPOUT, self.state.step)
        return tuple(
            dropout_factors(random_key(keys, layer), rows, units, self._dropout)
            for layer, units in enumerate(self.shape.hidden)
        )

    def _update(self, grad: Tensor) -> None:
        """Clipping and AdamW as in torch, with each run's own numbers.

        Everything that needs memory comes before the first weight changes: an update is complete or did not begin.
        """
        own, state = self._numbers, self.state
        scale = (own["clip"] / (grad.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
        scale = torch.where(own["clip"] > 0, scale, 1)
        times, epoch = (state.step + 1)[:, None], (state.step // self._steps_per_epoch)[:, None]
        lr = own["lr"] * own["gamma"] ** (epoch // own["step_size"])
        decay, size, root = 1 - lr * own["weight_decay"], -lr / (1 - BETAS[0] ** times), (1 - BETAS[1] ** times).sqrt()
        at_once = 1 if self.device.type == "cpu" else len(self)  # one run's weights stay in the cores' caches
        work = torch.empty_like(grad[:at_once])
        for begin in range(0, len(self), at_once):
            part = slice(begin, begin + at_once)
            grad[part].mul_(scale[part])
            state.first[part].lerp_(grad[part], 1 - BETAS[0])
            state.second[part].mul_(BETAS[1]).addcmul_(grad[part], grad[part], value=1 - BETAS[1])
            torch.sqrt(state.second[part], out=work).div_(root[part]).add_(EPSILON)
            torch.div(state.first[part], work, out=work).mul_(size[part])
            state.weights[part].mul_(decay[part]).add_(work)


@dataclass(frozen=True, slots=True)
class _Group:
    """Runs of a pack with one objective."""

    objective: Objective
    runs: Tensor
    options: Mapping[str, Tensor]


def _group_by_objective(jobs: Sequence[Job], device: torch.device) -> list[_Group]:
    groups = []
    for objective in dict.fromkeys(job.objective for job in jobs):
        runs = [place for place, job in enumerate(jobs) if job.objective == objective]
        options = {
            name: torch.tensor([jobs[place].options[name] for place in runs], dtype=torch.float32, device=device)
            for name in jobs[runs[0]].options
            if any(jobs[place].options[name] != objective.neutral.get(name) for place in runs)
        }
        groups.append(_Group(objective, torch.tensor(runs, device=device), options))
    return groups


# ---- Validation: one number per run, higher is better ------------------------------------------------------------------------
#
# Runs that see OOD molecules are scored by AUROC, a plain classifier, which must not, by its loss on ID molecules. Rows are
# read a step's worth at a time, so that validation takes no more memory than a step.


def validation_scores(pack: Pack, places: Sequence[int]) -> list[float]:
    """The scores of these runs of the pack, with their current weights."""
    jobs = [pack.jobs[place] for place in places]
    weights = pack.state.weights[torch.tensor(places, device=pack.device)]
    rows, counts = _validation_rows(pack, jobs, "id")
    of_id = _outputs(pack, rows, weights)
    if not pack.shape.classes:
        ood_rows, ood_counts = _validation_rows(pack, jobs, "ood")
        return auroc_of_runs(of_id, counts, _outputs(pack, ood_rows, weights), ood_counts).tolist()
    labels = pack.store.labels[rows][..., : len(pack.shape.classes)]
    labels = torch.where((torch.arange(rows.shape[1], device=pack.device) < counts[:, None])[..., None], labels, -1)
    scores = -cross_entropy(of_id, labels).double()
    exposed = [place for place, job in enumerate(jobs) if job.objective.sees_ood]
    if exposed:
        ood_rows, ood_counts = _validation_rows(pack, [jobs[place] for place in exposed], "ood")
        of_ood = _outputs(pack, ood_rows, weights[exposed])
        by_energy = torch.tensor([jobs[place].objective.validates_energy for place in exposed], device=pack.device)
        id_scores, ood_scores = (
            torch.where(by_energy[:, None], energy_of(logits), msp_of(logits)) for logits in (of_id[exposed], of_ood)
        )
        scores[exposed] = auroc_of_runs(id_scores, counts[exposed], ood_scores, ood_counts)
    return scores.tolist()


def auroc_of_runs(in_dist: Tensor, counts: Tensor, out_dist: Tensor, ood_counts: Tensor) -> Tensor:
    """`metrics.auroc` of many runs, on the device: scores [runs, rows], of which the first `counts` are real."""
    real = torch.arange(in_dist.shape[1], device=in_dist.device) < counts[:, None]
    ordered, _ = torch.where(real, in_dist, torch.inf).sort(dim=1)
    queries = out_dist.contiguous()
    below = torch.searchsorted(ordered, queries)
    not_above = torch.searchsorted(ordered, queries, right=True).clamp(max=counts[:, None])
    won = (below + not_above).double() / 2
    real = torch.arange(out_dist.shape[1], device=out_dist.device) < ood_counts[:, None]
    auroc = torch.where(real, won, 0).sum(1) / (counts * ood_counts)
    broken = ~in_dist.isfinite().all(1) | ~out_dist.isfinite().all(1)
    return torch.where(broken, torch.nan, auroc)


def _validation_rows(pack: Pack, jobs: Sequence[Job], side: str) -> tuple[Tensor, Tensor]:
    """The validation rows of each run, padded with its first one, and how many are real."""
    store = pack.store
    own = [store.first[job.data] + getattr(store.rows[job.data], side)["valid"] for job in jobs]
    longest = max(map(len, own))
    padded = np.stack([np.concatenate([rows, np.repeat(rows[:1], longest - len(rows))]) for rows in own])
    return torch.from_numpy(padded).to(pack.device), torch.tensor([len(rows) for rows in own], device=pack.device)


def _outputs(pack: Pack, rows: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([pack.outputs(part, weights) for part in rows.split(2 * pack.batch, dim=1)], 1)
