"""What a step returns and what it reports: one `StepResult` per step, and one `Event` for everything out of the ordinary.

An event has a sentence for people and figures for programs:

    oom         memory ran out: what ran, what was free, what changed
    grow        the micro-batch size went back up
    thrash      the allocator kept giving its cache back, so micro-batches became smaller before an error
    model       the memory model was corrected by a measured peak
    skip        the gradients were NaN or inf, so the step was not applied
    oversized   a row that does not fit even alone was set aside
    deal        rows are dealt to ranks in other shares
    note        any other decision made for the user
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

EventKind = Literal["oom", "grow", "thrash", "model", "skip", "oversized", "deal", "note"]
WARNINGS: frozenset[EventKind] = frozenset(("oom", "thrash", "skip", "oversized"))
"""Kinds that are logged as warnings. The others are logged as information."""
EVENTS_KEPT = 1000
"""Events kept in memory. Every event reaches the listener, however many there are."""

logger = logging.getLogger("brimful")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did.

    >>> import torch, brimful
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> stepper = brimful.Stepper(model, optimizer, lambda model, x: brimful.Loss(model(x).sum(), count=len(x)))
    >>> result = stepper.step(torch.randn(10, 4))
    >>> result.step, result.rows, result.applied
    (1, 10, True)
    """

    step: int
    """Number of the step, from 1. Skipped steps count."""
    loss: float
    """Mean over everything counted in the step, on all ranks. With several terms, the sum of their means."""
    terms: dict[str, float]
    """Mean of each term of the loss."""
    log: dict[str, float]
    """Mean of each value in `Loss.log`, weighted by the count of its loss, on all ranks."""
    rows: int
    """Rows trained on, on all ranks."""
    count: float
    """What the loss counted. With several terms, the count of the first."""
    applied: bool
    """False if the gradients were NaN or inf and the weights did not change."""
    grad_norm: float | None
    """Norm of all gradients before clipping. None from `Stepper.backward`."""
    micro_batches: int
    """Micro-batches that this rank ran."""
    largest_micro_batch: int
    """Rows of this rank's largest micro-batch."""
    ooms: int
    """Out-of-memory errors of this rank that the step survived."""
    ooms_of_all: int
    """Out-of-memory errors of all ranks."""
    set_aside: tuple[int, ...]
    """Rows left out because they do not fit even alone, by their index in the rows given."""
    seconds: float
    peak_bytes: int | None
    """Peak bytes allocated during the step. None if the device does not count them."""
    meanwhile_s: float = 0.0
    """Seconds that `meanwhile` took, not in `seconds`; 0 if the device was still computing when it returned."""
    reserved_bytes: int | None = None
    """Peak bytes that the allocator had taken from the device during the step. None if the device does not count them."""
    communication_s: float = 0.0
    """Seconds of `seconds` in collectives, waits for slower ranks included (`distributed.py` says how they are timed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing out of the ordinary that happened in a step."""

    event: EventKind
    step: int
    """Number of the step, from 1. 0: before the first."""
    sentence: str
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"event": self.event, "step": self.step, "sentence": self.sentence, **self.details}


class Events:
    """Keeps the latest events, logs them, and passes each to a listener whose failures cannot stop training."""

    def __init__(self, listener: Callable[[Event], object] | None) -> None:
        self.recent: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._listener = listener

    def add(self, kind: EventKind, step: int, sentence: str, *, warn: bool = False, **details: Any) -> None:
        """Report something. `warn` logs a note as a warning, for what may change results."""
        event = Event(event=kind, step=step, sentence=sentence, details=details)
        self.recent.append(event)
        level = logging.WARNING if warn or kind in WARNINGS else logging.INFO
        logger.log(level, "step %d: %s", step, sentence, extra={"is_step_event": True})
        if self._listener is None:
            return
        try:
            self._listener(event)
        except Exception as error:
            logger.warning("on_event failed for %r, training continues: %s", kind, error)
