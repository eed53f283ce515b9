"""The tables of the data commands: aligned with wide characters, no markup from the rows, every number at any width."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from brimful.data.check import check
from brimful.data.clean.clean import CleanReport
from brimful.data.read.files import RowProblem
from brimful.data.tokenize import FieldStats, TokenizeReport
from brimful.data.tokenizer.train import Choice, TextStats, TokenizerReport, add_up, compare_ids
from brimful.data.tokenizer.vocabulary import SPECIAL
from brimful.report.data_tables import check_table, clean_table, tokenize_table, tokenizer_table
from brimful.units import GiB, MiB


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
    assert "96 of 100 rows can be used" in " ".join(text.split())


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
    assert "0 of 2 rows can be used" in " ".join(text.split())


def clean_report(**changes):
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
    text = clean_text(clean_report())
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
    text = clean_text(clean_report())
    assert "a.jsonl, line 15: 0.94 similar to line 14" in text
    assert "[red]b.jsonl, line 140: prompt is blank" in text


def test_time_speed_and_memory_are_told_as_measured():
    assert "20.0 s (read 15.0 s, dedup 2.0 s, write 3.0 s), 50,000 rows/s; peak memory 360 MiB, measured" in clean_text(
        clean_report()
    )


def test_a_resumed_run_shows_no_speed():
    text = clean_text(clean_report(resumed_rows=500_000, notes=("resuming after 500,000 rows",)))
    assert "rows/s" not in text
    assert "note: resuming after 500,000 rows" in text


def test_columns_are_named_with_the_reason():
    assert "prompt ← instruction+input, response ← output (found them)" in clean_text(clean_report())


def test_a_narrow_terminal_loses_no_number():
    text = clean_text(clean_report(), width=60)
    assert all(number in text for number in ("1,000,000", "−29,361", "945,727", "936,270"))


@pytest.mark.parametrize(
    ("broken", "rows", "broken_share", "out_share"),
    [(1, 10**7, "< 0.01 %", "99.99 %"), (1, 300, "0.33 %", "99.67 %"), (0, 9, "", "100 %")],
)
def test_a_share_is_never_rounded_to_nothing_or_all(broken, rows, broken_share, out_share):
    dropped = dict.fromkeys(clean_report().dropped, 0) | {"broken": broken}
    lines = clean_text(clean_report(rows_in=rows, files={"train": rows - broken}, dropped=dropped)).splitlines()
    assert broken_share in next(line for line in lines if "broken" in line)
    assert out_share in next(line for line in lines if line.startswith("out"))


PROMPT = FieldStats(
    column="instruction+input", characters=40_000, tokens=21_000, max_tokens=256, keeps_end=False, truncated=0, lost_tokens=0, mean=21.0,
    percentiles={"p50": 14, "p90": 45, "p99": 139}, longest=228,
)  # fmt: skip
RESPONSE = replace(PROMPT, column="output", tokens=95_000, truncated=30, lost_tokens=1_200, longest=256)
REPORT = TokenizeReport(
    store="/data/store", rows_in=1_007, rows_out=1_000, dropped={"broken": 0, "empty": 7},
    fields={"prompt": PROMPT, "response": RESPONSE}, layout_reason="found instruction, input and output",
    requested_max_tokens=(256,), first_broken=None, sources=1, skipped=(), tokenizer="tokenizer", vocab_size=29_298, dtype="uint16",
    seconds=2.5, rows_per_s=412.3, peak_bytes=250 * 2**20, start_bytes=60 * 2**20, host_limit_bytes=2**30,
    size_bytes=300_000, resumed_rows=0, started_over="", fingerprint="x",
)  # fmt: skip


def shown(report, width=80):
    return printed((tokenize_table if isinstance(report, TokenizeReport) else tokenizer_table)(report), width)


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


def test_the_first_row_of_each_other_reason_is_named():
    dropped, first = (
        {"broken": 0, "empty": 2, "no reply": 3},
        {"empty": "a.jsonl, line 2: x", "no reply": "a.jsonl, line 9: no reply"},
    )
    text = line(replace(REPORT, dropped=dropped, first_dropped=first), "dropped")
    assert text == "dropped 5 of 1,007 rows: 2 empty, 3 no reply; the first 'no reply' is a.jsonl, line 9: no reply"


def test_rows_that_were_added_are_shown():
    assert line(replace(REPORT, rows_added=12), "added") == "added 12 rows, because one may give several"
    assert "added" not in shown(REPORT)


def test_what_was_not_read_is_counted_and_named(tokenizer_report):
    skipped = ("data/a.md (unknown format)", "data/b (a link to a folder)")
    note = f"not read (2 entries): {', '.join(skipped)}"
    assert line(replace(REPORT, skipped=skipped), "skipped") == f"skipped {note}"
    assert line(replace(tokenizer_report, skipped=skipped), "warning") == f"warning: {note}"
    assert "not read" not in shown(REPORT) + shown(tokenizer_report)


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
def tokenizer_report():
    return TokenizerReport(
        tokenizer="/data/tokenizer", kind="bpe", vocab_size=29298, rows_seen=10_000_000, rows_used=160_000,
        choices=(
            Choice(name="vocab_size", requested=None, effective=29298, reason="the model's vocab_size"),
            Choice(name="rows", requested=10_000_000, effective=160_000, reason="training on more would exceed 4 GiB"),
            Choice(name="host_limit", requested=4 * GiB, effective=4 * GiB, reason="as requested"),
        ),
        characters_seen=2_000_000_000, characters_used=30_000_000, broken=0, first_broken=None, skipped=(),
        layout_reason="found prompt and response", measured_on="held-out rows", total=add_up(FIELDS), fields=FIELDS,
        round_trip=1.0, special_ids={token: number for number, token in enumerate(SPECIAL)},
        ids=compare_ids(29298, MODEL), fingerprint="0" * 64, seconds=200, training_s=150, peak_bytes=3700 * MiB,
        predicted_peak_bytes=4000 * MiB, host_limit_bytes=4 * GiB,
    )  # fmt: skip


def test_the_headline_says_what_it_is_and_how_good(tokenizer_report):
    first = shown(tokenizer_report, width=140).splitlines()[0]
    for part in (
        "/data/tokenizer",
        "29,298 bpe entries",
        "1.74 characters per token",
        "100% of 100 held-out rows decode exactly",
    ):
        assert part in first


def test_each_field_and_the_total_have_a_line(tokenizer_report):
    lines = shown(tokenizer_report, width=140).splitlines()
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


def test_one_field_needs_no_total(tokenizer_report):
    fields = {"text": FIELDS["prompt"]}
    assert "total" not in shown(replace(tokenizer_report, fields=fields, total=add_up(fields)), width=140)


def test_requested_values_stand_beside_effective_ones(tokenizer_report):
    lines = shown(tokenizer_report, width=140).splitlines()
    assert "10,000,000    160,000  training on more would exceed 4 GiB" in next(
        line for line in lines if line.startswith("rows")
    )
    assert "–" in next(line for line in lines if line.startswith("vocab size"))
    assert "4 GiB" in next(line for line in lines if line.startswith("host limit"))


def test_only_what_was_changed_stands_out(tokenizer_report):
    console = Console(width=140, force_terminal=True, color_system="standard", record=True, file=StringIO())
    console.print(tokenizer_table(tokenizer_report))
    text = console.export_text(styles=True)
    assert "\x1b[33m10,000,000" in text
    assert "\x1b[33m4 GiB" not in text


def test_ids_that_match_and_that_do_not(tokenizer_report):
    assert shown(tokenizer_report, width=140).count(" matches") == 4
    text = shown(
        replace(tokenizer_report, ids=compare_ids(4096, {**MODEL, "pad_token_id": 3, "eos_token_id": None})), width=140
    )
    assert "fits; the other rows of the embedding stay unused" in text
    assert text.count("does not match") == 1
    assert text.count("nothing to compare with") == 1


def test_time_and_memory_are_shown(tokenizer_report):
    text = shown(tokenizer_report, width=140)
    assert "3 min 20 s, of which 2 min 30 s training" in text
    assert "peak 3.61 GiB (measured), 3.91 GiB (predicted)" in text


def test_warnings_come_only_where_there_is_a_reason(tokenizer_report):
    assert "warning" not in shown(tokenizer_report)
    text = shown(
        replace(tokenizer_report, broken=3, first_broken="a.jsonl, line 7: not JSON", peak_bytes=5 * GiB), width=140
    )
    assert "warning: 3 broken rows were left out; the first is a.jsonl, line 7: not JSON" in text
    assert "warning: training took more memory than --host-limit" in text


def test_the_tokenizer_reads_at_80_columns(tokenizer_report):
    assert all(len(line) <= 80 for line in shown(tokenizer_report, width=80).splitlines())
