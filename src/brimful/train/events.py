"""What happened to a step that was not plain sailing: one event each, with a sentence for people and figures for programs.

oom         memory ran out: what was tried, what was free, what changed
grow        the cut went back towards what it was
thrash      the allocator gave its cache back again and again, so the cut became finer before an out-of-memory error
model       the memory model was corrected by what was measured
skip        a step was not applied: its gradients were NaN or inf
oversized   a row that does not fit even alone was set aside
deal        the rows of a step are dealt to the processes in other shares
note        anything else that was decided on the user's behalf
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

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
