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
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from brimful.languages import tr, translate
from brimful.show import show_with
from brimful.training.run_log import (
    LINE_S,
    PRINTED,
    UNKNOWN,
    WARNINGS,
    LinePace,
    RunSummary,
    event_line,
    metrics_of,
)
from brimful.units import Zone, zone

DRAW_S = 0.25
"""Seconds between two drawings."""
CELL_COLUMNS = 26
"""Terminal columns of one metric with its name: three fit side by side in 80 columns, four in 120."""
BAR_COLUMNS = 18
"""Terminal columns of the memory bar."""
ZONE_STYLE: dict[Zone, str] = {"safe": "green", "edge": "yellow", "danger": "red"}

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
        self._resumed, self._run = False, ""
        self._warned: Sequence[str] = ()
        """Warnings that the table of the plan shows, so that their notes are not printed again."""
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
            self._resumed, self._run = bool(event.get("resumed")), event["run"]
        if event["event"] == "rows":
            from brimful.report.data_tables import example_rows

            view.table(example_rows([[(str(text), bool(trained)) for text, trained in one] for one in event["examples"]]))  # fmt: skip
        if event["event"] == "plan" and not self._resumed:
            from brimful.planning.plan import Plan
            from brimful.report.tables import plan_table

            view.table(plan_table(Plan.from_json(dict(event)), wording=self._wording))
            self._warned = event.get("warnings", ())
        elif event["event"] == "plan" and (event.get("changes") or event.get("experiment_reasons")):
            from brimful.report.tables import plan_changes

            view.table(plan_changes(event))
            if back := _way_back(event, self._run):
                view.line(tr("To go back: {command}", command=back), "")
        if event["event"] == "note" and event["sentence"] in self._warned:
            return
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


def event_style(event: Mapping[str, Any]) -> str:
    if event.get("saved") is False or event.get("reason") == "failed":
        return "red"
    return "yellow" if event["event"] in WARNINGS or event.get("level") == "warning" else ""


def _way_back(event: Mapping[str, Any], run: str) -> str:
    """The command that goes back to the plan before, if this one makes another experiment; a line of its own, to be copied."""
    number, before = event.get("number"), event.get("number_before")
    if event.get("experiment") != "other" or before in (None, number):
        return ""
    return f"brimful train --run {shlex.quote(run)} --rollback {before}"


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
        self._stream, self._pace = stream, LinePace(every_s)

    def start(self) -> None:
        pass

    def status(self, phrase: str) -> None:
        if self._pace.status_due():
            self._write(phrase)

    def line(self, line: str, style: str) -> None:
        self._write(line)

    def table(self, table: RenderableType) -> None:
        console = Console(file=io.StringIO(), width=Console(file=self._stream).width)
        console.print(table)
        self._write(console.file.getvalue().rstrip())  # type: ignore[attr-defined]

    def step(self, summary: RunSummary) -> None:
        if self._pace.step_due(summary):
            self._write(_step_line(summary))

    def flush(self, summary: RunSummary) -> None:
        if self._pace.step_left(summary):
            self._write(_step_line(summary))

    def stop(self) -> None:
        pass

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
    style = ZONE_STYLE[zone(used)]
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
