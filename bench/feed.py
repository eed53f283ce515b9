"""What splitting over all lengths and reading ahead gain: rows/s and memory on real rows, in one run.

    python bench/feed.py --store STORE --memory-limit 20GiB           one CUDA GPU
    python bench/feed.py --store STORE --model chatlm-tiny --device cpu --memory-limit 512MiB --steps 4

The same model, optimizer, precision and rows of every step (256 from the same stream), fed in four ways: fixed batches
of 32 rows padded to their longest, as most loops do; the fewest micro-batches that fit; the split by measured overhead that
`plan` chooses; and that with `--mix window:50`. Each way starts from the same weights. Seconds are read after a
synchronize; the first steps, which grow the allocator, are left out of the median.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import brimful
from brimful.data.loader import Loader
from brimful.data.reader import StepRows
from brimful.planning.plan import Plan
from brimful.task import Task
from brimful.tasks.load import load_task
from brimful.units import GiB, parse_bytes

WARM_UP = 4
FIXED = 32


def in_order(shapes: list[Any]) -> list[list[int]]:
    """Rows as they come, 32 at a time."""
    return [list(range(start, min(start + FIXED, len(shapes)))) for start in range(0, len(shapes), FIXED)]


def train(
    task: Task, plan: Plan, steps: Iterator[StepRows], number: int, *, rehearse: bool, split: bool
) -> dict[str, Any]:
    """`number` steps from new weights, timed."""
    device = torch.device(plan.device)
    empty(device)
    torch.manual_seed(0)
    with torch.device(device):
        model = task.model()
    stepper = brimful.Stepper(
        model.to(device).train(), task.optimizer(model), task, plan if split else None, precision=plan.levers.precision
    )
    if rehearse:
        stepper.rehearse()
    seconds, waits, results, padding = [], [], [], []
    for _ in range(number + WARM_UP):
        started = time.perf_counter()
        rows = next(steps)
        waits.append(time.perf_counter() - started)
        padding.append(padded(rows))
        results.append(stepper.step(rows))
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    timed = seconds[WARM_UP:]
    return {
        "rows_per_s": round(plan.global_batch / statistics.median(timed), 1),
        "micro_batches": round(statistics.mean(result.micro_batches for result in results), 2),
        "padding": round(statistics.mean(padding), 4),
        "data_wait": round(sum(waits[WARM_UP:]) / sum(timed), 4),
        "ooms": stepper.ooms,
        "loss": round(results[-1].loss, 4),
        **memory(device),
    }


def padded(rows: StepRows) -> float:
    """The share of padding over source and target."""
    parts = [part["attention_mask"].sum() + (part["labels"] != -100).sum() for part in rows.parts]
    places = sum(len(group) * sum(shape) for group, shape in zip(rows.groups, rows.shapes, strict=True))
    return 1 - float(sum(parts)) / places


def empty(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    reserved, allocated = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
    return {"reserved_gib": round(reserved / GiB, 2), "allocated_gib": round(allocated / GiB, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--task", default="pretrain")
    parser.add_argument("--model", default="chatlm-base")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory-limit", default="20GiB")
    parser.add_argument("--steps", type=int, default=22)
    args = parser.parse_args()
    task = load_task(args.task, options={"model": args.model})
    plan = brimful.plan(
        task, data=str(args.store), memory_limit=args.memory_limit, device=args.device, cache=False, global_batch=256,
        progress=lambda phrase: print(phrase, file=sys.stderr),
    )  # fmt: skip
    choices = {choice.name: [choice.effective, choice.reason] for choice in plan.choices}
    print(json.dumps({"bench": "plan", "micro_batch": plan.micro_batch, "largest": plan.largest_micro_batch,
                      "overhead": plan.overhead, "rows_per_s": plan.rows_per_s, "plan_s": plan.plan_s, "choices": choices,
                      "host": plan.to_json()["host"]}), flush=True)  # fmt: skip
    if plan.device.startswith("cuda"):
        total = torch.cuda.get_device_properties(plan.device).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(args.memory_limit) / total)
    fewest = replace(plan, overhead=None)
    rows = task.rows(str(args.store))
    ways: dict[str, tuple[Any, dict[str, Any], bool, bool]] = {
        f"fixed batches of {FIXED}": (fewest, {}, False, False),
        "fewest micro-batches": (fewest, {}, False, True),
        "fewest, rehearsed": (fewest, {}, True, True),
        "by measured overhead, rehearsed": (plan, {}, True, True),
        "--mix window:50, rehearsed": (plan, {"mix": "window:50"}, True, True),
    }
    for name, (how, options, rehearse, split) in ways.items():
        loader_plan: Any = (
            how if split else SimpleNamespace(split=in_order, global_batch=how.global_batch, host=how.host)
        )
        loader = Loader(rows, task, loader_plan, **options)
        figures = train(task, how, iter(loader), args.steps, rehearse=rehearse, split=split)
        print(json.dumps({"bench": "feed", "way": name, **figures}), flush=True)
        loader.close()


if __name__ == "__main__":
    main()
