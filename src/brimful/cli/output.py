"""What every command prints: results on stdout, progress and errors on stderr.

An error ends in one message and exit code 2, in the words of the shell: the library names arguments in its messages
(`memory_limit='20GB'`), here they become flags (`--memory-limit 20GB`), or lines of the file they come from
(`memory_limit = "20GB" in my.toml`). The error's code stands before it, in Chinese also what the code means and where it is
explained. With --traceback, or BRIMFUL_TRACEBACK=1, the traceback comes first, which helps to find a bug in your own task.
"""

import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console, RenderableType

from brimful.errors import BrimfulError, TaskError, UserError, in_one_line, traceback_hint, wants_traceback, with_hint
from brimful.languages import language, tr, translate

_ARGUMENT = re.compile(
    r"\b(?P<encoder>(?:ecfp|unimol)(?: [a-z_]+=\w+)+)|"
    r"(?<![\w.=,('\"/-])(?P<name>[a-z][a-z0-9_]*)=(?:'([^']*)'|\"([^\"]*)\"|\((?P<numbers>[\d, ]*)\)|([^\s,;:()'\"，；：（）。]*[^\s,;:()'\".，；：（）。])?)",
    re.ASCII,
)
"""`name=`, alone or followed by a quoted text, a tuple of numbers or a word; but not in the name of an encoder, which shows
its options: `ecfp bits=1024`."""
_COUNT = re.compile(r"[\d,]+ of [\d,]+")
COUNT_S = 10.0
"""Seconds between two lines of one count."""


def show(result: RenderableType, data: dict[str, Any], *, as_json: bool) -> None:
    """The result on stdout: as one JSON object and nothing else, or as people read it."""
    if as_json:
        print(json.dumps(data), flush=True)
    elif isinstance(result, str):
        print(result, flush=True)  # not through rich, which would break a command over two lines
    else:
        Console().print(result, crop=False)  # a command that must not be broken may be wider than the terminal


@contextmanager
def progress(title: str, *, every_s: float = 0) -> Iterator[Callable[[str], None]]:
    """Progress on stderr, a phrase for each piece of work: a spinner on a terminal, else at most one line in `every_s`.

    Of a phrase that counts (`rows: 512 of 24,000`), one line in ten seconds is enough, and the last count once all is done.
    """
    console, count = Console(stderr=True), 0
    if not sys.stderr.isatty():
        last, counted, held = -every_s, dict[str, float](), ""

        def write(phrase: str) -> None:
            print(f"{translate(title)}{tr(': ')}{translate(phrase)}", file=sys.stderr, flush=True)

        def line(phrase: str) -> None:
            nonlocal last, held
            now, work = time.monotonic(), _COUNT.split(phrase)[0]
            held = phrase if work != phrase else ""
            if now - last < every_s or (held and now - counted.get(work, -math.inf) < COUNT_S):
                return
            last, held = now, ""
            counted[work] = now
            write(phrase)

        yield line
        if held:
            write(held)
        return
    title = translate(title)
    with console.status(title) as status:

        def update(phrase: str) -> None:
            nonlocal count
            count += 1
            status.update(f"{title}  [dim]{count:>2}[/]  {translate(phrase)}")

        yield update


def with_flags(message: str) -> str:
    """`fill=2 must be …` as `--fill 2 must be …`.

    >>> with_flags("memory_limit='3 apples' must be a size. Try: a higher memory_limit=, or allow_inexact=True.")
    '--memory-limit 3 apples must be a size. Try: a higher --memory-limit, or --allow-inexact.'
    """

    def flag(match: re.Match[str]) -> str:
        if match["encoder"]:
            return match[0]
        name = f"--{match['name'].rstrip('_').replace('_', '-')}"
        value = next((group for group in match.groups()[2:] if group is not None), "")
        if match["numbers"]:
            value = value.replace(", ", ",").rstrip(",")
        return name if value in ("", "True") else f"{name} {value}"

    return _ARGUMENT.sub(flag, message)


def name_files(message: str, origins: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """Options that come from a recipe or a config file, named as such where the message has their value.

    `values` are those in effect. An option that is only advised stays one to give.

    >>> name_files("fill=2 must be at most 1. Try: fill=0.8.", {"fill": "my.toml"}, {"fill": 2})
    'fill = 2 in my.toml must be at most 1. Try: fill=0.8.'
    """

    def named(match: re.Match[str]) -> str:
        name = (match["name"] or "").rstrip("_")
        value = next((group for group in match.groups()[2:] if group is not None), "")
        if name not in origins or value != str(values[name]).strip("()[]"):
            return match[0]
        return f"{name} = {json.dumps(values[name], ensure_ascii=False)} in {origins[name]}"

    return _ARGUMENT.sub(named, message)


@contextmanager
def naming_files(origins: Mapping[str, str], values: Mapping[str, Any]) -> Iterator[None]:
    """A user's mistake in here is reported as `name_files` does."""
    try:
        yield
    except UserError as error:
        error.args = (name_files(str(error), origins, values), *error.args[1:])
        raise


def print_error(error: BaseException | str, code: str | None = None) -> None:
    """Write one message to stderr, after the traceback if BRIMFUL_TRACEBACK is set. `code`: of a message without its error."""
    if isinstance(error, BaseException) and wants_traceback():
        traceback.print_exception(error)
    message = with_hint(str(error), traceback_hint(error)) if isinstance(error, BaseException) else error
    code = error.code if isinstance(error, BrimfulError) else code
    cause = error.__cause__ if isinstance(error, TaskError) else None
    quoted = "" if cause is None else in_one_line(cause).rstrip(". ")
    print(error_line(message, code, quoted), file=sys.stderr, flush=True)


def error_line(message: str, code: str | None, quoted: str = "") -> str:
    """`brimful: error B101: --fill 2 must be …`; in Chinese with what the code means and where it is explained.

    `quoted` is the text of an error in the user's own code, whose `dim=7` is no flag.
    """
    parts = translate(message).partition(quoted) if quoted else (translate(message), "", "")
    message = with_flags(parts[0]) + parts[1] + with_flags(parts[2])
    if code is None:
        return tr("brimful: error: {message}", message=message)
    if language() == "en":
        return f"brimful: error {code}: {message}"
    message += "\n" * (not message.endswith("。"))  # a command is copied without what follows
    return tr(
        "brimful: error {code} ({meaning}): {message}See {page}",
        code=code, meaning=tr(code), message=message, page=f"docs/zh/errors.md#{code.lower()}",
    )  # fmt: skip


def fail(error: BaseException | str, *, code: str | None = None, status: int = 2) -> NoReturn:
    """Print the error and exit."""
    print_error(error, code)
    raise SystemExit(status)


def prefer_growing_segments() -> None:
    """Varying shapes fragment torch's default segments (20.0 GiB reserved for 15.4 in use); these can grow instead.

    Must be set before torch is imported.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
