"""The plan a run trains with: one that was given, the one it had before, or a new fit, one for each kind of device.

Processes on equal devices share a plan: the first of each kind fits, the others wait, and on two cards of different size
both fit at once. A resumed run keeps its plan while what it was made for is the same, because the plan decides how steps
are cut and so the last bits of the result.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from brimful.errors import BadRun, UserError
from brimful.plan.cache import SHRUNK
from brimful.plan.fit import fit
from brimful.plan.options import FitOptions
from brimful.plan.plan import Choice, Plan
from brimful.plan.target import Target
from brimful.task import Task
from brimful.train.folder import RunFolder
from brimful.train.processes import Solo
from brimful.units import show_bytes

T = TypeVar("T")

NOT_THE_PLANS = ("cache", "device")
"""Options of a fit that may change without a new plan: a device is compared by what it is."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What a file that is no plan may raise."""


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What a plan of the run depends on."""

    task: Task
    data: str
    fitting: FitOptions
    target: Target
    group: Solo
    run: RunFolder
    given: str | None
    """`--plan`."""
    resumed_for: dict[str, Any] | None
    """What the plan in the run's folder was made for; None in a new run."""
    say: Callable[[str], object]
    note: Callable[[str], object]

    def plan(self) -> Plan:
        asked_bytes = self.fitting.memory_limit_bytes
        kinds = self.group.gather_objects((self.target.name, asked_bytes))
        leader = kinds.index((self.target.name, asked_bytes))
        leads = leader == self.group.rank
        plan = together(self.group, (lambda: self._given() or self._kept() or self._fitted()) if leads else None)[
            leader
        ]
        assert plan is not None
        return plan

    def keep(self, plan: Plan) -> None:
        """In the run's folder, by the first process, and by others that have a plan of their own."""
        mine = self.group.gather_objects(plan.key + plan.created)
        if mine.index(mine[self.group.rank]) == self.group.rank:
            plan.save(self.run.own_plan(self.group.rank))

    @property
    def made_for(self) -> dict[str, Any]:
        """Kept in run.json, to be compared when the run is resumed."""
        return {name: value for name, value in asdict(self.fitting).items() if name not in NOT_THE_PLANS}

    def _given(self) -> Plan | None:
        if self.given is None:
            return None
        try:
            plan = Plan.load(self.given)
        except UNREADABLE as error:
            raise BadRun(f"--plan {self.given}: it cannot be read as a plan ({type(error).__name__})") from None
        wrong = [
            f"it is for {plan.task}, not {self.task.name}" if plan.task != self.task.name else "",
            f"it is for {plan.processes} processes, not {self.group.size}" if plan.processes != self.group.size else "",
            f"it has a global batch of {plan.global_batch}, not {self.fitting.global_batch}"
            if self.fitting.global_batch not in (None, plan.global_batch)
            else "",
        ]
        if any(wrong):
            raise BadRun(f"--plan {self.given}: {'; '.join(filter(None, wrong))}")
        return self._as_given(plan)

    def _as_given(self, plan: Plan) -> Plan:
        """With its origin, and today's limit where one is asked for."""
        name = Path(str(self.given)).name
        origin = Choice(
            name="plan",
            requested=name,
            effective=name,
            reason=f"made {plan.created}, taken as it is",
            basis="asked",
        )
        limit = self.fitting.memory_limit_bytes
        if limit is None or limit == plan.limit_bytes:
            return replace(plan, choices=(origin, *plan.choices))
        said = f"as asked for; the plan was made for {show_bytes(plan.limit_bytes)}"
        choices = tuple(
            replace(one, requested=limit, effective=limit, reason=said) if one.name == "memory_limit" else one
            for one in plan.choices
        )
        return replace(plan, limit_bytes=limit, choices=(origin, *choices))

    def _kept(self) -> Plan | None:
        """The run's own plan, where it still holds."""
        path = self.run.plan(self.group.rank)
        if self.resumed_for is None or not path.is_file():
            return None
        before, now = {**self.resumed_for}, self.made_for
        changed = [name.replace("_", "-") for name in now if _plain(before.get(name)) != _plain(now[name])]
        try:
            plan = Plan.load(path)
        except UNREADABLE as error:
            self.note(f"a new plan is made, since {path.name} cannot be read ({type(error).__name__})")
            return None
        less = self.target.device.type == "cuda" and self.target.limit_bytes < SHRUNK * plan.limit_bytes
        if plan.device_name != self.target.name or less:
            changed.append(
                f"the device ({show_bytes(self.target.limit_bytes)} on {self.target.name} now, {show_bytes(plan.limit_bytes)} on {plan.device_name} before)"
            )
        if changed:
            self.note(f"a new plan is made, since the run began with other values of {', '.join(changed)}")
        return None if changed else plan

    def _fitted(self) -> Plan:
        return fit(self.task, data=self.data, progress=self.say, **asdict(self.fitting))


def together(group: Solo, work: Callable[[], T] | None) -> list[T | None]:
    """What each process found, in order of rank; None of those without work. One's error is everybody's."""
    found: T | None = None
    error: UserError | None = None
    try:
        found = None if work is None else work()
    except UserError as raised:
        if group.size == 1:
            raise
        error = raised
    everybody = group.gather_objects((found, None if error is None else str(error)))
    if error is not None:
        raise error
    failed = next((sentence for _, sentence in everybody if sentence is not None), None)
    if failed is not None:
        raise UserError(failed)
    return [one for one, _ in everybody]


def by_the_first(group: Solo, work: Callable[[], T]) -> T:
    """Done by the first process while the others wait."""
    return together(group, work if group.rank == 0 else None)[0]  # type: ignore[return-value]


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value
