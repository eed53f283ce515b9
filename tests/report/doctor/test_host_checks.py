"""RAM, swap, cores, shared memory and limits of machines laid out in a folder."""

import pytest

from brimful.machine.host import Space
from brimful.report.doctor.host_checks import (
    core_checks,
    largest_processes,
    limit_checks,
    ram_checks,
    shm_checks,
    swap_checks,
)
from brimful.units import GiB, MiB
from tests.report.doctor.fake_machine import host, only


@pytest.fixture
def lay(tmp_path):
    def write(files):
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return write


def status_file(name, anonymous, shared=0):
    return f"Name:\t{name}\nRssAnon:\t{anonymous // 1024} kB\nRssShmem:\t{shared // 1024} kB\n"


PROCESSES = {
    "proc/4000001/status": status_file("jupyter", 9 * GiB),
    "proc/4000002/status": status_file("python", 2 * GiB, 2 * GiB),
    "proc/4000003/status": status_file("bash", MiB),
}


def test_enough_ram_is_ok_and_names_what_limits_it(lay):
    check = only(ram_checks(host(ram_limited_by="cgroup v2 memory.max of /job"), lay({})), "RAM")
    assert check.status == "ok" and "cgroup v2 memory.max of /job" in str(check.text)


def test_little_ram_is_a_warning_that_names_the_largest_process(lay):
    check = only(ram_checks(host(ram_available_bytes=3 * GiB), lay(PROCESSES)), "RAM")
    assert check.status == "warning" and "jupyter (pid 4000001) holds 9 GiB" in str(check.fix)


def test_no_ram_fails(lay):
    check = only(ram_checks(host(ram_available_bytes=100 * MiB), lay({})), "RAM")
    assert check.status == "failed" and "--host-limit" in str(check.fix)


def test_who_holds_ram_is_listed_largest_first(lay):
    assert largest_processes(lay(PROCESSES)) == [("jupyter", 4000001, 9 * GiB), ("python", 4000002, 4 * GiB)]
    assert "jupyter" in str(only(ram_checks(host(), lay({})), "RAM held").text)


def swap(lay, *vmstats, **values):
    root = lay({})
    texts = iter(vmstats or ("pswpin 5\npswpout 5\n",) * 2)
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/vmstat").write_text(next(texts))
    return only(swap_checks(host(**values), root, sleep=lambda _: (root / "proc/vmstat").write_text(next(texts))))


def test_unused_swap_is_ok(lay):
    assert swap(lay).status == "ok"


def test_no_swap_is_ok(lay):
    assert swap(lay, swap_total_bytes=0, swap_free_bytes=0).status == "ok"


def test_much_swap_in_use_is_a_warning(lay):
    check = swap(lay, swap_free_bytes=GiB)
    assert check.status == "warning" and "7 GiB of 8 GiB in use" in str(check.text)


def test_swapping_now_is_a_warning_even_if_little_is_in_use(lay):
    check = swap(lay, "pswpin 0\npswpout 0\n", "pswpin 9000\npswpout 9000\n")
    assert check.status == "warning" and "swapping now" in str(check.text)


QUOTA = {"cores": 2, "cores_total": 64, "cores_limited_by": "cgroup v2 cpu.max: 2.5 cores"}


def test_all_cores_are_ok():
    assert only(core_checks(host(), {})).status == "ok"


def test_a_quota_below_the_cores_is_a_warning_with_the_number_of_threads():
    check = only(core_checks(host(**QUOTA), {}))
    assert check.status == "warning" and str(check.fix) == "`export OMP_NUM_THREADS=2`"


def test_a_quota_that_the_threads_follow_is_ok():
    assert only(core_checks(host(**QUOTA), {"OMP_NUM_THREADS": "2"})).status == "ok"


def test_one_core_of_many_is_a_warning():
    check = only(core_checks(host(cores=1, cores_limited_by="CPU affinity (taskset, cpuset or the batch system)"), {}))
    assert check.status == "warning"


def shm(free, total, *, in_container=False):
    return only(
        shm_checks(Space(path="/dev/shm", total_bytes=total, free_bytes=free), in_container=in_container, linux=True)
    )


def test_a_large_shm_is_ok():
    assert shm(8 * GiB, 8 * GiB).status == "ok"


def test_dockers_shm_is_a_warning_with_the_option_of_docker():
    check = shm(64 * MiB, 64 * MiB, in_container=True)
    assert check.status == "warning" and "--shm-size" in str(check.fix)


def test_a_small_shm_outside_of_containers_is_remounted():
    assert "remount" in str(shm(64 * MiB, 64 * MiB).fix)


def test_a_full_shm_fails_and_asks_for_files_to_be_removed():
    check = shm(MiB, 8 * GiB)
    assert check.status == "failed" and "ls -l /dev/shm" in str(check.fix)


def test_a_missing_shm_fails():
    assert only(shm_checks(None, in_container=False, linux=True)).status == "failed"


@pytest.mark.parametrize(("limit", "status"), [(None, "ok"), (1024, "ok"), (512, "warning"), (128, "failed")])
def test_open_files(limit, status, lay):
    check = only(limit_checks(host(open_files_limit=limit), lay({})), "open files")
    assert check.status == status


PIDS = {
    "proc/self/cgroup": "0::/job\n",
    "proc/self/mountinfo": "32 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/job/pids.current": "900",
}


def test_a_container_with_room_for_threads_is_ok(lay):
    check = only(limit_checks(host(), lay({**PIDS, "sys/fs/cgroup/job/pids.max": "20000"})), "threads")
    assert check.status == "ok"


def test_a_container_with_few_threads_left_is_a_warning(lay):
    check = only(limit_checks(host(), lay({**PIDS, "sys/fs/cgroup/job/pids.max": "1000"})), "threads")
    assert check.status == "warning" and "100 more" in str(check.text)


def test_little_locked_memory_is_ok_without_infiniband(lay):
    assert only(limit_checks(host(locked_memory_limit_bytes=8 * MiB), lay({})), "locked memory").status == "ok"


def test_little_locked_memory_is_a_warning_beside_infiniband(lay):
    root = lay({"sys/class/infiniband/mlx5_0/x": ""})
    check = only(limit_checks(host(locked_memory_limit_bytes=8 * MiB), root), "locked memory")
    assert check.status == "warning" and "ulimit -l unlimited" in str(check.fix)
