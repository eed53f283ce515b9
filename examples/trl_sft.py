"""TRL's SFTTrainer on chats, with steps that survive out-of-memory: `exact(SFTTrainer)` is all that changes.

    python examples/trl_sft.py --assistant-only --lora --checkpointing     # or --packing; with `pip install trl peft`

The model is a tiny Qwen2 with new weights, so nothing is downloaded. `--memory` simulates a device with that much of it.
"""

import argparse
import contextlib
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

import brimful
from brimful.integrations.transformers import exact

WORDS = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", *(f"w{number}" for number in range(60))]
TEMPLATE = (
    "{% for message in messages %}{{ ' <' + message.role + '> ' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + ' <eos>' }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def small_model():
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), num_key_value_heads=2, **size, **special))


def small_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)


def chats(number):
    """Each with one to three questions and answers of 2 to 20 words."""
    draw = torch.Generator().manual_seed(0)

    def message(role):
        words = torch.randint(60, (int(torch.randint(2, 21, (), generator=draw)),), generator=draw)
        return {"role": role, "content": " ".join(f"w{int(word)}" for word in words)}

    turns = [1 + row % 3 for row in range(number)]
    return Dataset.from_list(
        [{"messages": [message(r) for _ in range(n) for r in ("user", "assistant")]} for n in turns]
    )


def main(arguments=None):
    parser = argparse.ArgumentParser()
    for flag in ("--lora", "--packing", "--checkpointing", "--assistant-only"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", help="simulate a device with this much memory, such as 40MiB")
    options = parser.parse_args(arguments)
    device = brimful.simulated_memory(options.memory) if options.memory else contextlib.nullcontext()
    with device, tempfile.TemporaryDirectory() as folder:
        trainer = exact(SFTTrainer)(  # without Brimful: trainer = SFTTrainer(
            model=small_model(),
            args=SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=4 if options.packing else 16,
                max_steps=options.steps,
                learning_rate=1e-2,
                logging_steps=1,
                packing=options.packing,
                max_length=128,
                gradient_checkpointing=options.checkpointing,
                assistant_only_loss=options.assistant_only,
                bf16=False,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=chats(64),
            processing_class=small_tokenizer(),
            peft_config=LoraConfig(target_modules="all-linear") if options.lora else None,
        )
        trainer.train()
    print(f"{trainer.state.global_step} steps, {trainer.stepper.ooms} out-of-memory errors survived")
    return trainer


if __name__ == "__main__":
    main()
