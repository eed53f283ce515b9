"""Curves over the steps: a sparkline where there is one line, a chart where there are more, with axes where there is a box.

On the loss, evaluations are marked; on memory, the limit, the plan's prediction and out-of-memory errors.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.text import Text

from brimful.languages import tr
from brimful.report.watch.cells import (
    Canvas,
    Lines,
    Show,
    align_right,
    known,
    show_learning_rate,
    show_metric,
    show_percent,
    show_size,
)
from brimful.report.watch.memory_table import ZONE_STYLES
from brimful.report.watch.run_snapshot import Card, Series, Snapshot
from brimful.report.watch.sparklines import Mark, Range, curve_range, line_chart, sparkline
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
    drawn = _draw(canvas, one, max(1, canvas.text_cells - STATS_CELLS), lines)
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
    for row, line in enumerate(_draw(canvas, one, inner - AXIS_CELLS - 1, rows)):
        label = canvas.text(one.show(axis[row]) if row in axis else "", "dim")
        body.append(Text.assemble(align_right(label, AXIS_CELLS), " ", line))
    first, last = (canvas.text(f"{series.points[end][0]:,}", "dim") for end in (0, -1))
    start = Text.assemble(align_right(canvas.text(tr("step"), "dim"), AXIS_CELLS), " ", first)
    left = inner - start.cell_len - last.cell_len
    legend = _legend(canvas, series, left - 2)
    space = left - legend.cell_len
    body.append(Text.assemble(start, " " * (space // 2), legend, " " * (space - space // 2), last))
    return canvas.box(body, title=one.title, right=Text("  ").join(stats))


def _draw(canvas: Canvas, one: Curve, width: int, lines: int) -> Lines:
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
