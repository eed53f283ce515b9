"""`exact` of TRL's trainers against the plain ones: the same losses and metrics, and memory that goes away in between."""

import runpy
from pathlib import Path

import pytest
import torch
from transformers import Trainer

import brimful
from brimful.errors import BadOption
from brimful.integrations.transformers import exact
from tests.integrations.test_transformers import MemoryGoes, logged

trl = pytest.importorskip("trl")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/integrations/trl_trainer.py"
SFT_METRICS = ("loss", "num_tokens", "mean_token_accuracy", "entropy", "grad_norm", "learning_rate")
DPO_METRICS = ("loss", "num_tokens", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
               "logps/chosen", "logps/rejected", "grad_norm")  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def tokenizer(example):
    return example["small_tokenizer"]()


def words(generator, least, most):
    length = int(torch.randint(least, most, (), generator=generator))
    return " ".join(f"w{int(word)}" for word in torch.randint(60, (length,), generator=generator))


def rows(kind):
    from datasets import Dataset

    draw = torch.Generator().manual_seed(0)
    if kind is trl.SFTTrainer:
        return Dataset.from_list([{"text": words(draw, 2, 40)} for _ in range(32)])
    columns = {"prompt": (3, 4), "chosen": (2, 20), "rejected": (2, 20)}
    return Dataset.from_list(
        [{name: f" {words(draw, *length)}" for name, length in columns.items()} for _ in range(32)]
    )


def trained(example, tokenizer, folder, kind, batch, accumulation, *, exactly=False, share=None, **more):
    def model():
        torch.manual_seed(0)
        return example["small_llama"]().double()

    config = trl.SFTConfig if kind is trl.SFTTrainer else trl.DPOConfig
    args = config(
        output_dir=str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=4,
        learning_rate=1e-2, logging_steps=1, bf16=False, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, log_level="error", **more,
    )  # fmt: skip
    reference = {} if kind is trl.SFTTrainer else {"ref_model": model()}
    with brimful.simulated_memory("4GiB") as memory:
        trainer = (exact(kind) if exactly else kind)(
            model=model(), args=args, train_dataset=rows(kind), eval_dataset=rows(kind).select(range(8)),
            processing_class=tokenizer, **reference,
        )  # fmt: skip
        if share is not None:
            trainer.add_callback(MemoryGoes(memory, 3, share))
        trainer.train()
    return trainer


def assert_same_log(one, other, names):
    assert len(logged(one, *names)) == 4
    for ours, theirs in zip(logged(one, *names), logged(other, *names), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_sft_has_the_losses_and_metrics_of_plain_trl_with_the_whole_batch(example, tokenizer, tmp_path):
    whole = trained(example, tokenizer, tmp_path, trl.SFTTrainer, 16, 1)
    assert_same_log(trained(example, tokenizer, tmp_path, trl.SFTTrainer, 4, 4, exactly=True), whole, SFT_METRICS)
    starved = trained(example, tokenizer, tmp_path, trl.SFTTrainer, 8, 2, exactly=True, share=0.7)
    assert starved.stepper.ooms > 0
    assert_same_log(starved, whole, SFT_METRICS)


def test_dpo_has_the_losses_and_rewards_of_plain_trl_with_accumulation(example, tokenizer, tmp_path):
    plain = trained(example, tokenizer, tmp_path, trl.DPOTrainer, 4, 4)
    assert_same_log(trained(example, tokenizer, tmp_path, trl.DPOTrainer, 4, 4, exactly=True), plain, DPO_METRICS)
    starved = trained(example, tokenizer, tmp_path, trl.DPOTrainer, 8, 2, exactly=True, share=0.8)
    assert starved.stepper.ooms > 0
    assert_same_log(starved, plain, DPO_METRICS)


def evaluated(trainer, added_bytes=None):
    """What evaluation logs with this many bytes beside the model, and how many it took."""
    with brimful.simulated_memory("4GiB") as memory:
        memory.adopt(trainer.model.parameters())
        model_bytes = memory.live_bytes
        if added_bytes is not None:
            memory.limit_bytes = model_bytes + added_bytes
        trainer.evaluate()
    return trainer.state.log_history[-1], memory.peak_bytes - model_bytes


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("SFTTrainer", ("eval_loss", "eval_num_tokens", "eval_mean_token_accuracy", "eval_entropy")),
        ("DPOTrainer", ("eval_loss", "eval_num_tokens", "eval_rewards/margins", "eval_logps/chosen")),
    ],
)
def test_an_evaluation_in_halves_has_the_metrics_of_plain_trl(name, metrics, example, tokenizer, tmp_path, caplog):
    plain, ours = (
        trained(example, tokenizer, tmp_path, getattr(trl, name), 16, 1, exactly=exactly) for exactly in (False, True)
    )
    expected, needed_bytes = evaluated(plain)
    line, _ = evaluated(ours, int(0.75 * needed_bytes))
    assert "evaluation: out of memory with 8 rows. Batches now have at most 4 rows." in caplog.text
    assert [line[metric] for metric in metrics] == pytest.approx([expected[metric] for metric in metrics], rel=1e-4)


def test_a_trl_trainer_whose_training_step_does_more_is_refused():
    with pytest.raises(BadOption, match="GRPOTrainer overrides training_step"):
        exact(trl.GRPOTrainer)


def test_an_exact_trl_trainer_is_a_trainer_and_trls():
    assert issubclass(exact(trl.SFTTrainer), (trl.SFTTrainer, Trainer))


def test_the_example_survives_the_memory_that_it_takes_away(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "8 of 8 steps" in said
    assert "step 5, oom: out of memory in" in said
