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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from brimful.tasks.heads.packed.chance import DROPOUT, kept, key
from brimful.tasks.heads.packed.head import Head
from brimful.tasks.heads.packed.job import Job
from brimful.tasks.heads.packed.losses import classifier_loss, energy_loss
from brimful.tasks.heads.packed.order import Order
from brimful.tasks.heads.packed.shelf import Bits, Shelf, SumOfRows
from brimful.tasks.heads.packed.state import State

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
