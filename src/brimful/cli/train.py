"""`brimful train TASK DATA`: fits, trains, survives, resumes.

The process that the user starts never imports torch. It settles what is asked, locks the run's folder, starts the
training processes and stays above them (`train.parent`), so that somebody is left to say what happened whatever becomes
of them. Under torchrun or accelerate the launcher is that process, and each of its own trains.
"""

import json as json_
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from brimful.cli.flags import flags_of, from_file, from_recipe, given, known, part, prefer_growing_segments, show
from brimful.cli.plan import lengths_of
from brimful.errors import BadOption, BadRun
from brimful.planning.target import PlanOptions
from brimful.tasks.chatlm import ChatOptions
from brimful.training.options import TrainOptions
from brimful.training.run import RunFolder, go_on, new_run, newest_run, opened, same_task

PLANNED = (
    "micro_batch",
    "checkpointing",
    "precision",
    "cudnn_attention",
    "fill",
    "lengths",
    "workers",
    "prefetch",
    "pin_memory",
    "allow_inexact",
)
"""What a plan settles."""
EVALUATION = ("eval_every", "eval_rows", "generate_rows", "best")
"""What is of use with --valid alone."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
OPTIONS = {"Model and data of the chat tasks": ChatOptions, "Training": TrainOptions, "Memory and speed": PlanOptions}
KNOWN = known(OPTIONS)
Flags: Any = flags_of(
    "Flags",
    OPTIONS,
    types={"lengths": str},
    names={"run": ("--run", "--run-dir")},  # torchrun takes --run for the beginning of an option of its own
    said={
        "seed": "Of everything random: weights, order of the rows, dropout.",
        "processes": "Processes on this box that share the global batch; on cards, --gpus says it shorter.",
    },
)


def train(
    task: str | None = None,
    data: str | None = None,
    /,
    *more: Annotated[str, Parameter(show=False)],
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
        Rows: a file, a folder or a data set that the task reads; for the chat tasks a file of rows, a folder of them, a
        quoted pattern such as 'rows-*.jsonl', or a token store.
    recipe
        A set of options that comes with Brimful: small, fast, pretrain, low-memory or demo. Flags win over it.
    config
        A TOML file with any of these options; it wins over the recipe, flags win over it.
    demo_data
        Train on the small Chinese question-answer set that comes with Brimful.
    json
        Print how it ended as one JSON object.
    """
    if more:
        raise BadOption(
            f"train: DATA is one name, and {' '.join(more)} came after {data}: put the files into a folder and name that, or, "
            "for the chat tasks, give a quoted pattern such as 'rows-*.jsonl'"
        )
    request = _request(task, data, recipe, config, demo_data, given(flags))
    prefer_growing_segments()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # a launcher's process
        from brimful.cli.train_process import work

        work(request)
        if os.environ["RANK"] == "0":
            _last_words(RunFolder(Path(request["run"])), json=json)
        return
    run = RunFolder(Path(request["run"]))
    outcome = _supervised(request, run)
    if outcome.code:
        print(f"brimful: {_how_to_go_on(outcome.sentence, run)}", file=sys.stderr)
        raise SystemExit(outcome.code)
    _last_words(run, json=json, otherwise=outcome.sentence)


def _request(
    task: str | None, data: str | None, recipe: str | None, config: Path | None, demo: bool, said: dict[str, Any]
) -> dict[str, Any]:
    """What is to be done, from flags, files and, where a run goes on, from its own folder. Mistakes show here."""
    asked = {**from_recipe(recipe, KNOWN, "train"), **from_file(config, KNOWN, "train"), **said}
    resume = bool(asked.get("resume"))
    if "run" not in asked and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BadOption("train: under a launcher every process must know the run's folder; name it with --run")
    root = Path(asked.get("run") or (newest_run(task) if resume else new_run(task or "")))
    if task is None and not (resume or RunFolder(root).knows_its_request):
        raise BadOption("train: name the task, such as chatlm-sft, or a run to go on with: --run DIR --resume")
    run, resume = opened(root, resume=resume)
    before = _before(run, task, data) if resume else {}
    if before:
        asked = go_on(before, asked)
    task = task or before["task"]
    data = _data(data, before, demo, asked, run)
    asked.update(run=str(root), resume=resume)
    if isinstance(asked.get("lengths"), str):
        asked["lengths"] = lengths_of(asked["lengths"])
    _check(asked, _kept(run, before))
    _check_evaluation(asked, said)
    return {**before, "task": task, "data": data, "asked": asked, "run": str(root), "resume": resume}


def _kept(run: RunFolder, before: dict[str, Any]) -> dict[str, str]:
    """What the run no longer needs, since it has its own: a model to begin with, a tokenizer to pack with."""
    own = {"from": str(run.root / "model"), "tokenizer": _prepared(run, before).get("data")}
    was = before.get("asked", {})
    return {name: was[name] for name, place in own.items() if name in was and place and Path(place).exists()}


def _check(asked: dict[str, Any], kept: dict[str, str]) -> None:
    """All that can be known to be wrong before anything is read or made, in one sentence. `kept` may be gone."""
    problems = []
    for owner, more in ((TrainOptions, {}), (PlanOptions, {"processes": _processes(asked)}), (ChatOptions, {})):
        try:
            owner(**{**part(asked, owner), **more})
        except BadOption as error:
            problems.append(str(error))
    if asked.get("plan"):
        both = [f"--{name.replace('_', '-')}" for name in PLANNED if asked.get(name) is not None]
        problems += [f"--plan with {', '.join(both)}: the plan has decided that; give one or the other"] if both else []
    for name in ("valid", "from", "tokenizer"):
        value = asked.get(name)
        if value and value != kept.get(name) and not Path(value).exists() and not HUB_NAME.fullmatch(value):
            problems.append(f"--{name} {value}: there is no such file or folder")
    if problems:
        raise BadOption("; ".join(problems))


def _check_evaluation(asked: dict[str, Any], said: dict[str, Any]) -> None:
    """What is about evaluation needs rows for it. Flags are meant; a recipe or a file may serve with and without."""
    if asked.get("valid"):
        return
    if flags := [f"--{name.replace('_', '-')}" for name in EVALUATION if name in said]:
        raise BadOption(
            f"{', '.join(flags)}: nothing is evaluated without --valid; name rows to evaluate on, or leave that out"
        )
    if any(name in asked for name in EVALUATION) and os.environ.get("RANK", "0") == "0":
        _say("nothing is evaluated, and no best model kept, since there is no --valid")


def _before(run: RunFolder, task: str | None, data: str | None) -> dict[str, Any]:
    """What the run was asked when it began; nothing where that is lost and has been said again."""
    try:
        before = run.remembered()
    except BadRun:
        if task is None or data is None:
            raise
        return {}
    if task is not None and not same_task(before["task"], task, moved=True):
        raise BadOption(f"--resume: {run.root} is a run of {before['task']}, not of {task}")
    return before


def _data(data: str | None, before: dict[str, Any], demo: bool, asked: dict[str, Any], run: RunFolder) -> str:
    """The rows: as given, the demo's, or those of the run before, packed already where the raw files are gone."""
    if demo:
        from brimful.tasks.demo import train_file, valid_file

        if data is not None:
            raise BadOption(f"--demo-data: leave {data} out, or leave --demo-data out")
        asked.setdefault("valid", str(valid_file()))
        return str(train_file())
    prepared = _prepared(run, before)
    valid = asked.get("valid")
    if valid and valid == before.get("asked", {}).get("valid") and not Path(valid).exists():
        asked["valid"] = prepared.get("valid", valid)
    if data is not None:
        return data
    if "data" not in before:
        raise BadOption("train: name the rows to train on, or --demo-data for a small set that comes with Brimful")
    raw = str(before["data"])
    packed = prepared.get("data", raw)
    is_packed = Path(raw).name == Path(packed).name  # of a run that was copied, its own store is meant
    there = all(Path(path).exists() for path in (raw, asked.get("tokenizer")) if path)
    return raw if there and not (is_packed and Path(packed).exists()) else packed


def _prepared(run: RunFolder, before: dict[str, Any]) -> dict[str, str]:
    """Where the packed rows of the run before lie."""
    return {name: str(run.root / place) for name, place in (before.get("prepared") or {}).items() if place}


def _processes(asked: dict[str, Any]) -> int:
    gpus, processes = asked.get("gpus"), asked.get("processes")
    if gpus is not None and processes not in (None, gpus):
        raise BadOption(f"--gpus {gpus} --processes {processes}: they mean the same; give one of them")
    return gpus or processes or 1


def _supervised(request: dict[str, Any], run: RunFolder) -> Any:
    """Run it below this process, again and again where it keeps hours."""
    from brimful.training.launch import keep_hours, supervise
    from brimful.training.run import RunLock

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


def _how_to_go_on(sentence: str, run: RunFolder) -> str:
    """The parent's words, with the very command; without them where nothing was saved yet."""
    saved = any(run.checkpoints.glob("step-*"))
    advice = f"go on from the last checkpoint with {run.resume_command}" if saved else "nothing was saved yet"
    return sentence.replace("--resume goes on from the last checkpoint", advice)


@contextmanager
def _left_clean(run: RunFolder) -> Iterator[None]:
    """A run that failed before it began leaves no folder."""
    new = not run.root.exists()
    try:
        yield
    finally:
        if new and not run.has_run and not run.data.exists():  # packed rows are worth keeping
            shutil.rmtree(run.root, ignore_errors=True)
            with suppress(OSError):
                run.root.parent.rmdir()  # `runs`, where this was its first


def _last_words(run: RunFolder, *, json: bool, otherwise: str | None = None) -> None:
    """Of a run that ended well, or that was stopped before it began."""
    end = run.ending() or {}
    result = {"run": str(run.root), **{key: end.get(key) for key in ("reason", "step", "loss", "checkpoint")}}
    lines = [end.get("sentence") or otherwise or "done"]
    if end.get("reason") == "finished":
        lines.append(f"model  {run.root / 'model'}")
        if (run.root / "best").exists():
            lines.append(f"best   {run.root / 'best'}")
    elif run.has_run:
        lines.append(f"go on with: {run.resume_command}")
    show("\n".join(lines), result, as_json=json)


def _say(sentence: str) -> None:
    print(f"brimful: {sentence}", file=sys.stderr, flush=True)
