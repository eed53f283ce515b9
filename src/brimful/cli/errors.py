"""How errors end: one message on stderr and exit code 2, in the words of the shell.

The library names arguments in its messages (`memory_limit='20GB'`); here they become flags (`--memory-limit 20GB`). With
BRIMFUL_TRACEBACK=1 the traceback comes first, which helps with a bug in a task of one's own.
"""

import os
import re
import sys
import traceback
from typing import NoReturn

from brimful.errors import TaskError

_ARGUMENT = re.compile(
    r"(?<![\w.=,('\"/-])([a-z][a-z0-9_]*)=(?:'([^']*)'|\"([^\"]*)\"|\(([\d, ]*)\)|([^\s,;:()'\"]*[^\s,;:()'\".])?)"
)
"""`name=` with nothing, a quoted text, a tuple of numbers or a word behind it."""


def with_flags(message: str) -> str:
    """`fill=2 must be …` as `--fill 2 must be …`.

    >>> with_flags("memory_limit='3 apples' must be a size. Try: a higher memory_limit=, or allow_inexact=True.")
    '--memory-limit 3 apples must be a size. Try: a higher --memory-limit, or --allow-inexact.'
    """

    def flag(match: re.Match[str]) -> str:
        name = f"--{match[1].rstrip('_').replace('_', '-')}"
        value = next((group for group in match.groups()[1:] if group is not None), "")
        return name if value in ("", "True") else f"{name} {value.replace(', ', ',') if match[4] else value}"

    return _ARGUMENT.sub(flag, message)


def print_error(error: BaseException | str) -> None:
    """Write one message to stderr, after the traceback if BRIMFUL_TRACEBACK is set."""
    message = str(error)
    if isinstance(error, BaseException) and os.environ.get("BRIMFUL_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    elif isinstance(error, TaskError) and error.__cause__ is not None:
        message += " Set BRIMFUL_TRACEBACK=1 to see the traceback."
    print(f"brimful: error: {with_flags(message)}", file=sys.stderr, flush=True)


def fail(error: BaseException | str, *, code: int = 2) -> NoReturn:
    """Print the error and exit."""
    print_error(error)
    raise SystemExit(code)
