"""Who holds a card's memory, in one phrase: what a user asks first when a card is full.

python3 (pid 4711) holds 61.2 GiB
processes outside this container hold 61.2 GiB
"""

from brimful.machine.container import container_sign
from brimful.machine.gpu import Gpu, GpuProcess, detect_gpus
from brimful.units import MiB, show_bytes

_NAMED = 3
"""More processes than this are summed up: the phrase goes into one-sentence errors."""

_NOISE_BYTES = 64 * MiB
"""Less than this is nobody: starting CUDA takes 3 MiB that no process is charged for, and NVML rounds."""


def gpu_holders(index: int) -> str:
    """Look now, and say who else holds memory of the GPU torch numbers `index`."""
    for gpu in detect_gpus().gpus:
        if gpu.index == index:
            return describe_holders(gpu, in_container=container_sign() is not None)
    return f"there is no GPU {index}"


def describe_holders(gpu: Gpu, *, in_container: bool) -> str:
    """Who else holds the card's memory, the largest first; what NVML lists nobody for goes to the unseen."""
    if gpu.used_by_others_bytes is None:
        return "who holds the rest is unknown"
    named = [process for process in gpu.other_processes if process.name is not None and process.used_bytes]
    phrases = [f"{_who(process)} holds {show_bytes(process.used_bytes)}" for process in named[:_NAMED]]
    if more := named[_NAMED:]:
        total = sum(process.used_bytes or 0 for process in more)
        phrases.append(f"{len(more)} more {'hold' if len(more) > 1 else 'holds'} {show_bytes(total)}")
    rest = gpu.used_by_others_bytes - sum(process.used_bytes or 0 for process in named)
    if rest >= _NOISE_BYTES:
        phrases.append(_rest(gpu, rest, in_container))
    return _list(phrases) or "no other process holds memory"


def _rest(gpu: Gpu, rest_bytes: int, in_container: bool) -> str:
    """Memory whose holder has a name but no bytes (all of it is theirs), or neither."""
    who = [_who(process) for process in gpu.other_processes if process.name is not None and process.used_bytes is None]
    if not who or any(process.name is None for process in gpu.other_processes):
        who.append("processes outside this container" if in_container else "processes that cannot be seen from here")
    verb = "holds" if len(who) == 1 and not who[0].startswith("processes") else "hold"
    return f"{_list(who)} {verb} {show_bytes(rest_bytes)}"


def _who(process: GpuProcess) -> str:
    return f"{process.name} (pid {process.pid})"


def _list(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1] if len(items) > 1 else "".join(items)
