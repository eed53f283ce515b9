"""The run's folder: what a run was requested to do and what it did, so that it can be resumed, watched and explained from it alone.

    RUN/
    ├── run.json        the request: task, data, every option; a resume needs nothing else
    ├── plan.json       the plan it trains with (plan-1.json, … for ranks on other devices)
    ├── plans/          0001.json, …: every plan it has trained with
    ├── events.jsonl    what happened, only appended to
    ├── log.txt         the same for people, with warnings and tracebacks
    ├── checkpoints/    step-00000200/, …; best.json
    ├── data/           token stores and a tokenizer, if raw files were given
    ├── model, best     links to the newest and the best checkpoint's model
    └── lock            held while a process trains

Imports no torch: the process that the user starts reads and writes here too.
"""

import json
import logging
import os
import re
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from brimful.errors import BadOption, BadRun
from brimful.files import FileLock, parse_object, read_json, write_atomic
from brimful.machine.host import process_started
from brimful.planning.plan_options import PlanOptions
from brimful.training.events import error_repeats, read_events
from brimful.training.options import TrainOptions

RUN_OPTIONS = ("run", "resume", "rollback")
"""Options of training that a request has as fields of its own."""
PATH_OPTIONS = ("valid", "plan")
"""Options of training that name a file. A task marks its own with `field(metadata={"path": True})`."""
PAUSED = "time-limit"
"""The ending after which the same command continues without `--resume`."""
_SIGN_S = 0.3
"""A process that has just taken the lock may need this long to write who it is."""
_SAVE_S = 600.0
"""How long to wait for a run that was killed and is still saving."""
_JOB_PREFIX = ".job-"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
log = logging.getLogger("brimful")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a run is to do: built once from flags, files and the run's folder, then passed on as it is."""

    task: str
    """A built-in name or file.py:name; the task's name for a run started from Python."""
    data: str | None
    """None for rows in memory."""
    run: str
    """The run's folder."""
    resume: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the user set of `TrainOptions` and `PlanOptions`."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    """What the user set of the task's own options."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """For each of these options that a file has set, the file: `recipe small`, or its path."""
    prepared: Mapping[str, str | None] = field(default_factory=dict)
    """Where the rows ready for `Task.rows` are, relative to the run's folder if they are in it."""
    plan_for: Mapping[str, Any] | None = None
    """The options that the plan in the folder was made for."""
    rollback: int | None = None
    """The number of the kept plan to go back to. `options` and `plan_for` are those of that plan already."""
    dry_run: Literal["", "table", "json"] = ""
    """Make the plan, print it in this form, and train nothing."""

    @cached_property
    def train_options(self) -> TrainOptions:
        return TrainOptions(**pick(self.options, TrainOptions), run=self.run, resume=self.resume)

    @cached_property
    def plan_options(self) -> PlanOptions:
        return PlanOptions(**pick(self.options, PlanOptions))

    @property
    def values(self) -> dict[str, Any]:
        return {**self.options, **self.task_options}

    def check(self) -> None:
        """Raise one `BadOption` with every value that cannot work."""
        problems = []
        for options in ("train_options", "plan_options"):
            try:
                getattr(self, options)
            except BadOption as error:
                problems.append(str(error))
        if problems:
            raise BadOption(" ".join(problems))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def map_paths(self, place: Callable[[str], str], task_paths: Callable[[str, Any], bool]) -> "Request":
        """The request with every path in it replaced by `place(path)`. `task_paths(name, value)` finds those of the task."""
        file, colon, name = self.task.rpartition(":")
        return replace(
            self,
            task=f"{place(file)}:{name}" if colon else name,
            data=None if self.data is None else place(self.data),
            options={k: place(v) if v and k in PATH_OPTIONS else v for k, v in self.options.items()},
            task_options={k: place(v) if v and task_paths(k, v) else v for k, v in self.task_options.items()},
        )


def pick(values: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Those of the values that are options of this class, except those that say which run it is and how it goes on."""
    names = {option.name for option in fields(owner)} - {*RUN_OPTIONS}
    return {name: value for name, value in values.items() if name in names}


def absolute(path: str) -> str:
    """What is no file or folder here stays: a name on the hub, or one that only the task knows."""
    return str(Path(path).absolute()) if os.path.exists(path) else path  # noqa: PTH110 - Path's fails on what is no path


def is_missing(path: str) -> bool:
    """Whether it neither exists here nor reads like owner/name on the hub."""
    return not Path(path).expanduser().exists() and not _HUB_NAME.fullmatch(path)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run on disk."""

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

    @property
    def request_file(self) -> Path:
        return self.root / "run.json"

    def plan(self, rank: int = 0) -> Path:
        """The plan of a rank: its own, else rank 0's."""
        own = self.own_plan(rank)
        return own if own.is_file() else self.own_plan(0)

    def own_plan(self, rank: int) -> Path:
        return self.root / ("plan.json" if rank == 0 else f"plan-{rank}.json")

    @property
    def plans(self) -> Path:
        return self.root / "plans"

    def kept_plan(self, number: int, rank: int = 0) -> Path:
        """plans/0001.json; plans/rank-1-0001.json of a rank with a plan of its own."""
        return self.plans / f"{'' if rank == 0 else f'rank-{rank}-'}{number:04}.json"

    def kept_plans(self) -> list[Path]:
        """plans/0001.json, …: every plan that the run has trained with, the oldest first."""
        return sorted(self.plans.glob("[0-9]*.json"))

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def has_run(self) -> bool:
        """Whether something was trained or saved here. A run that failed before its first step left nothing to lose."""
        return self.has_checkpoint or any(event["event"] == "step" for event in read_events(self.events))

    @property
    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("step-*"))

    @property
    def resume_command(self) -> str:
        return f"brimful train --run {shlex.quote(str(self.root))} --resume"

    @property
    def fails_again(self) -> bool:
        """Whether the run ended with an error that a resume would run into again."""
        return error_repeats(self.ending() or {})

    def ending(self) -> dict[str, Any] | None:
        """The last `end` event, unless something was begun after it."""
        for event in reversed(list(read_events(self.events))):
            if event["event"] == "end":
                return dict(event)
            if event["event"] in ("begin", "step"):
                return None
        return None

    def create(self) -> None:
        """With everything that training writes into."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise BadRun(
                f"{self.root} is not writable ({error.strerror or error}). Try: another folder with run=."
            ) from None

    @contextmanager
    def removed_if_not_begun(self) -> Iterator[None]:
        """A run that failed before it began leaves no folder, unless it has prepared data, which are worth keeping."""
        created = [path for path in (self.root, *self.root.parents) if not path.exists()]
        try:
            yield
        finally:
            if created and not self.has_run and not self.data.exists():
                shutil.rmtree(self.root, ignore_errors=True)
                for path in created[1:]:
                    with suppress(OSError):
                        path.rmdir()

    @contextmanager
    def job_folder(self) -> Iterator[Path]:
        """For what the processes of a job report, while its lock is held: so those of killed jobs can be removed."""
        for left in self.root.glob(f"{_JOB_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_JOB_PREFIX, dir=self.root, ignore_cleanup_errors=True) as path:
            yield Path(path)

    def write_request(self, request: Request) -> None:
        """With absolute paths: a run may be resumed from any folder."""
        content = request.map_paths(absolute, lambda name, value: False).to_json()
        for name in ("resume", "rollback", "dry_run"):  # of this call, not of the run
            del content[name]
        content["run"] = str(self.root.absolute())
        write_atomic(self.request_file, json.dumps(content, indent=1, default=str) + "\n")

    def read_request(self) -> Request:
        """What `write_request` wrote. If the run was moved together with what is around it, so are the paths."""
        try:
            before = parse_object(Request, read_json(self.request_file.read_text()))
            moved = before.map_paths(
                lambda path: self._moved(path, before.run),
                lambda name, value: isinstance(value, str) and Path(value).is_absolute(),
            )
        except (OSError, ValueError) as error:
            raise BadRun(
                f"{self.request_file} cannot be read ({type(error).__name__}). "
                "Try: task, data and all options again, together with resume=True."
            ) from None
        return replace(moved, run=str(self.root))

    def _moved(self, path: str, run_before: str) -> str:
        """Where a file is that had the same place relative to this folder when it was at `run_before`."""
        if not (Path(run_before).is_absolute() and Path(path).is_absolute()) or Path(path).exists():
            return path
        here = self.root.resolve() / os.path.relpath(path, run_before)
        return str(here.resolve()) if here.exists() else path

    def last_step(self) -> int | None:
        steps = [event["step"] for event in read_events(self.events) if event["event"] == "step"]
        return steps[-1] if steps else None


def new_run(task: str) -> Path:
    """`runs/sft-20261116-210500`, with a number if two begin in the same second."""
    stem = Path("runs") / f"{Path(task.split(':')[-1]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(path for path in (stem, *(Path(f"{stem}-{n}") for n in range(2, 1000))) if not path.exists())


def newest_run(task: str | None) -> Path:
    """The run in `runs/` that was changed last; with a task, the newest run of that task."""
    candidates = []
    for path in Path("runs").glob("*/run.json"):
        with suppress(BadRun):  # one that cannot be read does not hide the others
            if task is None or same_task(RunFolder(path.parent).read_request().task, task, moved=False):
                candidates.append(path.parent)
    if not candidates:
        which = f" of {task}" if task else ""
        raise BadRun(f"runs/ has no run{which} to resume. Try: name its folder with run=.")
    return max(candidates, key=lambda path: (path / "run.json").stat().st_mtime)


def open_run(
    root: Path, *, resume: bool, rollback: bool | int = False, may_begin: bool = False, note: Callable[[str], object] = log.warning
) -> tuple[RunFolder, bool]:  # fmt: skip
    """The folder, and whether its run continues: because that was requested, or because a time limit paused it.

    With `may_begin`, a run that is to be resumed and was never begun begins now: one command serves every restart. One that is
    to go back to an earlier plan must have been begun.
    """
    resume = resume or bool(rollback)
    folder, first = RunFolder(root), os.environ.get("RANK", "0") == "0"
    if file := next((path for path in (root, *root.parents) if path.is_file()), None):
        problem = "is a file" if file == root else f"is inside the file {file}"
        raise BadRun(f"run={str(root)!r} {problem}. Try: a folder that does not exist yet.")
    if resume and first:
        _wait_for_former_workers(root, note)
    if resume and not (folder.has_run or folder.request_file.is_file()):
        why = "no run was started in it" if root.exists() else "there is no such folder"
        if rollback:
            raise BadRun(f"{root} has no plan to go back to: {why}. Try: run= with the folder of a run.")
        if may_begin:
            if first:
                note(f"{root} has nothing to resume ({why}), so a new run begins")
            return folder, False
        raise BadRun(f"{root} has nothing to resume: {why}. Try: the same without resume=True.")
    if resume or not folder.has_run:
        return folder, resume
    ending = folder.ending()
    if ending is not None and ending.get("reason") == PAUSED:
        return folder, True
    step = folder.last_step()
    progress = "" if step is None else f" (up to step {step})"
    raise BadRun(
        f"{root} already has a run in it{progress}. Try: resume=True to continue it, or another folder with run=."
    )


def _wait_for_former_workers(run: Path, note: Callable[[str], object]) -> None:
    """Training processes whose parent was killed save and leave. A run whose parent is alive is not waited for."""
    lock, end, noted = run / "lock", time.monotonic() + _SAVE_S, False
    while (holder := lock_holder(lock)) is not None and holder.has_ended and time.monotonic() < end:
        try:
            FileLock(lock).close()
            return
        except BlockingIOError:
            if not noted:
                note(f"waiting for {run}: the run that pid {holder.pid} started was killed and is still saving")
            noted = True
            time.sleep(0.1)
        except OSError:
            return  # `RunLock` says what is wrong


def merge(
    before: Request, options: Mapping[str, Any], task_options: Mapping[str, Any], origins: Mapping[str, str] = MappingProxyType({})
) -> Request:  # fmt: skip
    """The request of a resumed run: options given now win, except those that would make it another run.

    Those are the seed, the dtype of the weights and the task's own options: with others, weights, rows or random numbers would
    not be the run's.
    """
    changed = []
    for name in ("seed", "weights"):
        was = before.options.get(name, getattr(PlanOptions, name))
        if options.get(name, was) != was:
            changed.append((name, "not given" if was is None else was, options[name]))
    for name, value in task_options.items():
        if not _same(before.task_options.get(name), value):
            changed.append((name, before.task_options.get(name, "not given"), value))
    if changed:
        values = " and ".join(f"{name}={now} (it was {was})" for name, was, now in changed)
        raise BadOption(f"a resumed run cannot change {values}. Try: a new run, in another folder with run=.")
    kept = {name: value for name, value in before.options.items() if name != "plan"}  # the folder has the plan
    gone = [name for name in PATH_OPTIONS if name in options and not Path(options[name]).exists()]
    again = {name: kept[name] for name in gone if _same(kept.get(name), options[name])}
    gone_of_task = {k: before.task_options[k] for k, v in task_options.items() if not os.path.exists(str(v))}  # noqa: PTH110
    origins_before = {k: v for k, v in before.origins.items() if k not in options and k not in task_options}
    return replace(
        before,
        origins={**origins_before, **origins},
        options={**kept, **options, **again},
        task_options={**before.task_options, **task_options, **gone_of_task},
    )


def same_task(was: str, now: str, *, moved: bool) -> bool:
    """Whether both name one task. If its file may have moved, the name after the colon decides."""
    (old_file, _, old_name), (new_file, colon, new_name) = was.rpartition(":"), now.rpartition(":")
    if not colon or not old_file:
        return was == now
    return old_name == new_name and (moved or Path(old_file).resolve() == Path(new_file).resolve())


def _same(was: Any, now: Any) -> bool:
    """A number may come as text, and a path be written in another way or name the place a folder was moved to."""
    if was is None or not isinstance(was, str) or not Path(was).is_absolute():
        return str(was) == str(now)
    moved = Path(now).exists() and not Path(was).exists()
    return moved or Path(was).resolve() == Path(now).resolve()


class RunLock(FileLock):
    """Keeps a second process out of a folder, which is created if it does not exist.

    The parent opens it and hands `fd` to rank 0, so the folder stays locked while a worker saves after its parent was
    killed. What the file says (pid, host, time) only makes the refusal helpful.
    """

    def __init__(self, run: Path, *, note: Callable[[str], object] = log.warning, flag: str = "run=") -> None:
        """`flag` is how the user names the folder."""
        try:
            run.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=run):  # an old lock file may be writable in a folder that is not
                super().__init__(run / "lock")
        except BlockingIOError:
            raise BadRun(
                f"{run} is in use by another process{_describe_holder(run / 'lock')}. Try: another {flag}."
            ) from None
        except OSError as error:
            raise BadRun(f"{run} is not writable ({error.strerror or error}). Try: another {flag}.") from error
        if not self.supported:
            note(f"the filesystem of {run} has no locks, so nothing keeps a second run out of this folder")
        self._sign()

    def _sign(self) -> None:
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        with suppress(OSError):  # a full disk; the lock holds all the same
            os.ftruncate(self.fd, 0)
            pid = os.getpid()
            holder = LockHolder(pid=pid, host=socket.gethostname(), since=now, started=process_started(pid))
            os.pwrite(self.fd, json.dumps(asdict(holder)).encode(), 0)


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who signed a lock."""

    pid: int
    host: str
    since: str
    started: int | None = None
    """By `process_started`, since its number may be another process's by now: in a restarted container all numbers come again."""

    @property
    def has_ended(self) -> bool:
        """As far as can be known: not of a process on another machine."""
        if self.host != socket.gethostname():
            return False
        own = True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            own = False  # another user's, which may be hidden in /proc
        started = process_started(self.pid)
        return self.started is not None and started != self.started and (own or started is not None)


def lock_holder(lock: Path) -> LockHolder | None:
    """Who has signed this lock file last; None if it does not say. The lock itself may have been released since."""
    try:
        holder = read_json(lock.read_text())
        started = holder.get("started")
        return LockHolder(
            pid=int(holder["pid"]), host=str(holder["host"]), since=str(holder["since"]),
            started=started if isinstance(started, int) else None,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _describe_holder(lock: Path) -> str:
    """` (pid 4711, since 2026-01-31 21:00:07+01:00)`; empty if the file does not say."""
    end = time.monotonic() + _SIGN_S
    while not lock.read_text() and time.monotonic() < end:
        time.sleep(0.02)
    holder = lock_holder(lock)
    if holder is None:
        return ""
    if holder.has_ended:
        return f" (started by pid {holder.pid}, which has ended, since {holder.since}; it may still be saving)"
    host = "" if holder.host == socket.gethostname() else f" on {holder.host}"
    return f" (pid {holder.pid}{host}, since {holder.since})"
