"""A sweep as it goes: a bar over the heads of the grid with the time left on a terminal, plain lines elsewhere.

The time left is what the heads that run and wait still need, at the epochs a second of the last minute; how many epochs a
head needs is taken from those that have stopped, and is unknown before the first has.
"""

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from brimful.units import show_bytes, show_count, show_seconds

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
