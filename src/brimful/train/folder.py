"""The run's folder: everything a run knows and did, so that it can be resumed, watched and explained from there alone.

    RUN/
    ├── run.json        what was asked: task, data, every option; a resume needs nothing else
    ├── plan.json       the plan it trains with (plan-1.json, … where processes on unlike devices have their own)
    ├── events.jsonl    what happened, only appended to
    ├── checkpoints/    step-00000200/, …; best.json
    ├── data/           token stores and a tokenizer, where raw files were given
    ├── model, best     links to the newest and the best checkpoint's model
    └── lock            held while somebody trains

Imports no torch: the supervising parent reads and writes here too.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.errors import BadOption, BadRun
from brimful.plan.options import FitOptions
from brimful.train.journal import read_events

REQUEST = "run.json"
FIXED = ("size", "from", "freeze", "tokenizer", "columns", "max_tokens", "seed")
"""Options that a resumed run keeps: with others, its weights, rows or random numbers would be another run's."""
PAUSES = ("time-limit", "window")
"""Endings after which the same command goes on without being told to resume."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run lies."""

    root: Path

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def data(self) -> Path:
        return self.root / "data"

    def plan(self, rank: int = 0) -> Path:
        """The first process's, unless this one has a plan of its own."""
        own = self.own_plan(rank)
        return own if own.is_file() else self.own_plan(0)

    def own_plan(self, rank: int) -> Path:
        return self.root / ("plan.json" if rank == 0 else f"plan-{rank}.json")

    @property
    def has_run(self) -> bool:
        """Whether something was trained here, or saved; a run that failed before its first step left nothing to lose."""
        return any(self.checkpoints.glob("step-*")) or any(
            event["event"] == "step" for event in read_events(self.events)
        )

    @property
    def resume_command(self) -> str:
        return f"brimful train --run {self.root} --resume"

    def ending(self) -> dict[str, Any] | None:
        """The last `end` line, unless something was begun after it."""
        for event in reversed(list(read_events(self.events))):
            if event["event"] == "end":
                return dict(event)
            if event["event"] in ("begin", "step"):
                return None
        return None

    def make(self) -> None:
        """With everything below it that training writes into."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise BadRun(
                f"{self.root} cannot be written ({error.strerror or error}): name a folder of yours with --run"
            ) from None

    def remember(self, request: dict[str, Any]) -> None:
        part = self.root / f".{REQUEST}.part"
        part.write_text(json.dumps(request, indent=1) + "\n")
        part.replace(self.root / REQUEST)

    def remembered(self) -> dict[str, Any]:
        """What `remember` kept."""
        path = self.root / REQUEST
        try:
            request = json.loads(path.read_text())
            return {"task": request["task"], "data": request["data"], "asked": dict(request["asked"]), **request}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadRun(
                f"{path} cannot be read ({type(error).__name__}): give task, data and options again together with --resume"
            ) from None

    @property
    def knows_its_request(self) -> bool:
        return (self.root / REQUEST).is_file()


def new_run(task: str) -> Path:
    """`runs/chatlm-sft-20261116-210500`, with a number where two begin in the same second."""
    stem = Path("runs") / f"{Path(task.split(':')[-1]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(path for path in (stem, *(Path(f"{stem}-{n}") for n in range(2, 1000))) if not path.exists())


def newest_run(task: str | None) -> Path:
    """The run below `runs/` that was touched last, of this task where one is named."""
    found = []
    for path in Path("runs").glob(f"*/{REQUEST}"):
        with suppress(BadRun):  # one that cannot be read is no reason to refuse the others
            if task is None or RunFolder(path.parent).remembered()["task"] == task:
                found.append(path.parent)
    if not found:
        which = f" of {task}" if task else ""
        raise BadRun(f"--resume: there is no run{which} below runs/; name its folder with --run")
    return max(found, key=lambda path: (path / REQUEST).stat().st_mtime)


def opened(root: Path, *, resume: bool) -> tuple[RunFolder, bool]:
    """The folder, and whether a run goes on in it: because that was asked for, or because it only paused."""
    folder = RunFolder(root)
    if resume and not (folder.has_run or folder.knows_its_request):
        there = "there is no such folder" if not root.exists() else "no run was ever begun in it"
        raise BadRun(f"--resume: nothing to resume in {root}: {there}; leave --resume out to begin a run")
    if resume or not folder.has_run:
        return folder, resume
    ending = folder.ending()
    if ending is not None and ending.get("reason") in PAUSES:
        return folder, True
    raise BadRun(
        f"{root} has a run in it already{_how_far(folder)}: add --resume to go on with it, or name another folder with --run"
    )


def go_on(before: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The options of a run that goes on: what is said now wins, but for what makes it the run that it is."""
    was = {"seed": FitOptions.seed, **before["asked"]}
    changed = [name for name in FIXED if name in said and said[name] != was.get(name)]
    if changed:
        now = ", ".join(
            f"--{name.replace('_', '-')} {said[name]} (it was {was.get(name, 'left to its default')})"
            for name in changed
        )
        raise BadOption(
            f"--resume: {now}: that would be another run; begin one with another --run, --from this one if you like"
        )
    kept = {name: value for name, value in was.items() if name != "plan"}  # the run's folder has the plan
    return {**kept, **said}


def _how_far(folder: RunFolder) -> str:
    steps = [event["step"] for event in read_events(folder.events) if event["event"] == "step"]
    return f" (up to step {steps[-1]})" if steps else ""
