"""Runs of one shape trained together, each exactly as it would be alone.

A step gathers every run's own rows, sends all of them through all heads at once (`torch.func`), applies each run's own loss,
clips each run's own gradient and updates all weights with each run's own learning rate:

    rows      [runs, rows]            the next batch of each run's own shuffling
    energies  [runs, rows]            one forward for all
    loss      [runs]                  runs with the same objective together
    gradient  [runs, parameters]      of the sum, which is each run's own since they share nothing

One run of 512 pairs leaves a card idle between launches: in a prototype 100 at once did 60 times as much as one fed from
the host.

Each side's rows are an endless row of shufflings without replacement, read in batches that are always full; an epoch is as
many steps as go over the larger side once. A step that runs out of memory has changed nothing: the update
needs none once it has begun.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from brimful.molecules.feature_store import Bits, Order, Shelf, SumOfRows
from brimful.molecules.job import DROPOUT, Head, HeadShape, Job, kept, key, made
from brimful.molecules.losses import classifier_loss, cross_entropy, energy_loss

# Where each of a pack's runs stands, stacked: one row a run. It can be taken apart and put together in any way.
#
# A run leaves when it stops and another takes its place; memory runs short and half of them wait; a sweep is killed and goes
# on: all of these take rows from here and put rows here. Since everything random is a function of seed and step (`chance`), a
# row is all there is to a run.


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


BETAS, EPSILON = (0.9, 0.999), 1e-8


class Pack:
    """Some runs on a device, between two steps."""

    def __init__(self, state: State, shelf: Shelf) -> None:
        self.state, self.shelf, self.device = state, shelf, shelf.device
        self.jobs = state.jobs
        self.batch, self.shape = self.jobs[0].training.batch, self.jobs[0].shape
        self._head = Head(self.shape).to("meta")
        self._order = Order(self.jobs, shelf, self.batch, state.step.cpu().numpy())
        self._sides = 2 if any(job.sees_ood for job in self.jobs) else 1
        self._groups = _groups(self.jobs, self.device)
        self._seeds = torch.tensor([job.seed for job in self.jobs], device=self.device)
        self._dropout = torch.tensor([job.dropout for job in self.jobs], device=self.device)
        self._drops = any(job.dropout for job in self.jobs)
        self._numbers = {name: self._number(name) for name in ("lr", "weight_decay", "clip", "step_size", "gamma")}
        self._an_epoch = torch.from_numpy(self._order.an_epoch).to(self.device)

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
        """Of each run on these rows, [runs, sides × batch]: ID first."""
        outputs = self._forward(params, rows, self._factors(rows.shape[1]))
        losses = outputs.new_empty(len(self))
        for group in self._groups:
            own = outputs[group.runs] if len(self._groups) > 1 else outputs
            of_id, of_ood = own[:, : self.batch], own[:, self.batch :]
            if not self.shape.classes:
                found = energy_loss(group.objective, of_id.squeeze(-1), of_ood.squeeze(-1), group.options)
            else:
                labels = self.shelf.labels[rows[group.runs, : self.batch], : len(self.shape.classes)]
                found = classifier_loss(
                    group.objective, self.shape.logits(of_id), labels, self.shape.logits(of_ood), group.options
                )
            losses = losses.index_put((group.runs,), found)
        return losses

    def outputs(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """What the heads say of these rows, [runs, rows], without dropout: energies, or logits [..., tasks, classes]."""
        with torch.no_grad():
            found = self._forward(self._params(weights), rows, ())
        return self.shape.logits(found) if self.shape.classes else found.squeeze(-1)

    def epoch_losses(self, places: Sequence[int]) -> list[float]:
        """Mean losses of the epoch that these runs have just ended."""
        found = (self.state.loss_sum / self._an_epoch)[places].tolist()
        self.state.loss_sum[places] = 0
        return found

    def due(self) -> list[int]:
        """The runs whose epoch has ended and has not been judged yet."""
        ended = (self._order.step % self._order.an_epoch == 0).nonzero()[0].tolist()
        return [place for place in ended if self.epochs(place) > len(self.state.curves[place])]

    def epochs(self, place: int) -> int:
        """Whole epochs behind this run."""
        return int(self._order.step[place] // self._order.an_epoch[place])

    def _params(self, weights: Tensor | None = None) -> dict[str, Tensor]:
        """The stacked parameters by name, as views; leaves of a graph of their own."""
        own, found, place = self.state.weights if weights is None else weights, {}, 0
        for name, param in self._head.named_parameters():
            view = own[:, place : place + param.numel()].unflatten(1, param.shape)
            found[name] = view.detach().requires_grad_(weights is None)
            place += param.numel()
        return found

    def _forward(self, params: Mapping[str, Tensor], rows: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
        x = self.shelf.take(rows)
        bits = isinstance(x, Bits)
        if isinstance(x, Bits):
            weight, bias = params["layers.0.weight"], params["layers.0.bias"]
            x = SumOfRows.apply(weight, x.places, x.offsets) + bias[:, None]

        def alone(own: dict[str, Tensor], x: Tensor, *factors: Tensor) -> Tensor:
            return functional_call(self._head, own, (x, factors), {"after_first": bits})

        return vmap(alone)(dict(params), x, *factors)

    def _factors(self, rows: int) -> tuple[Tensor, ...]:
        if not self._drops:
            return ()
        keys = key(self._seeds, DROPOUT, self.state.step)
        return tuple(
            kept(key(keys, layer), rows, units, self._dropout) for layer, units in enumerate(self.shape.hidden)
        )

    def _update(self, grad: Tensor) -> None:
        """Clipping and AdamW as torch does them, with each run's own numbers.

        Everything that needs memory comes before the first weight changes: an update is whole or did not begin.
        """
        own, state = self._numbers, self.state
        scale = (own["clip"] / (grad.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
        scale = torch.where(own["clip"] > 0, scale, 1)
        times, epoch = (state.step + 1)[:, None], (state.step // self._an_epoch)[:, None]
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

    objective: str
    runs: Tensor
    options: Mapping[str, Tensor]


def _groups(jobs: Sequence[Job], device: torch.device) -> list[_Group]:
    found = []
    for objective in dict.fromkeys(job.objective for job in jobs):
        runs = [place for place, job in enumerate(jobs) if job.objective == objective]
        options = {
            name: torch.tensor([jobs[place].options[name] for place in runs], dtype=torch.float32, device=device)
            for name in jobs[runs[0]].options
            if name != "hard" or any(jobs[place].options[name] < 1 for place in runs)
        }
        found.append(_Group(objective, torch.tensor(runs, device=device), options))
    return found


# How well runs do on their validation molecules: one number each, higher is better, for many runs at once.
#
# Runs that see out-of-distribution molecules are judged by AUROC; a plain classifier, which must not, by the loss on
# in-distribution molecules alone. Rows are read a step's worth at a time, so that a validation takes no more memory
# than a step does.


def validation_scores(pack: Pack, places: Sequence[int]) -> list[float]:
    """Of these runs of the pack, with the weights they have now."""
    judged = [pack.jobs[place] for place in places]
    weights = pack.state.weights[torch.tensor(places, device=pack.device)]
    rows, counts = _rows(pack, judged, "id")
    of_id = _outputs(pack, rows, weights)
    if not pack.shape.classes:
        beyond, beyond_counts = _rows(pack, judged, "ood")
        return auroc_of_runs(of_id, counts, _outputs(pack, beyond, weights), beyond_counts).tolist()
    labels = pack.shelf.labels[rows][..., : len(pack.shape.classes)]
    labels = torch.where((torch.arange(rows.shape[1], device=pack.device) < counts[:, None])[..., None], labels, -1)
    losses = -cross_entropy(of_id, labels).double()
    exposed = [place for place, job in enumerate(judged) if job.sees_ood]
    if exposed:
        beyond, beyond_counts = _rows(pack, [judged[place] for place in exposed], "ood")
        of_ood = _outputs(pack, beyond, weights[exposed])
        objectives = [judged[place].objective for place in exposed]
        scores = [_read(of, objectives) for of in (of_id[exposed], of_ood)]
        losses[exposed] = auroc_of_runs(scores[0], counts[exposed], scores[1], beyond_counts)
    return losses.tolist()


def auroc_of_runs(in_dist: Tensor, counts: Tensor, out_dist: Tensor, beyond_counts: Tensor) -> Tensor:
    """AUROC of each run, ties counted half; scores [runs, rows], of which the first `counts` are real."""
    real = torch.arange(in_dist.shape[1], device=in_dist.device) < counts[:, None]
    ordered, _ = torch.where(real, in_dist, torch.inf).sort(dim=1)
    queries = out_dist.contiguous()
    below = torch.searchsorted(ordered, queries)
    upto = torch.searchsorted(ordered, queries, right=True).clamp(max=counts[:, None])
    won = (below + upto).double() / 2
    asked = torch.arange(out_dist.shape[1], device=out_dist.device) < beyond_counts[:, None]
    found = torch.where(asked, won, 0).sum(1) / (counts * beyond_counts)
    broken = ~in_dist.isfinite().all(1) | ~out_dist.isfinite().all(1)
    return torch.where(broken, torch.nan, found)


def _read(logits: Tensor, objectives: Sequence[str]) -> Tensor:
    """A classifier's score, higher for OOD: the energy of runs trained on it, 1 − the largest probability of the others."""
    by_energy = torch.tensor([name == "classify-energy-oe" for name in objectives], device=logits.device)
    energy, doubt = -logits.logsumexp(-1).mean(-1), 1 - logits.softmax(-1).amax(-1).mean(-1)
    return torch.where(by_energy[:, None], energy, doubt)


def _rows(pack: Pack, jobs: Sequence[Job], side: str) -> tuple[Tensor, Tensor]:
    """The validation rows of each run, the first one repeated where others have more, and how many are real."""
    shelf = pack.shelf
    own = [shelf.first[job.data] + getattr(shelf.rows[job.data], side)["valid"] for job in jobs]
    longest = max(map(len, own))
    padded = np.stack([np.concatenate([rows, np.repeat(rows[:1], longest - len(rows))]) for rows in own])
    return torch.from_numpy(padded).to(pack.device), torch.tensor([len(rows) for rows in own], device=pack.device)


def _outputs(pack: Pack, rows: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([pack.outputs(part, weights) for part in rows.split(2 * pack.batch, dim=1)], 1)
