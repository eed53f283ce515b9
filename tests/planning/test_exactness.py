"""Losses that look across rows are found by comparing a batch with its halves, however small the difference."""

import itertools
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint  # noqa: F401  torch.utils.checkpoint

from brimful.errors import InexactSplit, TaskError
from brimful.memory.context import StepContext
from brimful.planning.exactness import check_exactness, check_rows, rows_to_compare
from brimful.task import Loss
from tests.planning.small import Normed, Pairs, Tagger, Texts, small_plan, texts


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


class Quantized(Tagger):
    """A layer holds whole numbers and computes in the precision of its input, which is noted."""

    precisions: ClassVar[set[torch.dtype]] = set()

    def model(self):
        seen = self.precisions

        class Linear4bit(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(100, 64, dtype=torch.uint8), requires_grad=False)

            def forward(self, x):
                seen.add(x.dtype)
                return x @ self.weight.T.to(x.dtype)

        return nn.Sequential(nn.Embedding(100, 64), Linear4bit())


def test_a_quantized_model_is_not_compared_in_float64_which_its_layers_do_not_compute_in():
    assert exactness(Quantized()).exact
    assert Quantized.precisions == {torch.float32}


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


class Denoiser(Pairs):
    """As in diffusion: the loss draws a time and noise for every row."""

    def model(self):
        return nn.Linear(16, 16)

    def noisy(self, batch):
        time = torch.randint(0, 1000, (len(batch), 1)) / 1000
        noise = torch.randn_like(batch)
        return batch + time * noise, noise

    def loss(self, model, batch):
        x, noise = self.noisy(batch)
        return F.mse_loss(model(x), noise)


class NoisyContrast(Denoiser):
    def loss(self, model, batch):
        x = model(self.noisy(batch)[0])
        return F.cross_entropy(x @ x.T, torch.arange(len(x)))


class Mixup(Denoiser):
    def loss(self, model, batch):
        return model(batch + batch[torch.randint(0, len(batch), (len(batch),))]).square().mean()


class LayerDrop(Denoiser):
    """As where a layer is left out at random: one number is drawn for all rows."""

    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + torch.rand([]))


class OwnGenerator(Denoiser):
    generator = torch.Generator().manual_seed(0)

    def noisy(self, batch):
        noise = torch.randn(batch.shape, generator=self.generator, dtype=batch.dtype)
        return batch + noise, noise


CALLS = itertools.count(1)


class Calls(Denoiser):
    """A loss that depends on how often it was called, which nothing can restore."""

    def loss(self, model, batch):
        return Loss(model(batch).square().sum() / next(CALLS), len(batch))


class CallsOfItsOwn(Denoiser):
    """The same with a count that the check restores."""

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return Loss(model(batch).square().sum() / self.calls, len(batch))


class DrawnRows(Denoiser):
    """Counts the rows that drew more than the mean: none, if all drew the same."""

    def loss(self, model, batch):
        drawn = torch.rand(len(batch))
        counted = drawn > drawn.mean()
        return Loss(model(batch[counted]).square().sum(), counted.sum())


class TestRandomLosses:
    @pytest.mark.parametrize("task", [Denoiser(), LayerDrop(), OwnGenerator()], ids=lambda task: type(task).__name__)
    def test_rows_on_their_own_are_the_same_in_distribution(self, task):
        result = exactness(task)
        assert result.random and result.exact
        assert "draws random numbers" in result.reason

    @pytest.mark.parametrize("task", [NoisyContrast(), Mixup()], ids=lambda task: type(task).__name__)
    def test_rows_that_meet_are_found_under_the_noise(self, task):
        assert exactness(task).looks_across_rows

    def test_a_loss_with_state_is_not_called_one_across_rows(self):
        result = exactness(Calls())
        assert not result.comparable and not result.looks_across_rows
        assert result.reason.startswith("the same 8 rows give another loss at each call")

    def test_a_loss_that_is_not_finite_is_not_put_down_to_random_numbers(self):
        class Overflows(Denoiser):
            def loss(self, model, batch):
                return super().loss(model, batch) * (float("inf") if len(batch) > 2 else 1.0)

        plan = small_plan(Overflows(), global_batch=64, micro_batch=16)
        assert (
            plan.choice("exactness").reason
            == "the loss of 8 dummy rows is NaN or inf, so halves cannot be compared with them"
        )
        assert "draw random numbers" not in "".join(plan.warnings)

    def test_a_loss_that_depends_on_earlier_calls_is_called_inexact(self):
        result = exactness(CallsOfItsOwn())
        assert result.depends_on_split and not result.looks_across_rows and not result.exact
        assert result.reason.startswith("a forward depends on earlier ones")

    def test_same_draws_that_leave_nothing_to_count_leave_it_unknown(self):
        assert not exactness(DrawnRows()).comparable

    @pytest.mark.parametrize(("task", "effective"), [(Denoiser(), "same in distribution"), (Calls(), "not known")])
    def test_the_plan_splits_and_says_what_that_means(self, task, effective):
        plan = small_plan(task, global_batch=64, micro_batch=16)
        assert plan.choice("exactness").effective == effective
        assert bool(plan.warnings) == (effective == "not known")

    def test_a_task_with_state_has_it_back_afterwards(self):
        class Keeps(OwnGenerator):
            def __init__(self):
                self.calls, self.seen, self.generator = 0, {"last": None, "all": []}, torch.Generator().manual_seed(0)

            def loss(self, model, batch):
                self.calls += 1
                self.seen["last"] = len(batch)
                self.seen["all"].append(len(batch))
                return super().loss(model, batch)

        task = Keeps()
        generator = task.generator.get_state()
        exactness(task)
        assert (task.calls, task.seen) == (0, {"last": None, "all": []})
        assert torch.equal(task.generator.get_state(), generator)


class Rope:
    """A helper that is no module and keeps a table."""

    table = None


class Caching(nn.Module):
    """Keeps tensors from its first forward in every way models do."""

    def __init__(self):
        super().__init__()
        self.linear, self.tables, self.rope, self.largest = nn.Linear(16, 4), {}, Rope(), 0
        self.register_buffer("early", None, persistent=False)

    def forward(self, x):
        if self.rope.table is None:
            self.rope.table = self.attribute = self.early = (
                torch.ones(4, dtype=x.dtype) * self.linear.weight.mean().detach()
            )
            self.register_buffer("late", self.early.clone(), persistent=False)
            self.tables["cos"], self.largest = self.early.clone(), len(x)
        cached = self.rope.table + self.attribute + self.early + self.late + self.tables["cos"]
        return self.linear(x) @ cached


class Cached(Pairs):
    def model(self):
        return Caching()

    def loss(self, model, batch):
        return model(batch).square().mean()


def test_a_model_that_caches_tensors_has_none_of_the_check():
    context = context_of(Cached())
    assert check_exactness(context, context.task.dummy(8, ())).exact
    model = context.model
    assert (model.rope.table, model.early, model.tables, model.largest) == (None, None, {}, 0)
    assert not hasattr(model, "attribute") and not hasattr(model, "late")


def test_a_model_with_tensors_in_its_cache_keeps_them():
    context = context_of(Cached())
    batch = context.task.dummy(8, ())
    before = context.model(batch)
    tables = context.model.rope.table, context.model.attribute
    assert check_exactness(context, batch).exact
    assert (context.model.rope.table, context.model.attribute) == tables
    assert torch.equal(context.model(batch), before)


def test_a_cache_of_the_float64_check_is_not_used_by_the_one_in_float32():
    class Float32Only(Caching):
        def forward(self, x):
            out = super().forward(x)
            if out.dtype != torch.float32:
                raise RuntimeError("float32 only")
            return out

    class Task(Cached):
        def model(self):
            return Float32Only()

    assert exactness(Task()).exact


# What a split changes although rows do not see each other


class Spectral(Pairs):
    """A power iteration in every forward in training mode."""

    def model(self):
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 4))

    def loss(self, model, batch):
        return Loss(model(batch).square().sum(), len(batch))


class OldSpectral(Spectral):
    def model(self):
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 4))


class Centred(nn.Linear):
    """Subtracts a running mean of what it has seen, and adds to that afterwards."""

    def __init__(self):
        super().__init__(16, 4)
        self.register_buffer("center", torch.zeros(16))

    def forward(self, x):
        out = super().forward(x - self.center)
        if self.training:
            self.center.lerp_(x.mean(0), 0.1)
        return out


class Ema(Spectral):
    def model(self):
        return Centred()


class Clamped(Spectral):
    def model(self):
        model = nn.Linear(16, 4)
        model.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return model


class Normalised(Spectral):
    def model(self):
        model = nn.Linear(16, 4)
        model.weight.register_hook(lambda grad: grad / grad.norm())
        return model


class ClampedLater(Spectral):
    def model(self):
        model = nn.Linear(16, 4)

        def clamp(param):
            param.grad.clamp_(-0.01, 0.01)

        model.weight.register_post_accumulate_grad_hook(clamp)
        return model


class Watched(Spectral):
    """A hook that only looks."""

    def model(self):
        model = nn.Linear(16, 4)
        model.weight.register_hook(lambda grad: None)
        return model


class Checkpointed(Spectral):
    """A reentrant checkpoint cannot give gradients to the check."""

    def model(self):
        return nn.Linear(16, 4)

    def loss(self, model, batch):
        out = torch.utils.checkpoint.checkpoint(model, batch.requires_grad_(), use_reentrant=True)
        return Loss(out.square().sum(), len(batch))


class Masked(Spectral):
    """Buffers of kinds that cannot be subtracted, which stay as they are."""

    def model(self):
        model = nn.Linear(16, 4)
        model.register_buffer("causal", torch.ones(4, 4).tril().bool())
        model.register_buffer("bias_mask", torch.full((4,), float("nan")))
        return model


class Overflows(Spectral):
    """Not finite at doubled weights."""

    def model(self):
        return nn.Linear(16, 4)

    def loss(self, model, batch):
        grown = model.weight.abs().max() > self.largest
        return Loss(model(batch).square().sum() * (float("inf") if grown else 1.0), len(batch))


class FusedDropout(Spectral):
    """As on a GPU, where one operation draws the mask and applies it."""

    def model(self):
        return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))

    def loss(self, model, batch):
        x = torch.native_dropout(model[0](batch), 0.5, model.training)[0]
        out = torch.native_dropout(model[1](x), 0.3, model.training)[0]
        return Loss(out.square().sum(), len(batch))


class FusedDropoutAcross(FusedDropout):
    """Rows that meet in training mode only are found under the masks."""

    def loss(self, model, batch):
        x = torch.native_dropout(model[0](batch), 0.5, model.training)[0]
        x = x - x.mean(0) if model.training else x
        return Loss(model[1](x).square().sum(), len(batch))


class TestGradientsAndBuffers:
    def test_rows_that_meet_under_fused_dropout_are_found(self):
        assert exactness(FusedDropout()).exact
        assert exactness(FusedDropoutAcross()).looks_across_rows

    @pytest.mark.parametrize(
        ("task", "reason"),
        [
            (Spectral(), "each forward changes the buffer '0.parametrizations.weight.0._u', and so two halves differ"),
            (OldSpectral(), "each forward changes the buffer '0.weight_u', and so two halves differ"),
            (Ema(), "each forward changes the buffer 'center', and so two halves differ"),
            (Clamped(), "hooks on gradients see those of a micro-batch"),
            (Normalised(), "hooks on gradients see those of a micro-batch"),
            (ClampedLater(), "a hook on 'weight' runs after every micro-batch"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_a_split_changes_is_called_inexact(self, task, reason):
        result = exactness(task)
        assert result.depends_on_split and not result.exact and not result.looks_across_rows
        assert result.reason.startswith(reason)

    @pytest.mark.parametrize(
        "task", [Watched(), Dropped(), Checkpointed(), Masked()], ids=lambda task: type(task).__name__
    )
    def test_hooks_that_look_and_dropout_are_exact(self, task):
        assert exactness(task).exact

    def test_a_loss_that_overflows_at_doubled_weights_is_compared_without(self):
        task = Overflows()
        context = context_of(task)
        task.largest = float(context.model.weight.detach().abs().max()) * 1.5
        assert check_exactness(context, task.dummy(8, ())).exact

    def test_the_reason_says_what_was_compared(self):
        assert exactness(Watched()).reason == "8 rows and their two halves give the same gradients"
        assert exactness(Checkpointed()).reason == "8 rows and their two halves give the same loss"

    @pytest.mark.parametrize(
        "task", [Spectral(), OldSpectral(), Ema(), Clamped(), ClampedLater()], ids=lambda t: type(t).__name__
    )
    def test_nothing_of_it_stays(self, task):
        context = context_of(task)
        context.model(task.dummy(8, ())).sum().backward()
        parameters = dict(context.model.named_parameters())
        before = {name: value.clone() for name, value in context.model.state_dict().items()}
        gradients = {name: param.grad.clone() for name, param in parameters.items()}
        check_exactness(context, task.dummy(8, ()))
        now = context.model.state_dict()
        assert all(torch.equal(before[name], now[name]) and before[name].dtype == now[name].dtype for name in before)
        assert all(torch.equal(gradients[name], param.grad) for name, param in parameters.items())
        assert not context.optimizer.state

    def test_the_plan_splits_it_with_a_warning(self):
        plan = small_plan(Spectral(), global_batch=64, micro_batch=16)
        assert plan.choice("exactness").effective == "inexact"
        assert "results depend on the micro-batch, here 16 rows" in plan.warnings[0]

    def test_weights_that_a_forward_renormalises_stay_as_they_are(self):
        class Renormalised(Tagger):
            def model(self):
                return nn.Sequential(nn.Embedding(100, 64, max_norm=0.1), nn.Linear(64, 100))

            def loss(self, model, batch):
                if model[1].weight.dtype != torch.float32:
                    raise RuntimeError("float32 only")
                return super().loss(model, batch)

        context = context_of(Renormalised())
        before = context.model[0].weight.detach().clone()
        check_exactness(context, context.task.dummy(4, (8,)))
        assert torch.equal(before, context.model[0].weight)


# Rows of different lengths


class WrongCount(Texts):
    """The mean runs over all tokens of a row but the first, and the count says all: as with labels that a model shifts."""

    def loss(self, model, batch):
        counted = batch[:, 1:] >= 0
        losses = self.token_losses(model, batch).view_as(batch)[:, 1:]
        return losses[counted].mean(), (batch >= 0).sum()

    def dummy(self, rows, shape):
        return torch.randint(0, 100, (rows, *shape))


def test_a_task_with_a_dummy_is_checked_on_rows_of_the_data_if_there_are_any():
    task = WrongCount()
    task.worst_shape = (29,)
    assert exactness(task).exact, "dummy rows do not show it"
    data = texts(*range(2, 30))
    with pytest.raises(
        InexactSplit, match=r"its mean runs over something else than its count: 8 rows of the data \(lengths 2 to 15\)"
    ):
        small_plan(task, data=data, global_batch=16, micro_batch=4)


class FlatStart(WrongCount):
    """All tokens have the same loss at the start, so the wrong mean shows in gradients alone. A hook only looks."""

    def model(self):
        model = super().model()
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
        model.head.weight.register_hook(lambda grad: None)
        return model


def test_a_wrong_mean_of_equal_losses_is_not_put_down_to_hooks():
    context = context_of(FlatStart())
    result = check_rows(context, texts(*range(2, 30)), 8)
    assert result.looks_across_rows and "its mean runs over something else than its count" in result.reason
    assert context.model.head.weight._backward_hooks, "hooks are put back"


class ShiftedLabels(Tagger):
    """The README's old recipe: the model's mean runs over the shifted labels."""

    def loss(self, model, batch):
        logits, labels = model(batch["ids"])[:, :-1], batch["labels"]
        mean = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return mean, (labels != -100).sum()

    def dummy(self, rows, shape):
        ids = super().dummy(rows, shape)["ids"]
        return {"ids": ids, "labels": ids.clone()}


def test_without_data_labels_of_unequal_numbers_show_a_wrong_count():
    plan = small_plan(ShiftedLabels(), micro_batch=10)
    assert plan.choice("exactness").effective == "weighted by rows"
    assert "8 dummy rows with unequal numbers of labels" in plan.warnings[0]


def test_a_mean_over_tokens_is_split_as_little_as_fits():
    plan = small_plan(ShiftedLabels(), memory_limit="1GiB")
    assert plan.accumulation == 1 and "fewest splits" in plan.choice("micro_batch").reason
    assert plan.choice("exactness").effective == "whole step"


class TwoTerms(Tagger):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return {"tags": loss, "again": Loss(loss.sum, loss.count)}


def test_several_terms_without_counts_are_refused_in_the_plan():
    with pytest.raises(TaskError, match=r"several terms \(tags, again\), whose counts must be known"):
        small_plan(TwoTerms())


def test_the_plan_says_on_what_it_was_checked():
    reason = small_plan(Tagger()).choice("exactness").reason
    assert reason == "8 dummy rows, all equally long, and their two halves give the same gradients"
    reason = small_plan(Texts(), data=texts(*range(2, 30))).choice("exactness").reason
    assert reason == "8 rows of the data (lengths 2 to 15) and their two halves give the same gradients"


def test_rows_of_several_lengths_are_described_by_all_of_them():
    class Images(Texts):
        def shape(self, row):
            return (len(row), 16)

    reason = check_rows(context_of(Images()), texts(*range(2, 30)), 8).reason
    assert reason.startswith("8 rows of the data (lengths 2+16 to 15+16) ")


class TestShortOfMemory:
    """As with an 8B model, whose copies in float64 take 64 GB."""

    @pytest.fixture(autouse=True)
    def no_room_for_copies(self, monkeypatch):
        monkeypatch.setattr("brimful.planning.exactness._room_bytes", lambda device: 0)

    def test_weights_stay_as_they_are(self):
        class Watching(Tagger):
            def loss(self, model, batch):
                assert {param.dtype for param in model.parameters()} == {torch.float32}
                return super().loss(model, batch)

        assert exactness(Watching()).exact

    def test_rows_that_meet_are_found(self):
        assert not exactness(Contrast()).exact


def test_rows_to_compare_are_few_and_short_where_tokens_are():
    rows = [list(range(length)) for length in range(10, 110)]
    lengths = [len(row) for row in rows_to_compare(Texts(), rows, 8, most_tokens=200)]
    assert len(lengths) == 8 and 8 * max(lengths) <= 200
    assert len(rows_to_compare(Texts(), rows, 8, most_tokens=45)) == 4
    assert len(rows_to_compare(Texts(), rows, 8, most_tokens=1)) == 2
