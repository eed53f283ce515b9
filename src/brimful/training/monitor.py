"""What the machine does while a run trains: a thread that writes a `sample` event about every five seconds.

Each rank with a GPU of its own samples it, and the first rank of each machine samples that. The thread never touches torch's device: it reads NVML,
in one session, and /proc. A reading takes some milliseconds, about 10 for each GB of host memory, nearly all of it in system calls
that leave Python to the training (`bench/record.py` measures it). Whatever fails leaves null in an event; the thread ends with the
run, is not waited for if NVML hangs, and cannot stop a training.

Step events take the host's memory from the last sample, since reading it is too slow for every step.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

import brimful
from brimful.errors import in_one_line
from brimful.machine.gpu import open_nvml
from brimful.machine.host import Host
from brimful.machine.usage import GpuMeter, HostMeter, HostSample
from brimful.step.distributed import SingleProcess
from brimful.training.events import FORMAT

EVERY_S = 5.0
SECOND_S = 1.0
"""The second sample comes after this time: the first is of a device that has not begun, and a short run has no third."""
START_S = 2.0
"""How long training waits for the first sample, which takes some milliseconds, so that the first step has its figures."""
CLOSE_S = 1.0
"""How long a run waits for the thread at its end: one that hangs in the driver is left behind."""

T = TypeVar("T")
log = logging.getLogger("brimful")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where a rank runs."""

    rank: int
    host: str
    pid: int
    device: str
    """`cuda:0`, as its process numbers it."""
    gpu: str | None = None
    """The GPU's name; None on a CPU."""
    uuid: str | None = None
    total_bytes: int | None = None

    @classmethod
    def of(cls, rank: int, device: torch.device) -> "RankPlace":
        where = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "device": str(device)}
        if device.type == "cpu":
            return cls(**where)  # type: ignore[arg-type]
        module = torch.get_device_module(device)
        properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
        uuid = getattr(properties, "uuid", None) if device.type == "cuda" else None
        return cls(
            **where,  # type: ignore[arg-type]
            gpu=getattr(properties, "name", device.type),
            uuid=None if uuid is None else str(uuid),
            total_bytes=getattr(properties, "total_memory", None),
        )

    @property
    def index(self) -> int:
        return torch.device(self.device).index or 0

    def shares_gpu(self, other: "RankPlace") -> bool:
        """Whether both use the same GPU. Launchers may show each process its own one as number 0."""
        return self.host == other.host and (self.uuid or self.device) == (other.uuid or other.device)


def gather_places(group: SingleProcess, device: torch.device) -> list[RankPlace]:
    """Where each rank runs, in order of rank."""
    return list(group.gather_objects(RankPlace.of(group.rank, device)))


def begin_figures(places: Sequence[RankPlace]) -> dict[str, Any]:
    """What a `begin` event says about the machine that rank 0 runs on, and about all GPUs in use."""
    host = Host.detect()
    own_gpus = [place for place in places if place.gpu is not None and _is_first(place, places)]
    return {
        "format": FORMAT,
        "version": brimful.__version__,
        "host": places[0].host,
        "pid": places[0].pid,
        "gpus": [
            {
                "ranks": [other.rank for other in places if other.shares_gpu(one)],
                "host": one.host,
                "index": one.index,
                "name": one.gpu,
                "uuid": one.uuid,
                "total_bytes": one.total_bytes,
            }
            for one in own_gpus
        ],
        "cores": host.cores,
        "ram_limit_bytes": host.ram_limit_bytes,
    }


class Monitor:
    """Samples while a `with` block runs, if this rank has anything to sample.

    with Monitor(places, rank, write=journal.append, step=lambda: loop.step, workers=lambda: loader.workers) as monitor:
        …
    """

    def __init__(
        self,
        places: Sequence[RankPlace],
        rank: int,
        *,
        write: Callable[..., object],
        step: Callable[[], int],
        workers: Callable[[], int],
        every_s: float = EVERY_S,
    ) -> None:
        """`write("sample", **fields)` and the two others are called in the thread. `workers` are those of one rank's loader."""
        self._place, self._every_s = places[rank], every_s
        self._write, self._step, self._workers = write, step, workers
        self._local = [place for place in places if place.host == self._place.host]
        self._reads_gpu = self._place.gpu is not None and _is_first(self._place, places)
        self._reads_host = self._place is self._local[0]
        self._last: HostSample | None = None
        self._ended, self._sampled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="brimful-monitor", daemon=True)
        self._failing: set[str] = set()

    @property
    def host_bytes(self) -> int | None:
        """Memory of the run's processes on this machine, when it was last sampled; only its first rank knows."""
        return None if self._last is None else self._last.tree_bytes

    @property
    def machine_bytes(self) -> int | None:
        """RAM in use under the limit that binds, when it was last sampled."""
        return None if self._last is None else self._last.machine_bytes

    def __enter__(self) -> Self:
        if self._reads_gpu or self._reads_host:
            self._thread.start()
            self._sampled.wait(START_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                gpu = self._gpu_meter(stack) if self._reads_gpu else None
                host = HostMeter([place.pid for place in self._local]) if self._reads_host else None
                wait_s = min(SECOND_S, self._every_s)
                self._sample(gpu, host)
                while not self._ended.wait(wait_s):
                    self._sample(gpu, host)
                    wait_s = self._every_s
        except Exception as error:
            log.warning("the machine is no longer sampled (%s); training continues", in_one_line(error))
        finally:
            self._sampled.set()

    def _gpu_meter(self, stack: ExitStack) -> GpuMeter:
        place = self._place
        on_cuda = place.uuid is not None
        return GpuMeter(
            stack.enter_context(open_nvml()),
            index=place.index,
            name=str(place.gpu),
            uuid=place.uuid,
            total_bytes=place.total_bytes,
            pids=[other.pid for other in self._local if other.shares_gpu(place)],
            reserved=partial(torch.cuda.memory_reserved, place.index) if on_cuda else None,
        )

    def _sample(self, gpu: GpuMeter | None, host: HostMeter | None) -> None:
        card = self._attempt("GPU", gpu.read) if gpu is not None else None
        box = self._attempt("host", host.read) if host is not None else None
        self._last = box or self._last
        workers = self._workers() * len(self._local)
        self._sampled.set()
        if self._ended.is_set():  # after the run's last event there comes nothing
            return
        self._write(
            "sample",
            step=self._step(),
            rank=self._place.rank,
            gpu=None if card is None else asdict(card),
            host=None if box is None else {**asdict(box), "workers": workers},
        )

    def _attempt(self, what: str, read: Callable[[], T]) -> T | None:
        """What cannot be read now may be next time. It is reported once."""
        try:
            return read()
        except Exception as error:
            if what not in self._failing:
                self._failing.add(what)
                log.info("the %s cannot be sampled (%s); training continues", what, in_one_line(error))
            return None


def _is_first(place: RankPlace, places: Sequence[RankPlace]) -> bool:
    """Of the ranks on one GPU, the first samples it."""
    return not any(other.rank < place.rank and other.shares_gpu(place) for other in places)
