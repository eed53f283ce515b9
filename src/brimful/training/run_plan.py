"""What a run adds to its plan: the choices of training, where every value comes from, the predicted time, and warnings.

A plan that comes from the run's folder or from a file has these already, of the time it was saved: they are made again.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from brimful.planning.plan import SET_BY_USER, Choice, Plan, RunTime, Source
from brimful.task import Dataset, Task
from brimful.training.optimizer import Schedule, optimizer_choice
from brimful.training.options import SAVE_S, TrainOptions
from brimful.training.plan_history import KeptPlan
from brimful.training.run import Request, pick
from brimful.units import show_count

FEW_UPDATES = 100
"""A run of fewer steps gets a warning: AdamW's averages alone take 1,000 steps to settle, and few losses fall far in 100."""
MOST_COMPARED = 1000
"""Of a long run, the learning rates of this many steps are compared."""
_OPTIONS = {
    "steps": ("max_steps", "epochs"),
    "save": ("save_every",),
    "optimizer": ("optimizer", "lr"),
    "exactness": ("allow_inexact",),
}
"""The options behind a choice that has another name, the first first."""
_OF_A_RUN = re.compile(r"the run has only |[\d,]+ of [\d,]+ GPUs stand")
"""How warnings begin that a run adds."""


def run_steps(options: TrainOptions, global_batch: int, rows: Dataset) -> int:
    """Of the whole run."""
    return options.max_steps or max(1, math.ceil(options.epochs * len(rows) / global_batch))


def with_choices(
    plan: Plan, rows: Dataset, *, task: Task, request: Request, note: Callable[[str], object]
) -> Plan:  # fmt: skip
    """The plan with the choices that training adds. The schedule's is complete once there is an optimizer."""
    options, steps = request.train_options, run_steps(request.train_options, plan.global_batch, rows)
    passes = steps * plan.global_batch / len(rows)
    reason = f"{passes:.3g} pass{'es' * (passes != 1)} over {len(rows):,} rows, {plan.global_batch} per step"
    every = None if options.save_every is None else f"every {show_count(options.save_every, 'step')}"
    added = (
        *_remarks(task, rows, request),
        Choice.of("steps", options.max_steps, steps, reason, "measured", "you" if "epochs" in request.options else "default"),
        optimizer_choice(task, options),
        Choice.of("schedule", request.options.get("schedule"), options.schedule, "", "asked"),
        _warmup(request, steps, note),
        *_ema(options, steps, note),
        Choice.of("save", every, every or f"every {SAVE_S / 60:.0f} min", "a checkpoint this often, and at the end", "asked"),
    )  # fmt: skip
    planned = [
        replace(choice, requested=None, source="measured")
        if choice.name == "device" and request.plan_options.device == "auto"
        else choice
        for choice in plan.choices
        if choice.name not in {new.name for new in added}
    ]
    return replace(plan, choices=(*planned, *added))


def _remarks(task: Task, rows: Dataset, request: Request) -> Iterator[Choice]:
    """The task's own. What is none of its options was found in the data."""
    own = {option.name.rstrip("_") for option in fields(task.options)} if is_dataclass(task.options) else set()
    for name, requested, effective, reason in task.remarks(rows):
        source: Source = "you" if name in request.task_options else "task" if name in own else "measured"
        yield Choice(name=name, requested=requested, effective=effective, reason=reason, basis="asked", source=source)


def _warmup(request: Request, steps: int, note: Callable[[str], object]) -> Choice:
    requested, warmup = request.train_options.warmup, request.train_options.warmup_steps(steps)
    reason = f"of {show_count(steps, 'step')}"
    if "%" not in str(requested) and warmup < int(requested):
        reason = f"half of the run, which has only {show_count(steps, 'step')}"
        note(f"warmup={requested} is lowered to {warmup}: {reason}. Try: a share of the run, such as warmup='3%'")
    return Choice.of("warmup", request.options.get("warmup"), show_count(warmup, "step"), reason, "asked")


def _ema(options: TrainOptions, steps: int, note: Callable[[str], object]) -> Iterator[Choice]:
    decay = options.ema
    if decay is None:
        return
    averaged = round(1 / (1 - decay))
    if averaged > steps:
        note(
            f"ema={decay} averages over about {show_count(averaged, 'step')}, and the run has {show_count(steps, 'step')}. "
            f"Try: a lower one, such as ema={1 - 10 / max(20, steps):.2g}"
        )
    yield Choice.of(
        "ema", decay, decay, f"the average of about {show_count(averaged, 'step')} is evaluated and saved", "asked"
    )


def with_schedule(plan: Plan, schedule: Schedule, peak: float) -> Plan:
    """With the learning rates, which are known once there is an optimizer."""
    return _with_choice(plan, effective=schedule.curve, reason=schedule.describe(peak))


def with_own_schedule(plan: Plan, scheduler: object) -> Plan:
    """With a scheduler of the task, which knows of no warmup but its own."""
    plan = replace(plan, choices=tuple(choice for choice in plan.choices if choice.name != "warmup"))
    reason = f"{type(scheduler).__name__}, from Task.schedule"
    return _with_choice(plan, effective="the task's own", reason=reason, source="task")


def _with_choice(plan: Plan, **values: Any) -> Plan:
    choices = (replace(choice, **values) if choice.name == "schedule" else choice for choice in plan.choices)
    return replace(plan, choices=tuple(choices))


def with_sources(plan: Plan, origins: Mapping[str, str], values: Mapping[str, Any]) -> Plan:
    """With the file in which the user set a value, if it was a file. `values` are all that the user set."""

    def sourced(choice: Choice) -> Choice:
        names = [name for name in _OPTIONS.get(choice.name, (choice.name,)) if name in values]
        if choice.source not in SET_BY_USER or not names:
            return choice
        files = [origins[name] for name in names if name in origins]
        return choice.set_in(files[0] if len(files) == len(names) else None)

    return replace(plan, choices=tuple(map(sourced, plan.choices)))


def with_time(plan: Plan, rows: Dataset, *, steps: int, done: int) -> Plan:
    """With the time that the run is predicted to take; unknown if the plan was not made for these rows."""
    step_s = plan.step_s if plan.data_rows == len(rows) else None
    passes_per_step = plan.global_batch / len(rows)
    ends = None
    if step_s is not None:
        with suppress(OverflowError):  # after the year 9999
            end = datetime.now(UTC) + timedelta(seconds=(steps - done) * step_s)
            ends = end.isoformat(timespec="seconds").replace("+00:00", "Z")
    time = RunTime(
        steps=steps, steps_per_epoch=max(1, math.ceil(1 / passes_per_step)), step_s=step_s,
        epoch_s=None if step_s is None else step_s / passes_per_step, total_s=None if step_s is None else steps * step_s,
        ends=ends,
    )  # fmt: skip
    return replace(plan, run_time=time)


def with_run_warnings(plan: Plan, options: TrainOptions, *, steps: int, more: list[str]) -> Plan:
    """With warnings about this run instead of those about the one that the plan was saved in."""
    few = []
    if steps < FEW_UPDATES:
        advice = "more epochs=, or a smaller global_batch=" if options.max_steps is None else "a higher max_steps="
        few = [f"the run has only {show_count(steps, 'update')}, too few to learn much. Try: {advice}"]
    own = [warning for warning in plan.warnings if not _OF_A_RUN.match(warning)]
    return replace(plan, warnings=(*own, *few, *more))


def same_rates(before: KeptPlan | None, schedule: Schedule | None, *, done: int) -> bool:
    """Whether the steps so far had the learning rates, as shares of the peak, that this schedule would have given them.

    A task's own scheduler (None) keeps its state, so nothing is said about it.
    """
    if before is None or schedule is None:
        return True
    options = TrainOptions(**pick({**before.options, "plan": None}, TrainOptions))
    choices = {choice["name"]: choice["effective"] for choice in before.plan["choices"]}
    steps = choices.get("steps", schedule.steps)
    former = Schedule.of(options, steps)
    compared = range(1, done + 1, max(1, done // MOST_COMPARED))
    return all(math.isclose(former.share(step), schedule.share(step)) for step in compared)
