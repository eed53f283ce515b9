"""The tables of check and clean: aligned with wide characters, no markup from the rows, every number at any width."""

import json
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from brimful.data.check import check
from brimful.data.clean.clean import CleanReport
from brimful.data.read.files import RowProblem
from brimful.report.data_tables import check_table, clean_table


def printed(table, width):
    console = Console(width=width, record=True, file=StringIO())
    console.print(table)
    return console.export_text()


def check_text(tmp_path, *rows, width=100, **options):
    path = tmp_path / "a.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return printed(check_table(check([str(path)], **options)), width)


ROW = {"instruction": "鱼油哪种好？\n请回答", "input": "", "output": "看纯度，[bold]也看价格[/bold]。\x1b[31m" * 20}


def test_the_choice_of_columns_is_shown_with_its_reason(tmp_path):
    text = check_text(tmp_path, ROW | {"text": "x"})
    assert "columns: found instruction+input and output; not used: text" in text
    assert "prompt ← instruction+input" in text and "response ← output" in text


def test_a_column_with_the_name_of_its_field_is_shown_once(tmp_path):
    assert "←" not in check_text(tmp_path, {"prompt": "a", "response": "b"})


def test_rows_are_in_one_line_without_markup_or_control_characters(tmp_path):
    text = check_text(tmp_path, ROW)
    assert "鱼油哪种好？⏎请回答" in text
    assert "看纯度，[bold]也看价格[/bold]。·[31m" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_the_terminal(width, tmp_path):
    rows = [
        ROW,
        *[{"instruction": "问" * number, "output": "答" * (number * 13 % 300 + 1)} for number in range(1, 200)],
    ]
    text = check_text(tmp_path, *rows, width=width)
    assert max(cell_len(line.rstrip()) for line in text.splitlines()) <= width
    assert len(text.splitlines()) < 34


def test_columns_of_wide_characters_are_aligned(tmp_path):
    text = check_text(tmp_path, {"prompt": "问" * 5, "response": "答"}, {"prompt": "abcdefg", "response": "答"})
    starts = {cell_len(line[: line.index("答")]) for line in text.splitlines() if "答" in line}
    assert len(starts) == 1


def test_every_count_has_its_share_and_first_places(tmp_path):
    rows = [{"prompt": str(number), "response": "b"} for number in range(96)]
    text = check_text(
        tmp_path,
        *rows,
        "{broken",
        {"prompt": "", "response": "b"},
        {"prompt": "c", "response": ""},
        rows[0],
        max_chars=9,
    )
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.strip()}
    assert lines["in"] == "in 100"
    assert lines["broken"].startswith(f"broken 1 1.00 % {tmp_path}"[:30])
    assert lines["over-long"] == "over-long 0 0 %"
    assert lines["usable"] == "usable 96 96.00 %"
    assert "line 98: the prompt is empty; line 99" in " ".join(text.split())
    assert "96 of 100 rows can be used" in text


def test_lengths_are_drawn_for_each_field(tmp_path):
    rows = [{"prompt": "a" * (number % 10 + 1), "chosen": "b" * 5, "rejected": "c"} for number in range(100)]
    text = check_text(tmp_path, *rows)
    for title in (
        "prompt in characters, mean 5.5",
        "chosen in characters, mean 5.0",
        "rejected in characters, mean 1.0",
    ):
        assert title in text
    assert "p50 5 · p90 9 · p99 10 · max 10" in text
    assert "████████" in text


def test_conversations_are_counted(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = " ".join(check_text(tmp_path, {"messages": messages * 2}, {"messages": messages}).split())
    assert "2 of 3 rows from 2 conversations can be used" in text


def test_a_file_with_nothing_usable_is_shown_all_the_same(tmp_path):
    text = check_text(tmp_path, '{"prompt": 1, "response": "a"}', '{"prompt": "", "response": "a"}')
    assert "0 of 2 rows can be used" in text


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


def clean_text(value, width=120):
    return printed(clean_table(value), width)


def test_rows_in_dropped_and_out_are_all_there():
    text = clean_text(report())
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
    text = clean_text(report())
    assert "a.jsonl, line 15: 0.94 similar to line 14" in text
    assert "[red]b.jsonl, line 140: prompt is blank" in text


def test_time_speed_and_memory_are_told_as_measured():
    assert "20.0 s (read 15.0 s, dedup 2.0 s, write 3.0 s), 50,000 rows/s; peak memory 360 MiB, measured" in clean_text(
        report()
    )


def test_a_resumed_run_shows_no_speed():
    text = clean_text(report(resumed_rows=500_000, notes=("resuming after 500,000 rows",)))
    assert "rows/s" not in text
    assert "note: resuming after 500,000 rows" in text


def test_columns_are_named_with_the_reason():
    assert "prompt ← instruction+input, response ← output (found them)" in clean_text(report())


def test_a_narrow_terminal_loses_no_number():
    text = clean_text(report(), width=60)
    assert all(number in text for number in ("1,000,000", "−29,361", "945,727", "936,270"))


@pytest.mark.parametrize(
    ("broken", "rows", "broken_share", "out_share"),
    [(1, 10**7, "< 0.01 %", "99.99 %"), (1, 300, "0.33 %", "99.67 %"), (0, 9, "", "100 %")],
)
def test_a_share_is_never_rounded_to_nothing_or_all(broken, rows, broken_share, out_share):
    dropped = dict.fromkeys(report().dropped, 0) | {"broken": broken}
    lines = clean_text(report(rows_in=rows, files={"train": rows - broken}, dropped=dropped)).splitlines()
    assert broken_share in next(line for line in lines if "broken" in line)
    assert out_share in next(line for line in lines if line.startswith("out"))
