"""A `Machine` at a glance: what may be used, of how much, and why not all of it.

One row a fact, the usable figure first; whatever will end a training (a tiny /dev/shm, a full card, a torch without
CUDA) is yellow and says what to do.
"""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from brimful.machine import Gpu, Host, Machine, Space, describe_holders
from brimful.units import GiB, show_bytes

_WARN = "yellow"
_SMALL_SHM_BYTES = GiB
"""Docker gives 64 MiB; four workers with two batches each of 256 float images of 224² pixels need 1.1 GiB."""


def machine_table(machine: Machine) -> RenderableType:
    """Everything `brimful machine` shows: a label and a line a fact, which also reads well at 80 columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(machine):
        table.add_row(label, value)
    return table


def _rows(machine: Machine) -> list[tuple[str, Text]]:
    host, in_container = machine.host, machine.software.in_container
    return [
        *[(f"{gpu.kind}:{gpu.index}", _gpu(gpu, in_container)) for gpu in machine.gpus],
        *([] if machine.gpus else [("GPU", Text("none; training runs on the CPU"))]),
        ("RAM", Text(_ram(host))),
        ("swap", Text(_swap(host))),
        ("cores", Text(_cores(host))),
        *([("/dev/shm", _shm(machine.shm, in_container))] if machine.shm else []),
        ("disk", Text(_disk(machine.disk))),
        ("limits", Text(_limits(host))),
        ("software", Text(_software(machine))),
        *[("note", Text(note, style=_WARN)) for note in machine.notes],
    ]


def _gpu(gpu: Gpu, in_container: bool) -> Text:
    """Yellow where others hold more than a tenth of the card: a plan for the empty card will not fit."""
    name = gpu.name + (f" (capability {gpu.capability})" if gpu.capability else "")
    free = "free unknown" if gpu.free_bytes is None else f"{show_bytes(gpu.free_bytes)} free"
    text = Text(f"{name}: {free} of {show_bytes(gpu.total_bytes)}; ")
    crowded = (gpu.used_by_others_bytes or 0) > (gpu.total_bytes or 0) / 10
    return text.append(describe_holders(gpu, in_container=in_container), style=_WARN if crowded else "")


def _ram(host: Host) -> str:
    now = f"{show_bytes(host.ram_available_bytes)} available now"
    if host.ram_limit_bytes == host.ram_total_bytes:
        return f"{show_bytes(host.ram_total_bytes)}, all of it usable; {now}"
    usable = f"{show_bytes(host.ram_limit_bytes)} usable of {show_bytes(host.ram_total_bytes)}"
    return f"{usable} ({host.ram_limited_by}); {now}"


def _swap(host: Host) -> str:
    if not host.swap_total_bytes:
        return "none"
    return f"{show_bytes(host.swap_total_bytes)}, {show_bytes(host.swap_free_bytes)} free"


def _cores(host: Host) -> str:
    if host.cores == host.cores_total:
        return f"{host.cores}, all of them usable"
    return f"{host.cores} usable of {host.cores_total} ({host.cores_limited_by})"


def _shm(shm: Space, in_container: bool) -> Text:
    """Too small, it ends in `Bus error` in a DataLoader worker, which nobody connects with /dev/shm."""
    size = Text(f"{show_bytes(shm.total_bytes)}, {show_bytes(shm.free_bytes)} free")
    if shm.total_bytes >= _SMALL_SHM_BYTES and shm.free_bytes >= _SMALL_SHM_BYTES:
        return size
    fix = "start the container with --shm-size=8g or --ipc=host" if in_container else "remount it larger or empty it"
    return size.append(
        f"; less than 1 GiB: DataLoader workers pass batches through it and die of a bus error when it is full; {fix}",
        style=_WARN,
    )


def _disk(disk: Space | None) -> str:
    if disk is None:
        return "unknown"
    return f"{show_bytes(disk.free_bytes)} free of {show_bytes(disk.total_bytes)} at {disk.path}"


def _limits(host: Host) -> str:
    files = "no limit" if host.open_files_limit is None else f"{host.open_files_limit:,}"
    locked = "no limit" if host.locked_memory_limit_bytes is None else show_bytes(host.locked_memory_limit_bytes)
    return f"open files {files}, locked memory {locked}"


def _software(machine: Machine) -> str:
    software = machine.software
    driver = software.driver or next((gpu.driver for gpu in machine.gpus if gpu.driver), None)
    parts = [
        f"Python {software.python}",
        f"torch {software.torch}",
        f"CUDA {software.cuda}" if software.cuda else "",
        f"driver {driver}" if driver else "",
        software.platform,
        f"in a container ({software.container_sign})" if software.in_container else "",
    ]
    return ", ".join(part for part in parts if part)
