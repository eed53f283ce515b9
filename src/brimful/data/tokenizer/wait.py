"""One long native call, with a sign of life and an open ear: the library trains for minutes and says nothing.

The call runs in a thread of its own, so that memory can be watched, progress told, and Ctrl-C heard at once. What Ctrl-C
leaves behind is ended with the process; while the call is still reading texts it is told to stop.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from brimful.machine.footprint import tree_bytes
from brimful.units import show_bytes, show_seconds

T = TypeVar("T")
_EVERY_S = 0.25


class Watch:
    """The highest memory seen so far, and whether work in threads should end."""

    def __init__(self) -> None:
        self.start_bytes = self.peak_bytes = tree_bytes()
        self._stopped = threading.Event()

    def look(self) -> int:
        """Memory now."""
        now = tree_bytes()
        self.peak_bytes = max(self.peak_bytes, now)
        return now

    def until_stopped(self, items: Iterator[T]) -> Iterator[T]:
        """The same items; raises in the thread that asks for the next after Ctrl-C."""
        for item in items:
            if self._stopped.is_set():
                raise InterruptedError("stopped")
            yield item

    def wait_for(self, work: Callable[[], T], tell: Callable[[str], object]) -> T:
        """What the work returns or raises. `tell` gets the seconds and bytes so far, a few times a second."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="brimful-tokenizer", daemon=True)
        begin_s = time.monotonic()
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_EVERY_S)
                tell(f"{show_seconds(time.monotonic() - begin_s)}, {show_bytes(self.look())}")
        except BaseException:
            self._stopped.set()
            thread.join(2 * _EVERY_S)
            raise
        if errors:
            raise errors[0]
        return results[0]
