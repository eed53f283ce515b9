"""Every error Brimful raises on purpose, in one tree: `UserError` and its kinds, and `InternalError`.

The message of a `UserError` has two sentences at most: what is wrong with the value seen, then what to do. Each kind has a code
that never changes, by which `docs/errors.md` and `docs/zh/errors.md` explain it: B1xx a request, B2xx data, task or model, B3xx
memory and devices, B4xx gradients and weights, B5xx processes, B6xx run folders and checkpoints, B900 Brimful itself.
"""

import os
import traceback
from pathlib import Path
from typing import Any


class BrimfulError(Exception):
    """The root of all errors that Brimful raises on purpose.

    >>> import brimful
    >>> try:
    ...     brimful.simulated_memory("lots")
    ... except brimful.BrimfulError as error:
    ...     print(type(error).__name__, error.code)
    BadOption B101
    """

    code = "B900"
    """Stable from version to version; the command line shows it."""


class UserError(BrimfulError):
    """A request that cannot work. The command line prints the message and exits with code 2."""

    code = "B100"


class BadOption(UserError):
    """A flag, a config value or an argument is out of range. Lists every problem at once."""

    code = "B101"


class UnknownTask(UserError):
    """There is no such built-in task, no such file, or no such name in the file."""

    code = "B102"


class BadData(UserError):
    """Rows, a token store or a tokenizer cannot be read. Names the file, and the line where there is one."""

    code = "B201"


class TaskError(UserError):
    """The task is at fault: a method is missing, its parts disagree, or its loss is not a number."""

    code = "B202"


class InexactSplit(UserError):
    """Splitting the batch would change the result, and `--allow-inexact` was not given."""

    code = "B303"


class DoesNotFit(UserError):
    """Not even the smallest step fits. `needed_bytes` is what it would take."""

    code = "B301"

    def __init__(self, message: str, *, needed_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class DeviceBusy(UserError):
    """The device does not exist, or other processes hold its memory."""

    code = "B302"


class ServerBusy(UserError):
    """A server has no place for another request, or is shutting down (`ending`). `retry_after_s` is when to try again."""

    code = "B304"

    def __init__(self, message: str, *, retry_after_s: int, ending: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s, self.ending = retry_after_s, ending


class UnsupportedModel(UserError):
    """A model, wrapper or optimizer whose step cannot be split and repeated. Names it, and what to use instead."""

    code = "B204"


class NonFiniteGradients(UserError):
    """The gradients were NaN or inf in more consecutive steps than allowed."""

    code = "B401"


class PartialUpdate(UserError):
    """The optimizer's step failed midway, so some weights may be updated and others not. Names the last checkpoint."""

    code = "B402"


class ProcessLost(UserError):
    """Another process of this job ended, or stopped with an error of its own."""

    code = "B501"


class ConnectionFailed(UserError):
    """The processes of a job cannot reach each other before training begins."""

    code = "B502"


class BadModel(UserError):
    """A model folder cannot be used: another architecture, damaged weights, or ids its tokenizer does not have."""

    code = "B203"


class BadRun(UserError):
    """A run folder cannot be used: another process trains in it, it is not writable, or there is nothing to resume."""

    code = "B601"


class BadCheckpoint(UserError):
    """A checkpoint is incomplete or damaged."""

    code = "B602"


class SaveFailed(UserError):
    """A checkpoint could not be written. Earlier checkpoints are intact."""

    code = "B603"


class MissingExtra(UserError):
    """An optional dependency is not installed."""

    code = "B103"

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed. Try: pip install 'brimful[{extra}]'.")


class StoppedWaiting(BaseException):
    """Raised by a signal handler to end a wait for rows. Not an error: the code that reads rows must not catch it."""


class InternalError(BrimfulError):
    """An invariant of Brimful is broken."""


def in_one_line(error: BaseException) -> str:
    """`KeyError: 'ids'`: the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def user_line(error: BaseException) -> str:
    """Where the user's own code failed, as ` at mine.py:12`; empty if only Brimful and installed packages were running."""
    libraries = Path(__file__).parent, Path(os.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = {"site-packages", "dist-packages"} & set(path.parts)
        if path.is_file() and not installed and not any(path.is_relative_to(folder) for folder in libraries):
            here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return f" at {here}:{frame.lineno}"
    return ""


def will_repeat(error: BaseException) -> bool:
    """Whether the same step would fail the same way again: a mistake in the task, its data or its options.

    A full disk, a lost connection or too little memory may be over by then, also if the task's own code ran into them.
    """
    cause = error.__cause__ if isinstance(error, TaskError) and error.__cause__ is not None else error
    text = str(cause)
    if isinstance(cause, OSError) and not isinstance(cause, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return False
    if isinstance(cause, MemoryError) or "out of memory" in text or ("CUDA error" in text and "assert" not in text):
        return False
    if isinstance(error, BrimfulError):
        return isinstance(error, (BadOption, UnknownTask, BadData, TaskError, UnsupportedModel, BadModel, InexactSplit))
    return isinstance(error, Exception) and bool(user_line(error))


def kind_of(value: Any) -> str:
    """`an int`, `a Linear`: the type of a value with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def wants_traceback() -> bool:
    """Whether BRIMFUL_TRACEBACK is set: the traceback of a user's mistake is then printed before its message."""
    return os.environ.get("BRIMFUL_TRACEBACK", "0") not in ("", "0")


def traceback_hint(error: BaseException) -> str:
    """A sentence on how to see the traceback, if the user's own code raised this error; else empty."""
    own = isinstance(error, TaskError) and error.__cause__ is not None
    return "Add --traceback to see the traceback." if own and not wants_traceback() else ""


def with_hint(message: str, hint: str) -> str:
    """The message, and the hint as a further sentence."""
    return f"{message.rstrip('. ')}. {hint}" if hint else message
