"""Draws what `train.py` measured: bars of rows/s and curves of the loss, as SVG files for pages in light and dark.

    python bench/train_plots.py train.jsonl --folder docs

For every case and cap in the files there are `train-CASE-CAP.svg` (a bar for each entry, the median over its seeds, with a
tick for every seed) and `train-loss-CASE-CAP.svg` (the loss by optimizer step: thin lines are seeds, thick ones their mean).
An entry that failed has its reason in place of a bar. Nothing is drawn that is not in the files.
"""

import argparse
import html
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brimful.molecules.charts import HEIGHT, WIDTH, Frame, axes, line, text, thinned, widened
from train import _show_cap, read_results

ROW, LABEL, VALUE, TOP = 22, 150, 96, 44
"""Units: height of a bar's row, width of the names, width of the figures, height of the title."""
BARS_WIDTH, LOSS_WIDTH = 640, 480
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9", "#7a5195", "#888888")
"""Told apart by colour-blind readers, and dark enough for white pages while light enough for black ones."""
POINTS = 200
STYLE = """<style>
text{font:12px system-ui,sans-serif;fill:#24292f}.title{font-weight:600;font-size:14px}.faint,.name{fill:#57606a}
.rule{stroke:#d0d7de;stroke-width:.6;fill:none}.axis,.tick{stroke:#57606a;fill:none}
.peer{fill:#a5adb6}.brimful{fill:#0a7ea4}.seed{stroke:#24292f;stroke-width:1.2}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.faint,.name{fill:#9aa4af}.rule{stroke:#3d444d}.axis,.tick{stroke:#9aa4af}
.peer{fill:#6e7681}.brimful{fill:#2fa8d0}.seed{stroke:#e6edf3}}
</style>"""


def speed_chart(title: str, results: Sequence[dict[str, Any]]) -> str:
    """Rows/s of every entry, in the order they ran."""
    by_entry = _by_entry(results)
    speeds = {entry: [one["rows_per_s"] for one in runs if "rows_per_s" in one] for entry, runs in by_entry.items()}
    most = max((max(found) for found in speeds.values() if found), default=1.0)
    across = lambda value: LABEL + value / most * (BARS_WIDTH - LABEL - VALUE)  # noqa: E731
    parts = [text(0, 15, title, kind="title"), text(0, 33, "rows per second, after warm-up", kind="faint")]
    for place, (entry, runs) in enumerate(by_entry.items()):
        y, found = TOP + place * ROW, speeds[entry]
        parts.append(text(LABEL - 8, y + 14, entry, "end"))
        if not found:
            parts.append(text(LABEL, y + 14, runs[0]["status"], kind="faint"))
            continue
        median = statistics.median(found)
        kind = "brimful" if runs[0]["trainer"] == "brimful" else "peer"
        parts.append(f'<rect class="{kind}" x="{LABEL}" y="{y + 3}" width="{across(median) - LABEL:.1f}" height="{ROW - 7}"/>')  # fmt: skip
        if len(found) > 1:
            parts += [f'<path class="seed" d="M{across(one):.1f} {y + 5}v{ROW - 11}"/>' for one in found]
        parts.append(text(across(max(found)) + 6, y + 14, f"{median:,.0f}" if median >= 100 else f"{median:.3g}"))
    return _page(title, BARS_WIDTH, TOP + len(by_entry) * ROW + 4, parts)


def loss_chart(title: str, results: Sequence[dict[str, Any]]) -> str:
    """The loss of every step of every entry; empty if no entry has two steps."""
    curves = {
        entry: [np.array(one["loss"]) for one in runs if len(one.get("loss") or ()) > 1]
        for entry, runs in _by_entry(results).items()
    }
    curves = {entry: found for entry, found in curves.items() if found}
    if not curves:
        return ""
    every = [curve for found in curves.values() for curve in found]
    frame = Frame(x=(1.0, float(max(map(len, every)))), y=widened(np.concatenate(every)))
    parts = [axes(frame, "optimizer step", "loss per token")]
    for place, (entry, found) in enumerate(curves.items()):
        colour = COLOURS[place % len(COLOURS)]
        shortest = min(map(len, found))
        if len(found) > 1:
            parts += [_curve(frame, curve, colour, 0.5) for curve in found]
        parts.append(_curve(frame, np.mean([curve[:shortest] for curve in found], axis=0), colour, 1.6))
        x, y = (place % 2) * WIDTH / 2, HEIGHT + 14 + place // 2 * 16
        parts.append(f'<path d="M{x:.0f} {y - 4}h16" stroke="{colour}" stroke-width="2.5"/>' + text(x + 22, y, entry))
    return _page(title, WIDTH, HEIGHT + 8 + (len(curves) + 1) // 2 * 16, [f'<g transform="translate(0 22)">{"".join(parts)}</g>', text(0, 13, title, kind="title")], extra=22)  # fmt: skip


def _curve(frame: Frame, losses: np.ndarray, colour: str, width: float) -> str:
    kept = thinned(losses, POINTS)
    drawn = line(frame, kept + 1, losses[kept], "curve")
    return drawn.replace('class="curve"', f'fill="none" stroke="{colour}" stroke-width="{width}"')


def _by_entry(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    by_entry: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        by_entry.setdefault(one["entry"], []).append(one)
    return by_entry


def _page(title: str, width: int, height: int, parts: Sequence[str], extra: int = 0) -> str:
    height += extra
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width if width == BARS_WIDTH else LOSS_WIDTH}" role="img" aria-label="{html.escape(title)}">'
    return f"{head}{STYLE}{''.join(parts)}</svg>\n"


def draw(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write all plots of these results. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for case, cap in dict.fromkeys((one["case"], one["cap_bytes"]) for one in results):
        some = [one for one in results if (one["case"], one["cap_bytes"]) == (case, cap)]
        about = next((one for one in some if "device_name" in one), {})
        limit = "no cap" if cap is None else f"cap {_show_cap(cap)}"
        title = f"{case}{' (tiny)' if some[0]['tiny'] else ''}, {about.get('device_name', 'unknown device')}, {limit}"
        place = "uncapped" if cap is None else _show_cap(cap).replace(" ", "")
        for name, chart in (("train", speed_chart(title, some)), ("train-loss", loss_chart(title, some))):
            if chart:
                path = folder / f"{name}-{case}-{place}.svg"
                path.write_text(chart)
                written.append(path)
    return written


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="outputs of train.py")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="where to write the plots (docs)")
    args = parser.parse_args(argv)
    results = [one for path in args.files for one in read_results(path)]
    if not results:
        print(f"train_plots: {args.files[0]} has no results. Try: the --output of train.py.", file=sys.stderr)
        return 2
    print("\n".join(map(str, draw(results, args.folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
