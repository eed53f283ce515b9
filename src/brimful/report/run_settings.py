"""What two runs were set to differently, whether that makes another experiment, and where their losses can be compared.

**The experiment** is what decides on the updates: task and its options, data and their order, rows per step, optimizer, rates,
precision. Two runs that differ in nothing of it train the same thing, up to rounding and the seed. How a step is computed (micro-batch,
layout, workers, memory limit, compilation, device, processes) is not part of it, unless the loss looks across rows and the
user allowed to split it all the same.

Of the learning rate, what was recorded counts, not what was requested: a run of another length has another cosine, and a constant
rate is the same however many steps follow.

At equal steps two runs of one seed see the same rows, so their losses are compared step by step and the noise that they share does not
count. After equal rows, and in runs so long that other steps of them were read, noise counts in full.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from brimful.planning.plan_options import PlanOptions
from brimful.report.run_figures import RunFigures, finite, part, whole
from brimful.training.events import number
from brimful.training.levels import spread
from brimful.training.options import TrainOptions
from brimful.units import show_bytes

EXPERIMENT = frozenset(
    ("task", "data", "data_rows", "global_batch", "lr", "optimizer", "precision", "weights", "frozen", "tokenizer", "max_tokens", "mix",
     "weight_decay", "clip_norm", "columns")
)  # fmt: skip
"""Settings with which the updates are others, besides the options of the task."""
RATE = frozenset(("schedule", "warmup", "decay", "min_lr", "steps", "max_steps", "epochs"))
"""Settings that act through the learning rate alone."""
SPLIT = frozenset(("micro_batch", "accumulation", "layout", "processes"))
INEXACT = ("inexact", "not known", "weighted by rows")
"""A loss of this exactness depends on how a step is split."""
_NO_SETTING = frozenset(
    ("run", "resume", "rollback", "plan", "cache", "plan_seconds", "table", "rows", "save", "allocator", "max_steps", "epochs", "lengths",
     "memory_limit", "micro_batch", "trackers", "time_limit", "keep", "device")
)  # fmt: skip
"""Options that say how a plan was made or where it is, or that a choice of the plan says better."""
_SIZES = ("memory_limit", "host_limit")
_RATES_AGREE = 1e-6


@dataclass(frozen=True, slots=True)
class Setting:
    effective: Any
    requested: Any = None
    """None if it was left open."""
    identity: Any = None
    """What two settings are compared by where both have it: the same rows in another place are the same data."""
    is_unknown: bool = False
    """Unknown, because the run has no readable plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that is not the same in all runs."""

    name: str
    settings: tuple[Setting | None, ...]
    """Of each run; None where the run does not have it."""
    experiment: bool
    """Whether it makes another experiment."""

    def to_json(self) -> dict[str, Any]:
        values = [
            None if one is None else {"effective": one.effective, "requested": one.requested} for one in self.settings
        ]
        return {"name": self.name, "experiment": self.experiment, "values": values}


def settings_of(run: RunFigures) -> dict[str, Setting]:
    """Everything that was set or chosen, by name, in the order of the plan."""
    settings = {
        "task": Setting(run.request.get("task") or run.plan.get("task")),
        "data": Setting(run.request.get("data"), identity=_fingerprint(run)),
    }
    if run.data_rows is not None:
        settings["data_rows"] = Setting(run.data_rows)
    settings |= {name: Setting(value) for name, value in run.task_options.items()}
    skipped = ("plan", "plan_seconds", "allocator", "rows", "save")
    settings |= {
        name: Setting(choice.get("effective"), choice.get("requested"))
        for name, choice in run.choices.items()
        if name not in skipped
    }
    settings["device"] = Setting(run.plan.get("device_name"), run.requested("device"))
    settings["processes"] = Setting(run.plan.get("processes"))
    defaults = {one.name: one.default for owner in (TrainOptions, PlanOptions) for one in fields(owner)}
    for name, value in {**(defaults if run.plan else {}), **run.options}.items():
        if name not in settings and name not in _NO_SETTING:
            settings[name] = Setting(value)
    if " at " in str(part(run.choices, "optimizer").get("effective")):  # it names the rate, requested or not
        settings.pop("lr", None)
    if run.begin.get("version") is not None:
        settings["brimful"] = Setting(run.begin["version"])
    return settings


def _fingerprint(run: RunFigures) -> str | None:
    """Of the token store that the run was trained on."""
    if run.store_path is None:
        return None
    try:
        from brimful.data.store import StoreMeta

        return StoreMeta.read(run.store_path).fingerprint
    except Exception:  # damaged, or of another version
        return None


def differences(runs: Sequence[RunFigures]) -> list[Difference]:
    """What is not the same in all runs, the experiment first."""
    all_settings = [settings_of(run) for run in runs]
    names = dict.fromkeys(name for settings in all_settings for name in settings)
    task_options = {name for run in runs for name in run.task_options}
    data = [one["data"].identity for one in all_settings]
    if None not in data and len(set(data)) == 1:  # these act on the rows alone, and all runs have the same
        task_options -= {"columns", "max_bad"}
    found = []
    for name in names:
        settings = tuple(_known(one.get(name), run) for one, run in zip(all_settings, runs, strict=True))
        if all(same_setting(settings[0], one) for one in settings[1:]) or (name == "brimful" and None in settings):
            continue
        pairs = [
            (runs[0], run)
            for run, one in zip(runs[1:], settings[1:], strict=True)
            if not same_setting(settings[0], one)
        ]
        is_other = (name in EXPERIMENT or name in task_options or _splits_inexactly(name, runs) or (name in RATE and not all(same_rates(*pair) for pair in pairs)))  # fmt: skip
        found.append(Difference(name=name, settings=settings, experiment=is_other))
    return sorted(found, key=lambda one: not one.experiment)


def _known(setting: Setting | None, run: RunFigures) -> Setting | None:
    """A run whose plan is missing or damaged may have had any value."""
    missing = setting is None or setting.effective is None
    return Setting(None, is_unknown=True) if missing and not run.plan else setting


def same_setting(one: Setting | None, two: Setting | None) -> bool:
    """What was requested and comes to the same is no difference, and what is unknown need not be one."""
    if (one is not None and one.is_unknown) or (two is not None and two.is_unknown):
        return True
    if one is not None and two is not None and one.identity is not None and two.identity is not None:
        return bool(one.identity == two.identity)
    values = _plain(one and one.effective), _plain(two and two.effective)
    return bool(values[0] == values[1]) or same_file(*values)


def same_file(one: Any, two: Any) -> bool:
    """Whether one is the absolute name of the other, as far as names can tell: a resumed run has recorded absolute ones."""
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(a == b or same_file(a, b) for a, b in zip(one, two, strict=True))
    if not isinstance(one, str) or not isinstance(two, str) or one.startswith("/") == two.startswith("/"):
        return False
    absolute, relative = (one, two) if one.startswith("/") else (two, one)
    end = [name for name in relative.split("/") if name not in ("", ".", "..")]
    return bool(end) and absolute.split("/")[-len(end) :] == end


def _plain(value: Any) -> Any:
    """As it comes from JSON: a tuple is a list, and a number may have come as text."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _splits_inexactly(name: str, runs: Sequence[RunFigures]) -> bool:
    return name in SPLIT and any(part(run.choices, "exactness").get("effective") in INEXACT for run in runs)


def same_rates(one: RunFigures, two: RunFigures) -> bool:
    """Whether both had the same learning rate in each step that both have; True if there is no such step."""
    rates = [
        {step["step"]: rate for step in run.steps if (rate := finite(step, "lr")) is not None} for run in (one, two)
    ]
    return all(
        math.isclose(rates[0][step], rates[1][step], rel_tol=_RATES_AGREE) for step in rates[0].keys() & rates[1].keys()
    )


def show_setting(name: str, value: Any) -> str:
    """For people: `20 GiB`, `on`, `256+256`, `–`."""
    if value is None:
        return "–"
    if name in _SIZES and isinstance(value, (int, float)) and not isinstance(value, bool):
        return show_bytes(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return "+".join(str(one) for one in value)
    return str(value)


def train_command(run: RunFigures, flags: str = "") -> str:
    """The command that trains as this run did, with the plan it has now; with other `flags` it makes a plan for them."""
    changed = shlex.split(flags)
    words = ["brimful", "train", str(run.request.get("task") or run.plan.get("task") or "TASK")]
    words += [str(run.request["data"])] if run.request.get("data") else []
    plan = None if changed else plan_file(run)
    words += [] if plan is None else ["--plan", str(plan)]
    for name, value in [*run.task_options.items(), *run.options.items()]:
        flag = list(_flag(name, value))
        if name not in ("run", "resume", "rollback", "plan") and not set(flag[:1]) & set(changed):
            words += flag
    return shlex.join([*words, *changed])


def plan_file(run: RunFigures) -> Path | None:
    """plan.json, or the newest plan that was kept; None if the run has lost both."""
    folder = run.record.folder
    return next((path for path in (folder.plan(), *reversed(list(folder.kept_plans()))) if path.is_file()), None)


def _flag(name: str, value: Any) -> Iterator[str]:
    flag = f"--{name.rstrip('_').replace('_', '-')}"
    if value is None or value is False:
        return
    yield flag
    if isinstance(value, (list, tuple)):
        yield ",".join(map(str, value))
    elif value is not True:
        yield str(value)


SURE = 3.0
"""Standard errors by which losses must differ."""
LOSS_STEPS = 50
"""A loss at a step is the mean of at most this many steps up to it, and of at most a tenth of those there are."""
SAME_LOSS = 0.01
"""Losses that differ by less than this share are the same: another dropout mask or rounding makes as much of a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """The loss of every run at one step, or after one number of rows."""

    at: int
    by: Literal["step", "rows"]
    losses: tuple[float | None, ...]
    errors: tuple[float | None, ...]
    """Of the difference to the first run; None for the first, and where it is unknown."""
    steps: tuple[int, ...]
    """How many steps each loss is the mean of."""

    def differs(self, index: int) -> bool | None:
        """Whether this run's loss is another than the first one's, beyond noise."""
        first, loss, error = self.losses[0], self.losses[index], self.errors[index]
        if first is None or loss is None or error is None or not (math.isfinite(first) and math.isfinite(loss)):
            return None
        return abs(loss - first) > max(SURE * error, SAME_LOSS * abs(first))


def rows_only(run: RunFigures) -> tuple[Any, ...]:
    """The rows of its steps; from which step on only if they changed."""
    changes = run.row_changes
    return changes if len(changes) > 1 else tuple(rows for _, rows in changes)


def loss_points(runs: Sequence[RunFigures]) -> list[LossPoint]:
    """The loss at half of the steps that all runs have and at the last of them; where steps have other rows, at equal rows too."""
    points: list[LossPoint] = []
    if any(run.record.step_lines_skipped for run in runs):  # of long runs other steps may have been read
        curves = [[(step, loss) for step, loss in run.losses.items()] for run in runs]
        last = min((curve[-1][0] for curve in curves if curve), default=0)
        points += [_at(curves, at, "step") for at in (last // 2, last) if at and all(curves)]
    else:
        common = sorted(set.intersection(*(set(run.losses) for run in runs)))
        places = dict.fromkeys((common[len(common) // 2 - 1], common[-1]) if len(common) > 1 else common)
        points += [_at_step(runs, common, step) for step in places]
    is_one_run = len({run.record.root for run in runs}) < len(
        runs
    )  # its later parts begin with what the first has learnt
    if not is_one_run and len({rows_only(run) for run in runs}) > 1:
        curves = [_by_rows(run) for run in runs]
        points += [_at(curves, min(curve[-1][0] for curve in curves), "rows")] if all(curves) else []
    return points


def _at_step(runs: Sequence[RunFigures], common: Sequence[int], step: int) -> LossPoint:
    until = common[: common.index(step) + 1]
    window = until[-max(1, min(LOSS_STEPS, len(until) // 10)) :]
    columns = [[run.losses[one] for one in window] for run in runs]
    errors: list[float | None] = [None]
    for column in columns[1:]:
        paired = [b - a for a, b in zip(columns[0], column, strict=True)]
        errors.append(
            1.25 * spread(paired) / math.sqrt(len(paired))
            if len(paired) >= 5 and all(map(math.isfinite, paired))
            else None
        )
    losses = tuple(_mean(column) for column in columns)
    return LossPoint(at=step, by="step", losses=losses, errors=tuple(errors), steps=(len(window),) * len(runs))


def _at(curves: Sequence[Sequence[tuple[int, float]]], at: int, by: Literal["step", "rows"]) -> LossPoint:
    """The mean of each curve over the tenth before this place. Steps are not paired, so noise counts in full."""
    windows = [[loss for place, loss in curve if 0.9 * at < place <= at] or [curve[0][1]] for curve in curves]
    errors = [
        1.25 * spread(window) / math.sqrt(len(window)) if len(window) >= 5 and all(map(math.isfinite, window)) else None
        for window in windows
    ]
    differences = [
        None if index == 0 or errors[0] is None or one is None else math.hypot(errors[0], one)
        for index, one in enumerate(errors)
    ]
    losses, steps = tuple(map(_mean, windows)), tuple(map(len, windows))
    return LossPoint(at=at, by=by, losses=losses, errors=tuple(differences), steps=steps)


def _by_rows(run: RunFigures) -> list[tuple[int, float]]:
    """The loss of each step and the rows trained on up to it. Steps that were not read had as many rows as the next one."""
    curve, rows, before = [], 0.0, 0
    for step in run.steps:
        rows += (step["step"] - before) * (whole(step, "rows") or run.rows_per_step or 0)
        before = step["step"]
        loss = number(step, "loss")
        if loss is not None:
            curve.append((round(rows), loss))
    return curve


def _mean(values: Sequence[float]) -> float:
    """NaN if one of them is."""
    return sum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
