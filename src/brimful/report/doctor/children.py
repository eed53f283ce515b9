"""Child processes with a time limit, none of which outlives the check that started it.

A broken driver hangs in the kernel, a broken NCCL in C++, with Python's lock held: only another process can give up on them. Each
child is in a session of its own and is killed with its own children: at the time limit, when a child that it works with has failed,
and when the doctor is stopped. If the doctor itself is killed, the kernel ends them (`trial.end_with_parent`), and at the latest an
alarm that each child has set.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

POLL_S = 0.03
SETTLE_S = 1.0
"""After one child has failed, the others have this long to say what they know."""
KILL_S = 2.0
"""A killed process that is still there after this hangs in the kernel, and is left to it."""
TAIL_CHARS = 2000
PROGRAM = ("-m", "brimful.report.doctor.trial")
PARENT, LIMIT = "BRIMFUL_DOCTOR_PARENT", "BRIMFUL_DOCTOR_LIMIT"
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Left over in a shell, they would make each child wait for others."""

stop = threading.Event()
"""Set when the user stops the doctor: the threads that wait for children then kill them and return."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How one child ended, and what it had answered by then."""

    answers: tuple[dict[str, Any], ...] = ()
    code: int | None = 0
    """Its exit code, below 0 for a signal; None if it was killed here."""
    timed_out: bool = False
    hangs: bool = False
    """It could not even be killed."""
    errors: str = ""
    """The end of what it printed."""

    def answer(self, name: str) -> Any:
        """What it answered under this name; None if it did not get there."""
        return next((one[name] for one in self.answers if name in one), None)

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else ""


@dataclass(slots=True)
class _Child:
    process: "subprocess.Popen[bytes]"
    answers: IO[bytes]
    errors: IO[bytes]
    timed_out: bool = False
    killed: bool = False
    hangs: bool = False


def run_children(
    arguments: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    environments: Sequence[Mapping[str, Any]] = (),
    together: bool = False,
) -> list[Ended]:
    """Run `trial.py` with each of these arguments at once, until all have ended or the time is up.

    Those that work `together` would wait for one that has failed, and are ended soon after it.
    """
    children: list[_Child] = []
    with contextlib.ExitStack() as files:
        try:
            for number, words in enumerate(arguments):
                extra = environments[number] if environments else {}
                children.append(_start(words, extra, timeout_s, files))
            _wait(children, timeout_s, together)
        finally:
            for child in children:
                _kill(child)
        return [_ended(child) for child in children]


def _start(words: Sequence[str], extra: Mapping[str, Any], timeout_s: float, files: contextlib.ExitStack) -> _Child:
    """Answers go to a file, not into a pipe, which a grandchild could keep open."""
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    own = {PARENT: os.getpid(), LIMIT: round(timeout_s) + 10, **extra}
    answers = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    errors = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, *PROGRAM, *words],
        env={**inherited, **{name: str(value) for name, value in own.items()}},
        stdin=subprocess.DEVNULL,
        stdout=answers,
        stderr=errors,
        start_new_session=True,
    )
    return _Child(process, answers, errors)


def _wait(children: Sequence[_Child], timeout_s: float, together: bool) -> None:
    deadline, failed = time.monotonic() + timeout_s, False
    while not stop.is_set():
        codes = [child.process.poll() for child in children]
        if all(code is not None for code in codes):
            return
        if together and not failed and any(codes):
            failed, deadline = True, min(deadline, time.monotonic() + SETTLE_S)
        if time.monotonic() > deadline:
            for child, code in zip(children, codes, strict=True):
                child.timed_out = code is None and not failed
            return
        time.sleep(POLL_S)


def _kill(child: _Child) -> None:
    """The whole session, so that nothing a child has started stays."""
    if child.process.poll() is None:
        child.killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        try:
            child.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            child.hangs = True


def _ended(child: _Child) -> Ended:
    child.answers.seek(0)
    answers = []
    for line in child.answers.read().splitlines():
        with contextlib.suppress(ValueError):  # cut off in the middle
            answers.append(json.loads(line))
    child.errors.seek(0)
    return Ended(
        answers=tuple(one for one in answers if isinstance(one, dict)),
        code=None if child.killed else child.process.returncode,
        timed_out=child.timed_out,
        hangs=child.hangs,
        errors=child.errors.read().decode(errors="replace")[-TAIL_CHARS:],
    )
