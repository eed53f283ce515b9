"""Before several processes train: can they add up one number? If not, the fix is named, by its symptom.

A broken connection shows late and badly. NCCL connects at the first collective, and if two GPUs cannot reach each other (an
IOMMU, a container's small /dev/shm, the wrong network interface) that call hangs for the day that collectives may take,
or says "unhandled system error". So the first collective is one number, in a thread, with a time limit of a minute; it
costs nothing that training would not pay at its first step. Symptoms and fixes are those on the issue trackers of NCCL and
of gloo's users; a fix that the environment has already is not named again.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from brimful.errors import ConnectionFailed
from brimful.machine.host import Space
from brimful.units import GiB, show_bytes

TIMED_OUT = "no answer in time"
"""The symptom that comes without a message."""
_COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Of the group that training uses; the time limit here is our own."""
_SMALL_SHM_BYTES = 1 * GiB
"""A /dev/shm below this may be the trouble: Docker gives 64 MiB, and NCCL takes up to 10 MiB for each pair of GPUs."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a fix depends on."""

    backend: str
    machines: int = 1
    shm_bytes: int | None = None
    """The size of /dev/shm; None if there is none."""
    interfaces: Sequence[str] = ()
    """Network interfaces of this machine, except the loopback."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def detect(cls, backend: str) -> "Surroundings":
        size = int(os.environ.get("WORLD_SIZE", 1))
        shm = Space.of("/dev/shm")
        return cls(
            backend=backend,
            machines=max(1, size // int(os.environ.get("LOCAL_WORLD_SIZE", size))),
            shm_bytes=None if shm is None else shm.total_bytes,
            interfaces=[name for _, name in socket.if_nameindex() if name != "lo"],
            environment=dict(os.environ),
        )


def check_connection(device: torch.device, backend: str, *, timeout_s: float = 60.0, start_s: float = 600.0) -> None:
    """Start torch.distributed if it is not started, and add up one number over all ranks; `ConnectionFailed` if that fails.

    `start_s` is how long the ranks wait for one another to start, `timeout_s` how long the sum may then take.
    """
    try:
        _start(backend, start_s, timeout_s)
        total, size = _within(lambda: _sum_of_ranks(device), timeout_s)
    except TimeoutError:
        problem = f"the processes could not add up one number through {backend} within {timeout_s:g} s"
        raise ConnectionFailed(f"{problem}. Try: {fix_for(TIMED_OUT, Surroundings.detect(backend))}.") from None
    except Exception as error:
        fix = fix_for(str(error), Surroundings.detect(backend))
        problem = f"the processes cannot communicate through {backend} ({main_line(str(error))})"
        raise ConnectionFailed(f"{problem}. Try: {fix}.") from error
    if total != size * (size + 1) / 2:
        problem = f"the processes added up 1 to {size} through {backend} and got {total:g}"
        raise ConnectionFailed(f"{problem}. Try: {fix_for('P2P', Surroundings.detect(backend))}.")


def _start(backend: str, start_s: float, timeout_s: float) -> None:
    """All ranks meet at one store first, so that slow imports on one rank do not count as time of the sum."""
    if dist.is_initialized():
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, size, timedelta(seconds=start_s))
    store.set(f"brimful/started/{rank}", "1")
    store.wait([f"brimful/started/{other}" for other in range(size)], timedelta(seconds=start_s))
    store.set_timeout(_COLLECTIVE_TIMEOUT)
    group_store = dist.PrefixStore("default_pg", store)

    def start_group() -> None:
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=_COLLECTIVE_TIMEOUT)

    _within(start_group, timeout_s)  # gloo connects in here


def _store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """torch's store listens on all interfaces, whatever MASTER_ADDR says. For ranks on one machine it need not."""
    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    if address not in ("127.0.0.1", "localhost") or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        store: dist.Store
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        return store
    listener = socket.create_server(("127.0.0.1", port)).detach() if rank == 0 else None
    return dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener)


def _sum_of_ranks(device: torch.device) -> tuple[float, int]:
    """1 + 2 + … over the ranks, and how many they are; returns when the sum has arrived, for NCCL only queues it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread has a current device of its own
    number = torch.tensor([float(dist.get_rank() + 1)], device=device)
    work = dist.all_reduce(number, async_op=True)
    while not work.is_completed():  # a wait in C++ could not be left behind
        time.sleep(0.002)
    work.wait()
    return float(number.item()), dist.get_world_size()


def _within(work: Callable[[], T], limit_s: float) -> T:
    """What it returns, or TimeoutError. A thread that hangs is left behind: the error ends its process."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="brimful-connection", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def main_line(message: str) -> str:
    """The line of an error that says something: what NCCL calls its last error, else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    last = next((index for index, line in enumerate(lines) if line.startswith("Last error")), None)
    line = lines[0] if last is None or last + 1 == len(lines) else lines[last + 1]
    return line[:200].rstrip(".: ")


def fix_for(message: str, here: Surroundings) -> str:
    """What to do about an error of NCCL or gloo, or about a time-out: the likeliest fix, and a second one if there is one."""
    fixes = {fix: None for pattern, fixes in _SYMPTOMS if re.search(pattern, message, re.IGNORECASE) for fix in fixes}
    texts = [text for fix in fixes if (text := fix(here))][:2]
    if here.backend != "nccl":
        return ", or ".join(texts) or "see that the processes reach each other, and what the others print"
    texts = texts or ["run with NCCL_DEBUG=INFO, which prints more"]
    return f"{', or '.join(texts)}; as a last resort --backend gloo, which is slower"


Fix = Callable[[Surroundings], str | None]


def _cumem(here: Surroundings) -> str | None:
    return _variable("NCCL_CUMEM_HOST_ENABLE", "0", "NCCL then shares host memory as older versions do", here)


def _no_p2p(here: Surroundings) -> str | None:
    return _variable("NCCL_P2P_DISABLE", "1", "no direct copies between GPUs, which an IOMMU can break", here)


def _variable(name: str, value: str, why: str, here: Surroundings) -> str | None:
    if here.backend != "nccl" or here.environment.get(name) == value:
        return None
    return f"set {name}={value} ({why})"


def _shm(here: Surroundings) -> str | None:
    if here.shm_bytes is None or here.shm_bytes >= _SMALL_SHM_BYTES:
        return None
    return f"give /dev/shm more than its {show_bytes(here.shm_bytes)} (for a container, --shm-size 2g)"


def _interface(here: Surroundings) -> str | None:
    """gloo takes one name, NCCL a list."""
    names = "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME" if here.backend == "nccl" else "GLOO_SOCKET_IFNAME"
    if here.machines == 1:
        interfaces = ", ".join([*here.interfaces, "lo"])
        return f"set {names} to a network interface by which this machine reaches itself ({interfaces})"
    interfaces = f" ({', '.join(here.interfaces)})" if here.interfaces else ""
    return f"set {names} to the network interface that reaches the other machines{interfaces}"


def _interface_between_machines(here: Surroundings) -> str | None:
    return _interface(here) if here.machines > 1 else None


def _fewer_processes(here: Surroundings) -> str | None:
    return "start no more processes than there are GPUs (--processes)"


def _look_at_others(here: Surroundings) -> str | None:
    return "see why the other processes have not started, and that MASTER_ADDR and MASTER_PORT are the same for all"


_SYMPTOMS: tuple[tuple[str, tuple[Fix, ...]], ...] = (
    (r"duplicate gpu detected", (_fewer_processes,)),
    (
        r"waiting for clients|brimful/started|client socket has (timed out|failed)",
        (_look_at_others, _interface_between_machines),
    ),
    (r"socket interface found|find address for|AF_INET|connectFullMesh|resolve hostname|route to host", (_interface,)),
    (r"Connect to \S+ failed|Connection refused|Connection timed out|NET/IB", (_interface,)),
    (r"/dev/shm/\S* \(size 0\)|cumem|shm\.cc", (_cumem,)),
    (r"/dev/shm|shared memory segment|No space left on device", (_shm, _cumem)),
    (r"IPC handle|cudaIpc|P2P", (_no_p2p,)),
    (r"peer access", (_cumem, _no_p2p)),
    (r"unhandled (system|cuda) error", (_shm, _cumem, _no_p2p)),
    (re.escape(TIMED_OUT), (_interface_between_machines, _no_p2p, _shm)),
)
"""What an error says, and what helps; the surest first."""
