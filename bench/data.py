"""The data commands on generated rows: speed, memory, and the padding that is left.

    python bench/data.py commands --rows 100000,1000000,10000000      clean and tokenize generated rows
    python bench/data.py tokenize --rows 200000                       against datasets.map, in turn
    python bench/data.py loader --stores DIR,DIR                      rows/s of one process, memory of three
    python bench/data.py padding --real FILE                          fixed batches, HF group-by-length, ours

Prints one JSON object per line on stdout, progress on stderr. Files stay in `--folder` (10 million rows need about 20 GB)
and are made once.

**Memory** is `Pss_Anon + Pss_Shmem` over the process tree of a command, sampled ten times a second from outside, less the
same of a process that has made the same imports and sleeps. **Seconds** are those of the whole command, its start included.

**datasets.map** uses the same tokenizer as a `PreTrainedTokenizerFast`, batched, with truncation, in one process and in one
per core, with a fresh cache folder each time. Both read the same parquet file and write their result; the runs take turns,
and medians are compared.
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
    "tokenize": "import brimful.cli, brimful.data.tokenize, brimful.report.data_tables, pyarrow.parquet, tokenizers",
}
SAMPLE_S = 0.1


def commands(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Clean, then tokenize the result, for each number of rows."""
    tokenizer = trained_tokenizer(args.folder, args.tokenizer_rows)
    for rows in args.rows:
        source, cleaned, store = (args.folder / f"{kind}-{rows}" for kind in ("rows", "cleaned", "store"))
        source = source.with_suffix(".parquet")
        generate(source, rows)
        yield run("clean", [source, "--output", cleaned], cleaned, args.host_limit)
        train = cleaned / "train.parquet"
        yield run("tokenize", [train, "--tokenizer", tokenizer, "--output", store], store, args.host_limit)


def run(command: str, arguments: list[Any], output: Path, host_limit: str) -> dict[str, Any]:
    """One command, with time and memory measured from outside."""
    shutil.rmtree(output, ignore_errors=True)
    progress(f"{command} {arguments[0]}")
    line = [
        sys.executable,
        "-m",
        "brimful",
        "data",
        command,
        *map(str, arguments),
        "--host-limit",
        host_limit,
        "--json",
    ]
    started = time.perf_counter()
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        peak = peak_bytes(process)
        printed = process.communicate()[0]
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{' '.join(line)} failed")
    report = json.loads(printed)
    result = {
        "bench": command,
        "rows_in": report["rows_in"],
        "rows_out": report["rows_out"],
        "dropped": report["dropped"],
        "seconds": round(seconds, 1),
        "rows_per_s": round(report["rows_in"] / seconds),
        "peak_mib": round((peak - imports_bytes(IMPORTS[command])) / MiB),
    }
    progress(f"{result['rows_per_s']:,} rows/s, {result['peak_mib']:,} MiB, {show_seconds(seconds)}")
    return result


def peak_bytes(process: "subprocess.Popen[str]") -> int:
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_bytes(process.pid))
        time.sleep(SAMPLE_S)
    return peak


def imports_bytes(imports: str) -> int:
    """The memory of a process that has made these imports and does nothing."""
    code = f"{imports}\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = tree_bytes(process.pid)
        process.communicate(b"\n")
    return used


def trained_tokenizer(folder: Path, rows: int) -> Path:
    """A tokenizer of the model's size, trained on generated rows."""
    output, source = folder / "tokenizer", folder / f"rows-{rows}.parquet"
    if not output.exists():
        generate(source, rows)
        progress("training a tokenizer")
        subprocess.run([sys.executable, "-m", "brimful", "data", "tokenizer", source, "--output", output, "--json"], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    return output


def tokenize(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """`data tokenize` against datasets.map over the same rows, in turn."""
    tokenizer = trained_tokenizer(args.folder, args.tokenizer_rows)
    source = args.folder / f"rows-{args.rows[0]}.parquet"
    generate(source, args.rows[0])
    methods: dict[str, Callable[[], float]] = {
        "brimful data tokenize": lambda: brimful_s(source, tokenizer, args.folder / "turn"),
        "datasets.map, 1 process": lambda: datasets_s(source, tokenizer, 1),
        f"datasets.map, {os.cpu_count()} processes": lambda: datasets_s(source, tokenizer, os.cpu_count() or 1),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(args.repeats):
        for name, method in methods.items():
            times[name].append(method())
            progress(f"turn {turn + 1}: {name} {args.rows[0] / times[name][-1]:,.0f} rows/s")
    for name, seconds in times.items():
        yield {
            "bench": "tokenize",
            "method": name,
            "rows_per_s": round(args.rows[0] / statistics.median(seconds)),
            "seconds": [round(one, 1) for one in seconds],
        }


def brimful_s(source: Path, tokenizer: Path, output: Path) -> float:
    shutil.rmtree(output, ignore_errors=True)
    line = ["-m", "brimful", "data", "tokenize", source, "--tokenizer", tokenizer, "--output", output, "--json"]
    return timed_s(line)


def datasets_s(source: Path, tokenizer: Path, processes: int) -> float:
    with tempfile.TemporaryDirectory() as cache:
        return timed_s(["-c", MAP_SCRIPT, source, tokenizer, cache, processes])


def timed_s(line: list[Any]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *map(str, line)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


MAP_SCRIPT = """
import sys
source, folder, cache, processes = sys.argv[1:]
from datasets import load_dataset
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(folder)
rows = load_dataset("parquet", data_files=source, split="train", cache_dir=cache)

def encode(batch):
    fields = (tokenizer(batch[field], truncation=True, max_length=255, add_special_tokens=False) for field in ("prompt", "response"))
    prompts, responses = (field["input_ids"] for field in fields)
    return {"input_ids": [ids + [1] for ids in prompts], "labels": [ids + [1] for ids in responses]}

rows.map(encode, batched=True, batch_size=1000, num_proc=int(processes), remove_columns=rows.column_names)
"""


def loader(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows per second of one process, and the memory of three with workers, for each store."""
    for store in args.stores:
        progress(f"loading from {store}")
        for workers in (0, 1):
            yield {"bench": "loader", "store": str(store), "workers": workers, **read(store, workers)}
        yield {"bench": "three processes", "store": str(store), **three_processes(store, args.workers)}


def read(store: Path, workers: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", READ_SCRIPT, store, str(workers), "0", "1"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def three_processes(store: Path, workers: int) -> dict[str, Any]:
    """Each reads its third of every step with workers; memory is measured while all of them read."""
    line = [sys.executable, "-c", READ_SCRIPT, str(store), str(workers)]
    processes = [subprocess.Popen([*line, str(rank), "3"], stdout=subprocess.PIPE, text=True) for rank in range(3)]
    peak = 0
    while any(process.poll() is None for process in processes):
        peak = max(peak, sum(tree_bytes(process.pid) for process in processes))
        time.sleep(SAMPLE_S)
    printed = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    base = 3 * imports_bytes("import torch, brimful.data.loader, brimful.tasks.language, brimful.data.store")
    return {
        "workers": workers,
        "together_mib": round((peak - base) / MiB),
        "rows_per_s": [one["rows_per_s"] for one in printed],
    }


READ_SCRIPT = """
import json, sys, time
from types import SimpleNamespace
import torch
from brimful.data.loader import Loader
from brimful.data.store import Store
from brimful.memory.split import split_by_memory
from brimful.tasks.language import Pretrain

torch.set_num_threads(1)
store, workers, rank, processes = sys.argv[1], *map(int, sys.argv[2:])
task = Pretrain()
split = lambda shapes: split_by_memory(shapes, lambda rows, shape, whole=False: rows * sum(shape), 1e9, overhead=1500)
plan = SimpleNamespace(split=split, host=None, global_batch=256)
loader = Loader(Store.open(store, verify=False), task, plan, workers=workers, rank=rank, speeds=[1.0] * processes)
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
    """The share of padding over source and target, at 256 rows per step."""
    from padding import shares

    yield from shares(args.real, args.folder, args.steps)


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=["commands", "tokenize", "loader", "padding"])
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
    args = parse_arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    for line in globals()[args.bench](args):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
