"""The charts of the report: of one run in detail, or of several runs over each other.

Each function gives the HTML of a figure, or nothing where the runs did not record what it shows. Time is the time that a run
was at work, so a night between two sessions takes no space. A colour means a quantity in the charts of one run, and a run in
the charts of several.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.charts import Floats, Span, widened
from brimful.languages import tr
from brimful.report.page.plot import (
    COLUMNS,
    Band,
    Mark,
    Plot,
    Rule,
    Series,
    Unit,
    averaged,
    duration,
    smoothed,
    time_ruler,
)
from brimful.report.page.report_figures import TIME_PARTS, ReportFigures, highest, number
from brimful.report.page.summary import part_names, percent
from brimful.training import events as journal
from brimful.units import DANGER, EDGE, show_bytes, show_rate, show_seconds

GREY = 5
"""The colour for what is beside the point."""
AREAS = 160
"""Groups of steps in a chart of areas."""
MOST_MARKS = 40
MOST_LOGGED = 8
"""Charts of what a task logs."""
OVERLAID = 150
"""Columns of a curve among several runs."""
_LANES = {
    "oom": ("oom",), "grow": ("grow",), "skip": ("skip", "oversized", "thrash"), "eval": ("eval",), "checkpoint": ("checkpoint",),
}  # fmt: skip


def figure(key: str, title: str, body: str, *, note: str = "", wide: bool = False, controls: str = "") -> str:
    """A chart with its title and a sentence on how to read it; nothing without a body."""
    if not body:
        return ""
    about = f"<p>{html.escape(note)}</p>" if note else ""
    return f'<figure class="chart{" wide" * wide}" id="chart-{key}"><figcaption><h3>{html.escape(title)}</h3>{about}</figcaption>{controls}{body}</figure>'


def _choice(key: str, options: Mapping[str, str], name: str) -> str:
    """Buttons of which one is on. They need no script: the page's style hides the views that are not chosen."""
    buttons = "".join(
        f'<label><input type="radio" name="{key}" id="{key}-{value}" value="{value}"{" checked" * (not place)}><span>{html.escape(words)}</span></label>'
        for place, (value, words) in enumerate(options.items())
    )  # fmt: skip
    return f'<span class="choice" role="radiogroup" aria-label="{html.escape(name)}">{buttons}</span>'


def _view(body: str, first: bool, **data: str) -> str:
    attributes = "".join(f' data-{name}="{value}"' for name, value in data.items())
    return f'<div class="view{" first" * first}"{attributes}>{body}</div>'


def time_axis(figures: Sequence[ReportFigures]) -> Span:
    """From 0 to the end of the longest run, in seconds of work."""
    return 0.0, max([one.clock.total_s for one in figures] + [1e-3])


def _with_gaps(one: ReportFigures, x: Floats, *columns: Floats) -> tuple[Floats, ...]:
    """A point without a value where each session but the first begins, so that no line is drawn across the pause."""
    starts = [start for start, _ in one.clock.sessions[1:]]
    found = [(int(later[0]), start) for start in starts if len(later := np.flatnonzero(x > start))]
    places, values = [place for place, _ in found], [start for _, start in found]
    return np.insert(x, places, values), *(np.insert(column, places, math.nan) for column in columns)


def _over_time(one: ReportFigures, name: str, x: Floats, y: Floats, **style: Any) -> Series:
    x, y = _with_gaps(one, x, y)
    return Series(name=name, x=x, y=y, **style)


# ---- Memory --------------------------------------------------------------------------------------------------------------


def memory_chart(one: ReportFigures) -> str:
    """Allocated and reserved peaks of the steps, and others on the card, against the limit and the prediction."""
    limit, predicted = one.limit_bytes, one.predicted_bytes
    others = one.gpu_column("others_bytes")
    series = [
        _over_time(one, tr("reserved"), one.times, one.column("reserved_bytes"), colour=1),
        _over_time(one, tr("allocated"), one.times, one.column("peak_bytes"), colour=0),
    ]
    if (highest(others) or 0) > 0:
        series.append(_over_time(one, tr("held by others"), one.sample_times, others, colour=3))
    rules = [*limit_rule(limit), *_predicted_rule(predicted)]
    marks = [Mark(x=one.clock.seconds(event), name=tr("out of memory"), kind="oom") for event in one.ooms[:MOST_MARKS]]
    marks += _resumes(one)
    bands, keys = zones(limit)
    if marks and one.ooms:
        keys.append(f'<span class="key mark oom">{html.escape(tr("out of memory"))}</span>')
    top = max([value for value in (limit, *(highest(line.y) for line in series)) if value] or [1])
    label = tr("Memory over time: peak {peak} of {limit}.", peak=show_bytes(one.used_bytes), limit=show_bytes(limit))
    plot = Plot(
        label=label, series=series, y_unit="bytes", x_name=tr("run time"), rules=rules, bands=bands, marks=marks, legend_first=keys,
        x_span=time_axis([one]), y_span=(0, top * 1.1), height=240,
    )  # fmt: skip
    body, controls = plot.html(), ""
    if body and one.used is not None and one.used < 0.5:
        close = Plot(
            label=label, series=series, y_unit="bytes", x_name=tr("run time"), marks=marks, x_span=time_axis([one]), height=240,
            rules=[rule for rule in rules if rule.kind == "predicted"],
        )  # fmt: skip
        controls = _choice("memory-scale", {"limit": tr("up to the limit"), "close": tr("closer")}, tr("Scale"))
        body = _view(body, True, scale="limit") + _view(close.html(), False, scale="close")
    note = tr("The highest of each step, over all ranks. Above 85 % of the limit it gets close, above 90 % it is in danger.")  # fmt: skip
    if one.reserved_bytes is None:
        note += tr(" The device does not count reserved memory.")
    return figure("memory", tr("Memory over time"), body, note=note, wide=True, controls=_controls(controls))


def limit_rule(size: float | None, colour: int | None = None) -> list[Rule]:
    return (
        []
        if size is None
        else [Rule(value=size, name=f"{tr('limit')} {show_bytes(size)}", kind="limit", colour=colour)]
    )


def _predicted_rule(size: float | None) -> list[Rule]:
    return [] if size is None else [Rule(value=size, name=f"{tr('predicted')} {show_bytes(size)}", kind="predicted")]


def zones(limit: float | None) -> tuple[list[Band], list[str]]:
    if limit is None:
        return [], []
    bands = [
        Band(low=EDGE * limit, high=DANGER * limit, kind="edge"),
        Band(low=DANGER * limit, high=2 * limit, kind="danger"),
    ]
    keys = [
        f'<span class="key band edge">{html.escape(tr("close to the limit"))}</span>',
        f'<span class="key band danger">{html.escape(tr("in danger"))}</span>',
    ]
    return bands, keys


def _resumes(one: ReportFigures) -> list[Mark]:
    return [Mark(x=start, name=tr("resumed"), kind="resume") for start, _ in one.clock.sessions[1 : MOST_MARKS + 1]]


def _controls(content: str) -> str:
    return f'<div class="controls">{content}</div>' if content else ""


# ---- Learning ------------------------------------------------------------------------------------------------------------


def loss_chart(one: ReportFigures) -> str:
    """Every step, a smooth curve through them, and the evaluations; linear or logarithmic."""
    losses, steps = one.column("loss"), one.step_numbers
    finite = np.where(np.isfinite(losses), losses, math.nan)
    at, evaluated = one.eval_losses
    series = [
        Series(name=tr("each step"), x=steps, y=finite, colour=0, kind="thin"),
        Series(name=tr("smoothed"), x=steps, y=smoothed(finite), colour=0),
    ]
    if len(at):
        series += [
            Series(name=tr("evaluation"), x=at, y=evaluated, colour=1, kind="dots"),
            Series(name=tr("evaluation"), x=at, y=evaluated, colour=1, kind="thin", legend=False),
        ]
    bad = [
        Mark(x=float(step), name=tr("not a number"), kind="bad")
        for step in steps[~np.isfinite(losses) & _recorded(one, "loss")][:MOST_MARKS]
    ]
    keys = [f'<span class="key mark bad">{html.escape(tr("not a number"))}</span>'] if bad else []
    first, last = one.losses or (math.nan, math.nan)
    label = tr("Loss by step, from {first:.4g} to {last:.4g}.", first=first, last=last)
    plot = Plot(
        label=label, series=series, x_unit="step", x_name=tr("step"), marks=bad, legend_first=keys, height=240,
        x_span=_x_span([*series[:1], *series[2:3]]), y_span=_robust([line.y for line in series]),
    )  # fmt: skip
    linear, log = plot.html(), replace(plot, log=True).html()
    body, controls = linear, ""
    if linear and log:
        controls = _choice("loss-scale", {"linear": tr("linear"), "log": tr("logarithmic")}, tr("Scale"))
        body = _view(linear, True, scale="linear") + _view(log, False, scale="log")
    return figure("loss", tr("Loss"), body, wide=True, controls=_controls(controls))


def _recorded(one: ReportFigures, name: str) -> npt.NDArray[np.bool_]:
    """Where a step has this figure at all, be it NaN."""
    return np.array([journal.number(event, name) is not None for event in one.steps], dtype=np.bool_)


def _x_span(series: Sequence[Series]) -> Span | None:
    known = [line.x[np.isfinite(line.x)] for line in series]
    values = np.concatenate(known) if known else np.empty(0)
    if not len(values) or values.max() <= values.min():
        return None
    return min(float(values.min()), 1.0), float(values.max()) * 1.01  # a dot at the end is not cut in half


def _robust(columns: Sequence[Floats]) -> Span | None:
    """Around nearly all values: one spike of a million must not flatten the rest. None if that is all of them."""
    values = np.concatenate(columns)
    values = values[np.isfinite(values)]
    if len(values) < 20:
        return None
    low, high = np.quantile(values, (0.005, 0.995))
    room = 3 * (high - low) + 1e-12
    if values.max() <= high + room and values.min() >= low - room:
        return None
    return widened(values[(values <= high + room) & (values >= low - room)])


def rate_chart(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    return _by_step(figures, names, "lr", "rate", tr("Learning rate"))


def norm_chart(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    note = tr("Of all gradients, before they are clipped.")
    return _by_step(figures, names, "grad_norm", "norm", tr("Gradient norm"), note=note, robust=True)


def logged_charts(figures: Sequence[ReportFigures], names: Sequence[str]) -> list[str]:
    """What the task logs of its steps, such as rewards and margin of `dpo`, with the evaluations that have the same score.

    Names with a common beginning (`rewards/chosen`, `rewards/rejected`) share a chart in the report of one run.
    """
    logged = list(dict.fromkeys(name for one in figures for name in one.logged_names))
    groups: dict[str, list[str]] = {}
    for name in logged:
        groups.setdefault(name.partition("/")[0] if len(figures) == 1 else name, []).append(name)
    some = list(groups.items())[:MOST_LOGGED]
    made = [_logged_chart(figures, names, f"log-{place}", *one) for place, one in enumerate(some, 1)]
    return [one for one in made if one]


def _logged_chart(
    figures: Sequence[ReportFigures], names: Sequence[str], key: str, title: str, logged: Sequence[str]
) -> str:
    series = []
    lines = [(one, name, run) for one, run in zip(figures, names, strict=True) for name in logged]
    for colour, (one, name, run) in enumerate(lines):
        x, y = one.step_numbers, one.logged(name)
        shown = run if len(figures) > 1 else name.partition("/")[2] or tr("smoothed")
        if len(lines) == 1:
            series.append(Series(name=tr("each step"), x=x, y=y, colour=colour, kind="thin"))
        series.append(Series(name=shown, x=x, y=smoothed(y), colour=colour))
        at, scored = one.scores(name)
        if len(at) and len(lines) == 1:
            series.append(Series(name=tr("evaluation"), x=at, y=scored, colour=1, kind="dots"))
    plot = Plot(
        label=title, series=series, x_unit="step", x_name=tr("step"), x_span=_x_span(series), height=170, columns=_columns(figures),
        y_span=_robust([line.y for line in series]) if series else None,
    )  # fmt: skip
    return figure(key, title, plot.html())


def _by_step(figures: Sequence[ReportFigures], names: Sequence[str], column: str, key: str, title: str, *, note: str = "", robust: bool = False) -> str:  # fmt: skip
    series = _curves(figures, names, column, by_step=True, noisy=robust)
    plot = Plot(
        label=title, series=series, x_unit="step", x_name=tr("step"), x_span=_x_span(series), height=170, columns=_columns(figures),
        y_span=_robust([line.y for line in series]) if robust else None,
    )  # fmt: skip
    return figure(key, title, plot.html(), note=note)


def _curves(figures: Sequence[ReportFigures], names: Sequence[str], column: str, *, by_step: bool = False, noisy: bool = True) -> list[Series]:  # fmt: skip
    """One figure of the steps. A single run shows every step behind a smooth curve, several runs the smooth curves alone."""
    series = []
    for place, (one, name) in enumerate(zip(figures, names, strict=True)):
        x, y = one.step_numbers if by_step else one.times, one.column(column)
        smooth = smoothed(y)
        if not by_step:
            x, y, smooth = _with_gaps(one, x, y, smooth)
        if not noisy:
            series.append(Series(name=name, x=x, y=y, colour=place))
        elif len(figures) > 1:
            series.append(Series(name=name, x=x, y=smooth, colour=place))
        else:
            series.append(Series(name=tr("each step"), x=x, y=y, kind="thin"))
            series.append(Series(name=tr("smoothed"), x=x, y=smooth))
    return series


def _columns(figures: Sequence[ReportFigures]) -> int:
    return COLUMNS if len(figures) == 1 else OVERLAID


# ---- Speed ---------------------------------------------------------------------------------------------------------------


def speed_chart(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    """Rows/s of the steps over time."""
    series = _curves(figures, names, "rows_per_s")
    rules, note = [], ""
    if len(figures) == 1:
        planned = number(figures[0].plan, "rows_per_s")
        if planned is not None and math.isfinite(planned):
            rules = [Rule(value=planned, name=f"{tr('planned')} {show_rate(planned)}", kind="predicted")]
            note = tr("The dashed line is what the plan measured with its longest rows.")
    plot = Plot(
        label=tr("Rows per second over time."), series=series, y_unit="rate", x_name=tr("run time"), y_name=tr("rows/s"), rules=rules,
        x_span=time_axis(figures), y_span=_from_zero([line.y for line in series], [rule.value for rule in rules]), columns=_columns(figures),
    )  # fmt: skip
    return figure("speed", tr("Throughput over time"), plot.html(), note=note)


def _from_zero(columns: Sequence[Floats], more: Sequence[float] = ()) -> Span | None:
    values = np.concatenate([*columns, np.asarray(more, dtype=np.float64)])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return 0.0, (float(np.quantile(values, 0.995)) * 1.15 or 1.0)


def split_chart(one: ReportFigures) -> str:
    """Where the wall time of a step goes, stacked."""
    shares, names = one.time_shares, part_names()
    if not shares:
        return ""
    columns = [np.nan_to_num(one.part(name)) for name in TIME_PARTS]
    known = np.isfinite(one.times) & (one.part_sum > 0)
    x, parts = averaged(one.times[known], [column[known] for column in columns], AREAS)
    x, *parts = _with_gaps(one, x, *parts)
    series, low = [], np.zeros(len(x))
    for place, (name, part) in enumerate(zip(TIME_PARTS, parts, strict=True)):
        if shares[name] > 0:
            series.append(Series(name=f"{names[name]} {percent(shares[name])}", x=x, y=low + part, low=low, colour=place, kind="area"))  # fmt: skip
            low = low + part
    plot = Plot(
        label=tr("Time of a step: {parts}.", parts=tr(", ").join(f"{names[name]} {percent(share)}" for name, share in shares.items())),
        series=series, y_unit="seconds", x_name=tr("run time"), x_span=time_axis([one]), y_span=_from_zero([low]),
    )  # fmt: skip
    return figure("split", tr("Where the time of a step goes"), plot.html(), note=tr("Wall time without evaluations and saves, the mean of all ranks."))  # fmt: skip


def split_bars(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    """The same for several runs: a bar for each, with the seconds of a typical step."""
    words, bars = part_names(), []
    for one, name in zip(figures, names, strict=True):
        if not one.time_shares:
            continue
        pieces = "".join(
            f'<span class="c{place}" style="width:{100 * share:.2f}%" title="{html.escape(words[part])} {percent(share)}">{f"<i>{percent(share)}</i>" if share > 0.12 else ""}</span>'
            for place, (part, share) in enumerate(one.time_shares.items()) if share > 0
        )  # fmt: skip
        about = tr(", ").join(f"{words[part]} {percent(share)}" for part, share in one.time_shares.items())
        bars.append(f'<div class="bar-row"><span>{html.escape(name)}</span><div class="bar" role="img" aria-label="{html.escape(about)}">{pieces}</div><span>{show_seconds(one.step_s)}</span></div>')  # fmt: skip
    if not bars:
        return ""
    used = {part for one in figures for part, share in one.time_shares.items() if share > 0}
    keys = "".join(f'<span class="key area c{place}">{html.escape(words[part])}</span>' for place, part in enumerate(TIME_PARTS) if part in used)  # fmt: skip
    return figure("split", tr("Where the time of a step goes"), f'<div class="legend">{keys}</div>{"".join(bars)}', note=tr("Shares of the wall time, and the time of a typical step."))  # fmt: skip


def padding_chart(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    note = tr("Of all positions that are computed. Packing or sorting rows by length lowers it.")
    return _by_time(figures, names, "padding", "share", "padding", tr("Padding"), note=note, span=(0, 1))


def _by_time(
    figures: Sequence[ReportFigures], names: Sequence[str], column: str, unit: Unit, key: str, title: str, *, note: str = "", span: Span | None = None
) -> str:  # fmt: skip
    series = _curves(figures, names, column)
    plot = Plot(
        label=title, series=series, y_unit=unit, x_name=tr("run time"), x_span=time_axis(figures), y_span=span, height=170,
        columns=_columns(figures),
    )  # fmt: skip
    return figure(key, title, plot.html(), note=note)


# ---- The machine ---------------------------------------------------------------------------------------------------------


def gpu_charts(figures: Sequence[ReportFigures], names: Sequence[str]) -> list[str]:
    """Utilisation, temperature and power: a curve for each card, or for each run the mean of its cards."""
    columns: list[tuple[str, Unit, str, str, Span | None]] = [
        ("utilization", "share", "utilization", tr("GPU utilisation"), (0, 1.02)),
        ("temperature_c", "celsius", "temperature", tr("Temperature"), None),
        ("power_w", "watts", "power", tr("Power"), None),
    ]
    return [_sampled(figures, names, column, unit, key, title, span) for column, unit, key, title, span in columns]


def _sampled(figures: Sequence[ReportFigures], names: Sequence[str], column: str, unit: Unit, key: str, title: str, span: Span | None) -> str:  # fmt: skip
    series = []
    for place, (one, name) in enumerate(zip(figures, names, strict=True)):
        ranks = [card.rank for card in one.cards]
        if len(figures) > 1:
            series.append(_over_time(one, name, one.sample_times, smoothed(one.gpu_column(column)), colour=place))
            continue
        for rank in ranks:
            values = one.gpu_column(column, rank)
            kept = np.array([event.get("rank") == rank for event in one.samples], dtype=np.bool_)
            name = tr("rank {rank:,}", rank=rank)
            series.append(_over_time(one, name, one.sample_times[kept], values[kept], colour=rank))
    plot = Plot(
        label=title, series=series, y_unit=unit, x_name=tr("run time"), x_span=time_axis(figures), height=150, columns=_columns(figures),
        y_span=span or _from_zero([line.y for line in series]) if series else None,
    )  # fmt: skip
    return figure(key, title, plot.html())


def host_chart(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    """RAM of the run's processes and of the whole machine, against the limit that binds."""
    one = figures[0]
    series, rules = [], []
    for place, (run, name) in enumerate(zip(figures, names, strict=True)):
        sampled = np.isfinite(run.host_column("tree_bytes")).any()
        x = run.sample_times if sampled else run.times
        own = run.host_column("tree_bytes") if sampled else run.column("host_bytes")
        whole = run.host_column("machine_bytes") if sampled else run.column("machine_bytes")
        kept = np.isfinite(own)
        if len(figures) > 1:
            series.append(_over_time(run, name, x[kept], own[kept], colour=place))
        else:
            series += [
                _over_time(run, tr("this run"), x[kept], own[kept], colour=0),
                _over_time(run, tr("the whole machine"), x[kept], whole[kept], colour=GREY),
            ]
            swap = run.host_column("swap_used_bytes")
            if sampled and (highest(swap) or 0) > 0:
                series.append(_over_time(run, tr("swap used"), x[kept], swap[kept], colour=3))
    if len(figures) == 1:
        limit, predicted = one.host_limit_bytes, one.host_predicted_bytes
        top = max([highest(line.y) or 0 for line in series], default=0)
        if limit is not None and top > 0.2 * limit:
            rules += limit_rule(limit)
        rules += _predicted_rule(predicted)
    values = [line.y for line in series]
    high = max([highest(column) or 0 for column in values] + [rule.value for rule in rules] or [0])
    plot = Plot(
        label=tr("RAM of the host over time."), series=series, y_unit="bytes", x_name=tr("run time"), rules=rules, x_span=time_axis(figures),
        y_span=(0, high * 1.08) if high else None, columns=_columns(figures),
    )  # fmt: skip
    limit = one.host_limit_bytes
    shown = len(figures) > 1 or any(rule.kind == "limit" for rule in rules)
    note = "" if limit is None or shown else tr("The limit is {size}.", size=show_bytes(limit))
    return figure("host", tr("RAM of the host"), plot.html(), note=note)


# ---- Several runs --------------------------------------------------------------------------------------------------------


def losses_chart(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    """Smoothed losses over each other, by steps, rows or time, linear or logarithmic."""
    views, first = [], True
    axes: dict[str, tuple[Unit, str]] = {
        "step": ("step", tr("step")), "rows": ("rows", tr("rows trained")), "seconds": ("seconds", tr("run time")),
    }  # fmt: skip
    for axis, (unit, name) in axes.items():
        series = []
        for place, one in enumerate(figures):
            x = {"step": one.step_numbers, "rows": one.rows_so_far, "seconds": one.times}[axis]
            losses = one.column("loss")
            smooth = smoothed(np.where(np.isfinite(losses), losses, math.nan))
            curve = _with_gaps(one, x, smooth) if axis == "seconds" else (x, smooth)
            series.append(Series(name=names[place], x=curve[0], y=curve[1], colour=place))
            at, evaluated = one.eval_losses
            trained = at > 0
            if trained.any() and len(x):
                places = np.interp(at[trained], one.step_numbers, x)
                series.append(Series(name=tr("{run}, evaluation", run=names[place]), x=places, y=evaluated[trained], colour=place, kind="dots", legend=False))  # fmt: skip
        for scale in ("linear", "log"):
            plot = Plot(
                label=tr("Loss of each run by {axis}.", axis=name), series=series, x_unit=unit, x_name=name, height=260, columns=OVERLAID,
                y_span=_robust([line.y for line in series]), log=scale == "log", x_span=_x_span(series),
            )  # fmt: skip
            views.append(_view(plot.html(), first, x=axis, scale=scale) if plot.html() else "")
            first = False
    if not any(views):
        return ""
    controls = _choice("loss-x", {axis: name for axis, (_, name) in axes.items()}, tr("Horizontal axis"))
    controls += _choice("loss-scale", {"linear": tr("linear"), "log": tr("logarithmic")}, tr("Scale"))
    note = tr("Smoothed; dots are evaluations.") if any(one.evals for one in figures) else tr("Smoothed.")
    return figure("loss", tr("Loss"), "".join(views), note=note, wide=True, controls=_controls(controls))


def memories_chart(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    """Peaks of the steps over each other; reserved bytes where the run has them."""
    series, limits = [], {one.limit_bytes for one in figures}
    for place, one in enumerate(figures):
        column = "peak_bytes" if one.reserved_bytes is None else "reserved_bytes"
        series.append(_over_time(one, names[place], one.times, one.column(column), colour=place))
    if len(limits) == 1:
        rules = limit_rule(figures[0].limit_bytes)
    else:
        rules = [rule for place, one in enumerate(figures) for rule in limit_rule(one.limit_bytes, colour=place)]
    bands, keys = zones(figures[0].limit_bytes if len(limits) == 1 else None)
    top = max([value for value in (*limits, *(highest(line.y) for line in series)) if value] or [1])
    plot = Plot(
        label=tr("Memory of each run over time."), series=series, y_unit="bytes", x_name=tr("run time"), rules=rules, bands=bands,
        x_span=time_axis(figures), y_span=(0, top * 1.1), columns=OVERLAID, legend_first=keys,
    )  # fmt: skip
    note = tr("The peak of each step: reserved memory where the device counts it.")
    return figure("memory", tr("Memory over time"), plot.html(), note=note)


# ---- The timeline --------------------------------------------------------------------------------------------------------


def timeline(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    """When the run trained, ran out of memory, evaluated and saved: a lane for each."""
    several, (_, end) = len(figures) > 1, time_axis(figures)
    titles = {
        "oom": tr("out of memory"), "grow": tr("micro-batch restored"), "skip": tr("skipped or set aside"), "eval": tr("evaluation"),
        "checkpoint": tr("checkpoint"),
    }  # fmt: skip
    lanes = []
    for one, name in zip(figures, names, strict=True):
        bars = "".join(
            f'<rect class="session" x="{100 * start / end:.2f}%" width="{max(100 * (stop - start) / end, 0.3):.2f}%" y="5" height="10" rx="2"><title>{html.escape(duration(stop - start, 1))}</title></rect>'
            for start, stop in one.clock.sessions
        )  # fmt: skip
        lanes.append(_lane(name if several else tr("running"), bars, heading=several))
        for lane, kinds in _LANES.items():
            events = one.run.of_kind(*kinds)
            if events:
                lanes.append(_lane(titles[lane], _dots(one, events, lane, end)))
    body = "".join(lanes)
    ruler = time_ruler(end, tr("run time"))
    return figure(
        "timeline", tr("Timeline"), f'<div class="lanes">{body}{ruler}</div>' if end > 1e-3 else "", wide=True
    )


def _lane(name: str, content: str, *, heading: bool = False) -> str:
    return f'<div class="lane{" heading" * heading}"><span>{html.escape(name)}</span><svg height="20" aria-hidden="true">{content}</svg></div>'


def _dots(one: ReportFigures, events: Sequence[Mapping[str, Any]], lane: str, end: float) -> str:
    """One for each event, but not two on one place."""
    places: dict[str, tuple[Mapping[str, Any], int]] = {}
    for event in events:
        share = one.clock.seconds(event) / end
        if math.isfinite(share):
            place = f"{round(200 * share) / 2:g}"
            places[place] = (event, places.get(place, (event, 0))[1] + 1)
    return "".join(
        f'<circle class="{lane}" cx="{place}%" cy="10" r="4.5"><title>{_step_words(event)}{f" ({count} ×)" if count > 1 else ""}</title></circle>'
        for place, (event, count) in places.items()
    )  # fmt: skip


def _step_words(event: Mapping[str, Any]) -> str:
    return html.escape(tr("step {step:,}", step=event["step"])) if isinstance(event.get("step"), int) else ""
