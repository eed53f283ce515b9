"""A run put together from a request: data, plan, model, stepper, loader; then the loop.

    connect ─► prepare data ─► plan ─► model, optimizer ─► [resume from a checkpoint] ─► record the plan ─► loop ─► end
               rank 0 alone    one for                       weights strictly,
                               each kind of device           random state, position

Every rank runs all of it; what only one may do is done by rank 0 while the others wait. `brimful.train` runs it in the
calling process; the command line does so in processes of its own, below a parent that outlives them (`launch`).
"""

import gc
import os
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from brimful.data.loader import Loader
from brimful.errors import BadOption, BadRun, BrimfulError, DeviceBusy, TaskError, in_one_line, kind_of, will_repeat
from brimful.memory.meter import trim_heap
from brimful.memory.oom import empty_cache
from brimful.planning.levers import with_weights
from brimful.planning.plan import Plan
from brimful.planning.plan_options import AutoCheckpointed, AutoOnOff, PlanOptions, Weights
from brimful.planning.probe import build_model, read_rows, task_errors, with_dummy
from brimful.planning.target import Target, autocast_dtype, deterministic_algorithms, find_target, idle_gpus
from brimful.show import open_view
from brimful.step.distributed import SingleProcess, join, on_rank_zero
from brimful.step.result import Event
from brimful.step.stepper import Stepper
from brimful.task import Dataset, Precision, Shape, Task
from brimful.training import state
from brimful.training.average import WeightAverage
from brimful.training.checkpoint import Checkpoint, Checkpoints, link
from brimful.training.choose_plan import PlanChoice
from brimful.training.connection import check_connection
from brimful.training.evaluate import Evaluator, TrainingContext
from brimful.training.events import Journal, Listener
from brimful.training.loop import Ending, Hook, Loop, rows_fingerprint
from brimful.training.metrics import FlopModel, Speedometer, peak_flops
from brimful.training.monitor import Monitor, begin_figures, gather_places
from brimful.training.optimizer import Schedule, with_optimizer
from brimful.training.options import SAVE_S, Backend, Curve, OptimizerName, TrainOptions
from brimful.training.patience import Patience
from brimful.training.plan_history import Comparison, PlanHistory, compare, rolled_back
from brimful.training.run import RUN_OPTIONS, Request, RunFolder, RunLock, absolute, new_run, open_run, pick
from brimful.training.run_log import RunLog
from brimful.training.run_plan import (
    run_steps,
    same_rates,
    with_choices,
    with_own_schedule,
    with_run_warnings,
    with_schedule,
    with_sources,
    with_time,
)
from brimful.training.stop import TimeLimit
from brimful.training.trackers import Tracker, open_trackers
from brimful.units import show_count

Data = str | os.PathLike[str] | Dataset
RANK_EVENTS = ("oom", "grow", "thrash", "oversized")
"""Events of a step that differ between ranks; the others are written by rank 0 alone."""
EVALUATIONS, LEAST_STEPS_APART = 10, 50
"""Without `eval_every`: evaluations in a run, and the least steps between two of them."""


def train(
    task: Task,
    data: Data,
    *,
    valid: Data | None = None,
    run: str | os.PathLike[str] | None = None,
    resume: bool = False,
    rollback: int | bool = False,
    max_steps: int | None = None,
    epochs: float = 1.0,
    lr: float | None = None,
    optimizer: OptimizerName | None = None,
    weight_decay: float = 0.01,
    schedule: Curve = "cosine",
    warmup: str | int = "2%",
    decay: float = 0.2,
    min_lr: float = 0.1,
    clip_norm: float = 1.0,
    ema: float | None = None,
    plan: str | os.PathLike[str] | None = None,
    mix: str | None = None,
    skip_oversized: bool = False,
    eval_every: int | None = None,
    eval_rows: int = 1000,
    generate_rows: int = 100,
    best: str = "loss",
    patience: int | None = None,
    save_every: int | None = None,
    keep: int = 2,
    time_limit: str | None = None,
    backend: Backend = "auto",
    trackers: str | None = None,
    global_batch: int | None = None,
    micro_batch: int | Literal["auto"] = "auto",
    memory_limit: int | str | None = None,
    host_limit: int | str | None = None,
    fill: float = 0.85,
    device: str = "auto",
    processes: int = 1,
    layout: Literal["auto", "padded", "packed"] = "auto",
    compile: AutoOnOff = "auto",
    checkpointing: AutoCheckpointed = "auto",
    precision: Precision | None = None,
    weights: Weights | None = None,
    cuda_graphs: AutoOnOff = "auto",
    cudnn_attention: AutoOnOff = "auto",
    workers: int | Literal["auto"] = "auto",
    prefetch: int | Literal["auto"] = "auto",
    pin_memory: AutoOnOff = "auto",
    lengths: Shape | None = None,
    allow_inexact: bool = False,
    deterministic: bool = False,
    plan_seconds: float | None = None,
    table: bool = False,
    cache: bool = True,
    seed: int = 0,
    quiet: bool = False,
    hooks: Sequence[Hook] = (),
    listeners: Sequence[Listener] = (),
    progress: Callable[[str], object] = lambda phrase: None,
) -> Ending:
    """Train a task: plan, train, evaluate, save. Returns when all steps are done, or when the run was stopped and saved.

    >>> import brimful, tempfile, torch
    >>> class Regression(brimful.Task):
    ...     def model(self):
    ...         return torch.nn.Linear(8, 1)
    ...     def loss(self, model, row):
    ...         return model(row).square().mean()
    >>> run = tempfile.mkdtemp()
    >>> rows = list(torch.randn(100, 8))
    >>> ending = brimful.train(Regression(), rows, run=run, max_steps=3, global_batch=10, device="cpu", cache=False)
    >>> ending.reason, ending.step
    ('finished', 3)

    Args:
        task: What to train. It is not changed.
        data: A path that `task.rows` reads, or any dataset with a length and an index: a list, a
            `torch.utils.data.Dataset`, a `datasets.Dataset`.
        valid: Rows to evaluate on, like `data`.
        run: The run's folder. Default: runs/TASK-DATE-TIME.
        resume: Continue from the newest intact checkpoint in `run`. Give the same task, data and options again.
            Where no run was begun yet, it begins.
        rollback: Resume with the plan before the current one, or with the plan of this number in RUN/plans, and with the
            options of that time. Options that differ from those of the last call win.
        max_steps: Optimizer steps in all. Default: as many as `epochs` take.
        epochs: Passes over the data, if `max_steps` is not given.
        lr: The peak learning rate. Default: the task's value.
        optimizer: "adamw", "adafactor" or "adamw8bit". Default: the task's optimizer, else adamw.
        weight_decay: Weight decay. Biases and norms are not decayed.
        schedule: How the learning rate falls: "constant", "linear", "cosine" or "wsd". `task.schedule` wins over it.
        warmup: Steps, or a share of the run such as "2%", in which the learning rate rises. Steps are at most half of
            the run.
        decay: The share of the run in which "wsd" falls.
        min_lr: The learning rate at the end, as a share of the peak.
        clip_norm: Clip the norm of the gradients to this; 0 disables clipping.
        ema: Average the weights over the steps with this decay, such as 0.999. The average is what is evaluated and
            saved.
        plan: Train with this plan, a JSON file, instead of making one.
        mix: "window:N" sorts rows by length over N steps, for less padding.
        skip_oversized: Skip and report a row that does not fit even alone, instead of stopping.
        eval_every: Steps between evaluations. Default: ten in a run, at least 50 steps apart.
        eval_rows: Rows to evaluate on, the same each time.
        generate_rows: How many of those rows the task's own scores use.
        best: What decides which checkpoint is the best: "loss", or a score of the task.
        patience: Stop after this many evaluations in a row without a better one. Without rows to evaluate on, the mean
            training loss of `eval_every` steps takes the place of an evaluation.
        save_every: Steps between checkpoints. Default: one every ten minutes. The last step is always saved.
        keep: Newest checkpoints to keep, besides the best one.
        time_limit: Save and leave after this time, such as "8h".
        backend: What several processes communicate through: "auto", "nccl" or "gloo".
        trackers: Also log to these, separated by commas: tensorboard, wandb, mlflow, trackio.
        global_batch: Rows per optimizer step. This and the following are as in `brimful.plan`.
        micro_batch: Rows per forward and backward, at most.
        memory_limit: Memory to use at most, such as "20GiB".
        host_limit: Host RAM to use at most.
        fill: The share of the memory limit to plan for.
        device: "cpu", "cuda", "cuda:1", "mps" or "xpu".
        processes: Processes of the job. A call trains in its own process; torchrun starts several.
        layout: "padded" or "packed".
        compile: Compiled blocks.
        checkpointing: Gradient checkpointing of every block ("on"), of every second or third ("every-2"), or of none.
        precision: The precision of autocast.
        weights: The dtype of the weights, "fp32" or "bf16". A resumed run keeps it.
        cuda_graphs: Micro-batches replayed as a CUDA graph.
        cudnn_attention: cuDNN's attention on CUDA.
        workers: Loader workers per process.
        prefetch: Steps that each worker reads ahead.
        pin_memory: Pinned host memory.
        lengths: The lengths to plan for.
        allow_inexact: Split a step even if that changes its result.
        deterministic: Let nothing that is timed decide how steps are split, and use torch's deterministic algorithms.
        plan_seconds: Time for the probes of a plan.
        table: Also try every other setting of the levers while planning, and show all that was tried in a table.
        cache: Reuse a saved plan with the same key.
        seed: Seed of weights, order of rows and dropout. It does not govern how steps are split, which changes the
            dropout masks: a new plan may split them in another way unless `deterministic` is set.
        quiet: Print neither the plan nor the progress.
        hooks: Your code at points of the loop: see `Hook`.
        listeners: Called with every event as a dict, on rank 0.
        progress: Called with a phrase for what is being done before the first step.

    Raises:
        UserError: A request that cannot work.
    """
    arguments = locals()
    if isinstance(task, type) and issubclass(task, Task):
        task = task()
    if not isinstance(task, Task):
        raise TaskError(f"train() was called with {kind_of(task)}. Try: a brimful.Task.")
    paths = {name: None if path is None else os.fspath(path) for name, path in (("run", run), ("plan", plan))}
    own = {**paths, "resume": resume, "rollback": rollback, "valid": _as_path(valid)}
    train_options = TrainOptions(**{**pick(arguments, TrainOptions), **own})
    plan_options = PlanOptions(**pick(arguments, PlanOptions))
    _check_processes(processes)
    root = Path(run) if run is not None else new_run(task.name)
    folder, resume = open_run(root, resume=resume, rollback=rollback, may_begin=True)
    before = folder.read_request() if resume and folder.request_file.is_file() else None
    request = Request(
        task=task.name, data=_as_path(data), run=str(root), resume=resume,
        options={**_changed(train_options, without=RUN_OPTIONS), **_changed(plan_options)},
        task_options=_task_options(task), plan_for=None if before is None else before.plan_for,
    )  # fmt: skip
    if rollback:
        request = rolled_back(request, before, PlanHistory(folder).earlier(rollback))
    if before is not None and before.task_options != request.task_options:
        raise BadOption("resume=True needs the task options the run began with. Try: a new run, in another folder.")
    is_first = os.environ.get("RANK", "0") == "0"
    with (
        folder.removed_if_not_begun() if is_first else nullcontext(),
        RunLock(root) if is_first else nullcontext(),
        RunLog(root) as run_log,
        open_view(quiet=quiet or not is_first) as view,
    ):

        def status(phrase: str) -> None:
            view.status(phrase)
            progress(phrase)

        return Session(
            task=task,
            data=data,
            valid=valid,
            request=request,
            hooks=hooks,
            listeners=(view, *listeners),
            progress=status,
            run_log=run_log,
        ).train()


def _as_path(data: Data | None) -> str | None:
    return os.fspath(data) if isinstance(data, (str, os.PathLike)) else None


def _changed(options: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    return {
        option.name: getattr(options, option.name)
        for option in fields(options)
        if option.name not in without and getattr(options, option.name) != option.default
    }


def _task_options(task: Task) -> dict[str, Any]:
    """Those set on the task, with absolute paths, as run.json keeps them."""
    if not is_dataclass(task.options) or isinstance(task.options, type):
        return {}
    values = {}
    for option in fields(task.options):
        value = getattr(task.options, option.name)
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if value != default:
            values[option.name.rstrip("_")] = absolute(str(value)) if option.metadata.get("path") else value
    return values


def _check_best(task: Task, best: str) -> None:
    """Before rows are read: a score that this task never has would end the run at its first evaluation."""
    if best != "loss" and task.scores is not None and best not in task.scores:
        raise BadOption(f"best={best!r} is not a score of task {task.name}. Try: {', '.join(['loss', *task.scores])}.")


def _check_processes(processes: int) -> None:
    """A call is one process: several are started by the command line or by a launcher."""
    sizes = [int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if processes not in (1, *sizes):
        raise BadOption(
            f"processes={processes} cannot be started by train(), which runs in the calling process. "
            f"Try: torchrun --nproc-per-node {processes} SCRIPT, or `brimful train`."
        )


def _connect(target: Target, options: TrainOptions, plan_options: PlanOptions) -> SingleProcess:
    """The process group, after a test all-reduce."""
    device, local = target.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if options.backend == "nccl" and device.type != "cuda":
        raise BadOption("backend='nccl' connects GPUs, and this run is on the CPU. Try: backend='gloo'.")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if ":" not in plan_options.device and local > count:
            raise DeviceBusy(f"processes={local} needs as many GPUs, and torch sees {count}. Try: processes={count}.")
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        default = "nccl" if device.type == "cuda" else "gloo"
        check_connection(device, default if options.backend == "auto" else options.backend)
    return join(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """Rows and plan of a run, before there is a model."""

    rows: Dataset
    valid: Dataset | None
    prepared: dict[str, str | None]
    """Where the rows were read from."""
    choice: PlanChoice
    plan: Plan
    steps: int


class Session:
    """One run on one rank: it finds the device and the other ranks when it is made, and trains once."""

    def __init__(
        self,
        *,
        task: Task,
        data: Data,
        request: Request,
        valid: Data | None = None,
        hooks: Sequence[Hook] = (),
        listeners: Sequence[Listener] = (),
        progress: Callable[[str], object] = lambda phrase: None,
        run_log: RunLog | None = None,
    ) -> None:
        """`listeners` are called with every line of events.jsonl but samples, on rank 0; `run_log` on every rank."""
        self.request, self.options = request, request.train_options
        self.time_limit = TimeLimit(self.options.time_limit_s)  # preparing data and planning count
        self.target = find_target(request.plan_options)
        self.group = _connect(self.target, self.options, request.plan_options)
        self.folder = RunFolder(Path(request.run))
        on_rank_zero(self.group, self.folder.create)
        self.data, self.valid, self.hooks = data, valid, hooks
        self._show_progress, self._run_log = progress, run_log
        self.plan_options = replace(
            request.plan_options, device=str(self.target.device), processes=self.group.size
        )  # what was requested as `auto` is known now
        self.task = with_optimizer(task, self.options)
        self.task.host_limit_bytes = request.plan_options.host_limit_bytes and self.target.host_limit_bytes
        self.task.use_device(self.target.device, request.plan_options.precision)
        _check_best(self.task, self.options.best)
        self.first = self.group.rank == 0
        self.loop: Loop | None = None
        self.trained = 0
        """Steps that this session has trained; those before a resume do not count."""
        self.trackers: Sequence[Tracker] = ()
        events = None if request.dry_run else self.folder.events
        own_listeners = () if run_log is None else (run_log,)
        self.journal = Journal(events, (*own_listeners, *((*listeners, self._track) if self.first else ())))
        self.places = gather_places(self.group, self.target.device)
        self.monitor = Monitor(
            self.places,
            self.group.rank,
            write=self.journal.append,
            step=lambda: 0 if self.loop is None else self.loop.step,
            workers=lambda: 0 if self.loop is None else self.loop.loader.workers,
        )
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep=self.options.keep, note=self._note)

    def train(self) -> Ending:
        """All of it; however it ends, the journal says so."""
        try:
            with task_errors(self.task):
                return self._end(self._run())
        except Exception as error:
            sentence = str(error) if isinstance(error, BrimfulError) else in_one_line(error)
            self._write("end", reason="failed", sentence=sentence, repeats=will_repeat(error))
            raise
        finally:
            for tracker in self.trackers:
                tracker.close()
            self.journal.close()
            self._free_memory()

    def dry_run(self) -> dict[str, Any]:
        """The `plan` event that training would begin with. Nothing is written but prepared data and the saved plan.

        Weights are read, and a checkpoint is verified, as training would.
        """
        try:
            with task_errors(self.task):
                checkpoint = self._find_checkpoint() if self.request.resume else None
                planned = self._plan()
                with self.target.enforce(), deterministic_algorithms(planned.plan.deterministic):
                    position = None if checkpoint is None else self._position(checkpoint, planned)
                    model, _ = self._model(checkpoint)
                    optimizer = self.task.optimizer(model)
                    self._check_space(planned, model, optimizer)
                    plan, schedule, scheduler = self._schedule(planned, optimizer)
                plan, comparison = self._record(plan, planned, None if scheduler else schedule, position)
                return {**plan.to_json(), **comparison.to_json()}
        finally:
            self.journal.close()
            self._free_memory()
            with suppress(OSError):  # it has checkpoints, or another rank was faster
                self.folder.checkpoints.rmdir()

    def _run(self) -> Ending:
        on_rank_zero(self.group, self._open_trackers)
        checkpoint = self._find_checkpoint() if self.request.resume else None
        planned = self._plan()
        with self.target.enforce(), deterministic_algorithms(planned.plan.deterministic):
            self.loop = self._build(planned, checkpoint)
            first_step = self.loop.step
            with self.monitor:
                ending = self.loop.run()
            self.trained = ending.step - first_step
            return ending

    def _plan(self) -> _Planned:
        """Rows that are ready, and the plan for them with the choices of training."""
        data, rows = self._read(self.data)
        self.task = with_dummy(self.task, rows, self.progress, steady=self.plan_options.deterministic)
        valid_data, valid = (None, None) if self.valid is None else self._read(self.valid, like=rows)
        choice = PlanChoice(
            task=self.task, rows=rows, options=self.plan_options, target=self.target, group=self.group, run=self.folder,
            file=self.options.plan, steps=run_steps(self.options, self.plan_options.global_batch or self.task.global_batch, rows),
            averages=self.options.ema is not None, number=self.request.rollback,
            made_before_for=dict(self.request.plan_for) if self.request.resume and self.request.plan_for else None,
            progress=self.progress, note=self._note,
        )  # fmt: skip
        plan = with_choices(choice.plan(), rows, task=self.task, request=self.request, note=self._note)
        self.task = with_weights(self.task, plan.levers.weights)
        if self.plan_options.deterministic:  # also if the plan is from a file and was made with times
            plan = replace(plan, deterministic=True)
        prepared = {"data": _place(self.folder.root, data), "valid": _place(self.folder.root, valid_data)}
        steps = run_steps(self.options, plan.global_batch, rows)
        return _Planned(rows=rows, valid=valid, prepared=prepared, choice=choice, plan=plan, steps=steps)

    def progress(self, phrase: str) -> None:
        """What is being prepared."""
        self._show_progress(phrase)
        if self._run_log is not None and self.first:
            self._run_log.status(phrase)

    def _free_memory(self) -> None:
        """The process may continue: give back what the run took, on the device and on the host."""
        model = None if self.loop is None else weakref.ref(self.loop.stepper.model)
        self.loop = None  # its parts refer to this object
        if model is not None and model() is not None:  # the parts of an evaluator refer to each other
            gc.collect()
        empty_cache(self.target.device)
        trim_heap()

    def _open_trackers(self) -> None:
        self.trackers = open_trackers(self.options.tracker_names, self.folder.root, self.request.to_json(), self._note)

    def _track(self, event: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker(event)

    def _find_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to continue from. Rank 0 verifies it, and all take the same."""
        path = on_rank_zero(self.group, self._newest_checkpoint)
        return None if path is None else Checkpoint.read(Path(path))

    def _newest_checkpoint(self) -> str | None:
        for path in () if self.request.dry_run else self.checkpoints.clean():
            self._note(f"removed {path.name}, which an interrupted save had left")
        newest = self.checkpoints.newest()
        for skipped in newest.skipped:
            self._note(f"skipped {skipped.path.name}: {skipped.why}")
        if newest.checkpoint is not None:
            return str(newest.checkpoint.path)
        if newest.skipped:
            why = "; ".join(f"{skipped.path.name}: {skipped.why}" for skipped in newest.skipped)
            raise BadRun(
                f"no checkpoint in {self.folder.checkpoints} is intact ({why}). Try: a new run, with another run=."
            )
        self._note("no checkpoint was written yet, so the run begins at its first step")
        return None

    def _read(self, data: Data, like: Dataset | None = None) -> tuple[str | None, Dataset]:
        """The rows, and the path they were read from after `Task.prepare`; None for rows in memory."""
        if not isinstance(data, (str, os.PathLike)):
            return None, read_rows(self.task, data)
        path, name = os.fspath(data), "train" if like is None else "valid"
        ready = on_rank_zero(
            self.group,
            lambda: self.task.prepare(path, self.folder.data, self.progress, like=like, name=name),
        )
        return ready, read_rows(self.task, ready)

    def _build(self, planned: _Planned, checkpoint: Checkpoint | None) -> Loop:
        """The loop with all its parts, continued from the checkpoint if there is one."""
        options, steps, rows, valid = self.options, planned.steps, planned.rows, planned.valid
        position = None if checkpoint is None else self._position(checkpoint, planned)
        _seed(self.plan_options.seed)
        model, base = self._model(checkpoint)
        speedometer = self._speedometer(planned.plan, model, rows)  # before checkpointing makes the model count twice
        optimizer = self.task.optimizer(model)
        _seed(self.plan_options.seed + self.group.rank)  # dropout differs between ranks
        stepper = self._stepper(planned.plan, model, optimizer)
        plan, schedule, scheduler = self._schedule(planned, optimizer)
        loop = Loop(
            task=self.task,
            rows=rows,
            stepper=stepper,
            optimizer=optimizer,
            loader=self._loader(plan, rows, stepper),
            schedule=schedule,
            scheduler=scheduler,
            base=base,
            average=None if options.ema is None else WeightAverage(optimizer, options.ema),
            checkpoints=self.checkpoints,
            journal=self.journal if self.first else Journal(None),
            time_limit=self.time_limit,
            speedometer=speedometer,
            evaluator=None if valid is None else self._evaluator(plan, model, valid),
            best_by=options.best,
            eval_every=options.eval_every or max(LEAST_STEPS_APART, steps // EVALUATIONS),
            patience=Patience(most=options.patience, windows=valid is None),
            save_every=options.save_every,
            save_s=SAVE_S,
            hooks=(_Links(self.folder, self._note), *self.hooks) if self.first else self.hooks,
        )  # fmt: skip
        self._check_space(planned, model, optimizer)
        if checkpoint is not None and position is not None:
            loop.resume(checkpoint.path, position)
        plan, comparison = self._record(plan, planned, None if scheduler else schedule, position)
        self._begin(plan, comparison, position, planned)
        self._before_training(plan, model, [rows] if valid is None else [rows, valid], resumed=position is not None)
        if self.target.device.type != "cpu" or self.plan_options.memory_limit is not None:
            stepper.rehearse()
        return loop

    def _schedule(self, planned: _Planned, optimizer: Optimizer) -> tuple[Plan, Schedule, LRScheduler | None]:
        """The learning rate over the run, the task's own scheduler if there is one, and the plan with what they say."""
        schedule, scheduler = Schedule.of(self.options, planned.steps), self.task.schedule(optimizer, planned.steps)
        if scheduler is None:
            return with_schedule(planned.plan, schedule, float(optimizer.param_groups[0]["lr"])), schedule, None
        if not isinstance(scheduler, LRScheduler):
            raise TaskError(
                f"task {self.task.name}: schedule() returned {kind_of(scheduler)}. Try: return a torch LRScheduler, or None."
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TaskError(
                f"task {self.task.name}: schedule() returned a ReduceLROnPlateau, which needs a metric at every step. "
                "Try: a scheduler whose step() takes nothing, or None."
            )
        return with_own_schedule(planned.plan, scheduler), schedule, scheduler

    def _check_space(self, planned: _Planned, model: nn.Module, optimizer: Optimizer) -> None:
        """On the disk, for the checkpoints that there may be at once."""
        at_once = self.options.keep + 1 + (planned.valid is not None)
        needed = state.needed_bytes(model, optimizer, self.task.trained_weights(model))
        on_rank_zero(self.group, lambda: self.checkpoints.check_space(needed, saves=at_once))

    def _position(self, checkpoint: Checkpoint, planned: _Planned) -> state.Position:
        position, steps = state.read_position(checkpoint.path), planned.steps
        if position.data and position.data != rows_fingerprint(planned.rows):
            raise BadRun("the data are not those the run was trained on so far. Try: the same data, or a new run.")
        if position.step > steps:
            raise BadOption(
                f"max_steps={steps} is less than the {position.step} steps already done. Try: max_steps={position.step} or more."
            )
        return position

    def _model(self, checkpoint: Checkpoint | None) -> tuple[nn.Module, str | None]:
        """With its initial weights, or a checkpoint's, which are read onto the device without a copy on the host.

        A checkpoint of `Task.trained_weights` has the others from the initial model, whose fingerprint is returned too.
        """
        device, task = self.target.device, self.task
        in_part = getattr(task.trained_weights, "__func__", None) is not Task.trained_weights
        if checkpoint is None or in_part:
            with device if in_part else nullcontext():  # a base is loaded, and quantized, where it will be used
                model = task.initial_model()
            if not isinstance(model, nn.Module):
                raise TaskError(
                    f"task {task.name}: initial_model() returned {kind_of(model)}. Try: return a torch.nn.Module."
                )
            model = model.to(device).train()
        else:
            model = build_model(task, device)
        names = task.trained_weights(model)
        base = None if names is None else state.base_fingerprint(model, names)
        if checkpoint is not None:
            if base is not None:
                state.check_base(checkpoint, base)
            state.load_model(checkpoint.path, model, names)
        trim_heap()  # what the host held of a model that is on a GPU now
        return model, base

    def _stepper(self, plan: Plan, model: nn.Module, optimizer: Optimizer) -> Stepper:
        return Stepper(
            model, optimizer, self.task, plan, clip_norm=self.options.clip_norm or None,
            skip_oversized=self.options.skip_oversized, allow_inexact=self.plan_options.allow_inexact,
            on_event=self._on_step_event, last_checkpoint=self._last_checkpoint,
        )  # fmt: skip

    def _loader(self, plan: Plan, rows: Dataset, stepper: Stepper) -> Loader:
        return Loader(
            rows, self.task, plan, seed=self.plan_options.seed, mix=self.options.mix, rank=self.group.rank,
            speeds=stepper.speeds, excluded=stepper.excluded,
            note=lambda message, figures: self._write("note", sentence=message, **figures),
        )  # fmt: skip

    def _speedometer(self, plan: Plan, model: nn.Module, rows: Dataset) -> Speedometer:
        autocast = autocast_dtype(plan.levers.precision, self.target.device)
        flops, how = FlopModel.measure(self.task, model, self.target.device, plan.shape, autocast=autocast)
        peak, peak_how = peak_flops(self.target.device, autocast or next(model.parameters()).dtype)
        self._write("flops", sentence=f"MFU: {how}; peak of the device: {peak_how}", peak_flops=peak)
        return Speedometer(
            rows, self.group, flops=flops, peak_flops=peak, limit_bytes=plan.limit_bytes, host_memory=self.monitor
        )

    def _evaluator(self, plan: Plan, model: nn.Module, valid: Dataset) -> Evaluator:
        return Evaluator(
            self.task, model, valid, device=self.target.device, limit_bytes=plan.limit_bytes, fill=plan.fill,
            autocast=autocast_dtype(plan.levers.precision, self.target.device), max_rows=self.options.eval_rows,
            generate_rows=self.options.generate_rows, seed=self.plan_options.seed, group=self.group, note=self._note,
        )  # fmt: skip

    def _before_training(self, plan: Plan, model: nn.Module, datasets: Sequence[Dataset], *, resumed: bool) -> None:
        if getattr(self.task.before_training, "__func__", None) is Task.before_training:
            return
        autocast = autocast_dtype(plan.levers.precision, self.target.device)
        context = TrainingContext(
            model, self.target.device, autocast, plan.limit_bytes, plan.fill, self.plan_options.seed, self.group, self._note,
            self.progress, folder=self.folder.data, resumed=resumed,
        )  # fmt: skip
        for rows in datasets:
            self.task.before_training(model, rows, context)
        gc.collect()  # of another model that was needed for it: layers of an adapter refer to themselves
        empty_cache(self.target.device)

    def _record(
        self, plan: Plan, planned: _Planned, schedule: Schedule | None, position: state.Position | None
    ) -> tuple[Plan, Comparison]:
        """The plan as the run keeps it, and what it changes. Saved only now, when everything requested has proved to work."""
        done, steps, choice = 0 if position is None else position.step, planned.steps, planned.choice
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.group.size))
        plan = with_sources(plan, self.request.origins, self.request.values)
        plan = with_time(plan, planned.rows, steps=steps, done=done)
        idle = idle_gpus(self.request.plan_options, self.target, local)
        plan = with_run_warnings(plan, self.options, steps=steps, more=idle)
        before = PlanHistory(self.folder).current() if self.request.resume else None
        kept = choice.kept(plan, self.request)
        comparison = compare(before, kept, steps_done=done, same_rates=same_rates(before, schedule, done=done))
        if self.request.dry_run:
            return replace(plan, number=None), comparison
        return choice.save(plan, kept, new_run=not self.request.resume), comparison

    def _begin(self, plan: Plan, comparison: Comparison, position: state.Position | None, planned: _Planned) -> None:
        """Only now, when everything requested has proved to work, does the run's folder keep it."""
        steps = planned.steps
        if self.first:
            request = replace(self.request, prepared=planned.prepared, plan_for=planned.choice.made_for)
            self.folder.write_request(request)
        self._write(
            "begin",
            run=str(self.folder.root),
            steps=steps,
            processes=self.group.size,
            resumed=position is not None,
            request=self.request.to_json(),
            **begin_figures(self.places),
        )
        if position is None and (examples := self.task.preview(planned.rows)):
            self._write("rows", examples=examples)
        self._write("plan", **plan.to_json(), **comparison.to_json())
        if position is None or comparison.changes:
            for warning in plan.warnings:
                self._write("note", level="warning", sentence=warning)
        if position is not None:
            self._write(
                "resume",
                step=position.step,
                samples=position.loader["samples"],
                processes_before=len(position.ranks),
                sentence=f"continuing after step {position.step}",
            )

    def _end(self, ending: Ending) -> Ending:
        assert self.loop is not None
        trained, skipped = show_count(ending.step, "step"), self.loop.stepper.nonfinite_steps
        last = f", and skipped the last {skipped:,} for NaN or inf" if skipped and self.trained else ""
        sentence = {
            "patience": self.loop.patience_sentence(),
            "finished": f"{'trained' if self.trained else 'already finished:'} {trained}{last}",
            "interrupted": f"stopped after step {ending.step} and saved",
            "time-limit": f"reached the time limit after step {ending.step} and saved",
        }[ending.reason]
        checkpoint = None if ending.checkpoint is None else str(ending.checkpoint)
        best = None if ending.best is None else str(self.checkpoints.path(ending.best.step))
        self._write(
            "end", reason=ending.reason, step=ending.step, loss=ending.loss, checkpoint=checkpoint, best=best, sentence=sentence
        )  # fmt: skip
        return ending

    def _on_step_event(self, event: Event) -> None:
        """From every rank if it differs between them."""
        if self.first or event.event in RANK_EVENTS:
            self.journal.write(**{**event.to_json(), "process": self.group.rank})

    def _note(self, message: str) -> None:
        self._write("note", sentence=message)

    def _write(self, event: str, **values: Any) -> None:
        if self.first:
            self.journal.write(event, **{"step": self.loop.step if self.loop else 0, **values})

    def _last_checkpoint(self) -> str | None:
        newest = None if self.loop is None else self.loop.newest
        return None if newest is None else str(newest)


class _Links(Hook):
    """RUN/model and RUN/best follow the checkpoints."""

    def __init__(self, folder: RunFolder, note: Callable[[str], object]) -> None:
        self._folder, self._note = folder, note

    def before(self, loop: Loop) -> None:
        """A run may have been killed between a save and its links."""
        if loop.newest is not None:
            self._link("model", loop.newest)
        if loop.best is not None and (best := loop.checkpoints.path(loop.best.step)).is_dir():
            self._link("best", best)

    def after_save(self, loop: Loop, folder: Path) -> None:
        self._link("model", folder)
        if loop.best is not None and loop.best.step == loop.step:
            self._link("best", folder)

    def _link(self, name: str, checkpoint: Path) -> None:
        link(self._folder.root / name, checkpoint / "model", note=self._note)


def _place(run: Path, data: str | None) -> str | None:
    """Relative to the run if it is inside: a run may be moved, and the raw files may be gone.

    None for what is no file, such as a name that only the task knows: a resumed run is given that again.
    """
    if data is None or not os.path.exists(data):  # noqa: PTH110 - Path's fails on what is no path
        return None
    path = Path(data).absolute()
    return str(path.relative_to(run.absolute())) if path.is_relative_to(run.absolute()) else str(path)


def _seed(seed: int) -> None:
    """Python's, NumPy's and torch's generators; all ranks share it, since rank 0's weights are copied to all."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
