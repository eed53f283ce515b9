"""When a run stops before its last step: a signal, or the time limit.

Ctrl-C, SIGTERM or SIGHUP asks the run to save and leave after the current step; a second Ctrl-C leaves at once. Before the
first step there is nothing to save, so a signal there ends the process as usual. Imports no torch.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = [number for name in ("SIGTERM", "SIGINT", "SIGHUP") if (number := getattr(signal, name, None))]
"""Signals that are sent on purpose: Ctrl-C, scancel, a launcher that ends the peers of a dead process."""


class Interrupts:
    """Catches stop signals: `with Interrupts() as interrupts: … if interrupts.signal: save and leave`.

    Python allows signal handlers in the main thread only; a run in another thread (a notebook's, a server's) is stopped
    by its owner.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        """The name of the first signal, such as `SIGINT`; None before one came."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: closing the terminal must not end the run
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            os._exit(130)
        self.signal = self.signal or signal.Signals(number).name


class TimeLimit:
    """Starts when it is made. Counts working time: a laptop that sleeps spends none."""

    def __init__(self, limit_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._start_s = clock()

    def reached(self, *, save_s: float = 0.0) -> bool:
        """Whether to stop now, so that a save of `save_s` seconds is done in time."""
        return self._limit_s is not None and self._clock() - self._start_s + save_s >= self._limit_s
