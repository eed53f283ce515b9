"""Lightning with exact steps: what the plain Trainer makes of the whole batch, whatever memory does.

Started as a module under `torch.distributed.run`, this file is the job on two processes that the last tests look at.
"""

import functools
import importlib
import json
import logging
import os
import runpy
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as lightning
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import Accuracy

import brimful
from brimful.errors import BadOption, InexactSplit, MissingExtra, PartialUpdate, TaskError, UnsupportedModel
from brimful.integrations.lightning import ExactSteps, exact

ROOT = Path(__file__).parents[2]
ROWS, WORDS, VOCABULARY, STEPS = 96, 40, 30, 12
PLENTY, TIGHT = 50_000_000, 420_000
pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def rows():
    """Rows of 1, 2, 3 or 40 words that count: a mean of means is wrong by far."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, VOCABULARY, (ROWS, WORDS), generator=generator)
    lengths = torch.tensor([1, 2, 3, WORDS])[torch.randint(0, 4, (ROWS, 1), generator=generator)]
    labels = words.roll(-1, 1).masked_fill(torch.arange(WORDS) >= lengths, -100)
    return list(zip(words, labels, strict=True))


class Words:
    """Next-word prediction; its mean runs over the words that count, and it says how many those were."""

    def __init__(self, optimizer=torch.optim.AdamW, lr=1e-2):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.hidden, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.Linear(32, VOCABULARY)
        self.make, self.lr = optimizer, lr
        self.double()

    def forward(self, words):
        return self.head(torch.tanh(self.hidden(self.embed(words))))

    def mean(self, batch):
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    def training_step(self, batch, batch_idx):
        loss = self.mean(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "count": (batch[1] != -100).sum()}

    def configure_optimizers(self):
        return self.make(self.parameters(), lr=self.lr)


class Model(Words, lightning.LightningModule):
    pass


class OtherModel(Words, pytorch_lightning.LightningModule):
    pass


class PerRow(Model):
    """A mean over rows, which needs no count."""

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self(batch[0]).transpose(1, 2), batch[1], ignore_index=-100, reduction="none")
        return losses.sum(1).mean()


class Recorder(lightning.Callback):
    """Every step's metrics, outputs and hooks; and a limit on memory that drops for some steps."""

    def __init__(self, memory=None, tight=range(3, 7)):
        self.memory, self.tight = memory, tight
        self.metrics, self.outputs, self.hooks, self.batches = [], [], [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches.append(batch)
        if self.memory is not None:
            self.memory.limit_bytes = TIGHT if trainer.global_step in self.tight else PLENTY

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.hooks.append("zero grad")

    def on_before_backward(self, trainer, module, loss):
        self.hooks.append("before backward")

    def on_after_backward(self, trainer, module):
        self.hooks.append(f"after backward, {sum(p.grad is not None for p in module.parameters())} gradients")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.hooks.append("step")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.outputs.append(outputs)


class Kept(DummyLogger):
    """Keeps what loggers are given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def log_metrics(self, metrics, step=None):
        self.seen.append((step, metrics))

    def __getattr__(self, name):
        raise AttributeError(name)


def trainer(*callbacks, package=lightning, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    plain = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "log_every_n_steps": 1}
    return package.Trainer(**{**plain, **quiet, **options}, callbacks=list(callbacks))


def loader(batch_size=16, **options):
    return DataLoader(rows(), batch_size=batch_size, **options)


def fit(module, *callbacks, data=None, **options):
    made = trainer(*callbacks, **options)
    made.fit(module, data or loader())
    return made


def fit_with_little_memory(module, *callbacks, **options):
    """A run whose memory drops at its fourth step and comes back at its eighth."""
    with brimful.simulated_memory(PLENTY) as memory:
        ours, recorder = ExactSteps(grow_after=2), Recorder(memory)
        made = fit(module, ours, recorder, *callbacks, **options)
    assert ours.ooms > 0
    return made, ours, recorder


def weights(module):
    return torch.cat([param.detach().double().flatten() for param in module.parameters()])


def distance(one, other):
    """Relative L2 over all weights."""
    return float((weights(one) - weights(other)).norm() / weights(other).norm())


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models this small take ten times as long where threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def undisturbed():
    """The plain Trainer on whole batches."""
    module, recorder, kept = Model(), Recorder(), Kept()
    made = fit(module, recorder, logger=kept)
    return SimpleNamespace(module=module, trainer=made, recorder=recorder, seen=kept.seen)


@pytest.mark.parametrize("micro_batch", [1, 5, 16])
def test_micro_batches_give_the_weights_of_the_plain_trainer_although_their_counts_differ(undisturbed, micro_batch):
    module = Model()
    fit(module, ExactSteps(micro_batch=micro_batch))
    assert distance(module, undisturbed.module) < 1e-10


def test_out_of_memory_in_the_middle_changes_neither_weights_nor_steps_nor_epochs(undisturbed):
    module = Model()
    made, _, _ = fit_with_little_memory(module)
    assert distance(module, undisturbed.module) < 1e-10
    assert (made.global_step, made.current_epoch) == (STEPS, 2)
    assert (undisturbed.trainer.global_step, undisturbed.trainer.current_epoch) == (STEPS, 2)


def test_a_mean_of_means_would_be_found(undisturbed):
    class Miscounted(Model):
        def training_step(self, batch, batch_idx):
            return {**super().training_step(batch, batch_idx), "count": 1}

    module = Miscounted()
    fit(module, ExactSteps(micro_batch=5, allow_inexact=True))
    assert distance(module, undisturbed.module) > 1e-3


def test_rows_are_the_weights_where_the_module_gives_no_count():
    plain, ours = PerRow(), PerRow()
    fit(plain)
    fit(ours, ExactSteps(micro_batch=5))
    assert distance(ours, plain) < 1e-10


def test_a_mean_over_tokens_without_a_count_is_refused_and_the_count_named():
    class Silent(Model):
        def training_step(self, batch, batch_idx):
            return self.mean(batch)

    with pytest.raises(
        InexactSplit, match="looks across rows.*return {'loss': mean, 'count': count} from training_step if"
    ):
        fit(Silent(), ExactSteps(micro_batch=5))


def test_a_module_may_return_a_brimful_loss(undisturbed):
    class Summed(Model):
        def training_step(self, batch, batch_idx):
            count = (batch[1] != -100).sum()
            return brimful.Loss(sum=self.mean(batch) * count, count=count)

    module = Summed()
    fit(module, ExactSteps(micro_batch=5))
    assert distance(module, undisturbed.module) < 1e-10


def test_a_micro_batch_that_counts_nothing_adds_nothing():
    """Its mean is 0 / 0."""
    masked = [(words, labels if place % 4 == 0 else 0 * labels - 100) for place, (words, labels) in enumerate(rows())]
    plain, ours, theirs, mine = Model(), Model(), Recorder(), Recorder()
    fit(plain, theirs, data=DataLoader(masked, batch_size=16))
    fit(ours, ExactSteps(micro_batch=1), mine, data=DataLoader(masked, batch_size=16))
    assert distance(ours, plain) < 1e-10
    losses = [[float(one["loss"]) for one in recorder.outputs] for recorder in (mine, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_dropout_draws_as_in_the_plain_trainer_if_nothing_is_split():
    class Dropping(Model):
        def forward(self, words):
            return self.head(F.dropout(torch.tanh(self.hidden(self.embed(words))), 0.5, self.training))

    plain, ours = Dropping(), Dropping()
    for module, callbacks in ((plain, ()), (ours, (ExactSteps(),))):
        torch.manual_seed(2)
        fit(module, *callbacks)
    assert distance(ours, plain) < 1e-12


def test_loggers_are_given_the_values_of_the_plain_trainer_although_memory_ran_out(undisturbed):
    kept = Kept()
    fit_with_little_memory(Model(), logger=kept)
    seen = [(step, {name: value for name, value in one.items() if "brimful" not in name}) for step, one in kept.seen]
    assert [(step, list(one)) for step, one in seen] == [(step, list(one)) for step, one in undisturbed.seen]
    for (_, mine), (_, plain) in zip(seen, undisturbed.seen, strict=True):
        assert mine == pytest.approx(plain, rel=1e-12)


def test_the_progress_bar_and_callbacks_find_the_values_of_the_plain_trainer(undisturbed):
    made, _, _ = fit_with_little_memory(Model())
    for name in ("progress_bar_metrics", "callback_metrics"):
        plain = {key: float(value) for key, value in getattr(undisturbed.trainer, name).items()}
        mine = {key: float(value) for key, value in getattr(made, name).items()}
        assert {key: mine[key] for key in plain} == pytest.approx(plain, rel=1e-12)


def test_survived_errors_and_micro_batches_are_logged():
    kept = Kept()
    _, ours, _ = fit_with_little_memory(Model(), logger=kept)
    last = [one for _, one in kept.seen if "brimful/ooms" in one][-1]
    assert (last["brimful/ooms"], last["brimful/micro_batches"]) == (ours.ooms, 1)
    assert max(one.get("brimful/micro_batches", 0) for _, one in kept.seen) > 1


def test_every_row_is_logged_once_and_those_of_failed_tries_never():
    class Counting(Model):
        def training_step(self, batch, batch_idx):
            self.log("rows", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
            self.log_dict(
                {"longest": batch[1].ne(-100).sum(1).max().double()}, reduce_fx=max, on_epoch=True, batch_size=1
            )
            return super().training_step(batch, batch_idx)

    made, _, _ = fit_with_little_memory(Counting(), max_epochs=1)
    assert float(made.callback_metrics["rows"]) == ROWS
    assert float(made.callback_metrics["longest"]) == WORDS


def test_the_epoch_is_averaged_by_the_whole_batchs_rows():
    """Batches of 64 and 32 rows: equal weights would give another mean."""

    class Sized(Model):
        def training_step(self, batch, batch_idx):
            self.log("given", self.mean(batch), on_step=False, on_epoch=True, batch_size=len(batch[0]))
            return super().training_step(batch, batch_idx)

    plain = fit(Sized(), data=loader(64)).callback_metrics
    ours = fit(Sized(), ExactSteps(micro_batch=7), data=loader(64)).callback_metrics
    for name in ("given", "loss_epoch"):
        assert float(ours[name]) == pytest.approx(float(plain[name]), rel=1e-12)


def test_a_torchmetrics_object_counts_every_row_once_although_memory_ran_out():
    class Measured(Model):
        def __init__(self):
            super().__init__()
            self.right = Accuracy(task="multiclass", num_classes=VOCABULARY, ignore_index=-100)

        def training_step(self, batch, batch_idx):
            self.right(self(batch[0]).flatten(0, 1), batch[1].flatten())
            self.log("right", self.right, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    plain = fit(Measured(), max_epochs=1).callback_metrics
    ours = fit_with_little_memory(Measured(), max_epochs=1)[0].callback_metrics
    assert float(ours["right_epoch"]) == float(plain["right_epoch"]) > 0
    assert float(ours["right_step"]) == pytest.approx(float(plain["right_step"]), rel=1e-6)


def test_hooks_run_once_a_step_and_find_the_gradients(undisturbed):
    _, _, recorder = fit_with_little_memory(Model())
    assert recorder.hooks == undisturbed.recorder.hooks
    assert recorder.hooks == ["zero grad", "before backward", "after backward, 5 gradients", "step"] * STEPS


def test_outputs_are_those_of_the_whole_batch_in_its_order():
    class Telling(Model):
        def training_step(self, batch, batch_idx):
            given = super().training_step(batch, batch_idx)
            return {**given, "words": batch[0], "twice": 2 * given["loss"], "name": "words"}

    plain, ours = Recorder(), Recorder()
    fit(Telling(), plain)
    fit(Telling(), ExactSteps(micro_batch=5), ours)
    for mine, theirs in zip(ours.outputs, plain.outputs, strict=True):
        assert list(mine) == list(theirs)
        assert torch.equal(mine["words"], theirs["words"])
        assert mine["count"] == theirs["count"]
        assert [float(mine[name]) for name in ("loss", "twice")] == pytest.approx(
            [float(theirs[name]) for name in ("loss", "twice")], rel=1e-12
        )
        assert mine["name"] == ["words"] * 4


def test_transfer_hooks_run_for_each_micro_batch_and_the_others_see_the_whole():
    class Transferring(PerRow):
        sizes = ()

        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.before = len(batch[0])
            return batch

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.sizes = (*self.sizes, len(batch[0]))
            return [(batch[0] + 1) % VOCABULARY, batch[1]]

    plain, ours, recorder = Transferring(), Transferring(), Recorder()
    fit(plain, max_steps=1)
    fit(ours, ExactSteps(micro_batch=10, allow_inexact=True), recorder, max_steps=1)
    assert distance(ours, plain) < 1e-10
    assert ours.sizes[-2:] == (8, 8)
    assert ours.before == len(recorder.batches[0][0]) == 16


def test_the_batch_is_moved_whole_where_that_is_asked_for():
    class Transferring(PerRow):
        sizes = ()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.sizes = (*self.sizes, len(batch[0]))
            return batch

    module = Transferring()
    fit(module, ExactSteps(micro_batch=10, batch_on_device=True), max_steps=1)
    assert module.sizes == (16,)


def test_out_of_memory_in_a_transfer_hook_is_survived_and_logging_goes_on(undisturbed):
    class Failing(Model):
        left = 1

        def on_after_batch_transfer(self, batch, dataloader_idx):
            if self.left and self.trainer.global_step == 1:  # the first step compares a few rows with their halves
                self.left -= 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return batch

    module, ours = Failing(), ExactSteps()
    made = fit(module, ours)
    assert ours.stepper.ooms == 1
    assert distance(module, undisturbed.module) < 1e-10
    assert float(made.callback_metrics["loss_epoch"]) == pytest.approx(
        float(undisturbed.trainer.callback_metrics["loss_epoch"]), rel=1e-12
    )


def test_validation_is_left_as_it_was():
    class Validated(Model):
        sizes = ()

        def validation_step(self, batch, batch_idx):
            self.sizes = (*self.sizes, len(batch[0]))
            self.log("val", self.mean(batch))

    found = []
    for callbacks in ((), (ExactSteps(micro_batch=5),)):
        module, made = Validated(), trainer(*callbacks)
        made.fit(module, loader(), loader(32))
        found.append((module.sizes, float(made.callback_metrics["val"])))
    assert found[0][0] == found[1][0]
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-12)


class Validated(Model):
    """Logs a mean over words with its count, a number of rows, and a torchmetrics object."""

    counts = True

    def __init__(self):
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=VOCABULARY, ignore_index=-100)

    def validation_step(self, batch, batch_idx):
        loss = self.mean(batch)
        self.accuracy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("val", loss)
        self.log("rows", float(len(batch[0])), reduce_fx="sum")
        self.log("accuracy", self.accuracy)
        return {"val": loss, "count": (batch[1] != -100).sum()} if self.counts else None


class MemoryForValidation(lightning.Callback):
    """`validation_step` has this many bytes beside what is allocated; everything else has enough."""

    def __init__(self, memory, added_bytes):
        self.memory, self.added_bytes = memory, added_bytes

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        self.memory.limit_bytes = self.memory.live_bytes + self.added_bytes

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.memory.limit_bytes = PLENTY


def validated(module, added_bytes=None, *callbacks):
    """What was logged, with so much memory for validation."""
    with brimful.simulated_memory(PLENTY) as memory:
        if added_bytes is not None:
            callbacks = (*callbacks, MemoryForValidation(memory, added_bytes))
        made = trainer(*callbacks, num_sanity_val_steps=0)
        made.fit(module, loader(), loader(32))
    assert made.global_step == STEPS
    return {
        name: float(made.callback_metrics[name])
        for name in ("val", "rows", "accuracy")
        if name in made.callback_metrics
    }


LITTLE = 550_000


def test_the_plain_trainer_dies_in_the_validation_that_the_exact_one_survives():
    with pytest.raises(torch.OutOfMemoryError):
        validated(Validated(), LITTLE)


def test_validation_in_halves_logs_the_values_of_whole_batches(caplog):
    expected, ours = validated(Validated()), validated(Validated(), LITTLE, ExactSteps())
    assert "validation: out of memory with 32 rows. Batches now have at most 16 rows." in caplog.text
    assert ours == pytest.approx(expected, rel=1e-9)


def test_a_mean_over_words_without_a_count_is_left_out_rather_than_logged_wrong(caplog):
    class Silent(Validated):
        counts = False

    assert validated(Silent(), LITTLE, ExactSteps()) == {}
    assert "its halves may log other values, so it is left out" in caplog.text


def test_a_row_that_does_not_fit_is_left_out_of_validation_and_training_goes_on(undisturbed, caplog):
    module = Model()
    module.validation_step = lambda batch, batch_idx: module.log("val", module.mean(batch))
    assert validated(module, 1000, ExactSteps()) == {}
    assert caplog.text.count("it is left out of the metrics") == 2  # one for each validation
    assert distance(module, undisturbed.module) < 1e-10


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_trainer_clips_the_exact_gradients(algorithm):
    clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    plain, ours, free = (Model(torch.optim.SGD, 1.0) for _ in range(3))
    fit(plain, **clip)
    fit(ours, ExactSteps(micro_batch=5), **clip)
    fit(free)
    assert distance(ours, plain) < 1e-10
    assert distance(free, plain) > 1e-3


def test_the_scaler_of_fp16_is_the_trainers():
    def half():
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5))

    plain, ours = Model(torch.optim.SGD, 0.5).float(), Model(torch.optim.SGD, 0.5).float()
    theirs = fit(plain, plugins=[half()])
    mine = fit(ours, ExactSteps(micro_batch=5), plugins=[half()])
    assert distance(ours, plain) < 1e-3
    assert mine.precision_plugin.scaler.get_scale() == theirs.precision_plugin.scaler.get_scale() == 4096.0


def test_double_precision_is_the_trainers_in_weights_and_in_logs():
    class Logging(Model):
        def training_step(self, batch, batch_idx):
            self.log("tenth", 0.1)
            return super().training_step(batch, batch_idx)

    plain, ours = Logging().float(), Logging().float()
    theirs = fit(plain, precision="64-true")
    mine = fit(ours, ExactSteps(micro_batch=5), precision="64-true")
    assert distance(ours, plain) < 1e-10
    assert float(mine.callback_metrics["tenth"]) == pytest.approx(float(theirs.callback_metrics["tenth"]), rel=1e-12)


def test_a_zero_grad_in_place_leaves_the_exact_gradients(undisturbed):
    class InPlace(Model):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    module = InPlace()
    fit(module, ExactSteps(micro_batch=5))
    assert distance(module, undisturbed.module) < 1e-10


def test_the_last_steps_gradients_are_gone_when_the_next_is_made():
    class Watching(Model):
        last, alive = (), 0

        def on_after_backward(self):
            self.last = [weakref.ref(param.grad) for param in self.parameters()]

        def training_step(self, batch, batch_idx):
            self.alive += sum(one() is not None for one in self.last)
            return super().training_step(batch, batch_idx)

    module = Watching()
    fit(module, ExactSteps())
    assert (module.alive, len(module.last)) == (0, 5)


def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted_and_keeps_its_limit(undisturbed, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    with brimful.simulated_memory(PLENTY) as memory:
        first = ExactSteps()
        fit(Model(), first, Recorder(memory, range(2, 99)), saving, max_epochs=1, enable_checkpointing=True)
    module, second = Model(), ExactSteps()
    made = trainer(second)
    made.fit(module, loader(), ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    assert distance(module, undisturbed.module) < 1e-10
    assert made.global_step == STEPS
    assert (
        second.stepper.state_dict()["micro_batch_limit"]["value"]
        == first.stepper.state_dict()["micro_batch_limit"]["value"]
        is not None
    )
    assert (second.stepper.steps, second.ooms) == (STEPS, first.ooms)


def test_a_list_of_rows_is_collated_for_each_micro_batch(undisturbed):
    module = Model()
    given = ExactSteps(micro_batch=5, collate=torch.utils.data.default_collate)
    fit(module, given, data=loader(collate_fn=list))
    assert distance(module, undisturbed.module) < 1e-10


def test_the_pass_without_backward_of_weight_averaging_is_left_alone():
    class Normed(Model):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(32).double()

        def forward(self, words):
            hidden = torch.tanh(self.hidden(self.embed(words)))
            return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))

    plain, ours = Normed(), Normed()
    fit(plain, StochasticWeightAveraging(1e-2, swa_epoch_start=1))
    fit(ours, ExactSteps(), StochasticWeightAveraging(1e-2, swa_epoch_start=1))
    assert distance(ours, plain) < 1e-10
    assert torch.allclose(ours.norm.running_mean, plain.norm.running_mean, rtol=1e-12)


def test_it_works_in_the_other_package(undisturbed):
    module = OtherModel()
    fit(module, ExactSteps(micro_batch=5), package=pytorch_lightning)
    assert distance(module, undisturbed.module) < 1e-10


def test_accumulation_is_refused_with_the_way_out():
    with pytest.raises(BadOption, match="^accumulate_grad_batches=4 cannot .* 4 times the batch_size"):
        fit(Model(), ExactSteps(), accumulate_grad_batches=4)


def test_scheduled_accumulation_is_refused_before_the_first_step():
    recorder = Recorder()
    with pytest.raises(BadOption, match="^GradientAccumulationScheduler cannot be used"):
        fit(Model(), ExactSteps(), recorder, GradientAccumulationScheduler({1: 2}))
    assert recorder.batches == []


def test_a_plan_for_another_precision_is_reported(caplog):
    plan = SimpleNamespace(levers=SimpleNamespace(precision="bf16"))
    ExactSteps(plan).setup(trainer(), Model(), "fit")
    assert "the plan was made for bf16, but the precision is '32-true'" in caplog.text
    caplog.clear()
    ExactSteps(plan).setup(trainer(precision="bf16-mixed"), Model(), "fit")
    assert caplog.text == ""


def test_manual_optimisation_is_refused():
    module = Model()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedModel, match="^with automatic_optimization=False"):
        fit(module, ExactSteps())


def test_an_optimizer_that_calls_the_loss_itself_is_refused_before_the_first_step():
    recorder = Recorder()
    with pytest.raises(UnsupportedModel, match="^LBFGS calls the loss several times"):
        fit(Model(torch.optim.LBFGS), ExactSteps(), recorder)
    assert recorder.batches == []


def test_a_backward_of_the_modules_own_is_refused():
    class Own(Model):
        def backward(self, loss):
            (2 * loss).backward()

    with pytest.raises(UnsupportedModel, match="^Own overrides backward"):
        fit(Own(), ExactSteps())


def test_a_step_over_an_iterator_is_refused():
    class Iterating(Model):
        def training_step(self, dataloader_iter):
            return self.mean(next(dataloader_iter)[0])

    with pytest.raises(UnsupportedModel, match="^batches of training_step\\(dataloader_iter\\)"):
        fit(Iterating(), ExactSteps())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"strategy": FSDPStrategy()}, "^FSDPStrategy cannot repeat a step"),
        ({"strategy": DDPStrategy(ddp_comm_hook=lambda *_: None)}, "^DDPStrategy\\(ddp_comm_hook=…\\)"),
    ],
)
def test_a_strategy_that_cannot_redo_a_step_is_refused_by_name(options, match):
    with pytest.raises(UnsupportedModel, match=match):
        ExactSteps().setup(SimpleNamespace(accumulate_grad_batches=1, callbacks=[], **options), Model(), "fit")


def test_sync_batch_norm_is_refused_before_the_model_is_converted():
    with pytest.raises(UnsupportedModel, match="^with sync_batchnorm=True SyncBatchNorm communicates"):
        ExactSteps().setup(trainer(devices=2, strategy="ddp", sync_batchnorm=True), Model(), "fit")


def test_a_wrong_option_is_refused_at_once():
    for make in (ExactSteps, functools.partial(exact, lightning.Trainer)):
        with pytest.raises(BadOption, match="^micro_batch=0 must be 1 or more"):
            make(micro_batch=0)


@pytest.mark.parametrize("package", [lightning, pytorch_lightning])
def test_an_exact_trainer_is_a_trainer_with_the_callback(package):
    kind = exact(package.Trainer, micro_batch=5)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    made, other = kind(**quiet), kind(callbacks=package.Callback(), **quiet)
    assert kind.__name__ == "ExactTrainer" and isinstance(made, package.Trainer)
    assert made.exact_steps in made.callbacks and made.exact_steps is not other.exact_steps
    assert [type(callback) for callback in other.callbacks][:2] == [package.Callback, ExactSteps]


def test_exact_takes_a_trainer_class():
    with pytest.raises(BadOption, match="takes a Trainer class, not 3"):
        exact(3)


def test_a_step_that_returns_no_loss_is_named():
    class Skipping(Model):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(TaskError, match="^Skipping.training_step returned no loss for a micro-batch"):
        fit(Skipping(), ExactSteps())


def test_out_of_memory_after_the_gradients_stops_the_run_and_names_the_last_checkpoint(tmp_path):
    class Full(lightning.Callback):
        def on_before_optimizer_step(self, made, module, optimizer):
            if made.global_step == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")

    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=3)
    with pytest.raises(PartialUpdate, match=f"^memory ran out in step 5 in a hook.*resume from {tmp_path}.step=3"):
        fit(Model(), ExactSteps(), Full(), saving, enable_checkpointing=True)


def test_a_trainer_fits_twice_and_validates_in_between():
    ours, module = ExactSteps(micro_batch=5), Model()
    made = trainer(ours, max_epochs=1)
    made.fit(module, loader())
    before = ours.stepper
    made.fit_loop.max_epochs = 2
    made.fit(module, loader())
    assert ours.stepper is not before
    assert made.global_step == STEPS


def test_importing_the_integrations_imports_no_lightning():
    code = "import sys, brimful.integrations; print(sorted({'lightning', 'pytorch_lightning', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_lightning_prints_the_pip_command(monkeypatch):
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "brimful.integrations.lightning")
    with pytest.raises(MissingExtra, match="^lightning is not installed. Try: pip install 'brimful\\[lightning\\]'.$"):
        importlib.import_module("brimful.integrations.lightning")


def test_the_example_runs_to_its_end_and_survives(capsys):
    file = ROOT / "examples" / "integrations" / "lightning_trainer.py"
    runpy.run_path(str(file), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert "out-of-memory errors survived" in last and not last.startswith("16 of 16 steps, 0 ")


class Thaw(lightning.Callback):
    """Weights that are frozen at first, as when a head is trained before its backbone."""

    def on_fit_start(self, made, module):
        module.hidden.requires_grad_(False)

    def on_train_epoch_start(self, made, module):
        module.hidden.requires_grad_(made.current_epoch > 0)


class Shared(Model):
    """Starts differently on every process; talks to the others where it must not, if asked to."""

    talks = False

    def training_step(self, batch, batch_idx):
        if self.talks:
            self.all_gather(torch.zeros(()))
        self.log("rows", float(len(batch[0])), reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def run_on_two(module, *callbacks, tight=()):
    """One run of this process's half of every batch; memory drops on process 1 only."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(100 + rank)
    for param in module.parameters() if rank else ():
        nn.init.normal_(param)
    sampler = DistributedSampler(range(ROWS), 2, rank, shuffle=False)
    with brimful.simulated_memory(PLENTY) as memory:
        ours = ExactSteps()
        recorder = Recorder(memory, tight if rank else ())
        made = fit(module, ours, recorder, *callbacks, data=loader(8, sampler=sampler), devices=2, strategy="ddp")
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    return {
        "weights": weights(module).tolist(),
        "ooms": ours.stepper.ooms,
        "metrics": metrics,
        "steps": made.global_step,
    }


def job(folder):
    """What the two processes do."""
    warnings.filterwarnings("ignore")
    found = {"shared": run_on_two(Shared(), tight=range(3, 7)), "thawed": run_on_two(Shared(), Thaw())}
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    talking = Shared()
    talking.talks = True
    run_on_two(talking)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "tests.integrations.test_lightning", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    files = sorted(folder.glob("*.json"))
    assert len(files) == 2, done.stderr[-3000:]
    return SimpleNamespace(ranks=[json.loads(file.read_text()) for file in files], done=done)


def relative(found, module):
    return float(
        (torch.tensor(found["weights"], dtype=torch.float64) - weights(module)).norm() / weights(module).norm()
    )


def test_two_processes_end_with_the_weights_of_one_although_one_of_them_ran_out_of_memory(two, undisturbed):
    first, second = (rank["shared"] for rank in two.ranks)
    assert (first["ooms"], second["ooms"] > 0) == (0, True)
    assert first["weights"] == second["weights"]
    assert relative(first, undisturbed.module) < 1e-10
    assert first["steps"] == second["steps"] == STEPS


def test_what_is_logged_is_reduced_over_the_processes_once_a_step(two):
    assert [rank["shared"]["metrics"]["rows_step"] for rank in two.ranks] == [16, 16]
    assert [rank["shared"]["metrics"]["rows_epoch"] for rank in two.ranks] == [ROWS, ROWS]


def test_the_errors_of_all_processes_are_in_the_log_of_each(two):
    survived = two.ranks[1]["shared"]["ooms"]
    assert [rank["shared"]["metrics"]["brimful/ooms"] for rank in two.ranks] == [survived, survived]


def test_weights_unfrozen_in_the_middle_are_summed_over_the_processes_too(two):
    module = Shared()
    fit(module, Thaw())
    assert two.ranks[0]["thawed"]["weights"] == two.ranks[1]["thawed"]["weights"]
    assert relative(two.ranks[0]["thawed"], module) < 1e-10


def test_a_collective_inside_training_step_ends_the_job_with_a_message(two):
    assert two.done.returncode != 0
    assert "training_step calls all_gather, where a process that runs out of memory" in two.done.stderr


if __name__ == "__main__":
    job(sys.argv[1])
