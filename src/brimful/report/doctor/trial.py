"""What the doctor runs in child processes: everything that imports torch, uses a card or waits for another process; and how they end.

    python -m brimful.report.doctor.trial torch                    what torch is, and what it sees
    python -m brimful.report.doctor.trial card KIND INDEX          whether one card computes
    python -m brimful.report.doctor.trial rank KIND INDEX SECONDS  an all_reduce with the other ranks

Each answer is a line of JSON. A card is tried with a product of small whole numbers, which every precision must give exactly, and
with 64 MiB that are written and read back. With the CUDA context that is an estimated 1 GiB for a few seconds.

A broken driver hangs in the kernel, a broken NCCL in C++, with Python's lock held: only another process can give up on them. Each child
is in a session of its own and is killed with its own children: at the time limit, when a child that it works with has failed, and when
the doctor is stopped. If the doctor itself is killed, the kernel ends them (`end_with_parent`), and at the latest an alarm that each
child has set.
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
from dataclasses import asdict, dataclass
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


SIZE = 512
BLOCK_BYTES = 64 * 2**20
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer on the real stdout; what libraries print goes to stderr."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    name, *words = sys.argv[1:]
    failed = False
    if name == "torch":
        answer(torch=torch_facts())
    elif name == "card":
        answer(card=try_card(words[0], int(words[1])))
    else:
        result = all_reduce(words[0], int(words[1]), float(words[2]))
        failed = "problem" in result
        answer(all_reduce=result)
    os._exit(int(failed))  # an open process group may abort on its way out


def end_with_parent() -> None:
    """Nobody waits for an orphan: the kernel kills it with its parent, or after the time limit."""
    if hasattr(signal, "alarm"):
        signal.alarm(int(os.environ[LIMIT]))  # not handled, so that the kernel ends the process whatever hangs in it
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != int(os.environ[PARENT]):
        raise SystemExit(1)


def torch_facts() -> dict[str, Any]:
    """torch's build, and the devices it sees, without a CUDA context on any of them."""
    started = time.monotonic()
    import torch

    import_s = time.monotonic() - started
    from brimful.machine.gpu import detect_gpus

    detected = detect_gpus(may_create_context=False)
    distributed = torch.distributed.is_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "archs": torch.cuda.get_arch_list() if torch.version.cuda else [],
        "nccl": distributed and torch.distributed.is_nccl_available(),
        "gloo": distributed and torch.distributed.is_gloo_available(),
        "gpus": [asdict(gpu) for gpu in detected.gpus],
        "notes": list(detected.notes),
        "import_s": import_s,
    }


def try_card(kind: str, index: int) -> dict[str, Any]:
    """Compute and allocate on it; the time includes the start of CUDA."""
    from brimful.errors import in_one_line

    started = time.monotonic()
    try:
        return {**_compute(kind, index), "seconds": time.monotonic() - started}
    except Exception as error:  # whatever a driver or a library raises is the finding
        return {"error": in_one_line(error)}


def _compute(kind: str, index: int) -> dict[str, Any]:
    import torch

    device = torch.device(kind, index)
    if kind == "cuda":
        torch.cuda.set_device(device)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-8, 9, (SIZE, SIZE), generator=generator).float() for _ in range(2))
    expected = left @ right
    product = (left.to(device) @ right.to(device)).cpu()
    ones = torch.ones(BLOCK_BYTES // 4, device=device)
    bf16 = has_bf16(kind)
    half = (left.to(device, torch.bfloat16) @ right.to(device, torch.bfloat16)).float().cpu() if bf16 else expected
    return {
        "correct": torch.equal(product, expected) and int(ones.count_nonzero()) == BLOCK_BYTES // 4,
        "bf16": bf16,
        "bf16_correct": torch.allclose(half, expected, rtol=0.02, atol=1.0),
    }


def has_bf16(kind: str) -> bool:
    """Whether the current card computes in bf16 itself; older ones only emulate it."""
    import torch

    return kind != "cuda" or bool(torch.cuda.is_bf16_supported(including_emulation=False))


def all_reduce(kind: str, index: int, seconds: float) -> dict[str, Any]:
    """One number added up with the other ranks, through the same code with which a training begins."""
    import torch

    from brimful.errors import ConnectionFailed
    from brimful.training.connection import check_connection

    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, index)
    started = time.monotonic()
    try:
        check_connection(device, "nccl" if kind == "cuda" else "gloo", timeout_s=seconds / 2, start_s=seconds / 2)
    except ConnectionFailed as error:
        problem, _, fix = str(error).rstrip(".").partition(". Try: ")
        return {"problem": problem, "fix": fix}
    return {"seconds": time.monotonic() - started}


if __name__ == "__main__":
    main()
