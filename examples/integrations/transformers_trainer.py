"""Hugging Face's Seq2SeqTrainer that survives out-of-memory. `python examples/integrations/transformers_trainer.py`

`# new` marks what Brimful adds, `# before:` what it replaces. A simulated memory limit stands for the GPU: at step 5 a callback
takes part of the memory away, as another process would. Every step trains on its 4 × 8 rows, once.
"""

import tempfile

import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

import brimful  # for the simulated memory only
from brimful.integrations.transformers import exact  # new

STEPS, PAD, VOCAB = 12, 0, 128


class SmallT5(T5ForConditionalGeneration):
    def __init__(self):
        super().__init__(T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
                                  decoder_start_token_id=PAD, pad_token_id=PAD))  # fmt: skip


def rows_to_copy(number):
    """Source and target of 2 to 40 tokens."""
    lengths = (38 * torch.rand(number) ** 2).int() + 2
    tokens = [torch.randint(2, VOCAB, (int(length),)).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in tokens]


def collate(rows):
    """What transformers.DataCollatorForSeq2Seq does with a tokenizer."""

    def padded(name, value):
        longest = max(len(row[name]) for row in rows)
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    ids = padded("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": padded("labels", -100)}


class AnotherProcess(TrainerCallback):
    def __init__(self, memory):
        self.memory = memory

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == 5:
            self.memory.limit_bytes = int(0.6 * self.memory.peak_bytes)


def main():
    torch.manual_seed(0)
    with brimful.simulated_memory("1GiB") as memory, tempfile.TemporaryDirectory() as folder:  # stands for the GPU
        args = Seq2SeqTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=8,
            max_steps=STEPS,
            learning_rate=1e-2,
            logging_steps=3,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = exact(Seq2SeqTrainer)(  # before: trainer = Seq2SeqTrainer(
            model=SmallT5(),
            args=args,
            train_dataset=rows_to_copy(32 * STEPS),
            data_collator=collate,
            callbacks=[AnotherProcess(memory)],
        )
        trainer.train()
    for event in trainer.stepper.events:
        print(f"step {event.step}, {event.event}: {event.sentence}")
    print(f"{trainer.state.global_step} of {STEPS} steps, {trainer.stepper.ooms} out-of-memory errors survived")


if __name__ == "__main__":
    main()
