"""What a user may set on a stepper, checked at once."""

import math
from collections.abc import Callable, Iterator, Sequence
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
        wrong = [message for good, message in self._checks() if not good]
        if wrong:
            raise BadOption("; ".join(wrong))

    def _checks(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.micro_batch is None or _whole(self.micro_batch, 1),
            f"micro_batch {self.micro_batch!r}: write 1 or more",
        )
        clip = self.clip_norm
        yield (
            clip is None or (isinstance(clip, (int, float)) and clip > 0 and math.isfinite(clip)),
            f"clip_norm {clip!r}: write a number above 0, or None for no clipping",
        )
        yield (
            self.precision is None or self.precision in get_args(Precision),
            f"precision {self.precision!r}: write one of {', '.join(get_args(Precision))}",
        )
        for name in ("collate", "checkpoint", "on_event"):
            given = getattr(self, name)
            yield given is None or callable(given), f"{name} {given!r}: write a function"
        scales = self.scaler is None or hasattr(self.scaler, "unscale_")
        yield scales, f"scaler {self.scaler!r}: write a torch.amp.GradScaler"
        yield self.rows_are in get_args(RowsAre), f"rows_are {self.rows_are!r}: write 'global' or 'local'"
        yield _whole(self.skip_nonfinite, 0), f"skip_nonfinite {self.skip_nonfinite!r}: write 0 or more"
        yield _whole(self.grow_after, 1), f"grow_after {self.grow_after!r}: write 1 or more"


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
