"""How diagnoses are shown: readable at 80 columns, and in Chinese without an English sentence left."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import brimful
from brimful.languages import set_language
from brimful.report.why.diagnosis import Diagnosis, Fix, diagnoses_view, in_language

LOGS = sorted((Path(__file__).parents[2] / "logs").glob("*.log"))
NAMES = [
    *[
        "Dask",
        "Kubernetes",
        "Vertex",
        "DuckDB",
        "Java",
        "SGLang",
        "TPU",
        "ONNX",
        "Runtime",
        "Rust",
        "pod",
        "systemd",
        "ephemeral",
        "storage",
        "dshm",
        "xC0000005",
        "vm.max_map_count",
    ],
    "datasets.map",
    "map",
    "vLLM",
    "GPU",
    "RAM",
    "NCCL",
    "CUDA",
    "GiB",
    "MiB",
    "KiB",
    "torch",
    "token",
    "logits",
    "LoRA",
    "QLoRA",
    "NaN",
    "inf",
    "Mac",
    "Triton",
    "Slurm",
    "Ray",
    "Arrow",
    "NumPy",
    "Windows",
    "DataLoader",
    "worker",
    "rank",
    "notebook",
    "kernel",
    "cuBLAS",
    "cuDNN",
    "CUBLAS",
    "CUDNN",
    "ROCm",
    "MPS",
    "XPU",
    "NPU",
    "Liger",
    "CPU",
    "TensorFlow",
    "JAX",
    "Adafactor",
    "AdamW",
    "bit",
    "Ampere",
    "SIGKILL",
    "SIGBUS",
    "SIGTERM",
    "bus",
    "error",
    "OOMKilled",
    "dev",
    "shm",
    "cuMem",
    "expandable_segments",
    "bitsandbytes",
    "NVIDIA",
    "CUDA_VISIBLE_DEVICES",
    "Python",
    "pid",
    "stage",
    "Xid",
    "all_reduce",
    "MASTER_ADDR",
    "MASTER_PORT",
    "systemd",
    "oomd",
    "earlyoom",
    "torch.save",
    "torch",
    "save",
    "logits",
    "ids",
    "id",
    "beam",
    "NCCL_DEBUG",
    "INFO",
    "bf16",
    "fp16",
    "fp32",
    "float64",
    "ALLOC_FAILED",
    "NOT_INITIALIZED",
    "illegal",
    "memory",
    "access",
    "python",
    "python3",
    "chrome",
    "brimful",
    "KeyError",
    "ValueError",
    "unknown",
    "schedule",
    "cosin",
    "memory",
    "is",
    "fine",
    "rows",
    "GPUs",
    "DEBUG",
    "flash_attn",
    "hub",
]


@pytest.fixture
def _chinese():
    set_language("zh")
    yield
    set_language(None)


def shown(*diagnoses, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(diagnoses_view(diagnoses))
    return console.file.getvalue()


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_nothing_is_wider_than_80_columns(log):
    assert max(map(len, shown(brimful.diagnose(log)).splitlines())) <= 80


def test_a_fix_shows_what_it_saves_costs_and_changes():
    fix = Fix(
        title="Use less",
        saves="1–2 GiB",
        costs="some time",
        global_batch="unchanged: 4 × 2 = 8",
        flags={"brimful": "--less"},
    )
    text = shown(Diagnosis(resource="gpu", kind="gpu-out-of-memory", cause="It is full.", fixes=(fix,)))
    for words in (
        "GPU memory ran out  certain",
        "1. Use less",
        "saves         ~ 1–2 GiB",
        "some time",
        "4 × 2 = 8",
        "--less",
    ):
        assert words in text


def test_a_measured_figure_is_no_range():
    fix = Fix(title="Use less", saves="1 GiB", basis="measured")
    assert "~" not in shown(Diagnosis(resource="gpu", kind="gpu-out-of-memory", cause="It is full.", fixes=(fix,)))


def test_printed_a_fix_says_what_is_a_range_and_what_is_enough():
    fixes = (
        Fix(title="Use less", saves="1–2 GiB", enough=True),
        Fix(title="Use none", saves="9 GiB", basis="measured"),
    )
    text = str(Diagnosis(resource="gpu", kind="gpu-out-of-memory", cause="It is full.", fixes=fixes))
    assert "   saves ~ 1–2 GiB, enough alone\n" in text and text.endswith("   saves 9 GiB")


EVENT = "events.jsonl, step 5: the gradient norm is nan (first in 'weight'): 2 consecutive steps skipped, at most 20"


@pytest.mark.usefixtures("_chinese")
@pytest.mark.parametrize("as_text", [shown, str], ids=["shown", "printed"])
def test_the_evidence_is_chinese_but_for_the_line_of_a_log(as_text):
    line = as_text(Diagnosis(resource="none", kind="odd", cause="", evidence="line 16: ValueError: no rows to read"))
    assert "第 16 行：ValueError: no rows to read" in line
    event = as_text(Diagnosis(resource="none", kind="odd", cause="", evidence=EVENT))
    assert "第 5 步：" in event and "consecutive" not in event


@pytest.mark.usefixtures("_chinese")
def test_words_beside_a_command_are_chinese():
    text = shown(brimful.diagnose(LOGS[0].parent / "shm-torch-file.log"))
    assert "docker run --shm-size 8g（或 --ipc=host）" in text and "an emptyDir" not in text


def test_who_holds_the_memory_is_a_bar():
    text = shown(brimful.diagnose(LOGS[0].parent / "torch-2.4-other-processes.log"))
    bar = next(line for line in text.splitlines() if line.startswith("█"))
    assert bar.count("█") == round(22.61 / 39.39 * 40) and bar.count("▚") == round(13.5 / 39.39 * 40)


def test_memory_that_the_message_gives_to_nobody_has_its_part_of_the_bar():
    text = shown(brimful.diagnose(LOGS[0].parent / "torch-1.10-small-block.log"))
    assert "▒ outside torch, or other processes" in text
    assert len(next(line for line in text.splitlines() if line.startswith("█")).split(" ")[0]) in (39, 40, 41)


def test_square_brackets_are_text():
    text = shown(Diagnosis(resource="none", kind="odd", cause="[bold]not markup[/]", evidence="[red]x"))
    assert "[bold]not markup[/]" in text and "[red]x" in text


def test_other_problems_come_behind():
    other = Diagnosis(resource="disk", kind="disk-full", cause="The disk is full too.")
    text = shown(Diagnosis(resource="gpu", kind="gpu-out-of-memory", cause="It is full.", others=(other,)))
    assert text.index("It is full.") < text.index("Also in this log") < text.index("The disk is full too.")


@pytest.mark.usefixtures("_chinese")
@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_in_chinese_no_english_sentence_is_left(log):
    diagnosis = brimful.diagnose(log)
    texts = [diagnosis.cause, *diagnosis.figures.get("looked_for", ())]
    texts += [text for fix in diagnosis.fixes for text in (fix.title, fix.saves, fix.costs, fix.global_batch) if text]
    for text in texts:
        words = set(re.findall(r"[A-Za-z][A-Za-z_.0-9]{2,}", in_language(text))) - set(NAMES)
        assert not words, (text, in_language(text))


@pytest.mark.usefixtures("_chinese")
def test_headings_are_chinese_too():
    text = shown(brimful.diagnose(LOGS[0].parent / "guide-002.log"))
    for words in ("显存不足  确定", "解决办法", "节省", "全局批大小", "张量 14.94 GiB", "不变：16 × 4 × 3 = 192"):
        assert words in text


def test_json_stays_english():
    set_language("zh")
    try:
        assert "ran out of memory" in str(brimful.diagnose(LOGS[0].parent / "guide-002.log").to_json())
    finally:
        set_language(None)
