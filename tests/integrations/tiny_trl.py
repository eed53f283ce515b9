"""TRL's trainers of tiny Qwen2 models with new weights, for the tests beside this file."""

import runpy
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

import brimful
from brimful.integrations.transformers import exact

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
ROOT = Path(__file__).parents[2]
SFT_EXAMPLE, DPO_EXAMPLE = ROOT / "examples/trl_sft.py", ROOT / "examples/trl_dpo.py"
STEPS = 3
NOT_COMPARED = {"epoch", "step", "brimful_ooms"}
EXAMPLE = runpy.run_path(str(SFT_EXAMPLE))
TOKENIZER = EXAMPLE["small_tokenizer"]()


def small_model(kind="SFT"):
    if kind != "Reward":
        return EXAMPLE["small_model"]()
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen2Config(vocab_size=65, num_key_value_heads=2, num_labels=1, **size, **special)
    return Qwen2ForSequenceClassification(config)


def rows(form, number=48):
    from datasets import Dataset

    draw = torch.Generator().manual_seed(0)

    def text(least, most):
        words = torch.randint(60, (int(torch.randint(least, most, (), generator=draw)),), generator=draw)
        return " " + " ".join(f"w{int(word)}" for word in words)

    columns = {
        "text": {"text": (2, 40)},
        "completion": {"prompt": (2, 20), "completion": (2, 30)},
        "pairs": {"prompt": (2, 6), "chosen": (2, 20), "rejected": (2, 20)},
        "labelled": {"prompt": (2, 6), "completion": (2, 20)},
    }
    if form == "messages":
        return EXAMPLE["chats"](number)
    listed = [{name: text(*lengths) for name, lengths in columns[form].items()} for _ in range(number)]
    for place, row in enumerate(listed):
        row |= {"label": place % 3 != 0} if form == "labelled" else {}
    return Dataset.from_list(listed)


FORMS = {"SFT": "text", "DPO": "pairs", "Reward": "pairs", "KTO": "labelled"}


def trainer_of(
    kind, folder, batch=16, accumulation=1, *, exactly=None, data=None, lora=False, callbacks=(), eval_rows=None, **more
):
    """`exactly`: the options of exact(), or None for plain TRL."""
    options = {"gradient_checkpointing": False, "max_steps": STEPS, "save_strategy": "no", "learning_rate": 1e-3} | more
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, logging_steps=1,
        bf16=False, report_to="none", use_cpu=True, disable_tqdm=True, log_level="error", **options,
    )  # fmt: skip
    others = {}
    if lora:
        task = (
            {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if kind == "Reward" else {"task_type": "CAUSAL_LM"}
        )
        others["peft_config"] = peft.LoraConfig(r=4, target_modules="all-linear", **task)
    elif kind in ("DPO", "KTO"):
        others["ref_model"] = small_model()
    trainer_class = getattr(trl, f"{kind}Trainer")
    return (trainer_class if exactly is None else exact(trainer_class, **exactly))(
        model=small_model(kind), args=args, train_dataset=data or rows(FORMS[kind]), eval_dataset=eval_rows,
        processing_class=TOKENIZER, callbacks=list(callbacks), **others,
    )  # fmt: skip


def trained(*args, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    trainer.train()
    return trainer


def trained_within(limit, *args, **kwargs):
    with brimful.simulated_memory(limit) as memory:
        trainer = trained(*args, **kwargs)
    return trainer, memory.peak_bytes


def lines(trainer):
    return [line for line in trainer.state.log_history if "loss" in line]


def assert_same_log(ours, theirs, steps=STEPS, *, losses_only=False):
    """Losses to 1e-6; rewards are differences of large numbers, and metrics of later steps have seen other roundings."""
    assert len(lines(theirs)) == steps
    assert [line["loss"] for line in lines(ours)] == pytest.approx(
        [line["loss"] for line in lines(theirs)], abs=1e-6, rel=1e-6
    )
    for one, other in zip(lines(ours), lines(theirs), strict=True):
        names = {"loss"} if losses_only else set(other) - NOT_COMPARED
        assert set(one) - NOT_COMPARED == set(other) - NOT_COMPARED
        assert {name: one[name] for name in names} == pytest.approx(
            {name: other[name] for name in names}, rel=1e-4, abs=2e-5
        )
