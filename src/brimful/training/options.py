"""What the user may set for a training run, besides the options of the plan and of the task.

`brimful.train` takes these fields as keywords, and the command line makes its flags from them and the docstring under each.
Torch is not imported here, so that `brimful train --help` takes 0.3 s instead of 3.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from brimful.errors import BadOption
from brimful.units import is_number, is_whole

OptimizerName = Literal["adamw", "adafactor", "adamw8bit"]
Curve = Literal["constant", "linear", "cosine", "wsd"]
Backend = Literal["auto", "nccl", "gloo"]

SAVE_S = 600.0
"""Without `save_every`, seconds between checkpoints."""
_UNIT_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?=.*\d)" + "".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?){unit})?" for unit in _UNIT_SECONDS))


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `brimful train` and `brimful.train`."""

    run: str | None = None
    """The run's folder. Default: runs/TASK-DATE-TIME."""
    resume: bool = False
    """Continue from the newest intact checkpoint of the run, with the options it was started with."""
    rollback: int | bool = False
    """Resume with the plan before the current one and its options, or with the plan of this number in RUN/plans."""
    max_steps: int | None = None
    """Optimizer steps in all. Default: as many as --epochs take."""
    epochs: float = 1.0
    """Passes over the data, if --max-steps is not given."""
    lr: float | None = None
    """The peak learning rate. Default: the task's value."""
    optimizer: OptimizerName | None = None
    """adamw, adafactor (almost no state) or adamw8bit (bitsandbytes). Default: the task's optimizer, else adamw."""
    weight_decay: float = 0.01
    """Weight decay. Biases and norms are not decayed."""
    schedule: Curve = "cosine"
    """How the learning rate falls: constant, linear, cosine, or wsd (constant, then down in the last part)."""
    warmup: str | int = "2%"
    """Steps, or a share of the run such as 3%, in which the learning rate rises. Steps are at most half of the run."""
    decay: float = 0.2
    """The share of the run in which wsd falls."""
    min_lr: float = 0.1
    """The learning rate at the end, as a share of the peak."""
    clip_norm: float = 1.0
    """Clip the norm of the gradients to this; 0 disables clipping."""
    ema: float | None = None
    """Average the weights over the steps with this decay, such as 0.999. The average is what is evaluated and saved."""
    plan: str | None = None
    """Train with this plan, a JSON file that `brimful plan` or another run wrote, instead of making one."""
    mix: str | None = None
    """window:N sorts rows by length over N steps: less padding, but rows of one step are more alike than at random."""
    skip_oversized: bool = False
    """Skip and report a row that does not fit even alone, instead of stopping."""
    valid: str | None = None
    """Rows to evaluate on, like DATA."""
    eval_every: int | None = None
    """Steps between evaluations. Default: ten in a run, at least 50 steps apart, and one at the end."""
    eval_rows: int = 1000
    """Rows to evaluate on, the same each time."""
    generate_rows: int = 100
    """How many of those rows the task's own scores use, such as BLEU of generated answers; 0 for none."""
    best: str = "loss"
    """What decides which checkpoint is the best: loss, or a score of the task, such as bleu."""
    patience: int | None = None
    """Stop after this many evaluations in a row without a better one. Without --valid, the mean training loss of --eval-every
    steps takes the place of an evaluation. The best checkpoint is kept. Default: never."""
    save_every: int | None = None
    """Steps between checkpoints. Default: one every ten minutes. The last step is always saved."""
    keep: int = 2
    """Newest checkpoints to keep, besides the best one."""
    time_limit: str | None = None
    """Save and leave after this time, such as 8h or 90m. The same command continues."""
    backend: Backend = "auto"
    """What several processes communicate through."""
    trackers: str | None = None
    """Also log to these, separated by commas: tensorboard, wandb, mlflow, trackio."""

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise BadOption(" ".join(problems))

    @property
    def time_limit_s(self) -> float | None:
        return None if self.time_limit is None else parse_duration(self.time_limit)

    @property
    def tracker_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in (self.trackers or "").split(",") if name.strip())

    def warmup_steps(self, steps: int) -> int:
        """In a run of this many steps. A number of steps is for runs of some length: of a shorter one it takes half."""
        text = str(self.warmup).strip()
        if text.endswith("%"):
            return round(float(text[:-1]) / 100 * steps)
        return min(int(text), max(1, steps // 2))


_LEAST = {
    "max_steps": 1,
    "eval_every": 1,
    "eval_rows": 1,
    "generate_rows": 0,
    "patience": 1,
    "save_every": 1,
    "keep": 1,
}
_POSITIVE = {"epochs": math.inf, "lr": math.inf, "decay": 1}
_NOT_NEGATIVE = {"weight_decay": math.inf, "clip_norm": math.inf, "min_lr": 1}
_WORDS = {"optimizer": get_args(OptimizerName), "schedule": get_args(Curve), "backend": get_args(Backend)}


def _problems(options: TrainOptions) -> Iterator[str]:
    """One sentence for each value that cannot work."""
    values = vars(options)
    for name, least in _LEAST.items():
        value = values[name]
        if value is not None and not is_whole(value, least):
            yield f"{name}={value!r} must be a whole number of at least {least}."
    for name, most in _POSITIVE.items():
        value = values[name]
        if value is not None and not (is_number(value) and 0 < value <= most):
            yield f"{name}={value!r} must be a number above 0{' and at most 1' if most == 1 else ''}."
    for name, most in _NOT_NEGATIVE.items():
        value = values[name]
        if not (is_number(value) and 0 <= value <= most):
            yield f"{name}={value!r} must be a number of at least 0{' and at most 1' if most == 1 else ''}."
    if options.ema is not None and not (is_number(options.ema) and 0 < options.ema < 1):
        yield f"ema={options.ema!r} must be a number above 0 and below 1, such as 0.999."
    for name, words in _WORDS.items():
        value = values[name]
        if value is not None and value not in words:
            yield f"{name}={value!r} must be one of {', '.join(words)}."
    if not _is_warmup(options.warmup):
        yield f"warmup={options.warmup!r} must be steps, such as 100, or a share of the run, such as 2%."
    for name in ("resume", "skip_oversized"):
        if not isinstance(values[name], bool):
            yield f"{name}={values[name]!r} must be True or False."
    rollback = options.rollback
    if not isinstance(rollback, bool) and not is_whole(rollback, 1):
        yield f"rollback={rollback!r} must be the number of a plan in RUN/plans, from 1 on."
    if rollback and options.plan is not None:
        yield "rollback= cannot be combined with plan=. Try: one of the two."
    if options.plan is not None and not Path(options.plan).is_file():
        yield f"plan={options.plan!r} is not a file. Try: a plan.json that `brimful plan` or a run wrote."
    try:
        if options.time_limit is not None:
            parse_duration(options.time_limit)
        if options.mix is not None:
            from brimful.data.batches import Mix

            Mix.parse(options.mix)
    except BadOption as error:
        yield str(error)


def _is_warmup(value: Any) -> bool:
    text = str(value).strip()
    if re.fullmatch(r"\d+(\.\d+)?\s*%", text):
        return float(text.rstrip("% ")) <= 100
    return re.fullmatch(r"\d+", text) is not None


def parse_duration(text: str) -> float:
    """`8h`, `90m`, `1h30m`, `45s`, `2d` or `1.5h` in seconds. A number without a unit is refused: it could be anything."""
    match = _DURATION.fullmatch("".join(str(text).lower().split()))
    seconds = 0.0
    if match is not None:
        seconds = sum(float(value) * _UNIT_SECONDS[unit] for unit, value in match.groupdict().items() if value)
    if not seconds:
        raise BadOption(f"time_limit={text!r} must be a positive duration, such as 8h, 90m, 1h30m, 45s or 2d.")
    return seconds
