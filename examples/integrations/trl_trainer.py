"""TRL's SFTTrainer that survives out-of-memory. `python examples/integrations/trl_trainer.py`, with `pip install trl`

`# new` marks what Brimful adds, `# before:` what it replaces. A simulated memory limit stands for the GPU: at step 5 a callback
takes part of the memory away, as another process would. `num_tokens` and the other metrics count every row once.
"""

import tempfile

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import brimful  # for the simulated memory only
from brimful.integrations.transformers import exact  # new

STEPS, WORDS = 8, 60


def small_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def small_llama():
    config = LlamaConfig(vocab_size=WORDS + 3, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, eos_token_id=1, bos_token_id=1)  # fmt: skip
    return LlamaForCausalLM(config)


def texts(number):
    """Of 2 to 40 words."""
    lengths = (38 * torch.rand(number) ** 2).int() + 2
    return [{"text": " ".join(f"w{int(word)}" for word in torch.randint(WORDS, (int(length),)))} for length in lengths]


class AnotherProcess(TrainerCallback):
    def __init__(self, memory):
        self.memory = memory

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == 5:
            self.memory.limit_bytes = int(0.7 * self.memory.peak_bytes)


def main():
    torch.manual_seed(0)
    with brimful.simulated_memory("1GiB") as memory, tempfile.TemporaryDirectory() as folder:  # stands for the GPU
        args = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            learning_rate=1e-2,
            logging_steps=2,
            bf16=False,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = exact(SFTTrainer)(  # before: trainer = SFTTrainer(
            model=small_llama(),
            args=args,
            train_dataset=Dataset.from_list(texts(16 * STEPS)),
            processing_class=small_tokenizer(),
            callbacks=[AnotherProcess(memory)],
        )
        trainer.train()
    for event in trainer.stepper.events:
        print(f"step {event.step}, {event.event}: {event.sentence}")
    print(f"{trainer.state.global_step} of {STEPS} steps, {trainer.stepper.ooms} out-of-memory errors survived")


if __name__ == "__main__":
    main()
