"""Every error Brimful raises on purpose, in one tree.

    BrimfulError
    ├── UserError            something asked for cannot work: one sentence, exit code 2, no traceback
    │   ├── BadOption        a value of a flag, a config file or an argument
    │   ├── UnknownTask      no such built-in task, file or name in the file
    │   ├── BadData          a file of rows, a token store or a tokenizer cannot be used; names file and line
    │   ├── TaskError        the task itself is at fault: `dummy` and `loss` disagree, a NaN, no rows
    │   ├── Inexact          cutting this batch would change the result, and nobody allowed that
    │   ├── DoesNotFit       the memory asked for is too small; carries the bytes needed
    │   ├── DeviceBusy       the device is missing, or full with other processes' memory
    │   ├── Unsuited         the model or optimizer is of a kind whose step cannot be redone
    │   ├── NonFinite        gradients were NaN or inf in too many steps in a row
    │   ├── HalfUpdate       the optimizer's own step failed: only a checkpoint helps
    │   ├── LostProcess      another process of the job ended
    │   ├── BadModel         a model folder of another kind, damaged, or at odds with its tokenizer
    │   ├── BadRun           a run folder in use, unwritable, of another run, or with nothing to resume
    │   ├── BadCheckpoint    a checkpoint that is incomplete or damaged; names the file
    │   ├── SaveFailed       a checkpoint could not be written; those before it are whole
    │   ├── NoConnection     the processes of a job cannot talk to each other; names what helps
    │   └── MissingExtra     an optional package is needed; names the pip command
    └── InternalError        a bug in Brimful; never the user's fault

The message of a `UserError` says what was wrong, what was available and what to do, in one sentence.
"""


class BrimfulError(Exception):
    """The root: catch this to catch everything Brimful raises on purpose."""


class UserError(BrimfulError):
    """Something asked for cannot work. Printed as one sentence, exit code 2."""


class BadOption(UserError):
    """A flag, a config value or an argument is out of range; lists every problem at once."""


class UnknownTask(UserError):
    """There is no such built-in task, no such file, or no such name in the file."""


class BadData(UserError):
    """A file of rows, a token store or a tokenizer cannot be read; names the file, and the line where there is one."""


class TaskError(UserError):
    """The task is at fault: its parts disagree, or its loss is not a number."""


class Inexact(UserError):
    """Cutting the batch would change the result, and `--allow-inexact` was not given."""


class DoesNotFit(UserError):
    """Not even the smallest step fits. `needed_bytes` is what it would take."""

    def __init__(self, message: str, *, needed_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class DeviceBusy(UserError):
    """The device does not exist, or other processes hold its memory."""


class Unsuited(UserError):
    """A model, wrapper or optimizer whose step cannot be cut and redone; named, with what to use instead."""


class NonFinite(UserError):
    """The gradients were NaN or inf more often in a row than allowed."""


class HalfUpdate(UserError):
    """The optimizer's own step failed, so the weights may be half updated; names the last checkpoint."""


class LostProcess(UserError):
    """Another process of this job ended, or stopped with a sentence of its own."""


class BadModel(UserError):
    """A model folder cannot be used: another architecture, missing or damaged weights, ids at odds with its tokenizer."""


class BadRun(UserError):
    """A run folder cannot be used: another process trains in it, it cannot be written, there is nothing to resume."""


class BadCheckpoint(UserError):
    """A checkpoint is incomplete or damaged."""


class SaveFailed(UserError):
    """A checkpoint could not be written. Nothing that was there before is lost."""


class NoConnection(UserError):
    """The processes of a job cannot reach each other before training begins."""


class MissingExtra(UserError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; it comes with: pip install 'brimful[{extra}]'")


class InternalError(BrimfulError):
    """An invariant of Brimful broke."""


def in_one_line(error: BaseException) -> str:
    """`KeyError: 'ids'`: the kind of error and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
