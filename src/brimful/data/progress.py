"""A bounded pipeline of threads: reading, tokenising and writing overlap, and memory does not depend on the rows.

Each stage is a generator that pulls from the one before it, keeps a fixed number of items in flight and gives the results
back in order. The tokenizer releases Python's lock while it works, so threads suffice: what needs the lock, turning ids
into arrays, is 8 % of the time. Worker processes would copy the tokenizer and its buffers once for each core.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from brimful.data.read.files import Broken
from brimful.data.read.source import Chunk
from brimful.errors import BadData, BadOption

# The highest memory of this process while something runs, looked at ten times a second.
#
# Taken from the counters in /proc/self/status, which cost nothing. `smaps_rollup`, which divides shared pages by their
# users, walks all pages: at ten looks a second it took 6 % of a pack. Nothing is shared here: pack starts no process.


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


# How many broken rows a command puts up with: none, unless `--max-bad` says which share.


@dataclass
class Patience:
    """Counts rows that could not be read; loses itself at the first one where none is allowed."""

    max_bad: float = 0.0
    rows_in: int = 0
    broken: int = 0
    first: Broken | None = field(default=None)

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad <= 1:
            raise BadOption(f"--max-bad {self.max_bad}: give a share from 0 to 1, such as 0.01")

    def add(self, chunk: Chunk) -> None:
        """Rows of one more chunk."""
        self.rows_in += chunk.rows_in
        self.broken += len(chunk.broken)
        if chunk.broken and self.first is None:
            self.first = chunk.broken[0]
        if self.first is not None and self.max_bad == 0:
            raise BadData(f"{self.first}; repair that row, or have such rows dropped and counted with --max-bad 0.01")

    def close(self) -> None:
        """All rows were read: is the share of broken ones within what was allowed?"""
        if self.broken > self.max_bad * self.rows_in:
            raise BadData(
                f"{self.broken:,} of {self.rows_in:,} rows are broken, more than --max-bad {self.max_bad:g}; the first is {self.first}"
            )


T = TypeVar("T")
R = TypeVar("R")


def in_order(work: Callable[[T], R], items: Iterable[T], *, threads: int, in_flight: int) -> Generator[R, None, None]:
    """`map(work, items)` by threads: never more than `in_flight` items begun whose result was not taken.

    An error in `work` comes out where its result would have; what was queued behind it is not begun.
    """
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= in_flight:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read_ahead(items: Iterator[T], *, in_flight: int) -> Iterator[T]:
    """The same items, each fetched by a thread before it is asked for."""
    for item in in_order(lambda source: next(source, None), repeat(items), threads=1, in_flight=in_flight):
        if item is None:
            return
        yield item
