"""A sweep as it goes: a bar over the heads of the grid with the time left on a terminal, plain lines elsewhere.

The time left is what the heads that run and wait still need, at the epochs a second of the last minute; how many epochs a
head needs is taken from those that have stopped, and is unknown before the first has.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from brimful.units import show_bytes, show_count, show_seconds

# A sweep in the terminal: a table a dataset, with the trivial baselines below their own line.
#
# A terminal of fewer than 96 columns is spared the intervals, whose side the colours tell, and most deviations.
#
# It shows the texts of the summaries as they are, so that terminal, Markdown, LaTeX and page agree to the digit. Green and
# red say on which side of the best trivial baseline a method lies; where its interval spans nought neither does.


Summary = Mapping[str, Any]
WIDE = 96
"""Columns that a table with intervals takes."""
_FIGURES = (("auroc", "AUROC ↑"), ("aupr", "AUPR ↑"), ("fpr95", "FPR95 ↓"))


def sweep_table(
    summaries: Sequence[Summary], notes: Sequence[str] = (), remarks: Mapping[str, Sequence[str]] | None = None
) -> RenderableType:
    """`notes` are sentences below the tables: what the figures mean; `remarks` those on a dataset, below its own."""
    parts: list[RenderableType] = []
    for dataset in dict.fromkeys(one["dataset"] for one in summaries):
        own = [one for one in summaries if one["dataset"] == dataset]
        parts += [Text.assemble((dataset, "bold"), f": {own[0]['about']}"), _Fitted(partial(_table, own))]
        if remarks and remarks.get(dataset):
            parts.append(Padding(Text("; ".join(remarks[dataset]), style="dim"), (0, 0, 0, 2)))
        parts.append(Text())
    return Group(*parts, _Fitted(_spared), *(Text(note, style="dim") for note in notes))


class _Fitted:
    """What the terminal has the columns for."""

    def __init__(self, made: Callable[..., RenderableType]) -> None:
        self._made = made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._made(narrow=options.max_width < WIDE)


def _spared(*, narrow: bool) -> RenderableType:
    told = f"Below {WIDE} columns the intervals and most deviations are left out here; the report has them."
    return Text(told, style="dim") if narrow else Group()


def _table(table: Sequence[Summary], *, narrow: bool) -> RenderableType:
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name, width in (("encoder", 7), ("method", 13)):
        shown.add_column(name, overflow="fold", min_width=width)
    for _, name in _FIGURES:
        shown.add_column(name, no_wrap=True)
    for name in ("beyond\ntrivial" if narrow else "beyond trivial", "seeds"):
        shown.add_column(name, justify="right", no_wrap=True)
    trivial = [one for one in table if one["kind"] == "trivial"]
    widest = {key: max(one["text"][key].index(" ") for one in table) for key, _ in _FIGURES}
    for one in table:
        if trivial and one is trivial[0]:
            shown.add_section()
            shown.add_row("", "trivial baselines", style="dim italic")
        shown.add_row(*_cells(one, widest, narrow))
    return Padding(shown, (0, 0, 0, 2))


def _cells(one: Summary, widest: Mapping[str, int], narrow: bool) -> list[Text]:
    base = "dim" if one["kind"] == "trivial" else ""
    settings = f" {one['text']['settings']}" if one["text"]["settings"] else ""
    return [
        Text(one["encoder"], style=base),
        Text.assemble((one["method"], base), (settings, "dim")),
        *[
            Text(
                _aligned(one["text"][key], widest[key], bare=narrow and key != "auroc"),
                style="bold" if key in one["best"] else base,
            )
            for key in widest
        ],
        Text(one["text"]["gain"].partition(" ")[0] if narrow else one["text"]["gain"], style=_side(one)),
        Text(one["text"]["seeds"], style=base),
    ]


def _aligned(text: str, width: int, *, bare: bool) -> str:
    """The points of `.789 ± .003` and `1.000 ± –` below each other; `bare` without the deviation."""
    mean, _, spread = text.partition(" ")
    return f"{mean:>{width}}" if bare else f"{mean:>{width}} {spread}"


def _side(one: Summary) -> str:
    if one["gain"] is None:
        return "dim"
    low, high = (one["gain"] if one[end] is None else one[end] for end in ("gain_low", "gain_high"))
    return "green" if low > 0 else "red" if high < 0 else ""


EVERY_S = 5.0
"""At most one plain line in so many seconds."""
WINDOW_S = 60.0
"""Rates are over the last minute."""


class SweepProgress:
    """Called with every event of a sweep; a context manager, which leaves the terminal as it was."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stderr if file is None else file
        self._console = Console(file=self._file)
        self._live: Live | None = None
        self._heads = self._trained = self._alive = self._epochs = 0
        self._stopped_epochs: list[int] = []
        self._rates: deque[tuple[float, int]] = deque()
        self._told = -EVERY_S

    def __enter__(self) -> Self:
        if self._file.isatty():
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, phrase: str) -> None:
        """A phrase of the preparation."""
        if self._live is not None:
            self._live.update(Text(phrase, style="dim"))
        elif time.monotonic() - self._told >= EVERY_S:
            self._line(phrase)

    def __call__(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "begin":
                self._heads = event["heads"]
                known = f", {event['known']:,} of them known already" if event["known"] else ""
                heads = f"; {show_count(self._heads, 'head')} to train on {event['device']}" if self._heads else ""
                self._tell(f"{event['grid']}{known}{heads}")
            case "pack":
                peak = max((one["peak_bytes"] for one in event["trials"]), default=0)
                self._tell(
                    f"{show_count(event['heads'], 'head')} in packs of {event['runs']:,}: {event['reason']}; "
                    f"{show_bytes(peak)} at the highest, measured"
                )
            case "resume":
                self._tell(f"{show_count(event['heads'], 'head')} had begun and go on from there")
            case "oom":
                self._tell(event["sentence"], style="yellow")
            case "run":
                if event.get("epochs"):
                    self._stopped_epochs.append(event["epochs"])
            case "epochs":
                self._went(event)
            case "stop":
                self._tell(f"{event['by']}: stopping")

    def _went(self, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self._epochs += event["epochs"]
        self._trained, self._alive = event["trained"], event["alive"]
        self._rates.append((now, self._epochs))
        while now - self._rates[0][0] > WINDOW_S:
            self._rates.popleft()
        if self._live is not None:
            self._live.update(self._view())
        elif now - self._told >= EVERY_S or self._trained == self._heads:
            self._line(
                f"{self._trained:,} of {self._heads:,} heads trained, {self._alive:,} running, {self._speed()}{self._left()}"
            )

    def _view(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(
            ProgressBar(total=max(1, self._heads), completed=self._trained, width=40),
            Text(f"{self._trained:,} of {self._heads:,} heads", style="bold"),
            f"{self._alive:,} running",
            self._speed(),
            Text(self._left().removeprefix(", "), style="dim"),
        )
        return table

    def _speed(self) -> str:
        rate = self._rate()
        return "–" if rate is None else f"{rate:,.0f} epochs/s" if rate >= 10 else f"{rate:.1f} epochs/s"

    def _rate(self) -> float | None:
        (first, before), (last, after) = self._rates[0], self._rates[-1]
        return (after - before) / (last - first) if last > first else None

    def _left(self) -> str:
        rate = self._rate()
        if not rate or not self._stopped_epochs or self._trained == self._heads:
            return ""
        a_head = sum(self._stopped_epochs) / len(self._stopped_epochs)
        behind = self._epochs - a_head * self._trained
        left = a_head * (self._heads - self._trained) - behind
        return f", about {show_seconds(left / rate)} left" if left > 0 else ""

    def _tell(self, sentence: str, style: str = "") -> None:
        if self._live is not None:
            self._live.console.print(Text(sentence, style=style))
        else:
            self._line(sentence)

    def _line(self, sentence: str) -> None:
        self._told = time.monotonic()
        print(f"sweep: {sentence}", file=self._file, flush=True)
