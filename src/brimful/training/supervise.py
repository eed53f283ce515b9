"""A process that dies ends the job on its box, and the last line of the output is one sentence that says which and why.

    with supervise.watch(rank, world_size):  # every process, when it joins the job
        train()

Collectives cannot do this: a process that retries an out-of-memory step may be minutes late, so ours wait a day. Nor
can the launcher: torchrun ends 0.6 s after a death, but with 54 lines that do not say why. Hence a **sidecar**, one
Python process for each job and box, without torch, in a session of its own (15 MB; 0.6 % of a core for 8 processes;
0.15 s until the first process has started it):

    process 0 ─┐ each a file in the job's folder:          sidecar
    process 1 ─┼─ pid and start time, later "done"  ◄───── looks five times a second, and at once when a process ends:
    process 2 ─┘ or "failed", with its own sentence        its exit code is there until the launcher collects it

On a death it says the sentence, leaves the launcher 1 s to end the others, ends those left (TERM, 5 s later KILL), waits
up to 30 s until the launcher has had its say, and says the sentence again. The first time is for containers and Slurm
steps, which end with their first process: nobody gets to speak after it. A launcher that will start the processes again
(`--max-restarts`) is not waited for; one that was killed ends its processes. The *first cause* is named: whoever failed
because a peer was gone comes last.

`brimful train` starts its processes itself. There the `parent` names the folder (`BRIMFUL_JOB`), watches and speaks.
"""

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brimful.errors import UserError, in_one_line

_JOIN_S = 20.0
"""How long a process that was started again waits for the sidecar of its earlier life to be through."""
_LAUNCHERS = {"torchrun", "torch.distributed.run", "accelerate", "accelerate-launch", "accelerate.commands.launch"}
_LOST_PEER = {"ProcessLost", "DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_PEER_SAYS = ("gloo/transport", "by peer", "ncclRemoteError")
JOB, PARENT = "BRIMFUL_JOB", "BRIMFUL_PARENT"
"""Variables in which `brimful train` tells the processes it starts where their files go, and its pid."""

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Blame(IntEnum):
    """How likely a process is the first cause, the likeliest first; among equals it is the earliest."""

    OWN = 0
    """An exception of its own, an exit code, a crash, a SIGKILL."""
    UNSEEN = 1
    """Gone, and its launcher was quicker to collect the exit code."""
    OUTSIDE = 2
    """Ended by TERM or Ctrl-C, as a launcher ends the peers of a dead process."""
    EARLY = 3
    """Left in good order: a trouble only where somebody still needed it."""
    SECOND_HAND = 4
    """Failed because a peer was gone."""


class Watch:
    """This process's file in the job's folder. With None for a file it does nothing."""

    def __init__(self, file: int | None, pid: int) -> None:
        self._file, self.pid = file, pid

    def fail(self, error: BaseException, *, second_hand: bool | None = None) -> None:
        """Say why this process is about to end, where nobody else will see the exception; the first call counts."""
        if isinstance(error, KeyboardInterrupt):
            self._mark(said="was interrupted", blame=Blame.OUTSIDE)
            return
        mistake = " ".join(str(error).split()) if isinstance(error, UserError) else None
        said = in_one_line(error) if mistake is None else mistake
        blame = Blame.SECOND_HAND if (_lost_peer(error) if second_hand is None else second_hand) else Blame.OWN
        self._mark(said=f"failed: {said.rstrip('.: ')}", blame=blame, mistake=mistake)

    def done(self) -> None:
        """This process has done its work. Called at its exit; after `fail` it changes nothing."""
        self._mark(said="left early", blame=Blame.EARLY)

    def _mark(self, **mark: object) -> None:
        if self._file is not None and os.getpid() == self.pid:  # a forked data worker is not this process
            with contextlib.suppress(OSError):
                os.write(self._file, line(at=time.monotonic(), **mark))
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.done()
        elif not isinstance(error, SystemExit):  # the sidecar sees exit codes for itself
            self.fail(error)


_watch = Watch(None, pid=0)


def watch(rank: int, world_size: int) -> Watch:
    """Put this process under supervision until it ends. Where that cannot be, warn, and training goes on unwatched."""
    global _watch
    if _watch.pid != os.getpid():
        file = None
        try:
            file = _report_to_parent(rank) if has_parent() else _join(_folder(world_size), rank, world_size)
        except Exception as error:
            text = f"process {rank} is not supervised; if it dies, the others may wait for it: {in_one_line(error)}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        _watch = Watch(file, os.getpid())
        atexit.register(_watch.done)
        sys.excepthook = _telling(_watch, sys.excepthook)
    return _watch


def has_parent() -> bool:
    """Whether `brimful train` started this process and is still there: it says then what there is to say.

    The parent's pid must be ours: a program that a worker starts inherits the variables, and is nobody's worker.
    """
    return JOB in os.environ and os.environ.get(PARENT) == str(os.getppid())


def _report_to_parent(rank: int) -> int:
    """This process's file, open, in the folder that its parent watches."""
    file = os.open(Path(os.environ[JOB]) / f"rank-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.write(file, line(**identity(os.getpid()), rank=rank))
    return file


def _telling(watch: Watch, before: _Hook) -> _Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)  # first: it prints the traceback, or keeps the process in a debugger
        finally:
            watch.fail(error)

    return hook


def _lost_peer(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _LOST_PEER) or any(words in str(error) for words in _LOST_PEER_SAYS)


def _folder(world_size: int) -> Path:
    """Where the processes of the job on this box meet, known to each from what its launcher told it.

    The box and the pid namespace belong to it, for a temporary folder may be shared with other boxes and containers;
    so does the restart. The parent does not: a wrapper script around each process would give each a job of its own.
    """
    key = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR")]
    key += [os.environ.get("MASTER_PORT") or f"parent {os.getppid()}", str(world_size), socket.gethostname()]
    if world_size == 1:
        key.append(f"alone {os.getpid()}")
    with contextlib.suppress(OSError):
        key.append(str(Path("/proc/self/ns/pid").readlink()))
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"brimful-{os.getuid()}-{digest}"


def _join(folder: Path, rank: int, world_size: int) -> int:
    """This process's file, open, in the job's folder. Who comes first starts the sidecar."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    entry = line(**identity(os.getpid()), rank=rank, world_size=world_size, launcher=_launcher(), again=again)
    end = time.monotonic() + _JOIN_S
    while time.monotonic() < end:
        with locked(folder) as there:
            served = there and any(map(alive, read(folder / "sidecar")))
            mine = folder / f"rank-{rank}"
            if there and not mine.exists():
                if not served:
                    _start_sidecar(folder)
                file = os.open(mine, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
                os.write(file, entry)
                return file
            if there and not served:
                shutil.rmtree(folder)  # a sidecar was killed and left it
        time.sleep(0.05)  # an earlier set of processes, started again by its launcher: its sidecar is about to end
    raise TimeoutError(f"another process {rank} of the same job has been in {folder} for {_JOIN_S:.0f} s")


def _start_sidecar(folder: Path) -> None:
    """It forks, and the first half returns: so the other is nobody's child and survives whoever happened to start it."""
    command = [sys.executable, "-P", "-m", "brimful.training.sidecar", str(folder)]
    nothing = subprocess.DEVNULL
    subprocess.run(command, stdin=nothing, stdout=nothing, start_new_session=True, timeout=60, check=True)


def _launcher() -> dict[str, Any] | None:
    """The torchrun or accelerate above this process. Nobody waits for another kind of parent: it may live for ever."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            if {Path(word).name for word in process.cmdline()[:4]} & _LAUNCHERS:
                return identity(process.pid)
    return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """The folder, locked: nobody joins a job while its sidecar finds that all have left. False: it was removed just now."""
    import fcntl  # not on Windows, where this module must still import

    held = -1
    while held < 0:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(held).st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        fcntl.flock(held, fcntl.LOCK_EX)
        yield folder.exists() and os.path.samestat(folder.stat(), os.fstat(held))
    finally:
        os.close(held)


def line(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


def read(file: Path) -> list[dict[str, Any]]:
    """Its lines, but for one that is half written; none where there is no file."""
    try:
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    except FileNotFoundError:
        return []


def look(pid: int) -> tuple[str | None, bool, int | None]:
    """A process's start time (None: there is none), whether it is dead, and the exit status Linux shows of a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return (None, True, None) if Path("/proc/self/stat").exists() else _look_without_proc(pid)
    dead = fields[0] in "ZX"
    return fields[19], dead, int(fields[49]) if dead else None


def _look_without_proc(pid: int) -> tuple[str | None, bool, int | None]:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):  # which a zombie raises too
        return str(psutil.Process(pid).create_time()), False, None
    return None, True, None


def identity(pid: int) -> dict[str, Any]:
    """A pid is used again after its process; with the start time it is this process and no other."""
    return {"pid": pid, "started": look(pid)[0]}


def alive(one: dict[str, Any]) -> bool:
    started, dead, _ = look(one["pid"])
    return started == one["started"] and not dead
