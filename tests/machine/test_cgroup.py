"""Limits from control groups: each test is a machine laid out below a folder."""

from brimful.machine.cgroup import cpu_quotas, levels, memory_bounds, swap_bounds
from brimful.units import GiB

V2 = {
    "proc/self/mountinfo": "32 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
}
V1 = {
    "proc/self/mountinfo": (
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    )
}
V1_UNLIMITED = "9223372036854771712\n"


def group(path: str, files: dict[str, object]) -> dict[str, str]:
    """The files of one group below /sys/fs/cgroup."""
    return {f"sys/fs/cgroup/{path}/{name}": f"{value}\n" for name, value in files.items()}


def test_a_v2_limit_of_the_own_group_is_found_and_named(lay):
    root = lay(V2 | {"proc/self/cgroup": "0::/job\n"} | group("job", {"memory.max": 4 * GiB, "memory.current": GiB}))
    (bound,) = memory_bounds(root)
    assert (bound.limit_bytes, bound.left_bytes, bound.name) == (4 * GiB, 3 * GiB, "cgroup v2 memory.max of /job")


def test_a_limit_on_a_parent_group_counts_too(lay):
    root = lay(
        V2
        | {"proc/self/cgroup": "0::/slice/job\n"}
        | group("slice/job", {"memory.max": "max", "memory.current": 1})
        | group("slice", {"memory.max": 2 * GiB, "memory.current": GiB})
    )
    assert [bound.name for bound in memory_bounds(root)] == ["cgroup v2 memory.max of /slice"]


def test_levels_go_from_the_own_group_to_the_top(lay):
    root = lay(V2 | {"proc/self/cgroup": "0::/a/b\n"} | group("a/b", {"memory.max": "max"}))
    assert [level.group for level in levels("memory", root)] == ["/a/b", "/a", "/"]


def test_in_a_cgroup_namespace_the_limit_is_at_the_mounts_top(lay):
    root = lay(V2 | {"proc/self/cgroup": "0::/\n"} | group(".", {"memory.max": GiB, "memory.current": 0}))
    assert [(bound.limit_bytes, bound.name) for bound in memory_bounds(root)] == [(GiB, "cgroup v2 memory.max")]


def test_memory_high_is_a_limit(lay):
    files = group("job", {"memory.max": 4 * GiB, "memory.high": 3 * GiB, "memory.current": 0})
    root = lay(V2 | {"proc/self/cgroup": "0::/job\n"} | files)
    assert min(bound.limit_bytes for bound in memory_bounds(root)) == 3 * GiB


def test_max_is_no_limit(lay):
    root = lay(V2 | {"proc/self/cgroup": "0::/job\n"} | group("job", {"memory.max": "max", "memory.high": "max"}))
    assert memory_bounds(root) == []


def test_inactive_page_cache_does_not_count_as_used(lay):
    files = group(
        "job", {"memory.max": 4 * GiB, "memory.current": 3 * GiB, "memory.stat": f"anon {GiB}\ninactive_file {2 * GiB}"}
    )
    root = lay(V2 | {"proc/self/cgroup": "0::/job\n"} | files)
    assert memory_bounds(root)[0].left_bytes == 3 * GiB


def test_more_used_than_allowed_leaves_nothing(lay):
    root = lay(V2 | {"proc/self/cgroup": "0::/job\n"} | group("job", {"memory.max": GiB, "memory.current": 2 * GiB}))
    assert memory_bounds(root)[0].left_bytes == 0


def test_a_v1_limit_is_found_and_named(lay):
    files = group("memory/job", {"memory.limit_in_bytes": 2 * GiB, "memory.usage_in_bytes": GiB})
    root = lay(V1 | {"proc/self/cgroup": "4:memory:/job\n"} | files)
    (bound,) = memory_bounds(root)
    assert (bound.left_bytes, bound.name) == (GiB, "cgroup v1 memory.limit_in_bytes of /job")


def test_v1_counts_the_page_cache_of_the_groups_below(lay):
    stat = f"inactive_file 0\ntotal_inactive_file {GiB}"
    files = group(
        "memory/job", {"memory.limit_in_bytes": 4 * GiB, "memory.usage_in_bytes": 2 * GiB, "memory.stat": stat}
    )
    root = lay(V1 | {"proc/self/cgroup": "4:memory:/job\n"} | files)
    assert memory_bounds(root)[0].used_bytes == GiB


def test_v1s_huge_number_is_no_limit(lay):
    root = lay(V1 | {"proc/self/cgroup": "4:memory:/\n"} | group("memory", {"memory.limit_in_bytes": V1_UNLIMITED}))
    assert memory_bounds(root) == []


def test_v1_in_docker_the_own_group_is_the_mounts_top(lay):
    mount = "35 31 0:32 /docker/4f2 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    files = group("memory", {"memory.limit_in_bytes": GiB, "memory.usage_in_bytes": 0})
    root = lay({"proc/self/mountinfo": mount, "proc/self/cgroup": "4:memory:/docker/4f2\n"} | files)
    assert [bound.limit_bytes for bound in memory_bounds(root)] == [GiB]


def test_hybrid_takes_memory_from_v1_where_it_is_mounted_there(lay):
    mounts = V1["proc/self/mountinfo"] + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    files = group("memory/job", {"memory.limit_in_bytes": GiB}) | group("unified/job", {"memory.max": 7})
    root = lay({"proc/self/mountinfo": mounts, "proc/self/cgroup": "4:memory:/job\n0::/job\n"} | files)
    assert [bound.limit_bytes for bound in memory_bounds(root)] == [GiB]


def test_hybrid_takes_memory_from_v2_where_v1_does_not_have_it(lay):
    mounts = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    files = group("unified/job", {"memory.max": GiB})
    root = lay({"proc/self/mountinfo": mounts, "proc/self/cgroup": "1:cpu:/\n0::/job\n"} | files)
    assert [bound.name for bound in memory_bounds(root)] == ["cgroup v2 memory.max of /job"]


def test_without_mountinfo_the_usual_place_is_read(lay):
    files = group("job", {"memory.max": GiB})
    root = lay({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/cgroup.controllers": "memory\n"} | files)
    assert [bound.limit_bytes for bound in memory_bounds(root)] == [GiB]


def test_a_group_outside_the_namespace_reads_the_mounts_top(lay):
    files = group(".", {"memory.max": GiB}) | group("../other", {"memory.max": 7})
    root = lay(V2 | {"proc/self/cgroup": "0::/../other\n"} | files)
    assert [bound.limit_bytes for bound in memory_bounds(root)] == [GiB]


def test_no_cgroups_at_all_is_no_limit(tmp_path):
    assert memory_bounds(tmp_path) == swap_bounds(tmp_path) == cpu_quotas(tmp_path) == []


def test_swap_forbidden_by_v2(lay):
    root = lay(V2 | {"proc/self/cgroup": "0::/job\n"} | group("job", {"memory.max": GiB, "memory.swap.max": 0}))
    assert [bound.limit_bytes for bound in swap_bounds(root)] == [0]


def test_v1_swap_is_the_difference_of_its_two_limits(lay):
    files = group("memory/job", {"memory.limit_in_bytes": 2 * GiB, "memory.memsw.limit_in_bytes": 3 * GiB})
    root = lay(V1 | {"proc/self/cgroup": "4:memory:/job\n"} | files)
    assert [bound.limit_bytes for bound in swap_bounds(root)] == [GiB]


def test_v1_without_limits_does_not_forbid_swap(lay):
    files = group("memory", {"memory.limit_in_bytes": V1_UNLIMITED, "memory.memsw.limit_in_bytes": V1_UNLIMITED})
    root = lay(V1 | {"proc/self/cgroup": "4:memory:/\n"} | files)
    assert swap_bounds(root) == []


def test_a_v2_quota_is_in_cores(lay):
    root = lay(V2 | {"proc/self/cgroup": "0::/job\n"} | group("job", {"cpu.max": "250000 100000"}))
    assert cpu_quotas(root) == [(2.5, "cgroup v2 cpu.max of /job")]


def test_quota_max_is_no_quota(lay):
    root = lay(V2 | {"proc/self/cgroup": "0::/job\n"} | group("job", {"cpu.max": "max 100000"}))
    assert cpu_quotas(root) == []


def test_a_v1_quota_is_found_where_cpu_and_cpuacct_are_mounted_together(lay):
    files = group("cpu,cpuacct/job", {"cpu.cfs_quota_us": 150000, "cpu.cfs_period_us": 100000})
    root = lay(V1 | {"proc/self/cgroup": "3:cpu,cpuacct:/job\n"} | files)
    assert cpu_quotas(root) == [(1.5, "cgroup v1 cpu.cfs_quota_us of /job")]


def test_a_v1_quota_of_minus_one_is_none(lay):
    files = group("cpu,cpuacct", {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000})
    assert cpu_quotas(lay(V1 | {"proc/self/cgroup": "3:cpu,cpuacct:/\n"} | files)) == []
