"""A leak rises over equal steps and does not stop; a long row stands out once."""

import random
from pathlib import Path
from typing import Any

import numpy as np

from brimful.data.store import StoreWriter, spans_of
from brimful.report.run_figures import RunFigures
from brimful.report.run_record import RunRecord
from brimful.report.why.growth_checks import longest_lengths, row_place, share_longer
from brimful.report.why.run_checks import check_run
from brimful.units import GiB, MiB
from tests.report.fake_runs import write_run


def found(folder: Path, kind: str, **values: Any):
    return next((one for one in check_run(RunRecord(write_run(folder / "run", **values))) if one.kind == kind), None)


def wobble(step: int, by: float = 0.02) -> float:
    return by * (random.Random(step).random() - 0.5)


def test_a_rising_peak_is_a_leak_with_its_rate_and_the_step_in_which_memory_is_full(tmp_path):
    leak = found(
        tmp_path, "device-memory-leak", steps=2000, done=300,
        step_values={"peak_bytes": lambda n: int((9 + 0.01 * n + wobble(n)) * GiB), "reserved_bytes": None},
    )  # fmt: skip
    assert leak.certainty == "likely"
    assert abs(leak.figures["bytes_per_step"] / (0.01 * GiB) - 1) < 0.05
    assert abs(leak.figures["full_at_step"] - 1100) < 20
    assert "At this rate the limit of 20 GiB is reached around step 1,0" in leak.cause or "1,1" in leak.cause


def test_a_leak_that_ends_after_the_run_says_so(tmp_path):
    leak = found(tmp_path, "device-memory-leak", step_values={"peak_bytes": lambda n: int((9 + 0.005 * n) * GiB)})
    assert "after the end of this run" in leak.cause


def test_a_peak_that_follows_the_tokens_is_no_leak(tmp_path):
    assert (
        found(
            tmp_path, "device-memory-leak",
            step_values={"tokens": lambda n: 20_000 + 60 * n, "peak_bytes": lambda n: int((6 + 0.02 * n) * GiB)},
        )
        is None
    )  # fmt: skip


def test_random_peaks_are_no_leak(tmp_path):
    for seed in range(40):
        rng = random.Random(seed)
        peaks = [int((9 + 4 * rng.random()) * GiB) for _ in range(300)]
        assert (
            found(tmp_path / str(seed), "device-memory-leak", step_values={"peak_bytes": lambda n, p=peaks: p[n - 1]})
            is None
        )


def test_growing_host_ram_is_a_leak(tmp_path):
    leak = found(tmp_path, "host-memory-leak", step_values={"host_bytes": lambda n: int((2 + 0.02 * n) * GiB)})
    assert leak.certainty == "likely"
    assert any(fix.flags.get("brimful") == "--workers 0" for fix in leak.fixes)


def test_host_ram_that_grows_in_the_first_pass_may_stop(tmp_path):
    leak = found(
        tmp_path, "host-memory-leak", step_values={"host_bytes": lambda n: int((2 + 0.02 * n) * GiB), "epoch": lambda n: n / 1000}
    )  # fmt: skip
    assert leak.certainty == "possible"
    assert "may stop once every row has been read" in leak.cause


def test_a_few_mib_more_are_no_leak(tmp_path):
    assert found(tmp_path, "host-memory-leak", step_values={"host_bytes": lambda n: 2 * GiB + n * MiB // 4}) is None


def test_memory_that_levels_off_is_no_leak(tmp_path):
    levels = {"host_bytes": lambda n: int((2 + 3 * (1 - 2.718 ** (-n / 60))) * GiB)}
    assert found(tmp_path, "host-memory-leak", step_values=levels) is None


SPIKE = {"peak_bytes": lambda n: int((17.5 if n == 212 else 9 + wobble(n)) * GiB), "reserved_bytes": None}


def test_one_peak_near_the_limit_is_a_long_row(tmp_path):
    row = found(tmp_path, "long-row", step_values={**SPIKE, "tokens": lambda n: 45_000 if n == 212 else 30_000})
    assert row.certainty == "likely"
    assert row.cause.startswith("Step 212 took 17.5 GiB, while almost all others take 9.01 GiB or less")


def test_a_peak_far_from_the_limit_is_not_worth_a_word(tmp_path):
    peaks = {"peak_bytes": lambda n: int((9 if n == 212 else 5) * GiB), "reserved_bytes": None}
    assert found(tmp_path, "long-row", step_values=peaks) is None


def test_the_long_row_is_found_in_the_token_store(tmp_path):
    run = write_run(tmp_path / "run", step_values=SPIKE, request={"prepared": {"data": "data/train"}})
    write_store(run / "data" / "train", tmp_path / "rows.jsonl", long_row=137)
    row = next(one for one in check_run(RunRecord(run)) if one.kind == "long-row")
    assert f"The only row as long is line 138 of {tmp_path / 'rows.jsonl'} (5+900 tokens)." in row.cause


def test_a_length_that_many_rows_have_names_none(tmp_path):
    run = write_run(tmp_path / "run", step_values=SPIKE, request={"prepared": {"data": "data/train"}})
    write_store(run / "data" / "train", tmp_path / "rows.jsonl", long_row=None)
    row = next(one for one in check_run(RunRecord(run)) if one.kind == "long-row")
    assert "as long" not in row.cause
    assert row.certainty == "possible"


def test_a_causal_row_has_one_length(tmp_path):
    run = write_run(tmp_path / "run", request={"prepared": {"data": "data/train"}})
    masks = [np.arange(400 if row == 41 else 20) > 9 for row in range(200)]
    spans = [spans_of(mask) for mask in masks]
    writer = StoreWriter(run / "data" / "train", fields=("tokens", "spans"), vocab_size=100)
    numbers = [part for mask, runs in zip(masks, spans, strict=True) for part in (np.ones(len(mask)), runs)]
    lengths = np.array([[len(mask), len(runs)] for mask, runs in zip(masks, spans, strict=True)], dtype=np.int32)
    writer.add(np.concatenate(numbers).astype(np.uint16), lengths)
    facts = {
        "max_tokens": {"tokens": 1024},
        "eos_id": 1,
        "pad_id": 0,
        "tokenizer_fingerprint": "x",
        "dropped": {},
        "truncated": {},
    }
    writer.finish(tokenizer=None, sources=("rows.jsonl",), rows_in=200, **facts)
    figures = RunFigures(RunRecord(run))
    assert row_place(figures, {}, (400,)) == "The only row as long is line 42 of rows.jsonl (400 tokens)."
    assert longest_lengths(figures) == (400,)
    assert share_longer(figures, (100,)) == 1 / 200
    assert share_longer(figures, (100, 100)) is None


def test_a_line_is_not_named_where_one_gave_several_rows(tmp_path):
    run = write_run(tmp_path / "run", request={"prepared": {"data": "data/train"}})
    write_store(run / "data" / "train", tmp_path / "rows.jsonl", long_row=137, rows_in=900)
    place = row_place(RunFigures(RunRecord(run)), {}, (5, 900))
    assert place == f"The only row as long is row 137 of {run / 'data' / 'train'} (5+900 tokens)."


def write_store(folder: Path, source: Path, long_row: int | None, rows_in: int = 1000) -> None:
    """1,000 rows of 5+20 tokens; one of 5+900, if any."""
    lengths = np.array([[5, 900 if row == long_row else 20] for row in range(1000)], dtype=np.int32)
    writer = StoreWriter(folder, fields=("prompt", "response"), vocab_size=100)
    writer.add(np.ones(int(lengths.sum()), dtype=np.uint16), lengths)
    writer.finish(
        tokenizer=None, max_tokens={"prompt": 1024, "response": 1024}, eos_id=1, pad_id=0, tokenizer_fingerprint="x",
        sources=(str(source),), rows_in=rows_in, dropped={"broken": 0, "empty": 0}, truncated={"prompt": 0, "response": 0},
    )  # fmt: skip
