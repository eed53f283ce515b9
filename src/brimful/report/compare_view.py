"""A comparison in the terminal: the verdict, the settings that differ, then what each run did. Two runs fit 80 columns.

Settings that make it another experiment are yellow. Where a run was asked for something else than it got, both are shown.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.languages import say, tr, translate
from brimful.report.compare import Comparison, Side, rows_sentence, show_ratio
from brimful.report.run_settings import Difference, LossPoint, Setting, show_setting
from brimful.report.wrapped_text import WrappedText
from brimful.units import show_bytes, show_rate, show_seconds, zone

ZONE_STYLE = {"safe": "", "edge": "yellow", "danger": "red"}
MOST_SETTINGS = 24
"""Lines of settings; the rest is counted."""
NONE = "–"


def comparison_view(comparison: Comparison) -> RenderableType:
    """All of it, the verdict first."""
    parts: list[RenderableType] = [*_verdict(comparison), Text(), _legend(comparison), Text(), *_settings(comparison)]
    parts += [_heading(tr("What they did")), _figures(comparison), *_footnotes(comparison)]
    return Group(*parts)


def _footnotes(comparison: Comparison) -> Iterator[Text]:
    """Which steps the figures of the table are taken from, and what they are shares of."""
    if comparison.timed_up_to is not None:
        yield Text(tr("speed, waiting, padding and MFU are those of the steps up to {step:,}, which all have", step=comparison.timed_up_to), style="dim")  # fmt: skip
    if comparison.peaks_flops and any(one["mfu"] is not None for one in comparison.figures):
        peaks = tr(", ").join(f"{peak / 1e12:.3g}" for peak in comparison.peaks_flops)
        yield WrappedText(tr("MFU is a share of the peak that each run measured when it began, {peaks} TFLOP/s, so it cannot be compared", peaks=peaks), style="dim")  # fmt: skip
    counts = sorted({count for point in comparison.points for count in point.steps})
    if counts and counts[-1] > 1:
        several = tr("{least:,} to {most:,}", least=counts[0], most=counts[-1])
        steps = f"{counts[0]:,}" if len(counts) == 1 else several
        yield Text(tr("a loss is the mean of the last {steps} steps up to there", steps=steps), style="dim")


def _verdict(comparison: Comparison) -> Iterator[Text]:
    for pair in comparison.pairs:
        text = tr("; ").join(one.shown() for one in pair.verdict)
        label = "" if len(comparison.pairs) == 1 else f"{pair.side.label}  "
        yield WrappedText.assemble(
            label, (text[:1].upper() + text[1:], "bold yellow" if pair.is_other else "bold green")
        )


def _legend(comparison: Comparison) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for side in comparison.sides:
        run = side.run
        facts = [str(run.request.get("task") or run.plan.get("task") or tr("no plan yet"))]
        facts += [translate(str(run.plan["device_name"]))] if run.plan.get("device_name") else []
        facts.append(tr("{done} of {steps} steps", done=f"{run.last_step:,}", steps=f"{run.steps_in_all or 0:,}") if run.steps else tr("no steps yet"))  # fmt: skip
        facts += [] if comparison.one_run else [tr(run.record.state_label)]
        grid.add_row(side.label, Text.assemble(*_title(side), ("  " + tr(", ").join(facts), "dim")))
    return grid


def _title(side: Side) -> Iterator[str]:
    yield str(side.run.record.root)
    if side.part is not None:
        yield f"{tr(', ')}{side.part.shown()}"


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _table(comparison: Comparison, *, change: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold cyan")
    table.add_column("", style="dim", overflow="fold", max_width=24)
    for side in comparison.sides:
        table.add_column(side.label, justify="right", overflow="fold")
    if change:
        table.add_column("", overflow="fold")
    return table


# ---- Settings ----------------------------------------------------------------------------------------------------------


def _settings(comparison: Comparison) -> Iterator[RenderableType]:
    if not comparison.differences:
        if all(side.run.plan for side in comparison.sides):
            yield Text(tr("All settings are the same."))
            yield Text()
        return
    yield _heading(tr("Settings that differ"))
    table = _table(comparison, change=False)
    for difference in comparison.differences[:MOST_SETTINGS]:
        style = "yellow" if difference.experiment else ""
        values = [Text(text, style=style) for text in _values(difference)]
        table.add_row(Text(translate(difference.name.replace("_", " ")), style=style or "dim"), *values)
    yield table
    if len(comparison.differences) > MOST_SETTINGS:
        yield Text(tr("and {count} more", count=len(comparison.differences) - MOST_SETTINGS), style="dim")
    if any(one.experiment for one in comparison.differences):
        yield Text(tr("yellow: makes it another experiment"), style="yellow")
    yield Text()


def _values(difference: Difference) -> list[str]:
    """Paths are shortened to their names where these differ too."""
    values = [None if one is None else one.effective for one in difference.settings]
    paths = list(dict.fromkeys(value for value in values if isinstance(value, str) and "/" in value))
    short = len({Path(path).name for path in paths}) == len(paths)
    return [
        _value(difference.name, one, short=short and one is not None and one.effective in paths)
        for one in difference.settings
    ]


def _value(name: str, setting: Setting | None, *, short: bool) -> str:
    if setting is None:
        return NONE
    shown = Path(setting.effective).name if short else translate(show_setting(name, setting.effective))
    if setting.requested is not None and str(setting.requested) != str(setting.effective):
        return tr("{shown} (asked: {value})", shown=shown, value=show_setting(name, setting.requested))
    return shown


# ---- Figures -----------------------------------------------------------------------------------------------------------


def _figures(comparison: Comparison) -> Table:
    """A line for each figure that some run has."""
    two = len(comparison.sides) == 2
    table = _table(comparison, change=two)
    figures = comparison.figures
    for name, key, show, change in _LINES:
        values = [one.get(key) for one in figures]
        if key == "mfu" and comparison.peaks_flops:
            change = _unknown
        if any(value is not None for value in values):
            _row(
                table,
                tr(name),
                [_show(show, value) for value in values],
                change(*values) if two and None not in values else "",
                two,
            )
    _memory_rows(table, comparison.sides, two)
    for point in comparison.points:
        _loss_row(table, point, two)
    _evaluation_rows(table, figures, two)
    return table


def _show(show: Callable[[Any], str], value: Any) -> Text:
    return Text(NONE if value is None else show(value))


def _row(table: Table, name: str, values: Sequence[Text], change: str, two: bool) -> None:
    table.add_row(Text(name), *values, *([Text(change, style="dim")] if two else []))


def _times(one: float, two: float) -> str:
    """`× 1.31`."""
    if not one or not two or not math.isfinite(two / one):
        return ""
    return f"× {two / one:.2f}" if two / one < 9.95 else f"× {show_ratio(two / one)}"


def _less(one: float, two: float) -> str:
    """`−2.1 GiB`."""
    if abs(two - one) < 0.005 * max(one, two, 1):
        return "="
    return f"{'+' if two > one else '−'}{show_bytes(abs(two - one))}"


def _points(one: float, two: float) -> str:
    """Of shares, in percentage points."""
    sign = "+" if two > one else "−"
    return "=" if abs(two - one) < 0.005 else tr("{sign}{share} pp", sign=sign, share=f"{100 * abs(two - one):.0f}")


def _plus(one: float, two: float) -> str:
    return "=" if one == two else f"{'+' if two > one else '−'}{abs(two - one):.3g}"


def _nothing(one: Any, two: Any) -> str:
    return "=" if one == two else ""


def _unknown(one: Any, two: Any) -> str:
    return ""


def _same_rows(one: list[list[int]], two: list[list[int]]) -> str:
    """The first step of a part of a run does not count."""
    return "=" if one[0][1:] + one[1:] == two[0][1:] + two[1:] else ""


_LINES: tuple[tuple[str, str, Callable[[Any], str], Callable[[Any, Any], str]], ...] = (
    ("updates", "steps", lambda value: f"{value:,}", _nothing),
    ("rows a step", "row_changes", lambda value: say("{rows}", rows=rows_sentence(value)).shown(), _same_rows),
    ("s/step", "step_s", lambda value: f"{value:.3g}", _times),
    ("rows/s", "rows_per_s", show_rate, _times),
    ("an epoch takes", "epoch_s", show_seconds, _times),
    ("waiting for rows", "data_share", lambda value: f"{value:.1%}", _points),
    ("padding", "padding", lambda value: f"{value:.1%}", _points),
    ("MFU", "mfu", lambda value: f"{value:.1%}", _points),
)


def _memory_rows(table: Table, sides: Sequence[Side], two: bool) -> None:
    """Peaks against the limit of each run, in the colour of their zone."""
    for name, key in (("peak, allocated", "peak_bytes"), ("peak, reserved", "reserved_bytes")):
        peaks = [side.run.highest(key) for side in sides]
        if any(peak is not None for peak in peaks):
            values = [_with_share(side, peak, coloured=key == "reserved_bytes" or side.run.highest("reserved_bytes") is None) for side, peak in zip(sides, peaks, strict=True)]  # fmt: skip
            _row(table, tr(name), values, _change_of_bytes(peaks, two), two)
    hosts = [side.run.host_bytes for side in sides]
    if any(host is not None for host in hosts):
        _row(table, tr("host RAM"), [_show(show_bytes, host) for host in hosts], _change_of_bytes(hosts, two), two)
    ooms = [side.run.ooms for side in sides]
    if any(side.run.steps for side in sides):
        _row(table, tr("OOMs survived"), [Text(f"{count:,}", style="yellow" if count else "") for count in ooms], _nothing(*ooms) if two else "", two)  # fmt: skip


def _with_share(side: Side, peak: int | None, *, coloured: bool) -> Text:
    limit = side.run.limit_bytes
    if peak is None:
        return Text(NONE)
    if not limit:
        return Text(show_bytes(peak))
    return Text(f"{show_bytes(peak)} ({peak / limit:.0%})", style=ZONE_STYLE[zone(peak / limit)] if coloured else "")


def _change_of_bytes(values: Sequence[int | None], two: bool) -> str:
    return _less(values[0], values[1]) if two and values[0] is not None and values[1] is not None else ""


def _loss_row(table: Table, point: LossPoint, two: bool) -> None:
    template = "loss at step {at}" if point.by == "step" else "loss after {at} rows"
    values = [Text(NONE if loss is None else _loss(loss), style="" if loss is None or math.isfinite(loss) else "red") for loss in point.losses]  # fmt: skip
    differs = point.differs(1) if two else None
    first, second = point.losses[0], point.losses[-1]
    change = ""
    if differs is False:
        change = "=" if first == second else tr("≈ within noise")
    elif differs and first is not None and second is not None:
        change = _plus(first, second)
    _row(table, tr(template, at=f"{point.at:,}"), values, change, two)


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "NaN"


def _evaluation_rows(table: Table, figures: Sequence[dict[str, Any]], two: bool) -> None:
    if any(one["evaluations"] for one in figures):
        for name, key in (("evaluation loss, best", "best_eval_loss"), ("evaluation loss, last", "last_eval_loss")):
            values = [one[key] for one in figures]
            change = _plus(*values) if two and None not in values else ""
            _row(table, tr(name), [_show(_loss, value) for value in values], change, two)
    for name in dict.fromkeys(name for one in figures for name in one["scores"]):
        values = [one["scores"].get(name) for one in figures]
        _row(
            table,
            tr("evaluation {score}, last", score=name),
            [_show(lambda value: f"{value:.4g}", value) for value in values],
            "",
            two,
        )
