"""RAM, swap, cores, space and memory of processes as this process may use them."""

import os
import resource
import subprocess
import sys
from types import ModuleType

import psutil
import pytest

from brimful.machine.host import (
    Host,
    Space,
    container_sign,
    may_spawn,
    process_bytes,
    process_started,
    tree,
    tree_bytes,
)
from brimful.units import GiB, MiB

MEMINFO = {
    "proc/meminfo": (
        f"MemTotal: {64 * MiB} kB\nMemFree: {10 * MiB} kB\nMemAvailable: {40 * MiB} kB\n"
        f"SwapTotal: {8 * MiB} kB\nSwapFree: {6 * MiB} kB\nHugePages_Total: 0\n"
    )
}
MOUNT = {"proc/self/mountinfo": "32 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"}
JOB = MEMINFO | MOUNT | {"proc/self/cgroup": "0::/job\n"}


@pytest.fixture(autouse=True)
def plain_process(monkeypatch, no_ulimits):
    """Eight cores, all ours, and no `ulimit`."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def limit(monkeypatch, name: str, value: int) -> None:
    number = getattr(resource, name)
    none = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (value, none) if asked == number else (none, none))


def test_without_limits_physical_memory_limits(lay):
    host = Host.detect(lay(MEMINFO))
    assert (host.ram_total_bytes, host.ram_limit_bytes) == (64 * GiB, 64 * GiB)
    assert host.ram_limited_by == "physical memory"


def test_without_limits_available_is_what_the_kernel_says(lay):
    assert Host.detect(lay(MEMINFO)).ram_available_bytes == 40 * GiB


def test_a_cgroup_below_physical_memory_limits_and_is_named(lay):
    root = lay(JOB | {"sys/fs/cgroup/job/memory.max": str(16 * GiB), "sys/fs/cgroup/job/memory.current": str(GiB)})
    host = Host.detect(root)
    assert (host.ram_limit_bytes, host.ram_available_bytes) == (16 * GiB, 15 * GiB)
    assert host.ram_limited_by == "cgroup v2 memory.max of /job"


def test_a_cgroup_above_physical_memory_does_not_limit(lay):
    root = lay(JOB | {"sys/fs/cgroup/job/memory.max": str(128 * GiB), "sys/fs/cgroup/job/memory.current": "0"})
    assert Host.detect(root).ram_limited_by == "physical memory"


def test_a_full_machine_leaves_less_than_an_empty_cgroup_allows(lay):
    root = lay(JOB | {"sys/fs/cgroup/job/memory.max": str(48 * GiB), "sys/fs/cgroup/job/memory.current": "0"})
    assert Host.detect(root).ram_available_bytes == 40 * GiB


def test_ulimit_v_limits(lay, monkeypatch):
    limit(monkeypatch, "RLIMIT_AS", 12 * GiB)
    host = Host.detect(lay(MEMINFO))
    assert (host.ram_limit_bytes, host.ram_limited_by) == (12 * GiB, "ulimit -v")


def test_address_space_in_use_counts_against_ulimit_v(lay, monkeypatch):
    used = psutil.Process().memory_info().vms
    limit(monkeypatch, "RLIMIT_AS", used + 4 * GiB)
    assert Host.detect(lay(MEMINFO)).ram_available_bytes == pytest.approx(4 * GiB, abs=64 * MiB)


def test_ulimit_d_limits(lay, monkeypatch):
    limit(monkeypatch, "RLIMIT_DATA", 3 * GiB)
    assert Host.detect(lay(MEMINFO)).ram_limited_by == "ulimit -d"


def test_swap_is_the_machines_without_a_group(lay):
    host = Host.detect(lay(MEMINFO))
    assert (host.swap_total_bytes, host.swap_free_bytes) == (8 * GiB, 6 * GiB)


def test_swap_forbidden_by_the_group_is_no_swap(lay):
    host = Host.detect(lay(JOB | {"sys/fs/cgroup/job/memory.swap.max": "0"}))
    assert (host.swap_total_bytes, host.swap_free_bytes) == (0, 0)


def test_all_cores_without_a_quota(lay):
    host = Host.detect(lay(MEMINFO))
    assert (host.cores, host.cores_total, host.cores_limited_by) == (8, 8, "all cores of the machine")


def test_affinity_limits_cores(lay, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    host = Host.detect(lay(MEMINFO))
    assert host.cores == 3 and host.cores_limited_by.startswith("CPU affinity")


def test_a_quota_rounds_down_and_says_what_it_was(lay):
    host = Host.detect(lay(JOB | {"sys/fs/cgroup/job/cpu.max": "250000 100000"}))
    assert (host.cores, host.cores_limited_by) == (2, "cgroup v2 cpu.max of /job: 2.5 cores")


def test_less_than_one_core_is_one_core(lay):
    assert Host.detect(lay(JOB | {"sys/fs/cgroup/job/cpu.max": "50000 100000"})).cores == 1


def test_a_system_without_affinity_has_all_its_cores(lay, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert Host.detect(lay(MEMINFO)).cores == 8


def test_without_proc_psutil_answers(tmp_path):
    assert Host.detect(tmp_path).ram_total_bytes == psutil.virtual_memory().total


def test_an_old_kernel_without_memavailable_counts_what_is_free(lay):
    root = lay({"proc/meminfo": f"MemTotal: {4 * MiB} kB\nMemFree: {1 * MiB} kB\n"})
    assert Host.detect(root).ram_available_bytes == GiB


def test_open_files_and_locked_memory_are_the_shells(lay, monkeypatch):
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_MEMLOCK: 65536}
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (limits.get(asked, resource.RLIM_INFINITY), 0))
    host = Host.detect(lay(MEMINFO))
    assert (host.open_files_limit, host.locked_memory_limit_bytes) == (1024, 65536)


def test_no_limit_on_open_files_is_none(lay):
    assert Host.detect(lay(MEMINFO)).open_files_limit is None


def test_this_very_machine_can_be_read():
    host = Host.detect()
    assert 0 < host.ram_available_bytes <= host.ram_limit_bytes <= host.ram_total_bytes


def test_the_disk_of_a_folder_yet_to_be_made_is_its_parents(tmp_path):
    space = Space.around(tmp_path / "runs" / "first")
    assert space is not None and space.path == str(tmp_path)


def test_a_path_that_does_not_exist_has_no_space(tmp_path):
    assert Space.of(tmp_path / "nowhere") is None


def test_free_space_is_part_of_the_total(tmp_path):
    space = Space.of(tmp_path)
    assert space is not None and 0 <= space.free_bytes < space.total_bytes


@pytest.mark.parametrize("file", [".dockerenv", "run/.containerenv", "run/systemd/container"])
def test_a_runtimes_file_gives_the_container_away(lay, file, no_container_variables):
    assert container_sign(lay({file: ""})) == f"/{file} exists"


def test_a_kubernetes_pod_is_known_by_its_variable(tmp_path, monkeypatch, no_container_variables):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert container_sign(tmp_path) == "$KUBERNETES_SERVICE_HOST is set"


def test_the_name_of_a_cgroup_gives_the_container_away(lay, no_container_variables):
    assert container_sign(lay({"proc/self/cgroup": "4:memory:/docker/4f2\n"})) == "/proc/self/cgroup names docker"


def test_a_plain_machine_is_no_container(lay, no_container_variables):
    assert container_sign(lay({"proc/self/cgroup": "0::/user.slice/session-1.scope\n"})) is None


CHILD = "x = bytearray(b'1' * 64 * 2**20); print('ready', flush=True); input()"


def test_pages_of_a_mapped_file_do_not_count_as_memory(tmp_path):
    import mmap

    file = tmp_path / "file"
    file.write_bytes(os.urandom(MiB) * 64)
    before = process_bytes(os.getpid())
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) > 0
        assert process_bytes(os.getpid()) - before < 8 * MiB


def test_children_count_with_their_parent():
    before = tree_bytes()
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert child.pid in tree(os.getpid())
        assert process_bytes(child.pid) > 64 * MiB
        assert tree_bytes() - before > 60 * MiB
        child.communicate(b"\n")
    assert child.pid not in tree(os.getpid())


def test_a_process_that_is_gone_takes_nothing(tmp_path):
    assert process_bytes(2**22 + 1) == 0


def test_when_a_process_started_is_its_own_whatever_its_name(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as child:
        first = process_started(child.pid)
        child.kill()
    assert first is not None and first >= process_started(os.getpid())
    assert process_started(2**22 + 1) is None
    stat = tmp_path / "proc" / "7" / "stat"
    stat.parent.mkdir(parents=True)
    stat.write_text("7 (a) S 9 (b)) S " + " ".join(str(number) for number in range(4, 40)))
    assert process_started(7, tmp_path) == 22
    assert tree_bytes(1, tmp_path) == 0


def test_without_a_rollup_resident_memory_less_file_pages_counts(tmp_path):
    folder = tmp_path / "proc/7"
    folder.mkdir(parents=True)
    (folder / "status").write_text("VmRSS:\t 900 kB\nRssAnon:\t 300 kB\nRssFile:\t 500 kB\nRssShmem:\t 100 kB\n")
    assert process_bytes(7, tmp_path) == 400 * 1024
    (folder / "smaps_rollup").write_text(
        "0-1 ---p 0 00:00 0 [rollup]\nPss:  900 kB\nPss_Anon:  20 kB\nPss_Shmem:  3 kB\n"
    )
    assert process_bytes(7, tmp_path) == 23 * 1024


@pytest.mark.parametrize(("file", "allowed"), [("/somewhere/bin/brimful", True), ("train.py", False), (None, False)])
def test_a_script_of_the_user_is_not_imported_again_by_spawning(file, allowed, monkeypatch):
    main = ModuleType("__main__")
    main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert may_spawn() is allowed


def test_a_module_that_python_runs_may_spawn(monkeypatch):
    main = ModuleType("__main__")
    main.__spec__ = object()
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert may_spawn()
