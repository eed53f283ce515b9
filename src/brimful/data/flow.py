"""A bounded pipeline of threads: reading, tokenising and writing overlap, and memory does not depend on the rows.

Each stage is a generator that pulls from the one before it, keeps a fixed number of items in flight and gives the results
back in order. The tokenizer releases Python's lock while it works, so threads suffice: what needs the lock, turning ids
into arrays, is 8 % of the time. Worker processes would copy the tokenizer and its buffers once for each core.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from typing import TypeVar

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
