"""Optimizers and learning-rate curves by name.

    adamw       torch's, fused on a GPU; 8 bytes of state per weight
    adafactor   factored second moments: about 1.4 MiB of state for 0.2 B weights. `relative_step` and `scale_parameter`
                are off: with them on, no schedule has any effect
    adamw8bit   bitsandbytes', 2 bytes of state per weight

    constant    the peak rate after the warmup
    linear      down to the floor in a straight line
    cosine      down to the floor along half a cosine
    wsd         the peak rate until the last `decay` of the run, then down to the floor along 1 − √share, so that a run can
                be made longer without having decayed in the middle

The warmup rises in a straight line from 1/warmup; without one the first step has the peak rate. The rate depends on the step
alone, so a resumed run needs no state, and one that is given more steps follows the longer curve from there on.
"""

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brimful.errors import MissingExtra
from brimful.planning.plan import Choice, Source
from brimful.task import Task
from brimful.training.average import add_average
from brimful.training.options import Curve, OptimizerName, TrainOptions

LEARNING_RATE = 1e-4
"""For a task without a `learning_rate`."""


def with_optimizer(task: Task, options: TrainOptions) -> Task:
    """A copy of the task whose `optimizer` is the one the options ask for. The caller's task is not changed.

    A task's own optimizer is kept unless `optimizer` is given; `lr` alone changes its learning rate. With `ema` it has
    room for the average of the weights.
    """
    changed, make = copy.copy(task), _chosen(task, options)
    if options.ema is not None:
        make = _WithAverage(make)
    if make != task.optimizer:
        changed.optimizer = make  # type: ignore[method-assign, assignment]
    return changed


def _chosen(task: Task, options: TrainOptions) -> Callable[[nn.Module], Optimizer]:
    if type(task).optimizer is not Task.optimizer and options.optimizer is None:
        return task.optimizer if options.lr is None else _WithRate(task.optimizer, options.lr)
    rate: float = getattr(task, "learning_rate", LEARNING_RATE) if options.lr is None else options.lr
    return NamedOptimizer(name=options.optimizer or "adamw", lr=rate, weight_decay=options.weight_decay)


def optimizer_choice(task: Task, options: TrainOptions) -> Choice:
    """How the plan shows the optimizer of a task that came from `with_optimizer`."""
    optimizer = task.optimizer.make if isinstance(task.optimizer, _WithAverage) else task.optimizer
    name: str = optimizer.name if isinstance(optimizer, NamedOptimizer) else "the task's"
    if isinstance(optimizer, (NamedOptimizer, _WithRate)):
        name += f" at {optimizer.lr:g}"
    of_task = not isinstance(optimizer, NamedOptimizer) or hasattr(task, "learning_rate")
    origin = "as requested" if options.optimizer else "the task's" if of_task else "the default"
    rate = "" if options.lr is None else ", with the learning rate requested"
    source: Source = "you" if options.optimizer or rate else "task" if of_task else "default"
    return Choice.of("optimizer", options.optimizer, name, origin + rate, "asked", source)


@dataclass(frozen=True, kw_only=True)
class NamedOptimizer:
    """Called with a model, makes its optimizer; takes the place of `Task.optimizer`."""

    name: OptimizerName
    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        if self.name == "adamw8bit" and find_spec("bitsandbytes") is None:
            raise MissingExtra("bitsandbytes", "eightbit")

    def __call__(self, model: nn.Module) -> Optimizer:
        groups = _groups(model, self.weight_decay)
        on_gpu = all(param.is_cuda for group in groups for param in group["params"])
        if self.name == "adamw":
            return torch.optim.AdamW(groups, lr=self.lr, fused=on_gpu or None)
        # transformers imports bitsandbytes as well, which complains of kernels that no optimizer uses
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
        if self.name == "adafactor":
            from transformers.optimization import Adafactor

            return Adafactor(groups, lr=self.lr, relative_step=False, scale_parameter=False, warmup_init=False)
        import bitsandbytes

        optimizer: Optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=self.lr)
        return optimizer


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights to decay, and those of one dimension, which are not. Two groups even without decay, so that a resumed run
    may change it."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    kinds = (weight_decay, [p for p in trainable if p.ndim > 1]), (0.0, [p for p in trainable if p.ndim <= 1])
    return [{"params": params, "weight_decay": decay} for decay, params in kinds if params]


@dataclass(frozen=True)
class _WithRate:
    """A task's own optimizer with another learning rate."""

    make: Callable[[nn.Module], Optimizer]
    lr: float

    def __call__(self, model: nn.Module) -> Optimizer:
        optimizer = self.make(model)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        return optimizer


@dataclass(frozen=True)
class _WithAverage:
    """An optimizer with room for the average of the weights, so that the plan counts it."""

    make: Callable[[nn.Module], Optimizer]

    def __call__(self, model: nn.Module) -> Optimizer:
        optimizer = self.make(model)
        add_average(optimizer)
        return optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over a run, as a share of its peak."""

    curve: Curve
    steps: int
    warmup: int
    """Steps."""
    decay: float = 0.2
    """The share of the run in which `wsd` falls."""
    floor: float = 0.0
    """The share at the end."""

    @classmethod
    def of(cls, options: TrainOptions, steps: int) -> "Schedule":
        return cls(
            curve=options.schedule, steps=steps, warmup=options.warmup_steps(steps), decay=options.decay, floor=options.min_lr
        )  # fmt: skip

    def describe(self, peak: float) -> str:
        """The learning rate of the first step, at its highest and of the last step."""
        top = min(max(1, self.warmup), self.steps)  # it rises until there and never after
        first, highest, last = (peak * self.share(step) for step in (1, top, self.steps))
        rates = f"{first:.3g} in the first step, {highest:.3g} at most, {last:.3g} in the last"
        return f"learning rate {rates}"

    def share(self, step: int) -> float:
        """At optimizer step `step`, counted from 1."""
        if step <= self.warmup:
            return step / self.warmup
        after = self.steps - self.warmup
        start = self.warmup if self.curve != "wsd" else self.steps - round(self.decay * after)
        start = max(1, start)  # without a warmup the first step has the peak rate, which no other step would have
        if self.curve == "constant" or step <= start:
            return 1.0
        done = min(1.0, (step - start) / max(1, self.steps - start))
        left = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "wsd": 1 - math.sqrt(done)}[
            self.curve
        ]
        return self.floor + (1 - self.floor) * left
