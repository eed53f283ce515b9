"""The table of a clean: every number, in a terminal of any width."""

from io import StringIO

from rich.console import Console

from brimful.data.check import Place
from brimful.data.clean.clean import CleanReport
from brimful.report.data_tables import clean_table


def report(**changes):
    fields = {
        "output": "out", "columns": {"prompt": "instruction+input", "response": "output"}, "reason": "found them",
        "rows_in": 1_000_000, "files": {"train": 936_270, "valid": 9_457},
        "dropped": {"broken": 12, "empty": 5_098, "too_short": 0, "over_long": 0, "duplicate": 19_802, "near_duplicate": 29_361},
        "places": {
            "broken": (Place(file="a.jsonl", line=17, why="not JSON"),), "empty": (Place(file="[red]b.jsonl", line=140, why="prompt is blank"),),
            "too_short": (), "over_long": (), "duplicate": (Place(file="a.jsonl", line=53, why="the same as line 52"),),
            "near_duplicate": (Place(file="a.jsonl", line=15, why="0.94 like line 14"),),
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
        ("broken", "−12", "< 0.1 %"), ("empty", "−5,098", "0.5 %"), ("too-short", "0", ""), ("over-long", "0", ""),
        ("duplicate", "−19,802", "2.0 %"), ("near-duplicate", "−29,361", "2.9 %"), ("out", "945,727", "94.6 %"),
        ("train", "936,270", "93.6 %"), ("valid", "9,457", "0.9 %"),
    ):  # fmt: skip
        assert lines[name][1] == count
        assert share in " ".join(lines[name])


def test_the_first_row_of_each_reason_is_named():
    text = printed(report())
    assert "a.jsonl, line 15: 0.94 like line 14" in text
    assert "[red]b.jsonl, line 140: prompt is blank" in text


def test_time_speed_and_memory_are_told_as_measured():
    assert "20.0 s (read 15.0 s, dedup 2.0 s, write 3.0 s), 50,000 rows/s; peak memory 360 MiB, measured" in printed(
        report()
    )


def test_a_run_that_went_on_claims_no_speed():
    text = printed(report(resumed_rows=500_000, notes=("going on after 500,000 rows",)))
    assert "rows/s" not in text
    assert "note: going on after 500,000 rows" in text


def test_columns_are_named_with_the_reason():
    assert "prompt ← instruction+input, response ← output (found them)" in printed(report())


def test_a_narrow_terminal_loses_no_number():
    text = printed(report(), width=60)
    assert all(number in text for number in ("1,000,000", "−29,361", "945,727", "936,270"))


def test_one_dropped_row_is_not_rounded_away():
    text = printed(report(rows_in=945_740, dropped={**dict.fromkeys(report().dropped, 0), "broken": 13}))
    assert "99.9 %" in text and "100.0 %" not in text
