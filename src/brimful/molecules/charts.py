"""The pictures of the page as SVG text: validation curves, histograms of the scores, ROC curves, a strip of the seeds.

Drawn by hand because a page of plots should open anywhere, for years, without a script or a network, and stay small: a
line of 200 points is about 1.3 kB, written as moves from point to point in tenths of a unit. Every drawing is 340 units
wide, the width of a phone, so that its text has the size of text at any width of the page.

In-distribution molecules are blue and out-of-distribution ones orange in every picture, a pair that colour-blind readers
can tell apart and that differs in lightness as well. Lines of single seeds are thin, their mean is thick.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brimful.molecules.metrics import Side, roc

Floats = npt.NDArray[np.float64]
Span = tuple[float, float]
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


def _fpr95_label(frame: "Frame", fpr95: float) -> str:
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


# ---- Pieces of SVG: a frame with axes, lines, areas and dots --------------------------------------------------------------

WIDTH, HEIGHT = 340, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 8, 24, 38
_LABEL_LETTERS = 35
"""That fit below a drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """From data to positions on the drawing."""

    x: Span
    y: Span

    def across(self, values: npt.ArrayLike) -> Floats:
        return _LEFT + _fraction(values, self.x) * (WIDTH - _LEFT - _RIGHT)

    def down(self, values: npt.ArrayLike) -> Floats:
        return HEIGHT - _BOTTOM - _fraction(values, self.y) * (HEIGHT - _TOP - _BOTTOM)


def _fraction(values: npt.ArrayLike, span: Span) -> Floats:
    low, high = span
    return np.asarray((np.asarray(values, dtype=np.float64) - low) / ((high - low) or 1.0))


def drawing(label: str, *parts: str) -> str:
    """A whole picture; `label` describes it for screen readers."""
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{body}</svg>'


def axes(frame: Frame, x_name: str, y_name: str) -> str:
    """Ticks at round numbers, faint lines across, and the names of both axes."""
    left, right = frame.across(frame.x)
    bottom = float(frame.down(frame.y[0]))
    parts = []
    for value, name in ticks(*frame.y, most=5):
        y = _short(float(frame.down(value)))
        parts.append(f'<path class="rule" d="M{_short(left)} {y}H{_short(right)}"/>{text(left - 6, float(y) + 4, name, "end")}')  # fmt: skip
    below = ticks(*frame.x, most=6)
    if sum(len(name) for _, name in below) > _LABEL_LETTERS:
        below = ticks(*frame.x, most=4)
    for value, name in below:
        x = float(frame.across(value))
        parts.append(f'<path class="tick" d="M{_short(x)} {_short(bottom)}v4"/>{text(x, bottom + 16, name, "middle")}')
    parts.append(f'<path class="axis" d="M{_short(left)} {_short(bottom)}H{_short(right)}"/>')
    parts.append(text((left + right) / 2, HEIGHT - 6, x_name, "middle", "name"))
    parts.append(text(0, 10, y_name, kind="name"))  # above its axis: rotated text is hard to read
    return "".join(parts)


def line(frame: Frame, x: npt.ArrayLike, y: npt.ArrayLike, kind: str) -> str:
    """Through the finite points, with gaps at the others."""
    across, down = frame.across(x), frame.down(y)
    kept = np.isfinite(across) & np.isfinite(down)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], kept, [False])).astype(np.int8)))
    runs = [_path(across[start:end], down[start:end]) for start, end in edges.reshape(-1, 2)]
    return f'<path class="{kind}" d="{"".join(runs)}"/>' if runs else ""


def area(frame: Frame, edges: Floats, heights: Floats, kind: str) -> str:
    """The outline of a bar chart."""
    x = np.repeat(edges, 2)
    y = np.concatenate(([0.0], np.repeat(heights, 2), [0.0]))
    return f'<path class="{kind}" d="{_path(frame.across(x), frame.down(y))}"/>'


def dot(frame: Frame, x: float, y: float, kind: str, radius: float = 2.5) -> str:
    return f'<circle class="{kind}" cx="{_short(float(frame.across(x)))}" cy="{_short(float(frame.down(y)))}" r="{radius:g}"/>'  # fmt: skip


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    class_ = f' class="{kind}"' if kind else ""
    anchored = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{class_} x="{_short(x)}" y="{_short(y)}"{anchored}>{html.escape(words)}</text>'


def ticks(low: float, high: float, *, most: int) -> list[tuple[float, str]]:
    """Round numbers within the span, at most this many, with the digits that distinguish them."""
    if not math.isfinite(high - low) or high <= low:
        return [(low, f"{low:.3g}")]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * 0.999)
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) + (round(step / power, 1) == 2.5)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(number * step, _tick(number * step, digits)) for number in range(first, last + 1)]


def _tick(value: float, digits: int) -> str:
    if abs(value) >= 1e6:
        return f"{value:.2g}"
    return f"{value:.{digits}f}".replace("-", "−") if round(value, digits) else "0"


def widened(values: Sequence[float] | Floats, *, by: float = 0.04) -> Span:
    """From the least to the largest with a margin; a default span where there is one value or none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    distinct = high - low > 1e-6 * max(abs(low), abs(high))  # less is rounding, and axes have no digits for it
    margin = (high - low) * by if distinct else abs(low) * 0.05 or 0.5
    return low - margin, high + margin


def thinned(values: Floats, most: int) -> npt.NDArray[np.int64]:
    """Which points to draw: all, or `most` at equal distances with both ends."""
    count = len(values)
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def _path(x: Floats, y: Floats) -> str:
    """`M42 176l3.1-2.5…`: relative moves in tenths of a unit, without superfluous separators."""
    points = np.rint(np.stack((x, y), axis=1) * 10).astype(np.int64)
    moves = np.diff(points, axis=0)
    return f"M{_tenths(points[0])}" + ("l" + _tenths(moves.ravel()) if len(moves) else "h0")


def _tenths(values: npt.NDArray[np.int64]) -> str:
    """A minus separates by itself, which saves a space."""
    words = [_short(value / 10) for value in values.tolist()]
    return "".join(word if not place or word.startswith("-") else f" {word}" for place, word in enumerate(words))


def _short(value: float) -> str:
    written = f"{value:.1f}".removesuffix(".0")
    return "0" if written == "-0" else written.replace("0.", ".", 1) if written.startswith(("0.", "-0.")) else written
