"""The table of a clean: every number, in a terminal of any width."""

from io import StringIO

from rich.console import Console

from brimful.data.clean.clean import CleanReport
from brimful.data.read.files import RowProblem
from brimful.report.data_tables import clean_table


def report(**changes):
    fields = {
        "output": "out", "columns": {"prompt": "instruction+input", "response": "output"}, "reason": "found them",
        "rows_in": 1_000_000, "files": {"train": 936_270, "valid": 9_457},
        "dropped": {"broken": 12, "empty": 5_098, "too_short": 0, "over_long": 0, "duplicate": 19_802, "near_duplicate": 29_361},
        "problems": {
            "broken": (RowProblem("a.jsonl", 17, "not JSON"),), "empty": (RowProblem("[red]b.jsonl", 140, "prompt is blank"),),
            "too_short": (), "over_long": (), "duplicate": (RowProblem("a.jsonl", 53, "same as line 52"),),
            "near_duplicate": (RowProblem("a.jsonl", 15, "0.94 similar to line 14"),),
        },
        "resumed_rows": 0, "notes": (), "seconds": 20.0, "stage_s": {"read": 15.0, "dedup": 2.0, "write": 3.0},
        "peak_bytes": 360 * 2**20,
    }  # fmt: skip
    return CleanReport(**fields | changes)


def printed(value, width=120):
    console = Console(width=width, record=True, file=StringIO())
    console.print(clean_table(value))
    return console.export_text()


def test_rows_in_dropped_and_out_are_all_there():
    text = printed(report())
    lines = {line.split("  ")[0].strip() or line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert "1,000,000" in lines["in"]
    for name, count, share in (
        ("broken", "−12", "< 0.01 %"), ("empty", "−5,098", "0.51 %"), ("too-short", "0", ""), ("over-long", "0", ""),
        ("duplicate", "−19,802", "1.98 %"), ("near-duplicate", "−29,361", "2.94 %"), ("out", "945,727", "94.57 %"),
        ("train", "936,270", "93.63 %"), ("valid", "9,457", "0.95 %"),
    ):  # fmt: skip
        assert lines[name][1] == count
        assert share in " ".join(lines[name])


def test_the_first_row_of_each_reason_is_named():
    text = printed(report())
    assert "a.jsonl, line 15: 0.94 similar to line 14" in text
    assert "[red]b.jsonl, line 140: prompt is blank" in text


def test_time_speed_and_memory_are_told_as_measured():
    assert "20.0 s (read 15.0 s, dedup 2.0 s, write 3.0 s), 50,000 rows/s; peak memory 360 MiB, measured" in printed(
        report()
    )


def test_a_resumed_run_shows_no_speed():
    text = printed(report(resumed_rows=500_000, notes=("resuming after 500,000 rows",)))
    assert "rows/s" not in text
    assert "note: resuming after 500,000 rows" in text


def test_columns_are_named_with_the_reason():
    assert "prompt ← instruction+input, response ← output (found them)" in printed(report())


def test_a_narrow_terminal_loses_no_number():
    text = printed(report(), width=60)
    assert all(number in text for number in ("1,000,000", "−29,361", "945,727", "936,270"))


def test_one_dropped_row_is_not_rounded_away():
    text = printed(report(rows_in=945_740, dropped={**dict.fromkeys(report().dropped, 0), "broken": 13}))
    assert "99.99 %" in text and "100 %" not in text
