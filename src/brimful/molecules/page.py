"""report.html: a sweep on one page that needs nothing else, neither a script nor a network.

    each dataset    its table, with a strip that shows every seed of every method on one scale, and a line for the best
                    trivial baseline: a method left of that line has learnt nothing
    each encoder    folded below it, a row of pictures per method: validation curves, histogram of the scores, ROC

The page is made from result rows, their summaries and the arrays of the runs. All thin lines together take at most
1.1 MB, so those of 500 runs have up to 137 points each and the page 1.5 MB; above about 3,400 runs only the means are drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

from brimful.charts import Floats, Frame, Span, area, axes, dot, drawing, line, text, thinned, ticks, widened
from brimful.molecules.metrics import Side, roc
from brimful.molecules.results import HEADERS, TRIVIAL, Row, Summary, by_dataset, gain_sign
from brimful.units import show_count

MOST_POINTS, FEWEST_POINTS = 200, 20
_LINES_BYTES, _POINT_BYTES = 1_100_000, 8
BINS = 36
_TAIL = 0.005
"""The share of scores at each end that goes to the outermost bars, so that one outlier does not flatten the others."""
_GRID = 101
_SCORE = {"energy": "energy of the head", "classifier": "score", "distance": "distance", "trivial": "score"}
_GAIN_CLASS = {1: " more", -1: " less", 0: ""}

Run = Mapping[str, Floats]
"""The arrays of one run: see `results.RUN_ARRAYS`."""
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
    sections = []
    for place, (name, table) in enumerate(tables.items()):
        section = _Section([row for row in rows if row["dataset"] == name], table, read_run, points)
        sections.append(section.html(place, (remarks or {}).get(name, ())))
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


class _Section:
    """One dataset: its table, and the pictures of every method."""

    def __init__(self, rows: Sequence[Row], table: Sequence[Summary], read_run: ReadRun, points: int) -> None:
        self._rows, self._table, self._read_run, self._points = rows, table, read_run, points
        self._span = widened(np.array(_figures(rows)))
        self._has_settings = any(summary["settings"] for summary in table)
        trivial = [summary for summary in table if summary["kind"] == TRIVIAL]
        self._trivial = next((summary["auroc"] for summary in trivial if summary["method"] == summary["trivial"]), None)

    def html(self, place: int, remarks: Sequence[str]) -> str:
        first = self._table[0]
        items = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
        encoders = dict.fromkeys(summary["encoder"] for summary in self._table)
        pictures = "".join(self._encoder(encoder, is_open=not number) for number, encoder in enumerate(encoders))
        return (
            f'<section id="d{place}"><h2>{escape(first["dataset"])}</h2><p class="lead">{escape(first["about"])}</p>'
            f"{self._table_html()}{f'<ul class=remarks>{items}</ul>' if items else ''}{pictures}</section>"
        )

    def _table_html(self) -> str:
        """Methods, a rule, and the trivial baselines."""
        names = ["encoder", "method", *(["settings"] if self._has_settings else [])]
        cells = [f'<th scope="col">{name}</th>' for name in names]
        cells.append(f'<th class="strip">{strip_header(self._span, "AUROC of each seed")}</th>')
        cells += [f'<th scope="col" class="figure">{name}</th>' for _, name in (*HEADERS, ("", "gain"), ("", "seeds"))]
        lines, below = (
            "".join(self._line(summary) for summary in self._table if (summary["kind"] == TRIVIAL) == is_trivial)
            for is_trivial in (False, True)
        )
        foot = f'<tbody class="trivial">{below}</tbody>' if below else ""
        return f'<div class="wide"><table><thead><tr>{"".join(cells)}</tr></thead><tbody>{lines}</tbody>{foot}</table></div>'

    def _line(self, summary: Summary) -> str:
        text = summary["text"]
        values = _figures([] if summary["deterministic"] else self._rows_of(summary))
        names = [summary["encoder"], summary["method"], *([text["settings"]] if self._has_settings else [])]
        cells = [f"<td>{escape(name)}</td>" for name in names]
        cells.append(f'<td class="strip">{strip(values, summary["auroc"], self._trivial, self._span)}</td>')
        for key, _ in HEADERS:
            mean, _, sd = text[key].partition(" ± ")
            deviation = f"<small>&nbsp;± {sd}</small>" if sd else ""
            cells.append(f'<td class="figure{" best" * (key in summary["best"])}">{mean}{deviation}</td>')
        gain, _, interval = text["gain"].partition(" (")
        shown = f"<small>&nbsp;({escape(interval)}</small>" if interval else ""
        cells.append(f'<td class="figure{_GAIN_CLASS[gain_sign(summary)]}">{gain}{shown}</td>')
        cells.append(f'<td class="figure">{escape(text["seeds"])}</td>')
        return f"<tr>{''.join(cells)}</tr>"

    def _encoder(self, encoder: str, *, is_open: bool) -> str:
        table = [summary for summary in self._table if summary["encoder"] == encoder]
        name = "trivial baselines" if table[0]["kind"] == TRIVIAL else encoder
        pictures = "".join(map(self._pictures, table))
        return (
            f"<details{' open' * is_open}><summary>{escape(name)}: curves, scores and ROC</summary>{pictures}</details>"
        )

    def _pictures(self, summary: Summary) -> str:
        """One method: three pictures side by side, or below each other on a phone."""
        own = self._rows_of(summary)[: 1 if summary["deterministic"] else None]
        runs = [run for row in own if row["run"] and (run := self._read_run(row["run"])) is not None]
        label = " ".join(filter(None, (summary["method"], summary["settings"])))
        charts = [
            curve_chart(runs, self._points, label) or (_no_curve(summary) if runs else ""),
            histogram_chart(runs, label, _SCORE.get(summary["kind"], "score")),
            roc_chart(runs, summary["positive"], summary["fpr95"], self._points, label),
        ]
        drawn = "".join(f"<figure>{chart}</figure>" for chart in charts if chart)
        lost = len(own) - len(runs)
        missing = f" · the arrays of {show_count(lost, 'run')} are missing" if lost else ""
        title = f"<b>{escape(label)}</b> AUROC {escape(summary['text']['auroc'])}{missing}"
        return f'<h3>{title}</h3><div class="row">{drawn}</div>'

    def _rows_of(self, summary: Summary) -> list[Row]:
        return [row for row in self._rows if all(row[key] == summary[key] for key in ("encoder", "method", "settings"))]


def _no_curve(summary: Summary) -> str:
    why = ": nothing is trained" if summary["deterministic"] else ""
    why = ": it is validated by its loss on ID molecules" if summary["kind"] == "classifier" else why
    return f'<p class="none">no curve{why}</p>'


def _figures(rows: Sequence[Row]) -> list[float]:
    """The AUROC of each row that has one."""
    return [row["auroc"] for row in rows if row["auroc"] is not None and np.isfinite(row["auroc"])]


# ---- The pictures: validation curves, histograms of the scores, ROC curves, a strip of the seeds ------------------------------
#
# Every drawing is 340 units wide, the width of a phone, so that its text has the same size at any width of the page.
# In-distribution molecules are blue and out-of-distribution ones orange: colour-blind readers can tell the two apart, and
# they differ in lightness as well. Lines of single seeds are thin, their mean is thick.


def curve_chart(runs: Sequence[Run], points: int, label: str) -> str:
    """Validation AUROC by epoch: each seed until it stopped, a dot at its best, the mean while at least half are left."""
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
        mean = _mean_curve(curves)
        kept = thinned(mean, max(points, 100))
        parts.append(line(frame, kept + 1, mean[kept], "mean"))
    return drawing(f"{label}: validation AUROC by epoch", *parts)


def _mean_curve(curves: Sequence[Floats]) -> Floats:
    """Over the runs that reached an epoch, while they are at least half of all."""
    longest = max(map(len, curves))
    stacked = np.full((len(curves), longest), np.nan)
    for place, curve in enumerate(curves):
        stacked[place, : len(curve)] = curve
    known = np.isfinite(stacked)
    enough = known.sum(0) * 2 >= len(curves)
    mean = np.where(known, stacked, 0.0).sum(0) / np.maximum(known.sum(0), 1)
    return np.where(enough, mean, np.nan)[: int(np.flatnonzero(enough)[-1]) + 1] if enough.any() else mean[:0]


def histogram_chart(runs: Sequence[Run], label: str, name: str) -> str:
    """Scores of the test molecules of all seeds, each side normalised by itself."""
    inside, outside = (_finite([run[side] for run in runs]) for side in ("id_scores", "ood_scores"))
    if not len(inside) or not len(outside):
        return ""
    edges = _edges(np.concatenate((inside, outside)))
    shares = [_shares(values, edges) for values in (inside, outside)]
    frame = Frame(x=(float(edges[0]), float(edges[-1])), y=(0.0, max(float(share.max()) for share in shares) * 1.12))
    parts = [axes(frame, name, "share of the molecules")]
    parts += [area(frame, edges, share, kind) for share, kind in zip(shares, ("id", "ood"), strict=True)]
    return drawing(f"{label}: histogram of the scores of ID and OOD test molecules", *parts, _legend())


def _legend() -> str:
    return "".join(
        f'<rect class="{kind}" x="{x}" y="1" width="10" height="10"/>{text(x + 15, 10, words)}'
        for kind, x, words in (("id", 240, "ID"), ("ood", 286, "OOD"))
    )


def _finite(parts: Sequence[Floats]) -> Floats:
    values = np.concatenate([np.asarray(part, dtype=np.float64) for part in parts]) if parts else np.empty(0)
    return values[np.isfinite(values)]


def _edges(values: Floats) -> Floats:
    """A bar for each whole number (atoms, rings) where there are few; else equal bars over all but the tails."""
    low, high = values.min(), values.max()
    if high - low <= BINS and np.array_equal(values, np.rint(values)):
        return np.arange(low - 0.5, high + 1)
    low, high = widened(np.quantile(values, (_TAIL, 1 - _TAIL)), by=0.0)
    return np.linspace(low, high, BINS + 1)


def _shares(values: Floats, edges: Floats) -> Floats:
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), bins=edges)
    return counts / len(values)


def roc_chart(runs: Sequence[Run], positive: Side, fpr95: float | None, points: int, label: str) -> str:
    """One line per seed, their mean over equal false-positive rates, and the FPR95 of the table."""
    usable = [run for run in runs if all(len(run[side]) and not np.isnan(run[side]).any() for side in ("id_scores", "ood_scores"))]  # fmt: skip
    curves = [roc(run["id_scores"], run["ood_scores"], positive) for run in usable]
    if not curves:
        return ""
    side, other = ("OOD", "ID") if positive == "ood" else ("ID", "OOD")
    frame = Frame(x=(0.0, 1.0), y=(0.0, 1.0))
    parts = [axes(frame, f"{other} molecules called {side}", f"{side} molecules called {side}")]
    parts.append(line(frame, [0, 1], [0, 1], "chance") + line(frame, [0, 1], [0.95, 0.95], "chance"))
    grid = np.linspace(0, 1, _GRID)
    for x, y in curves if points else ():
        kept = thinned(x, points)
        parts.append(line(frame, x[kept], y[kept], "thin"))
    mean = np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)
    parts.append(line(frame, grid, mean, "mean"))
    if fpr95 is not None:
        parts.append(dot(frame, fpr95, 0.95, "mark", 3.5) + _fpr95_label(frame, fpr95))
    return drawing(f"{label}: ROC curve", *parts)


def _fpr95_label(frame: Frame, fpr95: float) -> str:
    """On the side of the dot where there is room and no line."""
    x, y = float(frame.across(fpr95)), float(frame.down(0.95))
    return text(x + 7, y + 14, "FPR95") if fpr95 < 0.6 else text(x - 6, y - 6, "FPR95", "end")


def strip(values: Sequence[float], mean: float | None, trivial: float | None, span: Span) -> str:
    """The seeds of one method as dots on a line, positioned in percent of the width."""
    marks = [f'<line class="rule" x1="{_percent(value, span)}" x2="{_percent(value, span)}" y2="100%"/>' for value, _ in ticks(*span, most=4)]  # fmt: skip
    if trivial is not None:
        marks.append(f'<line class="bar" x1="{_percent(trivial, span)}" x2="{_percent(trivial, span)}" y2="100%"/>')
    if len(values) > 1:
        marks += [f'<circle class="seed" cx="{_percent(value, span)}" cy="50%" r="2.6"/>' for value in values]
    if mean is not None:
        marks.append(f'<line class="mean" x1="{_percent(mean, span)}" x2="{_percent(mean, span)}" y1="18%" y2="82%"/>')
    return f'<svg class="strip" aria-hidden="true">{"".join(marks)}</svg>'


def strip_header(span: Span, words: str) -> str:
    """The scale of the strips below it."""
    names = "".join(
        f'<text x="{_percent(value, span)}" y="26" text-anchor="middle">{name}</text>'
        for value, name in ticks(*span, most=4)
    )
    return f'<svg class="strip head" role="img" aria-label="{escape(words)}"><text x="50%" y="11" text-anchor="middle">{escape(words)}</text>{names}</svg>'  # fmt: skip


def _percent(value: float, span: Span) -> str:
    return f"{100 * (value - span[0]) / (span[1] - span[0]):.1f}%"


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
