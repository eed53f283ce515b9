"""What people see of a trained tokenizer."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from brimful.data.tokenizer.algorithms import SPECIAL, check_ids
from brimful.data.tokenizer.train import Choice, Fit, TokenizerReport, together
from brimful.report.tokenize_tables import tokenizer_table
from brimful.units import GiB, MiB

MODEL = {"vocab_size": 29298, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
SIDES = {
    "prompt": Fit(rows=100, characters=3000, tokens=1500, byte_tokens=15, unknown_tokens=0),
    "response": Fit(rows=100, characters=17_000, tokens=10_000, byte_tokens=100, unknown_tokens=0),
}


@pytest.fixture
def report():
    return TokenizerReport(
        tokenizer="/data/tokenizer", kind="bpe", vocab_size=29298, rows_seen=10_000_000, rows_used=160_000,
        choices=(
            Choice(name="vocab_size", requested=None, effective=29298, reason="the model's vocab_size"),
            Choice(name="rows", requested=10_000_000, effective=160_000, reason="training on more would take over 4 GiB"),
            Choice(name="host_limit", requested=4 * GiB, effective=4 * GiB, reason="as asked"),
        ),
        characters_seen=2_000_000_000, characters_used=30_000_000, broken=0, first_broken=None,
        layout_reason="found prompt and response", measured_on="held-out rows", total=together(SIDES), sides=SIDES,
        round_trip=1.0, special_ids={token: number for number, token in enumerate(SPECIAL)},
        ids=check_ids(29298, MODEL), fingerprint="0" * 64, seconds=200, training_s=150, peak_bytes=3700 * MiB,
        predicted_peak_bytes=4000 * MiB, host_limit_bytes=4 * GiB,
    )  # fmt: skip


def shown(report, width=140):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(tokenizer_table(report))
    return console.export_text()


def test_the_headline_says_what_it_is_and_how_good(report):
    first = shown(report).splitlines()[0]
    for part in (
        "/data/tokenizer",
        "29,298 bpe entries",
        "1.74 characters a token",
        "100% of 100 held-out rows come back",
    ):
        assert part in first


def test_each_side_and_their_total_have_a_line(report):
    lines = shown(report).splitlines()
    assert next(line for line in lines if line.startswith("prompt")).split() == [
        "prompt",
        "3,000",
        "1,500",
        "2.000",
        "1.00%",
        "0.00%",
    ]
    assert next(line for line in lines if line.startswith("total")).split() == [
        "total",
        "20,000",
        "11,500",
        "1.739",
        "1.00%",
        "0.00%",
    ]


def test_one_side_needs_no_total(report):
    sides = {"text": SIDES["prompt"]}
    assert "total" not in shown(replace(report, sides=sides, total=together(sides)))


def test_what_was_asked_stands_beside_what_it_became(report):
    lines = shown(report).splitlines()
    assert "10,000,000  160,000  training on more would take over 4 GiB" in next(
        line for line in lines if line.startswith("rows")
    )
    assert "–" in next(line for line in lines if line.startswith("vocab size"))
    assert "4 GiB" in next(line for line in lines if line.startswith("host limit"))


def test_only_what_was_changed_stands_out(report):
    console = Console(width=140, force_terminal=True, color_system="standard", record=True, file=io.StringIO())
    console.print(tokenizer_table(report))
    text = console.export_text(styles=True)
    assert "\x1b[33m10,000,000" in text
    assert "\x1b[33m4 GiB" not in text


def test_ids_that_match_and_that_do_not(report):
    assert shown(report).count(" matches") == 4
    text = shown(replace(report, ids=check_ids(4096, {**MODEL, "pad_token_id": 3, "eos_token_id": None})))
    assert "fits; the rest of the model's rows stay unused" in text
    assert text.count("does not match") == 1
    assert text.count("nothing to compare with") == 1


def test_time_and_memory_are_told_as_measured(report):
    assert "3 min 20 s, of it 2 min 30 s training; memory at most 3.61 GiB (measured; predicted 3.91 GiB)" in shown(
        report
    )


def test_warnings_come_only_where_there_is_a_reason(report):
    assert "warning" not in shown(report)
    text = shown(replace(report, broken=3, first_broken="a.jsonl, line 7: not JSON", peak_bytes=5 * GiB))
    assert "warning: 3 rows could not be read and were left out; the first is a.jsonl, line 7: not JSON" in text
    assert "warning: training took more memory than --host-limit" in text


def test_it_reads_at_80_columns(report):
    assert all(len(line) <= 80 for line in shown(report, width=80).splitlines())
