"""The task of docs/packing.md plans and trains as the page says, and its rows may be padded as well."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import brimful
from brimful.planning.plan import Plan
from brimful.tasks.load import load_task
from brimful.training import metrics
from tests.training import runs

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "packing.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with the guide's task and rows for it."""
    folder = tmp_path_factory.mktemp("guide")
    (task,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (folder / "mine.py").write_text(task)
    (folder / "rows.txt").write_text("\n".join("to be or not to be"[: 2 + 3 * number % 17] for number in range(48)))
    return folder


@pytest.fixture(autouse=True, scope="module")
def _small_matrices():
    """The peak of the CPU takes longer to measure than these runs to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "MATRIX", {"cpu": 64})
        patch.setattr(metrics, "TIMED_S", 0.001)
        yield


def train(desk, layout):
    """Both runs split each step into the same number of rows, so only the layout differs."""
    options = {"memory_limit": "64MiB", "device": "cpu", "workers": 0, "micro_batch": 8, "cache": False, "quiet": True}
    task = load_task(f"{desk / 'mine.py'}:task")
    rows = str(desk / "rows.txt")
    brimful.train(task, rows, valid=rows, run=desk / layout, max_steps=4, lr=1e-3, layout=layout, **options)
    return desk / layout


def test_packed_and_padded_the_task_trains_alike(desk):
    packed, padded = train(desk, "packed"), train(desk, "padded")
    assert Plan.load(packed / "plan.json").layout == "packed"
    assert runs.losses(packed) == pytest.approx(runs.losses(padded), rel=1e-4)


def test_the_command_runs(desk):
    (command,) = re.findall(r"^\$ (.*)$", GUIDE, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=desk, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert Plan.load(desk / "runs/packed/plan.json").choice("layout").requested == "packed"
