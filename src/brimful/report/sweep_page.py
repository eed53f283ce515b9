"""report.html: a sweep on one page that needs nothing else, neither a script nor a network.

    each dataset    its table, with a strip that shows every seed of every method on one scale, and the best trivial
                    baseline as a line through it: what does not lie to the right of that line has learnt nothing
    each encoder    folded below it, a row of pictures a method: validation curves, histogram of the scores, ROC

The page is made from result rows, their summaries and the arrays of the runs, and from nothing else. All thin lines
together take at most 1.1 MB, so those of 500 runs have up to 137 points each and the page 1.5 MB; from about 3,400 runs
on only the means are drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from brimful.report.svg import Span, widened
from brimful.report.sweep_charts import Run, curve_chart, histogram_chart, roc_chart, strip, strip_head
from brimful.report.sweep_style import STYLE
from brimful.units import show_count

MOST_POINTS, FEWEST_POINTS = 200, 20
_LINES_BYTES, _POINT_BYTES = 1_100_000, 8
_FIGURES = (("auroc", "AUROC ↑"), ("aupr", "AUPR ↑"), ("fpr95", "FPR95 ↓"))
_SCORE = {"energy": "energy of the head", "classifier": "score", "distance": "distance", "trivial": "score"}

Row = Mapping[str, Any]
Summary = Mapping[str, Any]
Read = Callable[[str], Run | None]


def sweep_page(
    rows: Sequence[Row],
    summaries: Sequence[Summary],
    read_run: Read,
    *,
    title: str,
    notes: Sequence[str] = (),
    remarks: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """`read_run` gives the arrays of a row's `run`, None where they are gone; `remarks` are sentences on each dataset."""
    points = _points(len(rows))
    datasets = list(dict.fromkeys(one["dataset"] for one in summaries))
    sections = [
        _dataset(name, rows, [one for one in summaries if one["dataset"] == name], read_run, points, (remarks or {}).get(name, ()))
        for name in datasets
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = f"<h1>{escape(title)}</h1>{_overview(rows, datasets)}{_contents(datasets)}{''.join(sections)}{_notes(notes)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{body}</main></body></html>\n'


def _points(runs: int) -> int:
    """Of a thin line; two of them belong to a run. None at all rather than lines of a few corners."""
    points = min(MOST_POINTS, _LINES_BYTES // (_POINT_BYTES * 2 * max(runs, 1)))
    return points if points >= FEWEST_POINTS else 0


def _overview(rows: Sequence[Row], datasets: Sequence[str]) -> str:
    trained = [row for row in rows if row["kind"] != "trivial"]
    counts = [
        show_count(len(trained), "run"),
        show_count(len(datasets), "dataset"),
        show_count(len({row["encoder"] for row in trained}), "encoder"),
        show_count(len({row["method"] for row in trained}), "method"),
        show_count(len({row["seed"] for row in trained}), "seed"),
    ]
    return f'<p class="lead">{" · ".join(counts)}</p>'


def _contents(datasets: Sequence[str]) -> str:
    if len(datasets) < 2:
        return ""
    links = " ".join(f'<a href="#d{place}">{escape(name)}</a>' for place, name in enumerate(datasets))
    return f"<nav>{links}</nav>"


def _notes(notes: Sequence[str]) -> str:
    told = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="notes"><h2>How to read this</h2><ul>{told}</ul></section>' if notes else ""


def _dataset(name: str, rows: Sequence[Row], table: Sequence[Summary], read_run: Read, points: int, remarks: Sequence[str]) -> str:  # fmt: skip
    own = [row for row in rows if row["dataset"] == name]
    place = list(dict.fromkeys(row["dataset"] for row in rows)).index(name)
    told = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    pictures = "".join(
        _encoder(encoder, [one for one in table if one["encoder"] == encoder], own, read_run, points, opened=not number)
        for number, encoder in enumerate(dict.fromkeys(one["encoder"] for one in table))
    )
    return (
        f'<section id="d{place}"><h2>{escape(name)}</h2><p class="lead">{escape(table[0]["about"])}</p>'
        f"{_table(table, own)}{f'<ul class=remarks>{told}</ul>' if told else ''}{pictures}</section>"
    )


def _table(table: Sequence[Summary], rows: Sequence[Row]) -> str:
    """Methods, a rule, and the trivial baselines."""
    span = _span(rows)
    trivial = next((one["auroc"] for one in table if one["kind"] == "trivial" and one["method"] == one["trivial"]), None)  # fmt: skip
    settings = any(one["settings"] for one in table)
    heads = ["encoder", "method", *(["settings"] if settings else [])]
    cells = [f'<th scope="col">{name}</th>' for name in heads]
    cells.append(f'<th class="strip">{strip_head(span, "AUROC of each seed")}</th>')
    cells += [f'<th scope="col" class="figure">{name}</th>' for _, name in (*_FIGURES, ("", "beyond trivial"), ("", "seeds"))]  # fmt: skip
    lines = [_line(one, rows, settings, span, trivial) for one in table if one["kind"] != "trivial"]
    below = [_line(one, rows, settings, span, trivial) for one in table if one["kind"] == "trivial"]
    foot = f'<tbody class="trivial">{"".join(below)}</tbody>' if below else ""
    return f'<div class="wide"><table><thead><tr>{"".join(cells)}</tr></thead><tbody>{"".join(lines)}</tbody>{foot}</table></div>'


def _line(one: Summary, rows: Sequence[Row], settings: bool, span: Span, trivial: float | None) -> str:
    varied = () if one["deterministic"] else _rows_of(one, rows)
    values = [row["auroc"] for row in varied if _is_figure(row["auroc"])]
    names = [one["encoder"], one["method"], *([one["text"]["settings"]] if settings else [])]
    cells = [f"<td>{escape(name)}</td>" for name in names]
    cells.append(f'<td class="strip">{strip(values, one["auroc"], trivial, span)}</td>')
    for key, _ in _FIGURES:
        mean, _, sd = one["text"][key].partition(" ± ")
        spread = f'<small>&nbsp;± {sd}</small>' if sd else ""  # fmt: skip
        cells.append(f'<td class="figure{" best" * (key in one["best"])}">{mean}{spread}</td>')
    gain, _, interval = one["text"]["gain"].partition(" (")
    low, high = (one["gain"] if one[end] is None else one[end] for end in ("gain_low", "gain_high"))
    side = "" if one["gain"] is None else " more" if low > 0 else " less" if high < 0 else ""
    shown = f"<small>&nbsp;({escape(interval)}</small>" if interval else ""
    cells.append(f'<td class="figure{side}">{gain}{shown}</td><td class="figure">{escape(one["text"]["seeds"])}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _encoder(encoder: str, table: Sequence[Summary], rows: Sequence[Row], read_run: Read, points: int, *, opened: bool) -> str:  # fmt: skip
    name = "trivial baselines" if table[0]["kind"] == "trivial" else encoder
    pictures = "".join(_pictures(one, rows, read_run, points) for one in table)
    return f"<details{' open' * opened}><summary>{escape(name)}: curves, scores and ROC</summary>{pictures}</details>"


def _pictures(one: Summary, rows: Sequence[Row], read_run: Read, points: int) -> str:
    """One method: three pictures side by side, one below the other on a phone."""
    own = _rows_of(one, rows)
    own = own[:1] if one["deterministic"] else own
    runs = [run for row in own if row["run"] and (run := read_run(row["run"])) is not None]
    label = " ".join(filter(None, (one["method"], one["settings"])))
    charts = [
        curve_chart(runs, points, label),
        histogram_chart(runs, label, _SCORE.get(one["kind"], "score")),
        roc_chart(runs, one["positive"], one["fpr95"], points, label),
    ]
    if runs and not charts[0]:
        charts[0] = (
            '<p class="none">no curve: it is judged by its loss on ID molecules</p>'
            if one["kind"] == "classifier"
            else '<p class="none">no curve: nothing is trained</p>'
            if one["deterministic"]
            else '<p class="none">no curve</p>'
        )
    drawn = "".join(f"<figure>{chart}</figure>" for chart in charts if chart)
    missing = f" · the arrays of {show_count(len(own) - len(runs), 'run')} are not there" if len(runs) < len(own) else ""  # fmt: skip
    told = f"<b>{escape(label)}</b> AUROC {escape(one['text']['auroc'])}{missing}"
    return f'<h3>{told}</h3><div class="row">{drawn}</div>'


def _rows_of(one: Summary, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if all(row[key] == one[key] for key in ("dataset", "encoder", "method", "settings"))]


def _span(rows: Sequence[Row]) -> Span:
    return widened(np.array([row["auroc"] for row in rows if _is_figure(row["auroc"])]))


def _is_figure(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))
