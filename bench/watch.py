"""Whether a run that is watched is slower: one run on the CPU, watched and not watched in turn.

    python bench/watch.py --rounds 8 --window 10

A small chat model trains. In every second window `brimful watch` runs in a terminal of 200 × 60, the most it has to draw, at its
fastest (once a second). The steps of each window are taken from the run's own events; their median times are compared, watched over
not watched. Windows not watched are also compared with each other, which shows how much of a difference is noise. Last come the CPU
time of the view and the bytes that it wrote to the terminal.
"""

import argparse
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

COLUMNS, LINES = 200, 60
START_S = 2.0
"""Steps of the first seconds of a window are left out: starting Python is no watching."""


@dataclass(frozen=True)
class Window:
    begin: float
    end: float
    watched: bool
    cpu_s: float = 0.0
    written_bytes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="windows of each kind")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of a window")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        training = start_training(run)
        try:
            wait_for_steps(run, training)
            windows = []
            for _ in range(options.rounds):
                windows += [unwatched(options.window), watched(run, options.window)]
        finally:
            training.send_signal(signal.SIGINT)
            training.wait()
        for line in figures(windows, step_times(run)):
            print(json.dumps(line))


def start_training(run: Path) -> subprocess.Popen[bytes]:
    """On one core, so that the view has another, as the host of a GPU has."""
    command = [sys.executable, "-m", "brimful", "train", "sft", "--demo-data", "--model", "chatlm-tiny", "--freeze", "encoder+embeddings", "--device", "cpu"]  # fmt: skip
    command += ["--run", str(run), "--max-steps", "1000000", "--workers", "0"]
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for_steps(run: Path, training: subprocess.Popen[bytes], steps: int = 50) -> None:
    while len(step_times(run)) < steps:
        if training.poll() is not None:
            sys.exit("the training has ended before it was measured")
        time.sleep(0.5)


def step_times(run: Path) -> list[tuple[float, float]]:
    """When each step ended, and how long it took, from the end of the one before."""
    try:
        lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    steps = [json.loads(line) for line in lines if line.startswith('{"event": "step"') and line.endswith("\n")]
    times = [datetime.fromisoformat(step["time"]).timestamp() for step in steps]
    return [(end, end - begin) for begin, end in pairwise(times)]


def unwatched(seconds: float) -> Window:
    begin = time.time()
    time.sleep(seconds)
    return Window(begin, time.time(), watched=False)


def watched(run: Path, seconds: float) -> Window:
    begin, written = time.time(), 0
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "brimful", "watch", str(run)])
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    while (left := begin + seconds - time.time()) > 0:
        if select.select([terminal], [], [], left)[0]:
            written += len(os.read(terminal, 65536))
    cpu_s = used_cpu_s(pid)
    end = time.time()
    os.write(terminal, b"q")
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # the other side is closed
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    return Window(begin, end, watched=True, cpu_s=cpu_s, written_bytes=written)


def used_cpu_s(pid: int) -> float:
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def figures(windows: list[Window], times: list[tuple[float, float]]) -> list[dict[str, Any]]:
    medians = [median(took for end, took in times if one.begin + START_S <= end < one.end) for one in windows]
    off, on = medians[::2], medians[1::2]
    pairs = [
        watched / (before + after) * 2 for watched, before, after in zip(on, off, [*off[1:], off[-1]], strict=True)
    ]
    same = [second / first for first, second in pairwise(off)]
    view = [one for one in windows if one.watched]
    length = fmean(one.end - one.begin for one in view)
    return [
        {"bench": "watch", "windows": len(windows), "steps": len(times), "step_s_watched": median(on), "step_s_not_watched": median(off)},
        {"bench": "watch", "ratio_watched": median(pairs), "least": min(pairs), "most": max(pairs)},
        {"bench": "watch", "ratio_not_watched": median(same), "least": min(same), "most": max(same)},
        {"bench": "watch", "view_cpu_share": fmean(one.cpu_s for one in view) / length, "bytes_per_s": fmean(one.written_bytes for one in view) / length},
    ]  # fmt: skip


if __name__ == "__main__":
    main()
