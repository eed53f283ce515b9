"""Run plain.py and exact.py for real and draw what they print, with its timing, as docs/oom.svg.

    python docs/recording/record.py

The picture is a terminal whose lines appear when they were printed; it plays once in any browser and stands still where
animations are off. Nothing in it is written by hand but the two commands and the colours.
"""

import html
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, LINE, LEFT, TOP, CHARACTERS = 920, 20, 18, 52, 112
COLOURS = {
    "$": "#8fd4ff",
    "torch.OutOfMemoryError": "#ff7b72",
    "out of memory": "#ffd479",
    "--": "#9aa4af",
    "weights": "#8ce99a",
}


def run(script: str) -> list[tuple[float, str]]:
    """The command and every line it prints, each with the second it appeared."""
    lines, start = [(0.0, f"$ python {script}")], time.monotonic()
    process = subprocess.Popen(
        [sys.executable, script], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    first = None
    for line in process.stdout:
        first = first or time.monotonic() - start - 0.6  # importing torch is not what the picture is about
        lines.append((time.monotonic() - start - first, line.rstrip("\n")))
    process.wait()
    logged = re.compile(r"step \d+: out of memory")  # the library's own warning, which exact.py prints as well
    return [(at, line) for at, line in lines if not line.startswith((" ", "Traceback")) and not logged.match(line)]


def svg(lines: list[tuple[float, str]]) -> str:
    height = TOP + LINE * len(lines) + 12
    rows = []
    for number, (at, line) in enumerate(lines):
        colour = next((colour for start, colour in COLOURS.items() if start in line[: len(start) + 8]), "#e6edf3")
        text = html.escape(line if len(line) <= CHARACTERS else line[: CHARACTERS - 1] + "…")
        rows.append(
            f'<text x="{LEFT}" y="{TOP + LINE * number}" fill="{colour}" style="animation-delay:{at:.2f}s" '
            f'xml:space="preserve">{text}</text>'
        )
    dots = "".join(
        f'<circle cx="{20 + 18 * i}" cy="18" r="6" fill="{c}"/>'
        for i, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        'aria-label="A plain loop dies of an out-of-memory error; the same loop with Brimful redoes the step and goes on">'
        "<style>text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;opacity:0;"
        "animation:show .01s forwards}@keyframes show{to{opacity:1}}"
        "@media(prefers-reduced-motion:reduce){text{animation:none;opacity:1}}</style>"
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#0d1117"/>{dots}{"".join(rows)}</svg>\n'
    )


def main() -> None:
    plain, exact = run("plain.py"), run("exact.py")
    offset = plain[-1][0] + 1.5
    lines = [*plain, (offset - 0.5, ""), *((at + offset, line) for at, line in exact)]
    (HERE.parent / "oom.svg").write_text(svg(lines), encoding="utf-8")
    print("\n".join(line for _, line in lines))


if __name__ == "__main__":
    main()
