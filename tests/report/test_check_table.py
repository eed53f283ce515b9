"""A check as people read it: aligned with wide characters, and nothing of the rows is taken for markup."""

import json

import pytest
from rich.cells import cell_len
from rich.console import Console

from brimful.data.check import check
from brimful.report.data_tables import _share, check_table


def shown(tmp_path, *rows, width=100, **options):
    path = tmp_path / "a.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115 - nobody looks
    console.print(check_table(check([str(path)], **options)))
    return console.export_text()


ROW = {"instruction": "鱼油哪种好？\n请回答", "input": "", "output": "看纯度，[bold]也看价格[/bold]。\x1b[31m" * 20}


def test_the_choice_of_columns_is_shown_with_its_reason(tmp_path):
    text = shown(tmp_path, ROW | {"text": "x"})
    assert "columns: found instruction+input and output; not used: text" in text
    assert "prompt ← instruction+input" in text and "response ← output" in text


def test_a_column_with_the_name_of_its_field_is_shown_once(tmp_path):
    assert "←" not in shown(tmp_path, {"prompt": "a", "response": "b"})


def test_rows_are_in_one_line_without_markup_or_control_characters(tmp_path):
    text = shown(tmp_path, ROW)
    assert "鱼油哪种好？⏎请回答" in text
    assert "看纯度，[bold]也看价格[/bold]。·[31m" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_the_terminal(width, tmp_path):
    rows = [
        ROW,
        *[{"instruction": "问" * number, "output": "答" * (number * 13 % 300 + 1)} for number in range(1, 200)],
    ]
    text = shown(tmp_path, *rows, width=width)
    assert max(cell_len(line.rstrip()) for line in text.splitlines()) <= width
    assert len(text.splitlines()) < 34


def test_columns_of_wide_characters_are_aligned(tmp_path):
    text = shown(tmp_path, {"prompt": "问" * 5, "response": "答"}, {"prompt": "abcdefg", "response": "答"})
    starts = {cell_len(line[: line.index("答")]) for line in text.splitlines() if "答" in line}
    assert len(starts) == 1


def test_every_count_has_its_share_and_first_places(tmp_path):
    rows = [{"prompt": str(number), "response": "b"} for number in range(96)]
    text = shown(
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
    text = shown(tmp_path, *rows)
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
    text = " ".join(shown(tmp_path, {"messages": messages * 2}, {"messages": messages}).split())
    assert "2 of 3 rows from 2 conversations can be used" in text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 9, "0 %"),
        (9, 9, "100 %"),
        (1, 10**7, "< 0.01 %"),
        (10**7 - 1, 10**7, "99.99 %"),
        (1, 300, "0.33 %"),
        (0, 0, "0 %"),
    ],
)
def test_a_share_is_never_nothing_or_all_by_rounding(part, whole, text):
    assert _share(part, whole) == text


def test_a_file_with_nothing_usable_is_shown_all_the_same(tmp_path):
    text = shown(tmp_path, '{"prompt": 1, "response": "a"}', '{"prompt": "", "response": "a"}')
    assert "0 of 2 rows can be used" in text
