"""A small text task with very uneven rows, the plain loop it is compared with, and faults at real places."""

import random
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from brimful.memory import context
from brimful.step import optimizer_memory, stepper
from brimful.task import Loss, Task, loss_terms

PLACES = ("to device", "forward", "backward", "clip", "reservation")
VOCABULARY = 50


class Words(Task):
    """Next-word prediction on rows of 1 to 40 words; the loss counts words, so a mean of means is wrong."""

    name = "words"
    worst_shape = (40,)

    def __init__(self, dtype=torch.float64, dropout=0.0, norm=False):
        self.dtype, self.dropout, self.norm = dtype, dropout, norm

    def model(self):
        torch.manual_seed(1)
        middle = nn.BatchNorm1d(16) if self.norm else nn.Identity()
        return Net(middle, nn.Dropout(self.dropout)).to(self.dtype)

    def loss(self, model, batch):
        logits = model(batch["words"])
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
        return Loss(losses, (batch["labels"] != -100).sum(), log={"id": batch["id"].double().mean()})

    def shape(self, row):
        return (len(row["words"]),)

    def collate(self, rows):
        longest = max(len(row["words"]) for row in rows)
        words = torch.zeros(len(rows), longest, dtype=torch.long)
        labels = torch.full((len(rows), longest), -100)
        for place, row in enumerate(rows):
            words[place, : len(row["words"])] = row["words"]
            labels[place, : len(row["words"])] = row["words"].roll(-1)
        return {"words": words, "labels": labels, "id": torch.tensor([row["id"] for row in rows])}

    def dummy(self, rows, shape):
        return self.collate([{"words": torch.randint(1, VOCABULARY, shape), "id": i} for i in range(rows)])


class TwoTerms(Words):
    """Words and rows are counted: no scaling at the end can serve both."""

    def loss(self, model, batch):
        starts = 0.3 * model.embed(batch["words"][:, 0]).square().sum()
        return {"words": super().loss(model, batch), "rows": Loss(starts, len(batch["words"]))}

    def counts(self, batch):
        return {"rows": len(batch["words"]), "words": (batch["labels"] != -100).sum()}


class FullHost(TwoTerms):
    """The host has memory to collate two rows at once."""

    def collate(self, rows):
        return out_of_memory() if len(rows) > 2 else super().collate(rows)


class Branches(Words):
    """Long rows go through a branch of their own; a process with short rows only never touches it."""

    def model(self):
        model = super().model()
        model.branch = nn.Linear(16, 16).to(self.dtype)
        with torch.no_grad():
            model.branch.weight.copy_(torch.eye(16))
        return model

    def loss(self, model, batch):
        hidden = model.first(model.embed(batch["words"]))
        long = (batch["labels"] != -100).sum(1) > 3
        if long.any():
            hidden = torch.where(long[:, None, None], model.branch(hidden), hidden)
        losses = F.cross_entropy(
            model.head(hidden).flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100
        )
        return Loss(sum=losses, count=(batch["labels"] != -100).sum())


class Net(nn.Module):
    def __init__(self, middle, dropout):
        super().__init__()
        self.embed, self.first = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16)
        self.middle, self.dropout, self.head = middle, dropout, nn.Linear(16, VOCABULARY)

    def forward(self, words):
        x = torch.tanh(self.first(self.embed(words)))
        if isinstance(self.middle, nn.BatchNorm1d):
            x = self.middle(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.dropout(x))


def steps_of_rows(steps=20, rows=12, seed=0):
    """So many steps of rows with 1 to 40 words each."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    ids = iter(range(steps * rows))
    return [
        [
            {"words": torch.randint(1, VOCABULARY, (draw.choice((1, 2, 3, 40)),), generator=generator), "id": next(ids)}
            for _ in range(rows)
        ]
        for _ in range(steps)
    ]


def plain_loop(task: Task, steps: Iterable[list], optimizer: Callable, clip_norm: float | None = 1.0) -> nn.Module:
    """The loop everybody writes, with the whole batch at once."""
    model = task.model()
    chosen = optimizer(model.parameters())
    for rows in steps:
        chosen.zero_grad()
        batch = task.collate(rows)
        terms = loss_terms(task, task.loss(model, batch), model=model, batch=batch)
        sum(term.sum / term.count for term in terms.values()).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        chosen.step()
    return model


def distance(a: nn.Module, b: nn.Module) -> float:
    """Relative L2 over all weights."""
    x, y = (torch.cat([p.detach().double().flatten() for p in model.parameters()]) for model in (a, b))
    return float((x - y).norm() / x.norm())


def out_of_memory(*_args, **_kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.23 GiB (injected)")


class Faults:
    """Runs out of memory once at each (step, micro-batch, place) asked for, at the real place in the real code.

    Steps count from 1 as the stepper's do, micro-batches from 0; for `clip` and `reservation` the micro-batch is ignored.
    """

    def __init__(self, model: Net, due: Iterable[tuple[int, int, str]]) -> None:
        self.due = {(s, 0 if place in PLACES[3:] else m, place) for s, m, place in due}
        self.fired: list[tuple[int, int, str]] = []
        self.step = self.micro = 0
        self._model = model

    def begin(self, step: int) -> None:
        self.step, self.micro = step, -1

    def _here(self, place: str) -> bool:
        key = (self.step, max(self.micro, 0) if place in PLACES[:3] else 0, place)
        if key not in self.due:
            return False
        self.due.remove(key)
        self.fired.append(key)
        self.micro = -1  # the step starts over
        return True

    @contextmanager
    def installed(self):
        real_move, real_norm, real_reserve = context.to_device, stepper.get_total_norm, optimizer_memory.reserve

        def move(batch, device):
            self.micro += 1
            if self._here("to device"):
                out_of_memory()
            return real_move(batch, device)

        def forward(_module, _inputs, output):
            if self._here("forward"):
                out_of_memory()
            if self._here("backward"):
                output.register_hook(out_of_memory)  # the head has its gradients by then, the rest has none

        def norm(*args, **kwargs):
            return out_of_memory() if self._here("clip") else real_norm(*args, **kwargs)

        def proof(*args, **kwargs):
            return out_of_memory() if self._here("reservation") else real_reserve(*args, **kwargs)

        early = self._model.first if hasattr(self._model, "first") else self._model.transformer.drop
        handle = early.register_forward_hook(forward)
        with (
            mock.patch.object(context, "to_device", move),
            mock.patch.object(stepper, "get_total_norm", norm),
            mock.patch.object(optimizer_memory, "reserve", proof),
        ):
            yield self
        handle.remove()
