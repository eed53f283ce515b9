"""Memory taken in the middle of a training, on the CPU at tiny scale: what each contestant's line claims is what happened."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench" / "oom_midrun.py"
TINY = ["--device", "cpu", "--lengths", "12,12", "--memory-limit", "24MiB"]
STEPS, GLOBAL_BATCH = 4, 16


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_oom_midrun", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(BENCH.parent))  # as `python bench/oom_midrun.py` has it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH.parent))
    return module


@pytest.fixture(scope="module")
def ran(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of all contestants, memory gone at the third step: its JSON by contestant."""
    out = tmp_path_factory.mktemp("midrun") / "out.json"
    assert bench.main([*TINY, "--steps", str(STEPS), "--take-at", "3", "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    return {**told, "by_name": {row["contestant"]: row for row in told["results"]}}


@pytest.mark.torture
def test_memory_ran_out_for_everybody(bench: ModuleType, ran: dict[str, Any]) -> None:
    assert list(ran["by_name"]) == [*bench.CONTESTANTS, bench.FINER]
    assert all(ran["by_name"][name]["ooms"] >= 1 for name in bench.CONTESTANTS)


@pytest.mark.torture
def test_brimful_trains_what_was_asked(ran: dict[str, Any]) -> None:
    row = ran["by_name"]["brimful"]
    assert (row["steps_done"], row["steps_discarded"], row["died"]) == (STEPS, 0, "")
    assert row["global_batches"] == [GLOBAL_BATCH]
    assert (row["rows_lost"], row["rows_repeated"]) == (0, 0)
    assert row["distance"] < 1e-4


@pytest.mark.torture
def test_the_trainer_changes_the_global_batch_and_starts_over_on_trained_weights(ran: dict[str, Any]) -> None:
    row = ran["by_name"]["trainer"]
    assert row["steps_done"] > STEPS and row["rows_repeated"] > 0
    assert row["global_batches"][0] == GLOBAL_BATCH and min(row["global_batches"]) < GLOBAL_BATCH
    assert row["distance"] > 1e-3


@pytest.mark.torture
def test_accelerates_finder_throws_the_training_away(ran: dict[str, Any]) -> None:
    row = ran["by_name"]["accelerate"]
    assert row["steps_discarded"] >= 2 and row["steps_done"] == STEPS
    assert row["distance"] > 1e-3


@pytest.mark.torture
def test_lightning_dies_where_memory_went(ran: dict[str, Any]) -> None:
    row = ran["by_name"]["lightning"]
    assert row["died"].startswith("died in step 3: OutOfMemoryError")
    assert (row["steps_done"], row["rows_lost"]) == (2, 2 * GLOBAL_BATCH)


def test_rows_are_counted_once_their_backward_is_through_and_a_step_follows(bench: ModuleType) -> None:
    recorder, weight = bench.Recorder(memory=None), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters())
    recorder.watch(weight, optimizer)
    for rows, backward, cleared in (([1], True, True), ([2], True, False), ([3], False, False)):
        loss = weight(torch.ones(1, 1)).sum()
        recorder.follow(torch.tensor(rows), loss)
        if backward:
            loss.backward()
        if cleared:
            optimizer.zero_grad()
    optimizer.step()
    optimizer.step()
    assert recorder.updates == [[2], []]


def test_rows_are_counted_where_no_python_runs_as_in_a_replayed_graph(bench: ModuleType) -> None:
    """Operations on tensors that stay, so what is copied into the recorded ones counts."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append((operation, args, result := operation(*args, **(kwargs or {}))))
            return result

    calls: list[Any] = []
    recorder, weight, rows = bench.Recorder(memory=None), torch.nn.Linear(1, 1), torch.tensor([4, 4, -1])
    optimizer = torch.optim.SGD(weight.parameters())
    recorder.watch(weight, optimizer)
    loss = weight(torch.ones(1, 1)).sum()
    recorder.follow(rows, loss)
    with Recording():
        loss.backward()
    optimizer.step()
    rows.copy_(torch.tensor([7, 9, -1]))
    for operation, args, result in calls:
        again = operation(*args)
        if again.shape == result.shape and again.dtype == result.dtype and again is not result:
            result.copy_(again)
    optimizer.step()
    assert recorder.updates == [[4, 4], [7, 9]]


def test_what_watches_keeps_no_model_alive(bench: ModuleType) -> None:
    recorder, model = bench.Recorder(memory=None), torch.nn.Linear(1, 1)
    recorder.watch(model, torch.optim.SGD(model.parameters()))
    del model
    assert recorder.model is None


def test_the_stepper_does_what_the_plain_loop_does(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MEDIAN_OVER", 6)
    bench.main([*TINY, "--steps", "6", "--overhead", "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())["overhead"]
    # In fp32: the step divides by an estimate of the count and corrects it, which rounds once more than the plain loop.
    assert found["distance"] < 5e-7 and len(found["seconds"]["plain"]) == len(found["seconds"]["stepper"]) == 6
    assert found["ratio"] == pytest.approx(found["stepper_s"] / found["plain_s"])
    assert "| Stepper" in capsys.readouterr().out


def test_memory_that_comes_back_is_used_again(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BEFORE", 4), ("AFTER", 14), ("MEDIAN_OVER", 3)):
        monkeypatch.setattr(bench, name, value)
    limit = ["--memory-limit", "32MiB", "--take", "45%", "--micro-batch", "16"]
    bench.main([*TINY, *limit, "--recover", "--give-back-after", "4", "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())["recovery"]
    events = [(event["event"], event["step"]) for event in found["events"]]
    assert events[0][0] == "oom" and 5 <= events[0][1] <= 8
    assert events[-1][0] == "grow" and events[-1][1] > 8
    result = found["results"][0]
    assert result["steps_done"] == result["steps_requested"] == 22 and found["rows_per_s"]["during"] > 0
    assert (result["rows_lost"], result["rows_repeated"]) == (0, 0)
    assert "steps' time lost by each" in capsys.readouterr().out


@pytest.fixture(scope="module")
def packed(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Packed rows in float64, where the order of sums hardly matters. Memory is gone in the second of 12 steps."""
    out = tmp_path_factory.mktemp("packed") / "out.json"
    flags = ["--device", "cpu", "--layout", "packed", "--precision", "fp64", "--lengths", "24,24"]
    limit = ["--memory-limit", "50MiB", "--take", "40%", "--global-batch", "8"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BEFORE", 1), ("AFTER", 10), ("MEDIAN_OVER", 1)):
            patch.setattr(bench, name, value)
        assert bench.main([*flags, *limit, "--recover", "--give-back-after", "1", "--json", str(out)]) == 0
    told: dict[str, Any] = json.loads(out.read_text())
    return told


def test_packed_rows_survive_and_are_split_as_before_once_memory_is_back(packed: dict[str, Any]) -> None:
    events = [(event["event"], event["step"]) for event in packed["recovery"]["events"]]
    assert packed["levers"]["chunked_loss"] == "on" and packed["layout"] == "packed"
    assert ("oom", 2) in events and events[-1][0] == "grow" and packed["recovery"]["ooms"] >= 1


def test_packed_rows_train_what_was_asked_when_memory_goes(packed: dict[str, Any]) -> None:
    row = packed["recovery"]["results"][0]
    assert (row["steps_done"], row["global_batches"], row["died"]) == (12, [8], "")
    assert (row["rows_lost"], row["rows_repeated"]) == (0, 0)
    assert row["distance"] < 1e-5 and packed["recovery"]["loss_apart"]["brimful"] < 1e-6


def test_a_planned_run_is_compared_with_one_that_is_split_finer(bench: ModuleType, packed: dict[str, Any]) -> None:
    finer = packed["recovery"]["results"][1]
    assert (finer["contestant"], finer["ooms"]) == (bench.FINER, 0) and 0 < finer["distance"] < 1e-5


def test_it_needs_nothing_of_the_command_line() -> None:
    code = "import sys; sys.modules['cyclopts'] = sys.modules['rich'] = None; import oom_midrun"
    subprocess.run([sys.executable, "-c", code], cwd=BENCH.parent, check=True, timeout=60)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--take", "150%"], "--take 150% must be more than 0 and less than the limit of 24 MiB"),
        (["--micro-batch", "5"], "--global-batch 16 must be a multiple of --micro-batch 5"),
        (["--take-at", "9"], "--take-at 9 comes after the last of 8 steps"),
        (
            ["--layout", "packed", "--contestants", "trainer"],
            "--layout packed is for --contestants brimful, not trainer",
        ),
        (["--layout", "packed", "--overhead"], "--overhead compares with a loop over padded rows"),
        (["--memory-limit", "9MiB", "--contestants", "brimful"], "brimful does not run even undisturbed"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    assert bench.main([*TINY, *flags]) == 2
    assert sentence in capsys.readouterr().err
