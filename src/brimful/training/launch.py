"""Start the training processes of a run, watch them, and say in one message how they ended.

    terminal ── Ctrl-C ──► parent ── SIGTERM, once ──► rank 0     each in a session of its own, so that the
    scancel ─── SIGTERM ─►   │                    └──► rank 1     terminal's Ctrl-C reaches the parent alone
                             ◄── exit status, and a report file from each rank that failed

A worker knows one signal, SIGTERM: save and exit. The kernel sends it too when the parent dies (`worker`). After the first
signal a worker may take as long as it needs to save; a second Ctrl-C kills all. When one worker fails, the others are
ended (SIGTERM, 5 s later SIGKILL), because they would wait for it, and the first cause is named. Only a process outside
can do that: the kernel's out-of-memory killer leaves no exception.

Why not torchrun's agent: importing it takes 3.0 s and 233 MB in a process that the user waits for, where this one takes
20 MB and starts the workers at once; it ends workers that are still saving after 30 s; and after a kernel out-of-memory
kill it prints 30 lines without the word memory (all measured, torch 2.13). Under torchrun or `accelerate launch` their
agent does this work, and `supervise` is not used.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

from brimful.errors import UserError, in_one_line, traceback_hint, wants_traceback, with_hint
from brimful.languages import translate
from brimful.machine.cgroup import oom_kills
from brimful.machine.host import Host
from brimful.training.stop import STOP_SIGNALS

REPORTS, PARENT = "BRIMFUL_REPORTS", "BRIMFUL_PARENT"
"""Environment variables that tell a worker where its report goes, and its parent's pid."""
POLL_S = 0.1
GRACE_S = 1.0
"""A worker that has reported a failure has this long to print its traceback and exit."""
SETTLE_S = 0.5
"""After a failure: how long to wait for the others' reports before the first cause is chosen."""
SAME_MISTAKE_S = 3.0
"""The same after a user's mistake, which all processes find at about the same time and which is then printed once."""
TERMINATE_S = 5.0
KILLED_S = 2.0
"""After a second Ctrl-C: until the kernel has released the GPU and the run's lock."""
_SHOW_CURSOR = b"\x1b[?25h\n"
"""A progress view that is killed leaves the terminal's cursor hidden."""
_LOST_PEER_ERRORS = {"ProcessLost", "DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_PEER_MESSAGES = ("gloo/transport", "by peer", "ncclRemoteError")
_PR_SET_PDEATHSIG = 1


class Blame(IntEnum):
    """How likely a process is the first cause of a failure, the likeliest first; among equals the earliest."""

    OWN = 0
    """An exception, an exit code, a crash or a SIGKILL."""
    STOPPED = 1
    """Ended by SIGTERM or Ctrl-C from outside."""
    LEFT = 2
    """Exited with 0: a failure only if another process still needed it."""
    LOST_PEER = 3
    """Failed because another process was gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended."""

    code: int
    """0 in good order, 2 a user's mistake, 1 any other failure, 128 + signal if it was stopped before it could save."""
    message: str | None = None
    error_code: str | None = None
    """Of the error that ended it (`BrimfulError.code`), if that was a user's mistake."""
    advice: str | None = None
    """What to change before resuming."""
    resumable: bool = False
    """Whether resuming from the last checkpoint is the thing to do."""


# ---- The parent ------------------------------------------------------------------------------------------------------


def supervise(
    command: Sequence[str],
    *,
    processes: int,
    environment: Mapping[str, str],
    reports: Path,
    lock_file: int | None = None,
    note: Callable[[str], object] | None = None,
) -> Outcome:
    """Run `command` in this many processes until they have ended. Call it from the main thread: it handles signals.

    `environment` is everything the workers get besides their ranks, `reports` a folder for their report files. Rank 0
    inherits `lock_file`, so that the run stays locked until both the parent and rank 0 have gone.
    """
    job = _Job(note or _to_stderr)
    with _handling_signals(job.on_signal):
        try:
            job.start(command, processes, environment, reports, lock_file)
            return job.wait()
        except KeyboardInterrupt:
            job.wait_until(lambda: not job.alive(), KILLED_S)
            return Outcome(code=128 + signal.SIGINT, message="stopped at once by a second Ctrl-C", resumable=True)
        except OSError as error:  # no more processes allowed, no space for the reports
            return Outcome(code=1, message=f"the training processes could not be started: {in_one_line(error)}")
        finally:
            job.kill_rest()


@dataclass(frozen=True, slots=True)
class _Failure:
    blame: Blame
    at: float
    message: str
    worker: "_Worker"


class _Worker:
    """One training process: its report and its exit status."""

    def __init__(self, process: "subprocess.Popen[bytes]", rank: int, size: int, report: Path) -> None:
        self.process, self.rank, self.size, self.pid = process, rank, size, process.pid
        self._report_file = report
        self.report: dict[str, Any] | None = None
        self.status: int | None = None
        """As wait() encodes it: the exit code in the high byte, a signal in the low seven bits."""
        self.ended_at: float | None = None

    @property
    def name(self) -> str:
        which = "the training process" if self.size == 1 else f"process {self.rank} of {self.size}"
        return f"{which} (pid {self.pid})"

    def look(self) -> None:
        if self.ended_at is None and (status := self._exit_status()) is not None:
            self.ended_at, self.status = time.monotonic(), status
        if self.report is None:
            with contextlib.suppress(OSError, ValueError):  # none yet, or half written
                self.report = json.loads(self._report_file.read_text())

    def _exit_status(self) -> int | None:
        """Read but not collected: until it is, its pid, and so its group's number, cannot become another process's."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            code = self.process.poll()
            return None if code is None else -code if code < 0 else code << 8
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return None if end is None else end.si_status << 8 * (end.si_code == os.CLD_EXITED)

    def has_failed(self) -> bool:
        if self.ended_at is not None:
            return bool(self.status)
        return self.report is not None and time.monotonic() - self.report["at"] > GRACE_S

    def failure(self) -> _Failure | None:
        if self.report is not None:
            return _Failure(Blame(self.report["blame"]), self.report["at"], self.report["message"], self)
        if self.status is None or self.ended_at is None:
            return None
        if number := self.status & 0x7F:
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            stopped = number in STOP_SIGNALS
            message = f"was {'stopped' if stopped else 'killed'} by {name}"
            return _Failure(Blame.STOPPED if stopped else Blame.OWN, self.ended_at, message, self)
        if self.status:
            return _Failure(Blame.OWN, self.ended_at, f"ended with exit code {self.status >> 8}", self)
        return _Failure(Blame.LEFT, self.ended_at, "ended before the others", self)

    def send(self, number: int) -> None:
        """To the process alone, which looks after its loader's workers; SIGKILL goes to them as well."""
        with contextlib.suppress(OSError):
            if self.process.returncode is None:
                (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)


class _Job:
    """One set of workers, from their start to their end."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self.workers: list[_Worker] = []
        self._note = note
        self._stopped_by: int | None = None
        self._leaving = False
        self._oom_kills = oom_kills()

    def start(
        self,
        command: Sequence[str],
        processes: int,
        environment: Mapping[str, str],
        reports: Path,
        lock_file: int | None,
    ) -> None:
        reports.mkdir(mode=0o700, parents=True, exist_ok=True)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while it is ignored, the kernel discards exit codes
        shared = {
            "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
            REPORTS: reports.absolute(), PARENT: os.getpid(),
            **{name: loopback_interface() for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in environment},
        }  # fmt: skip
        if processes > 1 and "OMP_NUM_THREADS" not in environment:
            shared["OMP_NUM_THREADS"] = max(1, Host.detect().cores // processes)
        for rank in range(processes):
            variables = {**shared, "RANK": rank, "LOCAL_RANK": rank}
            process = subprocess.Popen(
                list(command),
                env={**environment, **{name: str(value) for name, value in variables.items()}},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[lock_file] if rank == 0 and lock_file is not None else [],
            )
            self.workers.append(_Worker(process, rank, processes, reports / f"rank-{rank}.json"))
        if self._stopped_by is not None:  # a signal came meanwhile
            self._send(signal.SIGTERM)

    def wait(self) -> Outcome:
        """Until all have ended, or one has failed and the others were ended for it."""
        while not any(worker.has_failed() for worker in self.workers):
            if not self.alive():
                return Outcome(code=0)
            self._poll()
        self.wait_until(lambda: not self.alive(), SAME_MISTAKE_S if self._is_mistake() else SETTLE_S)
        outcome = self._outcome()  # before the others are ended: what we do to them is not the cause
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._send(number)
            self.wait_until(lambda: not self.alive(), TERMINATE_S)
        return outcome

    def alive(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.ended_at is None]

    def wait_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not condition() and time.monotonic() < end:
            self._look()
            time.sleep(POLL_S / 4)

    def _poll(self) -> None:
        time.sleep(POLL_S)
        self._look()
        if self._leaving:
            raise KeyboardInterrupt

    def _look(self) -> None:
        for worker in self.workers:
            worker.look()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks the workers to save and exit; Ctrl-C after it kills them."""
        if self._stopped_by is None:
            self._stopped_by = number
            self._send(signal.SIGTERM)
            hint = "; press Ctrl-C again to leave at once" if number == signal.SIGINT else ""
            self._note(f"stopping after this step and saving a checkpoint{hint}")
        elif number == signal.SIGINT:
            self._leaving = True
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for worker in self.alive():
            worker.send(number)

    def _first(self) -> _Failure:
        """The first cause."""
        failures = [failure for worker in self.workers if (failure := worker.failure())]
        return min(failures, key=lambda failure: (failure.blame, failure.at))

    def _is_mistake(self) -> bool:
        first = self._first()
        return first.blame == Blame.OWN and bool((first.worker.report or {}).get("mistake"))

    def _outcome(self) -> Outcome:
        first, mistake = self._first(), self._is_mistake()
        report = first.worker.report or {}
        if self._stopped_by is not None and first.blame == Blame.STOPPED:
            how = "Ctrl-C" if self._stopped_by == signal.SIGINT else signal.Signals(self._stopped_by).name
            return Outcome(code=128 + self._stopped_by, message=f"stopped by {how} before there was anything to save")
        hints = [worker.report["hint"] for worker in self.workers if worker.report]  # not all may have the cause
        hint = max(hints, default="")
        if mistake and all((worker.report or {}).get("message") == report["message"] for worker in self.workers):
            message = with_hint(report["message"].removeprefix("failed: "), hint)
            return Outcome(code=2, message=message, error_code=report.get("code"))
        why, advice = self._why_killed(first.message)
        others = "; the other processes were ended" if len(self.workers) > 1 else ""
        message = with_hint(f"{first.worker.name} {first.message.rstrip('.')}{why}{others}", hint)
        code = report.get("code") if mistake else None
        return Outcome(
            code=2 if mistake else 1, message=message, error_code=code, advice=advice, resumable=not report
        )  # fmt: skip

    def _why_killed(self, message: str) -> tuple[str, str | None]:
        """What is known about a kill from outside, and what to do."""
        if "SIGBUS" in message:
            return " (often a full /dev/shm)", None
        if "SIGKILL" not in message:
            return "", None
        before, now = self._oom_kills, oom_kills()
        if before is None or now is None:
            return " (the kernel's out-of-memory counter cannot be read)", None
        if now > before:
            why = f" because host memory ran out (the kernel's out-of-memory counter went from {before} to {now})"
            return why, "lower --host-limit or --workers"
        return " (not by the kernel's out-of-memory killer)", None

    def kill_rest(self) -> None:
        """Leave nothing of a failed job behind, its loaders' workers included."""
        if any(worker.ended_at is None or worker.status for worker in self.workers):
            for worker in self.workers:
                worker.send(signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.write(2, _SHOW_CURSOR if os.isatty(2) else b"")
        for worker in self.workers:
            worker.process.poll()


@contextlib.contextmanager
def _handling_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Signals that are ignored stay ignored: nohup, a job in the background."""
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in STOP_SIGNALS}
    handled = [number for number, action in before.items() if action is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def _to_stderr(message: str) -> None:
    """In one write: a signal handler may interrupt another one."""
    with contextlib.suppress(OSError):
        new_line = "\n" if os.isatty(2) else ""  # after the ^C that the terminal shows
        os.write(2, f"{new_line}brimful: {translate(message)}\n".encode())


def loopback_interface() -> str:
    """All ranks are on this machine, so no other machine needs to reach them: `lo`, on macOS `lo0`."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# ---- The worker ------------------------------------------------------------------------------------------------------


def has_parent() -> bool:
    """Whether `supervise` started this process and is still there; it then prints what there is to say.

    The parent's pid must be ours: a program that a worker starts inherits the variables without being a worker.
    """
    return REPORTS in os.environ and os.environ.get(PARENT) == str(os.getppid())


@contextlib.contextmanager
def worker() -> Iterator[None]:
    """Around all that a training process does: it stops when its parent dies, and reports why it failed.

    A user's mistake ends it with exit code 2, without a traceback unless it is wanted; the parent prints the message.
    """
    _stop_with_parent()
    try:
        yield
    except UserError as error:
        if wants_traceback():
            traceback.print_exception(error)
        _report(error)
        raise SystemExit(2) from None
    except (Exception, KeyboardInterrupt) as error:
        _report(error)
        raise


def _report(error: BaseException) -> None:
    message, blame = in_one_line(error), Blame.OWN
    if isinstance(error, UserError):
        message = " ".join(str(error).split())
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _LOST_PEER_ERRORS or any(words in str(error) for words in _LOST_PEER_MESSAGES):
        blame = Blame.LOST_PEER
    elif isinstance(error, KeyboardInterrupt):
        message, blame = "was interrupted", Blame.STOPPED
    if blame != Blame.STOPPED:
        message = f"failed: {message}"
    report = {
        "message": message,
        "blame": blame,
        "mistake": isinstance(error, UserError),
        "code": getattr(error, "code", None) if isinstance(error, UserError) else None,
        "hint": traceback_hint(error),
        "at": time.monotonic(),
    }
    with contextlib.suppress(OSError):
        (Path(os.environ[REPORTS]) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(report))


def _stop_with_parent() -> None:
    """When the parent ends, the kernel sends SIGTERM. Linux only; elsewhere the parent is looked for once."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):  # a C library without prctl
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != int(os.environ[PARENT]):  # it ended before this call
        os.kill(os.getpid(), signal.SIGTERM)
