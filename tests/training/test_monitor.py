"""The thread that samples the machine: who samples what, and that nothing it meets reaches the training."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from brimful.machine.usage import GpuSample, HostSample
from brimful.training import monitor as module
from brimful.training.events import FORMAT
from brimful.training.monitor import Monitor, RankPlace, begin_figures, gather_places
from brimful.units import GiB

HOST = HostSample(
    tree_bytes=3 * GiB, machine_bytes=5 * GiB, limit_bytes=16 * GiB, limited_by="physical memory", swap_used_bytes=0,
    swap_total_bytes=0, cpu=0.5, read_bytes_per_s=None,
)  # fmt: skip
CARD = GpuSample(
    uuid="x",
    index=0, name="NVIDIA H200", utilization=0.9, temperature_c=60, power_w=300.0, used_bytes=GiB, total_bytes=139 * GiB, others_bytes=0
)  # fmt: skip


def on_cpu(rank, host="a"):
    return RankPlace(rank=rank, host=host, pid=100 + rank, device="cpu")


def on_gpu(rank, index, uuid=None, host="a"):
    return RankPlace(
        rank=rank, host=host, pid=100 + rank, device=f"cuda:{index}", gpu="NVIDIA H200", uuid=uuid, total_bytes=139 * GiB
    )  # fmt: skip


@pytest.fixture
def meters(monkeypatch):
    """Meters that answer at once, and what they were made for."""
    made = SimpleNamespace(host=None, gpu=None, host_answers=lambda: HOST, gpu_answers=lambda: CARD, open_sessions=0)

    class Session:
        def __enter__(self):
            made.open_sessions += 1

        def __exit__(self, *_):
            made.open_sessions -= 1

    def host_meter(pids):
        made.host = pids
        return SimpleNamespace(read=lambda: made.host_answers())

    def gpu_meter(nvml, **facts):
        made.gpu = facts
        return SimpleNamespace(read=lambda: made.gpu_answers())

    monkeypatch.setattr(module, "open_nvml", Session)
    monkeypatch.setattr(module, "HostMeter", host_meter)
    monkeypatch.setattr(module, "GpuMeter", gpu_meter)
    return made


class Journal(list):
    """Events as they are written, and a wait for so many of them."""

    def write(self, event, **fields):
        self.append((event, fields))

    def wait_for(self, count):
        until = time.monotonic() + 20
        while len(self) < count:
            assert time.monotonic() < until, f"only {len(self)} samples"
            time.sleep(0.001)


@pytest.fixture
def journal():
    return Journal()


def monitor(places, rank, journal, every_s=0.001):
    return Monitor(places, rank, write=journal.write, step=lambda: 7, workers=lambda: 2, every_s=every_s)


def test_rank_0_on_a_cpu_samples_the_host_alone(meters, journal):
    with monitor([on_cpu(0), on_cpu(1), on_cpu(2, host="b")], 0, journal):
        journal.wait_for(1)
    event, fields = journal[0]
    assert (event, fields["step"], fields["rank"], fields["gpu"]) == ("sample", 7, 0, None)
    assert fields["host"].items() >= {"tree_bytes": 3 * GiB, "cpu": 0.5, "workers": 4}.items()
    assert list(meters.host) == [100, 101]  # the ranks of this machine


def test_other_ranks_on_a_cpu_sample_nothing(meters, journal):
    with monitor([on_cpu(0), on_cpu(1)], 1, journal) as idle:
        assert not any(thread.name == "brimful-monitor" for thread in threading.enumerate())
    assert (journal, idle.host_bytes) == ([], None)


def test_a_rank_samples_its_own_gpu(meters, journal):
    with monitor([on_gpu(0, 0, "x"), on_gpu(1, 1, "y")], 1, journal):
        journal.wait_for(1)
    fields = journal[0][1]
    assert (fields["rank"], fields["gpu"]["utilization"], fields["host"]) == (1, 0.9, None)
    assert (meters.gpu["index"], meters.gpu["uuid"], meters.gpu["pids"]) == (1, "y", [101])


def test_of_two_ranks_on_one_gpu_the_first_samples_it(meters, journal):
    places = [on_gpu(0, 0, "x"), on_gpu(1, 0, "x")]
    with monitor(places, 0, journal):
        journal.wait_for(1)
    assert meters.gpu["pids"] == [100, 101]
    before = len(journal)
    with monitor(places, 1, journal):
        pass
    assert len(journal) == before


def test_gpus_that_are_number_0_to_each_process_are_told_apart(meters, journal):
    with monitor([on_gpu(0, 0, "x"), on_gpu(1, 0, "y")], 1, journal):
        journal.wait_for(1)


def test_the_first_rank_of_each_machine_samples_it(meters, journal):
    places = [on_gpu(0, 0, "x"), on_gpu(1, 0, "y", host="b"), on_gpu(2, 1, "z", host="b")]
    for rank in (0, 1, 2):
        before = len(journal)
        with monitor(places, rank, journal):
            journal.wait_for(before + 1)
    hosts = {fields["rank"]: fields["host"] is not None for _, fields in journal}
    assert hosts == {0: True, 1: True, 2: False}


def test_gpus_of_two_machines_are_told_apart(meters, journal):
    with monitor([on_gpu(0, 0), on_gpu(1, 0, host="b")], 1, journal):
        journal.wait_for(1)


def test_samples_follow_each_other_in_one_session_and_end_with_the_block(meters, journal):
    with monitor([on_gpu(0, 0, "x")], 0, journal) as running:
        journal.wait_for(1)
        assert meters.open_sessions == 1
        journal.wait_for(4)
        assert meters.open_sessions == 1
    count = len(journal)
    assert not running._thread.is_alive() and meters.open_sessions == 0
    time.sleep(0.02)
    assert len(journal) == count


def test_the_first_step_knows_the_memory_of_the_host(meters, journal):
    with monitor([on_cpu(0)], 0, journal, every_s=100.0) as running:
        assert (running.host_bytes, running.machine_bytes) == (3 * GiB, 5 * GiB)


def test_what_cannot_be_read_now_is_null_and_may_be_read_next_time(meters, journal):
    answers = iter([CARD, RuntimeError("NVML: GPU is lost"), CARD])

    def answer():
        one = next(answers, CARD)
        if isinstance(one, Exception):
            raise one
        return one

    meters.gpu_answers = answer
    with monitor([on_gpu(0, 0, "x")], 0, journal):
        journal.wait_for(3)
    assert [fields["gpu"] is None for _, fields in journal[:3]] == [False, True, False]
    assert journal[1][1]["host"] is not None


def test_a_host_that_cannot_be_read_keeps_its_last_figures_for_the_steps(meters, journal):
    answers = iter([HOST])
    meters.host_answers = lambda: next(answers)  # then StopIteration
    with monitor([on_cpu(0)], 0, journal) as running:
        journal.wait_for(3)
        assert running.host_bytes == 3 * GiB
    assert journal[2][1]["host"] is None


def test_a_monitor_that_cannot_even_begin_is_told_of_and_harms_nobody(meters, journal, monkeypatch, caplog):
    def broken():
        raise OSError("no driver")

    monkeypatch.setattr(module, "open_nvml", broken)
    with monitor([on_gpu(0, 0, "x")], 0, journal) as running:
        pass
    assert (journal, running.host_bytes) == ([], None)
    assert caplog.messages == ["the machine is no longer sampled (OSError: no driver); training continues"]


def test_a_driver_that_hangs_holds_up_neither_the_beginning_nor_the_end(meters, journal, monkeypatch):
    monkeypatch.setattr(module, "START_S", 0.01)
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    hangs = threading.Event()
    meters.gpu_answers = lambda: hangs.wait() and CARD
    with monitor([on_gpu(0, 0, "x")], 0, journal):
        pass
    hangs.set()
    time.sleep(0.02)
    assert journal == []  # not even later, behind the run's last event


def test_a_place_is_the_process_and_its_device():
    place = RankPlace.of(3, torch.device("cpu"))
    assert (place.rank, place.gpu, place.total_bytes) == (3, None, None)


def test_a_place_on_a_gpu_has_what_torch_knows_of_it(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", uuid="x", total_memory=139 * GiB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    place = RankPlace.of(0, torch.device("cuda:1"))
    assert (place.gpu, place.uuid, place.index, place.total_bytes) == ("NVIDIA H200", "x", 1, 139 * GiB)


def test_places_are_gathered_from_all_ranks():
    group = SimpleNamespace(rank=1, gather_objects=lambda own: [on_cpu(0), own])
    assert [place.rank for place in gather_places(group, torch.device("cpu"))] == [0, 1]


def test_a_run_begins_with_its_machine_and_the_gpus_of_all_ranks():
    figures = begin_figures([on_gpu(0, 0, "x"), on_gpu(1, 1, "y"), on_gpu(2, 1, "y")])
    assert (figures["format"], figures["host"], figures["pid"]) == (FORMAT, "a", 100)
    gpu = {"host": "a", "name": "NVIDIA H200", "total_bytes": 139 * GiB}
    assert figures["gpus"] == [
        {"ranks": [0], "index": 0, "uuid": "x", **gpu}, {"ranks": [1, 2], "index": 1, "uuid": "y", **gpu}
    ]  # fmt: skip
    assert figures["cores"] >= 1 and figures["ram_limit_bytes"] > 0
