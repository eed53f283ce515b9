"""Small pieces of SVG: a frame with axes, lines, steps and dots, as text. The page's style sheet gives them colour.

Drawn by hand because a page of plots should open anywhere, for years, without a script or a network, and stay small: a
line of 200 points is about 1.3 kB here, written as steps from point to point in tenths of a unit. Every drawing is 340
units wide, the width of a phone, so that its text has the size of text at any width of the page.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Span = tuple[float, float]

WIDTH, HEIGHT = 340, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 8, 24, 38
_LETTERS = 35
"""That stand side by side below a drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where data lies on the drawing."""

    x: Span
    y: Span

    def across(self, values: npt.ArrayLike) -> Floats:
        return _LEFT + _part(values, self.x) * (WIDTH - _LEFT - _RIGHT)

    def down(self, values: npt.ArrayLike) -> Floats:
        return HEIGHT - _BOTTOM - _part(values, self.y) * (HEIGHT - _TOP - _BOTTOM)


def _part(values: npt.ArrayLike, span: Span) -> Floats:
    low, high = span
    return np.asarray((np.asarray(values, dtype=np.float64) - low) / ((high - low) or 1.0))


def drawing(label: str, *parts: str) -> str:
    """A whole picture; `label` is what it is for those who do not see it."""
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{body}</svg>'


def axes(frame: Frame, x_name: str, y_name: str) -> str:
    """Ticks at round numbers, faint lines across, and what is measured along each side."""
    left, right = frame.across(frame.x)
    bottom = float(frame.down(frame.y[0]))
    parts = []
    for value, name in ticks(*frame.y, most=5):
        y = _short(float(frame.down(value)))
        parts.append(f'<path class="rule" d="M{_short(left)} {y}H{_short(right)}"/>{text(left - 6, float(y) + 4, name, "end")}')  # fmt: skip
    below = ticks(*frame.x, most=6)
    if sum(len(name) for _, name in below) > _LETTERS:
        below = ticks(*frame.x, most=4)
    for value, name in below:
        x = float(frame.across(value))
        parts.append(f'<path class="tick" d="M{_short(x)} {_short(bottom)}v4"/>{text(x, bottom + 16, name, "middle")}')
    parts.append(f'<path class="axis" d="M{_short(left)} {_short(bottom)}H{_short(right)}"/>')
    parts.append(text((left + right) / 2, HEIGHT - 6, x_name, "middle", "name"))
    parts.append(text(0, 10, y_name, kind="name"))  # above its axis: a word on its side is read slowly
    return "".join(parts)


def line(frame: Frame, x: npt.ArrayLike, y: npt.ArrayLike, kind: str) -> str:
    """Through the points that are numbers; a gap where one is not."""
    across, down = frame.across(x), frame.down(y)
    kept = np.isfinite(across) & np.isfinite(down)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], kept, [False])).astype(np.int8)))
    runs = [_steps(across[start:end], down[start:end]) for start, end in edges.reshape(-1, 2)]
    return f'<path class="{kind}" d="{"".join(runs)}"/>' if runs else ""


def area(frame: Frame, edges: Floats, heights: Floats, kind: str) -> str:
    """The outline of bars that stand on the ground: one step a bar."""
    x = np.repeat(edges, 2)
    y = np.concatenate(([0.0], np.repeat(heights, 2), [0.0]))
    return f'<path class="{kind}" d="{_steps(frame.across(x), frame.down(y))}"/>'


def dot(frame: Frame, x: float, y: float, kind: str, radius: float = 2.5) -> str:
    return f'<circle class="{kind}" cx="{_short(float(frame.across(x)))}" cy="{_short(float(frame.down(y)))}" r="{radius:g}"/>'  # fmt: skip


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    turned = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{named} x="{_short(x)}" y="{_short(y)}"{turned}>{html.escape(words)}</text>'


def ticks(low: float, high: float, *, most: int) -> list[tuple[float, str]]:
    """Round numbers within the span, at most so many, each with as many digits as tell them apart."""
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
    """From the least to the largest, with some air; something to draw on where there is only one value, or none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    apart = high - low > 1e-6 * max(abs(low), abs(high))  # less is rounding, and axes have no digits for it
    air = (high - low) * by if apart else abs(low) * 0.05 or 0.5
    return low - air, high + air


def thinned(values: Floats, most: int) -> npt.NDArray[np.int64]:
    """Which points to draw: all of them, or so many at even distances with both ends."""
    count = len(values)
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def _steps(x: Floats, y: Floats) -> str:
    """`M42 176l3.1-2.5…`: tenths of a unit, from point to point, with nothing between numbers that can be left out."""
    points = np.rint(np.stack((x, y), axis=1) * 10).astype(np.int64)
    moves = np.diff(points, axis=0)
    return f"M{_tenths(points[0])}" + ("l" + _tenths(moves.ravel()) if len(moves) else "h0")


def _tenths(values: npt.NDArray[np.int64]) -> str:
    """A minus separates by itself, and so saves a space."""
    words = [_short(value / 10) for value in values.tolist()]
    return "".join(word if not place or word.startswith("-") else f" {word}" for place, word in enumerate(words))


def _short(value: float) -> str:
    written = f"{value:.1f}".removesuffix(".0")
    return "0" if written == "-0" else written.replace("0.", ".", 1) if written.startswith(("0.", "-0.")) else written
