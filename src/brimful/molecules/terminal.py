"""A sweep in the terminal: progress while it runs, and a table per dataset at the end.

Tables show the texts of the summaries as they are, so that terminal, Markdown, LaTeX and page agree to the digit. Green and
red mark a gain or a loss against the best trivial baseline whose interval excludes zero. On a terminal that is too narrow
the intervals and most deviations are left out.
"""

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from brimful.languages import tr, translate
from brimful.molecules.results import HEADERS, TRIVIAL, Summary, by_dataset, gain_sign
from brimful.units import show_bytes, show_count, show_seconds

LINE_EVERY_S = 5.0
"""At most one plain line in this time."""
RATE_WINDOW_S = 60.0
_GAIN_STYLE = {1: "green", -1: "red", 0: ""}
NARROW = "This terminal is too narrow for intervals and most deviations; the report has them."


class SweepTable:
    """A table per dataset. `notes` are sentences below all tables, `remarks` those on one dataset."""

    def __init__(
        self,
        summaries: Sequence[Summary],
        notes: Sequence[str] = (),
        remarks: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._summaries, self._notes, self._remarks = summaries, notes, remarks or {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._render(narrow=False)
        needed = Measurement.get(console, options.update(width=1000), wide).minimum
        yield wide if needed <= options.max_width else self._render(narrow=True)

    def _render(self, *, narrow: bool) -> RenderableType:
        parts: list[RenderableType] = []
        for dataset, own in by_dataset(self._summaries).items():
            parts += [Text.assemble((dataset, "bold"), f": {translate(own[0]['about'])}"), _table(own, narrow=narrow)]
            if self._remarks.get(dataset):
                parts.append(
                    Padding(Text("; ".join(map(translate, self._remarks[dataset])), style="dim"), (0, 0, 0, 2))
                )
            parts.append(Text())
        return Group(
            *parts, *(Text(note, style="dim") for note in ((tr(NARROW),) if narrow else ()) + tuple(self._notes))
        )


def _table(summaries: Sequence[Summary], *, narrow: bool) -> RenderableType:
    widths = {key: max(summary["text"][key].index(" ") for summary in summaries) for key, _ in HEADERS}
    rows = [_cells(summary, widths, narrow) for summary in summaries]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name, width in (("encoder", 7), ("method", 13)):
        table.add_column(tr(name), overflow="fold", min_width=width)
    for place, name in enumerate((*(name for _, name in HEADERS), tr("gain"), tr("seeds")), 2):
        width = max(cell_len(name), *(len(row[place]) for row in rows))
        table.add_column(name, justify="right" if place > 4 else "left", no_wrap=True, min_width=width)
    trivial = [summary["kind"] == TRIVIAL for summary in summaries]
    for place, row in enumerate(rows):
        if trivial[place] and not any(trivial[:place]):
            table.add_section()
            table.add_row("", tr("trivial baselines"), style="dim italic")
        table.add_row(*row)
    return Padding(table, (0, 0, 0, 2))


def _cells(summary: Summary, widths: Mapping[str, int], narrow: bool) -> list[Text]:
    base, text = "dim" if summary["kind"] == TRIVIAL else "", summary["text"]
    settings = f" {text['settings']}" if text["settings"] else ""
    figures = [
        Text(
            _aligned(text[key], width, deviation=not narrow or key == "auroc"),
            style="bold" if key in summary["best"] else base,
        )
        for key, width in widths.items()
    ]
    gain = text["gain"].partition(" ")[0] if narrow else text["gain"]
    return [
        Text(summary["encoder"], style=base),
        Text.assemble((summary["method"], base), (settings, "dim")),
        *figures,
        Text(gain, style=_GAIN_STYLE[gain_sign(summary)] if summary["gain"] is not None else "dim"),
        Text(text["seeds"], style=base),
    ]


def _aligned(text: str, width: int, *, deviation: bool) -> str:
    """The decimal points of `.789 ± .003` and `1.000 ± –` below each other."""
    mean, _, rest = text.partition(" ")
    return f"{mean:>{width}} {rest}" if deviation else f"{mean:>{width}}"


class SweepProgress:
    """Listens to the events of a sweep: a bar with the time left on a terminal, plain lines elsewhere.

    The time left is predicted from the epochs per second of the last minute and the mean epochs of the heads that have
    stopped; it is unknown before the first has.
    """

    def __init__(self) -> None:
        self._live: Live | None = None
        self._heads = self._trained = self._alive = self._epochs = 0
        self._stopped_epochs: list[int] = []
        self._rates: deque[tuple[float, int]] = deque()
        self._last_line_s = -LINE_EVERY_S

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.stop()

    def progress(self, phrase: str) -> None:
        """A phrase of the preparation."""
        if self._live is not None:
            self._live.update(Text(translate(phrase), style="dim"))
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._line(phrase)

    def __call__(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "begin":
                self._heads = event["heads"]
                known = f", {event['known']:,} already finished" if event["known"] else ""
                heads = f"; {show_count(self._heads, 'head')} to train on {event['device']}" if self._heads else ""
                self._print(f"{event['grid']}{known}{heads}")
            case "pack":
                peak = max((trial["peak_bytes"] for trial in event["trials"]), default=0)
                self._print(
                    f"{show_count(event['heads'], 'head')} in packs of {event['runs']:,}: {event['reason']}; "
                    f"peak {show_bytes(peak)} (measured)"
                )
            case "resume":
                self._print(f"resuming {show_count(event['heads'], 'head')}")
            case "oom":
                self._print(event["sentence"], style="yellow")
            case "run":
                if event.get("epochs"):
                    self._stopped_epochs.append(event["epochs"])
            case "epochs":
                self._update(event)
            case "stop":
                self._print(f"{event['by']}: stopping")

    def _update(self, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self._epochs += event["epochs"]
        self._trained, self._alive = event["trained"], event["alive"]
        self._rates.append((now, self._epochs))
        while now - self._rates[0][0] > RATE_WINDOW_S:
            self._rates.popleft()
        if self._live is not None:
            self._live.update(self._view())
        elif now - self._last_line_s >= LINE_EVERY_S or self._trained == self._heads:
            left = f", {self._time_left()}" if self._time_left() else ""
            self._line(
                f"{self._trained:,} of {self._heads:,} heads trained, {self._alive:,} running, {self._speed()}{left}"
            )

    def _view(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(
            ProgressBar(total=max(1, self._heads), completed=self._trained, width=40),
            Text(translate(f"{self._trained:,} of {self._heads:,} heads"), style="bold"),
            translate(f"{self._alive:,} running"),
            translate(self._speed()),
            Text(translate(self._time_left()), style="dim"),
        )
        return table

    def _speed(self) -> str:
        rate = self._rate()
        return "–" if rate is None else f"{rate:,.0f} epochs/s" if rate >= 10 else f"{rate:.1f} epochs/s"

    def _rate(self) -> float | None:
        (first, before), (last, after) = self._rates[0], self._rates[-1]
        return (after - before) / (last - first) if last > first else None

    def _time_left(self) -> str:
        rate = self._rate()
        if not rate or not self._stopped_epochs or self._trained == self._heads:
            return ""
        epochs_per_head = sum(self._stopped_epochs) / len(self._stopped_epochs)
        ahead = self._epochs - epochs_per_head * self._trained
        left = epochs_per_head * (self._heads - self._trained) - ahead
        return f"about {show_seconds(left / rate)} left" if left > 0 else ""

    def _print(self, sentence: str, style: str = "") -> None:
        if self._live is not None:
            self._live.console.print(Text(translate(sentence), style=style))
        else:
            self._line(sentence)

    def _line(self, sentence: str) -> None:
        self._last_line_s = time.monotonic()
        print(f"sweep: {translate(sentence)}", file=sys.stderr, flush=True)
