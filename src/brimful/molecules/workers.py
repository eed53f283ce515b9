"""A share of a sweep's heads, trained on one device: the unit that is handed to another process, or another machine.

A share goes out as plain data and comes back as a stream of messages, so that one process alone writes results whatever
trains: this one, one for each card of a box (`processes`), or a Ray cluster (`cluster`).
"""

import logging
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext
from typing import Any

import torch

from brimful.errors import (
    BadOption,
    BrimfulError,
    ConnectionFailed,
    DoesNotFit,
    MissingExtra,
    ProcessLost,
    UserError,
    in_one_line,
)
from brimful.memory.meter import available_bytes, has_peak_statistics
from brimful.memory.oom import OutOfMemory, attempt
from brimful.molecules.feature_store import Shelf
from brimful.molecules.job import Job, Rows
from brimful.molecules.pack import State
from brimful.molecules.runner import Finished, Packing, Runner, choose
from brimful.units import show_bytes, show_count

FILL = 0.85
"""The share of a card's memory to use where no budget is given."""
SNAPSHOT_S = 20.0
"""A killed sweep loses at most so much of its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Groups of jobs that can share packs, and what they need."""

    number: int = 0
    groups: Sequence[Sequence[Job]]
    rows: Mapping[str, Rows]
    device: str
    threads: int | None = None
    """Cores that a CPU share may use; all unless given."""
    budget_bytes: int | None = None
    most: int | None = None
    """The largest pack asked for."""
    begun: Sequence[State] = ()
    """Of runs that had begun when the sweep was interrupted; they go on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A group is about to be trained."""

    share: int
    jobs: int
    packing: Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class Went:
    """What has happened since the last message."""

    share: int
    finished: Sequence[Finished] = ()
    epochs: int = 0
    """Of all runs together."""
    alive: int = 0
    ooms: int = 0
    state: State | None = None
    """All runs that have begun and not stopped, from time to time."""
    peak_bytes: int | None = None


Message = Packed | Went


def work(share: Share, stop: Callable[[], bool] = lambda: False) -> Iterator[Message]:
    """Trains the share from beginning to end, or until it is to stop; then the last message has the state."""
    before = torch.get_num_threads()
    torch.set_num_threads(share.threads or before)
    try:
        for group in share.groups:
            if not stop():
                yield from _group(group, share, torch.device(share.device), stop)
    finally:
        torch.set_num_threads(before)


def _group(group: Sequence[Job], share: Share, device: torch.device, stop: Callable[[], bool]) -> Iterator[Message]:
    used = {job.data for job in group}
    shelf = attempt(lambda: Shelf({key: rows for key, rows in share.rows.items() if key in used}, device), device)
    if isinstance(shelf, OutOfMemory):
        needed = sum(share.rows[key].features.nbytes for key in used)
        raise DoesNotFit(
            f"the features of {show_count(len(used), 'dataset')}, {show_bytes(needed)}, and what it takes to put them on {share.device} do not fit: "
            "give more --memory-limit, or fewer molecules, datasets or encoders",
            needed_bytes=needed,
        )
    packing = choose(group, shelf, share.budget_bytes or _budget(device), most=share.most)
    yield Packed(share=share.number, jobs=len(group), packing=packing)
    begun = _begun(group, share.begun)
    there = {job.name for state in begun for job in state.jobs}
    runner = Runner([job for job in group if job.name not in there], shelf, packing.runs, begun=begun)
    saved, ooms = time.monotonic(), 0
    for finished in runner.run():
        now = time.monotonic()
        stopping = stop()
        due = stopping or now - saved > SNAPSHOT_S
        saved = now if due else saved
        alive, _ = runner.progress()
        yield Went(
            share=share.number, finished=finished, epochs=runner.judged, alive=alive,
            ooms=runner.ooms - ooms, state=runner.state() if due else None, peak_bytes=peak_bytes(device),
        )  # fmt: skip
        ooms = runner.ooms
        if stopping:
            return


def _begun(group: Sequence[Job], states: Sequence[State]) -> list[State]:
    """Those rows of the states that belong to the group."""
    names = {job.name for job in group}
    found = []
    for state in states:
        places = [place for place, job in enumerate(state.jobs) if job.name in names]
        found += [state.take(places)] if places else []
    return found


def _budget(device: torch.device) -> int | None:
    """For a card that nobody has looked at yet: most of what is free and what this process has of it already."""
    room = available_bytes(device)
    return None if room is None else int(FILL * room)


def peak_bytes(device: torch.device) -> int | None:
    """Measured; None where the device cannot tell."""
    return torch.accelerator.max_memory_allocated(device) if has_peak_statistics(device) else None


# Shares of a sweep on several devices of this box, a process for each; on one device, in this process.
#
# Processes are spawned, since a card's context does not survive a fork, and end with their parent. Shares and messages travel
# as bytes: tensors in torch's shared memory would be gone with the process that made them. One that dies ends the
# sweep with a sentence; what has been trained is on disk, and the same command goes on from there.


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
                raise ProcessLost(
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


# Shares of a sweep on a Ray cluster, a card for each, or cores where there are none.
#
# Ray moves the shares and streams the messages back; what is trained and who writes results is as on one box. `--ray auto`
# joins the cluster that this machine belongs to, `--ray local` starts one here for as long as the sweep takes.


_ANSWERS_S = 5.0


def check_address(address: str) -> None:
    """Whether something listens at a host and port, which Ray itself asks for minutes; `auto` and `local` name none."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise BadOption(
            f"--ray {address}: nothing answers there ({in_one_line(error)}); give the address that `ray start --head` printed, or auto or local"
        ) from None


def connect(address: str) -> tuple[Any, int, int]:
    """Ray, and the cluster's cards and cores."""
    check_address(address)
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray") from None
    try:
        if not ray.is_initialized():
            ray.init(
                address=None if address == "local" else address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:
        raise ConnectionFailed(
            f"--ray {address}: no cluster answers there ({in_one_line(error)}); start one with `ray start --head`, or use --ray local"
        ) from None
    there = ray.cluster_resources()
    return ray, int(there.get("GPU", 0)), int(there.get("CPU", 1))


def run_shares_cluster(
    ray: Any, shares: Sequence[Share], stop: Callable[[], bool] = lambda: False
) -> Iterator[Message]:
    """All messages of all shares, as they come. With `stop` the tasks are cancelled: what they did since they last told
    their state, 20 s at most, is lost."""
    shares = [share for share in shares if any(share.groups)]
    resources = {"num_gpus": 1} if shares and shares[0].device.startswith("cuda") else {"num_cpus": 1}
    remote = ray.remote(**resources)(_stream).options(num_returns="streaming")
    streams = {remote.remote(share): share for share in shares}
    while streams:
        ready, _ = ray.wait(list(streams), num_returns=1, fetch_local=False, timeout=1)
        if stop():
            for stream in streams:
                ray.cancel(stream)
            return
        for stream in ready:
            try:
                message = ray.get(next(stream))
            except StopIteration:
                del streams[stream]
                continue
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise (
                    cause if isinstance(cause, UserError) else ProcessLost(f"a Ray task failed: {in_one_line(cause)}")
                ) from None
            except ray.exceptions.RayError as error:
                raise ProcessLost(
                    f"a machine of the cluster was lost ({in_one_line(error)}); what was trained is kept: the same command goes on from there"
                ) from None
            yield message


def _stream(share: Share) -> Iterator[Message]:
    yield from work(share)
