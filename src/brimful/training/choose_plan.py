"""Which plan a run trains with: the one that was given, the one it had before, or a new one for each kind of device.

Ranks on equal devices share a plan: the first of each kind makes it while the others wait, and on two GPUs of different
size both are made at once. A resumed run keeps its plan as long as it was made for the same options and device, because the
plan decides how steps are split and so the last bits of the result. One that goes back to an earlier plan takes that instead.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from brimful.errors import BadRun
from brimful.planning.plan import Choice, Plan
from brimful.planning.plan_options import PlanOptions
from brimful.planning.planner import SHRUNK, find_plan, source_hash
from brimful.planning.target import Target
from brimful.step.distributed import SingleProcess, gather_results
from brimful.task import Dataset, Task
from brimful.training.plan_history import RESTORED, KeptPlan, PlanHistory
from brimful.training.run import Request, RunFolder
from brimful.units import show_bytes

NOT_COMPARED = ("cache", "device", "plan_seconds", "table")
"""Options that may change without a new plan: a device is compared by what it is."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What a file that is not a plan may raise."""


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """Everything that the plan of a run depends on."""

    task: Task
    rows: Dataset
    options: PlanOptions
    target: Target
    group: SingleProcess
    run: RunFolder
    file: str | None
    """`--plan`."""
    steps: int | None = None
    """Of the whole run."""
    averages: bool = False
    """Whether an average of the weights (`--ema`) takes memory as well."""
    made_before_for: dict[str, Any] | None
    """The options that the plan in the run's folder was made for; None in a new run."""
    number: int | None = None
    """Of the kept plan to go back to."""
    progress: Callable[[str], object]
    note: Callable[[str], object]

    def plan(self) -> Plan:
        kind = (self.target.name, self.options.memory_limit_bytes)
        leader = self.group.gather_objects(kind).index(kind)
        work = (lambda: self._from_file() or self._from_run() or self._new()) if leader == self.group.rank else None
        plan = gather_results(self.group, work)[leader]
        assert plan is not None
        return plan

    def kept(self, plan: Plan, request: Request) -> KeptPlan:
        """The plan as it is kept, before it has a number."""
        task_class: type = type(self.task)
        options, origins = (
            {name: value for name, value in values.items() if name in RESTORED}
            for values in (request.options, request.origins)
        )
        return KeptPlan(
            number=0,
            plan=plan.to_json(),
            options=options,
            origins=origins,
            plan_for=self.made_for,
            code=source_hash(task_class),
        )

    def save(self, plan: Plan, kept: KeptPlan, *, new_run: bool) -> Plan:
        """In the run's folder, by rank 0 and by others that have a plan of their own. Returns the plan with its number: that of
        a kept plan if it equals one, else the next.
        """
        rank, history = self.group.rank, PlanHistory(self.run, self.group.rank)
        if rank == 0 and new_run:
            history.clear()
        keys = self.group.gather_objects(plan.key + plan.created)
        is_own = keys.index(keys[rank]) == rank
        before, newest = history.current(), max((kept_plan.number for kept_plan in history.all()), default=0)
        answers = self.group.gather_objects(
            (history.numbers_of(kept) if is_own else None, before and before.number, newest)
        )
        equal = set.intersection(*(set(numbers) for numbers, _, _ in answers if numbers is not None))
        _, current, newest = answers[0]
        number = current if current in equal else max(equal, default=newest + 1)
        plan = replace(plan, number=number)
        if is_own:
            history.keep(replace(kept, number=number, plan=plan.to_json()))
            plan.save(self.run.own_plan(rank))
        return plan

    @property
    def made_for(self) -> dict[str, Any]:
        """Kept in run.json, and compared when the run is resumed."""
        options = {name: value for name, value in asdict(self.options).items() if name not in NOT_COMPARED}
        return {**options, "ema": self.averages or None}

    def _from_file(self) -> Plan | None:
        if self.file is None:
            return None
        try:
            plan = Plan.load(self.file)
        except UNREADABLE as error:
            raise BadRun(
                f"plan={self.file!r} cannot be read as a plan ({type(error).__name__}). Try: a file that Plan.save wrote."
            ) from None
        problems = []
        if plan.task != self.task.name:
            problems.append(f"is for task {plan.task}, not {self.task.name}")
        if plan.processes != self.group.size:
            problems.append(f"is for {plan.processes} processes, not {self.group.size}")
        if self.options.global_batch not in (None, plan.global_batch):
            problems.append(f"has a global batch of {plan.global_batch}, not {self.options.global_batch}")
        if self.options.weights not in (None, plan.levers.weights):
            problems.append(f"has {plan.levers.weights or 'unconverted'} weights, not {self.options.weights}")
        if problems:
            raise BadRun(f"plan={self.file!r} {' and '.join(problems)}. Try: a new plan, without plan=.")
        name = Path(self.file).name
        origin = Choice.of("plan", name, name, f"made {plan.created}", "asked")
        limit = self.options.memory_limit_bytes
        if limit is None or limit == plan.limit_bytes:
            return replace(plan, choices=(origin, *plan.choices))
        reason = f"as requested; the plan was made for {show_bytes(plan.limit_bytes)}"
        choices = tuple(
            replace(choice, requested=limit, effective=limit, reason=reason)
            if choice.name == "memory_limit"
            else choice
            for choice in plan.choices
        )
        return replace(plan, limit_bytes=limit, choices=(origin, *choices))

    def _from_run(self) -> Plan | None:
        """The run's own plan, if it still holds."""
        path = self.run.plan(self.group.rank) if self.number is None else self._path_of(self.number)
        if self.made_before_for is None or not path.is_file():
            return None
        before, now = self.made_before_for, self.made_for
        changed = [name.replace("_", "-") for name in now if _plain(before.get(name)) != _plain(now[name])]
        try:
            plan = Plan.load(path)
        except UNREADABLE as error:
            self.note(f"making a new plan because {path.name} cannot be read ({type(error).__name__})")
            return None
        less = self.target.device.type == "cuda" and self.target.limit_bytes < SHRUNK * plan.limit_bytes
        if plan.device_name != self.target.name or less:
            was, is_now = show_bytes(plan.limit_bytes), show_bytes(self.target.limit_bytes)
            changed.append(f"the device ({is_now} on {self.target.name} now, {was} on {plan.device_name} before)")
        if changed:
            self.note(f"making a new plan because this changed since the run began: {', '.join(changed)}")
        return None if changed else plan

    def _path_of(self, number: int) -> Path:
        own = self.run.kept_plan(number, self.group.rank)
        return own if own.is_file() else self.run.kept_plan(number)

    def _new(self) -> Plan:
        return find_plan(self.task, self.options, self.target, self.rows, steps=self.steps, progress=self.progress)


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value
