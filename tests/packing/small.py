"""Small causal tasks with rows of 2 to 40 words that can be packed, and some that cannot."""

import random

import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from brimful.packing import causal
from brimful.packing.sequence import boundaries
from brimful.task import Loss, Task

VOCABULARY = 60


class Lines(Task):
    """GPT-2 without dropout on rows of very different lengths."""

    name = "lines"
    worst_shape = (40,)
    global_batch = 24
    chunked_loss = ("packed",)

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.dtype = dtype

    def model(self):
        torch.manual_seed(1)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": VOCABULARY}
        ids = {"bos_token_id": 0, "eos_token_id": 1, "use_cache": False}
        return GPT2LMHeadModel(GPT2Config(**sizes, **ids, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).to(self.dtype)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def rows(self, data):
        return draw_rows(48)

    def shape(self, row):
        return (len(row),)

    def dummy_row(self, shape):
        return torch.randint(2, VOCABULARY, shape).numpy()

    def collate(self, rows):
        ids = [torch.as_tensor(row) for row in rows]
        return {
            "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
            "labels": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100),
        }

    def pack(self, rows, tokens):
        return causal.pack(rows, tokens)

    def loss(self, model, batch):
        if "packed_rows" in batch:
            return causal.loss(model, batch)
        labels = batch["labels"][:, 1:]
        logits = model(batch["input_ids"], attention_mask=(batch["labels"] != -100).long()).logits[:, :-1]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return Loss(sum=total, count=(labels != -100).sum())


class PaddedLines(Lines):
    """The same without a way to pack."""

    name = "padded-lines"
    pack = Task.pack


class Leaky(Lines):
    """Its model takes packed rows for one long row."""

    name = "leaky"

    def loss(self, model, batch):
        if "packed_rows" in batch:
            tokens = len(batch["input_ids"])
            batch = {**batch, "packed_rows": boundaries([tokens], tokens)}
        return super().loss(model, batch)


class State(Lines):
    """Mamba, whose layers carry a state from token to token."""

    name = "state"

    def model(self):
        torch.manual_seed(1)
        return MambaForCausalLM(
            MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False)
        )


def draw_rows(count, seed=0):
    """Rows of uneven lengths, no two of which are the same."""
    draw = random.Random(seed)
    words = np.random.default_rng(seed)
    return [words.integers(2, VOCABULARY, draw.choice((2, 3, 5, 9, 20, 40))) for _ in range(count)]
