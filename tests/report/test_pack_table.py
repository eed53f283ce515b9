"""What `brimful data pack` shows."""

from dataclasses import replace

from rich.console import Console

from brimful.data.tokenize import PackReport, Side
from brimful.report.tokenize_tables import pack_table

PROMPT = Side(
    column="instruction+input", characters=40_000, tokens=21_000, max_tokens=256, keeps_end=False, truncated=0, lost_tokens=0, mean=21.0,
    percentiles={"p50": 14, "p90": 45, "p99": 139}, longest=228,
)  # fmt: skip
RESPONSE = replace(PROMPT, column="output", tokens=95_000, truncated=30, lost_tokens=1_200, longest=256)
REPORT = PackReport(
    store="/data/store", rows_in=1_007, rows_out=1_000, dropped={"broken": 0, "empty": 7},
    sides={"prompt": PROMPT, "response": RESPONSE}, layout_reason="found instruction, input and output",
    requested_max_tokens=(256,), first_broken=None, sources=1, tokenizer="tokenizer", vocab_size=29_298, dtype="uint16",
    seconds=2.5, rows_per_s=412.3, peak_bytes=250 * 2**20, start_bytes=60 * 2**20, host_limit_bytes=2**30,
    size_bytes=300_000, resumed_rows=0, started_over="", fingerprint="x",
)  # fmt: skip


def shown(report, width=80):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(pack_table(report))
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


def test_sides_stand_beside_each_other():
    assert line(REPORT, "column") == "column instruction+input output"
    assert line(REPORT, "tokens a row") == "tokens a row, mean 21.0 21.0"
    assert line(REPORT, "longest") == "longest 228 256"
    assert line(REPORT, "characters a token") == "characters a token 2.00 0.42"
    assert line(REPORT, "rows cut") == "rows cut 0 30 (3.0%)"
    assert line(REPORT, "tokens lost") == "tokens lost 0 1,200 (1.3%)"


def test_what_was_asked_stands_beside_what_it_became():
    assert "--max-tokens 256 is prompt 256, response 256" in " ".join(shown(REPORT, width=160).split())


def test_dropped_rows_are_told_with_their_reason():
    assert line(REPORT, "dropped") == "dropped 7 of 1,007 rows: 7 empty"
    broken = replace(REPORT, dropped={"broken": 2, "empty": 5}, first_broken="a.jsonl, line 3: not JSON")
    assert "2 broken, 5 empty; the first broken one is a.jsonl, line 3: not JSON" in line(broken, "dropped")
    assert line(replace(REPORT, dropped={"broken": 0, "empty": 0}), "dropped") == "dropped no row"


def test_memory_is_said_to_be_measured():
    assert "250 MiB at the highest (measured) of 1 GiB allowed; 60 MiB before the first row" in line(REPORT, "memory")
    assert "unknown" in line(replace(REPORT, peak_bytes=0, start_bytes=0), "memory")


def test_going_on_and_starting_over_are_told_only_then():
    assert "went on" not in shown(REPORT) and "started over" not in shown(REPORT)
    assert "after 600 rows" in line(replace(REPORT, resumed_rows=600), "went on")
    assert "another source" in line(replace(REPORT, started_over="it was made with another source"), "started over")
