"""How `brimful watch` looks: a `Snapshot` drawn into a given number of columns and lines.

Space goes to what matters most. Each part of the view has wishes (1 line for the loss, later 3 lines for the loss), and they are
granted in the order of importance while there are lines left: 80 × 24 shows every figure, a wide terminal gets two columns, boxes and
real charts with axes, in which evaluations, out-of-memory errors, the limit and the plan's prediction are marked. Every part keeps its place and its width while its figures change, so nothing jumps. Colour only repeats what a word or a
glyph says.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from brimful.languages import tr
from brimful.report.watch import watch_parts as parts
from brimful.report.watch.run_snapshot import Card, Series, Snapshot
from brimful.report.watch.watch_canvas import (
    UNICODE,
    Canvas,
    Glyphs,
    Lines,
    Mark,
    Range,
    Show,
    align_right,
    curve_range,
    known,
    line_chart,
    show_learning_rate,
    show_metric,
    show_percent,
    show_size,
    sparkline,
)
from brimful.report.watch.watch_parts import ZONE_STYLES, card_label, memory_facts, memory_table
from brimful.units import show_rate, zone

CHART_LINES = 7
"""The least height of a chart in a box."""
STATS_CELLS = 14
AXIS_CELLS = 9
BELOW_LEAST = 0.75
"""The axis of memory begins at this share of the least value, so that changes are seen."""
ABOVE_MOST = 1.15


class Curve(NamedTuple):
    """A series and how it is shown."""

    title: str
    label: str
    series: Series
    range: Range
    show: Show


def curve(snapshot: Snapshot, name: str) -> Curve:
    """`loss`, `rows`, `peak`, `busy` or `rate`, or one that the task logs."""
    if (series := dict(snapshot.logged).get(name)) is not None:
        return Curve(name, name, series, curve_range(series.points), show_metric)
    match name:
        case "loss":
            return Curve(tr("loss"), tr("loss"), snapshot.loss, curve_range(snapshot.loss.points), show_metric)
        case "rows":
            return Curve(tr("rows/s"), tr("rows/s"), snapshot.rows_per_s, _from_zero(snapshot.rows_per_s), show_rate)
        case "peak":
            reserved = any(card.reserved_bytes for card in snapshot.cards)
            title = tr("peak memory, reserved") if reserved else tr("peak memory")
            return Curve(title, tr("peak"), snapshot.memory, _memory_range(snapshot), show_size)
        case "busy":
            return Curve(tr("GPU utilisation"), tr("busy"), snapshot.utilization, Range(0.0, 1.0), show_percent)
        case _:
            return Curve(tr("learning rate"), tr("lr"), snapshot.rate, _from_zero(snapshot.rate), show_learning_rate)


def chart(canvas: Canvas, name: str, lines: int) -> Lines:
    """With the last, least and highest value beside it."""
    one = curve(canvas.snapshot, name)
    last, low, high = (known(value, one.show) for value in (one.series.last, one.series.minimum, one.series.maximum))
    style = "bold" if one.series.last is None or math.isfinite(one.series.last) else "bold red"
    if lines == 1:
        figures = [(last.rjust(9), style), (f" {tr('min')} ", "dim"), (low.ljust(8), ""), (f" {tr('max')} ", "dim"), (high.ljust(8), "")]  # fmt: skip
        stats = Text.assemble(*(canvas.text(*figure) for figure in figures))
        cells = max(0, canvas.text_cells - stats.cell_len)
        return [canvas.row(one.label, Text.assemble((sparkline(one.series.points, cells, one.range, canvas.glyphs), "dim"), stats))]  # fmt: skip
    clipped = one.series.maximum is not None and one.series.maximum > one.range.high
    stat_lines = [
        Text.assemble(canvas.text(f"{word} ", "dim"), canvas.text(value, value_style))
        for word, value, value_style in ((tr("last"), last, style), (tr("min"), low, ""), (tr("max"), high + "↑" * clipped, ""))
    ]  # fmt: skip
    stat_lines += [Text()] * (lines - len(stat_lines))
    drawn = _draw_curve(canvas, one, max(1, canvas.text_cells - STATS_CELLS), lines)
    return [
        canvas.row("" if number else one.label, Text.assemble(line, align_right(stat, STATS_CELLS)))
        for number, (line, stat) in enumerate(zip(drawn, stat_lines, strict=False))
    ]


def logged_lines(canvas: Canvas, lines: int) -> Lines:
    """A sparkline for each figure that the task logs, with the last, least and highest value."""
    names = [name for name, _ in canvas.snapshot.logged][:lines]
    own = replace(canvas, label_cells=max([canvas.label_cells, *(1 + len(name) for name in names)]))
    return [line for name in names for line in chart(own, name, 1)]


def boxed_charts(canvas: Canvas, names: Sequence[str], lines: int) -> Lines:
    """Those that have points, one below the other, as many as there is space for."""
    curves = [one for name in names if (one := curve(canvas.snapshot, name)).series.points]
    curves = curves[: max(0, lines // CHART_LINES)]
    drawn: Lines = []
    for number, one in enumerate(curves):
        drawn += _boxed_chart(canvas, one, (lines - len(drawn)) // (len(curves) - number))
    return drawn


def _boxed_chart(canvas: Canvas, one: Curve, lines: int) -> Lines:
    rows, inner = lines - 3, canvas.width - 4
    series, low, high = one.series, one.range.low, one.range.high
    figures = ((tr("last"), series.last), (tr("min"), series.minimum), (tr("max"), series.maximum))
    stats = [Text.assemble(canvas.text(f"{name} ", "dim"), canvas.text(known(value, one.show))) for name, value in figures]  # fmt: skip
    axis = {0: high, rows - 1: low, (rows - 1) // 2: high - (high - low) * ((rows - 1) // 2) / max(1, rows - 1)}
    body = []
    for row, line in enumerate(_draw_curve(canvas, one, inner - AXIS_CELLS - 1, rows)):
        label = canvas.text(one.show(axis[row]) if row in axis else "", "dim")
        body.append(Text.assemble(align_right(label, AXIS_CELLS), " ", line))
    first, last = (canvas.text(f"{series.points[end][0]:,}", "dim") for end in (0, -1))
    start = Text.assemble(align_right(canvas.text(tr("step"), "dim"), AXIS_CELLS), " ", first)
    left = inner - start.cell_len - last.cell_len
    legend = _legend(canvas, series, left - 2)
    space = left - legend.cell_len
    body.append(Text.assemble(start, " " * (space // 2), legend, " " * (space - space // 2), last))
    return canvas.box(body, title=one.title, right=Text("  ").join(stats))


def _draw_curve(canvas: Canvas, one: Curve, width: int, lines: int) -> Lines:
    """The curve with the marks of its kind."""
    snapshot, glyphs = canvas.snapshot, canvas.glyphs
    marks, references = list[Mark](), list[tuple[float, str]]()
    limit: float | None = None
    if one.series is snapshot.loss:
        best = snapshot.best.step if snapshot.best else None
        marks = [Mark(step, loss, glyphs.evaluation, _evaluation_style(step == best)) for step, loss in snapshot.evaluations]  # fmt: skip
    elif one.series is snapshot.memory:
        card = _fullest(snapshot)
        limit, planned = card.limit_bytes, card.predicted_bytes
        marks = [Mark(oom.step, one.range.high, glyphs.event, "bold yellow") for oom in snapshot.ooms]
        references = [(value, style) for value, style in ((planned, "dim"), (limit, "red")) if value]

    def style(value: float) -> str:
        return ZONE_STYLES[zone(value / limit)] if limit else ""

    return line_chart(one.series.points, width, lines, one.range, style=style, references=references, marks=marks, glyphs=glyphs)  # fmt: skip


def _legend(canvas: Canvas, series: Series, cells: int) -> Text:
    """What the marks of a chart mean; as many of them as fit."""
    snapshot, glyphs = canvas.snapshot, canvas.glyphs
    signs: list[tuple[str, str, str]] = []
    if series is snapshot.loss and snapshot.evaluations:
        signs = [(glyphs.evaluation, _evaluation_style(False), tr("evaluation"))]
        signs += [(glyphs.evaluation, _evaluation_style(True), tr("best"))] if snapshot.best else []
    elif series is snapshot.memory:
        card = _fullest(snapshot)
        signs = [(glyphs.reference * 2, "red", f"{tr('limit')} {show_size(card.limit_bytes)}")]
        if card.predicted_bytes:
            signs.append((glyphs.reference * 2, "dim", f"{tr('plan')} {show_size(card.predicted_bytes)}"))
        signs += [(glyphs.event, "bold yellow", tr("out of memory"))] if snapshot.ooms else []
    legend = Text()
    for sign, style, meaning in signs:
        more = Text.assemble("  " if legend else "", (sign, style), " ", canvas.text(meaning, "dim"))
        if legend.cell_len + more.cell_len > cells:
            break
        legend = Text.assemble(legend, more)
    return legend


def _evaluation_style(best: bool) -> str:
    return "bold green" if best else "cyan"


def _fullest(snapshot: Snapshot) -> Card:
    return max(snapshot.cards, key=lambda card: card.used or 0.0)


def _memory_range(snapshot: Snapshot) -> Range:
    """Up to the limit."""
    limits = [card.limit_bytes for card in snapshot.cards if card.limit_bytes]
    predicted = [card.predicted_bytes for card in snapshot.cards if card.predicted_bytes]
    least = min([snapshot.memory.minimum or 0.0, *predicted])
    return Range(BELOW_LEAST * least, max([*limits, snapshot.memory.maximum or 0.0, 1.0]))


def _from_zero(series: Series) -> Range:
    return Range(0.0, ABOVE_MOST * (series.maximum or 1.0))


WIDE, TALL = 132, 30
"""From this size on there are two columns, with boxes."""
LEFT_COLUMNS = 86
"""The least width of the left column: that of the table of cards."""
ANY = 99
"""Lines of a part that can use any number of them."""
ORDER = (
    "header", "progress", "ending", "gap 1", "memory", "gap 2", "time", "gap 3", "loss", "logged", "rows", "peak", "figures", "scores", "saved",
    "ooms", "gap 4", "notes",
)  # fmt: skip


def frame(
    snapshot: Snapshot,
    width: int,
    height: int,
    *,
    glyphs: Glyphs = UNICODE,
    footer: str | None = None,
    wording: Callable[[str], str] = str,
) -> Lines:
    """At most `height` lines, none wider than `width`. `footer` says what the keys do and stays at the bottom.

    `wording` turns the arguments that notes name into what the user types.
    """
    label_cells = _label_cells(snapshot)
    canvas = Canvas(snapshot=snapshot, width=max(20, width), label_cells=label_cells, glyphs=glyphs, wording=wording)
    wide = canvas.width >= WIDE and height >= TALL and bool(snapshot.cards)
    lines = (_two_columns if wide else _one_column)(canvas, max(3, height), footer)
    return [canvas.crop(line, canvas.width) for line in lines[: max(3, height)]]


def _one_column(canvas: Canvas, height: int, keys: str | None) -> Lines:
    table = min(len(canvas.snapshot.cards), max(1, height // 2 - 4)) + 2  # with a heading and the RAM
    wishes = [
        ("header", 1),
        ("footer", 1),
        ("ending", 1),
        ("progress", 1),
        ("memory", table),
        ("ending", 2),
        ("ooms", 1),
    ]
    wishes += [("loss", 1), ("rows", 1), ("time", 1), ("saved", 1), ("notes", 1), ("time", 2), ("ending", 3)]
    wishes += [("scores", 1), ("figures", 1), ("logged", ANY), ("progress", 2)]
    wishes += [("ending", ANY), ("memory", table + len(memory_facts(canvas)))]
    wishes += [("gap 1", 1), ("gap 3", 1), ("notes", 2), ("loss", 3), ("ooms", 2), ("gap 2", 1), ("gap 4", 1), ("notes", 3), ("time", ANY)]  # fmt: skip
    wishes += [("saved", 2), ("rows", 3), ("ooms", 3), ("loss", 5), ("peak", 4), ("notes", 6), ("ooms", 6), ("loss", 9)]
    wishes += [("rows", 5), ("peak", 6), ("loss", 14), ("rows", 8), ("peak", 9), ("loss", 20)]
    lines = allot(height, wishes, _most(canvas))
    drawn = [line for name in ORDER for line in _draw_part(canvas, name, lines.get(name, 0))]
    if keys is not None:
        drawn += [Text()] * (height - len(drawn) - 1)
    return [*drawn, parts.footer(canvas, keys)]


def _two_columns(canvas: Canvas, height: int, keys: str | None) -> Lines:
    left_cells = max(LEFT_COLUMNS, canvas.width * 48 // 100)
    inner, left, right = (replace(canvas, width=cells) for cells in (canvas.width - 4, left_cells, canvas.width - left_cells - 1))  # fmt: skip
    head = [line for name in ("header", "progress", "ending") for line in _draw_part(inner, name, _most(inner)[name])]
    top = canvas.box(head, title=f"brimful watch {canvas.snapshot.run}")
    rest = height - len(top) - 1
    boxed = replace(left, width=left_cells - 4)
    table = min(len(canvas.snapshot.cards), max(2, rest // 3)) + 2
    wishes = [("memory", table), ("time", 2), ("ooms", 1), ("training", 3), ("notes", 2), ("logged", ANY)]
    wishes += [("memory", table + len(memory_facts(boxed))), ("training", 4), ("time", ANY), ("ooms", 4), ("notes", 5), ("ooms", 8), ("notes", 12)]  # fmt: skip
    lines = allot(rest, wishes, _most(boxed), overhead=2)
    titles = {"memory": tr("memory"), "time": tr("time of a step"), "training": tr("training"), "logged": tr("the task's own figures"), "ooms": tr("out-of-memory errors"), "notes": tr("notes")}  # fmt: skip
    column: Lines = []
    for name, title in titles.items():
        if lines.get(name):
            column += left.box(_draw_part(boxed, name, lines[name]), title=title)
    beside: Sequence[str] = ("busy", "rate")
    main: Sequence[str] = ("loss", "rows", "peak")
    if not canvas.snapshot.utilization.points and rest - len(column) >= 2 * CHART_LINES:
        beside, main = ("peak", "rate"), ("loss", "rows")  # else the learning rate alone would fill the column
    column += boxed_charts(left, beside, rest - len(column))
    charts = boxed_charts(right, main, rest)
    columns = zip_longest(column, charts, fillvalue=Text())
    body = [Text.assemble(canvas.pad(one, left_cells), " ", other) for one, other in columns]
    return [*top, *body, *[Text()] * (rest - len(body)), parts.footer(canvas, keys)]


def allot(
    height: int, wishes: Iterable[tuple[str, int]], most: Mapping[str, int], *, overhead: int = 0
) -> dict[str, int]:
    """Lines for each part: wish by wish, those that fit as a whole. No part gets more lines than it has; its first costs `overhead`."""
    lines: dict[str, int] = {}
    for name, wish in wishes:
        have, wish = lines.get(name, 0), min(wish, most.get(name, 0))
        left = height - sum(lines.values()) - overhead * len(lines) - (0 if have else overhead)
        if 0 < wish - have <= left:
            lines[name] = wish
    return lines


def _label_cells(snapshot: Snapshot) -> int:
    """Of the longest label, and a space."""
    labels = [tr(name) for name in ("step", "epoch", "RAM", "time", "loss", "rows/s", "peak", "lr", "scores", "saved", "OOMs", "notes")]  # fmt: skip
    return 1 + max(cell_len(label) for label in (*labels, *map(card_label, snapshot.cards)))


def _most(canvas: Canvas) -> dict[str, int]:
    """How many lines each part can use."""
    snapshot = canvas.snapshot
    cards, begun = len(snapshot.cards), int(snapshot.step > 0)
    return {
        "header": 1, "footer": 1, "progress": 2 if snapshot.steps else 0, "ending": len(parts.ending(canvas)),
        "memory": cards + 1 + (snapshot.ram is not None) + len(memory_facts(canvas)) if cards else 0,
        "time": len(parts.step_time(canvas)) * begun, "loss": ANY * begun, "rows": ANY * begun, "peak": ANY if snapshot.memory.points else 0,
        "logged": len(snapshot.logged) * begun, "figures": begun, "scores": begun, "saved": len(parts.checkpoints(canvas)) * begun, "training": (2 + len(parts.checkpoints(canvas))) * begun,
        "ooms": len(parts.out_of_memory(canvas, parts.NOTE_LINES)) if cards else 0, "notes": len(parts.notes(canvas, parts.NOTE_LINES)),
        **{f"gap {number}": int(cards > 0) for number in (1, 2, 3, 4)},
    }  # fmt: skip


def _draw_part(canvas: Canvas, name: str, lines: int) -> Lines:
    """A part in as many lines as it is given, or fewer."""
    if not lines:
        return []
    draw: Mapping[str, Callable[[], Lines]] = {
        "header": lambda: [parts.header(canvas)],
        "progress": lambda: parts.progress(canvas),
        "ending": lambda: _with_last(parts.ending(canvas), lines),
        "memory": lambda: memory_table(canvas, lines),
        "time": lambda: parts.step_time(canvas),
        "loss": lambda: chart(canvas, "loss", lines),
        "logged": lambda: logged_lines(canvas, lines),
        "rows": lambda: chart(canvas, "rows", lines),
        "peak": lambda: chart(canvas, "peak", lines),
        "figures": lambda: [parts.figures(canvas)],
        "scores": lambda: [parts.scores(canvas)],
        "saved": lambda: parts.checkpoints(canvas),
        "training": lambda: [parts.figures(canvas), parts.scores(canvas), *parts.checkpoints(canvas)],
        "ooms": lambda: parts.out_of_memory(canvas, lines),
        "notes": lambda: parts.notes(canvas, lines),
    }
    return draw[name]()[:lines] if name in draw else [Text()]


def _with_last(lines: Lines, most: int) -> Lines:
    """The command that continues a run, in the last line, is shown even if the sentence before it must be cut."""
    return lines if len(lines) <= most or most < 2 else [*lines[: most - 1], lines[-1]]
