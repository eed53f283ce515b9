"""Shared by the data commands: threads in bounded memory, peak memory, output folders, a hash of numbers.

Threads are enough: tokenizers, Arrow and NumPy release Python's lock while they work (turning ids into arrays, which needs it,
is 8 % of the time of tokenizing). Worker processes would copy the tokenizer and its buffers once per core.
"""

import shutil
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption
from brimful.files import FileLock, disk_full, sync

T = TypeVar("T")
R = TypeVar("R")

GOLDEN: Final = 0x9E3779B97F4A7C15
"""2⁶⁴ / golden ratio: the step between two inputs of `splitmix64`."""


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


def splitmix64(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer, a bijection: every bit of the input reaches every bit of the output."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFolder:
    """The output of a command, written completely or not at all. It replaces only a folder of its own kind.

    It is written under another name in the same folder, and renamed when it is complete.
    """

    path: Path
    kind: str
    """In messages: `token store`."""
    marker: str
    """The file that such a folder has: `store.json`."""
    overwrite: bool

    def check(self) -> None:
        """Refuse an existing output unless it is an empty folder, or of this kind and may be replaced."""
        path = self.path
        if not (path.exists() or path.is_symlink()) or (path.is_dir() and not any(path.iterdir())):
            return
        if not (path / self.marker).is_file():
            what = f"folder that is not a {self.kind}" if path.is_dir() else "file"
            raise BadOption(f"output='{path}' is an existing {what}. Try: the name of a new folder.")
        if not self.overwrite:
            raise BadOption(f"output='{path}' is an existing {self.kind}. Try: another folder, or overwrite=True.")

    def publish(self, part: Path) -> None:
        """Rename the finished folder to the output. An old one is removed afterwards, and restored if the rename fails."""
        self.check()
        old = self.path.with_name(f".{self.path.name}.old")
        self._remove(old)  # left by a process that was killed right here
        if (self.path / self.marker).is_file():
            self.path.rename(old)
        try:
            part.rename(self.path)
        except BaseException:
            if old.exists():
                old.rename(self.path)
            raise
        self._remove(old)
        sync(self.path.parent)

    def _remove(self, folder: Path) -> None:
        if (folder / self.marker).is_file():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing_to(output: Path) -> Iterator[None]:
    """Turn the system's errors while this output is written into one sentence."""
    try:
        yield
    except OSError as error:
        if why := disk_full(error):
            raise BadData(f"{output}: {why}. Try: free some space and run the same command again.") from None
        place = Path(str(error.filename or output))
        advice = " Try: another output=." if place.is_relative_to(output.parent) else ""
        raise BadData(f"{place}: {error.strerror or error}.{advice}") from None


@contextmanager
def part_folder(output: Path, *, progress: str) -> Iterator[Path]:
    """The hidden folder beside an output that holds what is done so far, locked for one process.

    After an error it stays if its file `progress` has any content, so that a later run can continue.
    """
    part = output.with_name(f".{output.name}.part")
    try:
        lock = FileLock(part, folder=True)
    except BlockingIOError:
        raise BadOption(f"output='{output}' is being written by another process. Try: another output=.") from None
    with lock:
        try:
            yield part
        except BaseException:
            file = part / progress
            if not file.exists() or not file.stat().st_size:
                shutil.rmtree(part, ignore_errors=True)
            raise
