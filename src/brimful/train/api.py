"""`brimful.train`: a whole run from Python, in this process, or in each process of a launcher's job.

    ending = brimful.train(task, "rows.parquet", run="runs/mine", max_steps=1000, memory_limit="20GiB")

The command line does the same in processes of its own, below a parent that survives them.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from brimful.errors import BadOption, TaskError
from brimful.plan.options import FitOptions
from brimful.task import Task
from brimful.train.folder import new_run, opened
from brimful.train.lock import RunLock
from brimful.train.loop import Ending, Hook
from brimful.train.session import Listener, Session
from brimful.train.settings import TrainOptions


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

    Keywords are those of `TrainOptions` and `FitOptions`. `hooks` act at the loop's points, `listeners` hear every line of
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
    request = {**before, "task": task.name, "data": str(data), "asked": _plain(asked)}
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


def split(asked: dict[str, Any]) -> tuple[TrainOptions, FitOptions]:
    """Each class its own; a word that neither knows is refused."""
    of_train, of_fit = ({field.name for field in fields(owner)} for owner in (TrainOptions, FitOptions))
    if unknown := [word for word in asked if word not in of_train | of_fit]:
        known = ", ".join(sorted(of_train | of_fit))
        raise BadOption(f"unknown option {', '.join(map(repr, unknown))}; train takes {known}")
    train_part = {word: value for word, value in asked.items() if word in of_train}
    return TrainOptions.of(train_part), FitOptions.of({word: asked[word] for word in asked if word in of_fit})


def _plain(asked: dict[str, Any]) -> dict[str, Any]:
    return {word: str(value) if isinstance(value, Path) else value for word, value in asked.items()}
