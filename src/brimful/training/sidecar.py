"""The process beside a job that sees its processes die, ends the rest, and has the last word; `supervise` says why.

Started by the first process of a job on a box, `python -m brimful.training.sidecar FOLDER`. It must not import torch.

What it knows of deaths and their first cause is in `Member` and `Job`, on which `parent` builds too: `brimful train`
starts its processes itself, and so needs nobody beside them.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

from brimful.machine.cgroup import oom_kills
from brimful.training.supervise import Blame, alive, identity, line, locked, look, read

POLL_S, GRACE_S, _TERM_S, _LAUNCHER_S, _WRITE_S = 0.2, 1.0, 5.0, 30.0, 10
SETTLE_S = 0.5
"""How long a doubtful cause (a lost connection, a TERM) waits for a better one before anything is said."""
POLITE = [number for name in ("SIGTERM", "SIGINT", "SIGHUP") if (number := getattr(signal, name, None))]
"""Signals that somebody sends on purpose: Ctrl-C, scancel, a launcher that ends the peers of a dead process."""


class Member:
    """One process of a job: what it said of itself, and how it ended."""

    def __init__(self, *, pid: int, rank: int, world_size: int) -> None:
        self.pid, self.rank, self.world_size = pid, rank, world_size
        self.mark: dict[str, Any] | None = None
        self.gone_at: float | None = None
        self.status: int | None = None

    @property
    def name(self) -> str:
        return f"process {self.rank} of {self.world_size} (pid {self.pid})"

    def send(self, number: int) -> None:
        """Give it a signal, if it is still the same process."""
        raise NotImplementedError

    def trouble(self) -> "Trouble | None":
        if self.mark is not None and not (self.mark["blame"] == Blame.EARLY and self.status):
            return Trouble(Blame(self.mark["blame"]), self.mark["at"], self.mark["said"], self)
        return None if self.gone_at is None else Trouble(*self.end(), self)

    def end(self) -> tuple[Blame, float, str]:
        """What its exit status says."""
        assert self.gone_at is not None
        if self.status is None:
            return Blame.UNSEEN, self.gone_at, "is gone without a word"
        if number := self.status & 0x7F:  # the bit above says that a core was dumped, the byte above is the exit code
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            blame, verb = (Blame.OUTSIDE, "ended") if number in POLITE else (Blame.OWN, "killed")
            return blame, self.gone_at, f"was {verb} by {name}" + (" after its work was done" if self.mark else "")
        if self.status:
            return Blame.OWN, self.gone_at, f"left with exit code {self.status >> 8}"
        return Blame.EARLY, self.gone_at, "left early"  # `os._exit(0)`, or a fork that runs no exit handlers


class Trouble(NamedTuple):
    """How much a process is to blame, since when, and what happened to it."""

    blame: Blame
    at: float
    words: str
    member: Member


_Kind = TypeVar("_Kind", bound=Member)


class Job(Generic[_Kind]):
    """The processes of a job on this box: who is alive, who failed first and why, and the end of the rest."""

    def __init__(self) -> None:
        self.members: dict[str, _Kind] = {}
        self.oom_kills = oom_kills()

    def look(self) -> None:
        """See who has ended and what each has said."""
        raise NotImplementedError

    def alive(self) -> list[_Kind]:
        return [member for member in self.members.values() if member.gone_at is None]

    def troubles(self) -> list[Trouble]:
        """The first cause first."""
        known = [trouble for member in self.members.values() if (trouble := member.trouble())]
        return sorted(known, key=lambda trouble: (trouble.blame, trouble.at))

    def well(self) -> bool:
        """Nobody has failed: all are at work, or have left in good order."""
        return all(trouble.blame == Blame.EARLY for trouble in self.troubles())

    def cause(self) -> str:
        """`process 1 of 3 (pid 4711) was killed by SIGKILL (nothing in the kernel's out-of-memory count)`."""
        blame, _, words, member = self.troubles()[0]
        if "SIGKILL" in words or "without a word" in words:
            words += self.memory()
        if "SIGBUS" in words:
            words += " (often a full /dev/shm)"
        if blame == Blame.SECOND_HAND and member.world_size > len(self.members):
            words += " (no process of this box failed before it: look at the other boxes)"
        return f"{member.name} {words}"

    def memory(self) -> str:
        now = oom_kills()
        if now is None or self.oom_kills is None:
            return " (the kernel's out-of-memory count cannot be read)"
        if now > self.oom_kills:
            return f": host memory ran out (the kernel's out-of-memory count went from {self.oom_kills} to {now})"
        return " (nothing in the kernel's out-of-memory count)"

    def end_all(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for member in self.alive():
                with contextlib.suppress(OSError):
                    member.send(number)
            self.until(lambda: not self.alive(), _TERM_S)

    def until(self, reached: Callable[[], bool], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not reached() and time.monotonic() < end:
            self.rest(POLL_S / 4)

    def rest(self, seconds: float) -> None:
        """Sleep, but wake at once when a process ends, and look."""
        waiting = select.poll()
        with contextlib.ExitStack() as opened:
            try:
                for member in self.alive():
                    file = os.pidfd_open(member.pid)
                    opened.callback(os.close, file)
                    waiting.register(file, select.POLLIN)
                waiting.poll(seconds * 1000)
            except ProcessLookupError:
                pass  # gone already
            except (AttributeError, OSError):  # macOS, an old kernel
                time.sleep(seconds)
        self.look()


class _Member(Member):
    """A process known from its file and from the kernel: somebody else started it."""

    def __init__(self, entry: dict[str, Any]) -> None:
        super().__init__(pid=int(entry["pid"]), rank=entry["rank"], world_size=entry["world_size"])
        self.entry = entry
        self.orphaned_at: float | None = None

    def look(self) -> None:
        if self.gone_at is None:
            started, dead, status = look(self.pid)
            if dead or started != self.entry["started"]:
                self.gone_at = time.monotonic()
                self.status = status if started == self.entry["started"] else None
            elif self.entry["launcher"] and not self.orphaned_at and not alive(self.entry["launcher"]):
                self.orphaned_at = time.monotonic()

    def send(self, number: int) -> None:
        if alive(self.entry):  # looked at again in the same breath: its pid may be another's by now
            os.kill(self.pid, number)

    def trouble(self) -> Trouble | None:
        if self.mark is None and self.orphaned_at is not None:
            words = f"lost its launcher (pid {self.entry['launcher']['pid']})"
            return Trouble(Blame.OWN, self.orphaned_at, words, self)
        return super().trouble()


class _Sidecar(Job[_Member]):
    """Watches one set of processes until they are gone."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def run(self) -> None:
        while self.well():
            if not self.alive() and self.close():
                return
            self.rest(POLL_S)
        self.until(lambda: self.troubles()[0].blame == Blame.OWN, SETTLE_S)
        again = any(member.entry["again"] for member in self.members.values())
        launchers = [member.entry["launcher"] for member in self.members.values() if member.entry["launcher"]]
        files = _stderr_of(launchers)
        if self.troubles()[0].blame <= Blame.UNSEEN and not again:
            _say(f"{self.cause()}; ending the job on this box", [2])
        self.until(lambda: not self.alive(), GRACE_S)
        sentence = self.sentence(again)
        self.end_all()
        self.close(force=True)
        end = time.monotonic() + _LAUNCHER_S
        while not again and any(map(alive, launchers)) and time.monotonic() < end:
            time.sleep(POLL_S / 4)
        _say(sentence, files)

    def look(self) -> None:
        # Processes before files: one that marks its file and leaves between the two must not seem to leave unmarked.
        for member in self.members.values():
            member.look()
        for file in self.folder.glob("rank-*"):
            if lines := read(file):
                member = self.members.setdefault(file.name, _Member(lines[0]))
                member.mark = lines[1] if len(lines) > 1 else None

    def sentence(self, again: bool) -> str | None:
        """The last line. None after a Ctrl-C that reached everybody: who pressed it knows."""
        bad = [trouble for trouble in self.troubles() if trouble.blame != Blame.EARLY]
        if not self.alive() and all(trouble.blame == Blame.OUTSIDE for trouble in bad):
            if all("interrupted" in trouble.words or "SIGINT" in trouble.words for trouble in bad):
                return None
            return self.cause() + (", and with it all others on this box" if len(self.members) > 1 else "")
        if again:
            return f"{self.cause()}; the launcher starts the processes again"
        others = "the other processes were" if len(self.members) > 1 else "the job on this box was"
        return f"{self.cause()}; {others} ended"

    def close(self, *, force: bool = False) -> bool:
        """Remove the folder, unless somebody has joined meanwhile."""
        with locked(self.folder):
            self.look()
            over = force or not self.alive()
            if over:
                shutil.rmtree(self.folder)
        return over


def _stderr_of(launchers: list[dict[str, Any]]) -> list[int]:
    """Where the last line goes: to our own stderr, and to the launcher's where `--tee` or `--redirects` parted them."""
    files = [2]
    for launcher in launchers:
        with contextlib.suppress(OSError):
            file = os.open(f"/proc/{launcher['pid']}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
            if any(os.path.samestat(os.fstat(file), os.fstat(other)) for other in files):
                os.close(file)
            else:
                files.append(file)
    return files


def _say(sentence: str | None, files: list[int]) -> None:
    """One line. A pipe that nobody empties holds us for 10 s and no longer."""
    for file in files if sentence else []:
        signal.alarm(_WRITE_S)
        with contextlib.suppress(OSError):
            prompt = "\n" if os.isatty(file) else ""  # the shell may have written its prompt by now
            os.write(file, f"{prompt}brimful: {sentence}\n".encode())
        signal.alarm(0)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("nobody reads what we write")


def main(folder: Path) -> None:
    """The sidecar: in the background, deaf to the signals that end a job, and gone soon after its processes."""
    if pid := os.fork():
        (folder / "sidecar").write_bytes(line(**identity(pid)))
        return
    os.chdir("/")
    for number in POLITE:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _give_up)
    _Sidecar(folder).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
