"""A run in lines for people: what a terminal shows of each event, and RUN/log.txt, which keeps these lines.

log.txt has what a run prints where there is no terminal, each line with its time: events, steps (one every ten seconds, always with
the first and the last), warnings. A failure adds its traceback, whichever rank it met. Ranks append to the same file, each
entry by one write, and a resumed run appends to it. A disk that is full or not writable costs lines, never the training.

Imports no torch: the process that the user starts writes here too, when a rank was killed.
"""

import logging
import math
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import Any, Self

from brimful.errors import in_one_line
from brimful.training.events import LineFile, number
from brimful.training.plan_history import show_value
from brimful.units import show_bytes, show_count, show_rate, show_seconds

RATE_STEPS = 20
"""Rates are medians over this many steps, so one slow step does not disturb them."""
LINE_S = 10.0
"""Seconds between two lines of steps, and between two of what is being prepared."""
UNKNOWN = "–"
WARNINGS = frozenset(("oom", "thrash", "oversized", "skip"))
PRINTED = frozenset(("resume", "note", *WARNINGS))
"""Events that are printed with their own message. `grow`, `model` and `deal` are for the event log only."""
NOT_METRICS = frozenset(("event", "time", "step", "rows", "seconds", "best", "ooms"))

log = logging.getLogger("brimful")


class RunSummary:
    """The current numbers of a run, as text."""

    def __init__(self) -> None:
        self.last: Mapping[str, Any] = {}
        self.best: Mapping[str, Any] | None = None
        self.saved: Mapping[str, Any] | None = None
        self.ooms = 0
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=RATE_STEPS)

    def add(self, event: Mapping[str, Any]) -> None:
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
    def step(self) -> int:
        return self.last.get("step") or 0

    @property
    def steps(self) -> int:
        """Steps of the whole run; 0 if unknown."""
        return self.last.get("steps") or 0

    @property
    def peak_bytes(self) -> float | None:
        """The highest recent peak on the rank that is closest to its limit: of reserved bytes where they are known."""
        fullest = self._fullest()
        if fullest is not None:
            return fullest[0]
        return max((peak for step in self._steps if (peak := _peak(step)) is not None), default=None)

    @property
    def used(self) -> float | None:
        """That peak as a share of the limit."""
        fullest = self._fullest()
        return None if fullest is None else fullest[0] / fullest[1]

    @property
    def eta(self) -> str:
        return _show(number(self.last, "eta_s"), show_seconds)

    @property
    def memory(self) -> str:
        survived = f", {show_count(self.ooms, 'OOM')} survived" if self.ooms else ""
        fullest = self._fullest()
        if fullest is None:
            return f"{_show(self.peak_bytes, show_bytes)}{survived}"
        peak, limit = fullest
        return f"{show_bytes(peak)} of {show_bytes(limit)}, {peak / limit:.0%}{survived}"

    def items(self) -> list[tuple[str, str]]:
        """Name and value of each metric, in display order."""
        losses = [loss for loss in self._recent("loss") if math.isfinite(loss)]
        mean = f" (mean {show_metric(fmean(losses))})" if len(losses) > 1 else ""
        log = self.last.get("log") or {}
        logged = {name: value for name in log if (value := number(log, name)) is not None}
        waited, worked = sum(self._recent("data_wait_s")), sum(self._recent("seconds"))
        return [
            ("loss", _show(number(self.last, "loss"), show_metric) + mean),
            *((name, show_metric(value)) for name, value in logged.items()),
            ("lr", _show(number(self.last, "lr"), "{:.2e}".format)),
            ("epoch", _show(number(self.last, "epoch"), "{:.2f}".format)),
            ("rows/s", self._median("rows_per_s", show_rate)),
            *([("tokens/s", self._median("tokens_per_s", show_rate))] if self._recent("tokens_per_s") else []),
            ("MFU", self._median("mfu", "{:.1%}".format)),
            ("data wait", _show(waited / (waited + worked) if worked else None, "{:.1%}".format)),
            ("checkpoint", UNKNOWN if self.saved is None else f"step {self.saved['step']:,}"),
        ]

    def line(self) -> str:
        """The last step as one plain line."""
        values = [f"{value} {name}" if name.endswith("/s") else f"{name} {value}" for name, value in self.items()]
        step = f"step {self.step}/{self.steps or UNKNOWN}"
        return "  ".join([step, *values, f"memory {self.memory}", f"ETA {self.eta}"])

    def _fullest(self) -> tuple[float, float] | None:
        """Peak and limit of the rank, in the recent steps, that came closest to its limit."""
        known = ((_peak(rank), number(rank, "limit_bytes")) for step in self._steps for rank in _ranks(step))
        return max(((peak, limit) for peak, limit in known if peak is not None and limit), key=_share, default=None)

    def _recent(self, name: str) -> list[float]:
        return [value for step in self._steps if (value := number(step, name)) is not None]

    def _median(self, name: str, show: Callable[[float], str]) -> str:
        values = self._recent(name)
        return _show(median(values) if values else None, show)


def _ranks(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those that tell their limit; else the step as a whole, which has the highest peak of all and one limit."""
    ranks = [rank for rank in step.get("ranks") or () if rank.get("limit_bytes")]
    return ranks or [step]


def _peak(figures: Mapping[str, Any]) -> float | None:
    reserved = number(figures, "reserved_bytes")
    return number(figures, "peak_bytes") if reserved is None else reserved


def _share(peak_and_limit: tuple[float, float]) -> float:
    return peak_and_limit[0] / peak_and_limit[1]


def event_line(event: Mapping[str, Any]) -> str:
    """An event as one line with its step; empty if it is not printed."""
    kind, step = event["event"], event.get("step")
    prefix = f"step {step:,}: " if step else ""
    if kind == "eval":
        best = ", best so far" if event.get("best") else ""
        rows, seconds = show_count(event["rows"], "row"), show_seconds(event["seconds"])
        return f"{prefix}evaluation on {rows} in {seconds}: {metrics_of(event)}{best}"
    if kind == "checkpoint" and event["saved"]:
        size, seconds = show_bytes(event["size_bytes"]), show_seconds(event["seconds"])
        return f"{prefix}saved {event['path']} ({size} in {seconds})"
    if kind == "checkpoint":
        return f"{prefix}checkpoint not saved: {event['sentence']}"
    if kind == "begin":
        processes = f"{event['processes']} process{'es' * (event['processes'] != 1)}"
        return f"training in {event['run']}: {show_count(event['steps'], 'step')} on {processes}"
    warning = "warning: " if event.get("level") == "warning" else ""
    return f"{warning}{prefix}{event['sentence']}" if kind in PRINTED else ""


def metrics_of(event: Mapping[str, Any]) -> str:
    """The metrics of an `eval` event: `loss 2.5000, bleu 31.24`."""
    metrics = {name: number(event, name) for name in event if name not in NOT_METRICS}
    return ", ".join(f"{name} {show_metric(value)}" for name, value in metrics.items() if value is not None)


def show_metric(value: float) -> str:
    """With as many decimals as matter."""
    if not math.isfinite(value) or not value or 1e-3 <= abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.2f}" if 10 <= abs(value) < 1e4 else f"{value:.3g}"


def _show(value: float | None, show: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else show(value)


class LinePace:
    """Which steps, and which phrases of the preparation, become a line."""

    def __init__(self, every_s: float = LINE_S) -> None:
        self._every_s = every_s
        self._step_due = self._status_due = -math.inf
        self._shown = 0

    def step_due(self, summary: RunSummary) -> bool:
        """Whether the last step is the first, the last of the run, or due."""
        if time.monotonic() < self._step_due and summary.step != summary.steps:
            return False
        self._step_due = time.monotonic() + self._every_s
        self._shown = summary.step
        return True

    def step_left(self, summary: RunSummary) -> bool:
        """Whether the last step was left out, now that none follows."""
        left, self._shown = summary.step != self._shown, summary.step
        return left

    def status_due(self) -> bool:
        if time.monotonic() < self._status_due:
            return False
        self._status_due = time.monotonic() + self._every_s
        return True


class RunLog:
    """Writes log.txt while a `with` block runs: a listener of a journal, on every rank. A failure in the block is written too.

    with RunLog(run) as run_log:
        Journal(events, [run_log])
    """

    def __init__(self, run: Path, *, wording: Callable[[str], str] = str, every_s: float = LINE_S) -> None:
        """`wording` turns the arguments that notes and warnings name into what the user typed."""
        rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        self._who = f"rank {rank} of {size}" if size > 1 else ""
        self._prefix = f"rank {rank}: " if rank else ""
        self._file, self._wording = LineFile(run / "log.txt"), wording
        self._summary, self._pace, self._resumed = RunSummary(), LinePace(every_s), False
        self._lock = threading.RLock()  # warnings come from other threads too
        self._failing = False

    def __enter__(self) -> Self:
        # A filter sees what a handler would, and warnings of a quiet run still go where they went: logging writes to standard
        # error only if there is no handler at all.
        log.addFilter(self._on_record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        log.removeFilter(self._on_record)
        self._flush_step()
        if isinstance(error, (Exception, KeyboardInterrupt)):
            self.failure(error)
        with self._lock:
            self._file.close()

    def __call__(self, event: Mapping[str, Any]) -> None:
        self._summary.add(event)
        kind = event["event"]
        if kind == "step":
            if self._pace.step_due(self._summary):
                self.line(self._summary.line())
            return
        if kind == "begin":
            self._resumed = bool(event.get("resumed"))
        if kind == "plan":
            for line in change_lines(event) if self._resumed else plan_lines(event):
                self.line(line)
        if kind == "end":
            self._flush_step()
            self.line(f"{event['reason']}: {event['sentence']}")
        elif line := event_line(event):
            warning = "warning: " if kind in WARNINGS else ""
            self.line(f"{warning}{self._wording(line) if kind in PRINTED else line}")

    def status(self, phrase: str) -> None:
        """What is being prepared before the first step."""
        if self._pace.status_due():
            self.line(phrase)

    def failure(self, error: BaseException) -> None:
        """With the traceback, which stays as Python prints it."""
        which = f"{self._who} failed" if self._who else "failed"
        text = "".join(traceback.format_exception(error)).rstrip()
        self.line(f"{which}: {self._wording(in_one_line(error))}\n{text}", prefix="")

    def line(self, line: str, *, prefix: str | None = None) -> None:
        """One entry, with its time."""
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        entry = f"{now} {self._prefix if prefix is None else prefix}{line}\n".encode(errors="replace")
        with self._lock:
            self._file.add(entry)
            error = self._file.flush()
            if error is None or isinstance(error, FileNotFoundError):  # rank 0 has yet to create the folder
                return
            failing, self._failing = self._failing, True
        if not failing:
            log.warning("log.txt cannot be written (%s); training continues without it", in_one_line(error))

    def _flush_step(self) -> None:
        if self._pace.step_left(self._summary):
            self.line(self._summary.line())

    def _on_record(self, record: logging.LogRecord) -> bool:
        """Warnings, except events of a step, which come by themselves. Nothing is filtered."""
        if record.levelno >= logging.WARNING and not getattr(record, "is_step_event", False):
            self.line(f"warning: {self._wording(record.getMessage())}")
        return True


def change_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """What a resume changes, `plan 2: global batch 64 → 32`, and whether it is another experiment."""
    for change in plan.get("changes") or ():
        name = str(change.get("name"))
        old, new = (show_value(name, change.get(side)) for side in ("old", "new"))
        yield f"plan {plan.get('number')}: {name.replace('_', ' ')} {old} → {new}"
    if plan.get("experiment") == "other":
        yield f"another experiment from here on: {'; '.join(map(str, plan.get('experiment_reasons') or ()))}"


def plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """A plan, one line for each choice: `plan: micro batch 43 (fastest: 672 rows/s)`. Its warnings follow as notes."""
    for choice in plan.get("choices") or ():
        value = choice.get("effective")
        shown = (
            "–"
            if value is None
            else show_bytes(value)
            if choice.get("name") in ("memory_limit", "host_limit")
            else str(value)
        )
        reason = f" ({choice['reason']})" if choice.get("reason") else ""
        yield f"plan: {str(choice.get('name')).replace('_', ' ')} {shown}{reason}"
