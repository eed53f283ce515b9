"""The table of an evaluation says every figure, what it was counted over, and whether it is measured or predicted."""

from io import StringIO

import pytest
from rich.console import Console

from brimful.report.tables import eval_table

PLAN = {
    "batches": 3, "largest_batch": {"rows": 8, "shape": [20, 30]}, "predicted_added_bytes": 3 * 2**20,
    "added_budget_bytes": 50 * 2**20, "because": "85% of 64 MiB, less 4 MiB held already",
}  # fmt: skip
REPORT = {
    "model": "runs/a/best", "data": "valid.jsonl", "device_name": "the CPU", "seed": 7, "rows": 1000, "rows_available": 5000,
    "loss": 2.34567, "perplexity": 10.4401, "tokens": 12345, "bleu": 31.239, "chrf": 28.1,
    "signatures": {"bleu": "tok:zh|version:2.6.0", "chrf": "nc:6"},
    "samples": [{"prompt": "问题", "response": "回答\n两行", "reference": "[参考]"}] * 5,
    "forward": {"evaluation": PLAN, "generation": PLAN}, "limit_bytes": 64 * 2**20, "limit_reason": "as asked for",
    "max_tokens": {"prompt": 256, "response": 320}, "truncated": {"prompt": 1, "response": 0},
    "max_tokens_because": "as in the model's run", "peak_bytes": 40 * 2**20, "ooms": 0, "seconds": 12.34, "output": None,
}  # fmt: skip


def shown(width=120, **changes):
    console = Console(file=StringIO(), width=width)
    console.print(eval_table({**REPORT, **changes}))
    return console.file.getvalue()


def test_all_figures_are_there_with_what_they_run_over():
    text = shown()
    for part in ("2.3457", "10.44", "31.24", "28.10", "12,345 tokens", "over all 1,000 answers", "tok:zh"):
        assert part in text
    assert "1,000 rows, chosen with seed 7 from 5,000" in text


def test_rows_that_were_cut_are_counted():
    cut = "sides longer than 256+320 tokens are cut, as in the model's run"
    assert f"{cut}: 1 prompt of 5,000 rows" in shown()
    both = shown(truncated={"prompt": 2, "response": 1200})
    assert f"{cut}: 2 prompts and 1,200 responses of 5,000 rows" in both
    assert f"{cut}: no row has one" in shown(truncated={"prompt": 0, "response": 0})


def test_memory_is_named_measured_or_predicted():
    text = " ".join(shown().split())
    assert "predicted 3 MiB" in text and "measured 40 MiB" in text and "no out-of-memory errors" in text
    assert "not measured here" in shown(peak_bytes=None)
    assert "1 out-of-memory error" in shown(ooms=1) and "1 out-of-memory errors" not in shown(ooms=1)


def test_three_answers_are_shown_on_a_line_each():
    text = shown()
    assert text.count("回答 两行") == 3
    assert "[参考]" in text


def test_what_was_not_asked_for_is_not_there():
    text = shown(loss=None, perplexity=None, samples=[], signatures={}, bleu=None, chrf=None, truncated={})
    assert not any(word in text for word in ("loss", "perplexity", "BLEU", "chrF", "prompt"))


@pytest.mark.parametrize(("value", "text"), [(None, "beyond"), (1234567.0, "1.23e+06"), (999.5, "999.50")])
def test_a_perplexity_of_any_size_can_be_read(value, text):
    assert text in shown(perplexity=value)


def test_all_rows_and_the_file_are_told():
    assert "5,000 rows, all 5,000" in shown(rows=5000)
    assert "answers.jsonl" in shown(output="answers.jsonl")


def test_it_fits_80_columns():
    assert max(len(line) for line in shown(width=80).splitlines()) <= 80


def test_long_texts_are_cut():
    assert shown(samples=[{"prompt": "长" * 500, "response": "", "reference": "短"}]).count("长") == 199
    assert "(nothing)" in shown(samples=[{"prompt": "长", "response": "", "reference": "短"}])
