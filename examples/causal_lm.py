"""A small GPT-2 on the lines of a text file, with a loss of its own. Its rows can be packed, and planned without data.

brimful plan examples/causal_lm.py:task [TEXT_FILE] [--layout packed]
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from brimful import Loss, Task
from brimful.packing import causal

VOCAB, PAD = 257, 256  # bytes, and a padding token


class CausalLM(Task):
    worst_shape = (256,)
    global_batch = 64
    chunked_loss = ("packed",)  # causal.loss never holds all logits

    def model(self):
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=256, n_embd=128, n_layer=4, n_head=4,
                                          bos_token_id=None, eos_token_id=None, use_cache=False))  # fmt: skip

    def loss(self, model, batch):
        if "packed_rows" in batch:
            return causal.loss(model, batch)
        logits, labels = model(batch["ids"]).logits[:, :-1], batch["ids"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum")
        return Loss(sum=total, count=(labels != PAD).sum())

    def dummy_row(self, shape):
        return torch.randint(0, 256, shape)

    def rows(self, data):
        lines = Path(data).read_bytes().splitlines()
        return [torch.tensor(list(line[:256])) for line in lines if len(line) > 1]

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        return {"ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)}

    def pack(self, rows, tokens):
        return causal.pack(rows, tokens)


task = CausalLM()
