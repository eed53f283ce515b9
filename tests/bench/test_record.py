"""The cost of recording, at tiny scale on the CPU: both runs are measured, and the sum says what it is made of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "record.py"
WITHOUT_CLI = "import sys, runpy; sys.modules.update(dict.fromkeys(('rich', 'cyclopts'))); runpy.run_path({path!r}, run_name='__main__')"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Without the packages of the command line, as on a machine that only has torch."""
    file = tmp_path_factory.mktemp("record") / "found.json"
    sizes = ["--steps", "12", "--rounds", "2", "--width", "8", "--layers", "1", "--rows", "8", "--length", "8"]
    command = [
        sys.executable,
        "-c",
        WITHOUT_CLI.format(path=str(BENCH)),
        *sizes,
        "--device",
        "cpu",
        "--json",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


def test_both_runs_are_timed_and_their_ratio_is_that_of_pairs(found):
    assert all(found["step_ms"][name] > 0 for name in ("with", "without"))
    assert len(found["ratios"]) == 2 and min(found["ratios"]) <= found["ratio"] <= max(found["ratios"])


def test_only_the_run_with_recording_samples(found):
    assert found["samples"] >= 2 and found["sample_us"] > 0


def test_the_share_of_a_step_has_all_parts(found):
    more = sum(found[name]["with"] - found[name]["without"] for name in ("figures_us", "journal_us"))
    assert found["more_us_per_step"] == pytest.approx(more)
    share = more / 76_000 + found["sampling_share_of_a_core"]
    assert found["share_of_a_step"]["76 ms"] == pytest.approx(share)
