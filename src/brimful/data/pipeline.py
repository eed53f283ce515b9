"""Threads that overlap reading, preparing and writing in bounded memory, and the memory they used.

Threads suffice: tokenizers, Arrow and NumPy release Python's lock while they work (turning ids into arrays, which needs it,
is 8 % of the time of tokenizing). Worker processes would copy the tokenizer and its buffers once per core.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(work: Callable[[T], R], items: Iterable[T], *, threads: int, in_flight: int) -> Generator[R, None, None]:
    """`map(work, items)` by threads, with at most `in_flight` items started whose result was not taken.

    An error in `work` is raised where its result would have come; items queued behind it are not started.
    """
    pending: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) >= in_flight:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read_ahead(items: Iterator[T], *, in_flight: int) -> Iterator[T]:
    """The same items, each fetched by a thread before it is needed."""
    for item in in_order(lambda source: next(source, None), repeat(items), threads=1, in_flight=in_flight):
        if item is None:
            return
        yield item


class PeakMemory:
    """`with PeakMemory() as peak: …`, then `peak.bytes`: the most anonymous and shared memory of this process.

    Read ten times a second from the counters in /proc/self/status, which cost nothing; `smaps_rollup` walks all pages
    and took 6 % of the time of tokenizing. Mapped files do not count.
    """

    def __init__(self) -> None:
        self.start_bytes = self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="brimful-peak-memory", daemon=True)

    def measure(self) -> int:
        """The memory in use now; 0 where the kernel does not tell."""
        status = Path("/proc/self/status")
        lines = [line.split() for line in status.read_bytes().splitlines()] if status.exists() else []
        now = sum(int(line[1]) * 1024 for line in lines if line and line[0] in (b"RssAnon:", b"RssShmem:"))
        self.bytes = max(self.bytes, now)
        return now

    def __enter__(self) -> "PeakMemory":
        self.start_bytes = self.measure()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.measure()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.measure()
