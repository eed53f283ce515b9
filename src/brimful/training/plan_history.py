"""The plans that a run has trained with: kept in `RUN/plans`, compared when one follows another, and gone back to.

A plan gets a number of its own if it differs from those before in something that matters: its choices, or an option that
changes the updates. How long it took to make, what was timed on the way, and how many steps the run has, does not matter.
`--rollback` continues a run with an earlier one, and with the options of that time.

A changed plan leaves the experiment what it is, or makes it another one. It stays the same if the steps trained so far are what
the new plan would have trained, up to rounding: a micro-batch is only a part of a step, and more steps at a constant rate only
come after the others. Another global batch, another rate or other rows would have trained something else.

Plans are dicts here, as in plan.json, and torch is not imported: the process that the user starts goes back, too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from brimful.errors import BadRun, UserError
from brimful.files import read_json, write_atomic
from brimful.planning.plan_options import PlanOptions
from brimful.training.options import TrainOptions
from brimful.training.run import Request, RunFolder
from brimful.units import show_bytes

Experiment = Literal["new", "same", "other"]

_UPDATES = ("warmup", "weight_decay", "clip_norm", "min_lr", "decay", "mix", "skip_oversized")
"""Options of training that are no choice of a plan, or that its choice says worse: 20 steps may be 2% of the run."""
_RUN = ("lr", "optimizer", "schedule", "ema", *_UPDATES)
_MACHINE = ("cache", "device", "plan_seconds", "table")
RESTORED = (*_RUN, *(option.name for option in fields(PlanOptions) if option.name not in _MACHINE))
"""Options that a run gets back together with a plan. Others, such as its length or the rows to evaluate on, stay as they are."""

_NO_SETTING = ("plan", "device", "plan_seconds", "allocator", "rows", "save", "warmup")
"""Choices that say how a plan was made, that its own fields say better, or that no step depends on."""
_SPLIT = ("micro_batch", "accumulation", "layout", "processes")
_RATE = ("steps", "schedule", "warmup", "min_lr", "decay")
_SAME = ("memory_limit", "host_limit", "ema", "skip_oversized", "exactness", "lengths", *_RATE)
"""Changes that need no sentence: they change no update, or another sentence is about them."""
_OTHER = {
    "global_batch": "a step has {new} rows instead of {old}",
    "data_rows": "the data have {new} rows instead of {old}",
    "optimizer": "the optimizer is {new} instead of {old}",
    "precision": "the model computes in {new} instead of {old}",
    "weights": "the weights are {new} instead of {old}",
    "frozen": "{new} instead of {old} are frozen",
    "tokenizer": "the tokenizer is {new} instead of {old}",
    "max_tokens": "texts have at most {new} tokens instead of {old}",
    "mix": "rows come in another order (mix is {new}, it was {old})",
    "weight_decay": "the weight decay is {new} instead of {old}",
    "clip_norm": "gradients are clipped at {new} instead of {old}",
}
"""Changes with which the steps so far would have been others."""
_INEXACT = ("inexact", "not known", "weighted by rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    """A plan with what belongs to it."""

    number: int
    plan: Mapping[str, Any]
    """As in plan.json."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the user had set, as in run.json."""
    origins: Mapping[str, str] = field(default_factory=dict)
    plan_for: Mapping[str, Any] | None = None
    """The options that it was made for."""
    code: str = ""
    """A hash of the file that the task comes from."""

    @property
    def settings(self) -> dict[str, tuple[Any, Any]]:
        """Everything that matters by name, each with what was requested where that has an effect of its own."""
        choices = {choice["name"]: choice for choice in self.plan.get("choices", ())}
        settings = {name: (choice["effective"], None) for name, choice in choices.items() if name not in _NO_SETTING}
        limit = choices.get("memory_limit", {})
        settings["memory_limit"] = (
            None if limit.get("requested") is None else limit["effective"],
            None,
        )  # else what was free
        if "micro_batch" in choices:  # a request is a ceiling for rows of other lengths
            settings["micro_batch"] = choices["micro_batch"]["effective"], choices["micro_batch"]["requested"]
        for name in ("processes", "data_rows"):
            settings[name] = self.plan.get(name), None
        settings["device"] = self.plan.get("device_name"), None
        options = TrainOptions(**{name: value for name, value in self.options.items() if name in _UPDATES})
        return {**settings, **{name: (getattr(options, name), None) for name in _UPDATES}}

    def equals(self, other: "KeptPlan") -> bool:
        """Whether both are one plan. A run may have got more steps."""
        return {**_plain(self.settings), "steps": None} == {**_plain(other.settings), "steps": None}


_OWN = tuple(entry.name for entry in fields(KeptPlan) if entry.name != "plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan beside the one before it, as a `plan` event records it."""

    number_before: int | None = None
    """Of the plan before; None in a new run."""
    changes: tuple[Mapping[str, Any], ...] = ()
    """name, old, new."""
    experiment: Experiment
    experiment_reasons: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


def compare(before: KeptPlan | None, now: KeptPlan, *, steps_done: int, same_rates: bool) -> Comparison:
    """What changed, and whether the steps so far are also what the new plan would have trained.

    `same_rates`: whether they had the learning rates that the new plan would have given them.
    """
    if before is None:
        return Comparison(experiment="same" if steps_done else "new")
    number, changes = before.number, tuple(_changes(before, now))
    if not steps_done:
        return Comparison(number_before=number, changes=changes, experiment="new")
    reasons = [sentence for change in changes if (sentence := _why_other(change))]
    rate = [change["name"].replace("_", " ") for change in changes if change["name"] in _RATE]
    if rate and not same_rates:
        reasons.append(f"so far the learning rate followed another curve ({', '.join(rate)})")
    split = [change["name"].replace("_", " ") for change in changes if change["name"] in _SPLIT]
    inexact = [kept.settings.get("exactness", ("", None))[0] for kept in (before, now)]
    if split and any(exactness in _INEXACT for exactness in inexact):
        reasons.append(f"results depend on how a step is split ({', '.join(split)})")
    if reasons:
        return Comparison(number_before=number, changes=changes, experiment="other", experiment_reasons=tuple(reasons))
    computed = [change["name"].replace("_", " ") for change in changes if change["name"] not in _SAME]
    if computed:
        masks = " and dropout masks" if split else ""
        reasons.append(
            f"a step is computed in another way ({', '.join(computed)}), with the same result up to rounding{masks}"
        )
    if before.code and now.code and before.code != now.code:
        reasons.append("the file of the task has changed, and with it perhaps the loss, the model or the rows")
    return Comparison(number_before=number, changes=changes, experiment="same", experiment_reasons=tuple(reasons))


def _changes(before: KeptPlan, now: KeptPlan) -> Iterator[dict[str, Any]]:
    old, new = _plain(before.settings), _plain(now.settings)
    for name in {**old, **new}:
        (was, was_requested), (is_now, requested) = old.get(name, [None, None]), new.get(name, [None, None])
        if was != is_now:
            yield {"name": name, "old": was, "new": is_now}
        elif was_requested != requested:
            yield {"name": name, "old": was_requested or "auto", "new": requested or "auto"}


def _why_other(change: Mapping[str, Any]) -> str:
    template = _OTHER.get(change["name"])
    if template is None:
        return ""
    return template.format(**{name: show_value(change["name"], change[name]) for name in ("old", "new")})


def show_value(name: str, value: Any) -> str:
    """A value of a change, for people."""
    if value is None:
        return "all that is free" if name == "memory_limit" else "none"
    if name in ("memory_limit", "host_limit"):
        return show_bytes(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class PlanHistory:
    """`RUN/plans`: 0001.json, …, each with the options of its time; rank-1-0001.json of a rank with a plan of its own."""

    run: RunFolder
    rank: int = 0

    def all(self) -> list[KeptPlan]:
        """The oldest first. Files that cannot be read are left out."""
        return [kept for path in self._paths() if (kept := _read(path)) is not None]

    def current(self) -> KeptPlan | None:
        """The one that the run trains with, or did when it was stopped."""
        plans = {kept.number: kept for kept in self.all()}
        try:
            number = read_json(self.run.plan(self.rank).read_text(encoding="utf-8")).get("number")
        except (OSError, ValueError):
            number = None
        newest = next(reversed(plans.values()), None)
        return plans.get(number, newest) if isinstance(number, int) else newest

    def numbers_of(self, plan: KeptPlan) -> list[int]:
        """Of kept plans that equal this one."""
        return [kept.number for kept in self.all() if kept.equals(plan)]

    def keep(self, plan: KeptPlan) -> None:
        path = self.run.kept_plan(plan.number, self.rank)
        path.parent.mkdir(exist_ok=True)
        content = {**plan.plan, **{name: getattr(plan, name) for name in _OWN}}
        write_atomic(path, json.dumps(content, indent=1, default=str) + "\n")

    def clear(self) -> None:
        """For a new run in a folder in which another never trained a step."""
        for path in self.run.plans.glob("*.json"):
            path.unlink(missing_ok=True)

    def earlier(self, rollback: bool | int) -> KeptPlan:
        """The plan before the current one, or that of a number."""
        plans, current = {kept.number: kept for kept in self.all()}, self.current()
        if current is None:
            raise BadRun(f"{self.run.root} has kept no plan, so there is none to go back to. Try: resume=True.")
        if rollback is not True:
            if rollback not in plans:
                raise BadRun(f"{self.run.root} has no plan {rollback}. Try: rollback={_one_of(list(plans))}.")
            return plans[rollback]
        before = [number for number in plans if number < current.number]
        if not before:
            others = [number for number in plans if number != current.number]
            advice = f"rollback={_one_of(others)}" if others else "resume=True, which continues with it"
            raise BadRun(f"{self.run.root} trains with its first plan, so there is no earlier one. Try: {advice}.")
        return plans[before[-1]]

    def _paths(self) -> Iterator[Path]:
        for path in self.run.kept_plans():
            own = path.with_name(f"rank-{self.rank}-{path.name}")
            yield own if own.is_file() else path


def rolled_back(request: Request, before: Request | None, kept: KeptPlan) -> Request:
    """The request of a call, with the options of this plan wherever they are those of the call before.

    What was changed in this call stays as it is.
    """
    former = {} if before is None else before.options
    changed = {name for name in RESTORED if _plain_value(request.options.get(name)) != _plain_value(former.get(name))}
    options, origins = (
        {
            **{name: value for name, value in now.items() if name not in RESTORED or name in changed},
            **{name: value for name, value in then.items() if name not in changed},
        }
        for now, then in ((request.options, kept.options), (request.origins, kept.origins))
    )
    return replace(request, options=options, origins=origins, rollback=kept.number, plan_for=kept.plan_for)


def _one_of(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def _read(path: Path) -> KeptPlan | None:
    """None for a file that is damaged, or that is none of ours."""
    try:
        content = read_json(path.read_text(encoding="utf-8"))
        kept = KeptPlan(**{name: content.pop(name) for name in _OWN}, plan=content)
        return kept if kept.number == int(path.stem.split("-")[-1]) and kept.settings else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from JSON."""
    return {name: _plain_value(value) for name, value in settings.items()}


def _plain_value(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
