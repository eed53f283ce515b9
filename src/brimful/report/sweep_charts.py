"""The pictures of a sweep: validation curves, histograms of the scores, ROC curves, and a strip of the seeds.

In-distribution molecules are blue and out-of-distribution ones orange in every picture, a pair that the colour-blind tell
apart and that differs in lightness as well; lines of single seeds are thin, their mean is thick.
"""

import html
from collections.abc import Mapping, Sequence

import numpy as np

from brimful.report.svg import Floats, Frame, Span, area, axes, dot, drawing, line, text, thinned, ticks, widened

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
