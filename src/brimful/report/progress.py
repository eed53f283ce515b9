"""The progress of a run, for people: a live view on a terminal, plain lines elsewhere. It is fed with events alone.

On a terminal a progress bar, the metrics and the memory stay at the bottom, drawn at most four times a second (drawing
takes about 3 ms), and notable events (an evaluation, an out-of-memory error, a failed save) scroll above. Elsewhere steps
are plain lines, at most one every ten seconds, always with the first and the last; other events are printed at once, each
by a single write.

Lines and labels are translated here, as they are shown: the events stay English.

A terminal that goes away or cannot be drawn on ends the view, never the training.
"""

import io
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from brimful.languages import tr, translate
from brimful.show import show_with
from brimful.training.events import number
from brimful.units import show_bytes, show_count, show_rate, show_seconds

RATE_STEPS = 20
"""Rates are medians over this many steps, so one slow step does not disturb them."""
LINE_S, DRAW_S = 10.0, 0.25
"""Seconds between two plain lines of steps, and between two drawings."""
CELL_COLUMNS = 26
"""Terminal columns of one metric with its name: three fit side by side in 80 columns, four in 120."""
BAR_COLUMNS = 18
"""Terminal columns of the memory bar."""
UNKNOWN = "–"
WARNING_STYLES = {"oom": "yellow", "thrash": "yellow", "oversized": "yellow", "skip": "yellow", "failed": "red"}
PRINTED = frozenset(("resume", "note", *WARNING_STYLES))
"""Events that are printed with their own message. `grow`, `model` and `deal` are for the event log only."""
NOT_METRICS = frozenset(("event", "time", "step", "rows", "seconds", "best", "ooms"))

log = logging.getLogger("brimful")


class Progress:
    """Shows events as they come. A context manager that restores the terminal.

    with Progress.open(sys.stderr) as progress:
        Journal(path, [progress])
    """

    def __init__(self, view: "View", wording: Callable[[str], str] = str) -> None:
        self._view: View | None = view
        self._wording = wording
        self._summary = RunSummary()
        self._resumed = False
        self._handler = _LogHandler(
            lambda line: self._safely(lambda view: view.line(wording(translate(line)), "yellow"))
        )

    @classmethod
    def open(cls, stream: TextIO, every_s: float = LINE_S, wording: Callable[[str], str] = str) -> Self:
        """A live view if the stream is a terminal that can move its cursor, else plain lines.

        `wording` turns the arguments that notes and warnings name into what the user typed.
        """
        console = Console(file=stream)
        is_live = console.is_terminal and not console.is_dumb_terminal
        return cls(_LiveView(console) if is_live else _LineView(stream, every_s), wording)

    def __enter__(self) -> Self:
        log.addHandler(self._handler)
        self._safely(lambda view: view.start())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._safely(lambda view: view.flush(self._summary))
        self._safely(lambda view: view.stop())
        log.removeHandler(self._handler)

    def __call__(self, event: Mapping[str, Any]) -> None:
        self._safely(lambda view: self._show(view, event))

    def status(self, phrase: str) -> None:
        """What is being prepared before the first step."""
        self._safely(lambda view: view.status(translate(phrase)))

    def _show(self, view: "View", event: Mapping[str, Any]) -> None:
        self._summary.add(event)
        if event["event"] == "step":
            view.step(self._summary)
            return
        if event["event"] == "end":
            view.flush(self._summary)
        if event["event"] == "begin":
            self._resumed = bool(event.get("resumed"))
        if event["event"] == "plan" and not self._resumed:
            view.table(_plan_table(event))
        if line := translate(event_line(event)):
            view.line(self._wording(line) if event["event"] in PRINTED else line, event_style(event))

    def _safely(self, show: "Callable[[View], object]") -> None:
        """A view that fails is not used again."""
        try:
            if self._view is not None:
                show(self._view)
        except Exception as error:
            self._view = None
            log.info("the progress view is closed: %s", error)


def show_progress() -> None:
    """`brimful.plan` and `brimful.train` show what they do on standard error."""
    show_with(lambda: Progress.open(sys.stderr))


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
        """The highest peak of the recent steps."""
        return max(self._recent("peak_bytes"), default=None)

    @property
    def used(self) -> float | None:
        """That peak as a share of the limit."""
        peak, limit = self.peak_bytes, self.last.get("limit_bytes")
        return None if peak is None or not limit else peak / limit

    @property
    def eta(self) -> str:
        return _show(number(self.last, "eta_s"), show_seconds)

    @property
    def memory(self) -> str:
        survived = f", {show_count(self.ooms, 'OOM')} survived" if self.ooms else ""
        if self.used is None:
            return f"{_show(self.peak_bytes, show_bytes)}{survived}"
        return f"{show_bytes(self.peak_bytes)} of {show_bytes(self.last['limit_bytes'])}, {self.used:.0%}{survived}"

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

    def _recent(self, name: str) -> list[float]:
        return [value for step in self._steps if (value := number(step, name)) is not None]

    def _median(self, name: str, show: Callable[[float], str]) -> str:
        values = self._recent(name)
        return _show(median(values) if values else None, show)


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
    return f"{prefix}{event['sentence']}" if kind in PRINTED else ""


def event_style(event: Mapping[str, Any]) -> str:
    failed = event.get("saved") is False or event.get("reason") == "failed"
    return WARNING_STYLES.get("failed" if failed else event["event"], "")


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


def _plan_table(event: Mapping[str, Any]) -> RenderableType:
    from brimful.planning.plan import Plan
    from brimful.report.tables import plan_table

    return plan_table(Plan.from_json(dict(event)))


class View(Protocol):
    """A way to show a run."""

    def start(self) -> None: ...
    def status(self, phrase: str) -> None: ...
    def line(self, line: str, style: str) -> None: ...
    def table(self, table: RenderableType) -> None: ...
    def step(self, summary: RunSummary) -> None: ...
    def flush(self, summary: RunSummary) -> None:
        """Show the last step if it is not shown yet."""

    def stop(self) -> None: ...


class _LineView:
    """Plain lines, for files and pipes."""

    def __init__(self, stream: TextIO, every_s: float) -> None:
        self._stream, self._every_s = stream, every_s
        self._step_due = self._status_due = -math.inf
        self._last_step = 0

    def start(self) -> None:
        pass

    def status(self, phrase: str) -> None:
        if time.monotonic() >= self._status_due:
            self._status_due = time.monotonic() + self._every_s
            self._write(phrase)

    def line(self, line: str, style: str) -> None:
        self._write(line)

    def table(self, table: RenderableType) -> None:
        console = Console(file=io.StringIO(), width=Console(file=self._stream).width)
        console.print(table)
        self._write(console.file.getvalue().rstrip())  # type: ignore[attr-defined]

    def step(self, summary: RunSummary) -> None:
        if time.monotonic() >= self._step_due or summary.step == summary.steps:
            self._step_due = time.monotonic() + self._every_s
            self._write_step(summary)

    def flush(self, summary: RunSummary) -> None:
        if summary.step != self._last_step:
            self._write_step(summary)

    def stop(self) -> None:
        pass

    def _write_step(self, summary: RunSummary) -> None:
        self._last_step = summary.step
        self._write(_step_line(summary))

    def _write(self, line: str) -> None:
        """In one write, so that lines of several processes do not mix."""
        try:
            self._stream.flush()
            os.write(self._stream.fileno(), f"{line}\n".encode(self._stream.encoding or "utf-8", "replace"))
        except (AttributeError, ValueError):  # a stream without a file
            print(line, file=self._stream, flush=True)


def _step_line(summary: RunSummary) -> str:
    """`RunSummary.line` in the user's language."""
    items = [(tr(name), translate(value), name.endswith("/s")) for name, value in summary.items()]
    values = [f"{value} {name}" if unit_last else f"{name} {value}" for name, value, unit_last in items]
    step = translate(f"step {summary.step}/{summary.steps or UNKNOWN}")
    memory, eta = f"{tr('memory')} {translate(summary.memory)}", f"{tr('ETA')} {summary.eta}"
    return "  ".join([step, *values, memory, eta])


class _LiveView:
    """A bar and the metrics at the bottom of the terminal, lines above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._drawn = -math.inf

    def start(self) -> None:
        self._live.start()

    def status(self, phrase: str) -> None:
        self._draw(Text(phrase, style="dim", overflow="ellipsis", no_wrap=True))

    def line(self, line: str, style: str) -> None:
        self._console.print(Text(line, style=style))

    def table(self, table: RenderableType) -> None:
        self._console.print(table)

    def step(self, summary: RunSummary) -> None:
        self._draw(RunPanel(summary), now=summary.step == summary.steps)

    def flush(self, summary: RunSummary) -> None:
        self._draw(RunPanel(summary) if summary.last else Text(), now=True)

    def stop(self) -> None:
        self._live.stop()

    def _draw(self, content: RenderableType, *, now: bool = False) -> None:
        due = now or time.monotonic() - self._drawn >= DRAW_S
        self._live.update(content, refresh=due)
        self._drawn = time.monotonic() if due else self._drawn


class RunPanel:
    """What stays at the bottom of the terminal, for whatever width it has when it is drawn."""

    def __init__(self, summary: RunSummary) -> None:
        self._summary = summary

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        summary, step, steps = self._summary, self._summary.step, self._summary.steps
        head = Table.grid(padding=(0, 2, 0, 0), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        share = f"{step / steps:.0%}" if steps else UNKNOWN
        head.add_row(
            Text(translate(f"step {step:,}/{steps:,}" if steps else f"step {step:,}"), style="bold"),
            ProgressBar(total=steps or None, completed=step, complete_style="green", finished_style="green"),
            Text.assemble((share, "bold"), "  ", (f"{tr('ETA')} ", "dim"), summary.eta),
        )
        parts: list[RenderableType] = [head, _cells(summary.items(), options.max_width), _memory_bar(summary)]
        if summary.best is not None:
            best = f"{metrics_of(summary.best)} at step {summary.best['step']:,}"
            best_label = (f"{tr('best')} ", "dim")
            parts.append(Text.assemble(best_label, translate(best), no_wrap=True, overflow="ellipsis"))
        yield Group(*parts)


def _cells(items: Sequence[tuple[str, str]], width: int) -> Table:
    """As many side by side as fit, each of one width, so that nothing moves when a number grows."""
    grid = Table.grid()
    columns = max(1, width // CELL_COLUMNS)
    for _ in range(columns):
        grid.add_column(width=CELL_COLUMNS, no_wrap=True)
    cells = []
    for name, value in items:
        style = "red" if value.startswith(("nan", "inf", "-inf")) else "dim" if value == UNKNOWN else "bold"
        cells.append(Text.assemble((f"{tr(name)} ", "dim"), (translate(value), style)))
    for first in range(0, len(cells), columns):
        grid.add_row(*cells[first : first + columns])
    return grid


def _memory_bar(summary: RunSummary) -> Text:
    used, label, memory = summary.used, (f"{tr('memory')} ", "dim"), translate(summary.memory)
    if used is None:
        return Text.assemble(label, memory)
    style = "green" if used <= 0.9 else "yellow" if used <= 0.97 else "red"
    bar = ("█" * round(min(used, 1.0) * BAR_COLUMNS)).ljust(BAR_COLUMNS, "░")
    return Text.assemble(label, (bar, style), " ", memory, no_wrap=True, overflow="ellipsis")


class _LogHandler(logging.Handler):
    """Sends Brimful's warnings through the view, except events of a step, which arrive by themselves."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "is_step_event", False):
            self._write(record.getMessage())
