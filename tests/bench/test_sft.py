"""The comparison of fine-tuning, at tiny scale on the CPU: Brimful alone; the others where they are installed."""

import importlib
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
STEPS = 3


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(BENCH))  # as `python bench/sft.py` has it
    try:
        yield {name: importlib.import_module(name) for name in ("generated", "sft", "sft_cases", "sft_peers")}
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def folder(modules: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, tokens and weights of a full fine-tuning."""
    folder = tmp_path_factory.mktemp("sft")
    modules["generated"].generate(folder / "rows.parquet", 300)
    for data in ("real", "long"):
        modules["sft_cases"].Case(model="qwen2.5-0.5b", data=data, folder=folder, tiny=True).prepare(folder / "rows.parquet")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def job(folder: Path) -> dict[str, Any]:
    return {
        "model": "qwen2.5-0.5b", "data": "real", "limit_bytes": None, "contestant": "brimful", "setting": "no setting", "settings": 1,
        "trainer": "brimful", "options": {"workers": 0}, "seed": 0, "steps": STEPS, "tiny": True, "device": "cpu",
        "warm_seconds": None, "seconds": 60.0, "workers": 0, "folder": str(folder), "output": str(folder / "out.jsonl"),
        "compile_cache": "",
    }  # fmt: skip


@pytest.fixture(scope="module")
def ran(modules: dict[str, ModuleType], job: dict[str, Any]) -> dict[str, Any]:
    modules["sft"].write_result(job, modules["sft"].run_job(job))
    return modules["sft"].read_results(job["output"])[0]


def test_a_line_has_all_figures(modules: dict[str, ModuleType], ran: dict[str, Any]) -> None:
    assert ran["status"] == "ok", ran["error"]
    assert ran["steps"] == len(ran["loss"]) == STEPS and ran["rows_by_step"] == [8] * STEPS
    assert ran["global_batch_kept"] and ran["same_rows"] and ran["ooms"] == 0 and ran["plan_s"] > 0
    assert ran["tokens_per_s"] > 0 and 0 <= ran["padding"] < 1
    assert ran["loss"][0] == pytest.approx(math.log(4096), abs=0.2)  # random weights know nothing
    table = modules["sft"].show_tables([ran])
    assert "qwen2.5-0.5b, real rows, CPU" in table and "| no setting |" in table and "kept" in table


def test_trl_trains_the_same_rows_to_the_same_losses(
    modules: dict[str, ModuleType], job: dict[str, Any], ran: dict[str, Any]
) -> None:
    pytest.importorskip("trl")
    result = modules["sft"].run_job({**job, "contestant": "trl", "trainer": "trl", "options": {"batch": 4}})
    assert result["status"] == "ok", result["error"]
    assert result["real_tokens"] == ran["real_tokens"] and result["global_batch_kept"]
    assert result["loss"] == pytest.approx(ran["loss"], rel=1e-4)


def test_a_contestant_that_trains_other_weights_is_refused(modules: dict[str, ModuleType], folder: Path) -> None:
    cases = modules["sft_cases"]
    full = cases.Case(model="qwen2.5-0.5b", data="real", folder=folder, tiny=True)
    model = full.task().initial_model()
    full.check(model)
    with pytest.raises(cases.OtherTraining, match="and lora has 32,768"):
        cases.Case(model="llama-8b-lora", data="real", folder=folder, tiny=True).check(model)
    with pytest.raises(cases.OtherTraining, match="are not in 4 bits"):
        cases.Case(model="llama-8b-qlora", data="real", folder=folder, tiny=True).check(model)


def test_long_rows_have_a_heavy_tail_and_an_end(modules: dict[str, ModuleType], folder: Path) -> None:
    lengths = modules["sft_cases"].long_lengths(2000, 4096)
    assert lengths.max() == 4096 and np.median(lengths) == pytest.approx(300, rel=0.1)
    assert lengths.mean() > 1.5 * np.median(lengths)
    assert np.array_equal(lengths, modules["sft_cases"].long_lengths(2000, 4096))
    store = modules["sft_cases"].Case(model="qwen2.5-0.5b", data="long", folder=folder, tiny=True).store
    assert store.longest[0] <= 256 and sum(store.meta.truncated.values()) == 0


def test_models_have_the_size_of_the_published_ones(modules: dict[str, ModuleType]) -> None:
    from transformers import AutoModelForCausalLM

    counts = {"qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "llama-8b-lora": 8_030_261_248}
    for name, count in counts.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(modules["sft_cases"].MODELS[name].config(tiny=False))
        assert sum(param.numel() for param in model.parameters()) == count


def test_a_ladder_ends_with_the_first_setting_that_runs(
    modules: dict[str, ModuleType], job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one process with the grid after it."""
    sft, output = modules["sft"], tmp_path / "out.jsonl"
    figures = {"error": "", "wall_s": 1.0}
    monkeypatch.setattr(
        sft, "run_job", lambda one: {"status": "ok" if one["setting"].endswith("batch 4") else "OOM", **figures}
    )
    jobs = [
        {**job, "trainer": "trl", "contestant": contestant, "setting": name, "output": str(output)}
        for contestant in ("trl", "trl-tuned")
        for name, *_ in sft.settings(contestant, "llama-8b-lora")[:4]
    ]
    sft.run_jobs(jobs)
    lines = sft.read_results(output)
    ladder = [line["setting"] for line in lines if line["contestant"] == "trl"]
    assert ladder == ["bf16 weights, batch 8", "bf16 weights, batch 4"] and len(lines) == 2 + 4
    assert sft.still_needed(jobs, lines, sft.LADDERS) == []


def test_a_process_that_dies_costs_one_setting(
    modules: dict[str, ModuleType], job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules["sft"], "sys", type("sys", (), {"executable": "/bin/false", "stderr": sys.stderr}))
    output = str(tmp_path / "out.jsonl")
    lines = modules["sft"].run_process([{**job, "output": output, "setting": name} for name in ("a", "b")])
    assert [(line["setting"], line["status"]) for line in lines] == [("a", "error")]
    assert json.loads(Path(output).read_text())["error"] == "the process ended with code 1"


def test_after_a_death_the_next_process_goes_on_with_the_setting_after_it(
    modules: dict[str, ModuleType], job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sft, started = modules["sft"], []

    def die(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        started.append([one["setting"] for one in jobs])
        return [{**jobs[0], "status": "error"}]

    monkeypatch.setattr(sft, "run_process", die)
    monkeypatch.setattr(sft, "_is_there", lambda name: True)
    names = [("trl", "defaults"), ("trl", "batch 4"), ("trl-tuned", "packed 1")]
    sft.run_all([{**job, "contestant": one, "setting": name} for one, name in names], math.inf, sft._arguments([]))
    assert started == [["defaults", "batch 4", "packed 1"], ["batch 4", "packed 1"], ["packed 1"]]


def test_a_package_that_is_missing_is_a_line(
    modules: dict[str, ModuleType], job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules["sft"], "_is_there", lambda name: name != "unsloth")
    output = tmp_path / "out.jsonl"
    unsloth = {**job, "output": str(output), "contestant": "unsloth"}
    modules["sft"].run_all([unsloth], math.inf, modules["sft"]._arguments([]))
    line = json.loads(output.read_text())
    assert (line["status"], line["error"]) == ("skipped", "unsloth cannot be imported")
    assert "skipped" in modules["sft"].show_tables([line])


def test_memory_that_goes_away_is_survived(
    modules: dict[str, ModuleType], job: dict[str, Any], ran: dict[str, Any], tmp_path: Path
) -> None:
    disturbed = {**job, "limit_bytes": 100 * 2**20, "take_at": 1, "give_back_after": 1, "weights": str(tmp_path / "w.pt"),
                 "options": {"workers": 0, "micro_batch": 8, "checkpointing": "off"}}  # fmt: skip
    result = modules["sft"].run_job(disturbed)
    assert result["status"] == "ok", result["error"]
    assert result["survived_ooms"] >= 1 and result["taken_bytes"] > 0 and result["global_batch_kept"]
    assert result["loss"] == pytest.approx(ran["loss"], rel=1e-4)


def test_flags_that_cannot_work_are_refused(modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        modules["sft"].main(["--models", "gpt-5"])
    assert "unknown gpt-5. Try: qwen2.5-0.5b" in capsys.readouterr().err


@pytest.mark.torture
def test_a_dry_run_of_the_script(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, BENCH / "sft.py", "--tiny", "--device", "cpu", "--rows", folder / "rows.parquet", "--limits", "none",
               "--models", "qwen2.5-0.5b", "--contestants", "brimful,trl,unsloth", "--steps", "3", "--output", tmp_path / "o.jsonl"]  # fmt: skip
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True, timeout=600)
    assert "qwen2.5-0.5b, long rows" in done.stdout and "| brimful" in done.stdout


def test_calls_side_by_side_prepare_one_after_the_other(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a folder: what one writes the other would read half."""
    notes: list[str] = []

    def prepare(args: Any, folder: Path) -> None:
        notes.append("begins")
        time.sleep(0.3)
        notes.append("ends")

    monkeypatch.setattr(modules["sft"], "_prepare_all", prepare)
    calls = [threading.Thread(target=modules["sft"]._prepare, args=(None, tmp_path / "shared")) for _ in range(2)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert notes == ["begins", "ends"] * 2
