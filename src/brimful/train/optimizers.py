"""Optimizers by name, each with the learning rate it is given and no other.

    adamw       torch's, fused on a card; 8 bytes of state a weight
    adafactor   factored second moments: about 1.4 MiB of state for 0.2 B weights. `relative_step` and `scale_parameter`
                are off: with them on, as `torch_optimizer.Adafactor(lr=…)` has them, every schedule was inert
    adamw8bit   bitsandbytes', 2 bytes of state a weight

Biases and norms are not decayed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brimful.errors import MissingExtra
from brimful.task import Task
from brimful.train.settings import Optimizers, TrainOptions

LEARNING_RATE = 1e-4
"""Of a task that names none."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """An optimizer as asked for; called with a model it is made. It takes the place of `Task.optimizer`."""

    name: Optimizers
    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        if self.name == "adamw8bit" and find_spec("bitsandbytes") is None:
            raise MissingExtra("bitsandbytes", "eightbit")

    def __call__(self, model: nn.Module) -> Optimizer:
        groups = _groups(model, self.weight_decay)
        on_card = all(param.is_cuda for group in groups for param in group["params"])
        if self.name == "adamw":
            return torch.optim.AdamW(groups, lr=self.lr, fused=on_card or None)
        if self.name == "adafactor":
            from transformers.optimization import Adafactor

            return Adafactor(groups, lr=self.lr, relative_step=False, scale_parameter=False, warmup_init=False)
        import bitsandbytes

        made: Optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=self.lr)
        return made


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights to decay, and those of a single dimension that are not. Two groups also without decay, so that a resumed
    run may change it."""
    trained = [param for param in model.parameters() if param.requires_grad]
    kinds = (weight_decay, [p for p in trained if p.ndim > 1]), (0.0, [p for p in trained if p.ndim <= 1])
    return [{"params": params, "weight_decay": decay} for decay, params in kinds if params]


def set_optimizer(task: Task, asked: TrainOptions) -> None:
    """What is asked for takes the place of the task's own; the plan is made with it too."""
    own = type(task).optimizer is not Task.optimizer
    if own and asked.optimizer is None:
        if asked.lr is not None:
            task.optimizer = _AtRate(task.optimizer, asked.lr)  # type: ignore[method-assign]
        return
    rate: float = getattr(task, "learning_rate", LEARNING_RATE) if asked.lr is None else asked.lr
    chosen = Chosen(name=asked.optimizer or "adamw", lr=rate, weight_decay=asked.weight_decay)
    task.optimizer = chosen  # type: ignore[method-assign]


@dataclass(frozen=True)
class _AtRate:
    """A task's own optimizer at another learning rate."""

    make: Callable[[nn.Module], Optimizer]
    lr: float

    def __call__(self, model: nn.Module) -> Optimizer:
        optimizer = self.make(model)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        return optimizer


def name_of(task: Task) -> str:
    chosen = task.optimizer
    return f"{chosen.name} at {chosen.lr:g}" if isinstance(chosen, Chosen) else "of the task"
