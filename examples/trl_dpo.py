"""TRL's DPOTrainer with steps that survive out-of-memory: `exact(DPOTrainer)` is all that changes.

    python examples/trl_dpo.py --lora --checkpointing     # with `pip install trl peft`

With `--lora` the model without its adapter is the reference, else a copy of it is. The model is a tiny Qwen2 with new
weights, so nothing is downloaded. `--memory` simulates a device with that much of it.
"""

import argparse
import contextlib
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer

import brimful
from brimful.integrations.transformers import exact

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]


def small_model():
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), num_key_value_heads=2, **size, **special))


def small_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def preferences(number):
    """A prompt of 2 to 6 words, and two answers of 2 to 20."""
    draw = torch.Generator().manual_seed(0)

    def text(most):
        words = torch.randint(60, (int(torch.randint(2, most + 1, (), generator=draw)),), generator=draw)
        return " ".join(f"w{int(word)}" for word in words)

    return Dataset.from_list(
        [{"prompt": text(6), "chosen": " " + text(20), "rejected": " " + text(20)} for _ in range(number)]
    )


def main(arguments=None):
    parser = argparse.ArgumentParser()
    for flag in ("--lora", "--checkpointing"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", help="simulate a device with this much memory, such as 40MiB")
    options = parser.parse_args(arguments)
    device = brimful.simulated_memory(options.memory) if options.memory else contextlib.nullcontext()
    with device, tempfile.TemporaryDirectory() as folder:
        trainer = exact(DPOTrainer)(  # without Brimful: trainer = DPOTrainer(
            model=small_model(),
            ref_model=None if options.lora else small_model(),
            args=DPOConfig(
                output_dir=folder,
                per_device_train_batch_size=16,
                max_steps=options.steps,
                learning_rate=1e-2,
                logging_steps=1,
                gradient_checkpointing=options.checkpointing,
                bf16=False,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=preferences(64),
            processing_class=small_tokenizer(),
            peft_config=LoraConfig(target_modules="all-linear") if options.lora else None,
        )
        trainer.train()
    print(f"{trainer.state.global_step} steps, {trainer.stepper.ooms} out-of-memory errors survived")
    return trainer


if __name__ == "__main__":
    main()
