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

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brimful.errors import BadOption, BadRun
from brimful.planning.target import PlanOptions
from brimful.training.checkpoint import point
from brimful.training.events import read_events
from brimful.training.loop import Hook, Loop
from brimful.training.supervise import look

# One run, one folder: a lock that keeps a second `brimful train` out of a run folder.
#
# The lock is the kernel's (`flock` on RUN/lock), not the file: it ends with the last process that holds the open file, however
# that process dies, so nothing is ever left to clean up. The parent opens it and hands the open file to its first worker;
# the folder stays locked until both have gone, a worker that still saves after its parent was killed included. What the
# file says, pid, box and time, only makes the refusal helpful.


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
"""What a filesystem answers that knows no locks: some network mounts, FUSE."""

_SIGN_S = 0.3
"""Who has just taken a lock may need so long until the file says so."""

log = logging.getLogger("brimful")


class RunLock:
    """Holds a run folder, which it makes where there is none, until it is closed or its process ends.

    `fd` can be passed on to other processes (`pass_fds`); each of them then holds it too.
    """

    def __init__(self, run: Path, *, tell: Callable[[str], object] = log.warning, flag: str = "--run") -> None:
        """`flag` is what names the folder on the command line."""
        self.run = run
        self.fd = _open(run, flag)
        try:
            _claim(self.fd, run, tell, flag)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of it here. Never `LOCK_UN`, which would take it from the others who hold it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _open(run: Path, flag: str) -> int:
    try:
        run.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run):  # a lock file of an earlier run may be writable in a folder that is not
            return os.open(run / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        why = error.strerror or str(error)
        raise BadRun(f"the run folder {run} cannot be written ({why}); name another one with {flag}") from error


def _claim(file: int, run: Path, tell: Callable[[str], object], flag: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = f"{run} is in use by another process{_holder(file)}: wait for it, stop it, or name another {flag}"
        raise BadRun(text) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise BadRun(
                f"the run folder {run} cannot be locked ({error.strerror}); name another one with {flag}"
            ) from error
        tell(f"the filesystem of {run} has no locks ({error.strerror}): nothing keeps a second run out of this folder")
    _sign(file)


def _sign(file: int) -> None:
    mine = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
    }
    with contextlib.suppress(OSError):  # a full disk; the lock holds without a word
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(mine).encode() + b"\n", 0)


def _holder(file: int) -> str:
    """` (pid 4711, since 2026-01-31 21:00:07+01:00)`; nothing where the file does not say."""
    until = time.monotonic() + _SIGN_S
    while not (text := os.pread(file, 4096, 0)) and time.monotonic() < until:
        time.sleep(0.02)
    try:
        said: dict[str, Any] = json.loads(text)
        pid, host, since = int(said["pid"]), str(said["host"]), str(said["since"])
    except (ValueError, KeyError, TypeError):
        return ""
    if host != socket.gethostname():
        return f" (pid {pid} on {host}, since {since})"
    if look(pid)[0] is None:
        return f" (started by pid {pid}, which has ended, since {since}; it may still be saving)"
    return f" (pid {pid}, since {since})"


REQUEST = "run.json"
FIXED = ("size", "from", "freeze", "tokenizer", "columns", "max_tokens", "seed")
"""Options that a resumed run keeps: with others, its weights, rows or random numbers would be another run's."""
PATHS = ("run", "valid", "from", "tokenizer", "plan")
"""Options that name a file or folder."""
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
        return f"brimful train --run {shlex.quote(str(self.root))} --resume"

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
        """With whole paths: a run may be resumed from any folder."""
        part = self.root / f".{REQUEST}.part"
        part.write_text(json.dumps(_placed(request, _whole), indent=1) + "\n")
        part.replace(self.root / REQUEST)

    def remembered(self) -> dict[str, Any]:
        """What `remember` kept. Where the run was moved with all around it, paths have moved with it."""
        path = self.root / REQUEST
        try:
            request = json.loads(path.read_text())
            return _placed(request, lambda path: self._moved(path, request["asked"].get("run")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRun(
                f"{path} cannot be read ({type(error).__name__}): give task, data and options again together with --resume"
            ) from None

    def _moved(self, path: str, before: str | None) -> str:
        """Where something lies that lay just so beside this folder when it was at `before`."""
        if not (before and Path(before).is_absolute() and Path(path).is_absolute()) or Path(path).exists():
            return path
        here = self.root.resolve() / os.path.relpath(path, before)
        return str(here.resolve()) if here.exists() else path

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
            if task is None or same_task(RunFolder(path.parent).remembered()["task"], task, moved=False):
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
    was = {"seed": PlanOptions.seed, **before["asked"]}
    changed = [name for name in FIXED if name in said and not _same(name, was.get(name), said[name])]
    if changed:
        now = ", ".join(
            f"--{name.replace('_', '-')} {said[name]} (it was {was.get(name, 'left to its default')})"
            for name in changed
        )
        raise BadOption(
            f"--resume: {now}: that would be another run; begin one with another --run, --from this one if you like"
        )
    kept = {name: value for name, value in was.items() if name != "plan"}  # the run's folder has the plan
    gone = [name for name in PATHS if name in said and was.get(name) and not Path(said[name]).exists()]
    return {**kept, **said, **{name: was[name] for name in gone if _same(name, was[name], said[name])}}


def same_task(was: str, now: str, *, moved: bool) -> bool:
    """Whether both name one task; where its file may have moved, its name after the colon decides."""
    (old_file, _, old_name), (new_file, colon, new_name) = was.rpartition(":"), now.rpartition(":")
    if not colon or not old_file:
        return was == now
    return old_name == new_name and (moved or Path(old_file).resolve() == Path(new_file).resolve())


def _same(name: str, was: Any, now: Any) -> bool:
    """A number may come as a word, and a folder under another name: from elsewhere, or since it was moved."""
    if was is None or name not in PATHS:
        return str(was) == str(now)
    moved = Path(now).exists() and not Path(was).exists()
    return moved or Path(was).resolve() == Path(now).resolve()


def _placed(request: dict[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """A request with every path in it put through `place`."""
    asked = {name: place(value) if value and name in PATHS else value for name, value in request["asked"].items()}
    file, colon, name = request["task"].rpartition(":")
    task = f"{place(file)}:{name}" if colon else name
    return {**request, "task": task, "data": place(request["data"]), "asked": asked}


def _whole(path: str) -> str:
    """What is no file or folder here stays: a name on the hub, or one that only the task knows."""
    return str(Path(path).absolute()) if os.path.exists(path) else path  # noqa: PTH110 - Path's fails on what is no path


def _how_far(folder: RunFolder) -> str:
    steps = [event["step"] for event in read_events(folder.events) if event["event"] == "step"]
    return f" (up to step {steps[-1]})" if steps else ""


# RUN/model and RUN/best, which lead to the newest and to the best checkpoint's model.


class Links(Hook):
    """They follow the checkpoints."""

    def __init__(self, run: RunFolder, tell: Callable[[str], object]) -> None:
        self._run, self._tell = run, tell

    def before(self, loop: Loop) -> None:
        """A run that was killed between a save and its links."""
        if loop.newest is not None:
            self._point("model", loop.newest)
        if loop.best is not None and (best := loop.checkpoints.path(loop.best.step)).is_dir():
            self._point("best", best)

    def after_save(self, loop: Loop, folder: Path) -> None:
        self._point("model", folder)
        if loop.best is not None and loop.best.step == loop.step:
            self._point("best", folder)

    def _point(self, name: str, folder: Path) -> None:
        point(self._run.root / name, folder / "model", tell=self._tell)
