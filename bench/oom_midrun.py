"""Memory is taken away in the middle of training: which trainer carries on, and is it still the same training?

    python bench/oom_midrun.py                                    one CUDA GPU capped to 20 GiB, 12 GiB of it taken
    python bench/oom_midrun.py --device cpu                       the CPU under a simulated limit that drops
    python bench/oom_midrun.py --recover --give-back-after 30     the cost of an out-of-memory error, and the recovery
    python bench/oom_midrun.py --recover --layout packed          the same with packed rows, on a GPU in compiled blocks
    python bench/oom_midrun.py --overhead                         the cost of the stepper without an error

Hugging Face's Trainer with `auto_find_batch_size`, accelerate's `find_executable_batch_size` around the loop, Lightning,
and Brimful's `Stepper` (see `midrun_peers.py`) train the same rows twice, from the same weights: once undisturbed, once
with memory taken at `--take-at` and returned after `--give-back-after`. Every contestant is compared with *its own*
undisturbed run, so other differences do not count.

**steps** are optimizer steps in the final weights, of those requested; steps of discarded models are listed apart.
**global batch** is every size that an optimizer step had. **rows lost** never reached the final weights, **repeated** went
in more than once. **distance** is the relative L2 distance of all trained weights from the undisturbed run; it exceeds
rounding even at the same global batch if a loop takes the mean of the means of its micro-batches, which depends on the
split. A run that ends in an exception is a result: its weights are those it died with. The last line is for reference: the
same rows, undisturbed, in micro-batches of half the size. Adam turns the sign of a gradient that is all rounding into a full
step, so in float32 two splits of the same training drift apart by themselves.

**Seconds** start after one warm-up step of each. On the CPU they are processor time, since such machines are shared, and
include the ledger that simulates the limit (4–90 % of a step), so compare them roughly. `--overhead` runs without limit
and ledger, the two loops step by step in turn. Its plain loop is what one would write by hand: collate, forward, backward
on sum / rows for each micro-batch of the same split, then one read of the counts, scale, clip, step, zero_grad.

`--recover` trains Brimful alone, also once undisturbed and once disturbed. Its **speeds** are medians over 20 steps with the
same rows before, while and after memory is gone. **loss apart** is the largest difference between the losses of a step in
the two runs. With `--layout packed` Brimful packs rows as it plans, with compiled blocks and CUDA graphs where it chooses them;
its kernels need bf16, the default there on a GPU. What a graph holds cannot be taken away, so memory goes while the graph has
given it back, as for an evaluation.
"""

import argparse
import functools
import gc
import json
import statistics
import sys
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

import brimful
from brimful.errors import BadOption, UserError, in_one_line
from brimful.memory.context import to_device
from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import Target, find_target
from brimful.step.recovery import MicroBatchLimit
from brimful.tasks.presets import PRESETS
from brimful.units import parse_bytes, show_bytes
from finders import _count, _lengths, _versions
from midrun_peers import CLIP, CONTESTANTS, MOST_ROWS, Chat, Memory, Recorder, Training, generate_rows, quiet, read_rows

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"model": "chatlm-tiny", "lengths": (48, 48), "memory_limit": "40MiB", "take": "40%", "steps": 8,
            "global_batch": 16, "micro_batch": 8, "precision": "fp32"},
    "cuda": {"model": "chatlm-base", "lengths": (256, 256), "memory_limit": "20GiB", "take": "60%", "steps": 20,
             "global_batch": 64, "micro_batch": 16, "precision": "tf32"},
}  # fmt: skip
"""Defaults of the flags, by kind of device."""
PACKED_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"global_batch": 32},
    "cuda": {"global_batch": 256, "precision": "bf16", "take": "75%"},
}
"""Those that differ for packed rows: more of them fit, and the limit must be what splits a step."""
ENCODER_DECODERS = tuple(name for name, preset in PRESETS.items() if not preset.causal)
MEDIAN_OVER = 20
"""Steps behind each speed that is compared."""
BEFORE, AFTER = 25, 45
"""Steps of `--recover` before memory is taken and after it is returned."""
FINER = "(calm, split finer)"
"""No contestant: Brimful undisturbed in micro-batches of half the size. Its distance is rounding alone."""
HEAD = ("", "steps", "global batch", "rows lost", "repeated", "distance", "OOMs", "s calm", "s disturbed", "s lost")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended."""

    updates: list[list[int]]
    discarded: int
    ooms: int
    seconds: float
    died: str
    weights: list[torch.Tensor] | None
    """None if it died without a model."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    contestant: str
    steps_requested: int
    steps_done: int
    """Optimizer steps in the final weights."""
    steps_discarded: int
    global_batches: list[int]
    """Every size a step had, in order of appearance."""
    rows_lost: int
    rows_repeated: int
    distance: float | None
    ooms: int
    calm_s: float
    disturbed_s: float
    died: str
    """The error, if it died."""


def compete(training: Training, memory: Callable[[], Memory], names: list[str], **disturbance: Any) -> list[Result]:
    results = []
    for name in names:
        run = functools.partial(run_once, CONTESTANTS[name])
        run(replace(training, steps=1), Recorder(memory()))
        calm = run(training, Recorder(memory()))
        if calm.died:
            raise BadOption(
                f"{name} does not run even undisturbed ({calm.died}). Try: a higher --memory-limit or a lower --micro-batch."
            )
        rough = run(training, Recorder(memory(), **disturbance))
        results.append(compare(name, training, calm, rough))
        _say(f"{name}: {results[-1].died or 'done'}")
        if name == "brimful":
            results.append(compare(FINER, training, calm, run(training.split_finer(), Recorder(memory()))))
    return results


def run_once(contestant: Callable[[Training, Recorder], nn.Module], training: Training, recorder: Recorder) -> Outcome:
    """One training under the limit. An exception is a result too."""
    training.task.recorder, died, weights = recorder, "", None
    _free(training.device)
    start = _now(training.device)
    try:
        with quiet(), recorder.memory.limited():
            model = contestant(training, recorder)
        seconds = _now(training.device) - start
        weights = _trained(model)
    except Exception as error:
        seconds = _now(training.device) - start
        died = f"died in step {recorder.calls + 1}: {textwrap.shorten(in_one_line(error), 160, placeholder=' …')}"
        weights = None if recorder.model is None else _trained(recorder.model)  # alive in the traceback, if anywhere
        traceback.clear_frames(error.__traceback__)
    training.task.recorder = None
    return Outcome(updates=recorder.updates, discarded=recorder.discarded, ooms=recorder.memory.ooms, seconds=seconds,
                   died=died, weights=weights)  # fmt: skip


def _trained(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().to("cpu", torch.float64) for p in model.parameters() if p.requires_grad]


def compare(name: str, training: Training, calm: Outcome, rough: Outcome) -> Result:
    requested = Counter(row["row"] for step in range(training.steps) for row in training.rows_of(step))
    used = Counter(row for update in rough.updates for row in update)
    return Result(
        contestant=name,
        steps_requested=training.steps,
        steps_done=len(rough.updates),
        steps_discarded=rough.discarded,
        global_batches=list(dict.fromkeys(len(update) for update in rough.updates)),
        rows_lost=(requested - used).total(),
        rows_repeated=(used - requested).total(),
        distance=None if calm.weights is None or rough.weights is None else distance(calm.weights, rough.weights),
        ooms=rough.ooms,
        calm_s=calm.seconds,
        disturbed_s=rough.seconds,
        died=rough.died,
    )


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Relative L2 over all trained weights."""
    apart = sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))
    return (apart / sum(float(a.square().sum()) for a in one)) ** 0.5


def show_results(results: list[Result]) -> str:
    died = [f"{result.contestant} {result.died}" for result in results if result.died]
    return "\n".join([_markdown([HEAD, *map(_cells, results)]), "", *died]).rstrip()


def _cells(result: Result) -> tuple[str, ...]:
    discarded = f", {result.steps_discarded} discarded" if result.steps_discarded else ""
    return (
        result.contestant,
        f"{result.steps_done} of {result.steps_requested}{discarded}{', died' if result.died else ''}",
        " → ".join(map(str, result.global_batches)) or "–",
        str(result.rows_lost),
        str(result.rows_repeated),
        "–" if result.distance is None else f"{result.distance:.1e}",
        str(result.ooms),
        f"{result.calm_s:.1f}",
        f"{result.disturbed_s:.1f}",
        "–" if result.died else f"{result.disturbed_s - result.calm_s:+.1f}",
    )


def measure_overhead(training: Training, steps: int) -> dict[str, Any]:
    """The stepper and a plain loop over the same rows in the same split, step by step in turn, each with its own model."""
    training.task.recorder = None
    ours, plain = training.build(), training.build()
    stepper = training.stepper(*ours)
    limit = MicroBatchLimit.from_plan(training.plan, training.micro_batch if training.plan is None else None, 10)
    seconds: dict[str, list[float]] = {"stepper": [], "plain": []}
    for step in range(-3, steps):  # three to warm up
        rows = training.rows_of(step % training.steps)
        groups = limit.split([training.task.shape(row) for row in rows])
        turns: dict[str, Callable[[], Any]] = {"stepper": functools.partial(stepper.step, rows),
                 "plain": functools.partial(plain_step, training, *plain, rows, groups)}  # fmt: skip
        for name in sorted(turns, reverse=step % 2 == 0):  # neither is always second
            took = _clock(training.device, turns[name])
            if step >= 0:
                seconds[name].append(took)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    apart = distance(*([p.detach().double() for p in model.parameters()] for model, _ in (plain, ours)))
    return {"stepper_s": medians["stepper"], "plain_s": medians["plain"], "ratio": medians["stepper"] / medians["plain"],
            "steps": steps, "micro_batches": len(groups), "distance": apart, "seconds": seconds}  # fmt: skip


def plain_step(
    training: Training, model: nn.Module, optimizer: Optimizer, rows: list[Any], groups: list[list[int]]
) -> None:
    """What one would write by hand."""
    counts = []
    for group in groups:
        batch = to_device(training.task.collate([rows[index] for index in group]), training.device)
        loss = training.task.loss(model, batch)
        (loss.sum / len(rows)).backward()
        counts.append(loss.count)
    scale = len(rows) / float(sum(counts))
    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], scale)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def show_overhead(result: dict[str, Any]) -> str:
    table = [
        ("", "ms a step (median)", "ratio"),
        ("plain loop", f"{1000 * result['plain_s']:.1f}", "1"),
        ("Stepper", f"{1000 * result['stepper_s']:.1f}", f"{result['ratio']:.3f}"),
    ]
    return (
        f"{_markdown(table)}\n\n{result['steps']} steps of each in turn, {result['micro_batches']} micro-batches in the last; "
        f"the weights end {result['distance']:.1e} apart"
    )


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """A run of Brimful, step by step."""

    outcome: Outcome
    seconds: list[float]
    losses: list[float]
    ooms: list[int]
    events: list[dict[str, Any]]


def run_timed(training: Training, recorder: Recorder) -> TimedRun:
    results: list[tuple[float, float, int]] = []
    events: list[dict[str, Any]] = []

    def train(training: Training, recorder: Recorder) -> nn.Module:
        model, optimizer = training.build(recorder)
        stepper = training.stepper(model, optimizer)
        for step in range(training.steps):
            recorder.before_step(stepper)
            rows, start = training.rows_of(step), _now(training.device)
            result = stepper.step(rows)
            results.append((_now(training.device) - start, result.loss, result.ooms))
        events.extend(event.to_json() for event in stepper.events)
        return model

    outcome = run_once(train, training, recorder)
    if outcome.died:
        raise BadOption(f"brimful {outcome.died}. Try: a higher --memory-limit or a smaller --take.")
    seconds, losses, ooms = (list(column) for column in zip(*results, strict=True))
    return TimedRun(outcome=outcome, seconds=seconds, losses=losses, ooms=ooms, events=events)


def measure_recovery(training: Training, memory: Callable[[], Memory], before: int, during: int) -> dict[str, Any]:
    """Memory is taken after `before` steps and returned `during` steps later: how fast are the steps around that, and are
    losses and weights those of the undisturbed run?"""
    run_timed(replace(training, steps=1), Recorder(memory()))
    calm = run_timed(training, Recorder(memory()))
    _say(f"undisturbed: {calm.outcome.seconds:.0f} s")
    rough = run_timed(training, Recorder(memory(), take_at=before + 1, give_back_after=during))
    _say(f"disturbed: {rough.outcome.seconds:.0f} s")
    finer = run_timed(training.split_finer(), Recorder(memory()))
    _say(f"undisturbed, split finer: {finer.outcome.seconds:.0f} s")
    phases = {"before": slice(before), "during": slice(before, before + during), "after": slice(before + during, None)}
    medians = {name: _median_step(rough, steps) for name, steps in phases.items()}
    lost = sum(
        took - medians[name]
        for name, steps in phases.items()
        for took, ooms in zip(rough.seconds[steps], rough.ooms[steps], strict=True)
        if ooms
    )
    ooms = sum(rough.ooms)
    runs = (("brimful", rough), (FINER, finer))
    return {
        "results": [asdict(compare(name, training, calm.outcome, run.outcome)) for name, run in runs],
        "loss_apart": {name: _apart(calm.losses, run.losses) for name, run in runs},
        "rows_per_s": {name: training.global_batch / median for name, median in medians.items()},
        "calm_rows_per_s": {
            name: training.global_batch / _median_step(calm, steps) for name, steps in phases.items()
        },
        "after_over_before": medians["before"] / medians["after"],
        "steps": {name: len(rough.seconds[steps]) for name, steps in phases.items()},
        "ooms": ooms,
        "lost_per_oom_steps": lost / ooms / medians["before"] if ooms else 0.0,
        "losses": {"calm": calm.losses, "disturbed": rough.losses},
        "events": rough.events,
    }  # fmt: skip


def _median_step(run: TimedRun, steps: slice) -> float:
    """Seconds of a step without an error, by the last steps of a phase."""
    clean = [took for took, ooms in zip(run.seconds[steps], run.ooms[steps], strict=True) if not ooms]
    return statistics.median((clean or run.seconds[steps])[-MEDIAN_OVER:])


def _apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def show_recovery(result: dict[str, Any]) -> str:
    rates, calm = result["rows_per_s"], result["calm_rows_per_s"]
    table = [("", "steps", "rows/s", "× before", "rows/s undisturbed")]
    table += [
        (name, str(result["steps"][name]), f"{rate:.4g}", f"{rate / rates['before']:.3f}", f"{calm[name]:.4g}")
        for name, rate in rates.items()
    ]
    results = [Result(**one) for one in result["results"]]
    compared = [(*HEAD, "loss apart")]
    compared += [(*_cells(one), f"{result['loss_apart'][one.contestant]:.1e}") for one in results]
    events = [f"step {event['step']}, {event['event']}: {event['sentence']}" for event in result["events"]]
    return "\n\n".join((
        _markdown(compared),
        _markdown(table),
        f"{result['ooms']} OOMs, {result['lost_per_oom_steps']:.2f} steps' time lost by each",
        "\n".join(events),
    ))  # fmt: skip


def _markdown(table: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    pads = (str.ljust, *[str.rjust] * (len(widths) - 1))
    lines = [
        "| " + " | ".join(pad(*cell) for pad, *cell in zip(pads, row, widths, strict=True)) + " |" for row in table
    ]
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _clock(device: torch.device, work: Callable[[], Any]) -> float:
    start = _now(device)
    work()
    return _now(device) - start


def _now(device: torch.device) -> float:
    """Seconds, with the device's queue empty; on the CPU processor time of this process."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _free(device: torch.device) -> None:
    """Free what the last run left in cycles and in the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def prepare(args: argparse.Namespace) -> tuple[Training, Target, int]:
    """The training that the flags describe, the device with its limit, and the bytes to take."""
    device = find_target(PlanOptions(device=args.device)).device
    if device.type not in DEFAULTS:
        raise BadOption(f"--device {args.device} is {device.type}. Try: cpu or cuda.")
    packed = args.layout == "packed"
    defaults = {**DEFAULTS[device.type], **(PACKED_DEFAULTS[device.type] if packed else {})}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.plan = args.plan or packed
    args.contestants = args.contestants or (["brimful"] if packed else list(CONTESTANTS))
    if args.recover:
        args.give_back_after = args.give_back_after or MEDIAN_OVER + 10
        args.steps = BEFORE + args.give_back_after + AFTER
    args.take_at = args.take_at or max(2, args.steps // 2)
    target = find_target(PlanOptions(device=str(device), memory_limit=args.memory_limit))
    _check(args)
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    task = Chat(
        args.model,
        args.lengths,
        torch.bfloat16 if args.precision == "bf16" and not packed else None,
        torch.float64 if args.precision == "fp64" else torch.float32,
    )
    if packed and args.precision == "bf16":
        task.precision = "bf16"  # autocast of Brimful's, so that it proves in full precision that packing is exact
    count = (min(args.steps, MEDIAN_OVER) if args.recover else args.steps) * args.global_batch
    if count > MOST_ROWS:
        raise BadOption(f"--steps × --global-batch is {count} rows, and at most {MOST_ROWS} can be told apart")
    rows = read_rows(args.data, task, count) if args.data else generate_rows(task, count, PRESETS[args.model].vocab)
    training = Training(task=task, rows=rows, steps=args.steps, global_batch=args.global_batch,
                        micro_batch=args.micro_batch, device=device)  # fmt: skip
    return training, target, _bytes_to_take(args.take, target.limit_bytes)


def _check(args: argparse.Namespace) -> None:
    wrong = []
    if args.global_batch % args.micro_batch:
        wrong.append(f"--global-batch {args.global_batch} must be a multiple of --micro-batch {args.micro_batch}")
    if args.take_at > args.steps:
        wrong.append(f"--take-at {args.take_at} comes after the last of {args.steps} steps")
    if args.layout == "packed" and args.contestants != ["brimful"]:
        wrong.append(f"--layout packed is for --contestants brimful, not {','.join(args.contestants)}")
    if args.layout == "packed" and args.overhead:
        wrong.append("--overhead compares with a loop over padded rows and cannot be combined with --layout packed")
    if wrong:
        raise BadOption("; ".join(wrong))


def _bytes_to_take(text: str, limit_bytes: int) -> int:
    share = text.removesuffix("%")
    taken = int(float(share) / 100 * limit_bytes) if share != text else parse_bytes(text, flag="--take")
    if not 0 < taken < limit_bytes:
        raise BadOption(f"--take {text} must be more than 0 and less than the limit of {show_bytes(limit_bytes)}")
    return taken


def with_plan(training: Training, target: Target, layout: Literal["padded", "packed"]) -> Training:
    """Brimful splits by predicted bytes, as after `brimful plan`.

    On the CPU nothing timed decides: there small micro-batches may be the fastest, and never run out of memory.
    """
    model, optimizer = training.build()
    plan = brimful.plan(
        training.task, data=training.rows, model=model, optimizer=optimizer, memory_limit=target.limit_bytes,
        global_batch=training.global_batch, layout=layout, deterministic=training.device.type == "cpu", cache=False,
    )  # fmt: skip
    return replace(training, plan=plan)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        training, target, take_bytes = prepare(args)
        with target.enforce(simulate=False):
            result, shown = _measure(args, training, target, take_bytes)
    except UserError as error:
        print(f"oom_midrun: {error}", file=sys.stderr)
        return 2
    about = facts(args, training, target, take_bytes)
    print(_title(about), shown, sep="\n\n")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**about, **result}, indent=1) + "\n")
    return 0


def _measure(
    args: argparse.Namespace, training: Training, target: Target, take_bytes: int
) -> tuple[dict[str, Any], str]:
    """The figures, and how they are shown."""
    memory = functools.partial(Memory, training.device, target.limit_bytes, take_bytes)
    if args.plan:
        started = time.perf_counter()
        training = with_plan(training, target, args.layout)
        _say(f"planned: {time.perf_counter() - started:.0f} s")
    if args.overhead:
        overhead = measure_overhead(training, max(MEDIAN_OVER, args.steps))
        return {"overhead": overhead}, show_overhead(overhead)
    if args.recover:
        recovery = measure_recovery(training, memory, BEFORE, args.give_back_after)
        return {"recovery": recovery, **_planned(training)}, show_recovery(recovery)
    _import_peers(args.contestants)
    results = compete(training, memory, args.contestants, take_at=args.take_at, give_back_after=args.give_back_after)
    return {"results": [asdict(result) for result in results], **_planned(training)}, show_results(results)


def _planned(training: Training) -> dict[str, Any]:
    return {} if training.plan is None else {"plan": training.plan.headline, "levers": asdict(training.plan.levers)}


def _import_peers(names: list[str]) -> None:
    """Now, so that imports are not timed and their loggers exist."""
    import accelerate  # noqa: F401
    import transformers

    _ = transformers.Trainer
    if "lightning" in names:
        from peers import _import_lightning

        _import_lightning()


def facts(args: argparse.Namespace, training: Training, target: Target, take_bytes: int) -> dict[str, Any]:
    """When, where and on what this ran, in bytes and seconds."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(training.device),
        "device_name": target.name,
        "threads": torch.get_num_threads(),
        "versions": _versions(),
        "model": args.model,
        "lengths": list(training.task.worst_shape),
        "data": args.data or "generated",
        "precision": args.precision,
        "limit_bytes": target.limit_bytes,
        "take_bytes": take_bytes,
        "take_at": args.take_at,
        "give_back_after": args.give_back_after,
        "steps": training.steps,
        "global_batch": training.global_batch,
        "micro_batch": training.micro_batch,
        "planned": args.plan,
        "layout": args.layout,
        "mode": "overhead" if args.overhead else "recover" if args.recover else "compete",
    }


def _title(about: dict[str, Any]) -> str:
    back = f", returned {about['give_back_after']} steps later" if about["give_back_after"] else ""
    at = BEFORE + 1 if about["mode"] == "recover" else about["take_at"]
    limit = (
        f"limit {show_bytes(about['limit_bytes'])}, {show_bytes(about['take_bytes'])} of it taken at step {at}{back}"
    )
    return "\n".join((
        f"{about['date']}, {about['device_name']} ({about['device']}, {about['threads']} CPU threads)"
        + ("; seconds are processor time" if about["device"] == "cpu" else ""),
        f"sft {about['model']}, {about['data']} rows up to {'+'.join(map(str, about['lengths']))}, {about['precision']}, "
        f"{about['steps']} steps of {about['global_batch']} rows, "
        + (f"{about['layout']}, Brimful by its plan" if about["planned"] else f"micro-batches of {about['micro_batch']}"),
        "no limit" if about["mode"] == "overhead" else limit,
        ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    ))  # fmt: skip


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:1 (the first GPU, else the CPU)")
    parser.add_argument(
        "--model", choices=ENCODER_DECODERS, help="the model (chatlm-base on cuda, chatlm-tiny on the CPU)"
    )
    parser.add_argument("--lengths", type=_lengths, help="the longest rows (256,256 on cuda, 48,48 on the CPU)")
    parser.add_argument(
        "--data", metavar="FILE", help="a parquet file with prompt and response, read as bytes (generated)"
    )
    parser.add_argument(
        "--precision",
        choices=("fp64", "fp32", "tf32", "bf16"),
        help="precision of the forward (tf32 on cuda, bf16 if packed, fp32 on the CPU)",
    )
    parser.add_argument("--steps", type=_count, help="optimizer steps (20 on cuda, 8 on the CPU)")
    parser.add_argument(
        "--global-batch", type=_count, help="rows per step (64 on cuda, 16 on the CPU; packed 256 and 32)"
    )
    parser.add_argument("--micro-batch", type=_count, help="rows of the first micro-batches (16 on cuda, 8 on the CPU)")
    parser.add_argument("--memory-limit", help="limit for all contestants (20GiB on cuda, 40MiB on the CPU)")
    parser.add_argument(
        "--take", help="share of the limit to take: 40%% or 8GiB (60%% on cuda, 75%% if packed, 40%% on the CPU)"
    )
    parser.add_argument("--take-at", type=_count, help="step at which it is taken (half of them)")
    parser.add_argument("--give-back-after", type=_count, help="steps until it is returned (never; 30 with --recover)")
    parser.add_argument("--contestants", type=_contestants, help="names, separated by commas (all; brimful if packed)")
    parser.add_argument(
        "--layout", choices=("padded", "packed"), default="padded", help="Brimful's; packed plans first (%(default)s)"
    )
    parser.add_argument("--plan", action="store_true", help="plan first, and let Brimful split by the plan")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--overhead", action="store_true", help="the stepper against a plain loop, without errors")
    what.add_argument("--recover", action="store_true", help="speed before, during and after memory is gone")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures to this file")
    return parser.parse_args(argv)


def _contestants(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}. Try: {', '.join(CONTESTANTS)}")
    return names


def _say(phrase: str) -> None:
    print(phrase, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
