"""`why RUN` and `compare` in Chinese leave no English sentence."""

import ast
import re
from pathlib import Path

import pytest

from brimful import languages, report
from brimful.languages import set_language, translate
from brimful.report.compare import compare_runs
from brimful.report.run_record import RunRecord
from brimful.report.why.diagnosis import Diagnosis, in_language, title_of
from brimful.report.why.run_checks import check_run
from brimful.units import GiB
from tests.report.fake_runs import memory_model, plan, tried, write_run
from tests.report.test_compare import changed, loss, resumed, shown
from tests.report.why.test_loss_checks import nan_from
from tests.report.why.test_speed_checks import choices, times

ENGLISH = re.compile(r"[A-Za-z']{2,} [A-Za-z']{2,} [A-Za-z']{2,}")
"""Three words in a row: not a name, a unit or a flag."""
REPORT = Path(report.__file__).parent


@pytest.fixture(autouse=True)
def _chinese():
    set_language("zh")
    yield
    set_language(None)


def sentences(diagnosis: Diagnosis) -> list[str]:
    """As a view translates them: one by one, without their full stops."""
    texts = [diagnosis.cause, *(text for fix in diagnosis.fixes for text in (fix.title, fix.saves, fix.costs))]
    texts += [fix.global_batch for fix in diagnosis.fixes if fix.global_batch != "unchanged"]
    return [part.removesuffix(".") for text in texts if text for part in re.split(r"(?<=[^.\s]\.) (?=[A-Z])", text)]


def oom(**values):
    return {
        "event": "oom", "step": 120, "sentence": "…: …", "phase": "…", "rows": 43, "shape": [228, 256], "change": "…",
        "predicted_bytes": int(16.3 * GiB), "available_bytes": 13 * GiB, **values,
    }  # fmt: skip


SMALL_PLAN = {
    "memory_model": memory_model(),
    "tried": [tried(43, 672.0, 15 * GiB, chosen=True), tried(64, 400.0, 7 * GiB, checkpointing="on")],
}
RUNS = {
    "failed": {"done": 150, "end": "failed"},
    "killed": {"done": 150, "end": None},
    "killed by the kernel": {"done": 150, "end": None, "host": {"machine_bytes": int(15.5 * GiB), "tree_bytes": 5 * GiB}, "checkpoints": [100]},
    "not saved": {"more": [{"event": "checkpoint", "step": 200, "saved": False, "sentence": ""}]},
    "oom": {"more": [oom()], "plan_values": SMALL_PLAN},
    "oom without a plan": {"more": [oom(), oom(step=121)]},
    "oom, others": {"more": [oom()], "gpu": {"others_bytes": 5 * GiB}, "plan_values": SMALL_PLAN},
    "oom, too low": {"more": [oom(predicted_bytes=9 * GiB)], "plan_values": SMALL_PLAN, "evals": [119]},
    "oom, long": {"more": [oom(shape=[228, 900], file="行.jsonl", line=7), {"event": "grow", "step": 130, "sentence": "…"}], "plan_values": SMALL_PLAN},
    "set aside": {"more": [{"event": "oversized", "step": 30, "rows": [1, 2], "shape": [4000, 9000]}], "plan_values": SMALL_PLAN},
    "leak": {"step_values": {"peak_bytes": lambda n: int((9 + 0.01 * n) * GiB), "host_bytes": lambda n: int((2 + 0.02 * n) * GiB), "epoch": lambda n: n / 900}},
    "long row": {"step_values": {"peak_bytes": lambda n: int((18 if n == 212 else 9) * GiB)}},
    "waiting": {"step_values": {"times": times(0.2, 0.2)}, "host": {"cpu": 0.97}},
    "waiting for workers": {"step_values": {"times": times(0.2, 0.2)}, "host": {"cpu": 0.37}},
    "waiting for none": {"step_values": {"times": times(0.2, 0.2)}, "plan_values": {"host": {"workers": 0}}},
    "waiting for a disk": {"step_values": {"times": times(0.2, 0.2)}, "host": {"cpu": 0.1, "read_bytes_per_s": 2e8}},
    "waiting for a network": {"step_values": {"times": times(0.2, 0.2)}, "host": {"cpu": 0.1, "read_bytes_per_s": 10}},
    "waiting, unknown": {"step_values": {"times": times(0.2, 0.2)}, "host": {"cpu": None}},
    "communication": {"ranks": 2, "step_values": {"times": times(communication=0.3)}, "request": {"options": {"backend": "gloo"}}, "plan_values": {"accumulation": 1}},
    "slow rank": {"ranks": 4, "step_values": {"ranks": [{"rank": r, "times": {"compute_s": 0.6 if r == 2 else 0.36}} for r in range(4)]}},
    "padding": {"step_values": {"padding": 0.7}, "plan_values": {"choices": choices(layout="padded", micro_batch=40)}},
    "clamped": {"plan_values": {"micro_batch": 8, "choices": choices(micro_batch=8), "tried": [tried(8, 300.0, GiB, chosen=True), tried(43, 672.0, GiB)]}},
    "clamped, not timed": {"plan_values": {"micro_batch": 8, "choices": choices(micro_batch=8), "largest_measured_peak_bytes": GiB}},
    "launches": {"gpu": {"utilization": 0.4}, "step_values": {"mfu": 0.05}},
    "empty card": {"gpu": {"utilization": 0.2}, "plan_values": {"accumulation": 1}, "step_values": {"peak_bytes": GiB, "reserved_bytes": GiB}},
    "others": {"gpu": {"others_bytes": lambda n: 6 * GiB if n > 150 else 0}, "step_values": {"tokens_per_s": lambda n: 5e4 if n > 150 else 8e4}},
    "hot": {"gpu": {"temperature_c": lambda n: 86 if n > 150 else 70}, "step_values": {"tokens_per_s": lambda n: 5e4 if n > 150 else 8e4}},
    "swap": {"host": {"swap_used_bytes": lambda n: n * GiB // 50}},
    "saves": {"step_values": {"times": times(2.0)}, "more": [{"event": e, "step": n, "saved": True, "seconds": 20.0, "loss": 3.0} for n in range(10, 300, 10) for e in ("checkpoint", "eval")]},
    "nan": {"done": 200, "end": "failed", "step_values": nan_from(195, norm=400.0)},
    "nan from the start": {"done": 6, "end": "failed", "step_values": nan_from(1), "plan_values": {"levers": {"precision": "fp16"}}},
    "one nan": {"step_values": nan_from(77, 77)},
    "rate 0": {"step_values": {"lr": 0.0}},
    "rate constant": {"step_values": {"lr": 1e-4}},
    "flat": {"step_values": {"loss": lambda n: 2 + 1e-3 * (n % 5)}},
    "constant": {"step_values": {"loss": 2.0}},
    "no gradient": {"step_values": {"loss": lambda n: 2 + 1e-3 * (n % 5), "grad_norm": 0.0}},
    "diverging": {"step_values": {"loss": lambda n: 3 - n / 100 if n < 150 else 1.5 + n / 50}, "request": {"options": {"clip_norm": 0}}},
    "rising": {"step_values": {"loss": lambda n: 6 - n / 40 if n < 150 else 2.25 + (n - 150) / 100}},
    "swinging": {"step_values": {"loss": lambda n: 3 + (n // 30) % 2 + 0.01 * (n % 3)}},
    "alternating": {"step_values": {"loss": lambda n: 3 + n % 2 + 0.01 * (n % 3)}},
    "few": {"steps": 30},
    "batch": {"plan_values": {"global_batch": 8192, "data_rows": 2000}},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_diagnosis_is_all_chinese(tmp_path, name):
    found = check_run(RunRecord(write_run(tmp_path / "run", **RUNS[name])))
    assert found
    for diagnosis in found:
        assert translate(title_of(diagnosis)) != title_of(diagnosis)
        for sentence in sentences(diagnosis):
            assert not ENGLISH.search(translate(sentence)), translate(sentence)


def test_every_template_is_recognised_once_it_is_filled_in():
    for template in templates("why/*_checks.py", "say"):
        sentence = re.sub(r"\{\w+\}", "7", template.removesuffix("."))
        assert not ENGLISH.search(translate(sentence)), sentence


@pytest.mark.parametrize(
    ("files", "function"), [("why/*_checks.py", "say"), ("compare.py", "say"), ("compare_view.py", "tr")]
)
def test_every_template_is_in_the_catalogue(files, function):
    assert len(templates(files, function)) > 10
    keys = {re.sub(r"\{(\w+)[:!][^}]*\}", r"{\1}", key) for key in languages._catalogue()}
    found = [re.sub(r"\{(\w+)[:!][^}]*\}", r"{\1}", one) for one in templates(files, function)]
    missing = [one for one in found if one.removesuffix(".") not in keys and one not in keys]
    assert [one for one in missing if ENGLISH.search(one) or re.search("[a-z]{3}", re.sub(r"\{\w+\}", "", one))] == []


def templates(files: str, function: str) -> list[str]:
    found = []
    for path in sorted(REPORT.glob(files)):
        for scope in ast.walk(ast.parse(path.read_text())):
            if not isinstance(scope, (ast.FunctionDef, ast.Lambda)):
                continue
            for node in ast.walk(scope):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id == function
                    and node.args
                ):
                    found += _texts(node.args[0], scope)
    return list(dict.fromkeys(found))


def _texts(node: ast.expr, scope: ast.AST) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp(body=one, orelse=other):
            return [*_texts(one, scope), *_texts(other, scope)]
        case ast.Name(id=name):
            values = [
                one.value
                for one in ast.walk(scope)
                if isinstance(one, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in one.targets)
            ]
            return [text for value in values for text in _texts(value, scope)]
    return []


def test_a_comparison_is_all_chinese(tmp_path):
    a = write_run(tmp_path / "a", evals=[100], ooms=[20])
    others = {
        "b": {"step_values": {"loss": loss(0.5), "times": times(0.2), "rows": 128}, "plan_values": {"global_batch": 128, "choices": changed(global_batch=128, workers=8)}},
        "c": {"request": {"options": {"seed": 1}}, "step_values": {"loss": loss()}, "done": 200, "end": "failed"},
        "d": {"step_values": nan_from(100)},
        "e": {"steps": 200, "plan_values": {"choices": changed(schedule="linear")}, "step_values": {"lr": 1e-5, "reserved_bytes": 9 * GiB}},
        "f": {"done": 0, "running": True},
    }  # fmt: skip
    for name, values in others.items():
        comparison = compare_runs([a, write_run(tmp_path / name, **values)])
        text = shown(comparison, width=200).replace("NVIDIA GeForce RTX", "")
        lines = [line for line in text.splitlines() if ENGLISH.search(line)]
        assert not lines, lines
        assert not any(ENGLISH.search(what.shown()) for what, _ in comparison.go_back)


def test_the_parts_of_one_run_in_chinese(tmp_path):
    comparison = compare_runs([resumed(tmp_path / "a")])
    assert "规划 1，第 1–150 步" in shown(comparison, width=200)
    assert [what.shown() for what, _ in comparison.go_back] == ["回到 A"]


def test_english_stays_in_json(tmp_path):
    comparison = compare_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b")])
    assert comparison.to_json()["verdict"].startswith("the same settings")
    assert plan()["task"] == "sft"


def test_an_error_that_begins_a_sentence_is_translated_too():
    shown = in_language("The run failed after step 3. Task Net: loss() failed at mine.py:12: KeyError: 'x'.")
    assert shown == "训练在第 3 步之后失败。任务 Net：loss() 出错，位于 mine.py:12：KeyError: 'x'。"
