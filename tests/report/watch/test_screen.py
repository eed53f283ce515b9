"""What is drawn, and how much of it at which size."""

import re
import time
import tomllib
from datetime import timedelta
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Group

from brimful import languages
from brimful.cli.output import with_flags
from brimful.languages import set_language
from brimful.report.run_figures import parse_time
from brimful.report.run_record import RunRecord
from brimful.report.watch import watch_parts
from brimful.report.watch.run_snapshot import TIME_PARTS, Snapshot, take
from brimful.report.watch.watch_canvas import ASCII
from brimful.report.watch.watch_screen import allot, frame
from brimful.report.watch.watcher import Watcher
from brimful.training.run import lock_holder
from brimful.units import GiB
from tests.report.fake_runs import START, sample_event, write_run

PRESETS = [(80, 24), (100, 30), (132, 30), (200, 60), (60, 15), (40, 10), (20, 3), (300, 20), (80, 100)]
MORE = [
    {"event": "grow", "step": 150, "process": 0, "sentence": "micro-batch size restored to 43 rows after 10 clean steps"},
    {"event": "note", "step": 30, "sentence": "the run has only 8 passes over the rows", "level": "warning"},
    {"event": "note", "step": 160, "sentence": "rows are read by 3 workers from here"},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _english_in_london(monkeypatch):
    set_language("en")
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()
    set_language(None)


def snapshot(folder, state="running", now=None):
    record = RunRecord(folder)
    newest = parse_time((record.steps or record.of_kind("begin"))[-1]["time"])
    return take(record, state, lock_holder(folder / "lock"), now or newest + timedelta(seconds=3))


def usual(tmp_path, state="running", **values):
    """Everything that a run can have."""
    parts = {"steps": 300, "done": 200, "ooms": [120], "evals": [100, 190], "checkpoints": [100, 190], "more": MORE}
    folder = write_run(tmp_path / "first", **{**parts, **values})
    return snapshot(folder, state)


def text(taken, width=80, height=24, **options):
    return "\n".join(line.plain for line in frame(taken, width, height, **options))


def squeezed(taken, *size, **options):
    return " ".join(text(taken, *size, **options).split())


@pytest.mark.parametrize(("width", "height"), PRESETS)
@pytest.mark.parametrize("state", ["running", "failed"])
@pytest.mark.parametrize("glyphs", [None, ASCII])
def test_a_frame_is_never_larger_than_the_terminal(tmp_path, width, height, state, glyphs):
    lines = frame(usual(tmp_path, state), width, height, footer="q quit", **({"glyphs": glyphs} if glyphs else {}))
    assert len(lines) == height and max(line.cell_len for line in lines) <= width


@pytest.mark.parametrize(
    "shown",
    [
        "● running first sft", "since 09:00, 1 min", "200/300", "66 %", "ETA 35 s, 09:02", "16.67/25 · 0.37 s/step · 256 rows in 6 micro-batches · bf16 · padded",
        "16.1 GiB 0 B 20 GiB 80 % safe 93 % 71 °C 287 W", "RAM", "2 GiB 4 GiB 16 GiB 38 % safe 40 %", "2 workers · no swap", "limit: physical memory",
        "█ compute 97 %", "▓ data 1 %", "padding 29 %", "MFU 31 %", "loss", "last 2.5455", "min 2.5455", "max 7.7143", "rows/s", "672",
        "lr 4.00e-05", "scores step 190: loss 2.6714 · the best so far", "saved step 190 · 6 s ago · 2 GiB",
        "1 survived · micro-batch size restored", "! the run has only 8 passes", "rows are read by 3 workers", "q quit",
    ],
)  # fmt: skip
def test_everything_important_fits_into_80_by_24(tmp_path, shown):
    assert shown in squeezed(usual(tmp_path), 80, 24, footer="q quit")


def test_the_least_important_parts_are_dropped_first(tmp_path):
    taken = usual(tmp_path)
    small = squeezed(taken, 80, 12)
    assert all(part in small for part in ("running", "200/300", "GPU 0", "RAM", "loss", "1 survived"))
    assert "scores" not in small and "2 workers" not in small


def test_a_wide_terminal_has_two_columns_and_charts(tmp_path):
    lines = text(usual(tmp_path), 200, 60).splitlines()
    heads = [line for line in lines if "╭─" in line[1:]]
    assert any("memory" in head and "loss" in head for head in heads)
    assert all(title in "\n".join(lines) for title in ("rows/s", "peak memory, reserved", "GPU utilisation", "learning rate"))  # fmt: skip
    assert sum("┈" in line for line in lines) >= 2  # the limit and the plan
    assert sum(0x2800 < ord(character) < 0x2900 for line in lines for character in line) > 300


@pytest.mark.parametrize("size", [(200, 60), (240, 80), (160, 45)])
def test_where_no_card_is_sampled_the_learning_rate_is_no_larger_than_the_loss(tmp_path, size):
    taken = usual(tmp_path, gpu={"utilization": None})
    lines = text(taken, *size).splitlines()

    def height(title):
        start = next(number for number, line in enumerate(lines) if f"╭─ {title} ─" in line)
        column = lines[start].index(f"╭─ {title} ─")
        return next(number for number, line in enumerate(lines[start:]) if line[column] == "╰")

    assert height("learning rate") <= height("loss")


def test_the_boxes_of_both_columns_end_where_they_should(tmp_path):
    lines = text(usual(tmp_path, ranks=8), 200, 60, footer="q").splitlines()
    assert all(cell_len(line) == 200 for line in lines[:-1])
    assert {line[-1] for line in lines[:-1]} == set("╮│╯")


def test_nothing_moves_while_figures_change(tmp_path):
    def columns(taken, width, height):
        lines = text(taken, width, height).splitlines()
        return [(line.find("%"), line.find("GiB"), line.find("│")) for line in lines if line.lstrip("│ ").startswith(("GPU", "RAM", "step "))]  # fmt: skip

    small = usual(tmp_path / "a")
    values = {"ranks": [{"rank": 0, "peak_bytes": 9.87 * GiB, "reserved_bytes": 10.04 * GiB, "times": {"compute_s": 0.3}}], "eta_s": 12_345.6}  # fmt: skip
    sample = sample_event(200, gpu={"utilization": 1.0, "power_w": 1287.0, "temperature_c": 9, "others_bytes": 0})
    large = usual(tmp_path / "b", step_values=values, more=[*MORE, sample])
    for size in ((80, 24), (200, 60)):
        assert columns(small, *size) == columns(large, *size)


def test_the_plan_is_marked_on_the_bar_and_others_come_from_the_right(tmp_path):
    others = sample_event(200, gpu={"others_bytes": 4 * GiB, "used_bytes": 20 * GiB})
    line = next(line for line in text(usual(tmp_path, more=[others]), 110, 24).splitlines() if line.startswith("GPU 0"))
    bar = re.search(r"[█░▒│]+", line)[0]
    assert bar.endswith("▒") and bar.startswith("█") and "│" in bar and " 4 GiB " in line


def test_others_within_what_the_limit_leaves_them_do_not_narrow_the_bar(tmp_path):
    others = sample_event(200, gpu={"others_bytes": 4 * GiB, "used_bytes": 20 * GiB, "total_bytes": 30 * GiB})
    line = next(line for line in text(usual(tmp_path, more=[others]), 110, 24).splitlines() if line.startswith("GPU 0"))
    assert "▒" not in line and " 4 GiB " in line


@pytest.mark.parametrize(("reserved", "word", "style"), [(17, "safe", "green"), (17.5, "edge", "yellow"), (18.5, "danger", "bold red")])  # fmt: skip
def test_the_zone_is_a_word_and_a_colour(tmp_path, reserved, word, style):
    values = {"ranks": [{"rank": 0, "peak_bytes": GiB, "reserved_bytes": reserved * GiB}]}
    (line,) = [line for line in frame(usual(tmp_path, step_values=values), 80, 24) if line.plain.startswith("GPU 0")]
    assert f" {word}" in line.plain and any(span.style == style for span in line.spans)


def test_each_card_has_a_line_and_the_slowest_is_marked(tmp_path):
    ranks = [{"rank": rank, "peak_bytes": GiB, "reserved_bytes": 2 * GiB, "times": {"compute_s": 0.5 if rank == 3 else 0.25}} for rank in range(4)]  # fmt: skip
    lines = text(usual(tmp_path, ranks=4, step_values={"ranks": ranks}), 80, 30).splitlines()
    assert [line[:6] for line in lines if line.startswith("GPU")] == ["GPU 0 ", "GPU 1 ", "GPU 2 ", "GPU 3▸"]
    assert any("slowest: GPU 3 is busy for 0.50 s of a step, GPU 0 for 0.25 s" in line for line in lines)


def test_where_there_is_space_each_rank_has_its_time_split_and_padding(tmp_path):
    times = ({"compute_s": 0.3, "data_s": 0.1}, {"compute_s": 0.1, "data_s": 0.3})
    ranks = [{"rank": rank, "padding": 0.1 + rank / 10, "times": times[rank]} for rank in range(2)]
    taken = usual(tmp_path, ranks=2, step_values={"ranks": ranks})
    bars = [line for line in text(taken, 80, 50).splitlines() if line.startswith("GPU") and "padding" in line]
    assert [(bar.count("█") > bar.count("▓"), bar.split("padding")[1].strip()) for bar in bars] == [(True, "10 %"), (False, "20 %")]  # fmt: skip
    assert "GPU 1" in text(taken, 80, 24) and "padding 20 %" not in text(taken, 80, 24)


def test_of_many_cards_the_fullest_and_the_slowest_are_shown(tmp_path):
    ranks = [{"rank": rank, "peak_bytes": GiB, "reserved_bytes": (10 + rank / 4) * GiB, "times": {"compute_s": 0.5 if rank == 1 else 0.25}} for rank in range(16)]  # fmt: skip
    lines = text(usual(tmp_path, ranks=16, step_values={"ranks": ranks}), 80, 24).splitlines()
    shown = [line.split("▸")[0].split("█")[0].strip() for line in lines if line.startswith("GPU")]
    assert "GPU 1" in shown and "GPU 15" in shown and "GPU 2" not in shown
    assert any(f"and {16 - len(shown)} more cards, " in line for line in lines)


@pytest.mark.parametrize("state", ["finished", "interrupted", "time-limit", "failed", "killed"])
def test_an_ended_run_says_how_and_how_to_continue(tmp_path, state):
    shown = squeezed(usual(tmp_path, state, end=None if state == "killed" else state), 120, 24)
    assert f"● {state} first" in shown and "ended 09:01" in shown and "took 1 min" in shown
    assert ("To continue: brimful train --run" in shown) == (state != "finished")


def test_the_error_of_a_failed_run_does_not_push_the_command_out(tmp_path):
    folder = write_run(tmp_path / "first", steps=30, checkpoints=[10], end="failed")
    content = (folder / "events.jsonl").read_text().replace("trained 30 steps", "CUDA error: " + "an illegal memory access " * 40)  # fmt: skip
    (folder / "events.jsonl").write_text(content)
    for height in (8, 12, 24):
        shown = squeezed(snapshot(folder, "failed"), 100, height)
        assert "CUDA error: an illegal" in shown and "To continue: brimful train" in shown


def test_the_error_of_a_failed_run_is_told_in_full_and_in_flags(tmp_path):
    folder = write_run(tmp_path / "first", steps=30, done=0, end="failed")
    error = (
        'One row needs 16 MiB. Try: memory_limit=\\"19MiB\\", or a lower max_tokens=, '
        + "or another advice " * 10
        + "or lora='r=16'."
    )
    content = (folder / "events.jsonl").read_text().replace("trained 0 steps", error)
    (folder / "events.jsonl").write_text(content)
    shown = squeezed(snapshot(folder, "failed"), 80, 24, wording=with_flags)
    assert (
        "Try: --memory-limit 19MiB, or a lower --max-tokens, " + "or another advice " * 10 + "or --lora r=16." in shown
    )


def test_a_run_without_its_events_is_not_said_to_be_killed(tmp_path):
    folder = write_run(tmp_path / "first", steps=30, checkpoints=[10])
    (folder / "events.jsonl").unlink()
    with Watcher(folder) as watcher:
        shown = squeezed(watcher.look(), 120, 24)
    assert "● no record first" in shown and "killed" not in shown


def test_an_error_that_would_come_again_is_to_be_fixed_first(tmp_path):
    folder = write_run(tmp_path / "first", steps=30, checkpoints=[10], end="failed")
    content = (folder / "events.jsonl").read_text().replace('"reason": "failed"', '"reason": "failed", "repeats": true')
    (folder / "events.jsonl").write_text(content)
    assert "Fix this first, then continue: brimful train --run" in squeezed(snapshot(folder, "failed"), 120, 24)


def test_a_run_that_is_prepared_says_so(tmp_path):
    folder = write_run(tmp_path / "first", steps=30, done=0, running=True)
    assert "The plan is made; the first step has not ended yet." in squeezed(snapshot(folder, "preparing"))
    waiting = Snapshot(taken=START, run="runs/x", name="x", state="preparing", since=START)
    assert "Data and plan are being prepared; the first step has not begun." in squeezed(waiting)


def test_a_loss_that_is_not_a_number_is_red(tmp_path):
    values = {"loss": lambda n: None if n > 190 else 2.0, "loss_is": lambda n: "nan" if n > 190 else None}
    lines = frame(usual(tmp_path, step_values=values), 80, 24)
    (line,) = [line for line in lines if line.plain.startswith("loss")]
    assert "nan" in line.plain and any(span.style == "bold red" for span in line.spans)


def test_an_oom_that_waits_for_its_memory_says_so(tmp_path):
    shown = squeezed(usual(tmp_path, more=[]), 80, 24)
    assert "1 survived · micro-batch size not restored yet" in shown
    assert "step 120, 32 s ago · not restored yet · micro-batches of at most 32 rows" in shown


def test_what_an_oom_changed_is_told_in_full_where_there_is_space(tmp_path):
    """80 columns cut it in the middle: `micro-batches of at mo…`."""
    shown = squeezed(usual(tmp_path, more=[], evals=[], checkpoints=[]), 80, 40)
    assert "not restored yet · micro-batches of at most 32 rows from here · the backward of 43 rows" in shown


def test_the_advice_of_a_note_is_told_in_full_and_in_flags(tmp_path):
    sentence = "the run has only 60 updates, too few to learn much. Try: a higher max_steps="
    more = [{"event": "note", "step": 100, "level": "warning", "sentence": sentence}]
    shown = squeezed(usual(tmp_path, more=more, ooms=[]), 80, 40, wording=with_flags)
    assert "the run has only 60 updates, too few to learn much. Try: a higher --max-steps" in shown


def test_a_restored_size_is_told_with_its_step(tmp_path):
    shown = squeezed(usual(tmp_path), 100, 24)
    assert "step 120, 32 s ago · restored at step 150 · micro-batches of at most 32 rows" in shown


def test_out_of_memory_errors_and_evaluations_are_marked_in_the_charts(tmp_path):
    shown = text(usual(tmp_path), 200, 60)
    assert shown.count("▼") == 2 and shown.count("◆") == 4  # with their legends


def test_a_run_that_has_been_silent_says_for_how_long(tmp_path):
    folder = write_run(tmp_path / "first", steps=300, done=200, running=True)
    assert "no news for 58 min" in squeezed(snapshot(folder, now=START + timedelta(hours=1)))


def test_news_of_other_runs_are_in_the_last_line(tmp_path):
    from dataclasses import replace

    taken = usual(tmp_path)
    assert "a newer run has begun; before it this was runs/a" in text(replace(taken, switched_from="runs/a"), 80, 24).splitlines()[-1]  # fmt: skip
    assert "also running: runs/b" in text(replace(taken, also_running=("runs/b",)), 80, 24).splitlines()[-1]
    assert "cannot be read" in text(replace(taken, problem="runs/c cannot be read"), 80, 24).splitlines()[-1]


def test_in_ascii_there_is_nothing_else(tmp_path):
    for size in PRESETS:
        assert text(usual(tmp_path), *size, glyphs=ASCII, footer="q quit").isascii()


def test_texts_of_a_run_cannot_move_the_cursor(tmp_path):
    evil = "\x1b[2J\x1b]0;title\x07 and\r\n\x9b31m more"
    taken = usual(tmp_path, more=[{"event": "note", "step": 200, "sentence": evil}], plan_values={"task": evil, "device_name": evil})  # fmt: skip
    for size in ((80, 24), (200, 60)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text(taken, *size))


def test_a_name_with_spaces_and_chinese_is_cut_by_cells(tmp_path):
    folder = write_run(tmp_path / ("很长的 名字" * 12), steps=30, done=20, running=True)
    lines = frame(snapshot(folder), 80, 24)
    assert lines[0].cell_len <= 80 and "很长的 名字" in lines[0].plain


def test_wishes_are_granted_in_order_while_they_fit():
    assert allot(6, [("a", 2), ("b", 5), ("c", 1), ("b", 3)], {"a": 9, "b": 9, "c": 9}) == {"a": 2, "c": 1, "b": 3}


def test_no_part_gets_more_lines_than_it_has():
    assert allot(9, [("a", 5), ("b", 5)], {"a": 2}) == {"a": 2}


def test_a_box_costs_its_frame_once():
    assert allot(8, [("a", 2), ("a", 3), ("b", 1)], {"a": 9, "b": 9}, overhead=2) == {"a": 3, "b": 1}


def test_a_frame_can_be_printed_by_rich(tmp_path):
    from rich.console import Console

    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(Group(*frame(usual(tmp_path), 80, 24)))
    assert len(console.export_text().splitlines()) == 24


# ---- Chinese ---------------------------------------------------------------------------------------------------------


def catalogue():
    path = Path(languages.__file__).parent / "zh" / "watch.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))["watch"]


def test_in_chinese_no_english_sentence_is_left(tmp_path):
    set_language("zh")
    more = [{"event": "note", "step": 5, "sentence": "一条消息"}, {"event": "checkpoint", "step": 199, "saved": False, "sentence": "磁盘已满"}]  # fmt: skip
    ranks = [{"rank": rank, "peak_bytes": GiB, "reserved_bytes": 2 * GiB, "times": {"compute_s": 0.5 if rank else 0.25}} for rank in range(2)]  # fmt: skip
    oom = {"event": "oom", "step": 100, "process": 0, "sentence": "out of memory in 甲: 乙"}
    states = ("running", "failed", "killed", "finished", "interrupted", "time-limit", "gone", "preparing")
    for number, state in enumerate(states):
        values = {"ranks": 2, "step_values": {"ranks": ranks}, "more": [*more, oom], "ooms": [], "end": None}
        taken = usual(tmp_path / str(number), state, **values)
        for size in ((80, 24), (200, 60), (80, 9)):
            shown = text(taken, *size, footer=None).replace(str(tmp_path), "")
            for name in ("sft", "NVIDIA GeForce RTX 3080", "brimful train --run", "brimful watch"):
                shown = shown.replace(name, "")
            assert not re.findall(r"[A-Za-z]{2,} [a-z]{3,}", shown), (state, size)


def test_chinese_keeps_its_columns(tmp_path):
    set_language("zh")
    for size in ((80, 24), (200, 60)):
        lines = frame(usual(tmp_path), *size)
        rows = [line.plain for line in lines if re.search("GPU 0 |内存 .*GiB", line.plain)]
        ends = {cell_len(row[: row.index("GiB") + 3]) for row in rows}
        assert len(rows) == 2 and len(ends) == 1
    assert {line.cell_len for line in frame(usual(tmp_path), 200, 60)[:-1]} == {200}


def test_every_template_of_the_view_has_its_chinese():
    package = Path(watch_parts.__file__).parent
    sources = [*package.glob("*.py"), package.parents[1] / "cli" / "watch.py"]
    found = {a or b for path in sources for a, b in re.findall(r"""\btr\(\s*(?:"([^"]+)"|'([^']+)')""", path.read_text(encoding="utf-8"))}  # fmt: skip
    assert len(found) > 60
    words = {*watch_parts.STATE_STYLES, *TIME_PARTS, "safe", "edge", "danger", "temp.", "planned", "allocated", "held now", "power"}  # fmt: skip
    assert (found | words) - set(catalogue()) == set()


def test_chinese_templates_have_the_same_places():
    for english, chinese in catalogue().items():
        names = [sorted(re.findall(r"\{(\w+)", text)) for text in (english, chinese)]
        assert names[0] == names[1], english


def test_a_run_on_the_cpu_has_no_columns_for_temperature_and_power(tmp_path):
    on_cpu = text(usual(tmp_path, plan_values={"device": "cpu", "device_name": "the CPU"}))
    assert "power" not in on_cpu and "planned" in on_cpu
    assert "power" in text(usual(tmp_path))


LOGGED = {"log": lambda step: {"rewards/chosen": 0.01 * step, "margin": 0.5, "accuracy": 0.9}}


@pytest.mark.parametrize("size", [(80, 40), (150, 50)])
def test_what_the_task_logs_has_a_line_each_with_its_last_value(tmp_path, size):
    lines = text(usual(tmp_path, step_values=LOGGED), *size).splitlines()
    for name, last in (("rewards/chosen", "2.0000"), ("margin", "0.5000"), ("accuracy", "0.9000")):
        assert any(name in line and last in line for line in lines), name


def test_a_small_terminal_leaves_out_what_the_task_logs(tmp_path):
    assert "margin" not in text(usual(tmp_path, step_values=LOGGED), 80, 15)
