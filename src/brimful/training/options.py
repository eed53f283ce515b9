"""What can be asked of a training run, beside what `fit` takes. Imports no torch: the command line reads it.

What the user leaves out has a default here, or is decided where it is known and told with a reason.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from brimful.errors import BadOption, MissingExtra
from brimful.task import Task
from brimful.training.stop import Window, parse_duration

# The learning rate of every step, as a share of the one asked for: a function of the step and nothing else.
#
#     constant   1 after the warm-up
#     linear     down to `floor` in a straight line
#     cosine     down to `floor` along half a cosine
#     wsd        1 until the last `decay` of the run, then down to `floor` along 1 − √share: a run can be made longer
#                without having been decayed in the middle
#
# The warm-up rises in a straight line from 1/warm-up. Because nothing is counted along, a resumed run needs no state, and
# one that is given more steps follows the longer curve from there on.


Curve = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Shares of the learning rate over a run of so many steps."""

    curve: Curve
    steps: int
    warmup: int
    """Steps."""
    decay: float = 0.2
    """The share of the run that `wsd` decays in."""
    floor: float = 0.0
    """The share that is left at the end."""

    def share(self, step: int) -> float:
        """Of optimizer step `step`, counted from 1."""
        if step <= self.warmup:
            return step / self.warmup
        after = self.steps - self.warmup
        begins = self.warmup if self.curve != "wsd" else self.steps - round(self.decay * after)
        if self.curve == "constant" or step <= begins:
            return 1.0
        gone = min(1.0, (step - begins) / max(1, self.steps - begins))
        left = {"linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2, "wsd": 1 - math.sqrt(gone)}[
            self.curve
        ]
        return self.floor + (1 - self.floor) * left


def as_steps(given: int | float | str, steps: int) -> int:
    """`100` steps, or `3%` of the run; what is asked beyond the run is the run."""
    if isinstance(given, str) and given.strip().endswith("%"):
        return min(steps, round(float(given.strip()[:-1]) / 100 * steps))
    return min(steps, int(given))


Optimizers = Literal["adamw", "adafactor", "adamw8bit"]

SAVE_S = 600.0
"""Without --save-every a checkpoint is written when so much time has passed."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The words of `brimful train` and `brimful.train`."""

    run: str | None = None
    """The run's folder; runs/TASK-DATE-TIME unless given."""
    resume: bool = False
    """Go on from the newest complete checkpoint of the run; everything not given again is as it was."""
    max_steps: int | None = None
    """Optimizer steps in all; as many as --epochs are unless given."""
    epochs: float = 1.0
    """Passes over the data, where --max-steps is not given."""
    lr: float | None = None
    """Learning rate at its highest; the task's unless given."""
    optimizer: Optimizers | None = None
    """adamw, adafactor (hardly any state), or adamw8bit (bitsandbytes); the task's own, adamw, unless given."""
    weight_decay: float = 0.01
    """Of weights; biases and norms are not decayed."""
    schedule: Curve = "cosine"
    """How the learning rate falls: constant, linear, cosine, or wsd (constant, then down in the last part)."""
    warmup: str | int = "2%"
    """Steps, or a share of the run, in which the learning rate rises."""
    decay: float = 0.2
    """The share of the run in which wsd falls."""
    min_lr: float = 0.1
    """What is left of the learning rate at the end, as a share."""
    clip_norm: float = 1.0
    """The gradients' norm is brought down to this; 0 does not clip."""
    plan: str | None = None
    """Train with this plan, a JSON file that fit or another run wrote, instead of fitting."""
    mix: str | None = None
    """window:N sorts rows over N steps: less padding, and steps of rows more alike than at random."""
    skip_oversized: bool = False
    """Set aside a row that does not fit even alone, report it, and go on."""
    valid: str | None = None
    """Rows to evaluate on, as DATA."""
    eval_every: int | None = None
    """Steps between evaluations; ten in a run unless given, and one at the end."""
    eval_rows: int = 1000
    """Evaluate on so many rows, the same each time."""
    generate_rows: int = 100
    """Of those, so many are answered for BLEU and chrF; 0 for none."""
    best: str = "loss"
    """The figure that tells the best checkpoint: loss, or one that the task reports, such as bleu."""
    save_every: int | None = None
    """Steps between checkpoints; unless given, one whenever ten minutes have passed. The end is always saved."""
    keep: int = 2
    """Checkpoints to keep, the newest; the best one stays besides."""
    time_limit: str | None = None
    """Save and leave after so long, such as 8h or 90m; the same command goes on from there."""
    window: str | None = None
    """Train only between these times of day, such as 21:00-09:00; it pauses and goes on by itself."""
    gpus: int | None = None
    """Processes with a card each, on this box; one unless given."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What several processes talk through."""
    trackers: str | None = None
    """Also report to these, with commas between: tensorboard, wandb, mlflow, trackio."""

    def __post_init__(self) -> None:
        wrong = [sentence for good, sentence in self._checks() if not good]
        if wrong:
            raise BadOption("; ".join(wrong))
        self.hours, self.limit_s  # noqa: B018 - each raises its own sentence
        if self.mix is not None:
            from brimful.data.batches import Mix

            Mix.parse(self.mix)

    @classmethod
    def of(cls, asked: dict[str, Any]) -> "TrainOptions":
        known = [field.name for field in fields(cls)]
        if unknown := [word for word in asked if word not in known]:
            raise BadOption(f"unknown option {', '.join(map(repr, unknown))}; train takes {', '.join(known)}")
        return cls(**asked)

    @property
    def hours(self) -> Window | None:
        return None if self.window is None else Window.parse(self.window)

    @property
    def limit_s(self) -> float | None:
        return None if self.time_limit is None else parse_duration(self.time_limit, flag="--time-limit")

    @property
    def tracker_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in (self.trackers or "").split(",") if name.strip())

    def _checks(self) -> Iterator[tuple[bool, str]]:
        for name, least in (("max_steps", 1), ("eval_every", 1), ("eval_rows", 1), ("generate_rows", 0), ("save_every", 1),
                            ("keep", 1), ("gpus", 1)):  # fmt: skip
            value = getattr(self, name)
            yield (
                value is None or _whole(value, least),
                f"{_flag(name)} {value!r}: give a whole number of at least {least}",
            )
        for name, most in (("epochs", math.inf), ("lr", math.inf), ("decay", 1)):
            value = getattr(self, name)
            good = value is None or (_number(value) and 0 < value <= most)
            yield good, f"{_flag(name)} {value!r}: give a number above 0" + (f", up to {most}" if most == 1 else "")
        for name, most in (("weight_decay", math.inf), ("clip_norm", math.inf), ("min_lr", 1)):
            value = getattr(self, name)
            good = _number(value) and 0 <= value <= most
            yield (
                good,
                f"{_flag(name)} {value!r}: give a number of at least 0" + (f", up to {most}" if most == 1 else ""),
            )
        for name, words in (
            ("optimizer", get_args(Optimizers)),
            ("schedule", get_args(Curve)),
            ("backend", ("auto", "nccl", "gloo")),
        ):
            value = getattr(self, name)
            yield value is None or value in words, f"{_flag(name)} {value}: one of {', '.join(words)}"
        warm = re.fullmatch(r"\s*(\d+|\d+(\.\d+)?\s*%)\s*", str(self.warmup))
        share = float(str(self.warmup).strip().rstrip("% ")) if warm and "%" in str(self.warmup) else 0
        good = warm is not None and share <= 100
        yield good, f"--warmup {self.warmup!r}: give steps, such as 100, or a share of the run, such as 2%"
        for name in ("resume", "skip_oversized"):
            yield isinstance(getattr(self, name), bool), f"{_flag(name)} {getattr(self, name)!r}: give true or false"
        yield self.plan is None or Path(self.plan).is_file(), f"--plan {self.plan}: there is no such file"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# Optimizers by name, each with the learning rate it is given and no other.
#
#     adamw       torch's, fused on a card; 8 bytes of state a weight
#     adafactor   factored second moments: about 1.4 MiB of state for 0.2 B weights. `relative_step` and `scale_parameter`
#                 are off: with them on, as `torch_optimizer.Adafactor(lr=…)` has them, every schedule was inert
#     adamw8bit   bitsandbytes', 2 bytes of state a weight
#
# Biases and norms are not decayed.


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
