"""Graphs of uneven size: the nodes of a batch are end to end, so its tensors have no common first dimension.

    brimful train examples/graphs.py:task 400 --memory-limit 64MiB --run runs/graphs --max-steps 20

Rows are a list, and a split collates fewer of them, so any layout of a batch will do. A batch may also be an object with `.to(device)`,
such as a `Batch` of PyTorch Geometric. `loss` returns `Loss(sum, count)`, because a mean does not say how many graphs it is over.
"""

import torch
from torch import nn

from brimful import Loss, Task


class Graphs(Task):
    global_batch = 32

    def model(self):
        return nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))

    def rows(self, data):
        generator = torch.Generator().manual_seed(0)
        nodes = torch.randint(3, 40, (int(data),), generator=generator)
        return [torch.randn(int(count), 16, generator=generator) for count in nodes]

    def shape(self, row):
        return (len(row),)

    def collate(self, rows):
        graph = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in rows]))
        return {"nodes": torch.cat(list(rows)), "graph": graph, "target": torch.stack([row.mean() for row in rows])}

    def loss(self, model, batch):
        of_nodes = model(batch["nodes"]).squeeze(1)
        of_graphs = torch.zeros_like(batch["target"]).index_add(0, batch["graph"], of_nodes)
        return Loss((of_graphs - batch["target"]).square().sum(), len(batch["target"]))


task = Graphs()
