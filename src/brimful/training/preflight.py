"""Before several processes train: can they add up one number? Where not, the fix is named, by its symptom.

A broken connection shows late and badly. NCCL connects at the first collective, and where two GPUs cannot reach each other
(an IOMMU, a container's small /dev/shm, the wrong network card) that call hangs for the day that we let collectives wait,
or says "unhandled system error". So the first collective is one number, in a thread, with a time limit of a minute; it
costs nothing that training would not pay at its first step. Symptoms and fixes are those on the issue trackers of NCCL and
of gloo's users (`fix_for`); a fix that the environment has already is not named again.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch

from brimful.errors import BadOption, ConnectionFailed, DeviceBusy
from brimful.machine.host import Space
from brimful.memory.ledger import Ledger
from brimful.planning.target import PlanOptions, Target, find_target
from brimful.training.options import TrainOptions
from brimful.units import GiB, show_bytes

# Where a process of a run trains: its device, and the limit on it while the run lasts.


def device_of(fitting: PlanOptions, options: TrainOptions) -> torch.device:
    """The one asked for; of several processes, each takes the card of its number."""
    there = torch.cuda.device_count()
    if options.gpus is not None and options.gpus > there:
        on_cpu = "" if there else "; on the CPU, --processes N shares a step"
        raise DeviceBusy(f"--gpus {options.gpus}: torch {torch.__version__} sees {there or 'none'} here{on_cpu}")
    if options.backend == "nccl" and find_target(fitting).device.type != "cuda":
        raise BadOption("--backend nccl: NCCL connects cards, and this run is on the CPU; leave it out, or give gloo")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = find_target(fitting).device
    if device.type == "cuda" and several and ":" not in fitting.device:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextmanager
def limited(target: Target, fitting: PlanOptions) -> Iterator[None]:
    """A limit that was asked for holds while the run trains: torch's cap on a card, the ledger on the CPU."""
    if fitting.memory_limit_bytes is None:
        yield
        return
    with target.capped():
        if target.device.type != "cpu":
            yield
            return
        with Ledger(fitting.memory_limit_bytes):
            yield


TIMED_OUT = "no answer in time"
"""The symptom that comes without a message."""
_PATIENCE = timedelta(days=1)
"""For the collectives of training, as in `processes`: the limit here is ours, not the group's."""
_SMALL_SHM_BYTES = 1 * GiB
"""A /dev/shm below this may be the trouble: Docker gives 64 MiB, and NCCL takes up to 10 MiB for each pair of GPUs."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a fix depends on."""

    backend: str
    boxes: int = 1
    shm_bytes: int | None = None
    """The size of /dev/shm; None where there is none."""
    interfaces: Sequence[str] = ()
    """Network interfaces of this box, the loopback left out."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def detect(cls, backend: str) -> "Surroundings":
        size = int(os.environ.get("WORLD_SIZE", 1))
        shm = Space.of("/dev/shm")
        return cls(
            backend=backend,
            boxes=max(1, size // int(os.environ.get("LOCAL_WORLD_SIZE", size))),
            shm_bytes=None if shm is None else shm.total_bytes,
            interfaces=[name for _, name in socket.if_nameindex() if name != "lo"],
            environment=dict(os.environ),
        )


def check_connection(device: "torch.device", backend: str, *, timeout_s: float = 60.0, meet_s: float = 600.0) -> None:
    """Start torch.distributed where nobody has, and add up one number over all processes; ConnectionFailed where that fails.

    `meet_s` is how long the processes wait for one another to start, `timeout_s` how long the sum may then take.
    """
    try:
        _meet(backend, meet_s, timeout_s)
        total, size = _in_time(lambda: _sum_of_ranks(device), timeout_s)
    except TimeoutError:
        what = f"the processes could not add up one number through {backend} within {timeout_s:g} s"
        raise ConnectionFailed(f"{what}: {fix_for(TIMED_OUT, Surroundings.detect(backend))}") from None
    except Exception as error:
        fix = fix_for(str(error), Surroundings.detect(backend))
        raise ConnectionFailed(f"the processes cannot talk through {backend} ({gist(str(error))}): {fix}") from error
    if total != size * (size + 1) / 2:
        what = f"the processes added up 1 to {size} through {backend} and got {total:g}"
        raise ConnectionFailed(f"{what}: {fix_for('P2P', Surroundings.detect(backend))}")


def _meet(backend: str, meet_s: float, timeout_s: float) -> None:
    """All processes at one store, so that the time of the sum is its own and not that of somebody's imports."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=meet_s)))
    store.set(f"brimful/there/{rank}", "1")
    store.wait([f"brimful/there/{one}" for one in range(size)], timedelta(seconds=meet_s))
    store.set_timeout(_PATIENCE)
    ours = dist.PrefixStore("default_pg", store)
    # gloo connects in here, so it has the limit of a connection
    _in_time(
        lambda: dist.init_process_group(backend, store=ours, rank=rank, world_size=size, timeout=_PATIENCE), timeout_s
    )


def _sum_of_ranks(device: "torch.device") -> tuple[float, int]:
    """1 + 2 + … over the processes, and how many they are; ready when it has arrived, for NCCL only queues it."""
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread has a current device of its own
    number = torch.tensor([float(dist.get_rank() + 1)], device=device)
    work = dist.all_reduce(number, async_op=True)
    while not work.is_completed():  # no wait in C++, which the interpreter could not leave
        time.sleep(0.002)
    work.wait()
    return float(number.item()), dist.get_world_size()


def _in_time(act: Callable[[], _T], limit_s: float) -> _T:
    """What it returns, or TimeoutError. A thread that hangs is left behind: the error ends its process."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="brimful-preflight", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def gist(message: str) -> str:
    """The one line of an error that says something: what NCCL calls its last error, else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    last = next((place for place, line in enumerate(lines) if line.startswith("Last error")), None)
    line = lines[0] if last is None or last + 1 == len(lines) else lines[last + 1]
    return line[:200].rstrip(".: ")


def fix_for(message: str, here: Surroundings) -> str:
    """What to do about an error of NCCL or gloo, or about a time-out: the likeliest fix, a second one where there is one."""
    named = {fix: None for pattern, fixes in _SYMPTOMS if re.search(pattern, message, re.IGNORECASE) for fix in fixes}
    told = [text for fix in named if (text := fix(here))][:2]
    if here.backend != "nccl":
        return ", or ".join(told) or "see that the processes reach each other, and what the others say"
    told = told or ["run with NCCL_DEBUG=INFO, which says more"]
    return f"{', or '.join(told)}; as a last resort --backend gloo does without NCCL, slower"


_Fix = Callable[[Surroundings], str | None]


def _cumem(here: Surroundings) -> str | None:
    return _variable("NCCL_CUMEM_HOST_ENABLE", "0", "NCCL then shares host memory as its older versions do", here)


def _no_p2p(here: Surroundings) -> str | None:
    return _variable(
        "NCCL_P2P_DISABLE", "1", "it does without direct copies between cards, which an IOMMU can break", here
    )


def _variable(name: str, value: str, why: str, here: Surroundings) -> str | None:
    if here.backend != "nccl" or here.environment.get(name) == value:
        return None
    return f"set {name}={value} ({why})"


def _shm(here: Surroundings) -> str | None:
    if here.shm_bytes is None or here.shm_bytes >= _SMALL_SHM_BYTES:
        return None
    return f"give /dev/shm more than its {show_bytes(here.shm_bytes)} (a container takes --shm-size 2g)"


def _interface(here: Surroundings) -> str | None:
    """gloo takes one name, and NCCL a list."""
    names = "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME" if here.backend == "nccl" else "GLOO_SOCKET_IFNAME"
    if here.boxes == 1:
        return f"set {names} to a network interface by which this box reaches itself ({', '.join([*here.interfaces, 'lo'])})"
    known = f" ({', '.join(here.interfaces)})" if here.interfaces else ""
    return f"set {names} to the network interface that reaches the other boxes{known}"


def _interface_between_boxes(here: Surroundings) -> str | None:
    return _interface(here) if here.boxes > 1 else None


def _own_gpu(here: Surroundings) -> str | None:
    return "start no more processes than there are GPUs (--gpus)"


def _look_at_others(here: Surroundings) -> str | None:
    return "see why the other processes have not started, and that MASTER_ADDR and MASTER_PORT are the same for all"


_SYMPTOMS: tuple[tuple[str, tuple[_Fix, ...]], ...] = (
    (r"duplicate gpu detected", (_own_gpu,)),
    (
        r"waiting for clients|brimful/there|client socket has (timed out|failed)",
        (_look_at_others, _interface_between_boxes),
    ),
    (r"socket interface found|find address for|AF_INET|connectFullMesh|resolve hostname|route to host", (_interface,)),
    (r"Connect to \S+ failed|Connection refused|Connection timed out|NET/IB", (_interface,)),
    (r"/dev/shm/\S* \(size 0\)|cumem|shm\.cc", (_cumem,)),
    (r"/dev/shm|shared memory segment|No space left on device", (_shm, _cumem)),
    (r"IPC handle|cudaIpc|P2P", (_no_p2p,)),
    (r"peer access", (_cumem, _no_p2p)),
    (r"unhandled (system|cuda) error", (_shm, _cumem, _no_p2p)),
    (re.escape(TIMED_OUT), (_interface_between_boxes, _no_p2p, _shm)),
)
"""What an error says, and what helps; in the order of how sure it is."""
