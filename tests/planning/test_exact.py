"""Losses that look across rows are found by comparing a batch with its halves, however small the difference."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brimful.memory.context import StepContext
from brimful.planning.exactness import check_exactness
from brimful.task import Loss, Task
from tests.planning.small import Normed, Pairs, Tagger


def exactness(task, rows=8):
    torch.manual_seed(0)
    model = task.model()
    rig = StepContext(
        task=task, model=model, optimizer=task.optimizer(model), device=torch.device("cpu"), autocast=None
    )
    return check_exactness(rig, task.dummy(rows, task.worst_shape))


class Dropped(Tagger):
    def model(self):
        return nn.Sequential(super().model(), nn.Dropout(0.5))


class Contrast(Pairs):
    def loss(self, model, batch):
        x = model(batch)
        return Loss(F.cross_entropy(x @ x.T, torch.arange(len(x)), reduction="sum"), len(x))


class Float32Inside(Tagger):
    """Code that insists on float32: the comparison falls back to it."""

    def model(self):
        class Insists(nn.Linear):
            def forward(self, x):
                assert self.weight.dtype == torch.float32 or (_ for _ in ()).throw(RuntimeError("float32 only"))
                return super().forward(x)

        return nn.Sequential(nn.Embedding(100, 64), Insists(64, 100))


class NormedInFloat32(Tagger):
    """As T5 does it: whatever the weights are, this part rounds to float32, and to what depends on the row's neighbours."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        noise = 1e-8 * len(batch["ids"]) * loss.sum
        return Loss(loss.sum + noise.float(), loss.count)


class StandardisedInTraining(Pairs):
    """Looks across rows only in training mode, by code of its own."""

    def loss(self, model, batch):
        x = model(batch)
        if model.training:
            x = x - x.mean(0)
        return Loss(x.square().sum(), len(x))


@pytest.mark.parametrize("task", [Tagger(), Dropped(), Float32Inside(), NormedInFloat32()], ids=lambda t: t.name)
def test_rows_on_their_own_are_exact(task):
    assert exactness(task).exact


@pytest.mark.parametrize("task", [Pairs(), Contrast(), StandardisedInTraining()], ids=lambda t: t.name)
def test_rows_that_meet_are_found(task):
    assert exactness(task).looks_across_rows


def test_halves_with_padding_of_their_own_show_a_model_that_looks_at_it():
    class Mean(Tagger):
        def loss(self, model, batch):
            return Loss(model(batch["ids"]).square().mean(dim=(1, 2)).sum(), len(batch["ids"]))

    task = Mean()
    model = task.model()
    rig = StepContext(
        task=task, model=model, optimizer=task.optimizer(model), device=torch.device("cpu"), autocast=None
    )
    whole = task.dummy(4, (8,))
    whole["ids"][:2, 4:] = 0
    halves = [{"ids": whole["ids"][:2, :4]}, {"ids": whole["ids"][2:]}]
    assert check_exactness(rig, whole).exact
    assert "or at their padding" in check_exactness(rig, whole, halves).sentence


def test_batch_norm_is_found_and_told_from_a_loss_across_rows():
    found = exactness(Normed())
    assert found.batch_norm and not found.looks_across_rows


def test_weights_and_buffers_are_as_before():
    task = Normed()
    model = task.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rig = StepContext(
        task=task, model=model, optimizer=task.optimizer(model), device=torch.device("cpu"), autocast=None
    )
    check_exactness(rig, task.dummy(8, ()))
    assert all(
        torch.equal(before[name], value) and before[name].dtype == value.dtype
        for name, value in model.state_dict().items()
    )


def test_a_task_is_no_more_than_its_three_methods():
    class Least(Task):
        def model(self):
            return nn.Linear(2, 1)

        def loss(self, model, batch):
            return Loss(model(batch).square().sum(), len(batch))

        def dummy(self, rows, shape):
            return torch.randn(rows, 2)

    assert exactness(Least()).exact
