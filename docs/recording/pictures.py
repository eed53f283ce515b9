"""Draw every view from real runs: docs/plan.svg, watch.svg, why.svg, compare.svg, doctor.svg, report.png and serve.png.

    python docs/recording/pictures.py [SVG …]

Trains two short runs of the tiny chat model on the CPU in a temporary folder, then shows them with the commands that a user
would type. What the commands print is drawn as it is; nothing is written by hand but the log that `why` reads, which is the
message of a user's own guide, and paths of this machine, which are shortened. Both pages are photographed by Chromium; that of
`serve` needs a Chinese font and trains the demo for two minutes. With names, only those pictures are drawn again.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[1]
TRAIN = [
    "train", "pretrain", "--demo-data", "--recipe", "demo", "--max-steps", "150", "--generate-rows", "0", "--device", "cpu",
    "--memory-limit", "256MiB",
]  # fmt: skip
LOG = """\
batch_size_per_gpu: 32, gradient_accumulation_steps: 2, num_processes: 3, max_seq_len: 252, vocab_size: 40960
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.23 GiB. GPU 0 has a total capacity of 19.58 GiB of which 1.06 GiB \
is free. Including non-PyTorch memory, this process has 18.50 GiB memory in use. Of the allocated memory 14.94 GiB is allocated by \
PyTorch, and 3.18 GiB is reserved by PyTorch but unallocated.
"""
VIEWS = {
    "plan": (["train", "pretrain", "--demo-data", "--recipe", "demo", "--memory-limit", "256MiB", "--device", "cpu", "--dry-run"], 100, 40),
    "watch": (["watch", "runs/first", "--once"], 100, 30),
    "why": (["why", "train.log"], 100, 46),
    "compare": (["compare", "runs/first", "runs/split"], 100, 60),
    "doctor": (["doctor"], 100, 60),
}  # fmt: skip
"""By picture: the command, and the size of the terminal. Longer output is cut."""
PAGE = "1280,1700"


def brimful(folder: Path, *arguments: str, columns: int = 100, lines: int = 40) -> str:
    environment = {
        **os.environ,
        "FORCE_COLOR": "1",
        "COLUMNS": str(columns),
        "LINES": str(lines),
        "BRIMFUL_LANG": "en",
        "TERM": "xterm-256color",
        "OMP_NUM_THREADS": "1",
        "BRIMFUL_CACHE": str(folder / "cache"),  # a plan that is made, not one of an earlier recording
    }
    command = [sys.executable, "-m", "brimful", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode > 1:  # the doctor's 1 means that it found something
        sys.exit(f"{done.stderr}\nbrimful {' '.join(arguments)} ended with {done.returncode}")
    for path, shown in (
        (str(folder), "~/project"),
        (sys.prefix, "~/venv"),
        (str(DOCS.parent), "~/brimful"),
        (str(Path.home()), "~"),
    ):
        done.stdout = done.stdout.replace(path, shown)
    return done.stdout


def svg(name: str, command: list[str], output: str, columns: int, lines: int) -> str:
    """A terminal window. rich's own picture loads a font from the network; this one takes the reader's."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bright_blue"), f"brimful {' '.join(command)}"))
    shown = output.rstrip("\n").split("\n")
    for line in shown[:lines]:
        console.print(Text.from_ansi(line), overflow="crop", no_wrap=True)
    if len(shown) > lines:
        console.print(Text("⋮", style="dim"))
    picture = console.export_svg(title=f"brimful {name}")
    picture = re.sub(r"@font-face\s*\{.*?\}", "", picture, flags=re.DOTALL)
    return picture.replace("Fira Code", "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono")


def photograph_chat(folder: Path) -> None:
    """The demo's model, asked the demo's questions on the page of `brimful serve`."""
    sys.path.insert(0, str(DOCS.parent))
    from tests.report.chromium import Chromium

    from brimful.tasks.demo import questions

    brimful(folder, "train", "pretrain", "--demo-data", "--recipe", "demo", "--run", "runs/demo", "--device", "cpu", "--memory-limit", "1GiB")  # fmt: skip
    command = [sys.executable, "-m", "brimful", "serve", "runs/demo", "--port", "0", "--json", "--device", "cpu", "--memory-limit", "1GiB"]  # fmt: skip
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        with Chromium(folder / "chat-browser") as browser:
            page = browser.page(width=1180, height=760)
            page.open(url)
            for place, question in enumerate(questions(), 1):
                page.wait_for("document.getElementById('device').textContent !== ''")
                page.run("document.getElementById('question').focus()")
                page.send("Input.insertText", text=question.prompt)
                page.key("Enter")
                page.wait_for(f"document.getElementById('stop').hidden && document.querySelectorAll('.assistant').length === {place}")  # fmt: skip
            page.run("document.activeElement.blur()")
            page.picture(DOCS / "serve.png", whole=False)
    finally:
        server.terminate()
        server.wait(60)


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.log").write_text(LOG, encoding="utf-8")
        for view in names:
            if view in ("watch", "compare", "report") and not (folder / "runs" / "split").exists():
                brimful(folder, *TRAIN, "--run", "runs/first")
                brimful(folder, *TRAIN, "--run", "runs/split", "--micro-batch", "8")
            if view == "serve":
                photograph_chat(folder)
                continue
            if view == "report":
                brimful(folder, "report", "runs/first", "--output", "page.html")
                browser = shutil.which("chromium") or sys.exit("The page needs Chromium.")
                options = [
                    "--headless",
                    "--no-sandbox",
                    "--hide-scrollbars",
                    f"--user-data-dir={folder / 'browser'}",
                    f"--window-size={PAGE}",
                ]
                subprocess.run([browser, *options, f"--screenshot={DOCS / 'report.png'}", f"file://{folder / 'page.html'}"], check=True, capture_output=True)  # fmt: skip
                continue
            command, columns, lines = VIEWS[view]
            output = brimful(folder, *command, columns=columns, lines=lines)
            (DOCS / f"{view}.svg").write_text(svg(view, command, output, columns, lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or [*VIEWS, "report", "serve"])
