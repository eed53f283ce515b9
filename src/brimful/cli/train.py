"""`brimful train TASK DATA`: fits, trains, survives, resumes.

The process that the user starts never imports torch. It settles what is asked, locks the run's folder, starts the
training processes and stays above them (`train.parent`), so that somebody is left to say what happened whatever becomes
of them. Under torchrun or accelerate the launcher is that process, and each of its own trains.
"""

import json as json_
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from brimful.cli.allocator import prefer_growing_segments
from brimful.cli.fit import lengths_of
from brimful.cli.flags import flags_of, from_file, from_recipe, given, known, part
from brimful.cli.output import show
from brimful.errors import BadOption
from brimful.plan.options import FitOptions
from brimful.tasks.chatlm.options import ChatOptions
from brimful.train.folder import RunFolder, new_run, newest_run, opened
from brimful.train.settings import TrainOptions

OPTIONS = {"Model and data of the chat tasks": ChatOptions, "Training": TrainOptions, "Memory and speed": FitOptions}
KNOWN = known(OPTIONS)
Flags: Any = flags_of(
    "Flags",
    OPTIONS,
    types={"lengths": str},
    said={
        "seed": "Of everything random: weights, order of the rows, dropout.",
        "processes": "Processes on this box that share the global batch; on cards, --gpus says it shorter.",
    },
)


def train(
    task: str | None = None,
    data: str | None = None,
    /,
    *,
    recipe: str | None = None,
    config: Path | None = None,
    demo_data: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
    flags: Flags = Flags(),  # noqa: B008 - frozen
) -> None:
    """Train a task: fit it to the memory at hand, keep the global batch exact, survive out-of-memory, save, resume.

    Ctrl-C saves and leaves; `brimful train --run DIR --resume` goes on from there, with everything as it was.

    Parameters
    ----------
    task
        A built-in task (chatlm-pretrain, chatlm-sft) or your own, written file.py:name. Known already when a run is resumed.
    data
        Rows: files, a folder or a data set that the task reads; for the chat tasks raw files or a token store.
    recipe
        A set of options that comes with Brimful: small, fast, pretrain, low-memory or demo. Flags win over it.
    config
        A TOML file with any of these options; it wins over the recipe, flags win over it.
    demo_data
        Train on the small Chinese question-answer set that comes with Brimful.
    json
        Print how it ended as one JSON object.
    """
    request = _request(task, data, recipe, config, demo_data, given(flags))
    prefer_growing_segments()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # a launcher's process
        from brimful.cli.train_process import work

        work(request)
        return
    run = RunFolder(Path(request["run"]))
    outcome = _supervised(request, run)
    end = run.ending() or {}
    result = {"run": str(run.root), "reason": outcome.reason, **{k: end.get(k) for k in ("step", "loss", "checkpoint")}}
    if outcome.code:
        print(f"brimful: {outcome.sentence}", file=sys.stderr)
        raise SystemExit(outcome.code)
    show(_told(outcome, run), result, as_json=json)


def _request(
    task: str | None, data: str | None, recipe: str | None, config: Path | None, demo: bool, said: dict[str, Any]
) -> dict[str, Any]:
    """What is to be done, from flags, files and, where a run goes on, from its own folder. Mistakes show here."""
    asked = {**from_recipe(recipe, KNOWN, "train"), **from_file(config, KNOWN, "train"), **said}
    resume = bool(asked.get("resume"))
    if "run" not in asked and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BadOption("train: under a launcher every process must know the run's folder; name it with --run")
    root = Path(asked.get("run") or (newest_run(task) if resume else new_run(task or "")))
    if task is None and not (resume or RunFolder(root).has_run):
        raise BadOption("train: name the task, such as chatlm-sft, or a run to go on with: --run DIR --resume")
    run, resume = opened(root, resume=resume)
    before: dict[str, Any] = {}
    if resume:
        before = run.remembered()
        if task is not None and task != before["task"]:
            raise BadOption(f"--resume: {root} is a run of {before['task']}, not of {task}")
        asked = {**before["asked"], **asked}
    task = task or before["task"]
    data = _data(data, before, demo, asked)
    asked.update(run=str(root), resume=resume)
    if isinstance(asked.get("lengths"), str):
        asked["lengths"] = lengths_of(asked["lengths"])
    TrainOptions.of(part(asked, TrainOptions))
    FitOptions.of({**part(asked, FitOptions), "processes": _processes(asked)})
    ChatOptions(**part(asked, ChatOptions))
    return {**before, "task": task, "data": data, "asked": asked, "run": str(root), "resume": resume}


def _data(data: str | None, before: dict[str, Any], demo: bool, asked: dict[str, Any]) -> str:
    """The rows: as given, the demo's, or those of the run before, packed already where the raw files are gone."""
    if demo:
        from brimful.tasks.chatlm.demo import train_file, valid_file

        if data is not None:
            raise BadOption(f"--demo-data: leave {data} out, or leave --demo-data out")
        asked.setdefault("valid", str(valid_file()))
        return str(train_file())
    if data is not None:
        return data
    if "data" not in before:
        raise BadOption("train: name the rows to train on, or --demo-data for a small set that comes with Brimful")
    prepared = before.get("prepared") or {}
    if asked.get("valid") and prepared.get("valid") and not Path(asked["valid"]).exists():
        asked["valid"] = prepared["valid"]
    return before["data"] if Path(before["data"]).exists() else prepared.get("data") or before["data"]


def _processes(asked: dict[str, Any]) -> int:
    gpus, processes = asked.get("gpus"), asked.get("processes")
    if gpus is not None and processes not in (None, gpus):
        raise BadOption(f"--gpus {gpus} --processes {processes}: they mean the same; give one of them")
    return gpus or processes or 1


def _supervised(request: dict[str, Any], run: RunFolder) -> Any:
    """Run it below this process, again and again where it keeps hours."""
    from brimful.train.lock import RunLock
    from brimful.train.parent import keep_hours, supervise

    processes, window = _processes(request["asked"]), TrainOptions.of(part(request["asked"], TrainOptions)).hours
    with _left_clean(run), RunLock(run.root) as lock, tempfile.TemporaryDirectory(prefix="brimful-job-") as job:

        def start_once() -> Any:
            again = {**request, **({"resume": True} if run.has_run else {})}
            environment = {**os.environ, "BRIMFUL_REQUEST": json_.dumps(again)}
            return supervise(
                [sys.executable, "-m", "brimful.cli.train_process"], processes=processes, environment=environment,
                job=Path(job), lock_file=lock.fd, events=run.events,
            )  # fmt: skip

        return start_once() if window is None else keep_hours(window, start_once, _say)


@contextmanager
def _left_clean(run: RunFolder) -> Iterator[None]:
    """A run that failed before it began leaves no folder."""
    new = not run.root.exists()
    try:
        yield
    finally:
        if new and not run.has_run:
            shutil.rmtree(run.root, ignore_errors=True)
            with suppress(OSError):
                run.root.parent.rmdir()  # `runs`, where this was its first


def _told(outcome: Any, run: RunFolder) -> str:
    """The last words of a run that ended well."""
    lines = [f"{outcome.sentence or 'done'}"]
    if outcome.reason == "finished":
        lines.append(f"model  {run.root / 'model'}")
        if (run.root / "best").exists():
            lines.append(f"best   {run.root / 'best'}")
    else:
        lines.append(f"go on with: {run.resume_command}")
    return "\n".join(lines)


def _say(sentence: str) -> None:
    print(f"brimful: {sentence}", file=sys.stderr, flush=True)
