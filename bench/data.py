"""Rows through the data commands: how fast, in how much memory, and what padding is left.

    python bench/data.py commands --rows 100000,1000000,10000000      clean and pack generated rows
    python bench/data.py tokenise --rows 200000                       pack against datasets.map, in turn
    python bench/data.py loader --stores DIR,DIR                      rows/s of a process, memory of three
    python bench/data.py padding --real FILE                          fixed, HF group-by-length and ours on real rows

Each prints one JSON object a line on stdout and its progress on stderr. Files stay in `--folder` (10 million rows need
about 20 GB) and are made once.

**Memory** is `Pss_Anon + Pss_Shmem` over a command's process tree, sampled ten times a second from outside, less the same
of a process that has made the same imports and sleeps. **Seconds** are those of the whole command, its start included.

**datasets.map** tokenises with the same tokenizer as a `PreTrainedTokenizerFast`, batched, with truncation, in as many
processes as there are cores and in one, with a fresh cache folder each time. Both read the same parquet file and write
their result; the runs take turns, and medians are compared.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from brimful.machine.host import tree_bytes
from brimful.units import MiB, show_seconds
from generated import generate

IMPORTS = {
    "clean": "import brimful.cli, brimful.data.clean.clean, brimful.report.data_tables, duckdb, pyarrow.parquet",
    "pack": "import brimful.cli, brimful.data.tokenize, brimful.report.data_tables, pyarrow.parquet, tokenizers",
}
SAMPLE_S = 0.1


def commands(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Clean, then pack what came out, for each number of rows."""
    tokenizer = made_tokenizer(args.folder, args.tokenizer_rows)
    for rows in args.rows:
        source, cleaned, store = (args.folder / f"{kind}-{rows}" for kind in ("rows", "cleaned", "store"))
        source = source.with_suffix(".parquet")
        generate(source, rows)
        yield run("clean", [source, "--output", cleaned], cleaned, args.host_limit)
        train = cleaned / "train.parquet"
        yield run("pack", [train, "--tokenizer", tokenizer, "--output", store], store, args.host_limit)


def run(command: str, words: list[Any], output: Path, host_limit: str) -> dict[str, Any]:
    """One command on its own, timed and weighed from outside."""
    shutil.rmtree(output, ignore_errors=True)
    tell(f"{command} {words[0]}")
    line = [sys.executable, "-m", "brimful", "data", command, *map(str, words), "--host-limit", host_limit, "--json"]
    started = time.perf_counter()
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        peak = watch(process)
        printed = process.communicate()[0]
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{' '.join(line)} failed")
    report = json.loads(printed)
    found = {
        "bench": command,
        "rows_in": report["rows_in"],
        "rows_out": report["rows_out"],
        "dropped": report["dropped"],
        "seconds": round(seconds, 1),
        "rows_per_s": round(report["rows_in"] / seconds),
        "peak_mib": round((peak - imports_bytes(IMPORTS[command])) / MiB),
    }
    tell(f"{found['rows_per_s']:,} rows/s, {found['peak_mib']:,} MiB, {show_seconds(seconds)}")
    return found


def watch(process: "subprocess.Popen[str]") -> int:
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_bytes(process.pid))
        time.sleep(SAMPLE_S)
    return peak


def imports_bytes(imports: str) -> int:
    """What a process takes that has made these imports and does nothing."""
    code = f"{imports}\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        taken = tree_bytes(process.pid)
        process.communicate(b"\n")
    return taken


def made_tokenizer(folder: Path, rows: int) -> Path:
    """A tokenizer of the model's size, trained on generated rows."""
    output, source = folder / "tokenizer", folder / f"rows-{rows}.parquet"
    if not output.exists():
        generate(source, rows)
        tell("training a tokenizer")
        subprocess.run([sys.executable, "-m", "brimful", "data", "tokenizer", source, "--output", output, "--json"], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    return output


def tokenise(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """pack against datasets.map over the same rows, in turn."""
    tokenizer = made_tokenizer(args.folder, args.tokenizer_rows)
    source = args.folder / f"rows-{args.rows[0]}.parquet"
    generate(source, args.rows[0])
    ways: dict[str, Callable[[], float]] = {
        "brimful data pack": lambda: packed_s(source, tokenizer, args.folder / "turn"),
        "datasets.map, 1 process": lambda: mapped_s(source, tokenizer, 1),
        f"datasets.map, {os.cpu_count()} processes": lambda: mapped_s(source, tokenizer, os.cpu_count() or 1),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.repeats):
        for name, way in ways.items():
            times[name].append(way())
            tell(f"turn {turn + 1}: {name} {args.rows[0] / times[name][-1]:,.0f} rows/s")
    for name, seconds in times.items():
        yield {
            "bench": "tokenise",
            "way": name,
            "rows_per_s": round(args.rows[0] / statistics.median(seconds)),
            "seconds": [round(one, 1) for one in seconds],
        }


def packed_s(source: Path, tokenizer: Path, output: Path) -> float:
    shutil.rmtree(output, ignore_errors=True)
    line = ["-m", "brimful", "data", "pack", source, "--tokenizer", tokenizer, "--output", output, "--json"]
    return timed_s(line)


def mapped_s(source: Path, tokenizer: Path, processes: int) -> float:
    with tempfile.TemporaryDirectory() as cache:
        return timed_s(["-c", MAP, source, tokenizer, cache, processes])


def timed_s(line: list[Any]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *map(str, line)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


MAP = """
import sys
source, folder, cache, processes = sys.argv[1:]
from datasets import load_dataset
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(folder)
rows = load_dataset("parquet", data_files=source, split="train", cache_dir=cache)

def encode(batch):
    sides = (tokenizer(batch[side], truncation=True, max_length=255, add_special_tokens=False) for side in ("prompt", "response"))
    prompts, responses = (side["input_ids"] for side in sides)
    return {"input_ids": [ids + [1] for ids in prompts], "labels": [ids + [1] for ids in responses]}

rows.map(encode, batched=True, batch_size=1000, num_proc=int(processes), remove_columns=rows.column_names)
"""


def loader(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What one process reads in a second, and what three with workers take, for each store."""
    for store in args.stores:
        tell(f"loading from {store}")
        for workers in (0, 1):
            yield {"bench": "loader", "store": str(store), "workers": workers, **read(store, workers)}
        yield {"bench": "three processes", "store": str(store), **three_processes(store, args.workers)}


def read(store: Path, workers: int) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", READ, store, str(workers), "0", "1"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def three_processes(store: Path, workers: int) -> dict[str, Any]:
    """Each reads its third of every step with workers; weighed while all of them read."""
    line = [sys.executable, "-c", READ, str(store), str(workers)]
    processes = [subprocess.Popen([*line, str(rank), "3"], stdout=subprocess.PIPE, text=True) for rank in range(3)]
    peak = 0
    while any(process.poll() is None for process in processes):
        peak = max(peak, sum(tree_bytes(process.pid) for process in processes))
        time.sleep(SAMPLE_S)
    printed = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    base = 3 * imports_bytes("import torch, brimful.data.loader, brimful.tasks.chatlm, brimful.data.store")
    return {
        "workers": workers,
        "together_mib": round((peak - base) / MiB),
        "rows_per_s": [one["rows_per_s"] for one in printed],
    }


READ = """
import json, sys, time
import torch
from brimful.data.loader import Loader
from brimful.data.store import Store
from brimful.memory.split import split_by_memory
from brimful.tasks.chatlm import Pretrain

torch.set_num_threads(1)
store, workers, rank, processes = sys.argv[1], *map(int, sys.argv[2:])
task = Pretrain()
loader = Loader(Store.open(store, verify=False), task, global_batch=256, workers=workers, rank=rank, speeds=[1.0] * processes)
loader._reader._cut = lambda shapes: split_by_memory(shapes, lambda rows, shape, whole=False: rows * sum(shape), 1e9, overhead=1500)
steps, rows = iter(loader), 0
for _ in range(1000):  # pages of the store are mapped 16 at a time as they are touched
    next(steps)
started = time.perf_counter()
while time.perf_counter() - started < 8:
    for _ in range(20):
        rows += len(next(steps))
print(json.dumps({"rows_per_s": round(rows / (time.perf_counter() - started))}))
loader.close()
"""


def padding(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The share of padding over source and target, at 256 rows a step."""
    from padding import shares

    yield from shares(args.real, args.folder, args.steps)


def tell(phrase: str) -> None:
    print(phrase, file=sys.stderr, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["commands", "tokenise", "loader", "padding"])
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[100_000])
    parser.add_argument("--tokenizer-rows", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=Path("bench-data"))
    parser.add_argument("--stores", type=lambda text: [Path(part) for part in text.split(",")], default=[])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--host-limit", default="1GiB")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--real", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    args.folder.mkdir(parents=True, exist_ok=True)
    for line in globals()[args.what](args):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
