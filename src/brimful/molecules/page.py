"""report.html: a sweep on one page that needs nothing else, neither a script nor a network.

    each dataset    its table, with a strip that shows every seed of every method on one scale, and the best trivial
                    baseline as a line through it: what does not lie to the right of that line has learnt nothing
    each encoder    folded below it, a row of pictures a method: validation curves, histogram of the scores, ROC

The page is made from result rows, their summaries and the arrays of the runs, and from nothing else. All thin lines
together take at most 1.1 MB, so those of 500 runs have up to 137 points each and the page 1.5 MB; from about 3,400 runs
on only the means are drawn.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from brimful.molecules.svg import Floats, Frame, Span, area, axes, dot, drawing, line, text, thinned, ticks, widened
from brimful.units import show_count

# The pictures of a sweep: validation curves, histograms of the scores, ROC curves, and a strip of the seeds.
#
# In-distribution molecules are blue and out-of-distribution ones orange in every picture, a pair that the colour-blind tell
# apart and that differs in lightness as well; lines of single seeds are thin, their mean is thick.


BINS = 36
_TAIL = 0.005
"""The share of scores on each end that lies in the outermost bars, so that one far molecule does not flatten the rest."""
_GRID = 101

Run = Mapping[str, Floats]


def curve_chart(runs: Sequence[Run], points: int, label: str) -> str:
    """Validation AUROC by epoch: each seed up to where it stopped, a dot where it was best, the mean while half of them go on."""
    curves = [run["curve"] for run in runs if np.isfinite(run["curve"]).any()]
    if not curves:
        return ""
    longest = max(map(len, curves))
    frame = Frame(x=(1.0, float(max(longest, 2))), y=widened(np.concatenate(curves)))
    parts = [axes(frame, "epoch", "validation AUROC")]
    for curve in curves if points else ():
        kept, best = thinned(curve, points), int(np.nanargmax(curve))
        parts += [line(frame, kept + 1, curve[kept], "thin"), dot(frame, best + 1, curve[best], "peak", 2.2)]
    if len(curves) > 1:
        mean = _mean(curves)
        kept = thinned(mean, max(points, 100))
        parts.append(line(frame, kept + 1, mean[kept], "mean"))
    return drawing(f"{label}: validation AUROC by epoch", *parts)


def _mean(curves: Sequence[Floats]) -> Floats:
    """Over the runs that reached an epoch, as long as they are at least half of all: a few late ones are no mean."""
    longest = max(map(len, curves))
    stacked = np.full((len(curves), longest), np.nan)
    for place, curve in enumerate(curves):
        stacked[place, : len(curve)] = curve
    known = np.isfinite(stacked)
    enough = known.sum(0) * 2 >= len(curves)
    mean = np.where(known, stacked, 0.0).sum(0) / np.maximum(known.sum(0), 1)
    return np.where(enough, mean, np.nan)[: int(np.flatnonzero(enough)[-1]) + 1] if enough.any() else mean[:0]


def histogram_chart(runs: Sequence[Run], label: str, name: str) -> str:
    """Scores of the test molecules of all seeds, each side as shares of its own."""
    inside, outside = (_finite([run[side] for run in runs]) for side in ("id_scores", "ood_scores"))
    if not len(inside) or not len(outside):
        return ""
    edges = _edges(np.concatenate((inside, outside)))
    shares = [_shares(values, edges) for values in (inside, outside)]
    frame = Frame(x=(float(edges[0]), float(edges[-1])), y=(0.0, max(float(one.max()) for one in shares) * 1.12))
    parts = [axes(frame, name, "share of the molecules of a side")]
    parts += [area(frame, edges, one, kind) for one, kind in zip(shares, ("id", "ood"), strict=True)]
    return drawing(f"{label}: histogram of the scores of ID and OOD test molecules", *parts, _key())


def _key() -> str:
    return "".join(
        f'<rect class="{kind}" x="{x}" y="1" width="10" height="10"/>{text(x + 15, 10, words)}'
        for kind, x, words in (("id", 240, "ID"), ("ood", 286, "OOD"))
    )


def _finite(parts: Sequence[Floats]) -> Floats:
    values = np.concatenate([np.asarray(part, dtype=np.float64) for part in parts]) if parts else np.empty(0)
    return values[np.isfinite(values)]


def _edges(values: Floats) -> Floats:
    """Whole numbers (atoms, rings) get a bar each where they are few; else even bars over all but the tails."""
    low, high = values.min(), values.max()
    if high - low <= BINS and np.array_equal(values, np.rint(values)):
        return np.arange(low - 0.5, high + 1)
    low, high = widened(np.quantile(values, (_TAIL, 1 - _TAIL)), by=0.0)
    return np.linspace(low, high, BINS + 1)


def _shares(values: Floats, edges: Floats) -> Floats:
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), bins=edges)
    return counts / len(values)


def roc_chart(runs: Sequence[Run], positive: str, fpr95: float | None, points: int, label: str) -> str:
    """One line a seed, their mean over equal false-positive rates, and the FPR95 of the table."""
    curves = [curve for run in runs if (curve := roc(run["id_scores"], run["ood_scores"], positive)) is not None]
    if not curves:
        return ""
    found, other = ("OOD", "ID") if positive == "ood" else ("ID", "OOD")
    frame = Frame(x=(0.0, 1.0), y=(0.0, 1.0))
    parts = [axes(frame, f"{other} molecules called {found}", f"{found} molecules called {found}")]
    parts.append(line(frame, [0, 1], [0, 1], "chance") + line(frame, [0, 1], [0.95, 0.95], "chance"))
    grid = np.linspace(0, 1, _GRID)
    for x, y in curves if points else ():
        kept = thinned(x, points)
        parts.append(line(frame, x[kept], y[kept], "thin"))
    mean = np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)
    parts.append(line(frame, grid, mean, "mean"))
    if fpr95 is not None:
        parts.append(dot(frame, fpr95, 0.95, "mark", 3.5) + _beside(frame, fpr95))
    return drawing(f"{label}: ROC curve", *parts)


def _beside(frame: Frame, fpr95: float) -> str:
    """The dot's name, on the side where there is room and no line."""
    x, y = float(frame.across(fpr95)), float(frame.down(0.95))
    return text(x + 7, y + 14, "FPR95") if fpr95 < 0.6 else text(x - 6, y - 6, "FPR95", "end")


def roc(inside: Floats, outside: Floats, positive: str) -> tuple[Floats, Floats] | None:
    """False and true positive rates, one point a distinct score: equal scores stand or fall together."""
    wanted, others = (outside, inside) if positive == "ood" else (-inside, -outside)
    if not len(wanted) or not len(others) or np.isnan(wanted).any() or np.isnan(others).any():
        return None
    thresholds = np.unique(np.concatenate((wanted, others)))[::-1]
    rates = [(len(side) - np.searchsorted(np.sort(side), thresholds, "left")) / len(side) for side in (others, wanted)]
    return np.concatenate(([0.0], rates[0])), np.concatenate(([0.0], rates[1]))


def strip(values: Sequence[float], mean: float | None, trivial: float | None, span: Span) -> str:
    """The seeds of one method as dots on a line, in percent of whatever width there is, above one another in a table."""
    marks = [f'<line class="rule" x1="{_at(value, span)}" x2="{_at(value, span)}" y2="100%"/>' for value, _ in ticks(*span, most=4)]  # fmt: skip
    if trivial is not None:
        marks.append(f'<line class="bar" x1="{_at(trivial, span)}" x2="{_at(trivial, span)}" y2="100%"/>')
    if len(values) > 1:
        marks += [f'<circle class="seed" cx="{_at(value, span)}" cy="50%" r="2.6"/>' for value in values]
    if mean is not None:
        marks.append(f'<line class="mean" x1="{_at(mean, span)}" x2="{_at(mean, span)}" y1="18%" y2="82%"/>')
    return f'<svg class="strip" aria-hidden="true">{"".join(marks)}</svg>'


def strip_head(span: Span, words: str) -> str:
    """The scale of the strips below it."""
    names = "".join(
        f'<text x="{_at(value, span)}" y="26" text-anchor="middle">{name}</text>'
        for value, name in ticks(*span, most=4)
    )
    return f'<svg class="strip head" role="img" aria-label="{html.escape(words)}"><text x="50%" y="11" text-anchor="middle">{html.escape(words)}</text>{names}</svg>'  # fmt: skip


def _at(value: float, span: Span) -> str:
    return f"{100 * (value - span[0]) / (span[1] - span[0]):.1f}%"


# The style sheet of a sweep's page: light and dark by the reader's own setting, and legible on a phone.
#
# Blue for in-distribution and orange for out-of-distribution are Okabe and Ito's, each in the shade that reads on its ground.


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
