"""Warns before the kernel kills, and has the loader give memory back.

The kernel's out-of-memory killer leaves no exception and no traceback. A thread looks every two seconds at what the job's
processes really hold (see `machine.footprint`) and at what the machine has left. From 90 % of the limit on it says so and
asks for relief, one measure at a time, and looks for a while what that did before it asks again.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from brimful.machine.footprint import tree_bytes
from brimful.machine.host import Host
from brimful.units import show_bytes

WARN_AT = 0.90
EVERY_S = 2.0
"""Between two looks; one costs some milliseconds."""
SETTLE = 3
"""Looks after a measure before the next: workers must have ended, and the kernel have their pages back."""


class Watchdog:
    """Watches host RAM for as long as a `with` block runs.

    `relieve` lowers something and says what, or returns None when nothing is left to lower (`Loader.relieve`); `warn` hears
    each sentence.
    """

    def __init__(
        self,
        limit_bytes: int,
        relieve: Callable[[], str | None],
        warn: Callable[[str], object],
        *,
        every_s: float | None = None,
        used: Callable[[], int] | None = None,
    ) -> None:
        self._limit_bytes, self._relieve, self._warn, self._every_s = limit_bytes, relieve, warn, every_s or EVERY_S
        self._used = used or (lambda: held_bytes(limit_bytes))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="brimful-host-ram", daemon=True)
        self._wait, self._told_helpless = 0, False

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """One look, and what follows from it."""
        if self._wait:
            self._wait -= 1
            return
        used_bytes = self._used()
        if used_bytes < WARN_AT * self._limit_bytes:
            self._told_helpless = False
            return
        change = self._relieve()
        if change is None and self._told_helpless:
            return
        self._told_helpless, self._wait = change is None, SETTLE
        state = f"host RAM: {show_bytes(used_bytes)} of {show_bytes(self._limit_bytes)} are taken ({used_bytes / self._limit_bytes:.0%})"
        helpless = (
            "there is nothing left to lower here: the kernel may end this run, so save, or give it more --host-limit"
        )
        self._warn(f"{state}; {change or helpless}")

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self.look()
            except Exception as error:  # a look must never stop a training
                self._warn(f"host RAM could not be read ({error}); it is no longer watched")
                return


def held_bytes(limit_bytes: int, root: Path = Path("/")) -> int:
    """What counts against the limit: this job's processes, or all that the machine cannot give any more if that is more."""
    host = Host.detect(root)
    missing = min(limit_bytes, host.ram_limit_bytes) - host.ram_available_bytes
    return max(tree_bytes(_job(), root), missing)


def _job() -> int:
    """The process all of a job's processes on this box descend from: the launcher where there is one."""
    return os.getppid() if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1 else os.getpid()
