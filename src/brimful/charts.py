"""Pieces of SVG for every page that Brimful writes: a frame with axes, lines, areas, dots, and round numbers for ticks.

Drawn by hand because a page of plots should open anywhere, for years, without a library or a network, and stay small: a line
of 200 points is about 1.3 kB, written as moves from point to point in tenths of a unit.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Span = tuple[float, float]

WIDTH, HEIGHT = 340, 220
_LABEL_LETTERS = 35
"""That fit below a drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """From data to positions on a drawing: its size, and the margins around the plot. The defaults are for `drawing`."""

    x: Span
    y: Span
    width: float = WIDTH
    height: float = HEIGHT
    left: float = 38
    right: float = 8
    top: float = 24
    bottom: float = 38

    def across(self, values: npt.ArrayLike) -> Floats:
        return self.left + _fraction(values, self.x) * (self.width - self.left - self.right)

    def down(self, values: npt.ArrayLike) -> Floats:
        return self.height - self.bottom - _fraction(values, self.y) * (self.height - self.top - self.bottom)


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
    parts.append(text((left + right) / 2, frame.height - 6, x_name, "middle", "name"))
    parts.append(text(0, 10, y_name, kind="name"))  # above its axis: rotated text is hard to read
    return "".join(parts)


def line(frame: Frame, x: npt.ArrayLike, y: npt.ArrayLike, kind: str) -> str:
    """A line through the finite points, with gaps where they are not finite."""
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


def between(frame: Frame, x: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike, kind: str) -> str:
    """The area between two lines over the same points, with gaps where one is not finite."""
    across, top, bottom = frame.across(x), frame.down(high), frame.down(low)
    kept = np.isfinite(across) & np.isfinite(top) & np.isfinite(bottom)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], kept, [False])).astype(np.int8)))
    outlines = []
    for start, end in edges.reshape(-1, 2):
        x_there, y_there = across[start:end], top[start:end]
        outline = np.concatenate((x_there, x_there[::-1])), np.concatenate((y_there, bottom[start:end][::-1]))
        outlines.append(f"{_path(*outline)}z")
    return f'<path class="{kind}" d="{"".join(outlines)}"/>' if outlines else ""


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
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) + (round(step / power, 1) == 2.5 and power <= 1)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(number * step, _tick(number * step, digits)) for number in range(first, last + 1)]


def log_ticks(low: float, high: float, *, most: int) -> list[tuple[float, str]]:
    """As `ticks`, for logarithms to base 10: 0.01, 0.1, 1, with 2 and 5 between them where there is room."""
    for steps in ((1, 2, 5), (1,)):
        powers = range(math.floor(low) - 1, math.ceil(high) + 1)
        values = [step * 10.0**power for power in powers for step in steps]
        found = [
            (math.log10(value), f"{value:g}") for value in values if low - 1e-9 <= math.log10(value) <= high + 1e-9
        ]
        if len(found) <= most:
            break
    if len(found) < 3:  # less than a decade
        return [(math.log10(value), name) for value, name in ticks(10**low, 10**high, most=most) if value > 0]
    return found[:: -(-len(found) // most)]


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


def extremes(x: Floats, y: Floats, columns: int) -> npt.NDArray[np.int64]:
    """Which points to draw so that no peak is lost: the lowest and the highest of each column of the picture, and both ends.

    All of them, if there are no more than two for each column. What is not finite marks a gap and stays.
    """
    if len(x) <= 2 * columns:
        return np.arange(len(x))
    edges = np.linspace(0, len(x), columns + 1).astype(np.int64)
    kept = {0, len(x) - 1}
    for start, end in pairwise(edges):
        piece = y[start:end]
        known = np.flatnonzero(np.isfinite(piece))
        if len(known):
            kept |= {int(start + known[piece[known].argmin()]), int(start + known[piece[known].argmax()])}
        if len(known) < len(piece):
            kept.add(int(start + np.flatnonzero(~np.isfinite(piece))[0]))
    return np.array(sorted(kept), dtype=np.int64)


def _path(x: Floats, y: Floats) -> str:
    """`M42 176l3.1-2.5…`: relative moves in tenths of a unit, without superfluous separators."""
    points = np.rint(np.clip(np.stack((x, y), axis=1), -1e5, 1e5) * 10).astype(np.int64)  # far outside is outside
    moves = np.diff(points, axis=0)
    return f"M{_tenths(points[0])}" + ("l" + _tenths(moves.ravel()) if len(moves) else "h0")


def _tenths(values: npt.NDArray[np.int64]) -> str:
    """A minus separates by itself, which saves a space."""
    words = [_short(value / 10) for value in values.tolist()]
    return "".join(word if not place or word.startswith("-") else f" {word}" for place, word in enumerate(words))


def _short(value: float) -> str:
    written = f"{value:.1f}".removesuffix(".0")
    return "0" if written == "-0" else written.replace("0.", ".", 1) if written.startswith(("0.", "-0.")) else written
