"""A run as it goes, for people: a live view on a terminal, plain lines elsewhere. Fed with the journal's events, nothing else.

On a terminal a bar, the figures and the memory stay at the bottom, drawn at most four times a second (a drawing takes
about 3 ms), and what is worth knowing (an evaluation, an out-of-memory error, a failed save) scrolls above. Elsewhere a step
is a line, one in ten seconds at most, the first and the last always; all else is told at once, each line by a single write.

A terminal that goes away or cannot be drawn on ends the view, never the training.
"""

import io
import logging
import math
import os
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

from brimful.training.events import number
from brimful.units import show_bytes, show_rate, show_seconds

# The figures of a run so far, and what its events say, as text: what every view of a run shows.
#
# Rates are medians over the last 20 steps, so that one slow step does not disturb them; – is what is not known.


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


EVERY_S, DRAWN_S = 10.0, 0.25
"""At most one plain line of a step, and one drawing, in so many seconds."""
CELL = 26
"""Columns of one figure with its name: three stand side by side on 80 columns, four on 120."""
BAR = 18
"""Columns of the memory's bar."""

log = logging.getLogger("brimful")


class View(Protocol):
    """A way to show a run."""

    def open(self) -> None: ...
    def say(self, phrase: str) -> None: ...
    def tell(self, line: str, style: str) -> None: ...
    def show(self, shown: RenderableType) -> None: ...
    def step(self, figures: Figures) -> None: ...
    def settle(self, figures: Figures) -> None:
        """Show the last step, should it not be shown yet."""

    def close(self) -> None: ...


class Progress:
    """Called with every event of a run; a context manager, which leaves the terminal as it was.

    with Progress.open(sys.stderr) as progress:
        Journal(path, [progress])
    """

    def __init__(self, view: View) -> None:
        self._view: View | None = view
        self._figures = Figures()
        self._resumed = False
        self._handler = _Logged(lambda line: self._safely(lambda view: view.tell(line, "yellow")))

    @classmethod
    def open(cls, stream: TextIO, every_s: float = EVERY_S) -> Self:
        """For this stream: live on a terminal that can move its cursor, in lines elsewhere."""
        console = Console(file=stream)
        live = console.is_terminal and not console.is_dumb_terminal
        return cls(_Terminal(console) if live else _Lines(stream, every_s))

    def __enter__(self) -> Self:
        log.addHandler(self._handler)
        self._safely(lambda view: view.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._safely(lambda view: view.settle(self._figures))
        self._safely(lambda view: view.close())
        log.removeHandler(self._handler)

    def __call__(self, event: Mapping[str, Any]) -> None:
        self._safely(lambda view: self._show(view, event))

    def say(self, phrase: str) -> None:
        """What is being prepared before the first step."""
        self._safely(lambda view: view.say(phrase))

    def _show(self, view: View, event: Mapping[str, Any]) -> None:
        self._figures.take(event)
        if event["event"] == "step":
            view.step(self._figures)
            return
        if event["event"] in ("pause", "end"):
            view.settle(self._figures)
        if event["event"] == "begin":
            self._resumed = bool(event.get("resumed"))
        if event["event"] == "plan" and not self._resumed:
            view.show(_plan(event))
        if told := sentence(event):
            view.tell(told, style_of(event))

    def _safely(self, show: Callable[[View], object]) -> None:
        """The first failure is the last: a view that cannot be shown is given up."""
        try:
            if self._view is not None:
                show(self._view)
        except Exception as error:
            self._view = None
            log.info("the progress view is given up: %s", error)


def _plan(event: Mapping[str, Any]) -> RenderableType:
    from brimful.planning.plan import Plan
    from brimful.report.tables import plan_table

    return plan_table(Plan.from_json(dict(event)))


class _Lines:
    """One line at a time, for files and pipes."""

    def __init__(self, stream: TextIO, every_s: float) -> None:
        self._stream, self._every_s = stream, every_s
        self._due = self._due_to_say = -math.inf
        self._told = 0

    def open(self) -> None:
        pass

    def say(self, phrase: str) -> None:
        if time.monotonic() >= self._due_to_say:
            self._due_to_say = time.monotonic() + self._every_s
            self._write(phrase)

    def tell(self, line: str, style: str) -> None:
        self._write(line)

    def show(self, shown: RenderableType) -> None:
        console = Console(file=io.StringIO(), width=Console(file=self._stream).width)
        console.print(shown)
        self._write(console.file.getvalue().rstrip())  # type: ignore[attr-defined]

    def step(self, figures: Figures) -> None:
        step, steps = figures.place
        if time.monotonic() >= self._due or step == steps:
            self._due, self._told = time.monotonic() + self._every_s, step
            self._write(step_line(figures))

    def settle(self, figures: Figures) -> None:
        if figures.place[0] != self._told:
            self._told = figures.place[0]
            self._write(step_line(figures))

    def close(self) -> None:
        pass

    def _write(self, line: str) -> None:
        """By one write, so that lines of several processes do not mix."""
        try:
            self._stream.flush()
            os.write(self._stream.fileno(), f"{line}\n".encode(self._stream.encoding or "utf-8", "replace"))
        except (AttributeError, ValueError):  # a stream without a file behind it
            print(line, file=self._stream, flush=True)


class _Terminal:
    """A bar and the figures at the bottom, lines above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._drawn = -math.inf

    def open(self) -> None:
        self._live.start()

    def say(self, phrase: str) -> None:
        self._draw(Text(phrase, style="dim", overflow="ellipsis", no_wrap=True))

    def tell(self, line: str, style: str) -> None:
        self._console.print(Text(line, style=style))

    def show(self, shown: RenderableType) -> None:
        self._console.print(shown)

    def step(self, figures: Figures) -> None:
        self._draw(RunPanel(figures), now=figures.place[0] == figures.place[1])

    def settle(self, figures: Figures) -> None:
        self._draw(RunPanel(figures) if figures.last else Text(), now=True)

    def close(self) -> None:
        self._live.stop()

    def _draw(self, shown: RenderableType, *, now: bool = False) -> None:
        due = now or time.monotonic() - self._drawn >= DRAWN_S
        self._live.update(shown, refresh=due)
        self._drawn = time.monotonic() if due else self._drawn


class _Logged(logging.Handler):
    """What Brimful logs goes through the view; a step's events come by themselves."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if record.module != "events":
            self._tell(record.getMessage())


class RunPanel:
    """Everything that stays on the terminal, for whatever width it has when it is drawn."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        figures, (step, steps) = self._figures, self._figures.place
        head = Table.grid(padding=(0, 2, 0, 0), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        share = f"{step / steps:.0%}" if steps else UNKNOWN
        head.add_row(
            Text(f"step {step:,}/{steps:,}" if steps else f"step {step:,}", style="bold"),
            ProgressBar(total=steps or None, completed=step, complete_style="green", finished_style="green"),
            Text.assemble((share, "bold"), "  ", ("left ", "dim"), figures.eta),
        )
        yield Group(head, _cells(figures.items(), options.max_width), _memory(figures), *_best(figures))


def _cells(items: Sequence[tuple[str, str]], width: int) -> Table:
    """As many side by side as fit; each of one width, so that nothing jumps when a figure grows."""
    grid = Table.grid()
    across = max(1, width // CELL)
    for _ in range(across):
        grid.add_column(width=CELL, no_wrap=True)
    cells = [Text.assemble((f"{name} ", "dim"), _styled(value)) for name, value in items]
    for start in range(0, len(cells), across):
        grid.add_row(*cells[start : start + across])
    return grid


def _memory(figures: Figures) -> Text:
    used = figures.used
    if used is None:
        return Text.assemble(("memory ", "dim"), figures.memory)
    style = "green" if used <= 0.9 else "yellow" if used <= 0.97 else "red"
    bar = ("█" * round(min(used, 1.0) * BAR)).ljust(BAR, "░")
    return Text.assemble(("memory ", "dim"), (bar, style), " ", figures.memory, no_wrap=True, overflow="ellipsis")


def _best(figures: Figures) -> Iterator[Text]:
    if figures.best is not None:
        best = f"{metrics_of(figures.best)} at step {figures.best['step']:,}"
        yield Text.assemble(("best ", "dim"), best, no_wrap=True, overflow="ellipsis")


def _styled(value: str) -> tuple[str, str]:
    return value, "red" if value.startswith(("nan", "inf", "-inf")) else "dim" if value == UNKNOWN else "bold"
