"""Finding a batch size with several tools: how fast, with how many out-of-memory errors, and does the result run?

    python bench/finders.py                                          one CUDA GPU, limited to 20 GiB
    python bench/finders.py --device cpu --global-batch 256          the CPU under a simulated limit of 512 MiB

`accelerate.find_executable_batch_size`, Lightning's `Tuner.scale_batch_size` in both modes, a straight line through
small batches as Ultralytics draws it, and `brimful.plan`: one process, one task, its worst shape, one limit, one
precision, one optimizer, the same largest batch (`--global-batch`). On an H200 limited to 20 GiB, accelerate ran out of
memory 25 times in 91 s, where a few probes and a check took 6 s without a failure. This script measures that difference.

**The clock** starts from a built model, after all imports and one common warm-up step. accelerate's documentation builds
model and optimizer inside the decorated function, so it builds them again for every size it tries, on the host and then
moved, as scripts do. That is part of its seconds and also shown apart. `--repeats N` runs all finders N times in turn and
keeps the run of median seconds.

**The limit** on CUDA is torch's cap on the process, for everyone. On the CPU each attempt to train runs under
`brimful.simulated_memory`, which raises the errors that the peers know and slows steps by 4–90 %; Brimful probes under it
too, but times without it. So on the CPU trust rows, OOMs and peaks, and compare seconds only roughly.

**OOMs** are those met during the search. Afterwards every result is run in one and the same way: a new model, two full
steps (autocast, forward, backward, optimizer, gradients dropped) whose peak is read, then the median of five more (CPU:
three, without a limit) for rows/s. A result that runs out of memory there is shown as such. Equal results share one
measurement: read twice, the same 34 rows gave 60 and 71 rows/s on a shared CPU.

**ultralytics-style.** Same as theirs: forward and backward without an optimizer step, a first-degree `numpy.polyfit` of
memory over 1, 2, 4, 8 and 16 rows, solved for a share of the limit, back to the last size that ran where one failed, no
check. Different: peaks of allocated bytes instead of reserved ones; Brimful's share of 0.85 instead of 0.6; clamped to
1 … `--global-batch` instead of replaced by 16 outside 1 … 1024; five sizes on any GPU (they add 32 and 64 from 16 GiB
on); linear (some of their releases fit logarithms).

**Brimful** predicts a step of several micro-batches, in which gradients are held while the next forward runs. Its
prediction compares with what its own probe measured (printed below the table), not with the plain step of the table. It
has two rows: `brimful` is the fastest size that fits, `brimful-largest` the largest; both come from the same plan.
"""

import argparse
import functools
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import brimful
from brimful.errors import BadOption, UserError
from brimful.memory.layout import PADDED
from brimful.memory.oom import OutOfMemory, attempt
from brimful.planning.levers import EVERY, checkpointing
from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import autocast_dtype, find_target
from brimful.task import Shape
from brimful.tasks.load import BUILT_IN, load_task
from brimful.tasks.presets import PRESETS
from brimful.units import show_bytes, show_rate
from contest import Contest, Result, full_step
from peers import find_like_ultralytics, find_with_accelerate, find_with_lightning

TIMED_STEPS = {"cpu": 3, "cuda": 5}
"""Full steps whose median is the speed at a result."""
DEFAULTS = {"cpu": ("chatlm-tiny", "512MiB"), "cuda": ("chatlm-base", "20GiB")}
"""Default model of the built-in tasks, and default limit."""


def find_with_brimful(contest: Contest) -> list[Result]:
    """Small probes, a model of each phase, a search, a verifying step."""
    context = contest.build()
    make_plan = functools.partial(
        brimful.plan, contest.task, model=context.model, optimizer=context.optimizer, cache=False,
        memory_limit=contest.target.limit_bytes, global_batch=contest.most, lengths=contest.shape,
    )  # fmt: skip
    plan, seconds = contest.clock(make_plan)
    details = {key: value for key, value in plan.to_json().items() if key not in ("memory_model", "choices", "host")}
    on = EVERY[plan.levers.checkpointing]
    result = functools.partial(Result, ooms=plan.ooms, seconds=seconds, ran=True, checkpointed=on, details=details)
    predicted, measured = plan.largest_predicted_peak_bytes, plan.largest_measured_peak_bytes
    return [
        result(
            finder="brimful",
            rows=plan.micro_batch,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            note=f"{_show_error(plan.predicted_peak_bytes, plan.measured_peak_bytes)}; checkpointing "
            f"{plan.levers.checkpointing}; {plan.plan_s:.1f} s in {plan.probes} probes and the timings",
        ),
        result(
            finder="brimful-largest",
            rows=plan.largest_micro_batch,
            predicted_peak_bytes=predicted,
            note=_show_error(predicted, measured),
        ),
    ]


def _show_error(predicted: int, measured: int) -> str:
    error = predicted / measured - 1
    return f"predicted {show_bytes(predicted)}, measured {show_bytes(measured)} by its own probe ({error:+.2%})"


FINDERS: dict[str, Callable[[Contest], list[Result]]] = {
    "accelerate": find_with_accelerate,
    "lightning-power": functools.partial(find_with_lightning, mode="power"),
    "lightning-binsearch": functools.partial(find_with_lightning, mode="binsearch"),
    "ultralytics-style": find_like_ultralytics,
    "brimful": find_with_brimful,
}


def compete(contest: Contest, finders: Iterable[str], repeats: int) -> list[Result]:
    """Run every finder in turn, `repeats` times, then measure every result."""
    runs: dict[str, list[list[Result]]] = {name: [] for name in finders}
    _warm_up(contest)
    for repeat in range(repeats):
        for name in runs:
            _progress(f"{name}, run {repeat + 1} of {repeats} …")
            runs[name].append(_try(contest, name))
            first = runs[name][-1][0]
            _progress(f"  {first.problem or f'{first.rows} rows, {first.ooms} OOMs, {first.seconds:.1f} s'}")
    results = measure_all(contest, [result for name in runs for result in _median(runs[name])])
    return _with_ratios(results)


def _warm_up(contest: Contest) -> None:
    """One step of one row, so that no finder pays for the first use of a library. A failure is left to the finders."""
    try:
        full_step(contest.build(), contest.batch(1))
    except Exception as error:
        _progress(f"warm-up: {_show_exception(error)}")
    contest.free()


def _try(contest: Contest, name: str) -> list[Result]:
    """What the finder returns, or how it failed. Its memory is free again either way."""
    try:
        results = FINDERS[name](contest)
    except Exception as error:
        results = [Result(finder=name, problem=_show_exception(error))]
    contest.free()  # after the except block: inside it the traceback still holds the tensors
    return results


def _show_exception(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _median(runs: list[list[Result]]) -> list[Result]:
    """The run of median seconds among those that worked, with the number of those that did not."""
    worked = sorted((run for run in runs if not run[0].problem), key=lambda run: run[0].seconds)
    failed = [run[0].problem for run in runs if run[0].problem]
    if not worked:
        return runs[-1]
    problem = f"{len(failed)} of {len(runs)} runs failed: {failed[-1]}" if failed else ""
    seconds, rows = tuple(run[0].seconds for run in worked), tuple(run[0].rows for run in worked)
    median = worked[(len(worked) - 1) // 2]
    return [replace(result, problem=problem, all_seconds=seconds, all_rows=rows) for result in median]


def measure_all(contest: Contest, results: list[Result]) -> list[Result]:
    """Full steps of a new model at each result. Finders that agree share one measurement, and with it its noise."""
    known: dict[tuple[int, bool], dict[str, Any]] = {}
    measured = []
    for result in results:
        size = (result.rows, result.checkpointed)
        if result.rows is not None and size not in known:
            _progress(f"measuring {PADDED.show(result.rows, contest.shape)} …")
            known[size] = _try_to_measure(contest, *size)
        figures = dict(known.get(size, {}))
        problem = "; ".join(filter(None, (result.problem, figures.pop("problem", ""))))
        measured.append(replace(result, problem=problem, **figures))
    return measured


def _try_to_measure(contest: Contest, rows: int, checkpointed: int) -> dict[str, Any]:
    try:
        result = attempt(lambda: _measure(contest, rows, checkpointed), contest.device)
    except Exception as error:
        result = {"problem": f"its result fails: {_show_exception(error)}"}
    contest.free()
    if isinstance(result, OutOfMemory):
        return {"problem": f"its result runs out of memory: {result.message.splitlines()[0][:200]}"}
    return result


def _measure(contest: Contest, rows: int, checkpointed: int) -> dict[str, Any]:
    context, batch = contest.build(), contest.batch(rows)
    with checkpointing(contest.task, context.model).set(checkpointed):
        with contest.meter(context) as metered:
            metered.phase("steps")
            for _ in range(2):
                full_step(context, batch)
        times = [contest.clock(lambda: full_step(context, batch))[1] for _ in range(TIMED_STEPS[contest.device.type])]
    reading = metered.reading()
    speed = rows / statistics.median(times)
    return {"peak_bytes": reading.peak_bytes, "reserved_bytes": reading.reserved_bytes, "rows_per_s": speed}


def _with_ratios(results: list[Result]) -> list[Result]:
    base = next((result for result in results if result.finder == "brimful"), Result(finder="brimful"))
    return [
        replace(
            result,
            seconds_ratio=_ratio(result.seconds, base.seconds),
            rows_per_s_ratio=_ratio(result.rows_per_s, base.rows_per_s),
        )
        for result in results
    ]


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base


HEAD = ("finder", "rows", "OOMs", "seconds", "predicted", "measured", "reserved", "rows/s", "× seconds", "× rows/s")


def show_table(results: list[Result]) -> str:
    """The table, with Brimful's own line as the unit of the ratios, and notes below it."""
    table = [HEAD, *map(_cells, results)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    pads = (str.ljust, *[str.rjust] * (len(HEAD) - 1))
    lines = ["  ".join(pad(*cell) for pad, *cell in zip(pads, row, widths, strict=True)) for row in table]
    remarks = [f"{result.finder}: {text}" for result in results for text in (result.problem, result.note) if text]
    return "\n".join([*lines, "", *remarks])


def _cells(result: Result) -> tuple[str, ...]:
    failed = "OOM" if "out of memory" in result.problem else "failed"
    return (
        result.finder,
        "failed" if result.rows is None else str(result.rows),
        _show(result.ooms, str),
        _show(result.seconds, "{:.1f}".format),
        _show(result.predicted_peak_bytes, show_bytes),
        failed if result.peak_bytes is None and result.rows else _show(result.peak_bytes, show_bytes),
        _show(result.reserved_bytes, show_bytes),
        _show(result.rows_per_s, show_rate),
        _show(result.seconds_ratio, "{:.2f}".format),
        _show(result.rows_per_s_ratio, "{:.2f}".format),
    )


def _show(value: Any, show: Callable[[Any], str]) -> str:
    return "–" if value is None else show(value)


def facts(contest: Contest, repeats: int) -> dict[str, Any]:
    """When and where this ran, in bytes and seconds."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(contest.device),
        "device_name": contest.target.name,
        "threads": torch.get_num_threads(),
        "versions": _versions(),
        "task": contest.task.name,
        "model": getattr(contest.task.options, "model", None),
        "shape": list(contest.shape),
        "precision": {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[contest.autocast],
        "limit_bytes": contest.target.limit_bytes,
        "fill": contest.target.fill,
        "global_batch": contest.most,
        "start": contest.start,
        "repeats": repeats,
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "brimful": brimful.__version__, "torch": torch.__version__}
    for package in ("accelerate", "lightning", "pytorch-lightning", "transformers", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def prepare(args: argparse.Namespace) -> Contest:
    """The contest that the flags describe. Refuses what cannot work before anything runs."""
    device = find_target(PlanOptions(device=args.device)).device
    if device.type not in DEFAULTS:
        raise BadOption(f"device={args.device} is {device.type}. Try: cpu or cuda.")
    model, limit = DEFAULTS[device.type]
    options = {"model": args.model or (model if args.task in BUILT_IN else None)}
    if args.task == "sft" and options["model"] in PRESETS:
        options["freeze"] = "encoder+embeddings"  # as with saved weights; `sft` freezes nothing of new ones
    task = load_task(args.task, options=options)
    shape = task.worst_shape if args.lengths is None else args.lengths
    if len(shape) != len(task.worst_shape):
        raise BadOption(f"lengths={shape} must have {len(task.worst_shape)} numbers for task {task.name}.")
    options = PlanOptions(device=str(device), memory_limit=args.memory_limit or limit, lengths=shape)
    target = find_target(options)
    autocast = autocast_dtype(task.precision, target.device)
    start = min(args.start, args.global_batch)
    if start < args.start:
        _progress(
            f"--start {args.start}: accelerate starts with {start}, because --global-batch is the upper bound for all"
        )
    return Contest(task=task, shape=shape, target=target, autocast=autocast, most=args.global_batch, start=start)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        contest = prepare(args)
    except UserError as error:
        print(f"finders: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)  # now, and not after minutes of work
    with contest.target.enforce(simulate=False):  # each finder simulates the CPU's limit around its own attempts
        results = compete(contest, args.finders, args.repeats)
    about = facts(contest, args.repeats)
    print(_title(contest, about), show_table(results), sep="\n\n")
    if args.json:
        everything = {**about, "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 0


def _title(contest: Contest, about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return "\n".join((
        f"{about['date']}, {about['device_name']} ({about['device']}, {about['threads']} CPU threads), limit "
        f"{show_bytes(about['limit_bytes'])}, {about['fill']:.0%} of it to fill",
        f"{' '.join(filter(None, (about['task'], about['model'])))}, {PADDED.show(1, contest.shape)}, "
        f"{about['precision']}, at most {contest.most} rows, accelerate from {contest.start}, runs: {about['repeats']}",
        versions,
    ))  # fmt: skip


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", default="sft", help="a built-in name or file.py:name (sft)")
    parser.add_argument("--model", help="of a built-in task (chatlm-base on cuda, chatlm-tiny on the CPU)")
    parser.add_argument("--memory-limit", help="for all (20GiB on cuda, 512MiB on the CPU)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:1 (the first GPU, else the CPU)")
    parser.add_argument("--lengths", type=_lengths, help="such as 256,256 (the task's worst shape)")
    parser.add_argument("--global-batch", type=_count, default=4096, help="no finder may go above it (4096)")
    parser.add_argument("--start", type=_count, default=512, help="the rows that accelerate starts with (512)")
    parser.add_argument("--finders", type=_finders, default=list(FINDERS), help=f"some of {','.join(FINDERS)} (all)")
    parser.add_argument("--repeats", type=_count, default=1, help="runs of each finder; the median is shown (1)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers there")
    return parser.parse_args(argv)


def _lengths(text: str) -> Shape:
    return tuple(_count(part) for part in text.split(","))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _finders(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in FINDERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}. Try: {', '.join(FINDERS)}")
    return names


def _progress(phrase: str) -> None:
    print(phrase, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
