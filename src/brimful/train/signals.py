"""Ctrl-C and SIGTERM while a run trains: the first asks it to save and leave, a second Ctrl-C leaves at once.

Before the first step there is nothing to save, so there a signal ends the process as it always does. Handlers can only be
set in the main thread; a run in another one (a notebook's, a server's) is stopped by its owner.
"""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from brimful.train.sidecar import POLITE


class Interrupts:
    """`with Interrupts() as asked: … if asked.by: save and leave`."""

    def __init__(self) -> None:
        self.by: str | None = None
        """The signal that asked, `SIGINT` say; None while nobody has."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in POLITE:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: a closed terminal is not to end the run
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.by is not None and number == signal.SIGINT:
            os._exit(130)
        self.by = self.by or signal.Signals(number).name
