"""A preference head on precomputed features: every in-distribution row is compared with every row outside it.

The loss holds a matrix of rows × rows, so memory grows with the square of the batch: 13 MB at 512 rows, 1 GB at 8192.

    brimful plan examples/all_pairs.py:task --global-batch 50000 --memory-limit 1GiB --allow-inexact
"""

import torch
import torch.nn.functional as F
from torch import nn

from brimful import Loss, Task


class AllPairs(Task):
    global_batch = 2048

    def model(self):
        return nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))

    def loss(self, model, batch):
        inside, outside = model(batch["inside"]), model(batch["outside"])
        pairs = F.softplus(-0.1 * (outside.T - inside))
        regular = 0.01 * (inside.square() + outside.square()).sum()
        return Loss(sum=pairs.mean() * len(inside) + regular, count=len(inside))

    def dummy(self, rows, shape):
        return {side: torch.randn(rows, 512) for side in ("inside", "outside")}


task = AllPairs()
