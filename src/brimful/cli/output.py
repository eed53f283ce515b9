"""How commands speak: results on stdout (one JSON object, or a table), progress on stderr."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType


def show(result: RenderableType, data: dict[str, Any], *, as_json: bool) -> None:
    """The result: as one JSON object and nothing else, or as people read it."""
    if as_json:
        print(json.dumps(data), flush=True)
    elif isinstance(result, str):
        print(result, flush=True)  # as it is: a command that is told must not be broken over two lines
    else:
        Console().print(result)


@contextmanager
def progress(title: str, *, every_s: float = 0) -> Iterator[Callable[[str], None]]:
    """A phrase for each piece of work: a spinner on a terminal, plain lines elsewhere, one in `every_s` at most."""
    console, count = Console(stderr=True), 0
    if not sys.stderr.isatty():
        last = -every_s

        def line(phrase: str) -> None:
            nonlocal last
            if time.monotonic() - last >= every_s:
                last = time.monotonic()
                print(f"{title}: {phrase}", file=sys.stderr, flush=True)

        yield line
        return
    with console.status(title) as status:

        def say(phrase: str) -> None:
            nonlocal count
            count += 1
            status.update(f"{title}  [dim]{count:>2}[/]  {phrase}")

        yield say
