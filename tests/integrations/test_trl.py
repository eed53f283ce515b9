"""`exact` of TRL's trainers against the plain ones: the same losses and metrics, and memory that goes away in between."""

import functools
import itertools
import runpy
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback

import brimful
from brimful.errors import BadOption
from brimful.integrations.transformers import exact
from tests.integrations.test_transformers import MemoryGoes
from tests.integrations.tiny_trl import (
    DPO_EXAMPLE,
    FORMS,
    NOT_COMPARED,
    ROOT,
    SFT_EXAMPLE,
    assert_same_log,
    lines,
    rows,
    trained,
    trained_within,
    trainer_of,
    trl,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The plain trainer of a kind after training with the whole batch at once, and the bytes that it took."""
    folder = tmp_path_factory.mktemp("plain")
    return functools.cache(lambda kind: trained_within("4GiB", kind, folder))


@pytest.mark.parametrize(
    ("kind", "share"),
    [*itertools.product(("SFT", "DPO"), (0.8, 0.6, 0.4)), ("KTO", 0.6), ("KTO", 0.4), ("Reward", 0.4)],
)
def test_the_losses_are_plain_trls_with_a_share_of_its_memory_where_it_dies(kind, share, plain, tmp_path):
    theirs, peak_bytes = plain(kind)
    limit = int(share * peak_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        trained_within(limit, kind, tmp_path)
    ours, our_peak_bytes = trained_within(limit, kind, tmp_path, exactly={})
    assert ours.stepper.ooms > 0
    assert our_peak_bytes <= limit
    assert_same_log(ours, theirs)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_with_accumulation_the_losses_are_plain_trls_with_the_same_arguments(kind, tmp_path):
    plain = trained(kind, tmp_path, 4, 4)
    assert_same_log(trained(kind, tmp_path, 4, 4, exactly={}), plain, losses_only=True)


class Counter(TrainerCallback):
    def __init__(self):
        self.calls = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.calls.append(("begin", state.global_step))

    def on_substep_end(self, args, state, control, **kwargs):
        self.calls.append(("substep", state.global_step))

    def on_step_end(self, args, state, control, **kwargs):
        self.calls.append(("end", state.global_step))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.calls.append(("log", state.global_step, *sorted(set(logs) - NOT_COMPARED)))

    def on_evaluate(self, args, state, control, **kwargs):
        self.calls.append(("evaluate", state.global_step))


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_memory_lost_in_mid_run_changes_neither_losses_nor_evaluations_nor_calls_of_callbacks(kind, tmp_path, caplog):
    def run(exactly, share):
        counter = Counter()
        with brimful.simulated_memory("4GiB") as memory:
            trainer = trainer_of(
                kind, tmp_path, 16, exactly=exactly, callbacks=[counter, MemoryGoes(memory, 2, share)],
                eval_rows=rows(FORMS[kind], 16), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=16,
            )  # fmt: skip
            trainer.train()
        return trainer, counter.calls

    (plain, plain_calls), (ours, calls) = run(None, 10.0), run({}, 0.4)
    assert ours.stepper.ooms > 0
    assert "evaluation: out of memory with 16 rows" in caplog.text
    assert calls == plain_calls
    assert_same_log(ours, plain, losses_only=True)
    expected = [line for line in plain.state.log_history if "eval_loss" in line]
    evaluated = [line for line in ours.state.log_history if "eval_loss" in line]
    names = [
        name for name in expected[0] if name not in NOT_COMPARED and "runtime" not in name and "per_second" not in name
    ]
    for one, other in zip(evaluated, expected, strict=True):
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-4, abs=2e-5)


def evaluated(trainer, added_bytes=None):
    """What evaluation logs with this many bytes beside the models, and how many it took."""
    with brimful.simulated_memory("4GiB") as memory:
        memory.adopt(trainer.model.parameters())
        model_bytes = memory.live_bytes
        if added_bytes is not None:
            memory.limit_bytes = model_bytes + added_bytes
        trainer.evaluate()
    line = trainer.state.log_history[-1]
    return {
        name: line[name] for name in line if "per_second" not in name and "runtime" not in name
    }, memory.peak_bytes - model_bytes


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "Reward"])
def test_an_evaluation_in_halves_has_the_metrics_of_plain_trl(kind, tmp_path, caplog):
    plain, ours = (
        trained(kind, tmp_path, exactly=exactly, eval_rows=rows(FORMS[kind], 8), learning_rate=1e-2)
        for exactly in (None, {})
    )
    expected, needed_bytes = evaluated(plain)
    line, _ = evaluated(ours, int(0.75 * needed_bytes))
    assert "evaluation: out of memory with 8 rows. Batches now have at most 4 rows." in caplog.text
    assert line == pytest.approx(expected, rel=1e-4, abs=2e-5)


@pytest.mark.parametrize(("kind", "lora"), [("SFT", False), ("DPO", True)])
def test_a_run_that_is_saved_and_resumed_has_the_losses_of_an_undisturbed_one(kind, lora, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    whole = trained(kind, tmp_path / "whole", exactly={"micro_batch": 4}, lora=lora, max_steps=4, **saving)
    resumed = trainer_of(kind, tmp_path / "resumed", exactly={"micro_batch": 4}, lora=lora, max_steps=4, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert resumed.state.global_step == resumed.stepper.steps == 4
    assert [line["loss"] for line in lines(resumed)] == [line["loss"] for line in lines(whole)]


def test_a_trl_trainer_whose_training_step_does_more_is_refused():
    with pytest.raises(BadOption, match="GRPOTrainer overrides training_step"):
        exact(trl.GRPOTrainer)


def test_an_exact_trl_trainer_is_a_trainer_and_trls():
    assert issubclass(exact(trl.SFTTrainer), (trl.SFTTrainer, Trainer))


def test_the_example_that_takes_memory_away_survives_it(capsys):
    runpy.run_path(str(ROOT / "examples/integrations/trl_trainer.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "8 of 8 steps" in said
    assert "step 5, oom: out of memory in" in said


@pytest.mark.parametrize(
    ("example", "flags"),
    [
        (SFT_EXAMPLE, []),
        (SFT_EXAMPLE, ["--assistant-only", "--lora", "--checkpointing"]),
        (SFT_EXAMPLE, ["--packing"]),
        (DPO_EXAMPLE, ["--lora", "--checkpointing"]),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else " ".join(value),
)
def test_the_examples_survive_a_small_device(example, flags, capsys):
    main = runpy.run_path(str(example))["main"]
    with brimful.simulated_memory("4GiB") as memory:
        undisturbed = main([*flags, "--steps", "2"])
    ours = main([*flags, "--steps", "2", "--memory", str(int(0.4 * memory.peak_bytes))])
    assert ours.stepper.ooms > undisturbed.stepper.ooms == 0
    assert f"2 steps, {ours.stepper.ooms} out-of-memory errors survived" in capsys.readouterr().out
    assert_same_log(ours, undisturbed, 2, losses_only=True)
