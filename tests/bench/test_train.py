"""The comparison of trainers, at tiny scale on the CPU: every entry has a line, and the line says what happened."""

import importlib
import inspect
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import brimful

BENCH = Path(__file__).parents[2] / "bench"
STEPS = 4


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    names = ("generated", "train", "train_cases", "train_peers", "train_plots")
    sys.path.insert(0, str(BENCH))  # as `python bench/train.py` has it
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def data(modules: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    modules["generated"].generate(path, 400)
    return path


@pytest.fixture(scope="module")
def folder(modules: dict[str, ModuleType], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenized rows of all cases."""
    folder = tmp_path_factory.mktemp("cases")
    for name in modules["train_cases"].CASES:
        modules["train_cases"].Case(name=name, folder=folder, tiny=True).prepare(str(data))
    return folder


@pytest.fixture(scope="module")
def ran(
    modules: dict[str, ModuleType], data: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """One dry run, with an entry that cannot work among the others: the lines by entry, and what was printed."""
    output = tmp_path_factory.mktemp("train") / "out.jsonl"
    job = {"case": "causal", "cap_bytes": None, "seed": 0, "steps": STEPS, "seconds": 60.0,
           "warm_seconds": None, "tiny": True, "device": "cpu", "workers": 0, "folder": str(folder), "output": str(output)}  # fmt: skip
    entries = {
        "hf-32": ("hf", {"batch": 32}),
        "broken": ("brimful", {"no_such_option": 1}),
        "brimful-padded": ("brimful", {"micro_batch": 2, "checkpointing": "off", "workers": 0}),
        "brimful-packed": ("brimful", {"layout": "packed", "micro_batch": 7, "workers": 0, "memory_limit": "200MiB"}),
    }
    jobs = [{**job, "entry": name, "trainer": trainer, "options": options} for name, (trainer, options) in entries.items()]  # fmt: skip
    assert modules["train"]._run_process(jobs, None) == ""
    lines = modules["train"].read_results(output)
    return {"lines": {line["entry"]: line for line in lines}, "table": modules["train"].show_tables(lines)}


def test_every_entry_has_a_line_and_a_failure_is_one(ran: dict[str, Any]) -> None:
    assert {entry: line["status"] for entry, line in ran["lines"].items()} == {
        "hf-32": "ok",
        "broken": "error",
        "brimful-padded": "ok",
        "brimful-packed": "ok",
    }
    assert "no_such_option" in ran["lines"]["broken"]["error"]


def test_all_train_the_same_rows_from_the_same_weights(ran: dict[str, Any]) -> None:
    hf, brimful = (ran["lines"][name] for name in ("hf-32", "brimful-padded"))
    assert hf["real_tokens"] == brimful["real_tokens"] > 0
    assert hf["loss"] == pytest.approx(brimful["loss"], abs=0.15)  # dropout differs
    assert len(set(hf["loss"])) == STEPS


def test_a_line_has_all_figures(ran: dict[str, Any]) -> None:
    for name in ("hf-32", "brimful-padded", "brimful-packed"):
        line = ran["lines"][name]
        assert line["steps"] == len(line["step_s"]) == len(line["loss"]) == STEPS
        assert line["rows_per_step"] == line["global_batch"] == 16
        assert line["rows_per_s"] > 0 and line["run_s"] >= line["start_s"] + sum(line["step_s"]) - 0.01
        assert 0 < line["padding"] < 1 and 0 < line["useful_share"] < line["computed_share"]
        assert not line["run_s_extrapolated"]


def test_the_fill_of_packed_rows_is_their_padding(ran: dict[str, Any]) -> None:
    padded, packed = (ran["lines"][name] for name in ("brimful-padded", "brimful-packed"))
    assert packed["real_tokens"] == padded["real_tokens"]
    assert packed["computed_tokens"] % 64 == 0 and packed["computed_tokens"] > packed["real_tokens"]
    assert packed["padding"] == pytest.approx(1 - packed["real_tokens"] / packed["computed_tokens"])


def test_the_peak_of_the_steps_is_compared_with_its_prediction(ran: dict[str, Any]) -> None:
    line = ran["lines"]["brimful-packed"]
    assert line["prediction_error"] == line["predicted_peak_bytes"] / line["step_peak_bytes"] - 1
    assert abs(line["prediction_error"]) < 0.1 and line["ooms"] == 0 and line["plan_s"] > 0
    assert f"{line['prediction_error']:+.1%}" in ran["table"]


def test_compiling_is_timed_apart(modules: dict[str, ModuleType]) -> None:
    before = modules["train"]._compile_seconds()
    torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
    assert modules["train"]._compile_seconds() > before


def test_the_options_of_brimfuls_entries_are_those_of_train(modules: dict[str, ModuleType]) -> None:
    known = inspect.signature(brimful.train).parameters
    assert all(name in known for _, options in modules["train"].BRIMFUL.values() for name in options)


def test_the_table_names_the_best_of_hugging_face(ran: dict[str, Any]) -> None:
    assert "| hf, best of these: hf-32 |" in ran["table"]
    assert "broken, seed 0: error:" in ran["table"]


def test_the_time_of_a_run_is_of_those_that_had_to_compile(modules: dict[str, ModuleType]) -> None:
    line = {"entry": "brimful", "trainer": "brimful", "case": "pretrain", "cap_bytes": None, "tiny": False, "options": {},
            "error": "", "status": "ok", "loss": [1.0], "steps": 1}  # fmt: skip
    cold = {**line, "compiled_before": False, "rows_per_s": 10.0, "run_s": 80.0, "compile_s": 40.0}
    cached = {**line, "compiled_before": True, "rows_per_s": 30.0, "run_s": 30.0, "compile_s": 5.0}
    table = modules["train"].show_tables([cold, cached, cached])
    assert "80.0 s" in table and "40.0 s" in table and "30.0 s" not in table
    assert "| brimful |     30 |" in table  # its speed is the median of all


def test_a_run_says_whether_compiled_code_was_there(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert not modules["train"]._has_compiled_code()
    (tmp_path / "triton" / "kernel").mkdir(parents=True)
    assert modules["train"]._has_compiled_code()


def test_packing_compiling_and_graphs_are_added_one_by_one(modules: dict[str, ModuleType]) -> None:
    levers = [modules["train"].BRIMFUL[f"brimful-packed{more}"][1] for more in ("", "-compile", "-compile-graph")]
    names = ("layout", "compile", "cuda_graphs", "checkpointing")
    assert [[one[name] for name in names] for one in levers] == [
        ["packed", "off", "off", "off"],
        ["packed", "on", "off", "off"],
        ["packed", "on", "on", "off"],
    ]


def test_plots_are_svg_with_every_entry(modules: dict[str, ModuleType], ran: dict[str, Any], tmp_path: Path) -> None:
    paths = modules["train_plots"].draw(list(ran["lines"].values()), tmp_path)
    assert [path.name for path in paths] == [
        "train-causal-uncapped.svg",
        "train-time-causal-uncapped.svg",
        "train-loss-causal-uncapped.svg",
    ]
    speeds, times, losses = (" ".join(ElementTree.parse(path).getroot().itertext()) for path in paths)
    assert "hf-32" in speeds and "broken" in speeds and "error" in speeds
    assert all("brimful-padded" in chart and "broken" not in chart for chart in (times, losses))
    assert all("prefers-color-scheme:dark" in path.read_text() for path in paths)


def test_bars_of_brimful_say_how_many_times_the_best_of_hugging_face_they_are(modules: dict[str, ModuleType]) -> None:
    speeds = (
        ("hf-8", "hf", 10.0),
        ("hf-16", "hf", 20.0),
        ("lightning", "lightning", 40.0),
        ("brimful", "brimful", 50.0),
    )
    results = [{"entry": entry, "trainer": trainer, "rows_per_s": speed} for entry, trainer, speed in speeds]
    chart = modules["train_plots"].speed_chart("title", results)
    assert "50 (2.5×)" in chart and "× hf-16, the best of Hugging Face" in chart


def test_packed_losses_are_drawn_as_a_band_of_seeds_around_the_padded_ones(modules: dict[str, ModuleType]) -> None:
    about = {"trainer": "brimful", "options": {}, "rows_per_s": 1.0}
    results = [
        {**about, "entry": entry, "loss": [5.0 + 0.1 * seed - 0.01 * step for step in range(40)]}
        for entry in ("brimful-padded", "brimful-packed")
        for seed in range(3)
    ]
    chart = modules["train_plots"].loss_chart("title", results)
    assert chart.count("fill-opacity") == 4 and "loss − mean of brimful-padded" in chart  # two entries, above and below


def test_flops_are_those_that_torch_counts(modules: dict[str, ModuleType], folder: Path) -> None:
    from brimful.training.metrics import FlopModel

    for name in ("pretrain", "sft", "causal"):
        case = modules["train_cases"].Case(name=name, folder=folder, tiny=True)
        task = case.task()
        shape = (16,) * len(task.worst_shape)  # counted at a few tokens, right for all
        counted, how = FlopModel.measure(task, task.model(), torch.device("cpu"), shape)
        assert counted is not None, how
        shapes = case.store.shapes(range(5))
        assert case.flops(shapes) == pytest.approx(counted.count(shapes), rel=1e-9), name


def test_rows_of_the_full_cases_are_all_as_long_as_the_model_takes(
    modules: dict[str, ModuleType], folder: Path
) -> None:
    for name, longest in (("full", (128, 128)), ("causal-full", (128,))):
        shapes = modules["train_cases"].Case(name=name, folder=folder, tiny=True).store.shapes(range(20))
        assert (shapes == longest).all()


def test_causal_rows_keep_the_distribution_of_the_real_ones(modules: dict[str, ModuleType], folder: Path) -> None:
    chat, causal = (
        modules["train_cases"].Case(name=name, folder=folder, tiny=True).store for name in ("pretrain", "causal")
    )
    real = chat.shapes(range(len(chat))).sum(axis=1)
    lengths = causal.shapes(range(len(causal)))[:, 0]
    assert lengths.max() == 128
    assert np.array_equal(lengths, np.maximum(2, real * 128 // real.max()))
    start = np.concatenate([chat[0]["prompt"], chat[0]["response"]])[: lengths[0]]
    assert np.array_equal(causal[0]["input_ids"][: len(start)], start)


def test_a_clock_ends_a_training_at_its_time_and_extrapolates(modules: dict[str, ModuleType], folder: Path) -> None:
    peers, case = modules["train_peers"], modules["train_cases"].Case(name="causal", folder=folder, tiny=True)
    clock = peers.Clock(device=torch.device("cpu"), steps=10, seconds=0.0)
    clock.begin()
    clock.rows([[8], [4]])
    clock.computed([(2, (8,))])
    time.sleep(0.01)
    assert clock.step(1.5)
    figures = clock.figures(case, None)
    assert figures["run_s_extrapolated"] and figures["run_s"] > 9 * figures["step_s"][0]
    assert figures["padding"] == pytest.approx(0.25) and figures["loss"] == [1.5]


def test_warm_seconds_begin_with_the_end_of_the_first_step(modules: dict[str, ModuleType]) -> None:
    clock = modules["train_peers"].Clock(device=torch.device("cpu"), steps=10, seconds=60.0, warm_seconds=0.05)
    clock.begin()
    time.sleep(0.1)  # a slow compiler
    assert not clock.step(1.0)
    time.sleep(0.1)
    assert clock.step(1.0)


def test_steps_before_a_trainer_starts_over_do_not_count(modules: dict[str, ModuleType]) -> None:
    clock = modules["train_peers"].Clock(device=torch.device("cpu"), steps=10, seconds=60.0)
    clock.begin()
    clock.step(1.0)
    clock.begin()
    assert clock.done == [] and clock.attempts == 2


def test_a_process_that_dies_costs_one_entry(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, output = modules["train"], tmp_path / "out.jsonl"
    job = {"case": "pretrain", "trainer": "hf", "options": {}, "cap_bytes": None, "seed": 0, "tiny": True, "output": str(output)}  # fmt: skip
    started = []

    def die_in_the_second(jobs: list[dict[str, Any]], _: Any) -> str:
        started.append([one["entry"] for one in jobs])
        train.write_result(jobs[0], {"status": "ok", "error": "", "rows_per_s": 1.0})
        return "the process ended with code -11"

    monkeypatch.setattr(train, "_run_process", die_in_the_second)
    args = train._arguments(["--per-process", "3"])
    train._run_all([{**job, "entry": name} for name in ("a", "b", "c")], args)
    assert started == [["a", "b", "c"], ["c"]]
    assert [(one["entry"], one["status"]) for one in train.read_results(output)] == [
        ("a", "ok"),
        ("b", "error"),
        ("c", "ok"),
    ]


@pytest.mark.parametrize(
    ("failure", "status"),
    [(torch.OutOfMemoryError("CUDA out of memory"), "OOM"), (KeyError("labels"), "error"), (None, "stopped")],
)
def test_a_training_that_fails_or_never_ends_is_a_result(
    modules: dict[str, ModuleType], folder: Path, monkeypatch: pytest.MonkeyPatch, failure: Any, status: str
) -> None:
    def train(training: Any) -> None:
        if failure is not None:
            raise failure
        time.sleep(10)

    monkeypatch.setitem(modules["train_peers"].TRAINERS, "hf", train)
    monkeypatch.setattr(modules["train"], "GRACE_S", 0)
    job = {"case": "causal", "trainer": "hf", "options": {}, "cap_bytes": None, "seed": 0, "steps": 2, "seconds": 0.2,
           "warm_seconds": None, "tiny": True, "device": "cpu", "workers": 0, "folder": str(folder)}  # fmt: skip
    result = modules["train"].run_job(job)
    assert (result["status"], result["steps"]) == (status, 0) and result["error"]


@pytest.mark.torture
def test_a_dry_run_of_all_trainers(data: Path, tmp_path: Path) -> None:
    """Minutes on a busy machine: everything that runs without a compiler."""
    output = tmp_path / "out.jsonl"
    only = "hf-32,hf-grouped,hf-auto,hf-tuned,lightning,old-2,hf-4,hf-grouped-8,brimful-padded"
    command = [sys.executable, BENCH / "train.py", "--data", data, "--tiny", "--cases", "sft,causal", "--only", only,
               "--steps", "2", "--per-process", "50", "--output", output, "--device", "cpu"]  # fmt: skip
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=900)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == 7 + 7 and {line["status"] for line in lines} == {"ok"}


def test_it_needs_nothing_of_the_command_line() -> None:
    code = "import sys; sys.modules['cyclopts'] = sys.modules['duckdb'] = sys.modules['datasets'] = None; import train_plots, train_peers"
    subprocess.run([sys.executable, "-c", code], cwd=BENCH, check=True, timeout=60)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--only", "hf-31"], "unknown hf-31. Try: hf-32"),
        (["--cases", "chat"], "unknown chat. Try: pretrain"),
        (["--cap", "much"], "--cap"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit):
        modules["train"].main(flags)
    assert sentence in capsys.readouterr().err


def test_data_that_do_not_exist_are_refused_in_a_sentence(
    modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert modules["train"].main(["--data", str(tmp_path / "none.parquet"), "--tiny"]) == 2
    assert "none.parquet does not exist" in capsys.readouterr().err
