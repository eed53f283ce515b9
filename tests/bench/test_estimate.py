"""bench/estimate.py on a machine without a GPU: it predicts, and its summary adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import estimate

    return estimate


def test_it_imports_without_cyclopts():
    code = f"import sys; sys.modules['cyclopts'] = None; sys.path.insert(0, {str(BENCH)!r}); import estimate"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_cases_are_predicted_without_a_gpu(bench, tmp_path, capsys):
    file = tmp_path / "results.json"
    assert bench.main(["--trace-only", "--only", "all-pairs", "--json", str(file)]) == 0
    (result,) = json.loads(file.read_text())["results"]
    small, *_, large = result["rows"]
    assert large["predicted_allocated"] > 10 * small["predicted_allocated"] and large["allocated"] is None
    assert "all-pairs" in capsys.readouterr().out


def test_a_call_goes_on_where_another_was_cut_off(bench, tmp_path, monkeypatch, capsys):
    traced, predict = [], bench.Bench.predict
    monkeypatch.setattr(bench.Bench, "predict", lambda self, case: traced.append(case.name) or predict(self, case))

    def call(*words):
        traced.clear()
        files = ["--resume", str(tmp_path / "kept.json"), "--json", str(tmp_path / "results.json")]
        assert bench.main(["--trace-only", *files, *words]) == 0
        return [one["case"] for one in json.loads((tmp_path / "results.json").read_text())["results"]]

    pairs, speech = "all-pairs fused fp32", "whisper-tiny fused bf16 checkpointed"
    assert call("--only", pairs, speech, "--seconds", "0") == traced == []
    assert call("--only", pairs) == traced == [pairs]
    assert call("--only", pairs, speech) == [pairs, speech] and traced == [speech]
    monkeypatch.setattr(bench, "_source", lambda: "other code")
    assert call("--only", pairs) == traced == [pairs]


def test_without_a_gpu_nothing_is_measured(bench, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.main(["--only", "unet"]) == 2 and "--trace-only" in capsys.readouterr().err


def test_a_word_that_no_case_has_lists_all(bench, capsys):
    assert bench.main(["--trace-only", "--only", "no-such-model"]) == 2
    assert "t5-base" in capsys.readouterr().err


def test_no_two_cases_have_one_name(bench):
    names = [case.name for case in bench.cases()]
    assert len(set(names)) == len(names) > 40


def test_the_summary_has_median_percentile_and_what_did_not_fit(bench):
    def row(predicted, measured, expandable=True):
        sizes = {"predicted_allocated": predicted, "predicted_reserved": predicted, "allocated": measured}
        return bench.Row(case="one", rows=2, expandable=expandable, reserved=measured, **sizes)

    results = [
        bench.Result(case="one", rows=[row(102, 100), row(96, 100, False)], recommended=7, recommended_fits=False),
        bench.Result(case="two", rows=[row(100, 100)], recommended=9, recommended_fits=True),
        bench.Result(case="three", problem="needs peft"),
    ]
    text = bench.show_summary(results, 2**30)
    assert "allocated: median error 2.0%" in text and "from -4.0% to +2.0% in 3 measurements" in text
    assert "1 of 2 ran; not one (7 rows)" in text and "three: needs peft" in text
    assert "+2.0%" in bench.show_measured(results)
