"""The comparison of batch size finders runs end to end on the CPU, and its figures say what it claims."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from brimful.units import MiB

pytestmark = pytest.mark.torture  # 20 s: every finder there is
BENCH = Path(__file__).parents[2] / "bench" / "finders.py"
LIMIT = 32 * MiB
TASK = """
import torch
from torch import nn

from brimful import Loss, Task


class Wide(Task):
    def model(self):
        return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))

    def loss(self, model, batch):
        return Loss(sum=model(batch["x"]).square().mean(dim=(1, 2)).sum(), count=len(batch["x"]))

    def dummy(self, rows, shape):
        return {"x": torch.randn(rows, 32, 32)}
"""


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_finders", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(BENCH.parent))  # as `python bench/finders.py` has it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH.parent))
    return module


@pytest.fixture(scope="module")
def ran(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One run of all finders, from an empty folder: its JSON, and what is in that folder afterwards."""
    folder, here = tmp_path_factory.mktemp("finders"), tmp_path_factory.mktemp("here")
    (folder / "wide.py").write_text(TASK)
    out = folder / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        asked = ["--task", f"{folder / 'wide.py'}:Wide", "--device", "cpu", "--memory-limit", str(LIMIT)]
        code = bench.main([*asked, "--global-batch", "1024", "--start", "512", "--json", str(out)])
    assert code == 0
    told = json.loads(out.read_text())
    yield {**told, "by_name": {row["finder"]: row for row in told["results"]}, "left": list(here.iterdir())}


def test_every_finder_has_a_line_that_worked(bench: ModuleType, ran: dict[str, Any]) -> None:
    assert [row["finder"] for row in ran["results"]] == [*bench.FINDERS, "brimful-largest"]
    assert [row["problem"] for row in ran["results"]] == [""] * 6


def test_brimful_finds_without_running_out(ran: dict[str, Any]) -> None:
    assert ran["by_name"]["brimful"]["ooms"] == 0


@pytest.mark.parametrize("peer", ["accelerate", "lightning-power", "lightning-binsearch"])
def test_peers_find_by_running_out(ran: dict[str, Any], peer: str) -> None:
    assert ran["by_name"][peer]["ooms"] >= 1


def test_accelerate_runs_out_once_for_every_size_but_the_last(ran: dict[str, Any]) -> None:
    row = ran["by_name"]["accelerate"]
    assert row["ooms"] == len(row["details"]["tried"]) - 1
    assert row["details"]["tried"][-1] == row["rows"]


@pytest.mark.parametrize("name", ["brimful", "brimful-largest"])
def test_what_brimful_found_runs_within_the_limit(ran: dict[str, Any], name: str) -> None:
    assert 0 < ran["by_name"][name]["peak_bytes"] <= LIMIT


def test_all_met_the_same_limit(ran: dict[str, Any]) -> None:
    """Nobody's result exceeds it, and the search of each peer that fills it came near it."""
    assert all(row["peak_bytes"] <= LIMIT for row in ran["results"] if row["rows"])
    assert ran["by_name"]["accelerate"]["peak_bytes"] > 0.85 * LIMIT


def test_ratios_are_in_units_of_brimful(ran: dict[str, Any]) -> None:
    base, peer = ran["by_name"]["brimful"], ran["by_name"]["accelerate"]
    assert base["seconds_ratio"] == base["rows_per_s_ratio"] == 1
    assert peer["seconds_ratio"] == pytest.approx(peer["seconds"] / base["seconds"])


def test_says_when_where_and_with_what(ran: dict[str, Any]) -> None:
    assert ran["date"] and ran["device"] == "cpu" and ran["limit_bytes"] == LIMIT
    assert {"python", "torch", "accelerate", "lightning", "brimful"} <= set(ran["versions"])


def test_all_ooms_are_counted_as_numbers(ran: dict[str, Any]) -> None:
    assert all(type(row["ooms"]) is int for row in ran["results"])


def test_leaves_nothing_behind(ran: dict[str, Any]) -> None:
    assert ran["left"] == []


def test_the_median_of_several_runs_stands(bench: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(TASK)
    asked = ["--task", f"{tmp_path / 'wide.py'}:Wide", "--device", "cpu", "--memory-limit", "16MiB"]
    bench.main([*asked, "--finders", "ultralytics-style", "--repeats", "3", "--json", str(tmp_path / "out.json")])
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert row["seconds"] == sorted(row["all_seconds"])[1]


def test_a_result_that_does_not_run_is_told(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wide.py").write_text(TASK)
    guess = bench.Result(finder="guess", rows=1000, ooms=0, seconds=1.0)
    monkeypatch.setitem(bench.FINDERS, "guess", lambda contest: [guess])
    asked = ["--task", f"{tmp_path / 'wide.py'}:Wide", "--device", "cpu", "--memory-limit", "16MiB"]
    bench.main([*asked, "--finders", "guess"])
    out = capsys.readouterr().out
    assert "guess: its result runs out of memory: cpu out of memory" in out
    assert "OOM" in next(line for line in out.splitlines() if line.startswith("guess "))


def test_a_finder_that_fails_is_a_line_with_the_reason(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wide.py").write_text(TASK)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = ["--task", f"{tmp_path / 'wide.py'}:Wide", "--device", "cpu", "--memory-limit", "16MiB"]
    assert bench.main([*asked, "--finders", "lightning-power"]) == 0
    assert (
        "lightning-power: ImportError: neither lightning nor pytorch_lightning is installed" in capsys.readouterr().out
    )


def test_a_finder_that_does_not_exist_is_refused(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--finders", "brimful,guessing"])
    assert "unknown guessing. Try: accelerate, lightning-power" in capsys.readouterr().err
