"""What both scripts share: a small transformer, its rows, and a card of 64 MiB, simulated on the CPU."""

import time

import torch
import torch.nn.functional as F
from torch import nn

import brimful

STEPS = 8
_held = []


def make():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(256, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 256)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = [torch.randint(0, 256, (32, 64)) for _ in range(STEPS)]
    return model, optimizer, batches


def loss(model, ids):
    time.sleep(0.3)  # so that a reader can follow
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum"), ids.numel()


def card():
    return brimful.simulated_memory("64MiB")


def someone_takes_memory():
    print("-- another process takes 32 MiB of the card --", flush=True)
    _held.append(torch.zeros(32 * 2**20, dtype=torch.uint8))
