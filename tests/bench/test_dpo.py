"""The comparison of preference training, at tiny scale on the CPU."""

import argparse
import importlib
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def dpo() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))  # as `python bench/dpo.py` has it
    try:
        yield importlib.import_module("dpo")
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def folder(dpo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    importlib.import_module("generated").generate(folder / "rows.parquet", 80)
    for model in dpo.MODELS:
        dpo.prepare(model, folder, folder / "rows.parquet", tiny=True)
    return folder


def run(dpo: ModuleType, folder: Path, model: str, contestant: str, **options: Any) -> dict[str, Any]:
    args = argparse.Namespace(seed=0, steps=2, seconds=60.0, device="cpu", tiny=True)
    job = dpo.make_job(args, folder, folder / "out.jsonl", model, None, contestant, "a setting", options)
    result = dpo.run_job(job)
    assert result["status"] == "ok", result["error"]
    dpo.write_result(job, result)
    return result


def test_two_models_have_the_same_losses(dpo: ModuleType, folder: Path) -> None:
    own = run(dpo, folder, "t5", "brimful", workers=0)
    other = run(dpo, folder, "t5", "two-models", batch=4)
    assert own["loss"][0] == pytest.approx(math.log(2), abs=1e-5) and own["pairs_per_s"] > 0
    assert other["loss"] == pytest.approx(own["loss"], abs=1e-5)
    table = dpo.show_tables(dpo.read_results(folder / "out.jsonl"))
    assert "t5 (tiny)" in table and "| two-models |" in table and "×" in table


def test_trl_has_the_same_losses(dpo: ModuleType, folder: Path) -> None:
    pytest.importorskip("trl")
    own = run(dpo, folder, "qwen2.5-0.5b", "brimful", workers=0)
    other = run(dpo, folder, "qwen2.5-0.5b", "trl", precompute_ref_log_probs=True, batch=4)
    assert other["loss"] == pytest.approx(own["loss"], abs=1e-4)


def test_before_training_all_is_at_chance(dpo: ModuleType, folder: Path) -> None:
    model = dpo.model_folder("t5", folder, True)
    found = dpo.judge(model, model, folder / "pairs-tiny.jsonl", "cpu")
    assert found["accuracy"] == 0 and found["margin"] == 0 and found["perplexity_change"] == 0
    assert found["perplexity_before"] > 10


def test_what_was_cut_off_while_it_learnt_or_was_prepared_is_gone_on_with(
    dpo: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(dpo, "_brimful", lambda args, *words: commands.append(words))
    args = argparse.Namespace(tiny=False, rows=folder / "rows.parquet", epochs=20)
    dpo._learn_sft(args, tmp_path, tmp_path)
    (tmp_path / "learn-sft").mkdir()
    (tmp_path / "learn-sft/events.jsonl").touch()
    dpo._learn_sft(args, tmp_path, tmp_path)
    assert ["--resume" in words for words in commands] == [False, True]
    shutil.copytree(folder / "t5-run-tiny", tmp_path / "t5-run-tiny", symlinks=True)
    (tmp_path / "t5-model-tiny.part").mkdir()
    dpo.prepare("t5", tmp_path, folder / "rows.parquet", tiny=True)
    assert (tmp_path / "t5-model-tiny/config.json").is_file()
