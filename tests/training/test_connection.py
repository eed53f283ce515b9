"""Processes that cannot talk are told what helps, before they train."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from brimful.errors import ConnectionFailed
from brimful.training import connection
from brimful.training.connection import TIMED_OUT, Surroundings, fix_for, main_line
from brimful.training.launch import supervise
from brimful.units import GiB, MiB

ONE_BOX = Surroundings(backend="nccl", shm_bytes=64 * MiB, interfaces=["eth0"])
ROOMY = Surroundings(backend="nccl", shm_bytes=16 * GiB, interfaces=["eth0"])
TWO_BOXES = Surroundings(backend="nccl", machines=2, shm_bytes=16 * GiB, interfaces=["eth0", "ib0"])
GLOO = Surroundings(backend="gloo", interfaces=["eth0"])

SYSTEM = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
    "Last error:\n"
)
CUDA = SYSTEM.replace("system error", "cuda error").replace(
    "ncclSystemError: System call", "ncclUnhandledCudaError: Call"
)
USAGE = SYSTEM.replace("unhandled system error", "invalid usage").replace("ncclSystemError", "ncclInvalidUsage")
"""As torch words what NCCL says; the last lines are from NCCL's and its users' issue trackers."""


@pytest.mark.parametrize(
    ("message", "here", "fix"),
    [
        (SYSTEM + "Error while attaching to shared memory segment /dev/shm/nccl- (size 0), error: No such file or directory (2)", ONE_BOX, "set NCCL_CUMEM_HOST_ENABLE=0"),
        (CUDA + "Cuda failure 217 'peer access is not supported between these two devices'", ROOMY, "set NCCL_CUMEM_HOST_ENABLE=0"),
        ("transport/shm.cc:590 NCCL WARN Cuda failure 217", ROOMY, "set NCCL_CUMEM_HOST_ENABLE=0"),
        (SYSTEM + "Error while creating shared memory segment /dev/shm/nccl-EoOvZr (size 7340384)", ONE_BOX, "give /dev/shm more than its 64 MiB (for a container, --shm-size 2g), or set NCCL_CUMEM_HOST_ENABLE=0"),
        (SYSTEM + "Error while creating shared memory segment /dev/shm/nccl-EoOvZr (size 7340384)", ROOMY, "set NCCL_CUMEM_HOST_ENABLE=0"),
        ("Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes", ONE_BOX, "give /dev/shm more"),
        (SYSTEM, ROOMY, "set NCCL_CUMEM_HOST_ENABLE=0"),
        ("transport/p2p.cc:238 NCCL WARN failed to open CUDA IPC handle : 217 peer access is not supported", ROOMY, "set NCCL_P2P_DISABLE=1"),
        (TIMED_OUT, ROOMY, "set NCCL_P2P_DISABLE=1"),
        (TIMED_OUT, TWO_BOXES, "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the network interface that reaches the other machines (eth0, ib0)"),
        (USAGE + "Bootstrap : no socket interface found", TWO_BOXES, "set NCCL_SOCKET_IFNAME"),
        (SYSTEM + "socketStartConnect: Connect to 10.0.0.2<45763> failed : Software caused connection abort", TWO_BOXES, "set NCCL_SOCKET_IFNAME"),
        ("ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)", TWO_BOXES, "set NCCL_SOCKET_IFNAME"),
        ("Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error", GLOO, "set GLOO_SOCKET_IFNAME to a network interface by which this machine reaches itself (eth0, lo)"),
        ("[enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: ^lo", GLOO, "set GLOO_SOCKET_IFNAME"),
        (USAGE + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10", ROOMY, "start no more processes than there are GPUs (--processes)"),
        ("Timed out after 601 seconds waiting for clients. 1/3 clients joined.", TWO_BOXES, "see why the other processes have not started"),
        ("The client socket has timed out after 600000ms while trying to connect to (box0, 29500).", TWO_BOXES, "see why the other processes have not started"),
        ("something new", ROOMY, "run with NCCL_DEBUG=INFO"),
        ("something new", GLOO, "see that the processes reach each other"),
    ],
)  # fmt: skip
def test_the_likeliest_fix_comes_first(message, here, fix):
    assert fix_for(message, here).startswith(fix)


def test_a_fix_that_is_in_the_environment_is_not_named_again():
    tried = Surroundings(backend="nccl", shm_bytes=16 * GiB, environment={"NCCL_P2P_DISABLE": "1"})
    assert fix_for(TIMED_OUT, tried).startswith("run with NCCL_DEBUG=INFO")


def test_nccl_has_a_last_resort_and_gloo_is_it():
    assert fix_for(TIMED_OUT, ROOMY).endswith("; as a last resort --backend gloo, which is slower")
    assert "NCCL" not in fix_for(SYSTEM, GLOO) + fix_for(TIMED_OUT, GLOO)


def test_at_most_two_fixes_are_named():
    assert fix_for(SYSTEM, ONE_BOX).count(", or ") == 1


def test_the_main_line_of_an_error_is_what_nccl_calls_its_last():
    assert main_line(USAGE + "Duplicate GPU detected : rank 1\n\nframe #0") == "Duplicate GPU detected : rank 1"
    assert main_line("Connection closed.\nframe #0") == "Connection closed"
    assert main_line("") == ""


@pytest.mark.parametrize(("variables", "machines"), [({}, 1), ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 2), ({"WORLD_SIZE": "4"}, 1)])  # fmt: skip
def test_machines_are_counted_from_what_the_launcher_says(monkeypatch, variables, machines):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Surroundings.detect("gloo").machines == machines


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (lambda: (3.0, 2), None),
        (lambda: (4.0, 2), "the processes added up 1 to 2 through nccl and got 4. Try: set NCCL_P2P_DISABLE=1"),
        (
            lambda: connection.time.sleep(5),
            "could not add up one number through nccl within 0.05 s. Try: set NCCL_P2P_DISABLE=1",
        ),
        (
            lambda: 1 / 0,
            "the processes cannot communicate through nccl (division by zero). Try: run with NCCL_DEBUG=INFO",
        ),
    ],
    ids=["good", "wrong", "late", "broken"],
)
def test_what_the_sum_gives_is_checked(monkeypatch, happens, words):
    monkeypatch.setattr(connection, "_start", lambda *_: None)
    monkeypatch.setattr(connection, "_sum_of_ranks", lambda device: happens())
    monkeypatch.setattr(Surroundings, "detect", lambda backend: ROOMY)
    if words is None:
        connection.check_connection(torch.device("cpu"), "nccl", timeout_s=0.5)
    else:
        with pytest.raises(ConnectionFailed) as caught:
            connection.check_connection(torch.device("cpu"), "nccl", timeout_s=0.05)
        assert words in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_never_start_are_missed(monkeypatch, rank):
    for name, value in places(rank).items():
        monkeypatch.setenv(name, value)
    port = int(os.environ["MASTER_PORT"])
    served = rank and torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(
        ConnectionFailed,
        match=r"cannot communicate through gloo \(.*\). Try: see why the other processes have not started",
    ):
        connection.check_connection(torch.device("cpu"), "gloo", start_s=0.2, timeout_s=0.2)
    del served


WORKER = """
import sys, torch, torch.distributed as dist
from brimful.errors import ConnectionFailed
from brimful.training.connection import check_connection
device = torch.device("cpu")
check_connection(device, "gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(int(total))
if dist.get_rank() == 0:
    try:
        check_connection(device, "gloo", timeout_s=0.3)
    except ConnectionFailed as error:
        print(error)
print("done", flush=True)
sys.stdin.readline()
import os
os._exit(0)
"""


def test_two_real_processes_talk_and_one_that_hangs_is_noticed():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    port = places(0)["MASTER_PORT"]
    both = [
        subprocess.Popen([sys.executable, "-c", WORKER], env=os.environ | places(rank) | {"MASTER_PORT": port}, **pipes)
        for rank in (0, 1)
    ]
    said = [list(iter(process.stdout.readline, "done\n")) for process in both]
    for process in both:
        process.communicate("\n", timeout=60)
    assert said[1] == ["2\n"]
    assert said[0][0] == "2\n"
    assert said[0][1].startswith("the processes could not add up one number through gloo within 0.3 s. ")


def places(rank: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()} | {"OMP_NUM_THREADS": "1"}


LISTENING = """
import json, os, psutil, torch
from pathlib import Path
from brimful.training.connection import check_connection
from brimful.step.distributed import join
check_connection(torch.device("cpu"), "gloo")
group = join(torch.device("cpu"))
sockets = psutil.Process().net_connections()
Path(os.environ["FOUND"], f"rank-{group.rank}").write_text(json.dumps([one.laddr.ip for one in sockets if one.status == "LISTEN"]))
group.gather([1.0])
os._exit(0)
"""


def test_processes_of_one_machine_listen_on_its_loopback_only(tmp_path):
    command, environment = [sys.executable, "-c", LISTENING], os.environ | {"FOUND": str(tmp_path)}
    assert supervise(command, processes=2, environment=environment, reports=tmp_path / "job").code == 0
    for rank in (0, 1):
        assert set(json.loads((tmp_path / f"rank-{rank}").read_text())) == {"127.0.0.1"}
