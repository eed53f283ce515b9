"""Shares of a sweep on several devices of this box, a process for each; on one device, in this process.

Processes are spawned, since a card's context does not survive a fork, and end with their parent. Shares and messages travel
as bytes: tensors in torch's shared memory would be gone with the process that made them. One that dies ends the
sweep with a sentence; what has been trained is on disk, and the same command goes on from there.
"""

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext
from typing import Any

from brimful.errors import BrimfulError, LostProcess, UserError, in_one_line
from brimful.tasks.heads.packed.share import Message, Share, work

PATIENCE_S = 1.0
"""Between two looks whether all processes are still there."""


def run_shares(shares: Sequence[Share], stop: Callable[[], bool] = lambda: False) -> Iterator[Message]:
    """All messages of all shares, as they come; with `stop` they end soon, each with its state."""
    shares = [share for share in shares if any(share.groups)]
    if len(shares) == 1:
        yield from work(shares[0], stop)
        return
    context = multiprocessing.get_context("spawn")
    with _Processes(context, shares) as processes:
        yield from processes.messages(stop)


class _Processes:
    def __init__(self, context: SpawnContext, shares: Sequence[Share]) -> None:
        self._said: Any = context.Queue()
        self._stop = context.Event()
        self._processes = [
            context.Process(
                target=_child, args=(place, pickle.dumps(share), self._said, self._stop), daemon=True, name=share.device
            )
            for place, share in enumerate(shares)
        ]

    def __enter__(self) -> "_Processes":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        for process in self._processes:
            process.kill()  # a polite word is not heard: what it has is on disk, or is asked for by `stop`
            process.join()

    def messages(self, stop: Callable[[], bool]) -> Iterator[Message]:
        at_work, looked = set(range(len(self._processes))), time.monotonic()
        while at_work:
            if stop():
                self._stop.set()
            if time.monotonic() - looked > PATIENCE_S:
                self._look_for_dead(at_work)
                looked = time.monotonic()
            try:
                place, sent = self._said.get(timeout=PATIENCE_S)
            except queue.Empty:
                continue
            message = pickle.loads(sent)
            if message is None:
                at_work.discard(place)
            elif isinstance(message, BaseException):
                raise message
            else:
                yield message

    def _look_for_dead(self, at_work: set[int]) -> None:
        for place in at_work:
            process = self._processes[place]
            if process.exitcode:  # one that ends well says so in its last message
                how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"code {process.exitcode}"
                raise LostProcess(
                    f"the process on {process.name} ended with {how}; what was trained is kept: the same command goes on from there"
                )


def _child(place: int, sent: bytes, said: Any, stop: Any) -> None:
    """Ctrl-C reaches every process of the terminal; it is the parent that says when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share: Share = pickle.loads(sent)
    last: BrimfulError | None = None
    try:
        for message in work(share, stop.is_set):
            said.put((place, pickle.dumps(message)))
    except UserError as error:
        last = UserError(str(error))  # some errors have arguments that pickle does not know of
    except Exception as error:
        last = BrimfulError(f"on {share.device}: {in_one_line(error)}")
    said.put((place, pickle.dumps(last)))


def _end_with_parent() -> None:
    """A parent that was killed cannot end anybody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
