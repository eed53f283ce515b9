"""The process above a training: starts its processes, passes signals on, and has the last word. It never imports torch.

    terminal ── Ctrl-C ──► parent ── SIGTERM, once ──► worker 0   each in a session of its own, so that the
    scancel ─── SIGTERM ─►   │                    └──► worker 1   terminal's Ctrl-C reaches the parent alone
                             ◄── exit status, and what each wrote into its file in the job's folder (`supervise`)

A worker knows one signal, SIGTERM: save and leave. The kernel sends it too when the parent is gone (`bind_to_parent`), so
nobody trains on for ever. After a polite signal a worker may save for as long as it needs; a second Ctrl-C kills all. When
one fails, its peers are ended (TERM, 5 s later KILL), for they would wait for it, and the first cause is named in one
sentence, which only a process outside can do: the kernel's out-of-memory killer leaves no exception.

It wakes five times a second, and at once when a process ends: 20 MB and, with 8 workers, 0.3 % of a core, both measured.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from brimful.errors import in_one_line
from brimful.machine.host import Host
from brimful.training.sidecar import GRACE_S, POLITE, POLL_S, SETTLE_S, Job, Member
from brimful.training.stop import Window, show_time
from brimful.training.supervise import JOB, PARENT, Blame, read

_SAME_S = 3.0
"""How long a user's mistake that one process found waits for the others to find it too, and so be said once for all."""
_GONE_S = 2.0
"""After a second Ctrl-C: until the kernel has taken the killed processes apart, which frees the GPU and the run's lock."""
_LOOK_S = 30.0
"""While a window is shut: how often the clock on the wall is read. It may be set, go over to summer time, or sleep."""
_EARLY_S = 900.0
"""A run leaves before its window shuts, so that its save is over in time; so long before at most."""
_SHOW_CURSOR = b"\x1b[?25h\n"
"""For the terminal: a progress view hides its cursor, and when it is killed leaves it hidden, in the middle of a line."""
_TAIL_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended."""

    code: int
    """0 in good order, 2 a user's mistake, 1 any other failure, 128 + signal where one ended it before it could save."""
    sentence: str | None = None
    """What is left to say, once."""
    reason: str | None = None
    """The `reason` of the journal's last line, such as `window`; None where this job wrote none."""


def supervise(
    command: Sequence[str],
    *,
    processes: int,
    environment: Mapping[str, str],
    job: Path,
    lock_file: int | None = None,
    events: Path | None = None,
    say: Callable[[str], object] | None = None,
) -> Outcome:
    """Run `command` in so many processes until they have ended. For the main thread: it takes over the signals.

    `environment` is all that the workers get, beside what names their places. `job` is a folder for their files, `lock_file`
    goes on to the first, so that a run stays locked until both have gone, and `events` is the journal they write.
    """
    parent = Parent(command, processes=processes, environment=environment, job=job, lock_file=lock_file, say=say)
    before_bytes = _size(events)
    with _heeding(parent.heed):
        try:
            parent.start()
            outcome = parent.run()
        except KeyboardInterrupt:
            parent.await_death()
            text = "stopped at once by a second Ctrl-C; --resume goes on from the last checkpoint"
            return Outcome(code=128 + signal.SIGINT, sentence=text)
        except OSError as error:  # no more processes allowed, no room for the job's folder
            return Outcome(code=1, sentence=f"the training processes could not be started: {in_one_line(error)}")
        finally:
            parent.kill()
    end = _end_of(events, before_bytes)
    if outcome.code > 128 and end:  # it had saved and said so, and was ended on its way out
        outcome = Outcome(code=0)
    return outcome if outcome.code else Outcome(code=0, sentence=end.get("sentence"), reason=end.get("reason"))


class _Worker(Member):
    """A process that we started: its exit status is ours to read."""

    def __init__(self, process: "subprocess.Popen[bytes]", rank: int, world_size: int) -> None:
        super().__init__(pid=process.pid, rank=rank, world_size=world_size)
        self.process, self.asked = process, False

    @property
    def name(self) -> str:
        return super().name if self.world_size > 1 else f"the training process (pid {self.pid})"

    def look(self) -> None:
        if self.gone_at is None and (status := self._status()) is not None:
            self.gone_at, self.status = time.monotonic(), status

    def _status(self) -> int | None:
        """Read but not collected: until it is, its pid, and so its group's number, cannot become somebody else's."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            code = self.process.poll()
            return None if code is None else -code if code < 0 else code << 8
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return None if end is None else end.si_status << 8 * (end.si_code == os.CLD_EXITED)

    def send(self, number: int) -> None:
        """To itself alone, for it looks after its loader's workers; but SIGKILL takes them with it."""
        if self.process.returncode is None:
            (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)


class Parent(Job[_Worker]):
    """One set of workers, from their start to their end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int,
        environment: Mapping[str, str],
        job: Path,
        lock_file: int | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__()
        self._command, self._processes, self._job = list(command), processes, job
        self._environment, self._lock_file, self._say = environment, lock_file, say or _to_stderr
        self._stopped_by: int | None = None
        self._leaving = False

    def start(self) -> None:
        self._job.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in self._job.glob("rank-*"):
            file.unlink()  # of an earlier set
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the kernel throws exit codes away while it is ignored
        port = _free_port()
        for rank in range(self._processes):
            process = subprocess.Popen(
                self._command,
                env=self._places(rank, port),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[self._lock_file] if rank == 0 and self._lock_file is not None else [],
            )
            self.members[f"rank-{rank}"] = _Worker(process, rank, self._processes)
        self._ask_to_stop()  # a signal may have come in between

    def _places(self, rank: int, port: int) -> dict[str, str]:
        mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._processes, "LOCAL_WORLD_SIZE": self._processes}
        names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, JOB: self._job.absolute(), PARENT: os.getpid()}
        threads = {}
        if self._processes > 1 and "OMP_NUM_THREADS" not in self._environment:
            threads["OMP_NUM_THREADS"] = max(1, Host.detect().cores // self._processes)
        return {**self._environment, **{name: str(value) for name, value in {**mine, **names, **threads}.items()}}

    def run(self) -> Outcome:
        while self.well():
            if not self.alive():
                return Outcome(code=0)
            self.rest(POLL_S)
        self._settle()
        outcome = self._failure()  # before the others are ended: what we do to them is nobody's cause
        self.end_all()
        return outcome

    def look(self) -> None:
        for worker in self.members.values():  # before their files: see the sidecar
            worker.look()
        for name, worker in self.members.items():
            with contextlib.suppress(OSError, ValueError):  # a failing disk must not end those who train
                worker.mark = next(iter(read(self._job / name)[1:]), None)

    def rest(self, seconds: float) -> None:
        super().rest(seconds)
        if self._leaving:
            raise KeyboardInterrupt

    def heed(self, number: int, frame: FrameType | None) -> None:
        """A signal: the first asks the workers to save and leave, Ctrl-C after it kills them."""
        if self._stopped_by is None:
            self._stopped_by = number
            again = "; press Ctrl-C again to leave at once" if number == signal.SIGINT else ""
            self._ask_to_stop()
            self._say(f"stopping: saving a checkpoint{again}")
        elif number == signal.SIGINT:
            self._leaving = True
            self._signal_all(signal.SIGKILL)

    def _ask_to_stop(self) -> None:
        for worker in self.alive() if self._stopped_by is not None else []:
            if not worker.asked:
                worker.asked = True
                with contextlib.suppress(OSError):
                    worker.send(signal.SIGTERM)

    def _settle(self) -> None:
        """A doubtful cause waits for a better one, a mistake for the others to find it too, a traceback to be printed."""
        self.until(lambda: self.troubles()[0].blame == Blame.OWN, SETTLE_S)
        if self._mistake():
            self.until(lambda: all(worker.mark for worker in self.alive()), _SAME_S)
        self.until(lambda: not any(worker.mark for worker in self.alive()), GRACE_S)

    def _mistake(self) -> str | None:
        """The sentence of the user's mistake, where one is the first cause."""
        blame, _, _, member = self.troubles()[0]
        return member.mark.get("mistake") if member.mark and blame == Blame.OWN else None

    def _failure(self) -> Outcome:
        first, mistake = self.troubles()[0], self._mistake()
        if self._stopped_by is not None and first.blame == Blame.OUTSIDE:
            how = "Ctrl-C" if self._stopped_by == signal.SIGINT else signal.Signals(self._stopped_by).name
            return Outcome(code=128 + self._stopped_by, sentence=f"stopped by {how} before there was anything to save")
        if mistake and all((worker.mark or {}).get("mistake") == mistake for worker in self.members.values()):
            return Outcome(code=2, sentence=mistake)
        sentence = self.cause()
        advice = "; lower --host-limit or --workers; " if "host memory ran out" in sentence else "; "
        resume = "" if first.member.mark else f"{advice}--resume goes on from the last checkpoint"
        others = "; the other processes were ended" if len(self.members) > 1 else ""
        return Outcome(code=2 if mistake else 1, sentence=sentence + others + resume)

    def await_death(self) -> None:
        end = time.monotonic() + _GONE_S
        while self.alive() and time.monotonic() < end:
            super().rest(POLL_S / 4)

    def kill(self) -> None:
        """Nothing of a failed job is left behind, its loaders' workers included; who ended in good order is collected."""
        if self.alive() or not self.well():
            self._signal_all(signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.write(2, _SHOW_CURSOR if os.isatty(2) else b"")
        for worker in self.members.values():
            worker.process.poll()

    def _signal_all(self, number: int) -> None:
        for worker in self.members.values():
            with contextlib.suppress(OSError):
                worker.send(number)


def keep_hours(
    window: Window,
    start_once: Callable[[], Outcome],
    say: Callable[[str], object],
    *,
    sleep: Callable[[float], object] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Outcome:
    """Run only while the window is open: wait for it, start, and after an end at its close wait again."""
    shutting = False
    while True:
        try:
            with _heeding(_wake):
                while shutting and 0 < window.closes_in_s(now()) < _EARLY_S:
                    sleep(min(_LOOK_S, window.closes_in_s(now())))
                _wait_until_open(window, say, sleep, now)
        except _Woken as woken:
            text = f"stopped by {woken} while it waited for the window {window}; --resume goes on from there"
            return Outcome(code=0, sentence=text, reason="interrupted")
        outcome = start_once()
        if outcome.code or outcome.reason != "window":
            return outcome
        shutting = True
        if outcome.sentence:
            say(outcome.sentence)


def _wait_until_open(
    window: Window, say: Callable[[str], object], sleep: Callable[[float], object], now: Callable[[], float]
) -> None:
    if not window.is_open(now()):
        say(f"waiting until {show_time(now() + window.opens_in_s(now()), now())}: the window is {window}")
    while not window.is_open(now()):
        sleep(min(_LOOK_S, max(0.1, window.opens_in_s(now()))))


class _Woken(Exception):
    """A signal came while nothing ran."""


def _wake(number: int, frame: FrameType | None) -> NoReturn:
    raise _Woken("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


def bind_to_parent() -> None:
    """For a worker, as early as may be: when its parent ends, the kernel sends SIGTERM. Linux only; elsewhere it looks once."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):  # a C library without prctl
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != int(parent):  # it ended before we asked
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _heeding(react: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Polite signals come to `react` meanwhile, but those that are ignored stay so: nohup, a job in the background."""
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in POLITE}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, react)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def _to_stderr(sentence: str) -> None:
    """In one write, as a signal handler may be in the middle of another; a terminal that was closed takes nothing."""
    with contextlib.suppress(OSError):
        fresh_line = "\n" if os.isatty(2) else ""  # behind the ^C that the terminal shows
        os.write(2, f"{fresh_line}brimful: {sentence}\n".encode())


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _size(file: Path | None) -> int:
    return file.stat().st_size if file is not None and file.exists() else 0


def _end_of(events: Path | None, since_bytes: int) -> dict[str, Any]:
    """The journal's `end` line, unless it is of an earlier start."""
    if events is None or not events.exists():
        return {}
    with events.open("rb") as file:
        file.seek(max(since_bytes, _size(events) - _TAIL_BYTES))
        for text in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                found = json.loads(text)
                if found.get("event") == "end":
                    return dict(found)
    return {}
