"""What can be asked of a training run, beside what `fit` takes. Imports no torch: the command line reads it.

What the user leaves out has a default here, or is decided where it is known and told with a reason.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from brimful.errors import BadOption
from brimful.train.clock import Window, parse_duration
from brimful.train.schedule import Curve

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
