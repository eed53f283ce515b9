"""The smallest task that trains a Hugging Face model: GPT-2 on the lines of a text file, one token per byte.

The model returns its own loss, and without `dummy` the plan is made with the longest lines of the file.

    brimful train examples/huggingface.py:task TEXT_FILE
"""

from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

from brimful import Task


class HuggingFace(Task):
    worst_shape = (128,)
    global_batch = 32

    def model(self):
        size = {"vocab_size": 256, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
        return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None))

    def loss(self, model, batch):
        return model(**batch)

    def rows(self, data):
        return [torch.tensor(list(line[:128])) for line in Path(data).read_bytes().splitlines() if len(line) > 1]

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        return {"input_ids": pad_sequence(rows, True), "labels": pad_sequence(rows, True, padding_value=-100)}


task = HuggingFace()
