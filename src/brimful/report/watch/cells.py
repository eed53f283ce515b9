"""Texts in terminal cells: a Chinese character takes two of them. Also how the view writes sizes, shares and times.

A text from a run may hold anything, such as an error of a library with colours in it: control characters never reach the terminal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO

from rich.console import Console
from rich.text import Text

from brimful.languages import tr
from brimful.report.watch.run_snapshot import Snapshot
from brimful.report.watch.sparklines import Glyphs
from brimful.training.run_log import UNKNOWN, show_metric
from brimful.units import GiB, KiB, MiB, TiB, show_bytes

CUT_CELLS = 16
"""A fact in a line of several is not cut to less than this."""
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), " ")

__all__ = ["UNKNOWN", "Canvas", "Lines", "Show", "align_right", "known", "show_age", "show_clock", "show_epoch", "show_learning_rate", "show_metric", "show_percent", "show_size", "show_step", "wrap"]  # fmt: skip

Lines = list[Text]
Show = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """What every part of the view draws with: lines of a label and a text."""

    snapshot: Snapshot
    width: int
    label_cells: int
    glyphs: Glyphs

    @property
    def text_cells(self) -> int:
        return max(0, self.width - self.label_cells)

    def text(self, text: str, style: str = "") -> Text:
        return Text(self.glyphs.text(text.translate(_CONTROL)), style)

    def row(self, label: str, text: Text) -> Text:
        return Text.assemble(self.pad(self.text(label, "dim"), self.label_cells), self.crop(text, self.text_cells))

    def facts(self, facts: Sequence[str], style: str = "") -> Text:
        """Short texts with dots between them; the first in this style."""
        texts = [self.text(" ".join(fact.split()), "" if number else style) for number, fact in enumerate(facts)]
        return self.side_by_side([text for text in texts if text], " · ")

    def side_by_side(self, parts: Sequence[Text], between: str) -> Text:
        """As many as fit; the last is cut if most of it can still be read."""
        line = Text()
        for number, part in enumerate(parts):
            joint = self.text(between if number else "", "dim")
            left = self.text_cells - line.cell_len - joint.cell_len
            if part.cell_len > left:
                readable = not number or left >= max(CUT_CELLS, part.cell_len // 2)
                return Text.assemble(line, joint, self.crop(part, left)) if readable else line
            line = Text.assemble(line, joint, part)
        return line

    def crop(self, text: Text, cells: int) -> Text:
        if text.cell_len <= cells:
            return text
        cropped = text.copy()
        cropped.truncate(max(0, cells - 1), overflow="crop")
        return Text.assemble(cropped, self.glyphs.ellipsis) if cells > 0 else cropped

    def pad(self, text: Text, cells: int) -> Text:
        text = self.crop(text, cells)
        return Text.assemble(text, " " * (cells - text.cell_len))

    def box(self, lines: Lines, *, title: str, right: Text | None = None) -> Lines:
        """The lines in a frame of the canvas' width, with a title."""
        top_left, top_right, bottom_left, bottom_right, across, down = tuple(self.glyphs.box)
        head = self.crop(self.text(f" {title} ", "bold"), self.width - 6)
        tail = Text.assemble(" ", right, " ") if right is not None else Text()
        if head.cell_len + tail.cell_len > self.width - 6:
            tail = Text()
        rule = across * (self.width - 4 - head.cell_len - tail.cell_len)
        top = Text.assemble((top_left + across, "dim"), head, (rule, "dim"), tail, (across + top_right, "dim"))
        side = (f"{down} ", "dim"), (f" {down}", "dim")
        body = [Text.assemble(side[0], self.pad(line, self.width - 4), side[1]) for line in lines]
        return [top, *body, Text(bottom_left + across * (self.width - 2) + bottom_right, "dim")]

    def when(self, time: datetime | None) -> str:
        """How long ago, while the run goes on; else by the clock, so that an ended run's view stays as it is."""
        if time is None:
            return UNKNOWN
        if self.snapshot.is_active:
            return tr("{time!s} ago", time=show_age((self.snapshot.taken - time).total_seconds()))
        return show_clock(time, self.snapshot.taken)


def align_right(text: Text, cells: int) -> Text:
    return Text.assemble(" " * max(0, cells - text.cell_len), text)


def wrap(text: Text, cells: int) -> Lines:
    """Broken at spaces, or anywhere in a long word or in Chinese."""
    return list(text.wrap(Console(file=StringIO(), width=max(1, cells)), max(1, cells)))


def known(value: float | None, show: Show) -> str:
    return UNKNOWN if value is None else show(value)


def show_size(size: float | None) -> str:
    """Three significant figures, at most eight cells: `15.4 GiB`."""
    if size is None or not math.isfinite(size):
        return UNKNOWN
    unit = next((unit for unit in (TiB, GiB, MiB, KiB) if abs(size) >= unit), 1)
    digits = 2 if size / unit < 10 else 1 if size / unit < 100 else 0
    return show_bytes(round(size / unit, digits) * unit)


def show_percent(share: float | None) -> str:
    return UNKNOWN if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def show_step(step: int) -> str:
    return tr("step {step:,}", step=step)


def show_learning_rate(rate: float) -> str:
    return f"{rate:.2e}" if rate else "0"


def show_epoch(epoch: float | None) -> str:
    return UNKNOWN if epoch is None else f"{epoch:.2f}".rstrip("0").rstrip(".")


def show_age(seconds: float) -> str:
    """Coarse, so that it changes rarely: `12 s`, `5 min`, `2 h 5 min`, `3 d 4 h`."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def show_clock(time: datetime, now: datetime) -> str:
    """In this machine's time zone, with the day if it is another one."""
    time, now = time.astimezone(), now.astimezone()
    if time.date() == now.date():
        return time.strftime("%H:%M")
    return time.strftime("%m-%d %H:%M" if time.year == now.year else "%Y-%m-%d %H:%M")
