"""Bars, sparklines and line charts made of characters, for a terminal of any width.

A braille character has 2 × 4 dots, so a chart of 80 × 10 characters has 160 × 40 points. Where the encoding or the terminal cannot
show them, `ASCII` draws the same with the characters every terminal has. No meaning is carried by a colour alone: parts of a bar
differ by their glyph too.

Texts are measured in cells, of which a Chinese character takes two. A text from a run may hold anything, such as an error of a library
with colours in it: control characters never reach the terminal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from rich.text import Text

from brimful.languages import tr
from brimful.report.watch.run_snapshot import Snapshot
from brimful.report.wrapped_text import wrapped
from brimful.training.run_log import UNKNOWN, show_metric
from brimful.units import GiB, KiB, MiB, TiB, show_bytes

Points = Sequence[tuple[float, float]]
"""(x, y), in the order of x. A y that is not a number leaves a gap."""
CLIPPED_SHARE = 0.6
"""The high beginning of a falling curve is cut off if the rest then takes less than this share of the height."""
BEGINNING = 0.1
"""How much of a curve counts as its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters to draw with."""

    full: str
    other: str
    empty: str
    """The parts of a memory bar: ours, others', free."""
    mark: str
    """A place on a bar."""
    parts: str
    """The parts of a stacked bar."""
    done: str
    left: str
    """A progress bar."""
    levels: str
    """A sparkline, from low to high."""
    line: str
    """A point of a chart; empty: braille."""
    blank: str
    """An empty place of a chart. A picture in a font whose braille is wider than its letters needs the empty braille character."""
    reference: str
    """A horizontal line in a chart."""
    box: str
    """Corners (top left, top right, bottom left, bottom right), horizontal and vertical."""
    bullet: str
    ellipsis: str
    event: str
    evaluation: str
    """Marks in a chart."""
    replaced: Mapping[int, str]
    """Characters of texts that cannot be shown, and what stands for them."""

    def text(self, text: str) -> str:
        return text.translate(self.replaced) if self.replaced else text

    def fits(self, encoding: str) -> bool:
        """Whether this encoding has all of them."""
        try:
            (self.full + self.other + self.levels + self.reference + self.box + self.bullet + "⣿").encode(encoding)
        except (UnicodeError, LookupError):
            return False
        return True


UNICODE = Glyphs(
    full="█", other="▒", empty="░", mark="│", parts="█▓▒░", done="━", left="─", levels="▁▂▃▄▅▆▇█", line="", blank=" ", reference="┈",
    box="╭╮╰╯─│", bullet="●", ellipsis="…", event="▼", evaluation="◆", replaced={},
)  # fmt: skip
ASCII = Glyphs(
    full="#", other="=", empty=".", mark="|", parts="#=-.", done="=", left="-", levels="_.-=+*%#", line="*", blank=" ", reference="-",
    box="++++-|", bullet="*", ellipsis="~", event="v", evaluation="o",
    replaced=str.maketrans({"·": "-", "–": "-", "…": "...", "°": " ", "→": "->", "×": "x", "“": '"', "”": '"', "’": "'", "↑": "^", "，": ", ", "▸": ">", "◂": "<"}),
)  # fmt: skip
_NO_BLOCKS = ("linux", "vt100", "vt220", "dumb")
"""Terminals that have no font for braille."""


def glyphs_for(encoding: str | None, environment: Mapping[str, str]) -> Glyphs:
    """What this output can show.

    Python writes UTF-8 under the locale `C` too, so the locale is asked as well: one that is set and is not UTF-8 means ASCII. None
    at all, as in most containers, means that nobody has said so.
    """
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environment.get(name))), "")
    if locale in ("C", "POSIX") or environment.get("TERM") in _NO_BLOCKS:
        return ASCII
    return UNICODE if UNICODE.fits(encoding or "ascii") else ASCII


# ---- Bars ------------------------------------------------------------------------------------------------------------


def memory_bar(
    width: int, ours: float, others: float, *, mark: float | None, style: str, glyphs: Glyphs = UNICODE
) -> Text:
    """Shares of a limit: ours from the left, what others take of it from the right, and a mark. The gap is what is left."""
    ours_cells = _cells(ours, width)
    others_cells = min(_cells(others, width), width - ours_cells)
    free = width - ours_cells - others_cells
    bar = Text.assemble(
        (glyphs.full * ours_cells, style), (glyphs.empty * free, "dim"), (glyphs.other * others_cells, "magenta")
    )
    if mark is None or not 0 < mark <= 1:
        return bar
    place = min(width - 1, round(mark * width))
    return Text.assemble(bar[:place], (glyphs.mark, "bold"), bar[place + 1 :])


def stacked_bar(width: int, shares: Sequence[float], styles: Sequence[str], glyphs: Glyphs = UNICODE) -> Text:
    """Parts of a whole, side by side; the last takes what rounding leaves. A part that is not zero is seen, if there is space."""
    cells = [max(_cells(share, width), int(share > 0.002)) for share in shares]
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    largest = max(range(len(cells)), key=lambda index: cells[index])
    cells[largest] += width - sum(cells)
    return Text.assemble(*((glyph * count, style) for glyph, count, style in zip(glyphs.parts, cells, styles, strict=False)))  # fmt: skip


def progress_bar(width: int, share: float | None, style: str, glyphs: Glyphs = UNICODE) -> Text:
    done = 0 if share is None else min(width, int(share * width))
    return Text.assemble((glyphs.done * done, style), (glyphs.left * (width - done), "dim"))


def _cells(share: float, width: int) -> int:
    return max(0, min(width, round(share * width))) if math.isfinite(share) else 0


# ---- Curves ----------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    low: float
    high: float

    def share(self, value: float) -> float:
        """From 0 at the bottom to 1 at the top; one half if there is no height."""
        if self.high <= self.low:
            return 0.5
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def curve_range(points: Points) -> Range:
    """From the least to the highest value, without the high beginning of a curve that has fallen far since."""
    values = [value for _, value in points if math.isfinite(value)]
    if not values:
        return Range(0.0, 1.0)
    low, high = min(values), max(values)
    later = max(values[int(len(values) * BEGINNING) :])
    return Range(low, later if len(values) >= 20 and later - low < CLIPPED_SHARE * (high - low) else high)


def resample(points: Points, columns: int) -> list[float | None]:
    """The mean of each of `columns` equal parts of x, with straight lines between points far apart. None: not a number."""
    if not points or columns < 1:
        return [None] * columns
    first, last = points[0][0], points[-1][0]
    width = (last - first) / columns
    sums, counts, broken = [0.0] * columns, [0] * columns, [False] * columns
    for x, y in points:
        column = min(columns - 1, int((x - first) / width)) if width > 0 else columns - 1
        if math.isfinite(y):
            sums[column] += y
            counts[column] += 1
        else:
            broken[column] = True
    values: list[float | None] = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    before: int | None = None
    for column, value in enumerate(values):
        if broken[column] and value is None:
            before = None
        if value is None:
            continue
        start = values[before] if before is not None else None
        if before is not None and start is not None:
            for gap in range(before + 1, column):
                values[gap] = start + (value - start) * (gap - before) / (column - before)
        before = column
    return values


def sparkline(points: Points, width: int, vertical: Range, glyphs: Glyphs = UNICODE) -> str:
    """One line high. Fewer points than columns take as many columns as there are points."""
    top = len(glyphs.levels) - 1
    columns = min(width, len(points))
    cells = (" " if y is None else glyphs.levels[round(vertical.share(y) * top)] for y in resample(points, columns))
    return "".join(cells).ljust(width)


class Mark(NamedTuple):
    """One character at a place in a chart."""

    x: float
    y: float
    glyph: str
    style: str


def line_chart(
    points: Points,
    width: int,
    height: int,
    vertical: Range,
    *,
    style: Callable[[float], str] = lambda value: "",
    references: Sequence[tuple[float, str]] = (),
    marks: Sequence[Mark] = (),
    glyphs: Glyphs = UNICODE,
) -> list[Text]:
    """A curve of `height` lines. `style` colours it by its value; `references` are horizontal lines (y, style)."""
    across, down = (1, 1) if glyphs.line else (2, 4)
    values = resample(points, across * width)
    cells = _dots(values, width, height, vertical, across, down)
    grid = [[(glyphs.blank, "")] * width for _ in range(height)]
    for y, reference_style in references:
        if vertical.low <= y <= vertical.high:
            row = _row(vertical.share(y), height)
            grid[row] = [(glyphs.reference, reference_style)] * width
    for (row, column), bits in cells.items():
        value = values[min(len(values) - 1, across * column + across - 1)]
        grid[row][column] = (glyphs.line or chr(0x2800 + bits), style(vertical.low if value is None else value))
    if points:
        first, last = points[0][0], points[-1][0]
        for mark in marks:
            place = (mark.x - first) / (last - first) if last > first else 1.0
            if 0 <= place <= 1 and math.isfinite(mark.y):
                column = min(width - 1, int(place * width))
                grid[_row(vertical.share(mark.y), height)][column] = (mark.glyph, mark.style)
    return [Text.assemble(*_joined(line)) for line in grid]


def _joined(cells: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one style as one piece: a fifth of the bytes that go to the terminal."""
    pieces = [("", "")]
    for glyph, style in cells:
        text, before = pieces[-1]
        if style == before:
            pieces[-1] = (text + glyph, before)
        else:
            pieces.append((glyph, style))
    return pieces


_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""A braille character's dots: left and right column, from the top."""


def _dots(
    values: Sequence[float | None], width: int, height: int, vertical: Range, across: int, down: int
) -> dict[tuple[int, int], int]:
    """The dots of each cell; neighbouring values are joined by vertical strokes, so that a steep curve has no holes."""
    cells: dict[tuple[int, int], int] = {}
    rows, before = height * down, None
    for x, value in enumerate(values):
        if value is None:
            before = None
            continue
        y = _row(vertical.share(value), rows)
        start = y if before is None else before + (before < y) - (before > y)
        for dot in range(min(start, y), max(start, y) + 1):
            cell = (dot // down, x // across)
            cells[cell] = cells.get(cell, 0) | _BITS[x % across][dot % down]
        before = y
    return cells


def _row(share: float, rows: int) -> int:
    return min(rows - 1, max(0, round((1 - share) * (rows - 1))))


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
    wording: Callable[[str], str] = str

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
    return list(wrapped(text, max(1, cells)))


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
