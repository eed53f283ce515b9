"""What a user reads off the table."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from brimful.machine.gpu import Gpu, GpuProcess
from brimful.machine.host import Host, Space
from brimful.machine.machine import Machine, Software
from brimful.report.tables import machine_table
from brimful.units import GiB, MiB

HOST = Host(
    ram_total_bytes=64 * GiB,
    ram_limit_bytes=64 * GiB,
    ram_limited_by="physical memory",
    ram_available_bytes=50 * GiB,
    swap_total_bytes=0,
    swap_free_bytes=0,
    cores_total=16,
    cores=16,
    cores_limited_by="all cores of the machine",
    open_files_limit=1024,
    locked_memory_limit_bytes=None,
)
SOFTWARE = Software(
    python="3.12.3",
    torch="2.11.0+cu130",
    cuda="13.0",
    driver="580.159.04",
    platform="Linux-6.8",
    in_container=False,
    container_sign=None,
)
GPU = Gpu(
    index=0,
    kind="cuda",
    name="NVIDIA H200",
    uuid="GPU-u",
    total_bytes=140 * GiB,
    free_bytes=79 * GiB,
    used_by_others_bytes=61 * GiB,
    own_bytes=0,
    other_processes=(GpuProcess(pid=4711, name="python3", used_bytes=61 * GiB),),
    driver="580.159.04",
    capability="9.0",
)
MACHINE = Machine(
    gpus=(GPU,),
    host=HOST,
    shm=Space(path="/dev/shm", total_bytes=32 * GiB, free_bytes=32 * GiB),
    disk=Space(path="/data/runs", total_bytes=500 * GiB, free_bytes=80 * GiB),
    software=SOFTWARE,
    notes=(),
)


def text(machine: Machine, width: int) -> list[str]:
    console = Console(width=width, file=StringIO())
    console.print(machine_table(machine))
    return console.file.getvalue().splitlines()


def lines(machine: Machine) -> dict[str, str]:
    """The table's lines by their label, on a terminal so wide that none is broken."""
    return {label: value.strip() for label, value in (line.split("  ", 1) for line in text(machine, width=250))}


def host(**changes: object) -> dict[str, str]:
    return lines(replace(MACHINE, host=replace(HOST, **changes)))


def test_a_card_shows_what_is_free_and_who_holds_the_rest():
    assert lines(MACHINE)["cuda:0"] == (
        "NVIDIA H200 (capability 9.0): 79 GiB free of 140 GiB; python3 (pid 4711) holds 61 GiB"
    )


def test_a_card_of_unknown_use_says_unknown():
    gpu = replace(GPU, free_bytes=None, used_by_others_bytes=None, other_processes=(), capability=None)
    assert lines(replace(MACHINE, gpus=(gpu,)))["cuda:0"] == (
        "NVIDIA H200: free unknown of 140 GiB; who holds the rest is unknown"
    )


def test_no_gpu_is_one_clear_line():
    shown = lines(replace(MACHINE, gpus=(), notes=("torch has no CUDA support.",)))
    assert shown["GPU"] == "none; training runs on the CPU"
    assert shown["note"] == "torch has no CUDA support."


def test_ram_without_a_limit_is_all_usable():
    assert lines(MACHINE)["RAM"] == "64 GiB, all of it usable; 50 GiB available now"


def test_limited_ram_says_by_what():
    shown = host(ram_limit_bytes=16 * GiB, ram_limited_by="cgroup v2 memory.max of /job", ram_available_bytes=9 * GiB)
    assert shown["RAM"] == "16 GiB usable of 64 GiB (cgroup v2 memory.max of /job); 9 GiB available now"


def test_limited_cores_say_by_what():
    shown = host(cores=2, cores_limited_by="cgroup v2 cpu.max: 2.5 cores")
    assert shown["cores"] == "2 usable of 16 (cgroup v2 cpu.max: 2.5 cores)"


@pytest.mark.parametrize(("total", "shown"), [(0, "none"), (8 * GiB, "8 GiB, 6 GiB free")])
def test_swap(total, shown):
    assert host(swap_total_bytes=total, swap_free_bytes=min(total, 6 * GiB))["swap"] == shown


def test_a_large_shm_needs_no_words():
    assert lines(MACHINE)["/dev/shm"] == "32 GiB, 32 GiB free"


@pytest.mark.parametrize(("total", "free"), [(64 * MiB, 64 * MiB), (32 * GiB, 100 * MiB)])
def test_a_small_or_full_shm_is_warned_of_with_the_reason(total, free):
    shm = Space(path="/dev/shm", total_bytes=total, free_bytes=free)
    assert "less than 1 GiB: DataLoader workers pass batches through it" in lines(replace(MACHINE, shm=shm))["/dev/shm"]


def test_in_a_container_the_remedy_for_a_small_shm_is_an_option_of_docker():
    shm = Space(path="/dev/shm", total_bytes=64 * MiB, free_bytes=64 * MiB)
    software = replace(SOFTWARE, in_container=True, container_sign="/.dockerenv exists")
    assert "--shm-size=8g" in lines(replace(MACHINE, shm=shm, software=software))["/dev/shm"]


def test_a_system_without_shm_has_no_such_line():
    assert "/dev/shm" not in lines(replace(MACHINE, shm=None))


def test_the_disk_is_named_by_the_folder():
    assert lines(MACHINE)["disk"] == "80 GiB free of 500 GiB at /data/runs"


def test_limits_without_a_number_are_no_limit():
    assert lines(MACHINE)["limits"] == "open files 1,024, locked memory no limit"


def test_software_names_build_and_driver():
    assert lines(MACHINE)["software"] == "Python 3.12.3, torch 2.11.0+cu130, CUDA 13.0, driver 580.159.04, Linux-6.8"


def test_a_process_name_with_brackets_is_not_taken_for_markup():
    gpu = replace(GPU, other_processes=(GpuProcess(pid=1, name="[bold]x", used_bytes=61 * GiB),))
    assert "[bold]x (pid 1) holds 61 GiB" in lines(replace(MACHINE, gpus=(gpu,)))["cuda:0"]


def test_no_line_is_wider_than_the_terminal():
    assert max(len(line) for line in text(MACHINE, width=60)) <= 60
