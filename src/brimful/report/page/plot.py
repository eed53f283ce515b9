"""A chart of the report: axes in HTML, curves in an SVG that is stretched to its width, and the figures for a read-out.

The text is HTML beside the SVG, so it has the size of text on a phone, on a wide screen and on paper, and only the curves are
stretched. A script may show what is under the pointer, from the JSON in the chart; without a script everything else is there.

A curve is drawn with at most two points for each of `COLUMNS` columns, the lowest and the highest, so that no peak is lost:
about 6 kB, and as much again for the read-out.
"""

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from brimful.charts import Floats, Frame, Span, between, extremes, line, log_ticks, ticks, widened
from brimful.units import GiB, KiB, MiB, TiB

Unit = Literal["bytes", "share", "seconds", "step", "rows", "number", "rate", "celsius", "watts"]
Kind = Literal["line", "thin", "dash", "dots", "steady", "area"]
Tick = tuple[float, str]

COLUMNS = 250
WIDTH = 1000
"""Of the stretched drawing, in units of its own; its height is in pixels."""
LABEL_PX = 15
"""Height of a line of text in a chart."""
_DURATIONS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 2 * 86400, 7 * 86400, 14 * 86400, 28 * 86400)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve, or the upper edge of an area above `low`."""

    name: str
    x: Floats
    y: Floats
    colour: int = 0
    kind: Kind = "line"
    low: Floats | None = None
    legend: bool = True

    @property
    def known(self) -> bool:
        return bool((np.isfinite(self.x) & np.isfinite(self.y)).any())

    @property
    def classes(self) -> str:
        return f"{self.kind} {colour_class(self.colour)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A horizontal line with its name: a limit, a prediction."""

    value: float
    name: str
    kind: Literal["limit", "predicted"]
    colour: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A shaded range of heights."""

    low: float
    high: float
    kind: Literal["edge", "danger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at one place."""

    x: float
    name: str
    kind: Literal["oom", "resume", "bad", "chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What is drawn. `html` draws it."""

    label: str
    """Read aloud instead of the picture."""
    series: Sequence[Series]
    x_unit: Unit = "seconds"
    y_unit: Unit = "number"
    x_name: str = ""
    y_name: str = ""
    rules: Sequence[Rule] = ()
    bands: Sequence[Band] = ()
    marks: Sequence[Mark] = ()
    x_span: Span | None = None
    y_span: Span | None = None
    """None: around what is drawn, from 0 where that is not far away."""
    log: bool = False
    height: int = 200
    columns: int = COLUMNS
    legend_first: Sequence[str] = field(default=())
    """HTML of further keys of the legend."""

    @property
    def known(self) -> bool:
        return any(one.known for one in self.series)

    def html(self) -> str:
        """The legend, the plot and its figures; nothing if there is nothing to draw."""
        if not self.known:
            return ""
        shown = [_thinned(_only_positive(one) if self.log else one, self.columns) for one in self.series if one.known]
        shown = [one for one in shown if one.known]
        if not shown:
            return ""
        frame = Frame(
            x=self.x_span or _x_span(shown), y=self._heights(shown), width=WIDTH, height=self.height, left=0, right=0, top=0, bottom=0
        )  # fmt: skip
        return f"{self._legend()}{self._plot(frame, shown)}"

    def _heights(self, shown: Sequence[Series]) -> Span:
        if self.log:
            low, high = widened(np.concatenate([np.log10(one.y) for one in shown]))
            return (low, high) if high - low > 0.1 else (low - 0.1, high + 0.1)
        if self.y_span is not None:
            return self.y_span
        values = np.concatenate([one.y for one in shown] + [one.low for one in shown if one.low is not None])
        low, high = widened(np.concatenate((values, [rule.value for rule in self.rules])))
        known = values[np.isfinite(values)]
        if len(known) and known.min() >= 0 and known.min() < 0.6 * high:
            low = 0.0
        return low, high

    def _legend(self) -> str:
        keys = [*self.legend_first]
        keys += [
            f'<span class="key {one.classes}">{html.escape(one.name)}</span>' for one in self.series if one.legend and one.known
        ]  # fmt: skip
        return f'<div class="legend">{"".join(keys)}</div>' if len(keys) > 1 else ""

    def _plot(self, frame: Frame, shown: Sequence[Series]) -> str:
        y_ticks, unit = _ticks(self.y_unit, frame.y, 5 if self.height > 160 else 4, log=self.log)
        x_ticks, _ = _ticks(self.x_unit, frame.x, 6)
        parts = [_band(frame, band) for band in self.bands]
        parts += [f'<path class="grid" d="M0 {_units(frame.down(value))}h{WIDTH}"/>' for value, _ in y_ticks]
        parts += [_mark(frame, mark) for mark in self.marks if frame.x[0] <= mark.x <= frame.x[1]]
        for rule in self.rules:
            colour = "" if rule.colour is None else f" {colour_class(rule.colour)}"
            value = math.log10(rule.value) if self.log and rule.value > 0 else rule.value
            parts.append(f'<path class="rule {rule.kind}{colour}" d="M0 {_units(frame.down(value))}h{WIDTH}"/>')
        parts += [_curve(frame, replace(one, y=np.log10(one.y)) if self.log else one) for one in shown]
        svg = f'<svg viewBox="0 0 {WIDTH} {self.height}" preserveAspectRatio="none" role="img" aria-label="{html.escape(self.label)}">{"".join(parts)}</svg>'
        return (
            f'<div class="plot" style="--h:{self.height}px"><div class="unit" aria-hidden="true">{html.escape(" ".join(filter(None, (self.y_name, unit and f"({unit})" if self.y_name else unit))))}</div>'
            f'{_y_axis(frame, y_ticks)}<div class="pane">{svg}{self._rule_names(frame)}</div>{_x_axis(frame, x_ticks, self.x_name)}'
            f'<script type="application/json" class="figures">{self._figures(frame, shown)}</script></div>'
        )  # fmt: skip

    def _rule_names(self, frame: Frame) -> str:
        """At the right end of each line, moved apart where they would overlap. The name of a line above the plot has an arrow."""
        rules = sorted(self.rules, key=lambda rule: rule.value)
        values = [math.log10(rule.value) if self.log and rule.value > 0 else rule.value for rule in rules]
        tops = [math.inf]
        for value in values:
            tops.append(min(float(frame.down(value)) - LABEL_PX - 1, tops[-1] - LABEL_PX))
        places, above = [], 0.0
        for rule, value, wanted in reversed(list(zip(rules, values, tops[1:], strict=True))):
            top = max(wanted, above)
            above = top + LABEL_PX
            colour = "" if rule.colour is None else f" {colour_class(rule.colour)}"
            name = html.escape(rule.name) + " ↑" * (value > frame.y[1])
            places.append(f'<span class="{rule.kind}{colour}" style="top:{100 * top / self.height:.1f}%">{name}</span>')
        return f'<div class="names" aria-hidden="true">{"".join(places)}</div>' if places else ""

    def _figures(self, frame: Frame, shown: Sequence[Series]) -> str:
        """For the read-out: each curve's points, with the columns that several curves share written once."""
        columns: list[list[float | None]] = []
        curves = []
        for one in shown:
            x = _rounded(one.x, 9)
            place = columns.index(x) if x in columns else len(columns)
            columns += [x] if place == len(columns) else []
            height = one.y if one.low is None else one.y - one.low
            curves.append({"n": one.name, "c": one.colour, "x": place, "y": _rounded(height, 5), **({"t": _rounded(one.y, 5)} if one.low is not None else {})})  # fmt: skip
        content = {
            "x": columns, "s": curves, "xs": [float(f"{one:.9g}") for one in frame.x], "ys": [float(f"{one:.6g}") for one in frame.y], "xu": self.x_unit,
            "yu": self.y_unit, "xn": self.x_name, "log": self.log, "m": [[mark.x, mark.name] for mark in self.marks if math.isfinite(mark.x)],
        }  # fmt: skip
        return for_script(content)


def for_script(content: Any) -> str:
    """JSON that can stand in a page: no text in it can end the element around it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (
        text.replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def colour_class(colour: int) -> str:
    """Six colours; further curves repeat them with another dash."""
    return f"c{colour % 6}" + (f" d{colour // 6 % 3}" if colour >= 6 else "")


def smoothed(values: Floats) -> Floats:
    """A moving average over about a fiftieth of the points, with weights that fall to both sides, so it does not lag behind."""
    reach = max(len(values) // 100, 2)
    known = np.isfinite(values)
    if known.sum() < 4:
        return values
    weights = np.concatenate((np.arange(1, reach + 2), np.arange(reach, 0, -1))).astype(np.float64)
    sums = np.convolve(np.where(known, values, 0.0), weights)[reach:-reach]
    totals = np.convolve(known.astype(np.float64), weights)[reach:-reach]
    return np.where(known, sums / np.maximum(totals, 1e-12), math.nan)


def averaged(x: Floats, columns: Sequence[Floats], most: int) -> tuple[Floats, list[Floats]]:
    """Means over at most `most` groups of neighbours, for areas that must add up."""
    if len(x) <= most:
        return x, list(columns)
    starts = np.unique(np.linspace(0, len(x), most + 1).astype(np.int64)[:-1])
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, [np.add.reduceat(column, starts) / counts for column in columns]


# ---- Pieces --------------------------------------------------------------------------------------------------------------


def _thinned(one: Series, columns: int) -> Series:
    if one.low is not None or one.kind == "dots":
        return one
    kept = extremes(one.x, one.y, columns)
    return replace(one, x=one.x[kept], y=one.y[kept])


def _only_positive(one: Series) -> Series:
    with np.errstate(invalid="ignore"):
        return replace(one, y=np.where(one.y > 0, one.y, math.nan))


def _x_span(shown: Sequence[Series]) -> Span:
    known = np.concatenate([one.x[np.isfinite(one.x)] for one in shown])
    low, high = float(known.min()), float(known.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _curve(frame: Frame, one: Series) -> str:
    if one.low is not None:
        return between(frame, one.x, one.low, one.y, one.classes)
    if one.kind == "dots":
        return "".join(line(frame, [x], [y], one.classes) for x, y in zip(one.x, one.y, strict=True))
    return line(frame, one.x, one.y, one.classes)


def _band(frame: Frame, band: Band) -> str:
    low, high = max(band.low, frame.y[0]), min(band.high, frame.y[1])
    if high <= low:
        return ""
    top, bottom = float(frame.down(high)), float(frame.down(low))
    return f'<rect class="band {band.kind}" x="0" y="{_units(top)}" width="{WIDTH}" height="{_units(bottom - top)}"/>'


def _mark(frame: Frame, mark: Mark) -> str:
    return f'<path class="mark {mark.kind}" d="M{_units(frame.across(mark.x))} 0v{frame.height:g}"><title>{html.escape(mark.name)}</title></path>'


def _y_axis(frame: Frame, marks: Iterable[Tick]) -> str:
    names = "".join(
        f'<span style="top:{100 * float(frame.down(value)) / frame.height:.1f}%">{html.escape(name)}</span>' for value, name in marks
    )  # fmt: skip
    return f'<div class="y" aria-hidden="true">{names}</div>'


def _x_axis(frame: Frame, marks: Sequence[Tick], name: str) -> str:
    """Every second name may be hidden where the page is narrow."""
    names = "".join(
        f'<span{" class=more" if place % 2 else ""} style="left:{100 * float(frame.across(value)) / frame.width:.1f}%">{html.escape(text)}</span>'
        for place, (value, text) in enumerate(marks)
    )  # fmt: skip
    return f'<div class="x" aria-hidden="true">{names}</div><div class="axis-name" aria-hidden="true">{html.escape(name)}</div>'


def time_ruler(end: float, name: str) -> str:
    """The axis alone, from 0 to this many seconds."""
    frame = Frame(x=(0, end), y=(0, 1), width=WIDTH, left=0, right=0)
    return _x_axis(frame, _duration_ticks(0, end, 6), name)


def _units(value: Any) -> str:
    return f"{float(value):.1f}".removesuffix(".0")


def _rounded(values: Floats, digits: int) -> list[float | None]:
    return [_short(float(f"{one:.{digits}g}")) if math.isfinite(one) else None for one in values.tolist()]


def _short(value: float) -> float:
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _ticks(unit: Unit, span: Span, most: int, *, log: bool = False) -> tuple[list[Tick], str]:
    """Round numbers in the unit that people use, and the name of the unit where the numbers do not have it."""
    low, high = span
    if log:
        return log_ticks(low, high, most=most), ""
    if unit == "bytes":
        size, name = next(
            ((size, name) for size, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")) if high >= size),
            (1, "B"),
        )
        return [(value * size, text) for value, text in ticks(low / size, high / size, most=most)], name
    if unit == "share":
        return [(value / 100, text) for value, text in ticks(low * 100, high * 100, most=most)], "%"
    if unit == "seconds":
        return _duration_ticks(low, high, most), ""
    if unit in ("step", "rows", "rate"):
        whole = unit != "rate"
        return [
            (value, _count(value)) for value, _ in ticks(low, high, most=most) if not whole or value == round(value)
        ], ""
    if max(abs(low), abs(high)) < 0.01:
        return [(value, _scientific(value)) for value, _ in ticks(low, high, most=most)], ""
    return ticks(low, high, most=most), {"celsius": "°C", "watts": "W"}.get(unit, "")


def _duration_ticks(low: float, high: float, most: int) -> list[Tick]:
    if high - low < 3 * _DURATIONS[0]:
        found = ticks(1000 * low, 1000 * high, most=most)
        return [(value / 1000, text if text == "0" else f"{text} ms") for value, text in found]
    step = next((step for step in _DURATIONS if (high - low) / step <= most), _DURATIONS[-1])
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    stride = max(1, -(-(last - first + 1) // (2 * most)))
    return [(place * step, duration(place * step, step)) for place in range(first, last + 1, stride)]


def duration(seconds: float, step: float) -> str:
    """`40 s`, `1 min 30`, `2 h`, `3 d`: as short as ticks this far apart allow."""
    if seconds < 60:
        return f"{seconds:.1f} s" if step < 1 and seconds else f"{seconds:.0f} s" if seconds and step < 60 else "0"
    for size, name, less in ((86400, "d", 3600), (3600, "h", 60), (60, "min", 1)):
        if seconds >= size:
            whole, rest = divmod(round(seconds), size)
            return f"{whole} {name}" + (f" {rest // less:02d}" if rest // less else "")
    return f"{seconds:.0f} s"


def _count(value: float) -> str:
    """`1.5k`, `20k`, `3M`."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if name == 'k' else size):g}{name}"
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def _scientific(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, power = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"
