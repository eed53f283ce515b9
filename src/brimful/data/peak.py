"""The highest memory of this process while something runs, looked at ten times a second.

Taken from the counters in /proc/self/status, which cost nothing. `smaps_rollup`, which divides shared pages by their
users, walks all pages: at ten looks a second it took 6 % of a pack. Nothing is shared here: pack starts no process.
"""

import threading
from pathlib import Path
from types import TracebackType

_EVERY_S = 0.1
_STATUS = Path("/proc/self/status")
_KEYS = (b"RssAnon:", b"RssShmem:")


class Peak:
    """`with Peak() as peak: …` and then `peak.bytes`: anonymous and shared memory, mapped files left out."""

    def __init__(self) -> None:
        self.start_bytes = self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="brimful-pack-peak", daemon=True)

    def look(self) -> int:
        """What it is now; 0 where the kernel does not tell."""
        lines = [line.split() for line in _STATUS.read_bytes().splitlines()] if _STATUS.exists() else []
        now = sum(int(line[1]) * 1024 for line in lines if line and line[0] in _KEYS)
        self.bytes = max(self.bytes, now)
        return now

    def __enter__(self) -> "Peak":
        self.start_bytes = self.look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.look()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            self.look()
