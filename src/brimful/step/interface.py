"""What a user may set on a stepper, checked at once."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from brimful.errors import BadOption
from brimful.step.distributed import RowsAre
from brimful.task import Precision

# What one step did.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    step: int
    loss: float
    """Mean over everything counted in the step, on all processes; of several terms, the sum of their means."""
    terms: dict[str, float]
    """The mean of each term."""
    rows: int
    """Rows trained on, over all processes."""
    count: float
    """What the loss counted; of several terms, the first one's."""
    applied: bool
    """False where the gradients were NaN or inf and the weights stayed as they were."""
    grad_norm: float | None
    """Before clipping; None from `backward`."""
    micro_batches: int
    largest_micro_batch: int
    """Rows of this process's largest micro-batch."""
    ooms: int
    """Out-of-memory errors of this process that the step survived."""
    ooms_of_all: int
    """Those of all processes."""
    set_aside: tuple[int, ...]
    """Rows that do not fit even alone, by their place in what was given."""
    seconds: float
    peak_bytes: int | None
    """Most bytes allocated during the step; None where the device does not count them."""


# What happened to a step that was not plain sailing: one event each, with a sentence for people and figures for programs.
#
# oom         memory ran out: what was tried, what was free, what changed
# grow        the cut went back towards what it was
# thrash      the allocator gave its cache back again and again, so the cut became finer before an out-of-memory error
# model       the memory model was corrected by what was measured
# skip        a step was not applied: its gradients were NaN or inf
# oversized   a row that does not fit even alone was set aside
# deal        the rows of a step are dealt to the processes in other shares
# note        anything else that was decided on the user's behalf


Kind = Literal["oom", "grow", "thrash", "model", "skip", "oversized", "deal", "note"]
LOUD: frozenset[Kind] = frozenset(("oom", "thrash", "skip", "oversized"))
"""Kinds that are logged as warnings; the rest are information."""
KEPT = 1000
"""So many events stay in memory; every one is handed on as it happens."""

log = logging.getLogger("brimful")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened."""

    event: Kind
    step: int
    """Optimizer step, from 1."""
    sentence: str
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"event": self.event, "step": self.step, "sentence": self.sentence, **self.details}


class Events:
    """Keeps the last events, logs them, and hands each to a listener whose failures cannot stop training."""

    def __init__(self, listener: Callable[[Event], object] | None) -> None:
        self.kept: deque[Event] = deque(maxlen=KEPT)
        self._listener = listener

    def add(self, kind: Kind, step: int, sentence: str, **details: Any) -> None:
        event = Event(event=kind, step=step, sentence=sentence, details=details)
        self.kept.append(event)
        log.log(logging.WARNING if kind in LOUD else logging.INFO, "step %d: %s", step, sentence)
        if self._listener is None:
            return
        try:
            self._listener(event)
        except Exception as error:
            log.warning("the listener on_event failed on %r: %s; training goes on", kind, error)


GROW_AFTER = 10
"""Clean steps before a lowered ceiling is raised again."""


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
