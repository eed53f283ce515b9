"""`exact(Trainer)` against the plain Trainer: the same rows, the same arguments, and memory that goes away in between."""

import json
import os
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import EvalLoopContainer

import brimful
from brimful.errors import BadOption, DoesNotFit, InexactSplit, TaskError
from brimful.integrations.transformers import exact

ROOT = Path(__file__).parents[2]
VOCAB = 96
WHOLE, CUT = {"batch": 16, "accumulation": 1}, {"batch": 4, "accumulation": 4}


class Tagger(nn.Module):
    """Float64, and a loss that divides by `num_items_in_batch` as transformers' own do."""

    config = None

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.mix, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 64), nn.Linear(64, VOCAB)
        self.double()

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        logits = self.head(torch.tanh(self.mix(self.embed(input_ids))))
        if labels is None:
            return {"logits": logits}
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / items, "logits": logits}


class Means(Tagger):
    """Takes no `num_items_in_batch`: Trainer leaves its mean as it is."""

    def forward(self, input_ids, labels=None):
        return super().forward(input_ids, labels)


def uneven(number=54, seed=0, *, every_label=True):
    """Rows of 1 to 48 tokens, so that a mean of means is far from the mean."""
    draw = torch.Generator().manual_seed(seed)
    lengths = (48 * torch.rand(number, generator=draw) ** 3).int() + 1
    rows = [torch.randint(1, VOCAB, (2, int(length)), generator=draw).tolist() for length in lengths]
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in rows]
    for row in () if every_label else rows[::3]:
        row["labels"] = [-100] * len(row["labels"])
    return rows


def pad(rows):
    def column(name, value):
        longest = max(len(row[name]) for row in rows)
        return torch.tensor([list(row[name]) + [value] * (longest - len(row[name])) for row in rows])

    return {"input_ids": column("input_ids", 0), "labels": column("labels", -100)}


def pad_and_mask(rows):
    batch = pad(rows)
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


def trainer_of(
    kind,
    folder,
    model=None,
    *,
    batch=4,
    accumulation=4,
    rows=None,
    data_collator=pad,
    eval_dataset=None,
    callbacks=(),
    **kwargs,
):
    """A trainer over the uneven rows; `kwargs` are TrainingArguments'."""
    settings = {
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
    }
    arguments = Seq2SeqTrainingArguments if issubclass(kind, Seq2SeqTrainer) else TrainingArguments
    args = arguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **{**settings, **kwargs},
    )
    return kind(
        model=Tagger() if model is None else model,
        args=args,
        train_dataset=uneven() if rows is None else rows,
        eval_dataset=eval_dataset,
        data_collator=data_collator,
        callbacks=list(callbacks),
    )


def trained(*args, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    trainer.train()
    return trainer


def distance(one, other):
    """Relative L2 over all weights."""
    ours, theirs = ([param.detach().flatten() for param in trainer.model.parameters()] for trainer in (one, other))
    return float((torch.cat(ours) - torch.cat(theirs)).norm() / torch.cat(theirs).norm())


def logged(trainer, *names):
    return [tuple(line[name] for name in names) for line in trainer.state.log_history if "loss" in line]


def losses(trainer):
    return [loss for (loss,) in logged(trainer, "loss")]


class MemoryGoes(TrainerCallback):
    """From one step on there is only a share of the memory that the steps before took."""

    def __init__(self, memory, step, share):
        self.memory, self.step, self.share = memory, step, share

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.memory.limit_bytes = int(self.share * self.memory.peak_bytes)


def with_less_memory(*args, share=0.6, step=3, **kwargs):
    with brimful.simulated_memory("4GiB") as memory:
        trainer = trainer_of(*args, **kwargs)
        trainer.add_callback(MemoryGoes(memory, step, share))
        trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The plain Trainer with the whole global batch at once."""
    return trained(Trainer, tmp_path_factory.mktemp("plain"), **WHOLE)


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory):
    """The plain Trainer with accumulation."""
    return trained(Trainer, tmp_path_factory.mktemp("accumulated"), **CUT)


def test_a_model_from_pretrained_is_not_said_to_train_in_evaluation_mode(tmp_path):
    trainer = trainer_of(exact(Trainer), tmp_path, Tagger().eval(), max_steps=1)
    trainer.train()
    assert not [event for event in trainer.stepper.events if "evaluation mode" in event.sentence]


def test_the_weights_are_those_of_the_plain_trainer_with_the_whole_batch(plain, tmp_path):
    assert distance(trained(exact(Trainer), tmp_path, **CUT), plain) < 1e-12


def test_any_split_gives_the_weights_of_the_plain_trainer(plain, tmp_path):
    assert distance(trained(exact(Trainer, micro_batch=3), tmp_path, **CUT), plain) < 1e-12


def test_without_a_plan_a_micro_batch_is_as_large_as_trainers(tmp_path):
    with brimful.simulated_memory("4GiB") as plainly:
        trained(Trainer, tmp_path, **CUT)
    seen = []
    with brimful.simulated_memory("4GiB") as memory:
        trained(exact(Trainer), tmp_path, data_collator=lambda rows: seen.append(len(rows)) or pad(rows), **CUT)
    assert max(seen) == CUT["batch"]
    assert memory.peak_bytes < 1.2 * plainly.peak_bytes


def test_micro_batch_may_exceed_the_per_device_size(tmp_path):
    seen = []
    collate = lambda rows: seen.append(len(rows)) or pad(rows)  # noqa: E731
    trained(exact(Trainer, micro_batch=16), tmp_path, data_collator=collate, **CUT)
    assert max(seen) == 16


def test_steps_epochs_losses_norms_and_learning_rates_are_logged_as_by_the_plain_trainer(accumulated, tmp_path):
    names = ("step", "epoch", "loss", "grad_norm", "learning_rate")
    ours, theirs = logged(trained(exact(Trainer), tmp_path, **CUT), *names), logged(accumulated, *names)
    assert len(ours) == len(theirs) == 8
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_out_of_memory_in_the_middle_changes_neither_weights_nor_the_number_of_steps(plain, tmp_path):
    heard = []
    trainer = with_less_memory(exact(Trainer, micro_batch=16, on_event=heard.append), tmp_path, **CUT)
    assert trainer.stepper.ooms > 0
    assert {event.event for event in heard} >= {"oom"}
    assert min(event.step for event in heard if event.event == "oom") == 3
    assert trainer.state.global_step == plain.state.global_step
    assert distance(trainer, plain) < 1e-10


def test_out_of_memory_errors_are_counted_in_the_logs_once_there_were_any(tmp_path):
    trainer = with_less_memory(exact(Trainer, micro_batch=16), tmp_path, **CUT)
    counted = [line.get("brimful_ooms") for line in trainer.state.log_history if "loss" in line]
    assert counted[:2] == [None, None]
    assert counted[-1] == trainer.stepper.ooms


def test_the_plain_trainer_dies_of_the_memory_that_the_exact_one_survives(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        with_less_memory(Trainer, tmp_path, **WHOLE)


def test_seq2seq_trainer_on_t5_equals_the_plain_whole_batch_and_survives(tmp_path):
    config = T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, dropout_rate=0.0,
                      decoder_start_token_id=0, pad_token_id=0)  # fmt: skip

    def t5():
        torch.manual_seed(0)
        return T5ForConditionalGeneration(config).double()

    def run(train, kind, sizes, **more):
        return train(kind, tmp_path, t5(), data_collator=pad_and_mask, max_steps=4, **sizes, **more)

    whole, ours = run(trained, Seq2SeqTrainer, WHOLE), run(trained, exact(Seq2SeqTrainer), CUT)
    starved = run(with_less_memory, exact(Seq2SeqTrainer), CUT, share=0.7)
    assert starved.stepper.ooms > 0
    assert distance(ours, whole) < 1e-7  # T5's LayerNorm computes in float32
    assert distance(starved, whole) < 1e-7
    assert logged(ours, "loss", "grad_norm")[-1] == pytest.approx(logged(whole, "loss", "grad_norm")[-1], rel=1e-5)


def test_a_causal_model_is_counted_by_its_shifted_labels(tmp_path):
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)  # fmt: skip

    def llama():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).double()

    rows = [row for row in uneven(80) if len(row["labels"]) > 1][:40]
    plainly = trained(Trainer, tmp_path, llama(), rows=rows, optim="sgd", **CUT)
    ours = trained(exact(Trainer, micro_batch=3), tmp_path, llama(), rows=rows, optim="sgd", **CUT)
    assert distance(ours, plainly) < 1e-6  # transformers' causal loss computes in float32
    assert losses(ours) == pytest.approx(losses(plainly), rel=1e-5)
    assert ours.state.total_flos == plainly.state.total_flos > 0


class OwnLoss(Trainer):
    """A user's mean that knows nothing of `num_items_in_batch`."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        loss = (
            F.cross_entropy(model(**inputs)["logits"].flatten(0, 1), labels.flatten())
            / self.args.gradient_accumulation_steps
        )
        return (loss, {}) if return_outputs else loss


class RowMeans(Trainer):
    """A mean over rows of what each row's tokens give."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        losses = F.cross_entropy(model(inputs["input_ids"])["logits"].flatten(0, 1), labels.flatten(), reduction="none")
        return (losses.view(labels.shape).sum(1) / (labels != -100).sum(1)).mean()


def sum_over_items(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    ("kind", "model", "more", "tolerance"),
    [
        (Trainer, Means, {}, 1e-12),
        (OwnLoss, Tagger, {}, 1e-12),
        (Trainer, Tagger, {"label_smoothing_factor": 0.1}, 1e-6),  # transformers' smoother sums in float32
        (Trainer, Means, {"label_smoothing_factor": 0.1}, 1e-6),
    ],
    ids=["model's mean", "own compute_loss", "smoothed labels", "smoothed labels, model's mean"],
)
def test_a_mean_over_labels_stays_one_however_it_is_computed(kind, model, more, tolerance, tmp_path):
    whole = trained(kind, tmp_path, model(), optim="sgd", num_train_epochs=1, **WHOLE, **more)
    ours = trained(exact(kind, micro_batch=3), tmp_path, model(), optim="sgd", num_train_epochs=1, **CUT, **more)
    assert distance(ours, whole) < tolerance
    assert losses(ours) == pytest.approx(losses(whole), rel=1e-5)


def test_a_compute_loss_func_is_honoured(plain, tmp_path):
    trainer = trainer_of(exact(Trainer, micro_batch=3), tmp_path, **CUT)
    trainer.compute_loss_func = sum_over_items
    trainer.train()
    assert distance(trainer, plain) < 1e-12


def test_a_mean_over_rows_is_refused_before_the_first_split_and_exact_with_a_count(tmp_path):
    with pytest.raises(InexactSplit, match=r"looks across rows.*or exact\(…, count=…\)"):
        trained(exact(RowMeans, micro_batch=3), tmp_path, **CUT)
    whole = trained(RowMeans, tmp_path, **WHOLE)
    ours = trained(exact(RowMeans, micro_batch=3, count=lambda batch: len(batch["labels"])), tmp_path, **CUT)
    assert distance(ours, whole) < 1e-12


class Classifier(nn.Module):
    """One label a row, or none at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.EmbeddingBag(VOCAB, 8, mode="sum", padding_idx=0), nn.Linear(8, 3)
        self.double()

    def forward(self, input_ids, labels=None, target=None):
        logits = self.head(self.embed(input_ids))
        return {"loss": F.cross_entropy(logits, target if labels is None else labels), "logits": logits}


@pytest.mark.parametrize("name", ["labels", "target"])
def test_one_label_a_row_or_none_means_a_mean_over_rows(name, tmp_path):
    rows = [{"input_ids": row["input_ids"], name: row["labels"][0] % 3} for row in uneven()]

    def collate(given):
        ids = pad([{"input_ids": row["input_ids"], "labels": []} for row in given])["input_ids"]
        return {"input_ids": ids, name: torch.tensor([row[name] for row in given])}

    with_those = {"rows": rows, "data_collator": collate}
    whole = trained(Trainer, tmp_path, Classifier(), **WHOLE, **with_those)
    ours = trained(exact(Trainer, micro_batch=3), tmp_path, Classifier(), **CUT, **with_those)
    assert distance(ours, whole) < 1e-12


class MaskedMean(Trainer):
    """A user's mean whose gradient is NaN where nothing is left to count."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, mask = inputs["labels"].flatten().clamp(min=0), inputs["labels"].flatten() != -100
        logits = model(inputs["input_ids"])["logits"]
        every = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
        loss = (every * mask).sum() / mask.sum()
        return (loss, {"logits": logits}) if return_outputs else loss


@pytest.mark.parametrize(("kind", "model"), [(Trainer, Tagger), (Trainer, Means), (MaskedMean, Means)])
def test_rows_without_any_label_change_nothing(kind, model, tmp_path):
    rows = uneven(every_label=False)
    whole = trained(kind, tmp_path, model(), rows=rows, num_train_epochs=1, **WHOLE)
    ours = trained(exact(kind, micro_batch=1), tmp_path, model(), rows=rows, num_train_epochs=1, **CUT)
    assert distance(ours, whole) < 1e-12
    assert losses(ours) == pytest.approx(losses(whole), rel=1e-6)


def test_a_step_without_any_label_is_refused_before_weights_change(tmp_path):
    rows = [{**row, "labels": [-100] * len(row["labels"])} for row in uneven()]
    trainer = trainer_of(exact(Trainer), tmp_path, rows=rows, **CUT)
    with pytest.raises(TaskError, match="counted 0 over the whole step"):
        trainer.train()
    assert all(
        torch.equal(one, other) for one, other in zip(trainer.model.parameters(), Tagger().parameters(), strict=True)
    )


class Diary(TrainerCallback):
    def __init__(self):
        self.told = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args, state, control, **kwargs):
            self.told.append((name, state.global_step, args.gradient_accumulation_steps, state.train_batch_size))

        return note


def test_callbacks_are_called_as_by_the_plain_trainer_with_the_users_arguments(tmp_path):
    diaries = []
    for kind in (Trainer, exact(Trainer)):
        diaries.append(Diary())
        trained(kind, tmp_path, callbacks=diaries[-1:], eval_strategy="no", max_steps=6, **CUT)
    assert diaries[0].told == diaries[1].told
    assert {accumulation for _, _, accumulation, _ in diaries[1].told} == {4}
    assert [name for name, *_ in diaries[1].told].count("on_substep_end") > 0


@pytest.mark.parametrize("counted", ["all", "non_padding"])
def test_input_tokens_are_counted_as_by_the_plain_trainer(counted, tmp_path):
    theirs, ours = (
        trained(kind, tmp_path, include_num_input_tokens_seen=counted, data_collator=pad_and_mask, **CUT)
        for kind in (Trainer, exact(Trainer))
    )
    assert ours.state.num_input_tokens_seen == theirs.state.num_input_tokens_seen > 0


def test_counting_input_tokens_does_not_change_what_a_random_collator_draws(tmp_path):
    def masked(rows):
        batch = pad(rows)
        return {**batch, "labels": batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, -100)}

    runs = [
        trained(exact(Trainer), tmp_path, include_num_input_tokens_seen=counted, data_collator=masked, **CUT)
        for counted in ("no", "all")
    ]
    assert distance(*runs) == 0


class StopsAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("step", [3, 4], ids=["in the middle of an epoch", "between epochs"])
def test_a_resumed_run_ends_where_the_unbroken_one_does(step, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, **CUT}
    unbroken = trained(exact(Trainer), tmp_path / "unbroken", **CUT)
    trained(exact(Trainer), tmp_path / "broken", callbacks=[StopsAt(step)], **saving)
    resumed = trainer_of(exact(Trainer), tmp_path / "broken", Tagger(seed=1), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "broken" / f"checkpoint-{step}"))
    assert resumed.state.global_step == unbroken.state.global_step
    assert distance(resumed, unbroken) == 0
    assert losses(resumed) == losses(unbroken)


def test_what_was_learnt_of_memory_survives_a_resume(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, **CUT}
    first = with_less_memory(exact(Trainer, micro_batch=16), tmp_path, callbacks=[StopsAt(4)], step=2, **saving)
    limit = json.loads((tmp_path / "checkpoint-4" / "stepper_state.json").read_text())["micro_batch_limit"]["value"]
    assert first.stepper.ooms > 0
    assert limit is not None
    resumed = trainer_of(exact(Trainer, micro_batch=16), tmp_path, Tagger(seed=1), max_steps=5, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.stepper.ooms == first.stepper.ooms
    assert resumed.stepper.state_dict()["micro_batch_limit"]["value"] == limit
    assert resumed.stepper.steps == resumed.state.global_step == 5


def test_a_checkpoint_of_the_plain_trainer_is_resumed(plain, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    trained(Trainer, tmp_path, callbacks=[StopsAt(3)], **saving, **WHOLE)
    resumed = trainer_of(exact(Trainer), tmp_path, Tagger(seed=1), **saving, **CUT)
    resumed.train(resume_from_checkpoint=True)
    assert distance(resumed, plain) < 1e-12


def test_evaluation_during_training_gives_the_plain_trainers_losses(tmp_path):
    def evaluated(kind):
        evaluates = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": uneven(10, seed=1)}
        trainer = trainer_of(kind, tmp_path, **evaluates, **CUT)
        trainer.train()
        return [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]

    ours, theirs = evaluated(exact(Trainer)), evaluated(Trainer)
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, rel=1e-9)


class MemoryForEvaluation(TrainerCallback):
    """Evaluation has this many bytes more than what is allocated between two steps; training has enough."""

    def __init__(self, memory, extra_bytes):
        self.memory, self.extra_bytes = memory, extra_bytes

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 2 == 0:
            self.memory.limit_bytes = self.memory.live_bytes + self.extra_bytes

    def on_step_begin(self, args, state, control, **kwargs):
        self.memory.limit_bytes = None


def similar(number):
    """Rows of 12 to 20 tokens, so that half of them take about half the memory."""
    return [row for row in uneven(400, seed=1) if 12 <= len(row["labels"]) <= 20][:number]


def statistics(prediction):
    """Metrics that see every row, and their order."""
    predicted, labels = prediction.predictions, prediction.label_ids
    kept = labels != -100
    return {
        "rows": float(((predicted * kept).sum(1) * range(len(labels))).sum()),
        "right": float((predicted == labels)[kept].mean()),
    }


def evaluated(kind, folder, extra_bytes=None, *, metrics=statistics, **more):
    """What is logged of evaluations at steps 2 and 4, with so much memory for them."""
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "eval_dataset": similar(21)}
    with brimful.simulated_memory("4GiB") as memory:
        trainer = trainer_of(kind, folder, per_device_eval_batch_size=8, **evaluates, **CUT, **more)
        trainer.compute_metrics = metrics
        trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
        if extra_bytes is not None:
            trainer.add_callback(MemoryForEvaluation(memory, extra_bytes))
        trainer.train()
    assert trainer.state.global_step == 4
    names = ("eval_loss", "eval_rows", "eval_right")
    return [[line[name] for name in names if name in line] for line in trainer.state.log_history if "eval_loss" in line]


LITTLE, TOO_LITTLE = 200_000, 1_000


def test_the_plain_trainer_dies_in_the_evaluation_that_the_exact_one_survives(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        evaluated(Trainer, tmp_path, LITTLE)


@pytest.mark.parametrize("kind", [Trainer, MaskedMean], ids=["model's loss", "own compute_loss"])
def test_evaluation_in_halves_gives_the_loss_and_metrics_of_whole_batches(kind, tmp_path, caplog):
    expected, ours = (evaluated(exact(kind), tmp_path, extra_bytes) for extra_bytes in (None, LITTLE))
    assert "evaluation: out of memory with 8 rows. Batches now have at most 4 rows." in caplog.text
    assert len(ours) == len(expected) == 2
    for one, other in zip(ours, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_the_next_evaluation_begins_with_what_fitted(tmp_path, caplog):
    assert len(evaluated(exact(Trainer), tmp_path, LITTLE)) == 2
    assert caplog.text.count("evaluation: out of memory with 8 rows") == 1


def test_an_evaluation_without_memory_for_a_single_row_is_left_out_and_training_goes_on(tmp_path, caplog):
    assert evaluated(exact(Trainer), tmp_path, TOO_LITTLE, metric_for_best_model="loss") == []
    assert "step 2: this evaluation is left out" in caplog.text


def test_training_after_a_left_out_evaluation_gives_the_same_weights(tmp_path):
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": similar(21)}
    undisturbed = trained(exact(Trainer), tmp_path, **CUT)
    with brimful.simulated_memory("4GiB") as memory:
        ours = trained(
            exact(Trainer), tmp_path, callbacks=[MemoryForEvaluation(memory, TOO_LITTLE)], **evaluates, **CUT
        )
    assert distance(ours, undisturbed) == 0
    assert ours.state.global_step == undisturbed.state.global_step


def test_predictions_that_do_not_fit_together_are_moved_to_the_host(tmp_path, monkeypatch):
    trainer = trainer_of(exact(Trainer), tmp_path, eval_dataset=similar(21), per_device_eval_batch_size=8)
    trainer.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
    add = EvalLoopContainer.add

    def fails(self, tensors):
        if trainer.args.eval_accumulation_steps is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        add(self, tensors)

    monkeypatch.setattr(EvalLoopContainer, "add", fails)
    assert trainer.evaluate()["eval_rows"] == 21
    assert trainer.args.eval_accumulation_steps is None


def test_a_single_row_that_does_not_fit_ends_an_evaluation_that_the_user_asked_for(tmp_path):
    trainer = trained(exact(Trainer), tmp_path, max_steps=1, **CUT)
    with brimful.simulated_memory(1000), pytest.raises(DoesNotFit, match="evaluation: one row does not fit"):
        trainer.evaluate(uneven(5))


class Counts(Trainer):
    """Keeps numbers of its own for each call of its loss, as TRL's trainers do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls, self.seen, self.tokens = 0, [], 0
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mode = "train" if self.model.training else "eval"
        labels = inputs["labels"]
        self.calls += 1
        self.seen.append(len(labels))
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if mode == "train":
            self.tokens += int((labels != -100).sum())
        kept = labels != -100
        self._metrics[mode]["tokens"] = [self.tokens]
        self._metrics[mode]["label"].append(float(labels[kept].double().mean()))
        self._metrics[mode]["max_label"].append(float(labels.max()))
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        mode = "train" if self.model.training else "eval"
        logs.update({name: sum(numbers) / len(numbers) for name, numbers in self._metrics[mode].items()})
        super().log(logs, *args, **kwargs)
        self._metrics[mode].clear()


COUNTED = ("tokens", "label", "max_label")


def test_metrics_that_the_loss_keeps_are_those_of_the_plain_trainer_with_the_whole_batch(tmp_path):
    """Neither the exactness check nor failed attempts count, and a step is one number however it was split."""
    whole, ours = trained(Counts, tmp_path, **WHOLE), trained(exact(Counts), tmp_path, **CUT)
    starved = with_less_memory(exact(Counts), tmp_path, share=0.8, **CUT)
    assert starved.stepper.ooms > 0
    for trainer in (ours, starved):
        for one, other in zip(logged(trainer, *COUNTED), logged(whole, *COUNTED), strict=True):
            assert one == pytest.approx(other, rel=1e-9)
    assert ours.calls == 2 * (3 * 4 + 2)  # 54 rows: three steps of 16, and one of 6 in two parts
    assert sum(starved.seen) == 2 * 54


def test_metrics_that_the_loss_keeps_in_an_evaluation_in_halves_count_each_row_once(tmp_path):
    def labels(kind, extra_bytes=None):
        evaluates = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2, "eval_dataset": similar(16)}
        with brimful.simulated_memory("4GiB") as memory:
            callbacks = [] if extra_bytes is None else [MemoryForEvaluation(memory, extra_bytes)]
            sizes = {**WHOLE, "per_device_eval_batch_size": 8}
            trainer = trained(kind, tmp_path, callbacks=callbacks, **evaluates, **sizes)
        return [(line["label"], line["max_label"]) for line in trainer.state.log_history if "eval_loss" in line]

    ours, theirs = labels(exact(Counts), LITTLE), labels(Counts)
    assert len(ours) == len(theirs) == 1
    assert ours[0] == pytest.approx(theirs[0], rel=1e-9)


def test_bf16_runs_inside_accelerates_autocast_and_survives(tmp_path):
    def half():
        return Tagger().float()

    plainly = trained(Trainer, tmp_path, half(), bf16=True, optim="sgd", **CUT)
    starved = with_less_memory(exact(Trainer), tmp_path, half(), bf16=True, optim="sgd", share=0.7, **CUT)
    assert starved.stepper.ooms > 0
    assert distance(starved, plainly) < 1e-3


def test_the_scaler_that_accelerate_owns_scales_and_unscales(tmp_path):
    trainers = [trainer_of(kind, tmp_path, max_grad_norm=1e9, optim="sgd", **CUT) for kind in (Trainer, exact(Trainer))]
    trainers[1].accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # as for fp16, which needs a GPU
    for trainer in trainers:
        trainer.train()
    assert trainers[1].optimizer.scaler is trainers[1].accelerator.scaler
    assert distance(*trainers) < 1e-12


def test_a_loader_with_workers_hands_over_rows(plain, tmp_path):
    assert distance(trained(exact(Trainer), tmp_path, dataloader_num_workers=1, **CUT), plain) < 1e-12


class Stream(IterableDataset):
    def __iter__(self):
        return iter(uneven(64))


def test_a_dataset_without_a_length_is_trained_for_the_steps_asked(tmp_path):
    whole, ours = (
        trained(kind, tmp_path, rows=Stream(), max_steps=6, **sizes)
        for kind, sizes in ((Trainer, WHOLE), (exact(Trainer), CUT))
    )
    assert ours.state.global_step == 6
    assert distance(ours, whole) < 1e-12


class OwnLoader(Trainer):
    """Collates by itself, to one length, without a DataLoader."""

    longest = 48

    def get_train_dataloader(self):
        size, rows = self.args.per_device_train_batch_size, self.train_dataset
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [self.padded(pad(group)) for group in groups]

    def padded(self, batch):
        missing = max(0, self.longest - batch["labels"].shape[1])
        return {
            name: F.pad(batch[name], (0, missing), value=value) for name, value in (("input_ids", 0), ("labels", -100))
        }


def test_a_collator_that_changes_its_rows_sees_each_as_it_was(tmp_path, plain):
    """As TRL's does for images. A row is collated by the exactness check, and again by every attempt."""

    def collate(given):
        taken = [{name: row.pop(name) for name in ("input_ids", "labels")} for row in given]
        return pad(taken)

    ours = trained(exact(Trainer), tmp_path, data_collator=collate, **CUT)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-6)


def test_batches_of_a_loader_that_collates_are_joined_and_split_by_rows(tmp_path):
    whole = trained(OwnLoader, tmp_path, **WHOLE)
    ours = trained(exact(OwnLoader, micro_batch=3), tmp_path, **CUT)
    assert distance(ours, whole) < 1e-12


def test_batches_that_cannot_be_joined_are_refused_with_what_would_help(tmp_path):
    class Ragged(OwnLoader):
        longest = 0

    with pytest.raises(BadOption, match="cannot be joined. Try: gradient_accumulation_steps=1"):
        trained(exact(Ragged), tmp_path, **CUT)


def test_the_users_own_dataloader_is_collated_late(tmp_path):
    seen = []

    def recording(rows):
        seen.append(len(rows))
        return pad(rows)

    class Own(Trainer):
        def get_train_dataloader(self):
            loader = super().get_train_dataloader()
            sampler = loader.base_dataloader.sampler
            return DataLoader(
                self.train_dataset,
                batch_size=self.args.per_device_train_batch_size,
                sampler=sampler,
                collate_fn=recording,
            )

    whole = trained(Own, tmp_path, **WHOLE)
    seen.clear()
    ours = trained(exact(Own, micro_batch=9), tmp_path, **CUT)
    assert max(seen) == 9
    assert distance(ours, whole) < 1e-12


def test_rows_are_split_by_the_lengths_of_the_columns_that_differ(tmp_path):
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"]), "id": "row" * n} for n, row in enumerate(uneven())]
    heard = []
    kind = exact(Trainer, micro_batch=16, on_event=heard.append)
    with_less_memory(kind, tmp_path, rows=rows, step=2, max_steps=2, **CUT)
    assert {len(event.details["shape"]) for event in heard if event.event == "oom"} == {1}


class Fitted(brimful.Task):
    worst_shape = (48,)
    global_batch = 16

    def model(self):
        return Tagger()

    def loss(self, model, batch):
        return brimful.Loss(sum=model(**batch, num_items_in_batch=1)["loss"], count=(batch["labels"] != -100).sum())

    def dummy(self, rows, shape):
        return dict.fromkeys(("input_ids", "labels"), torch.ones(rows, *shape, dtype=torch.long))


@pytest.fixture(scope="module")
def plan():
    return brimful.plan(Fitted(), memory_limit="2MiB", cache=False)


def test_with_a_plan_the_first_step_already_fits(plain, plan, tmp_path):
    found = []
    for kind in (exact(Trainer, micro_batch=16), exact(Trainer, plan=plan)):
        with brimful.simulated_memory("2MiB"):
            found.append(trained(kind, tmp_path, **CUT))
    assert found[0].stepper.ooms > 0
    assert found[1].stepper.ooms == 0
    assert distance(found[1], plain) < 1e-12


def test_a_plan_for_rows_of_other_lengths_is_refused_without_shape(plan, tmp_path):
    rows = [{**row, "labels": row["labels"][:3]} for row in uneven()]

    def collate(given):
        ids, labels = pad(given).values()
        return {"input_ids": ids, "labels": F.pad(labels, (0, ids.shape[1] - labels.shape[1]), value=-100)}

    with_those = {"rows": rows, "data_collator": collate, "max_steps": 1, **CUT}
    with pytest.raises(BadOption, match=r"rows with 1 lengths, but these rows have 2 \(input_ids, labels\)"):
        trained(exact(Trainer, plan=plan), tmp_path, **with_those)
    tell = exact(Trainer, plan=plan, shape=lambda row: (len(row["input_ids"]),))
    assert trained(tell, tmp_path, **with_those).state.global_step == 1


def test_out_of_memory_in_trainers_own_clipping_ends_the_run_with_a_message(tmp_path, monkeypatch):
    def fails(self, model):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Trainer, "_clip_grad_norm", fails)
    with pytest.raises(DoesNotFit, match=r"Trainer's clipping in step 1,.*no weight was changed"):
        trained(exact(Trainer), tmp_path, **CUT)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True changes the global batch"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": "mix"}, "steps inside backward"),
        ({"optim": "lomo"}, "steps inside backward"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name_before_training(arguments, sentence, tmp_path):
    with pytest.raises(BadOption, match=rf"exact\(Trainer\) does not work with these arguments: .*{sentence}"):
        trainer_of(exact(Trainer), tmp_path, **arguments)


def test_a_class_whose_training_step_would_be_lost_is_refused_by_name():
    class Mine(Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    class Derived(Mine):
        pass

    with pytest.raises(BadOption, match="Mine overrides training_step"):
        exact(Derived)


def test_anything_but_a_trainer_class_and_good_options_is_refused():
    with pytest.raises(BadOption, match=r"exact\(\) takes a Trainer class"):
        exact(Tagger)
    with pytest.raises(BadOption, match="micro_batch=0 must be 1 or more"):
        exact(Trainer, micro_batch=0)


TWO_PROCESSES = """
import sys

sys.path.insert(0, sys.argv[1])
import torch
from transformers import Trainer

import brimful
from brimful.integrations.transformers import exact
from tests.integrations.test_transformers import MemoryGoes, trainer_of, uneven

with brimful.simulated_memory("4GiB") as memory:
    trainer = trainer_of(exact(Trainer), sys.argv[2], batch=4, accumulation=2, rows=uneven(48), ddp_backend="gloo")
    if trainer.args.process_index == 1:
        trainer.add_callback(MemoryGoes(memory, 3, 0.7))
    trainer.train()
found = {
    "weights": trainer.model.state_dict(),
    "ooms": trainer.stepper.ooms,
    "kind": type(trainer.model_wrapped).__name__,
    "log": [line for line in trainer.state.log_history if "loss" in line],
}
torch.save(found, f"{sys.argv[2]}/{trainer.args.process_index}.pt")
"""


def test_two_processes_one_out_of_memory_hold_the_weights_of_one_process(tmp_path):
    rows = uneven(48)  # three steps of 16 an epoch: of fewer, accelerate would repeat some
    one = trained(exact(Trainer), tmp_path, rows=rows, **CUT)
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ran = subprocess.run(
        [*launch, str(ROOT), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["ooms"] == 0
    assert second["ooms"] > 0
    assert first["kind"] == "Tagger"  # no DDP around it
    assert first["log"][-1]["brimful_ooms"] == second["ooms"]
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert [line["loss"] for line in first["log"]] == pytest.approx(losses(one), rel=1e-6)
    for name, weights in one.model.state_dict().items():
        assert torch.allclose(first["weights"][name], weights, rtol=1e-10, atol=1e-12)


def test_the_example_survives_the_memory_that_it_takes_away(capsys):
    runpy.run_path(str(ROOT / "examples/integrations/transformers_trainer.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "12 of 12 steps" in said
    assert "step 5, oom: out of memory in" in said
