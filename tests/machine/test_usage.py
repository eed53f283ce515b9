"""What GPU and host do now: figures of NVML and /proc, and None for what neither tells."""

from types import SimpleNamespace

import pytest

from brimful.machine import usage as module
from brimful.machine.gpu import open_nvml
from brimful.machine.usage import UNLISTED_BYTES, GpuMeter, GpuSample, HostMeter
from brimful.units import GiB, MiB

UUID = "0b22bb49-e7db-2222-8ec0-e808677dbcdb"
STRANGER = 4_000_111


@pytest.fixture
def card(nvml, me):
    """A busy card of NVML's on which this process and a stranger hold memory."""

    def add(processes=None):
        nvml.add(f"GPU-{UUID}", used=31 * GiB, processes={me: 10 * GiB, STRANGER: 20 * GiB} if processes is None else processes)  # fmt: skip
        nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=93, memory=20)
        nvml.nvmlDeviceGetTemperature = lambda handle, sensor: 71 if sensor == 0 else pytest.fail("another sensor")
        nvml.nvmlDeviceGetPowerUsage = lambda handle: 287_500
        return nvml

    return add


def read(pids, reserved=None, uuid=UUID):
    with open_nvml() as session:
        options = {"name": "NVIDIA H200", "uuid": uuid, "total_bytes": 139 * GiB, "pids": pids, "reserved": reserved}
        return GpuMeter(session, index=0, **options).read()


def test_a_gpu_has_all_figures(card, me):
    card()
    assert read([me]) == GpuSample(
        index=0,
        name="NVIDIA H200",
        uuid=UUID,
        utilization=0.93,
        temperature_c=71,
        power_w=287.5,
        used_bytes=30 * GiB,  # NVML's total is 1 GiB more than torch's
        total_bytes=139 * GiB,
        others_bytes=20 * GiB,
    )


def test_the_other_ranks_on_a_gpu_are_no_strangers(card, me):
    card()
    assert read([me, STRANGER]).others_bytes == 0


def test_where_nvml_does_not_list_this_process_what_torch_reserved_and_a_context_are_its_own(card, me):
    card(processes={})
    assert read([me], reserved=lambda: 8 * GiB).others_bytes == 30 * GiB - 8 * GiB - UNLISTED_BYTES
    assert read([me], reserved=lambda: 30 * GiB).others_bytes == 0


def test_what_others_hold_beside_two_ranks_that_are_not_listed_is_unknown(card, me):
    card(processes={})
    assert read([me, me + 1], reserved=lambda: 8 * GiB).others_bytes is None


@pytest.mark.parametrize(
    ("question", "unknown"),
    [
        ("nvmlDeviceGetUtilizationRates", {"utilization"}),
        ("nvmlDeviceGetTemperature", {"temperature_c"}),
        ("nvmlDeviceGetPowerUsage", {"power_w"}),
    ],
)
def test_what_nvml_refuses_is_none(card, me, question, unknown):
    nvml = card()

    def refuse(*_):
        raise nvml.NVMLError("Not Supported")

    setattr(nvml, question, refuse)
    sample = read([me])
    assert {name for name in GpuSample.__slots__ if getattr(sample, name) is None} == unknown


@pytest.mark.parametrize("uuid", [None, "another card"], ids=["not NVIDIA's", "unknown to NVML"])
def test_a_gpu_that_nvml_does_not_know_has_its_name_and_size(card, me, uuid):
    card()
    sample = read([me], uuid=uuid)
    assert (sample.name, sample.total_bytes, sample.used_bytes, sample.utilization) == (
        "NVIDIA H200",
        139 * GiB,
        None,
        None,
    )


class Clock:
    """Advances by what `process_bytes` is said to take."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def machine(lay, no_ulimits, monkeypatch):
    """A process 7 with a worker 8 in a group of 16 GiB on two cores."""
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)

    def write(cpu=(100, 50), read_bytes=(4096, 0), anonymous_kib=(300, 20)):
        files = {
            "proc/meminfo": f"MemTotal: {64 * MiB} kB\nMemFree: 0 kB\nMemAvailable: {40 * MiB} kB\nSwapTotal: {8 * MiB} kB\nSwapFree: {6 * MiB} kB\n",
            "proc/self/mountinfo": "32 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": str(16 * GiB),
            "sys/fs/cgroup/job/memory.current": str(6 * GiB),
            "sys/fs/cgroup/job/memory.stat": f"inactive_file {GiB}\n",
            "proc/7/task/7/children": "8 ",
            "proc/8/task/8/children": "",
        }
        for pid, ticks, bytes_, kib in zip((7, 8), cpu, read_bytes, anonymous_kib, strict=True):
            files |= {
                f"proc/{pid}/stat": f"{pid} (a (program) x) S 1 1 1 0 -1 0 0 0 0 0 {ticks} {ticks} 0 0 20 0",
                f"proc/{pid}/io": f"rchar: 1\nread_bytes: {bytes_}\nwrite_bytes: 3\ncancelled_write_bytes: 0\n",
                f"proc/{pid}/smaps_rollup": f"Rss: 9999 kB\nPss_Anon: {kib} kB\nPss_Shmem: 4 kB\n",
            }
        return lay(files)

    return write


def test_the_memory_of_the_host_is_that_of_the_limit_that_binds(machine):
    sample = HostMeter([7], root=machine()).read()
    assert (sample.machine_bytes, sample.limit_bytes) == (5 * GiB, 16 * GiB)
    assert sample.limited_by == "cgroup v2 memory.max of /job"
    assert (sample.swap_used_bytes, sample.swap_total_bytes) == (2 * GiB, 8 * GiB)


def test_the_memory_of_the_run_is_that_of_its_processes_and_their_children(machine):
    assert HostMeter([7], root=machine()).read().tree_bytes == (300 + 4 + 20 + 4) * 1024


def test_the_first_reading_has_no_rates(machine):
    sample = HostMeter([7], root=machine()).read()
    assert (sample.cpu, sample.read_bytes_per_s) == (None, None)


def test_rates_are_of_the_time_between_two_readings(machine, monkeypatch):
    monkeypatch.setattr(module, "_TICKS_PER_S", 100)
    clock = Clock()
    meter = HostMeter([7], root=machine(), clock=clock)
    meter.read()
    clock.now += 5.0
    machine(cpu=(300, 100), read_bytes=(4096 + 10_000, 5_000))
    sample = meter.read()
    assert sample.cpu == pytest.approx((2 * 200 + 2 * 50) / 100 / 5.0 / 2)
    assert sample.read_bytes_per_s == 3_000.0


def test_a_process_that_has_ended_does_not_make_rates_negative(machine):
    clock = Clock()
    meter = HostMeter([7], root=machine(read_bytes=(100, 9_000)), clock=clock)
    meter.read()
    clock.now += 5.0
    root = machine(read_bytes=(100, 9_000))
    (root / "proc/7/task/7/children").write_text("")
    assert meter.read().read_bytes_per_s == 0.0


def test_a_run_that_holds_much_is_measured_less_often(machine, monkeypatch):
    clock, readings = Clock(), []

    def slow(pid, root):
        readings.append(pid)
        clock.now += 0.25
        return 1

    monkeypatch.setattr(module, "process_bytes", slow)
    meter = HostMeter([7], root=machine(), clock=clock)
    for _ in range(11):  # 50 s
        assert meter.read().tree_bytes == 2
        clock.now += 5.0
    assert readings == [7, 8] * 3  # half a second's work every 25 s


def test_without_proc_what_it_tells_is_unknown(lay, no_ulimits):
    meter = HostMeter([7], root=lay({}))
    meter.read()
    sample = meter.read()
    assert (sample.tree_bytes, sample.cpu, sample.read_bytes_per_s) == (None, None, None)
    assert sample.machine_bytes > 0


def test_this_machine_can_be_read(me):
    sample = HostMeter([me]).read()
    assert 10 * MiB < sample.tree_bytes < sample.limit_bytes
    assert 0 < sample.machine_bytes < sample.limit_bytes
