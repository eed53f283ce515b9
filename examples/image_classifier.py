"""An image classifier with BatchNorm, which depends on the micro-batch: the plan says so and splits as little as it can.

brimful plan examples/image_classifier.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn

from brimful import Loss, Task


def block(channels, out, stride):
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class ImageClassifier(Task):
    global_batch = 128

    def model(self):
        layers = [block(3, 32, 1), block(32, 32, 1), block(32, 64, 2), block(64, 128, 2)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))

    def loss(self, model, batch):
        total = F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum")
        return Loss(sum=total, count=len(batch["label"]))

    def dummy(self, rows, shape):
        return {"image": torch.randn(rows, 3, 96, 96), "label": torch.randint(0, 100, (rows,))}


task = ImageClassifier()
