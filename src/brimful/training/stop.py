"""When a run stops before its last step: a signal, or the time limit.

Ctrl-C, SIGTERM or SIGHUP asks the run to save and leave after the current step; a second Ctrl-C leaves at once. While a run
waits for rows nothing is half done, so there a signal or the time limit ends the wait: a file server may be away for longer
than a scheduler has patience. Before the first step there is nothing to save, so a signal there ends the process as usual.
Imports no torch.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from brimful.errors import StoppedWaiting

STOP_SIGNALS = [number for name in ("SIGTERM", "SIGINT", "SIGHUP") if (number := getattr(signal, name, None))]
"""Signals that are sent on purpose: Ctrl-C, scancel, a launcher that ends the peers of a dead process."""
WAKE_S = 0.1
"""Between two looks whether a run waits, once its time is up."""


class Interrupts:
    """Catches stop signals: `with Interrupts() as interrupts: … if interrupts.signal: save and leave`.

    Python allows signal handlers in the main thread only; a run in another thread (a notebook's, a server's) is stopped
    by its owner, and by its time limit between two steps.
    """

    def __init__(self, time_limit: "TimeLimit | None" = None) -> None:
        self.signal: str | None = None
        """The name of the first signal, such as `SIGINT`; None before one came."""
        self.save_s = 0.0
        """How long before the time limit a wait has to end."""
        self._time_limit = time_limit or TimeLimit(None)
        self._before: dict[int, Any] = {}
        self._waiting = self._waking = False
        self._left = threading.Event()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: closing the terminal must not end the run
                self._before[number] = signal.signal(number, self._on_signal)
            if self._time_limit.left_s() is not None:
                threading.Thread(target=self._watch_time, name="brimful-time-limit", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._left.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What runs in here only waits: a signal or the time limit raises `StoppedWaiting` in it."""
        self._waiting = True
        try:
            if self.stop_requested:
                raise StoppedWaiting
            yield
        finally:
            self._waiting = False

    @property
    def stop_requested(self) -> bool:
        return self.signal is not None or self._time_limit.reached(save_s=self.save_s)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            os._exit(130)
        if not self._waking:
            self.signal = self.signal or signal.Signals(number).name
        self._waking = False
        if self._waiting:
            self._waiting = False
            raise StoppedWaiting

    def _watch_time(self) -> None:
        """Wakes the main thread when the time is up. Only a signal ends a read that hangs."""
        while not self._left.wait(max(WAKE_S, self._time_limit.left_s(save_s=self.save_s) or 0.0)):
            if self._waiting and self._time_limit.reached(save_s=self.save_s):
                self._waking = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


class TimeLimit:
    """Starts when it is made. Counts working time: a laptop that sleeps spends none."""

    def __init__(self, limit_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._start_s = clock()

    def reached(self, *, save_s: float = 0.0) -> bool:
        """Whether to stop now, so that a save of `save_s` seconds is done in time."""
        left_s = self.left_s(save_s=save_s)
        return left_s is not None and left_s <= 0

    def left_s(self, *, save_s: float = 0.0) -> float | None:
        """Until then; None without a limit."""
        return None if self._limit_s is None else self._start_s + self._limit_s - save_s - self._clock()
