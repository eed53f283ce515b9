"""The pictures of the page as SVG text: validation curves, histograms of the scores, ROC curves, a strip of the seeds.

Drawn from the pieces in `brimful.charts`. Every drawing is 340 units wide, the width of a phone, so that its text has the size
of text at any width of the page.

In-distribution molecules are blue and out-of-distribution ones orange in every picture, a pair that colour-blind readers
can tell apart and that differs in lightness as well. Lines of single seeds are thin, their mean is thick.
"""

import html
from collections.abc import Mapping, Sequence

import numpy as np

from brimful.charts import Floats, Frame, Span, area, axes, dot, drawing, line, text, thinned, ticks, widened
from brimful.molecules.metrics import Side, roc

Run = Mapping[str, Floats]

BINS = 36
_TAIL = 0.005
"""The share of scores at each end that goes to the outermost bars, so that one outlier does not flatten the rest."""
_GRID = 101


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
    frame = Frame(x=(float(edges[0]), float(edges[-1])), y=(0.0, max(float(one.max()) for one in shares) * 1.12))
    parts = [axes(frame, name, "share of the molecules")]
    parts += [area(frame, edges, one, kind) for one, kind in zip(shares, ("id", "ood"), strict=True)]
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
    return f'<svg class="strip head" role="img" aria-label="{html.escape(words)}"><text x="50%" y="11" text-anchor="middle">{html.escape(words)}</text>{names}</svg>'  # fmt: skip


def _percent(value: float, span: Span) -> str:
    return f"{100 * (value - span[0]) / (span[1] - span[0]):.1f}%"
