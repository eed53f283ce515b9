"""Small tasks that are planned in milliseconds."""

import torch
import torch.nn.functional as F
from torch import nn

from brimful.planning.planner import plan
from brimful.task import Loss, Task

LIMIT = "4MiB"


def small_plan(task=None, **options):
    """A plan on the CPU under a small limit, not saved."""
    return plan(task or Tagger(), **{"memory_limit": LIMIT, "device": "cpu", "cache": False, **options})


class Tagger(Task):
    """A token tagger: memory grows with rows × length, the loss counts tokens."""

    name = "tagger"
    worst_shape = (64,)
    global_batch = 50

    def model(self):
        body = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)])
        return _Stack(body)

    def loss(self, model, batch):
        logits = model(batch["ids"])
        return Loss(
            F.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten(), reduction="sum"), batch["ids"].numel()
        )

    def dummy(self, rows, shape):
        return {"ids": torch.randint(0, 100, (rows, *shape))}


class _Stack(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(100, 64), body, nn.Linear(64, 100)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.body:
            x = block(x)
        return self.head(x)


class Texts(Task):
    """The tagger's model on padded rows of different lengths, with neither a dummy nor rows()."""

    name = "texts"
    global_batch = 20

    def model(self):
        return Tagger().model()

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-1)

    def loss(self, model, batch):
        losses = self.token_losses(model, batch)
        return Loss(losses.sum(), (batch >= 0).sum())

    def token_losses(self, model, batch):
        logits = model(batch.clamp(min=0))
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten(), ignore_index=-1, reduction="none")


def texts(*lengths):
    """Rows of these lengths for `Texts`, no two of which are the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 100, (length,), generator=generator) for length in lengths]


class Pairs(Task):
    """A matrix of rows × rows: memory grows with the square, and a step must not be split."""

    name = "pairs"
    global_batch = 4000

    def model(self):
        return nn.Linear(16, 4)

    def loss(self, model, batch):
        x = model(batch)
        return Loss(F.softplus(-0.1 * (x @ x.T)).mean() * len(x), len(x))

    def dummy(self, rows, shape):
        return torch.randn(rows, 16)


class Normed(Tagger):
    """A model with BatchNorm."""

    name = "normed"
    worst_shape = ()

    def model(self):
        return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))

    def loss(self, model, batch):
        return Loss(model(batch).square().sum(), len(batch))

    def dummy(self, rows, shape):
        return torch.randn(rows, 32)
