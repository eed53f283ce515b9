"""When to stop by the clock: after a time, or when the hours in which training is allowed are over.

    --time-limit 8h                  save and leave after so long (seconds of work: a laptop that sleeps spends none)
    --window 21:00-09:00             train at night only; several hours with commas, in this box's local time

An instant is a POSIX timestamp, which knows no time zones; the clock on the wall is read off it when it is needed. So the
night on which clocks change opens and closes at the times written, an hour longer or shorter, and a box that was asleep
finds the right answer when it wakes. What is said about the future (`opens_in_s`) may be an hour off if a limit falls
into the hour that a change skips; who waits must look again (`parent.keep_hours` does, every 30 s).
"""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from datetime import time as DayTime
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from brimful.errors import BadOption
from brimful.training.sidecar import POLITE

# Ctrl-C and SIGTERM while a run trains: the first asks it to save and leave, a second Ctrl-C leaves at once.
#
# Before the first step there is nothing to save, so there a signal ends the process as it always does. Handlers can only be
# set in the main thread; a run in another one (a notebook's, a server's) is stopped by its owner.


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


_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?=.*\d)" + "".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?){unit})?" for unit in _SECONDS))
_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?\s*[-–]\s*(\d{1,2})(?::(\d\d))?")

Span = tuple[DayTime, DayTime]


def parse_duration(text: str, *, flag: str = "--time-limit") -> float:
    """`8h`, `90m`, `1h30m`, `45s`, `2d`, `1.5h`, in seconds. A number without a unit could be anything, and is refused."""
    match = _DURATION.fullmatch("".join(str(text).lower().split()))
    if match is None:
        raise BadOption(f"{flag} {text!r} is not a time; write it like 8h, 90m, 1h30m, 45s or 2d")
    seconds = sum(float(value) * _SECONDS[unit] for unit, value in match.groupdict().items() if value)
    if not seconds:
        raise BadOption(f"{flag} {text!r} is no time at all; give more than zero, or leave it away")
    return seconds


@dataclass(frozen=True, slots=True)
class Window:
    """The hours of the day in which training is allowed."""

    spans: tuple[Span, ...]
    """First and last moment of each, the last one left out; where the first is the later, it goes over midnight."""

    @classmethod
    def parse(cls, text: str, *, flag: str = "--window") -> "Window":
        """`21:00-09:00`, `12-13:30, 22:00-6:00`."""
        return cls(tuple(_span(part.strip(), text, flag) for part in text.split(",")))

    def is_open(self, now: float) -> bool:
        wall = datetime.fromtimestamp(now).time()
        return any(first <= wall < last if first < last else wall >= first or wall < last for first, last in self.spans)

    def opens_in_s(self, now: float) -> float:
        """0 while it is open."""
        return 0.0 if self.is_open(now) else self._next(now, is_open=True) - now

    def closes_in_s(self, now: float) -> float:
        """0 while it is shut; infinite where hours of several parts fill the day."""
        return self._next(now, is_open=False) - now if self.is_open(now) else 0.0

    def _next(self, now: float, *, is_open: bool) -> float:
        """The next moment, among those at which something begins or ends, after which it is open, or shut."""
        return min((at for at in self._limits(now) if at > now and self.is_open(at) == is_open), default=math.inf)

    def _limits(self, now: float) -> Iterator[float]:
        today = datetime.fromtimestamp(now).date()
        for day in range(3):  # tomorrow's may fall into the hour that a change of clocks skips
            for limit in {limit for span in self.spans for limit in span}:
                wall = datetime.combine(today + timedelta(days=day), limit)
                yield wall.timestamp()
                yield wall.replace(fold=1).timestamp()  # when clocks go back an hour comes twice

    def __str__(self) -> str:
        return ", ".join(f"{first:%H:%M}-{last:%H:%M}" for first, last in self.spans)


class Clock:
    """Tells the loop when time is up. It starts when it is made."""

    def __init__(
        self,
        time_limit_s: float | None = None,
        window: Window | None = None,
        *,
        now: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._window, self._now, self._elapsed = time_limit_s, window, now, elapsed
        self._began_s = elapsed()

    def why_stop(self, *, needs_s: float = 0.0) -> Literal["time-limit", "window"] | None:
        """Why to stop now, so that what takes `needs_s` more, a save say, is over in time."""
        if self._limit_s is not None and self._elapsed() - self._began_s + needs_s >= self._limit_s:
            return "time-limit"
        if self._window is not None and self._window.closes_in_s(self._now()) <= needs_s:
            return "window"
        return None


def show_time(at: float, now: float) -> str:
    """`21:00`, or with the day where it is another one: `Mon 21:00`."""
    when = datetime.fromtimestamp(at)
    return f"{when:%H:%M}" if when.date() == datetime.fromtimestamp(now).date() else f"{when:%a %H:%M}"


def _span(part: str, text: str, flag: str) -> Span:
    match = _HOURS.fullmatch(part)
    first_h, first_m, last_h, last_m = (int(value or 0) for value in match.groups()) if match else (99, 0, 0, 0)
    if first_h > 23 or first_m > 59 or last_m > 59 or last_h > 24 or (last_h == 24 and last_m):
        raise BadOption(
            f"{flag} {text!r}: {part!r} is not a span of hours; write it like 21:00-09:00 or 12:00-13:30,22-6"
        )
    first, last = DayTime(first_h, first_m), DayTime(last_h % 24, last_m)
    if first == last:
        raise BadOption(
            f"{flag} {text!r}: {part!r} ends when it begins; name two times, or leave it away to train all day"
        )
    return first, last
