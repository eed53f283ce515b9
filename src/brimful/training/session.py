"""A run put together from what was asked: data, plan, model, stepper, loader; then the loop.

    connect ─► prepare data ─► plan ─► model, optimizer ─► [take up a checkpoint] ─► loop ─► end
               first process   first of                     weights strictly,
               alone           each kind                    random numbers, position

Every process runs all of it; what only one may do is done by the first while the others wait.
"""

import gc
import math
import os
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from brimful.data.loader import Loader
from brimful.errors import BadOption, BadRun, BrimfulError, TaskError, UserError
from brimful.memory.meter import give_back
from brimful.memory.oom import empty_cache
from brimful.planning.plan import Choice, Plan
from brimful.planning.planner import SHRUNK, build
from brimful.planning.planner import plan as make_plan
from brimful.planning.probe import blame
from brimful.planning.search import as_choice
from brimful.planning.target import PlanOptions, Target, autocast_dtype, find_target
from brimful.step.distributed import SingleProcess, meet
from brimful.step.interface import Event
from brimful.step.stepper import Stepper
from brimful.task import Dataset, Task
from brimful.training import preflight, state
from brimful.training.checkpoint import Checkpoint, Checkpoints
from brimful.training.evaluate import Evaluator
from brimful.training.events import Journal
from brimful.training.loop import Ending, Hook, Loop
from brimful.training.metrics import FlopModel, Speedometer, peak_flops
from brimful.training.options import SAVE_S, Schedule, TrainOptions, as_steps, name_of, set_optimizer
from brimful.training.preflight import device_of, limited
from brimful.training.run import Links, RunFolder, RunLock, new_run, opened
from brimful.training.stop import Clock
from brimful.training.trackers import Tracker, open_trackers
from brimful.units import show_bytes, show_count

# The plan a run trains with: one that was given, the one it had before, or a new fit, one for each kind of device.
#
# Processes on equal devices share a plan: the first of each kind fits, the others wait, and on two cards of different size
# both fit at once. A resumed run keeps its plan while what it was made for is the same, because the plan decides how steps
# are cut and so the last bits of the result.


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
    fitting: PlanOptions
    target: Target
    group: SingleProcess
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
        return make_plan(self.task, data=self.data, progress=self.say, **asdict(self.fitting))


def together(group: SingleProcess, work: Callable[[], T] | None) -> list[T | None]:
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


def by_the_first(group: SingleProcess, work: Callable[[], T]) -> T:
    """Done by the first process while the others wait."""
    return together(group, work if group.rank == 0 else None)[0]  # type: ignore[return-value]


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value


Listener = Callable[[dict[str, Any]], object]
OWN_KINDS = ("oom", "grow", "thrash", "oversized")
"""Events of a step that differ between processes; the rest is told by the first alone."""
EVALUATIONS, LEAST_APART = 10, 50
"""Evaluations of a run unless asked otherwise, and the steps that lie between two of them at least."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a run is made of."""

    task: Task
    data: str
    run: RunFolder
    options: TrainOptions
    fitting: PlanOptions
    resume: bool = False
    request: dict[str, Any]
    """Task, data and options as they are kept in run.json."""
    hooks: Sequence[Hook] = ()
    listeners: Sequence[Listener] = ()
    """Hear every line of events.jsonl, on the first process."""
    say: Callable[[str], object] = lambda phrase: None
    """Hears what is being done before the first step."""

    def train(self) -> Ending:
        """Connect, and run on this process."""
        device = device_of(self.fitting, self.options)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            own = "nccl" if device.type == "cuda" else "gloo"
            preflight.check_connection(device, own if self.options.backend == "auto" else self.options.backend)
        group = meet(device)
        by_the_first(group, self.run.make)
        fitting = replace(self.fitting, device=str(device), processes=group.size)
        return _Running(self, fitting, find_target(fitting), group).train()


class _Running:
    """A session under way on one process."""

    def __init__(self, session: Session, fitting: PlanOptions, target: Target, group: SingleProcess) -> None:
        self.s, self.fitting, self.target, self.group = session, fitting, target, group
        self.options, self.task, self.run = session.options, session.task, session.run
        self.first = group.rank == 0
        self.clock = Clock(session.options.limit_s, session.options.hours)  # packing and fitting take time too
        self.loop: Loop | None = None
        self.trackers: Sequence[Tracker] = ()
        self.journal = Journal(self.run.events, (*session.listeners, self._track) if self.first else ())
        self.checkpoints = Checkpoints(self.run.checkpoints, keep=self.options.keep, tell=self._note)

    def train(self) -> Ending:
        """All of it; however it ends, the journal says so."""
        try:
            return self._ended(self._trained())
        except BrimfulError as error:
            self._tell("end", reason="failed", sentence=str(error))
            raise
        finally:
            for tracker in self.trackers:
                tracker.close()
            self.journal.close()
            self._let_go()

    def _let_go(self) -> None:
        """The process may go on: what the run took, on the device and on the host, is given back now."""
        model = None if self.loop is None else weakref.ref(self.loop.stepper.model)
        self.loop = None  # its parts refer to this object
        if model is not None and model() is not None:  # those of an evaluator refer to each other
            gc.collect()
        empty_cache(self.target.device)
        give_back()

    def _trained(self) -> Ending:
        by_the_first(self.group, self._open_trackers)
        set_optimizer(self.task, self.options)
        start = self._start()
        data = by_the_first(self.group, lambda: self.task.prepare(self.s.data, self.run.data, self.s.say))
        rows = self._read(data)
        valid = self._valid(rows)
        plan = self._plan(data, rows, valid)
        with limited(self.target, self.fitting):
            self.loop = self._loop(plan, rows, valid, start)
            return self.loop.run()

    def _open_trackers(self) -> None:
        self.trackers = open_trackers(self.options.tracker_names, self.run.root, self.s.request, self._note)

    def _track(self, event: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker(event)

    def _start(self) -> Checkpoint | None:
        """The checkpoint to go on from. The first process looks, and everybody takes the same."""
        found = by_the_first(self.group, self._find_start) if self.s.resume else None
        return None if found is None else Checkpoint.read(Path(found))  # the first has verified it

    def _find_start(self) -> str | None:
        for left in self.checkpoints.clean():
            self._note(f"{left.name} is what a killed save left; it is removed")
        found = self.checkpoints.newest()
        for skipped in found.skipped:
            self._note(f"{skipped.path.name} is skipped: {skipped.why}")
        if found.checkpoint is not None:
            return str(found.checkpoint.path)
        if found.skipped:
            why = "; ".join(f"{skipped.path.name}: {skipped.why}" for skipped in found.skipped)
            raise BadRun(
                f"--resume: no checkpoint in {self.run.checkpoints} is whole ({why}); begin a new run with another --run"
            )
        self._note("no checkpoint was written yet: the run begins at its first step")
        return None

    def _read(self, data: str) -> Dataset:
        with blame(self.task, "rows", data):
            rows = self.task.rows(data)
            count = len(rows)
        if not count:
            raise TaskError(f"task {self.task.name}: there are no rows in {data}")
        return rows

    def _valid(self, rows: Dataset) -> Dataset | None:
        valid = self.options.valid
        if valid is None:
            return None
        prepare = lambda: self.task.prepare(valid, self.run.data, self.s.say, like=rows, name="valid")  # noqa: E731
        return self._read(by_the_first(self.group, prepare))

    def _plan(self, data: str, rows: Dataset, valid: Dataset | None) -> Plan:
        planning = Planning(
            task=self.task, data=data, fitting=self.fitting, target=self.target, group=self.group, run=self.run,
            given=self.options.plan, resumed_for=self.s.request.get("plan_for") if self.s.resume else None,
            say=self.s.say, note=self._note,
        )  # fmt: skip
        plan, self.planning = planning.plan(), planning
        self.prepared = _places(self.run.root, data, valid)
        added = self._choices(plan, rows)
        planned = [
            replace(one, requested=None) if one.name == "device" and self.s.fitting.device == "auto" else one
            for one in plan.choices
            if one.name not in {new.name for new in added}  # of a run that is resumed
        ]
        return replace(plan, choices=(*planned, *added))

    def _steps(self, plan: Plan, rows: Dataset) -> int:
        return self.options.max_steps or max(1, math.ceil(self.options.epochs * len(rows) / plan.global_batch))

    def _choices(self, plan: Plan, rows: Dataset) -> tuple[Choice, ...]:
        """What training adds to the plan's own."""
        asked, steps = self.options, self._steps(plan, rows)
        passes = steps * plan.global_batch / len(rows)
        every = None if asked.save_every is None else f"every {show_count(asked.save_every, 'step')}"
        warmup = show_count(as_steps(asked.warmup, steps), "step")
        why = ("the task's own" if asked.optimizer is None else "as asked for") + ", its rate as asked for" * (
            asked.lr is not None
        )
        left = "" if asked.schedule == "constant" else f", {asked.min_lr:.0%} of the rate left at the end"
        return (
            *(as_choice(*one, "asked") for one in self.task.remarks(rows)),
            as_choice("steps", asked.max_steps, steps, f"{passes:.3g} passes over {len(rows):,} rows, {plan.global_batch} a step", "measured"),
            as_choice("optimizer", asked.optimizer, name_of(self.task), why, "asked"),
            as_choice("schedule", asked.schedule, asked.schedule, f"{warmup} of warm-up{left}", "asked"),
            as_choice("save", every, every or f"every {SAVE_S / 60:.0f} min", "a checkpoint when so much has passed, and at the end", "asked"),
        )  # fmt: skip

    def _loop(self, plan: Plan, rows: Dataset, valid: Dataset | None, start: Checkpoint | None) -> Loop:
        asked, steps = self.options, self._steps(plan, rows)
        position = None if start is None else self._checked(start, rows, steps)
        _seed(self.fitting.seed)
        model = self._model(self.target.device, start)
        speedometer = self._speedometer(plan, model, rows)  # before checkpointing makes the model count twice
        optimizer = self.task.optimizer(model)
        _seed(self.fitting.seed + self.group.rank)  # dropout differs between processes
        stepper = self._stepper(plan, model, optimizer)
        warmup = as_steps(asked.warmup, steps)
        loop = Loop(
            task=self.task,
            rows=rows,
            stepper=stepper,
            optimizer=optimizer,
            loader=self._loader(plan, rows, stepper),
            schedule=Schedule(curve=asked.schedule, steps=steps, warmup=warmup, decay=asked.decay, floor=asked.min_lr),
            checkpoints=self.checkpoints,
            journal=self.journal if self.first else Journal(None),
            clock=self.clock,
            speedometer=speedometer,
            evaluator=None if valid is None else self._evaluator(plan, model, valid),
            best_by=asked.best,
            eval_every=asked.eval_every or max(LEAST_APART, steps // EVALUATIONS),
            save_every=asked.save_every,
            save_s=SAVE_S,
            hooks=(Links(self.run, self._note), *self.s.hooks) if self.first else self.s.hooks,
        )
        at_once = asked.keep + 1 + (valid is not None)
        needed = state.needed_bytes(model, optimizer)
        by_the_first(self.group, lambda: self.checkpoints.check_space(needed, saves=at_once))
        if start is not None and position is not None:
            loop.take_up(start.path, position)
        self._begin(plan, steps, position)
        if self.target.device.type != "cpu" or self.fitting.memory_limit is not None:
            stepper.rehearse()
        return loop

    def _checked(self, start: Checkpoint, rows: Dataset, steps: int) -> state.Position:
        position = state.read_position(start.path)
        _same_rows(position, rows)
        if position.step > steps:
            raise BadOption(
                f"--max-steps {steps}: the run has done {position.step} already; ask for more, or leave it out"
            )
        return position

    def _stepper(self, plan: Plan, model: nn.Module, optimizer: Optimizer) -> Stepper:
        return Stepper(
            model, optimizer, self.task, plan, clip_norm=self.options.clip_norm or None,
            skip_oversized=self.options.skip_oversized, allow_inexact=self.fitting.allow_inexact,
            on_event=self._stepped, checkpoint=self._newest,
        )  # fmt: skip

    def _loader(self, plan: Plan, rows: Dataset, stepper: Stepper) -> Loader:
        return Loader(
            rows, self.task, plan, seed=self.fitting.seed, mix=self.options.mix, rank=self.group.rank,
            speeds=stepper.speeds, barred=stepper.barred,
            listener=lambda sentence, details: self._tell("note", sentence=sentence, **details),
        )  # fmt: skip

    def _model(self, device: torch.device, start: Checkpoint | None) -> nn.Module:
        """With the weights to begin with, or a checkpoint's: those are read onto the device, never through the host."""
        if start is None:
            model = self.task.initial_model().to(device).train()
        else:
            model = build(self.task, device)
            state.load_weights(start.path, model)
        give_back()  # what the host held of a model that lies on a card now
        return model

    def _speedometer(self, plan: Plan, model: nn.Module, rows: Dataset) -> Speedometer:
        autocast = autocast_dtype(plan.levers.precision, self.target.device)
        flops, how = FlopModel.measure(self.task, model, self.target.device, plan.shape, autocast=autocast)
        peak, reached = peak_flops(self.target.device, autocast or next(model.parameters()).dtype)
        self._tell("flops", sentence=f"MFU: {how}; the device {reached}")
        return Speedometer(rows, self.group, flops=flops, peak_flops=peak, limit_bytes=plan.limit_bytes)

    def _evaluator(self, plan: Plan, model: nn.Module, valid: Dataset) -> Evaluator:
        return Evaluator(
            self.task, model, valid, device=self.target.device, limit_bytes=plan.limit_bytes, fill=plan.fill,
            autocast=autocast_dtype(plan.levers.precision, self.target.device), max_rows=self.options.eval_rows,
            generate_rows=self.options.generate_rows, seed=self.fitting.seed, group=self.group, tell=self._note,
        )  # fmt: skip

    def _begin(self, plan: Plan, steps: int, position: state.Position | None) -> None:
        """Only now, when everything asked for has proved to work, does the run remember it."""
        self.planning.keep(plan)
        if self.first:
            self.run.remember({**self.s.request, "prepared": self.prepared, "plan_for": self.planning.made_for})
        resumed = position is not None
        self._tell(
            "begin",
            run=str(self.run.root),
            steps=steps,
            processes=self.group.size,
            resumed=resumed,
            request=self.s.request,
        )
        self._tell("plan", **plan.to_json())
        if position is not None:
            self._tell(
                "resume",
                step=position.step,
                samples=position.loader["samples"],
                processes_before=len(position.own),
                sentence=f"going on after step {position.step}",
            )

    def _ended(self, ending: Ending) -> Ending:
        how = {
            "finished": f"{'the only step is' if ending.step == 1 else f'all {ending.step} steps are'} done",
            "interrupted": f"stopped after step {ending.step} and saved",
            "time-limit": f"the time limit was reached after step {ending.step}; saved",
            "window": f"the window closed after step {ending.step}; saved",
        }[ending.reason]
        checkpoint = None if ending.checkpoint is None else str(ending.checkpoint)
        self._tell("end", reason=ending.reason, step=ending.step, loss=ending.loss, checkpoint=checkpoint, sentence=how)
        return ending

    def _stepped(self, event: Event) -> None:
        """A step's own event: from every process where it differs."""
        if self.first or event.event in OWN_KINDS:
            self.journal.write(**{**event.to_json(), "process": self.group.rank})

    def _note(self, sentence: str) -> None:
        self._tell("note", sentence=sentence)

    def _tell(self, event: str, **fields: Any) -> None:
        if self.first:
            self.journal.write(event, **{"step": self.loop.step if self.loop else 0, **fields})

    def _newest(self) -> str | None:
        newest = None if self.loop is None else self.loop.newest
        return None if newest is None else str(newest)


def _places(run: Path, data: str, valid: Dataset | None) -> dict[str, str | None]:
    """Where the prepared rows lie, within the run where they are: it may be moved, and the raw files be gone."""

    def place(path: Path) -> str:
        path = path.absolute()
        return str(path.relative_to(run.absolute())) if path.is_relative_to(run.absolute()) else str(path)

    other = getattr(valid, "path", None)
    return {
        "data": place(Path(data)) if os.path.exists(data) else data,  # noqa: PTH110 - Path's fails on what is no path
        "valid": None if other is None else place(Path(other)),
    }


def _same_rows(position: state.Position, rows: Dataset) -> None:
    now = str(getattr(rows, "fingerprint", ""))
    if position.data and position.data != now:
        raise BadRun(
            "--resume: the data are not those the run was trained on so far (another fingerprint): give the same DATA, or start "
            "a new run --from this one's model"
        )


def _seed(seed: int) -> None:
    """Python's, NumPy's and torch's generators; processes share it, since every weight is spread from the first."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# `brimful.train`: a whole run from Python, in this process, or in each process of a launcher's job.
#
#     ending = brimful.train(task, "rows.parquet", run="runs/mine", max_steps=1000, memory_limit="20GiB")
#
# The command line does the same in processes of its own, below a parent that survives them.


def train(
    task: Task,
    data: str | Path,
    *,
    hooks: Sequence[Hook] = (),
    listeners: Sequence[Listener] = (),
    say: Callable[[str], object] = lambda phrase: None,
    **asked: Any,
) -> Ending:
    """Train a task on data that its `rows` reads, and come back when all steps are done or the run was stopped and saved.

    Keywords are those of `TrainOptions` and `PlanOptions`. `hooks` act at the loop's points, `listeners` hear every line of
    events.jsonl, `say` what is done before the first step.
    """
    if isinstance(task, type) and issubclass(task, Task):
        task = task()
    if not isinstance(task, Task):
        raise TaskError(f"train takes a brimful.Task, not a {type(task).__name__}")
    if not isinstance(data, (str, os.PathLike)):
        raise TaskError(
            f"train takes DATA as a path that the task's rows() reads, not a {type(data).__name__}: return rows that are in "
            "memory from rows() itself"
        )
    options, fitting = split(asked)
    _check_processes("gpus" if options.gpus else "processes", options.gpus or fitting.processes)
    root = Path(options.run) if options.run else new_run(task.name)
    run, resume = opened(root, resume=options.resume)
    before = run.remembered() if resume and run.knows_its_request else {}
    request = {**before, "task": task.name, "data": str(data), "asked": _plain_api(asked)}
    session = Session(
        task=task, data=str(data), run=run, options=options, fitting=fitting, resume=resume, request=request,
        hooks=hooks, listeners=listeners, say=say,
    )  # fmt: skip
    with RunLock(root) if os.environ.get("RANK", "0") == "0" else nullcontext():
        return session.train()


def _check_processes(word: str, asked: int) -> None:
    """A call is one process: several are started by the command line or by a launcher."""
    there = [int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if asked not in (1, *there):
        raise BadOption(
            f"{word}={asked}: brimful.train trains in the process that calls it, and there {'is' if there[0] == 1 else 'are'} "
            f"{there[0]}; start the script with `torchrun --nproc-per-node {asked}`, or use `brimful train --{word} {asked}`"
        )


def split(asked: dict[str, Any]) -> tuple[TrainOptions, PlanOptions]:
    """Each class its own; a word that neither knows is refused."""
    of_train, of_fit = ({field.name for field in fields(owner)} for owner in (TrainOptions, PlanOptions))
    if unknown := [word for word in asked if word not in of_train | of_fit]:
        known = ", ".join(sorted(of_train | of_fit))
        raise BadOption(f"unknown option {', '.join(map(repr, unknown))}; train takes {known}")
    train_part = {word: value for word, value in asked.items() if word in of_train}
    return TrainOptions.of(train_part), PlanOptions.of({word: asked[word] for word in asked if word in of_fit})


def _plain_api(asked: dict[str, Any]) -> dict[str, Any]:
    return {word: str(value) if isinstance(value, Path) else value for word, value in asked.items()}
