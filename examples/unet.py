"""A small U-Net for segmentation, whose memory depends on the side of the square images.

brimful plan examples/unet.py:task --lengths 128
"""

import torch
import torch.nn.functional as F
from torch import nn

from brimful import Loss, Task


class Block(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1)
        )

    def forward(self, x):
        return self.body(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Block(3, 16), Block(16, 32), Block(32, 64)])
        self.up = nn.ModuleList([Block(96, 32), Block(48, 16)])
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x if not skips else F.max_pool2d(x, 2))
            skips.append(x)
        for block, skip in zip(self.up, reversed(skips[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], 1))
        return self.head(x)


class Segmentation(Task):
    worst_shape = (128,)
    global_batch = 64

    def model(self):
        return UNet()

    def loss(self, model, batch):
        total = F.cross_entropy(model(batch["image"]), batch["mask"], reduction="sum")
        return Loss(sum=total, count=batch["mask"].numel())

    def dummy(self, rows, shape):
        (side,) = shape
        return {"image": torch.randn(rows, 3, side, side), "mask": torch.randint(0, 4, (rows, side, side))}


task = Segmentation()
