"""report.html: a sweep on one page that needs nothing else, neither a script nor a network.

    each dataset    its table, with a strip that shows every seed of every method on one scale, and a line for the best
                    trivial baseline: what is not to the right of that line has learnt nothing
    each encoder    folded below it, a row of pictures per method: validation curves, histogram of the scores, ROC

The page is made from result rows, their summaries and the arrays of the runs. All thin lines together take at most
1.1 MB, so those of 500 runs have up to 137 points each and the page 1.5 MB; above about 3,400 runs only the means are drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

from brimful.charts import Span, widened
from brimful.molecules.charts import Run, curve_chart, histogram_chart, roc_chart, strip, strip_header
from brimful.molecules.results import HEADERS, TRIVIAL, Row, Summary, by_dataset
from brimful.units import show_count

MOST_POINTS, FEWEST_POINTS = 200, 20
_LINES_BYTES, _POINT_BYTES = 1_100_000, 8
_SCORE = {"energy": "energy of the head", "classifier": "score", "distance": "distance", "trivial": "score"}

ReadRun = Callable[[str], Run | None]


def sweep_page(
    rows: Sequence[Row],
    summaries: Sequence[Summary],
    read_run: ReadRun,
    *,
    title: str,
    notes: Sequence[str] = (),
    remarks: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """`read_run` gives the arrays of a row's `run`, None where they are gone; `remarks` are sentences on each dataset."""
    points = _points(len(rows))
    tables = by_dataset(summaries)
    sections = [
        _dataset(place, rows, table, read_run, points, (remarks or {}).get(name, ()))
        for place, (name, table) in enumerate(tables.items())
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = f"<h1>{escape(title)}</h1>{_overview(rows, list(tables))}{_contents(list(tables))}{''.join(sections)}{_notes(notes)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{body}</main></body></html>\n'


def _points(runs: int) -> int:
    """Points of a thin line; a run has two of them. 0: too few for a recognisable line."""
    points = min(MOST_POINTS, _LINES_BYTES // (_POINT_BYTES * 2 * max(runs, 1)))
    return points if points >= FEWEST_POINTS else 0


def _overview(rows: Sequence[Row], datasets: Sequence[str]) -> str:
    trained = [row for row in rows if row["kind"] != TRIVIAL]
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
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="notes"><h2>How to read this</h2><ul>{items}</ul></section>' if notes else ""


def _dataset(place: int, rows: Sequence[Row], table: Sequence[Summary], read_run: ReadRun, points: int, remarks: Sequence[str]) -> str:  # fmt: skip
    name = table[0]["dataset"]
    own = [row for row in rows if row["dataset"] == name]
    items = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    pictures = "".join(
        _encoder(
            encoder, [one for one in table if one["encoder"] == encoder], own, read_run, points, is_open=not number
        )
        for number, encoder in enumerate(dict.fromkeys(one["encoder"] for one in table))
    )
    return (
        f'<section id="d{place}"><h2>{escape(name)}</h2><p class="lead">{escape(table[0]["about"])}</p>'
        f"{_table(table, own)}{f'<ul class=remarks>{items}</ul>' if items else ''}{pictures}</section>"
    )


def _table(table: Sequence[Summary], rows: Sequence[Row]) -> str:
    """Methods, a rule, and the trivial baselines."""
    span = _span(rows)
    trivial = next((one["auroc"] for one in table if one["kind"] == TRIVIAL and one["method"] == one["trivial"]), None)  # fmt: skip
    settings = any(one["settings"] for one in table)
    names = ["encoder", "method", *(["settings"] if settings else [])]
    cells = [f'<th scope="col">{name}</th>' for name in names]
    cells.append(f'<th class="strip">{strip_header(span, "AUROC of each seed")}</th>')
    cells += [f'<th scope="col" class="figure">{name}</th>' for _, name in (*HEADERS, ("", "gain"), ("", "seeds"))]  # fmt: skip
    lines = [_line(one, rows, settings, span, trivial) for one in table if one["kind"] != TRIVIAL]
    below = [_line(one, rows, settings, span, trivial) for one in table if one["kind"] == TRIVIAL]
    foot = f'<tbody class="trivial">{"".join(below)}</tbody>' if below else ""
    return f'<div class="wide"><table><thead><tr>{"".join(cells)}</tr></thead><tbody>{"".join(lines)}</tbody>{foot}</table></div>'


def _line(one: Summary, rows: Sequence[Row], settings: bool, span: Span, trivial: float | None) -> str:
    varied = () if one["deterministic"] else _rows_of(one, rows)
    values = [row["auroc"] for row in varied if _is_figure(row["auroc"])]
    names = [one["encoder"], one["method"], *([one["text"]["settings"]] if settings else [])]
    cells = [f"<td>{escape(name)}</td>" for name in names]
    cells.append(f'<td class="strip">{strip(values, one["auroc"], trivial, span)}</td>')
    for key, _ in HEADERS:
        mean, _, sd = one["text"][key].partition(" ± ")
        spread = f'<small>&nbsp;± {sd}</small>' if sd else ""  # fmt: skip
        cells.append(f'<td class="figure{" best" * (key in one["best"])}">{mean}{spread}</td>')
    gain, _, interval = one["text"]["gain"].partition(" (")
    low, high = (one["gain"] if one[end] is None else one[end] for end in ("gain_low", "gain_high"))
    side = "" if one["gain"] is None else " more" if low > 0 else " less" if high < 0 else ""
    shown = f"<small>&nbsp;({escape(interval)}</small>" if interval else ""
    cells.append(f'<td class="figure{side}">{gain}{shown}</td><td class="figure">{escape(one["text"]["seeds"])}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _encoder(encoder: str, table: Sequence[Summary], rows: Sequence[Row], read_run: ReadRun, points: int, *, is_open: bool) -> str:  # fmt: skip
    name = "trivial baselines" if table[0]["kind"] == TRIVIAL else encoder
    pictures = "".join(_pictures(one, rows, read_run, points) for one in table)
    return f"<details{' open' * is_open}><summary>{escape(name)}: curves, scores and ROC</summary>{pictures}</details>"


def _pictures(one: Summary, rows: Sequence[Row], read_run: ReadRun, points: int) -> str:
    """One method: three pictures side by side, or below each other on a phone."""
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
            '<p class="none">no curve: it is validated by its loss on ID molecules</p>'
            if one["kind"] == "classifier"
            else '<p class="none">no curve: nothing is trained</p>'
            if one["deterministic"]
            else '<p class="none">no curve</p>'
        )
    drawn = "".join(f"<figure>{chart}</figure>" for chart in charts if chart)
    missing = f" · the arrays of {show_count(len(own) - len(runs), 'run')} are missing" if len(runs) < len(own) else ""  # fmt: skip
    title = f"<b>{escape(label)}</b> AUROC {escape(one['text']['auroc'])}{missing}"
    return f'<h3>{title}</h3><div class="row">{drawn}</div>'


def _rows_of(one: Summary, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if all(row[key] == one[key] for key in ("dataset", "encoder", "method", "settings"))]


def _span(rows: Sequence[Row]) -> Span:
    return widened(np.array([row["auroc"] for row in rows if _is_figure(row["auroc"])]))


def _is_figure(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))


# Light and dark by the reader's own setting, and legible on a phone. The blue and the orange are Okabe and Ito's, each in
# the shade that reads on its ground.
STYLE = """
:root{color-scheme:light dark;--ground:#fff;--ink:#1b1f24;--soft:#5d6670;--rule:#e4e7eb;--panel:#f7f8fa;
--id:#0072b2;--ood:#d55e00;--line:#0b6e4f;--bar:#a3324f}
@media(prefers-color-scheme:dark){:root{--ground:#14171a;--ink:#e6e9ec;--soft:#9aa4ae;--rule:#2b3138;--panel:#1b1f24;
--id:#56b4e9;--ood:#f0a232;--line:#4cc49a;--bar:#f08ca4}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1140px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.6rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:44px 0 0;overflow-wrap:anywhere}
h3{font-size:.9rem;font-weight:400;color:var(--soft);margin:18px 0 4px;overflow-wrap:anywhere}
h3 b{color:var(--ink);margin-right:8px}
.lead{color:var(--soft);margin:2px 0 12px}
nav{display:flex;flex-wrap:wrap;gap:4px 18px}
a{color:var(--id)}
.wide{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;width:100%;min-width:760px}
th{font-weight:400;color:var(--soft);text-align:left;vertical-align:bottom}
th,td{padding:3px 12px 3px 0;white-space:nowrap;border-bottom:1px solid var(--rule)}
thead th{border-bottom:1px solid var(--soft)}
.trivial tr:first-child td{border-top:2px solid var(--soft)}
.trivial td{color:var(--soft)}
.figure{text-align:right}
.best{font-weight:700}
small{color:var(--soft);font-weight:400;font-size:.92em}
.figure small{display:inline-block;min-width:3.4em;text-align:left}
.more{color:var(--line)}.less{color:var(--bar)}
td.strip,th.strip{padding:0 12px 0 0;min-width:200px;width:26%}
svg{display:block;width:100%;height:auto;overflow:visible}
svg.strip{height:26px}svg.strip.head{height:32px}
svg text{font-size:11px;fill:var(--soft)}
.rule{stroke:var(--rule);fill:none}.axis,.tick{stroke:var(--soft);fill:none}
.thin,.mean,.chance{fill:none;stroke-linejoin:round}
.thin{stroke:var(--line);stroke-opacity:.3;stroke-width:1}
.mean{stroke:var(--line);stroke-width:2.4}
.peak{fill:var(--line);fill-opacity:.55}
.mark{fill:var(--ground);stroke:var(--line);stroke-width:2}
.chance{stroke:var(--soft);stroke-dasharray:3 3;stroke-opacity:.7}
.id{fill:var(--id);stroke:var(--id)}.ood{fill:var(--ood);stroke:var(--ood)}
.id,.ood{fill-opacity:.28;stroke-width:1.5;stroke-linejoin:round}
.seed{fill:var(--line);fill-opacity:.45}
.trivial .mean{stroke:var(--bar)}
.bar{stroke:var(--bar);stroke-width:1.5;stroke-dasharray:4 3}
details{margin:14px 0;padding:8px 14px;background:var(--panel);border-radius:8px}
summary{cursor:pointer;font-weight:600}
.row{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:8px 18px}
figure{margin:0;max-width:420px}
.none{margin:0;font-size:.8rem;color:var(--soft)}
.remarks,.notes{color:var(--soft);font-size:.88rem}
.remarks,.notes ul{padding-left:1.2em;margin:10px 0}
.notes h2{color:var(--ink)}
@media(max-width:760px){.row{grid-template-columns:minmax(0,1fr)}details{padding:8px 10px}main{padding:16px 10px 48px}}
@media print{details{break-inside:avoid}}
""".strip()
