"""A contrastive encoder: every other row of the batch is a negative, so splitting the batch would change the loss.

The plan keeps the step whole and refuses a global batch that does not fit whole.

    brimful plan examples/contrastive.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn

from brimful import Loss, Task


class Contrastive(Task):
    worst_shape = (64,)
    global_batch = 64

    def model(self):
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(5000, 128), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))

    def loss(self, model, batch):
        query, key = (F.normalize(model(batch[side]).mean(1), dim=-1) for side in ("query", "key"))
        similar = query @ key.T / 0.05
        return Loss(
            sum=F.cross_entropy(similar, torch.arange(len(query), device=query.device), reduction="sum"),
            count=len(query),
        )

    def dummy(self, rows, shape):
        return {side: torch.randint(0, 5000, (rows, *shape)) for side in ("query", "key")}


task = Contrastive()
