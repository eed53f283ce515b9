"""The heads of a sweep divided among workers: this process, one process for each device, or tasks of a Ray cluster.

A worker's part (`Share`) goes out as plain data and comes back as a stream of messages, so that one process alone writes
results. Processes are spawned, since a CUDA context does not survive a fork, and end with their parent. Shares and
messages are sent as bytes: tensors in torch's shared memory are lost with the process that made them. If a worker dies, the
sweep ends; finished runs are on disk, and the same command continues from there.
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
from brimful.molecules.feature_store import FeatureStore
from brimful.molecules.heads import Job, Rows
from brimful.molecules.pack import State
from brimful.molecules.runner import FinishedRun, PackSize, Runner, choose_pack_size
from brimful.units import show_bytes, show_count

FILL = 0.85
"""The share of a GPU's memory to use where no budget is given: on machines of a cluster."""
SNAPSHOT_S = 20.0
"""A killed sweep loses at most this much work."""
POLL_S = 1.0
"""Between two checks that all processes are alive."""
CONNECT_S = 5.0
RAY_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Whether other machines may join, read when Ray is imported. If not, its servers listen on the loopback only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of one worker."""

    number: int = 0
    groups: Sequence[Sequence[Job]]
    """Jobs of a group have one pack key."""
    rows: Mapping[str, Rows]
    device: str
    threads: int | None = None
    """Cores to use on a CPU. Default: all."""
    budget_bytes: int | None = None
    most: int | None = None
    """The largest pack that the user allows."""
    resumed: Sequence[State] = ()
    """Runs that had begun when the sweep was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackMessage:
    """A group is about to be trained."""

    share: int
    jobs: int
    size: PackSize


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMessage:
    """What has happened since the last message."""

    share: int
    finished: Sequence[FinishedRun] = ()
    epochs: int = 0
    """Over all runs."""
    alive: int = 0
    ooms: int = 0
    state: State | None = None
    """From time to time: all runs that have begun and not stopped."""
    peak_bytes: int | None = None


Message = PackMessage | ProgressMessage


def never() -> bool:
    """The default of `stop`."""
    return False


def train_share(share: Share, stop: Callable[[], bool] = never) -> Iterator[Message]:
    """Train the share to its end, or until `stop`; then the last message has the state."""
    before = torch.get_num_threads()
    torch.set_num_threads(share.threads or before)
    try:
        for group in share.groups:
            if not stop():
                yield from _train_group(group, share, torch.device(share.device), stop)
    finally:
        torch.set_num_threads(before)


def _train_group(
    group: Sequence[Job], share: Share, device: torch.device, stop: Callable[[], bool]
) -> Iterator[Message]:
    keys = {job.data for job in group}
    used = {key: rows for key, rows in share.rows.items() if key in keys}
    store = attempt(lambda: FeatureStore(used, device), device)
    if isinstance(store, OutOfMemory):
        needed = sum(rows.features.nbytes for rows in used.values())
        raise DoesNotFit(
            f"the features of {show_count(len(used), 'dataset')} ({show_bytes(needed)}) do not fit {share.device}. "
            "Try: a higher memory_limit=, or fewer molecules, datasets or encoders.",
            needed_bytes=needed,
        )
    size = choose_pack_size(group, store, share.budget_bytes or _free_budget(device), most=share.most)
    yield PackMessage(share=share.number, jobs=len(group), size=size)
    resumed = _runs_of_group(group, share.resumed)
    resumed_names = {job.name for state in resumed for job in state.jobs}
    runner = Runner([job for job in group if job.name not in resumed_names], store, size.runs, resumed=resumed)
    saved, ooms = time.monotonic(), 0
    for finished in runner.run():
        now = time.monotonic()
        stopping = stop()
        due = stopping or now - saved > SNAPSHOT_S
        saved = now if due else saved
        alive, _ = runner.progress()
        yield ProgressMessage(
            share=share.number, finished=finished, epochs=runner.validated, alive=alive,
            ooms=runner.ooms - ooms, state=runner.state() if due else None, peak_bytes=peak_bytes(device),
        )  # fmt: skip
        ooms = runner.ooms
        if stopping:
            return


def _runs_of_group(group: Sequence[Job], states: Sequence[State]) -> list[State]:
    names = {job.name for job in group}
    runs = []
    for state in states:
        places = [place for place, job in enumerate(state.jobs) if job.name in names]
        runs += [state.take(places)] if places else []
    return runs


def _free_budget(device: torch.device) -> int | None:
    """Most of what is free and what this process holds already, on a device whose target is not known here."""
    available = available_bytes(device)
    return None if available is None else int(FILL * available)


def peak_bytes(device: torch.device) -> int | None:
    """Measured; None where the device cannot tell."""
    return torch.accelerator.max_memory_allocated(device) if has_peak_statistics(device) else None


# ---- Processes of this machine ---------------------------------------------------------------------------------------------


def run_shares(shares: Sequence[Share], stop: Callable[[], bool] = never) -> Iterator[Message]:
    """All messages of all shares, as they come. A single share runs in this process."""
    shares = [share for share in shares if any(share.groups)]
    if len(shares) == 1:
        yield from train_share(shares[0], stop)
        return
    with _Processes(multiprocessing.get_context("spawn"), shares) as processes:
        yield from processes.messages(stop)


class _Processes:
    def __init__(self, context: SpawnContext, shares: Sequence[Share]) -> None:
        self._messages: Any = context.Queue()
        self._stop = context.Event()
        self._processes = [
            context.Process(
                target=_child,
                args=(place, pickle.dumps(share), self._messages, self._stop),
                daemon=True,
                name=share.device,
            )
            for place, share in enumerate(shares)
        ]

    def __enter__(self) -> "_Processes":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        for process in self._processes:
            process.kill()  # children ignore SIGTERM; their work is on disk, or was requested by `stop`
            process.join()

    def messages(self, stop: Callable[[], bool]) -> Iterator[Message]:
        working, checked = set(range(len(self._processes))), time.monotonic()
        while working:
            if stop():
                self._stop.set()
            if time.monotonic() - checked > POLL_S:
                self._check_alive(working)
                checked = time.monotonic()
            try:
                place, content = self._messages.get(timeout=POLL_S)
            except queue.Empty:
                continue
            message = pickle.loads(content)
            if message is None:
                working.discard(place)
            elif isinstance(message, BaseException):
                raise message
            else:
                yield message

    def _check_alive(self, working: set[int]) -> None:
        for place in working:
            process = self._processes[place]
            if process.exitcode:  # a normal end is announced by a message
                how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"code {process.exitcode}"
                raise ProcessLost(
                    f"the process on {process.name} ended with {how}. Try: the same command, it continues from there."
                )


def _child(place: int, content: bytes, messages: Any, stop: Any) -> None:
    """Ctrl-C reaches every process of the terminal; the parent says when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    share: Share = pickle.loads(content)
    last: BrimfulError | None = None
    try:
        for message in train_share(share, stop.is_set):
            messages.put((place, pickle.dumps(message)))
    except UserError as error:
        last = UserError(str(error))  # some errors have arguments that pickle does not keep
        last.code = error.code
    except Exception as error:
        last = BrimfulError(f"on {share.device}: {in_one_line(error)}")
    messages.put((place, pickle.dumps(last)))


def _exit_with_parent() -> None:
    """A parent that was killed cannot end its children."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


# ---- A Ray cluster: a GPU for each share, or a core where there are none -----------------------------------------------------


def check_address(address: str) -> None:
    """Whether something listens at a host and port: Ray itself would try for minutes. `auto` and `local` name none."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise BadOption(
            f"ray={address!r} does not answer ({in_one_line(error)}). "
            "Try: the address that `ray start --head` printed, auto or local."
        ) from None


def connect_ray(address: str) -> tuple[Any, int, int]:
    """Ray, and the number of GPUs and cores of the cluster."""
    check_address(address)
    if address == "local":
        os.environ.setdefault(RAY_CLUSTERS, "0")
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
            f"ray={address!r} is not a cluster ({in_one_line(error)}). Try: `ray start --head`, or ray='local'."
        ) from None
    resources = ray.cluster_resources()
    return ray, int(resources.get("GPU", 0)), int(resources.get("CPU", 1))


def run_shares_on_ray(ray: Any, shares: Sequence[Share], stop: Callable[[], bool] = never) -> Iterator[Message]:
    """All messages of all shares, as they come. `stop` cancels the tasks, which lose up to 20 s of work."""
    shares = [share for share in shares if any(share.groups)]
    resources = {"num_gpus": 1} if shares and shares[0].device.startswith("cuda") else {"num_cpus": 1}
    remote = ray.remote(**resources)(train_share).options(num_returns="streaming")
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
                    f"a machine of the cluster was lost ({in_one_line(error)}). Try: the same command, it continues."
                ) from None
            yield message
