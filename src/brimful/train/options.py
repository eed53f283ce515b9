"""What a user may set on a stepper, checked at once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from brimful.errors import BadOption
from brimful.task import Precision
from brimful.train.ceiling import GROW_AFTER
from brimful.train.events import Event
from brimful.train.share import RowsAre


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Keywords of `Stepper`."""

    micro_batch: int | None = None
    """Never more rows at once than this. The plan's and the memory's limits hold as well."""
    clip_norm: float | None = None
    """The gradients' total norm is brought down to this."""
    precision: Precision | None = None
    """What autocast is opened with: the plan's, else the task's own, else nothing."""
    scaler: torch.amp.GradScaler | None = None
    """Yours, for fp16; otherwise one is made where fp16 needs it."""
    collate: Callable[[Sequence[Any]], Any] | None = None
    """Rows to a batch, where a loss is given and not a task."""
    rows_are: RowsAre = "global"
    """With several processes: `global` rows are the whole step's on each of them and are dealt here; `local` rows are this
    process's own."""
    skip_oversized: bool = False
    """Set aside a row that does not fit even alone, report it, and go on; otherwise stop."""
    allow_inexact: bool = False
    """Cut a step although the loss looks across its rows."""
    skip_nonfinite: int = 5
    """So many steps in a row with NaN or inf gradients are skipped before the run stops; fp16 may skip 20 while its scale
    finds its level."""
    grow_after: int = GROW_AFTER
    """Clean steps before a finer cut grows back."""
    checkpoint: Callable[[], str | None] | None = None
    """Tells where the last checkpoint is, for the one error that only a checkpoint can mend."""
    on_event: Callable[[Event], object] | None = None
    """Hears of every out-of-memory error and every other event."""

    def __post_init__(self) -> None:
        wrong = [
            message
            for bad, message in (
                (
                    self.micro_batch is not None and self.micro_batch < 1,
                    f"micro_batch {self.micro_batch}: write 1 or more",
                ),
                (
                    self.clip_norm is not None and not (self.clip_norm > 0 and math.isfinite(self.clip_norm)),
                    f"clip_norm {self.clip_norm}: write a number above 0, or None for no clipping",
                ),
                (
                    self.precision is not None and self.precision not in get_args(Precision),
                    f"precision {self.precision!r}: write one of {', '.join(get_args(Precision))}",
                ),
                (self.rows_are not in get_args(RowsAre), f"rows_are {self.rows_are!r}: write 'global' or 'local'"),
                (self.skip_nonfinite < 0, f"skip_nonfinite {self.skip_nonfinite}: write 0 or more"),
                (self.grow_after < 1, f"grow_after {self.grow_after}: write 1 or more"),
            )
            if bad
        ]
        if wrong:
            raise BadOption("; ".join(wrong))
