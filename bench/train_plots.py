"""Draws what `train.py` measured, as SVG files for pages in light and dark.

    python bench/train_plots.py train.jsonl --folder docs

For every case and cap in the files there are three:

    train-CASE-CAP.svg        rows/s, a bar for each entry: the median over its seeds, with a tick for every seed
    train-time-CASE-CAP.svg   steps by seconds, planning and compiling included; dotted where a run was ended early and goes
                              on at its median step; the seed in the middle of each entry
    train-loss-CASE-CAP.svg   the loss by step, and below how far it is from the mean of the padded runs: lines are means over
                              the seeds, bands reach from the lowest seed to the highest

The second shows the fastest entry of Hugging Face, the fastest that it compiles, Lightning and Brimful's; the third the
fastest of Hugging Face and Brimful's that draw their rows in the same order. An entry that failed has its reason in place of
a bar. Nothing is drawn that is not in the files.
"""

import argparse
import html
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brimful.charts import HEIGHT, WIDTH, Frame, axes, line, text, thinned, widened
from train import BRIMFUL, _show_cap, cold, read_results

ROW, LABEL, VALUE, TOP = 22, 150, 96, 44
"""Units: height of a bar's row, width of the names, width of the figures, height of the title."""
BARS_WIDTH, CURVES_WIDTH = 640, 560
PEERS = ("#888888", "#b8860b", "#cc79a7")
COLOURS = ("#d55e00", "#a6761d", "#009e73", "#7570b3", "#e7298a", "#66a61e", "#56b4e9", "#0072b2")
"""Told apart by colour-blind readers, and dark enough for white pages while light enough for black ones."""
COLOUR_OF = dict(zip(BRIMFUL, COLOURS, strict=True))
"""Brimful's entries are the same in every plot."""
POINTS = 200
SMOOTHED = 20
"""Steps of the running mean of differences, which are smaller than what one step's rows do to its loss."""
REFERENCE = "brimful-padded"
PANEL, LEGEND = HEIGHT + 8, 15
"""Units: height of a panel with the space below it, height of a line of the legend."""
STYLE = """<style>
text{font:12px system-ui,sans-serif;fill:#24292f}.title{font-weight:600;font-size:14px}.faint,.name{fill:#57606a}.small text{font-size:9px}
.rule{stroke:#d0d7de;stroke-width:.6;fill:none}.axis,.tick{stroke:#57606a;fill:none}
.peer{fill:#a5adb6}.brimful{fill:#0a7ea4}.seed{stroke:#24292f;stroke-width:1.2}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.faint,.name{fill:#9aa4af}.rule{stroke:#3d444d}.axis,.tick{stroke:#9aa4af}
.peer{fill:#6e7681}.brimful{fill:#2fa8d0}.seed{stroke:#e6edf3}}
</style>"""


def speed_chart(title: str, results: Sequence[dict[str, Any]]) -> str:
    """Rows/s of every entry, in the order they ran, and how many times the best of Hugging Face that is."""
    by_entry = _by_entry(results)
    speeds = {entry: _speeds(runs) for entry, runs in by_entry.items()}
    most = max((max(found) for found in speeds.values() if found), default=1.0)
    best = _fastest(by_entry, lambda run: run["trainer"] == "hf")
    base = statistics.median(speeds[best]) if best else None
    across = lambda value: LABEL + value / most * (BARS_WIDTH - LABEL - VALUE)  # noqa: E731
    compared = f" (× {best}, the best of Hugging Face)" if best else ""
    parts = [text(0, 15, title, kind="title"), text(0, 33, f"rows per second, after warm-up{compared}", kind="faint")]
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
        shown = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
        times = f" ({median / base:.2g}×)" if base and kind == "brimful" else ""
        parts.append(text(across(max(found)) + 6, y + 14, shown + times))
    return _page(title, BARS_WIDTH, BARS_WIDTH, TOP + len(by_entry) * ROW + 4, parts)


def time_chart(title: str, results: Sequence[dict[str, Any]]) -> str:
    """Steps by seconds since the process was ready; empty if no entry has two steps."""
    runs = {entry: _middle(runs) for entry, runs in _shown(results).items()}
    if not runs:
        return ""
    steps = max(run["run_steps"] for run in runs.values())
    ours = [run["run_s"] for run in runs.values() if run["trainer"] == "brimful"]
    last_s = 1.3 * max(ours or [run["run_s"] for run in runs.values()])
    frame = Frame(x=(0.0, last_s), y=(0.0, float(steps)))
    parts = [axes(frame, "seconds, with planning and compiling", "optimizer steps")]
    for colour, run in zip(_colours(runs), runs.values(), strict=True):
        seconds = run["start_s"] + np.concatenate(([0.0], np.cumsum(run["step_s"])))
        parts.append(_clipped_line(frame, seconds, np.arange(len(seconds)), colour, 1.6))
        if run["run_s_extrapolated"]:
            parts.append(_clipped_line(frame, [seconds[-1], run["run_s"]], [len(seconds) - 1, run["run_steps"]], colour, 1.6, " stroke-dasharray=\"1.5 3\""))  # fmt: skip
    names = {entry: f"{entry}: {'~' * run['run_s_extrapolated']}{_show_seconds(run['run_s'])}" for entry, run in runs.items()}  # fmt: skip
    return _curves_page(title, [parts], names)


def loss_chart(title: str, results: Sequence[dict[str, Any]]) -> str:
    """The loss of every step, and its distance from the reference; empty if no entry has two steps."""
    chosen = _shown(results, peers=("hf",), without=("brimful-window",))
    curves = {entry: _stacked([run["loss"] for run in runs]) for entry, runs in chosen.items()}
    if not curves:
        return ""
    steps = float(max(len(curve[0]) for curve in curves.values()))
    above = Frame(x=(1.0, steps), y=widened(np.concatenate([curve.ravel() for curve in curves.values()])))
    panels = [[axes(above, "optimizer step", "loss per token")]]
    panels[0] += _bands(above, curves, 0)
    apart = _apart({entry: curve for entry, curve in curves.items() if entry in COLOUR_OF})
    if apart:
        below = Frame(x=(1.0, steps), y=widened(np.concatenate([curve.ravel() for curve in apart.values()])))
        label = f"loss − mean of {REFERENCE}, over {SMOOTHED} steps"
        panels.append([axes(below, "optimizer step", label), *_bands(below, apart, SMOOTHED // 2)])
    return _curves_page(title, panels, {entry: entry for entry in curves})


def _bands(frame: Frame, curves: dict[str, np.ndarray], first: int) -> list[str]:
    """The mean over the seeds, and a band from the lowest to the highest. All bands are behind all lines."""
    bands, lines = [], []
    for colour, curve in zip(_colours(curves), curves.values(), strict=True):
        kept = thinned(curve[0], POINTS)
        x = kept + 1 + first
        if len(curve) > 1:
            outline = np.concatenate((curve.min(axis=0)[kept], curve.max(axis=0)[kept][::-1]))
            drawn = line(frame, np.concatenate((x, x[::-1])), outline, "band")
            bands.append(drawn.replace('class="band"', f'fill="{colour}" fill-opacity=".18"'))
        lines.append(_line(frame, x, curve.mean(axis=0)[kept], colour, 1.1))
    return bands + lines


def _colours(entries: Iterable[str]) -> list[str]:
    return [COLOUR_OF.get(entry, PEERS[place % 3]) for place, entry in enumerate(entries)]


def _line(frame: Frame, x: Any, y: Any, colour: str, width: float, more: str = "") -> str:
    return line(frame, x, y, "curve").replace('class="curve"', f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{more}')  # fmt: skip


def _clipped_line(frame: Frame, x: Any, y: Any, colour: str, width: float, more: str = "") -> str:
    """Up to the right edge of the frame."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    inside = x < frame.x[1]
    if not inside.any():
        return ""
    if not inside.all():
        edge = np.interp(frame.x[1], x, y)
        x, y = np.append(x[inside], frame.x[1]), np.append(y[inside], edge)
    kept = thinned(x, POINTS)
    return _line(frame, x[kept], y[kept], colour, width, more)


def _stacked(losses: Sequence[Sequence[float]]) -> np.ndarray:
    """[seed, step], as far as all seeds go."""
    shortest = min(map(len, losses))
    return np.array([one[:shortest] for one in losses])


def _apart(curves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Running means of the distance from the mean of the reference; empty without it, or with too few steps."""
    steps = min((curve.shape[1] for curve in curves.values()), default=0)
    if REFERENCE not in curves or steps <= SMOOTHED:
        return {}
    window, reference = np.full(SMOOTHED, 1 / SMOOTHED), curves[REFERENCE][:, :steps].mean(axis=0)
    return {
        entry: np.array([np.convolve(one[:steps] - reference, window, mode="valid") for one in curve])
        for entry, curve in curves.items()
    }


def _shown(
    results: Sequence[dict[str, Any]], *, peers: Sequence[str] = ("hf", "hf-compile", "lightning"), without: Sequence[str] = ()
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """The runs of Brimful's entries and of the fastest of each of these peers, those with at least two steps."""
    by_entry = {
        entry: [run for run in runs if len(run.get("loss") or ()) > 1] for entry, runs in _by_entry(results).items()
    }
    by_entry = {entry: runs for entry, runs in by_entry.items() if runs and entry not in without}
    kinds: dict[str, Callable[[dict[str, Any]], bool]] = {
        "hf": lambda run: run["trainer"] == "hf",
        "hf-compile": lambda run: run["trainer"] == "hf" and bool(run["options"].get("torch_compile")),
        "lightning": lambda run: run["trainer"] == "lightning",
    }
    chosen = {_fastest(by_entry, kinds[kind]) for kind in peers}
    return {entry: runs for entry, runs in by_entry.items() if entry in chosen or runs[0]["trainer"] == "brimful"}


def _fastest(by_entry: dict[str, list[dict[str, Any]]], fits: Callable[[dict[str, Any]], bool]) -> str | None:
    speeds = {entry: _speeds(runs) for entry, runs in by_entry.items() if fits(runs[0])}
    known = [entry for entry, found in speeds.items() if found]
    return max(known, key=lambda entry: statistics.median(speeds[entry]), default=None)


def _speeds(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [run["rows_per_s"] for run in runs if "rows_per_s" in run]


def _middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found = cold(runs)
    return sorted(found, key=lambda run: run["run_s"])[len(found) // 2]


def _show_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _by_entry(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    by_entry: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        by_entry.setdefault(one["entry"], []).append(one)
    return by_entry


def _curves_page(title: str, panels: Sequence[Sequence[str]], names: dict[str, str]) -> str:
    """Panels below each other, then the legend."""
    parts = [f'<text class="title" x="0" y="12" style="font-size:11px">{html.escape(title)}</text>']
    parts += [f'<g transform="translate(0 {24 + place * PANEL})">{"".join(panel)}</g>' for place, panel in enumerate(panels)]  # fmt: skip
    top = 24 + len(panels) * PANEL + 4
    for place, (colour, name) in enumerate(zip(_colours(names), names.values(), strict=True)):
        x, y = (place % 2) * WIDTH / 2, top + place // 2 * LEGEND
        parts.append(f'<path d="M{x:.0f} {y - 3.5}h16" stroke="{colour}" stroke-width="2.5"/>' + text(x + 22, y, name))
    height = top + (len(names) + 1) // 2 * LEGEND - 8
    return _page(title, WIDTH + 4, CURVES_WIDTH, height, ['<g class="small">', *parts, "</g>"])


def _page(title: str, units: int, width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {units} {height}" width="{width}" role="img" aria-label="{html.escape(title)}">'
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
        for name, make in (("train", speed_chart), ("train-time", time_chart), ("train-loss", loss_chart)):
            if chart := make(title, some):
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
