"""What a call from Python shows while it works. Layers below `report` may not import a view, so `brimful` sets it here.

The command line opens its own view and does not use this.
"""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self


class View(Protocol):
    """Open while a plan is made or a run trains; `brimful.report.progress.Progress` is one."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __call__(self, event: Mapping[str, Any]) -> None:
        """A line of events.jsonl."""

    def status(self, phrase: str) -> None:
        """What is being done before the first step."""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...
    def __call__(self, event: Mapping[str, Any]) -> None: ...
    def status(self, phrase: str) -> None: ...


_open: Callable[[], View] = Silent


def show_with(open_view: Callable[[], View]) -> None:
    """Use this view from now on."""
    global _open
    _open = open_view


def open_view(*, quiet: bool) -> View:
    return Silent() if quiet else _open()
