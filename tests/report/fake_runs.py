"""Run folders as `brimful train` leaves them, without training: for tests of what reads them."""

import json
import os
import socket
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import brimful
from brimful.training.events import FORMAT
from brimful.units import GiB

START = datetime(2026, 1, 31, 9, 0, tzinfo=UTC)
SAMPLE_EVERY_S = 5.0


def plan(**values: Any) -> dict[str, Any]:
    """A plan as in plan.json, of the chat model on a card of 20 GiB."""
    choices = [
        ("memory_limit", 20 * GiB, 20 * GiB, "asked", "as requested", "you"),
        ("global_batch", None, 256, "asked", "the task's value", "task"),
        ("layout", None, "padded", "measured", "the task has no pack()", "measured"),
        ("micro_batch", None, 43, "measured", "fastest: 672 rows/s (598 with 32 rows)", "measured"),
        ("accumulation", None, 6, "measured", "256 rows in micro-batches of at most 43", "measured"),
        ("checkpointing", None, "off", "predicted", "the whole step fits without it", "predicted"),
        ("precision", None, "bf16", "asked", "the task's value", "task"),
        ("workers", None, 2, "measured", "one worker reads a step in 8 ms", "measured"),
        ("optimizer", None, "adamw at 0.0001", "asked", "the task's", "task"),
        ("schedule", None, "cosine", "asked", "learning rate 1e-04 at most, 1e-05 in the last", "default"),
    ]
    names = ("name", "requested", "effective", "basis", "reason", "source")
    return {
        "task": "sft", "device": "cuda:0", "device_name": "NVIDIA GeForce RTX 3080", "limit_bytes": 20 * GiB, "fill": 0.85,
        "shape": [228, 256], "layout": "padded", "global_batch": 256, "micro_batch": 43, "largest_micro_batch": 48,
        "accumulation": 6, "processes": 1, "deal": [256],
        "memory_model": {},
        "predicted_peak_bytes": int(15.4 * GiB), "measured_peak_bytes": int(15.37 * GiB), "reserved_peak_bytes": int(16.2 * GiB),
        "rows_per_s": 672.0, "ooms": 0, "probes": 9, "plan_s": 4.7, "zone": "safe",
        "levers": {"checkpointing": "off", "compile": "off", "chunked_loss": "off", "precision": "bf16", "cudnn_attention": "on", "cuda_graphs": "off"},
        "host": {"workers": 2, "prefetch": 2, "pin_memory": True, "predicted_bytes": 3 * GiB, "limit_bytes": 16 * GiB},
        "choices": [dict(zip(names, choice, strict=True)) for choice in choices],
        "warnings": [], "tried": [], "not_tried": [], "data_rows": 3072, "created": "2026-01-31 09:00:00+00:00", "cached": False,
        "run_time": {"steps": 300, "steps_per_epoch": 12, "step_s": 0.381, "epoch_s": 4.6, "total_s": 114.0, "ends": "2026-01-31T09:02:00Z"},
        **values,
    }  # fmt: skip


def step_event(number: int, *, steps: int, ranks: int = 1, **values: Any) -> dict[str, Any]:
    """A `step` event: the loss falls, the rest is steady."""
    peak, reserved = int(15.2 * GiB), int(16.1 * GiB)
    return {
        "event": "step", "step": number, "steps": steps, "loss": 2.0 + 6.0 / (1 + number / 20), "rows": 256, "tokens": 30_000,
        "lr": 1e-4 * (1 - 0.9 * number / steps), "grad_norm": 1.2, "applied": True, "micro_batches": 6, "ooms": 0,
        "epoch": number / 12, "seconds": 0.37, "data_wait_s": 0.004, "peak_bytes": peak, "reserved_bytes": reserved,
        "limit_bytes": 20 * GiB, "rows_per_s": 672.0, "tokens_per_s": 78_000.0, "mfu": 0.31, "eta_s": (steps - number) * 0.381,
        "padding": 0.29, "times": {"compute_s": 0.36, "data_s": 0.004, "communication_s": 0.01 * (ranks > 1), "other_s": 0.007},
        "host_bytes": 2 * GiB, "machine_bytes": 6 * GiB,
        "ranks": [
            {"rank": rank, "peak_bytes": peak, "reserved_bytes": reserved, "limit_bytes": 20 * GiB, "micro_batches": 6,
             "padding": 0.29, "times": {"compute_s": 0.36, "data_s": 0.004, "communication_s": 0.01 * (ranks > 1), "other_s": 0.007}}
            for rank in range(ranks)
        ],
        **values,
    }  # fmt: skip


def sample_event(
    step: int, *, rank: int = 0, gpu: Mapping[str, Any] | None = None, host: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A `sample` event of a busy card; `gpu` and `host` replace some of its figures."""
    card = {
        "index": rank, "name": "NVIDIA GeForce RTX 3080", "utilization": 0.93, "temperature_c": 71, "power_w": 287.0,
        "used_bytes": int(17.3 * GiB), "total_bytes": 20 * GiB, "others_bytes": 0,
    }  # fmt: skip
    box = {
        "tree_bytes": 2 * GiB, "machine_bytes": 6 * GiB, "limit_bytes": 16 * GiB, "limited_by": "physical memory", "swap_used_bytes": 0,
        "swap_total_bytes": 0, "workers": 2, "cpu": 0.4, "read_bytes_per_s": 2e6,
    }  # fmt: skip
    return {"event": "sample", "step": step, "rank": rank, "gpu": {**card, **(gpu or {})}, "host": {**box, **(host or {})} if rank == 0 else None}  # fmt: skip


def _at(number: int, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values of one step."""
    return {name: value(number) if callable(value) else value for name, value in (values or {}).items()}


def memory_model(
    fixed: float = 2.6 * GiB, row: float = 0.3 * GiB / (228 + 256), reserved: float = 1.05
) -> dict[str, Any]:
    """As in a plan: a fixed part, and bytes for each row and token."""
    terms = [
        {"powers": [0, 0, 0], "bytes": fixed},
        {"powers": [1, 1, 0], "bytes": row},
        {"powers": [1, 0, 1], "bytes": row},
    ]
    return {"phases": {"first_forward": terms, "forward": terms}, "margin": 1.0, "reserved_ratio": reserved, "error": 0.004, "probes": []}  # fmt: skip


def tried(
    micro_batch: int, rows_per_s: float, peak_bytes: float, *, chosen: bool = False, **setting: str
) -> dict[str, Any]:
    """One line of a plan's `tried`."""
    how = {"layout": "padded", "precision": "bf16", "compile": "off", "checkpointing": "off", **setting}
    return {
        "setting": how, "shape": [228, 256], "micro_batch": micro_batch, "tokens": None, "accumulation": -(-256 // micro_batch),
        "peak_bytes": int(peak_bytes), "reserved_bytes": int(1.05 * peak_bytes), "basis": "measured", "fits": True, "rows_per_s": rows_per_s,
        "step_s": 256 / rows_per_s, "data_rows_per_s": None, "allowed": True, "chosen": chosen,
    }  # fmt: skip


def write_run(
    folder: Path,
    *,
    steps: int = 300,
    done: int | None = None,
    ranks: int = 1,
    ooms: Iterable[int] = (),
    evals: Iterable[int] = (),
    checkpoints: Iterable[int] = (),
    end: str | None = "finished",
    running: bool = False,
    plan_values: Mapping[str, Any] | None = None,
    step_values: Mapping[str, Any] | None = None,
    request: Mapping[str, Any] | None = None,
    gpu: Mapping[str, Any] | None = None,
    host: Mapping[str, Any] | None = None,
    more: Iterable[Mapping[str, Any]] = (),
    start: datetime = START,
) -> Path:
    """A run of `steps` steps, `done` of them trained. `step_values`, `gpu` and `host` may hold functions of the step's number.

    `more` are further events, written after the step that they name. `running`: this process seems to train in it.
    """
    done, ooms, evals, checkpoints = steps if done is None else done, set(ooms), set(evals), set(checkpoints)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans").mkdir(exist_ok=True)
    the_plan = plan(processes=ranks, **(plan_values or {}))
    for path in (folder / "plan.json", folder / "plans" / "0001.json"):
        path.write_text(json.dumps(the_plan), encoding="utf-8")
    request = {"task": "sft", "data": "rows.parquet", "run": str(folder), "options": {"seed": 0}, "task_options": {}, "origins": {}, **(request or {})}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(request), encoding="utf-8")
    (folder / "lock").write_text(
        json.dumps(
            {"pid": os.getpid() if running else 2**22 + 1, "host": socket.gethostname(), "since": "2026-01-31 09:00:00"}
        )
    )
    events: list[dict[str, Any]] = [
        {"event": "begin", "step": 0, "run": str(folder), "steps": steps, "processes": ranks, "resumed": False, "request": request,
         "format": FORMAT, "version": brimful.__version__, "host": "box", "pid": 4711, "cores": 8, "ram_limit_bytes": 16 * GiB,
         "gpus": [{"ranks": [rank], "index": rank, "uuid": f"uuid-{rank}", "name": the_plan["device_name"], "total_bytes": 20 * GiB} for rank in range(ranks)]},
        {"event": "plan", "step": 0, "number": 1, "experiment": "new", "experiment_reasons": [], "changes": [], **the_plan},
    ]  # fmt: skip
    extra = [dict(event) for event in more]
    seconds, sampled, times = 10.0, -SAMPLE_EVERY_S, [0.0, 5.0]
    for number in range(1, done + 1):
        event = {**step_event(number, steps=steps, ranks=ranks), **_at(number, step_values)}
        batch: list[dict[str, Any]] = []
        if number in ooms:
            sentence = "out of memory in the backward of 43 rows; micro-batches of at most 32 rows from here"
            batch.append(
                {"event": "oom", "step": number, "sentence": sentence, "process": 0, "rows": 43, "new_rows": 32}
            )
            event["ooms"] = 1
        batch.append(event)
        seconds += sum(event["times"].values())
        if seconds - sampled >= SAMPLE_EVERY_S:
            card, box = _at(number, gpu), _at(number, host)
            batch += [sample_event(number, rank=rank, gpu=card, host=box) for rank in range(ranks)]
            sampled = seconds
        if number in evals:
            batch.append(
                {
                    "event": "eval",
                    "step": number,
                    "loss": event["loss"] + 0.1,
                    "rows": 1000,
                    "seconds": 2.0,
                    "best": True,
                    "ooms": 0,
                }
            )
        if number in checkpoints:
            path = str(folder / "checkpoints" / f"step-{number:08d}")
            Path(path).mkdir(parents=True, exist_ok=True)
            batch.append(
                {
                    "event": "checkpoint",
                    "step": number,
                    "saved": True,
                    "path": path,
                    "size_bytes": 2 * GiB,
                    "seconds": 1.5,
                }
            )
        batch += [one for one in extra if one.get("step") == number]
        events += batch
        times += [seconds] * len(batch)
    if end is not None and not running:
        events.append(
            {
                "event": "end",
                "step": done,
                "reason": end,
                "sentence": f"trained {done} steps",
                "loss": events[-1].get("loss"),
                "checkpoint": None,
            }
        )
        times.append(seconds)
    with (folder / "events.jsonl").open("w", encoding="utf-8") as file:
        for event, at in zip(events, times, strict=True):
            stamp = (start + timedelta(seconds=at)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            file.write(json.dumps({"event": event.pop("event"), "time": stamp, **event}) + "\n")
    return folder
