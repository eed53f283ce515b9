"""How commands speak: results on stdout (one JSON object, or a table), progress on stderr."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType


def show(result: RenderableType, data: dict[str, Any], *, as_json: bool) -> None:
    """The result: as one JSON object and nothing else, or as people read it."""
    if as_json:
        print(json.dumps(data), flush=True)
    else:
        Console().print(result)


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A phrase for each piece of work: a spinner on a terminal, plain lines elsewhere."""
    console, count = Console(stderr=True), 0
    if not sys.stderr.isatty():
        yield lambda phrase: print(f"{title}: {phrase}", file=sys.stderr, flush=True)
        return
    with console.status(title) as status:

        def say(phrase: str) -> None:
            nonlocal count
            count += 1
            status.update(f"{title}  [dim]{count:>2}[/]  {phrase}")

        yield say
