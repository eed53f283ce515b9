"""The figures of a run so far, and what its events say, as text: what every view of a run shows.

Rates are medians over the last 20 steps, so that one slow step does not disturb them; – is what is not known.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any

from brimful.train.journal import number
from brimful.units import show_bytes, show_rate, show_seconds

WINDOW = 20
"""Steps behind a rate."""
UNKNOWN = "–"
TROUBLE = {"oom": "yellow", "thrash": "yellow", "oversized": "yellow", "skip": "yellow", "failed": "red"}
TOLD = frozenset(("resume", "note", *TROUBLE))
"""Kinds whose sentence is told as it is; `grow`, `model` and `deal` are for the journal alone."""
NOT_METRICS = frozenset(("event", "time", "step", "rows", "seconds", "best", "ooms"))


class Figures:
    """The figures of a run so far, as text."""

    def __init__(self) -> None:
        self.last: Mapping[str, Any] = {}
        self.best: Mapping[str, Any] | None = None
        self.saved: Mapping[str, Any] | None = None
        self.ooms = 0
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)

    def take(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"event": "step"}:
                self.last = event
                self._steps.append(event)
                self.ooms += event.get("ooms") or 0
            case {"event": "eval", "best": True}:
                self.best = event
            case {"event": "checkpoint", "saved": True} | {"event": "resume"}:
                self.saved = event

    @property
    def place(self) -> tuple[int, int]:
        """The last step, and how many were asked for."""
        return self.last.get("step") or 0, self.last.get("steps") or 0

    @property
    def used(self) -> float | None:
        """The highest recent peak, of the limit."""
        peak, limit = self.peak_bytes, self.last.get("limit_bytes")
        return None if peak is None or not limit else peak / limit

    @property
    def peak_bytes(self) -> float | None:
        return max(self._known("peak_bytes"), default=None)

    @property
    def eta(self) -> str:
        return _shown(number(self.last, "eta_s"), show_seconds)

    def items(self) -> list[tuple[str, str]]:
        """Each figure with its name, in the order they are read."""
        losses = [loss for loss in self._known("loss") if math.isfinite(loss)]
        mean = f" (mean {show_figure(fmean(losses))})" if len(losses) > 1 else ""
        return [
            ("loss", _shown(number(self.last, "loss"), show_figure) + mean),
            ("lr", _shown(number(self.last, "lr"), "{:.2e}".format)),
            ("epoch", _shown(number(self.last, "epoch"), "{:.2f}".format)),
            ("rows/s", self._rate("rows_per_s", show_rate)),
            ("tokens/s", self._rate("tokens_per_s", show_rate)),
            ("MFU", self._rate("mfu", "{:.1%}".format)),
            ("data wait", _shown(self._waited, "{:.1%}".format)),
            ("checkpoint", UNKNOWN if self.saved is None else f"step {self.saved['step']:,}"),
        ]

    @property
    def memory(self) -> str:
        survived = f", {self.ooms} OOM{'s' * (self.ooms != 1)} survived" if self.ooms else ""
        if self.used is None:
            return f"{_shown(self.peak_bytes, show_bytes)}{survived}"
        return f"{show_bytes(self.peak_bytes)} of {show_bytes(self.last['limit_bytes'])}, {self.used:.0%}{survived}"

    @property
    def _waited(self) -> float | None:
        waited, worked = sum(self._known("data_wait_s")), sum(self._known("seconds"))
        return waited / (waited + worked) if worked else None

    def _known(self, name: str) -> list[float]:
        return [value for step in self._steps if (value := number(step, name)) is not None]

    def _rate(self, name: str, show: Callable[[float], str]) -> str:
        known = self._known(name)
        return _shown(median(known) if known else None, show)


def step_line(figures: Figures) -> str:
    """A step as one plain line."""
    step, steps = figures.place
    parts = [f"{value} {name}" if name.endswith("/s") else f"{name} {value}" for name, value in figures.items()]
    return "  ".join([f"step {step}/{steps or UNKNOWN}", *parts, f"memory {figures.memory}", f"left {figures.eta}"])


def sentence(event: Mapping[str, Any]) -> str:
    """What an event says in one line, with its step; empty for what is not told."""
    kind, step = event["event"], event.get("step")
    where = f"step {step:,}: " if step else ""
    if kind == "eval":
        best = ", the best so far" if event.get("best") else ""
        return (
            f"{where}evaluated on {event['rows']:,} rows in {show_seconds(event['seconds'])}: {metrics_of(event)}{best}"
        )
    if kind == "checkpoint" and event["saved"]:
        return f"{where}saved {show_bytes(event['size_bytes'])} in {show_seconds(event['seconds'])}: {event['path']}"
    if kind == "checkpoint":
        return f"{where}the checkpoint failed: {event['sentence']}"
    if kind == "begin":
        return f"training in {event['run']}: {event['steps']:,} steps on {event['processes']} process{'es' * (event['processes'] != 1)}"
    return f"{where}{event['sentence']}" if kind in TOLD else ""


def style_of(event: Mapping[str, Any]) -> str:
    failed = event.get("saved") is False or event.get("reason") == "failed"
    return TROUBLE.get("failed" if failed else event["event"], "")


def metrics_of(event: Mapping[str, Any]) -> str:
    figures = {name: number(event, name) for name in event if name not in NOT_METRICS}
    return ", ".join(f"{name} {show_figure(value)}" for name, value in figures.items() if value is not None)


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else show(value)


def show_figure(value: float) -> str:
    """As many figures behind the point as make a difference."""
    if not math.isfinite(value) or not value or 1e-3 <= abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.2f}" if 10 <= abs(value) < 1e4 else f"{value:.3g}"
