"""The bench of the data commands runs end to end, and generated rows have the stated defects."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from generated import Shares, generate  # noqa: E402


def bench(*arguments):
    done = subprocess.run([sys.executable, BENCH / "data.py", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


def test_generated_rows_have_the_stated_defects(tmp_path):
    generate(tmp_path / "rows.parquet", 20_000, shares=Shares(empty=0.02, duplicate=0.1, near_duplicate=0.05))
    table = pq.read_table(tmp_path / "rows.parquet")
    rows = list(zip(*(table[field].to_pylist() for field in ("prompt", "response")), strict=True))
    assert sum(not response for _, response in rows) / 20_000 == pytest.approx(0.02, rel=0.3)
    assert 1 - len(set(rows)) / 20_000 == pytest.approx(0.1, rel=0.2)
    assert 120 < pc.mean(pc.utf8_length(table["response"])).as_py() < 200


def test_the_same_seed_gives_the_same_rows(tmp_path):
    for name in ("one", "other"):
        generate(tmp_path / name, 500, seed=3)
    assert pq.read_table(tmp_path / "one").equals(pq.read_table(tmp_path / "other"))


@pytest.mark.torture
def test_commands_report_time_memory_and_rows(folder):
    clean, tokenize = bench(
        "commands", "--rows", 3000, "--tokenizer-rows", 2000, "--folder", folder, "--host-limit", "600MiB"
    )
    assert clean["rows_in"] == 3000 == clean["rows_out"] + sum(clean["dropped"].values())
    assert (
        clean["dropped"]["duplicate"] > 30
        and clean["dropped"]["near_duplicate"] > 30
        and clean["dropped"]["empty"] > 10
    )
    assert 0 < tokenize["rows_in"] <= clean["rows_out"]
    assert 0 < tokenize["peak_mib"] < 600 and 0 < clean["peak_mib"] < 600


@pytest.mark.torture
def test_padding_falls_from_way_to_way(folder):
    source = folder / "rows-3000.parquet"
    generate(source, 3000)
    shutil.copytree(folder / "tokenizer", folder / "real-tokenizer")  # of the test before, to spare the time
    lines = bench("padding", "--real", source, "--folder", folder, "--steps", 4)
    share = {(line["way"], round(line.get("micro_batches", 0))): line.get("padding") for line in lines}
    assert share["Brimful, --mix window:10", 8] < share["Brimful", 8] < share["fixed batches of 32", 0]
    assert lines[-1]["same"] is True
