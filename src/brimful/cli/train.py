"""`brimful train TASK DATA`: plans, trains, survives, resumes.

The process that the user starts never imports torch. It builds the request, locks the run's folder, starts the training
processes and waits for them (`training.launch`), so that it can report how they ended. Under torchrun or accelerate the
launcher is the parent, and each process it starts trains.
"""

import json as json_
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from brimful.cli.flags import TASK_TITLE, TITLES, Switch, UserOptions, collect, make_flags, set_flags
from brimful.cli.output import name_files, naming_files, prefer_growing_segments, print_error, show, with_flags
from brimful.errors import BadOption, BadRun, with_hint
from brimful.languages import tr, translate
from brimful.tasks.load import check_request_options, check_spec, task_option_fields
from brimful.tasks.option_fields import OptionField, option_fields
from brimful.training.launch import Outcome, supervise
from brimful.training.options import TrainOptions
from brimful.training.plan_history import PlanHistory, rolled_back
from brimful.training.run import (
    RUN_OPTIONS,
    Request,
    RunFolder,
    RunLock,
    absolute,
    is_missing,
    merge,
    new_run,
    newest_run,
    open_run,
    same_task,
)
from brimful.training.run_log import RunLog

PLANNED = (
    "micro_batch", "layout", "compile", "checkpointing", "precision", "weights", "cuda_graphs", "cudnn_attention", "fill", "lengths", "workers", "prefetch", "pin_memory",
    "allow_inexact", "plan_seconds", "table",
)  # fmt: skip
"""Options that a plan has decided."""
EVALUATION = ("eval_every", "eval_rows", "generate_rows", "best")
"""Options that need --valid."""


def train_command(task_fields: Sequence[OptionField] = ()) -> Callable[..., None]:
    """The command, with flags for the options of one task."""
    flags_type = make_flags(
        {**{title: option_fields(owner) for title, owner in TITLES.items()}, TASK_TITLE: task_fields},
        types={"lengths": str},
        names={"run": ("--run", "--run-dir")},  # torchrun takes --run for the beginning of an option of its own
        helps={
            "seed": "Seed of weights, order of the rows and dropout. It does not govern how steps are split, which changes "
            "the dropout masks: a new plan may split them in another way unless --deterministic is set.",
            "processes": "Processes on this machine that share the global batch, each with a GPU if there are GPUs.",
        },
    )

    def train(
        task: str | None = None,
        data: str | None = None,
        /,
        *more: Annotated[str, Parameter(show=False)],
        recipe: str | None = None,
        config: Path | None = None,
        demo_data: Switch = False,
        dry_run: Switch = False,
        json: Switch = False,
        flags: flags_type = flags_type(),  # type: ignore[valid-type]  # noqa: B008 - frozen
    ) -> None:
        """Train a task within the available memory: keep the global batch exact, survive out-of-memory errors, save, resume.

        Ctrl-C saves and leaves; `brimful train --run DIR --resume` continues. `brimful train TASK --help` also lists the
        options of that task.

        Parameters
        ----------
        task
            A built-in task (pretrain, sft, dpo) or your own, written file.py:name. Not needed to resume a run.
        data
            The rows to train on: a file, a folder or a name that the task reads.
        recipe
            A set of options that comes with Brimful: small, fast, pretrain, low-memory or demo. Flags win over it.
        config
            A TOML file with any of these options. It wins over the recipe, and flags win over it.
        demo_data
            Train on the small Chinese question-answer set that comes with Brimful.
        dry_run
            Prepare the data, make the whole plan, print it and stop before anything is trained.
        json
            Print how the run ended, or the plan of a dry run, as one JSON object.
        """
        if more:
            raise BadOption(
                f"DATA must be one name, and {' '.join(more)} came after {data}. Try: a folder with these files."
            )
        request = build_request(task, data, flags, recipe=recipe, config=config, demo_data=demo_data)
        if dry_run:
            request = replace(request, dry_run="json" if json else "table")
        prefer_growing_segments()
        folder = RunFolder(Path(request.run))
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # a launcher's process
            from brimful.cli.train_process import run_request

            with naming_files(request.origins, request.values):
                run_request(request)
            if os.environ["RANK"] == "0":
                _print_ending(folder, json=json, dry_run=dry_run)
            return
        before = folder.ending()
        outcome = _supervise(request, folder)
        saved = folder.ending() not in (None, before)
        if outcome.code == 0 and not saved and not dry_run:
            outcome = Outcome(code=1, message="the training process left without finishing", resumable=True)
        if outcome.code and not (outcome.code > 128 and saved):  # one that had saved may be stopped on its way out
            message = name_files(_with_advice(outcome, folder), request.origins, request.values)
            print_error(message, outcome.error_code)
            raise SystemExit(outcome.code)
        _print_ending(folder, json=json, dry_run=dry_run)

    return train


def build_request(
    task: str | None, data: str | None, flags: Any, *, recipe: str | None, config: Path | None, demo_data: bool
) -> Request:
    """What to do, from flags, files and, for a resumed run, from its own folder. Mistakes are found here."""
    rollback = set_flags(flags).get("rollback", False)
    TrainOptions(rollback=rollback)
    root, resume = _run_folder(task, set_flags(flags))
    has_all = task is not None and (data is not None or demo_data)
    folder, resume = open_run(root, resume=resume, rollback=rollback, may_begin=has_all, note=_note)
    before = _request_before(folder, task, data) if resume else None
    kept = PlanHistory(folder).earlier(rollback) if rollback else None
    spec = task or (before.task if before else None)
    if spec is None:
        raise BadOption(
            "TASK is missing. Try: brimful train sft DATA --model MODEL, or --run DIR --resume to continue a run."
        )
    if before is None or task is not None:
        check_spec(spec)
    options = collect("train", flags, config=config, recipe=recipe, task=lambda: spec)
    if options.generic.get("plan"):
        options = _without_planned(options)
    generic = {name: value for name, value in options.generic.items() if name not in RUN_OPTIONS}
    with naming_files(options.origins, options.values):
        own = _with_absolute_paths(options, spec) if options.task else {}
        if before is None:
            request = Request(
                task=spec, data=data, run=str(root), resume=resume, options=generic, task_options=own, origins=options.origins
            )  # fmt: skip
            request = request if kept is None else rolled_back(request, None, kept)
        else:
            former = before if kept is None else rolled_back(before, before, kept)
            merged = merge(former, generic, own, options.origins)
            request = replace(merged, task=spec, run=str(root), resume=True)
        request = _with_data(request, data, before, demo_data)
    with naming_files(request.origins, request.values):
        _check(request, before, set_flags(flags))
    return request


def _without_planned(options: UserOptions) -> UserOptions:
    """`--plan` is a flag, so it wins over files: options in a file that the plan has decided are dropped, with a note."""
    dropped = {name: origin for name, origin in options.origins.items() if name in PLANNED}
    for origin in dict.fromkeys(dropped.values()):
        names = ", ".join(name for name in dropped if dropped[name] == origin)
        _note(f"{names} in {origin} are left to --plan")
    kept = {name: value for name, value in options.generic.items() if name not in dropped}
    return replace(options, generic=kept, origins={k: v for k, v in options.origins.items() if k not in dropped})


def _run_folder(task: str | None, flags: dict[str, Any]) -> tuple[Path, bool]:
    resume = bool(flags.get("resume") or flags.get("rollback"))
    if flags.get("run"):
        return Path(flags["run"]), resume
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BadOption("under a launcher every process must know the run's folder. Try: --run DIR.")
    return newest_run(task) if resume else new_run(task or "run"), resume


def _request_before(folder: RunFolder, task: str | None, data: str | None) -> Request | None:
    """The request that the run began with; None if it is lost and the command repeats it."""
    try:
        before = folder.read_request()
    except BadRun:
        if task is None or data is None:
            raise
        return None
    if task is not None and not same_task(before.task, task, moved=True):
        raise BadOption(f"{folder.root} is a run of {before.task}, not of {task}. Try: another --run.")
    return before


def _with_absolute_paths(options: UserOptions, spec: str) -> dict[str, Any]:
    """The task's options, with paths that hold in any working directory."""
    paths = {option.name for option in task_option_fields(spec) if option.path}
    return {name: absolute(str(value)) if name in paths else value for name, value in options.task.items()}


def _with_data(request: Request, data: str | None, before: Request | None, demo_data: bool) -> Request:
    """The rows: those named, the demo's, or those of the run before, prepared already if the raw files are gone."""
    if demo_data:
        from brimful.tasks.demo import train_file, valid_file

        if data is not None:
            raise BadOption(f"--demo-data cannot be combined with {data}. Try: one of the two.")
        options = {"valid": str(valid_file()), **request.options}
        return replace(request, data=str(train_file()), options=options)
    if before is None:
        if data is None:
            raise BadOption(
                "DATA is missing. Try: a file of rows, or --demo-data for a small set that comes with Brimful."
            )
        return request
    prepared = {name: str(Path(request.run) / place) for name, place in before.prepared.items() if place}
    valid = request.options.get("valid")
    if valid and valid == before.options.get("valid") and not Path(valid).exists():
        request = replace(request, options={**request.options, "valid": prepared.get("valid", valid)})
    if data is not None:
        return replace(request, data=data)
    if before.data is None:
        raise BadRun(
            f"{request.run} was trained on data in memory. Try: brimful.train() from Python with the same data and resume=True."
        )
    ready = prepared.get("data", before.data)
    if Path(before.data).name == Path(ready).name and Path(ready).exists():
        return replace(request, data=ready)  # its own copy, which moves with the run
    sources = [before.data, *(v for v in before.task_options.values() if isinstance(v, str) and Path(v).is_absolute())]
    return replace(request, data=before.data if all(Path(path).exists() for path in sources) else ready)


def _check(request: Request, before: Request | None, flags: dict[str, Any]) -> None:
    """Everything that can be known to be wrong before anything is started, in one message."""
    problems = []
    try:
        request.check()
    except BadOption as error:
        problems.append(str(error))
    options = request.options
    if options.get("plan") and (both := [f"{name}=" for name in PLANNED if options.get(name) is not None]):
        problems.append(
            f"plan= cannot be combined with {', '.join(both)}, which the plan has decided. Try: leave them out."
        )
    if request.rollback and options.get("plan"):
        problems.append("rollback= cannot be combined with plan=. Try: one of the two.")
    valid = options.get("valid")
    if valid and ":" not in request.task and is_missing(valid):  # a user's task may take a name, as for DATA
        problems.append(f"valid={valid!r} does not exist. Try: a file of rows.")
    needless = [name for name in EVALUATION if name != "eval_every" or options.get("patience") is None]
    if not valid and (useless := [f"{name}=" for name in needless if name in flags]):
        problems.append(f"{', '.join(useless)} needs rows to evaluate on. Try: valid=.")
    try:
        check_request_options(request.task, request.task_options, Path(request.run) if before else None)
    except BadOption as error:
        problems.append(str(error))
    if problems:
        raise BadOption(" ".join(problems))
    if not valid and any(name in options for name in needless) and os.environ.get("RANK", "0") == "0":
        _note("nothing is evaluated, because there is no --valid")


def _supervise(request: Request, folder: RunFolder) -> Outcome:
    """Train below this process."""
    with (
        folder.removed_if_not_begun(),
        RunLock(folder.root, flag="--run") as lock,
        folder.job_folder() as reports,
    ):
        outcome = supervise(
            [sys.executable, "-m", "brimful.cli.train_process"],
            processes=request.plan_options.processes,
            environment={**os.environ, "BRIMFUL_REQUEST": json_.dumps(request.to_json())},
            reports=reports,
            lock_file=lock.fd,
        )
        if outcome.message is not None:  # a process that was killed could not write it
            with RunLog(folder.root) as run_log:
                run_log.line(with_flags(outcome.message))
        return outcome


def _with_advice(outcome: Outcome, folder: RunFolder) -> str:
    """The parent's message, with the command that continues if something was saved."""
    if not outcome.resumable and folder.has_checkpoint and folder.fails_again:
        return with_hint(outcome.message or "", f"Fix this first, then continue: {folder.resume_command}")
    steps = [outcome.advice] if outcome.advice else []
    if outcome.resumable:
        steps += [folder.resume_command] if folder.has_checkpoint else []
    advice = f". Try: {', then '.join(steps)}" if steps else ""
    unsaved = ". Nothing was saved yet" if outcome.resumable and not folder.has_checkpoint else ""
    return f"{outcome.message}{unsaved}{advice}"


def _print_ending(folder: RunFolder, *, json: bool, dry_run: bool) -> None:
    """For a run that ended well."""
    if dry_run:
        _note(_left_by_dry_run(folder))
        return
    end = folder.ending() or {}
    result = {
        "run": str(folder.root),
        **{key: end.get(key) for key in ("reason", "step", "loss", "checkpoint", "best")},
    }
    lines = [translate(str(end.get("sentence", "done")))]
    if end.get("reason") in ("finished", "patience"):
        lines.append(tr("Saved to {path}", path=folder.root / "model"))
        if (folder.root / "best").exists():
            lines.append(tr("Best model: {path}", path=folder.root / "best"))
    elif folder.has_run:
        lines.append(tr("To continue: {command}", command=folder.resume_command))
    show("\n".join(lines), result, as_json=json)


def _left_by_dry_run(folder: RunFolder) -> str:
    if folder.has_run or not folder.data.exists():
        return tr("nothing was trained (--dry-run)")
    template = "nothing was trained (--dry-run). The prepared data stay in {data}; --run {run} uses them"
    return tr(template, data=folder.data, run=folder.root)


def _note(message: str) -> None:
    print(f"brimful: {translate(message)}", file=sys.stderr, flush=True)
