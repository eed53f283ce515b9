"""Losses that look across rows are found by comparing a batch with its halves, however small the difference."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brimful.memory.context import StepContext
from brimful.planning.exactness import check_exactness, check_rows
from brimful.task import Loss
from tests.planning.small import Normed, Pairs, Tagger, Texts, texts


def context_of(task):
    torch.manual_seed(0)
    model = task.model()
    cpu = torch.device("cpu")
    return StepContext(task=task, model=model, optimizer=task.optimizer(model), device=cpu, autocast=None)


def exactness(task, rows=8):
    return check_exactness(context_of(task), task.dummy(rows, task.worst_shape))


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
    """As in T5: whatever the weights are, this part rounds to float32, and how depends on the row's neighbours."""

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
    whole = task.dummy(4, (8,))
    whole["ids"][:2, 4:] = 0
    halves = [{"ids": whole["ids"][:2, :4]}, {"ids": whole["ids"][2:]}]
    assert check_exactness(context_of(task), whole).exact
    assert "or at their padding" in check_exactness(context_of(task), whole, halves).reason


def test_batch_norm_is_not_taken_for_a_loss_across_rows():
    result = exactness(Normed())
    assert result.batch_norm and not result.looks_across_rows


def test_weights_and_buffers_are_as_before():
    context = context_of(Normed())
    model = context.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_exactness(context, context.task.dummy(8, ()))
    assert all(
        torch.equal(before[name], value) and before[name].dtype == value.dtype
        for name, value in model.state_dict().items()
    )


class MeanOverTokens(Texts):
    """A plain mean in which a long row counts more than a short one."""

    def loss(self, model, batch):
        return self.token_losses(model, batch).sum() / (batch >= 0).sum()


class MeanOverRows(Texts):
    """A plain mean in which every row counts the same."""

    def loss(self, model, batch):
        per_row = self.token_losses(model, batch).view_as(batch).sum(1) / (batch >= 0).sum(1)
        return per_row.mean()


class MeanOfNegatives(Texts):
    """A plain mean that looks across rows, as a contrastive loss does."""

    def loss(self, model, batch):
        x = model(batch.clamp(min=0)).mean(1)
        return F.cross_entropy(x @ x.T, torch.arange(len(x)))


class MeanOfPairs(MeanOfNegatives):
    def loss(self, model, batch):
        x = model(batch.clamp(min=0)).mean(1)
        return F.softplus(x @ x.T).mean()


class TestRealRowsOfDifferentLengths:
    def check(self, task):
        return check_rows(context_of(task), texts(*range(2, 30)), 8)

    def test_a_loss_that_counts_tokens_is_exact(self):
        assert self.check(Texts()).exact

    def test_a_mean_over_rows_is_exact_and_said_to_be_weighted_by_rows(self):
        result = self.check(MeanOverRows())
        assert result.exact and not result.unequal_rows
        assert result.reason.endswith("the loss is a plain mean, weighted by rows")

    def test_a_mean_over_tokens_is_not_taken_for_a_loss_across_rows(self):
        result = self.check(MeanOverTokens())
        assert result.unequal_rows and not result.looks_across_rows

    @pytest.mark.parametrize("task", [MeanOfNegatives(), MeanOfPairs()], ids=lambda task: task.name)
    def test_a_mean_that_looks_across_rows_is_found(self, task):
        assert self.check(task).looks_across_rows
