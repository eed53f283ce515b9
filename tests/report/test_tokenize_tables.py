"""What `brimful data tokenize` and `brimful data tokenizer` print."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from brimful.data.tokenize import FieldStats, TokenizeReport
from brimful.data.tokenizer.train import Choice, TextStats, TokenizerReport, add_up, compare_ids
from brimful.data.tokenizer.vocabulary import SPECIAL
from brimful.report.tokenize_tables import tokenize_table, tokenizer_table
from brimful.units import GiB, MiB

PROMPT = FieldStats(
    column="instruction+input", characters=40_000, tokens=21_000, max_tokens=256, keeps_end=False, truncated=0, lost_tokens=0, mean=21.0,
    percentiles={"p50": 14, "p90": 45, "p99": 139}, longest=228,
)  # fmt: skip
RESPONSE = replace(PROMPT, column="output", tokens=95_000, truncated=30, lost_tokens=1_200, longest=256)
REPORT = TokenizeReport(
    store="/data/store", rows_in=1_007, rows_out=1_000, dropped={"broken": 0, "empty": 7},
    fields={"prompt": PROMPT, "response": RESPONSE}, layout_reason="found instruction, input and output",
    requested_max_tokens=(256,), first_broken=None, sources=1, tokenizer="tokenizer", vocab_size=29_298, dtype="uint16",
    seconds=2.5, rows_per_s=412.3, peak_bytes=250 * 2**20, start_bytes=60 * 2**20, host_limit_bytes=2**30,
    size_bytes=300_000, resumed_rows=0, started_over="", fingerprint="x",
)  # fmt: skip


def shown(report, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print((tokenize_table if isinstance(report, TokenizeReport) else tokenizer_table)(report))
    return console.export_text()


def line(report, label):
    text = shown(report, width=160)
    return next(" ".join(one.split()) for one in text.splitlines() if one.startswith(label))


def test_nothing_is_cut_off_at_80_columns():
    text = shown(REPORT)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_headline_says_how_many_of_how_many():
    assert "1,000 rows of 1,007, 116,000 tokens, 293 KiB on disk" in shown(REPORT)


def test_each_field_has_a_column():
    assert line(REPORT, "column") == "column instruction+input output"
    assert line(REPORT, "tokens per row") == "tokens per row, mean 21.0 21.0"
    assert line(REPORT, "longest") == "longest 228 256"
    assert line(REPORT, "characters per token") == "characters per token 2.00 0.42"
    assert line(REPORT, "rows truncated") == "rows truncated 0 30 (3.0%)"
    assert line(REPORT, "tokens lost") == "tokens lost 0 1,200 (1.3%)"


def test_the_requested_limit_stands_beside_the_effective_one():
    assert "--max-tokens 256 is prompt 256, response 256" in " ".join(shown(REPORT, width=160).split())


def test_dropped_rows_are_shown_with_their_reason():
    assert line(REPORT, "dropped") == "dropped 7 of 1,007 rows: 7 empty"
    broken = replace(REPORT, dropped={"broken": 2, "empty": 5}, first_broken="a.jsonl, line 3: not JSON")
    assert "2 broken, 5 empty; the first broken one is a.jsonl, line 3: not JSON" in line(broken, "dropped")
    assert line(replace(REPORT, dropped={"broken": 0, "empty": 0}), "dropped") == "dropped no row"


def test_memory_is_called_measured():
    assert "peak 250 MiB (measured) of 1 GiB; 60 MiB before the first row" in line(REPORT, "memory")
    assert "unknown" in line(replace(REPORT, peak_bytes=0, start_bytes=0), "memory")


def test_continuing_and_starting_over_are_shown_only_then():
    assert "continued" not in shown(REPORT) and "started over" not in shown(REPORT)
    assert "after 600 rows" in line(replace(REPORT, resumed_rows=600), "continued")
    assert "another source" in line(replace(REPORT, started_over="it had another source"), "started over")


MODEL = {"vocab_size": 29298, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
FIELDS = {
    "prompt": TextStats(rows=100, characters=3000, tokens=1500, byte_tokens=15, unknown_tokens=0),
    "response": TextStats(rows=100, characters=17_000, tokens=10_000, byte_tokens=100, unknown_tokens=0),
}


@pytest.fixture
def report():
    return TokenizerReport(
        tokenizer="/data/tokenizer", kind="bpe", vocab_size=29298, rows_seen=10_000_000, rows_used=160_000,
        choices=(
            Choice(name="vocab_size", requested=None, effective=29298, reason="the model's vocab_size"),
            Choice(name="rows", requested=10_000_000, effective=160_000, reason="training on more would exceed 4 GiB"),
            Choice(name="host_limit", requested=4 * GiB, effective=4 * GiB, reason="as requested"),
        ),
        characters_seen=2_000_000_000, characters_used=30_000_000, broken=0, first_broken=None,
        layout_reason="found prompt and response", measured_on="held-out rows", total=add_up(FIELDS), fields=FIELDS,
        round_trip=1.0, special_ids={token: number for number, token in enumerate(SPECIAL)},
        ids=compare_ids(29298, MODEL), fingerprint="0" * 64, seconds=200, training_s=150, peak_bytes=3700 * MiB,
        predicted_peak_bytes=4000 * MiB, host_limit_bytes=4 * GiB,
    )  # fmt: skip


def test_the_headline_says_what_it_is_and_how_good(report):
    first = shown(report, width=140).splitlines()[0]
    for part in (
        "/data/tokenizer",
        "29,298 bpe entries",
        "1.74 characters per token",
        "100% of 100 held-out rows decode exactly",
    ):
        assert part in first


def test_each_field_and_the_total_have_a_line(report):
    lines = shown(report, width=140).splitlines()
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


def test_one_field_needs_no_total(report):
    fields = {"text": FIELDS["prompt"]}
    assert "total" not in shown(replace(report, fields=fields, total=add_up(fields)), width=140)


def test_requested_values_stand_beside_effective_ones(report):
    lines = shown(report, width=140).splitlines()
    assert "10,000,000    160,000  training on more would exceed 4 GiB" in next(
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
    assert shown(report, width=140).count(" matches") == 4
    text = shown(replace(report, ids=compare_ids(4096, {**MODEL, "pad_token_id": 3, "eos_token_id": None})), width=140)
    assert "fits; the other rows of the embedding stay unused" in text
    assert text.count("does not match") == 1
    assert text.count("nothing to compare with") == 1


def test_time_and_memory_are_shown(report):
    text = shown(report, width=140)
    assert "3 min 20 s, of which 2 min 30 s training" in text
    assert "peak 3.61 GiB (measured), 3.91 GiB (predicted)" in text


def test_warnings_come_only_where_there_is_a_reason(report):
    assert "warning" not in shown(report)
    text = shown(replace(report, broken=3, first_broken="a.jsonl, line 7: not JSON", peak_bytes=5 * GiB), width=140)
    assert "warning: 3 broken rows were left out; the first is a.jsonl, line 7: not JSON" in text
    assert "warning: training took more memory than --host-limit" in text


def test_the_tokenizer_reads_at_80_columns(report):
    assert all(len(line) <= 80 for line in shown(report, width=80).splitlines())
