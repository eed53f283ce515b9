"""Charts of what planning measured: the memory model against its probes, and throughput against the micro-batch.

A plan is read as JSON here, because its own class needs torch, which takes seconds to import. The memory model does not.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from brimful.languages import tr, translate
from brimful.memory.model import MemoryModel
from brimful.report.page.plot import Mark, Plot, Series
from brimful.report.page.report_figures import ReportFigures, highest, is_number, number
from brimful.report.page.run_charts import figure, limit_rule, zones
from brimful.report.page.summary import percent
from brimful.report.run_figures import objects
from brimful.units import is_whole

POINTS = 120
"""Of the model's curve."""
_WRONG = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""What a memory model of another format ends in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFit:
    """A size that was measured, and what the model says of it."""

    rows: int
    shape: tuple[int, ...]
    peak_bytes: float
    model_bytes: float


def probe_fits(plan: Mapping[str, Any]) -> list[ProbeFit]:
    """Of every probe, those of the planned lengths first; none if the plan has no memory model that can be read."""
    model = _memory_model(plan)
    if model is None:
        return []
    fits = []
    try:
        for probe in model.probes:
            phases = [model.phases[name] for name in probe.phases if name in model.phases]
            fitted = model.margin * max(phase((probe.rows, *probe.shape)) for phase in phases)
            if (
                is_whole(probe.rows, 1)
                and is_number(probe.peak_bytes)
                and probe.peak_bytes > 0
                and math.isfinite(fitted)
            ):
                fits.append(
                    ProbeFit(rows=probe.rows, shape=probe.shape, peak_bytes=probe.peak_bytes, model_bytes=fitted)
                )
        planned = _shape(plan)
        return sorted(fits, key=lambda fit: (fit.shape != planned, fit.shape, fit.rows))
    except _WRONG:
        return []


def _memory_model(plan: Mapping[str, Any]) -> MemoryModel | None:
    content = plan.get("memory_model")
    try:
        return MemoryModel.from_json(content) if isinstance(content, dict) and content else None
    except _WRONG:
        return None


def _shape(plan: Mapping[str, Any]) -> tuple[int, ...] | None:
    shape = plan.get("shape")
    return tuple(shape) if isinstance(shape, list) and all(is_whole(length, 0) for length in shape) else None


def model_chart(one: ReportFigures) -> str:
    """The memory model as a curve over the rows of a micro-batch, and the probes that it was fitted to."""
    plan, shape, model = one.plan, _shape(one.plan), _memory_model(one.plan)
    fits = [fit for fit in probe_fits(plan) if fit.shape == shape]
    if len(fits) < 2 or shape is None or model is None:
        return ""
    chosen, step_rows = number(plan, "micro_batch"), _rows_of_a_step(plan)
    largest = max(*(fit.rows for fit in fits), int(chosen or 1))
    most = min(math.ceil(1.12 * largest), step_rows or largest)
    rows = np.unique(np.linspace(1, most, min(most, POINTS)).round())
    try:
        sizes = [model.peak_bytes(int(count), shape, whole=count == step_rows) for count in rows]
    except _WRONG:
        return ""
    curve = np.array(sizes, dtype=np.float64)
    peaks = np.array([fit.peak_bytes for fit in fits], dtype=np.float64)
    series = [
        Series(name=tr("the model"), x=rows, y=curve),
        Series(name=tr("measured"), x=np.array([fit.rows for fit in fits], dtype=np.float64), y=peaks, colour=1, kind="dots"),
    ]  # fmt: skip
    high, limit = highest(np.concatenate((curve, peaks))) or 1.0, one.limit_bytes
    limit = limit if limit is not None and high > 0.4 * limit else None  # else it is far above the chart
    bands, _ = zones(limit)
    note = tr("Allocated memory by the rows of a micro-batch.")
    if shape:
        lengths = "+".join(map(str, shape))
        note = tr("Allocated memory by the rows of a micro-batch, for rows of {lengths}.", lengths=lengths)
    if is_number(model.error):
        note += tr(" On sizes it had not seen, the model was off by at most {error}.", error=percent(model.error))
    marks, keys = _chosen_mark(chosen)
    plot = Plot(
        label=note, series=series, x_unit="rows", y_unit="bytes", x_name=tr("rows of a micro-batch"), rules=limit_rule(limit), bands=bands,
        marks=marks, legend_first=keys, x_span=(0, 1.03 * float(rows[-1])), y_span=(0, max(high, limit or 0) * 1.1),
    )  # fmt: skip
    return figure("model", tr("Fit of the memory model"), plot.html(), note=note)


def _rows_of_a_step(plan: Mapping[str, Any]) -> int | None:
    """Of the process with the most; a micro-batch has no more."""
    deal = plan.get("deal")
    return max((rows for rows in deal if is_whole(rows, 1)), default=None) if isinstance(deal, list) else None


def _chosen_mark(rows: float | None) -> tuple[list[Mark], list[str]]:
    if rows is None or not math.isfinite(rows):
        return [], []
    key = f'<span class="key mark chosen">{html.escape(tr("chosen"))}</span>'
    return [Mark(x=rows, name=tr("chosen"), kind="chosen")], [key]


def throughput_chart(figures: Sequence[ReportFigures], names: Sequence[str]) -> str:
    """Rows/s by the size of a micro-batch, as the search timed them: a curve for each setting, or for each run."""
    series, several, chosen_rows = list[Series](), len(figures) > 1, None
    for place, (one, name) in enumerate(zip(figures, names, strict=True)):
        tried = [row for row in objects(one.plan, "tried") if _rate(row) and is_number(row.get("micro_batch"))]
        chosen = next((row for row in tried if row.get("chosen") is True), None)
        for colour, (setting, group) in enumerate(groupby(sorted(tried, key=setting_name), key=setting_name)):
            if several and chosen is not None and setting != setting_name(chosen):
                continue
            x, y = np.array(sorted((float(row["micro_batch"]), _rate(row) or 0.0) for row in group)).T
            line = Series(name=name if several else setting, x=x, y=y, colour=place if several else colour)
            series += [line, replace(line, kind="dots", legend=False)]
        if chosen is not None and not several:
            chosen_rows = number(chosen, "micro_batch")
    if sum(len(line.x) for line in series) < 4:  # each point is there twice
        return ""
    note = tr("Measured while planning, before the run.")
    if several:
        note += tr(" Of each run the setting that it chose.")
    marks, keys = _chosen_mark(chosen_rows)
    top, right = (max(float(values.max()) for values in columns) for columns in zip(*((line.y, line.x) for line in series), strict=True))  # fmt: skip
    plot = Plot(
        label=tr("Rows per second by the rows of a micro-batch."), series=series, x_unit="rows", y_unit="rate", x_name=tr("rows of a micro-batch"),
        y_name=tr("rows/s"), x_span=(0, 1.06 * right), y_span=(0, 1.08 * top), marks=marks, legend_first=keys,
    )  # fmt: skip
    return figure("throughput", tr("Throughput by micro-batch"), plot.html(), note=note)


def _rate(row: Mapping[str, Any]) -> float | None:
    rate = number(row, "data_rows_per_s") or number(row, "rows_per_s")
    return rate if rate is not None and math.isfinite(rate) and rate > 0 else None


def setting_name(row: Mapping[str, Any]) -> str:
    """As `Setting` names itself, `packed bf16 compiled`, in the user's language."""
    setting = row.get("setting")
    if not isinstance(setting, Mapping):
        return "–"
    words = [str(setting[name]) for name in ("layout", "precision") if name in setting]
    for word, value in (("compiled", setting.get("compile")), ("checkpointed", setting.get("checkpointing"))):
        if value not in ("off", None):
            words.append(word if value == "on" else f"{word} {value}")
    return translate(" ".join(words))
