"""The device and its limit: what was requested, what is free, who holds the rest, and that the limit is enforced."""

from types import SimpleNamespace

import pytest
import torch

from brimful.errors import BadOption, DeviceBusy
from brimful.machine.host import Host
from brimful.memory.ledger import simulated_memory
from brimful.planning import target
from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import find_target, idle_gpus
from brimful.units import GiB, MiB


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with 1 GiB free of 20, the rest held by another process."""
    monkeypatch.setattr(target, "_find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(target, "_gpu_free", lambda device: (1 * GiB, "free, of 20 GiB"))
    monkeypatch.setattr(target, "gpu_holders", lambda index: "python (pid 4711) holds 19 GiB")
    module = SimpleNamespace(get_device_name=lambda device: "Test GPU")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return monkeypatch


def test_on_the_cpu_the_limit_is_what_the_host_has_available():
    assert find_target(PlanOptions(device="cpu")).limit_bytes > 64 * MiB


def test_a_simulated_memory_block_is_the_limit_inside_it():
    with simulated_memory("123MiB"):
        assert find_target(PlanOptions(device="cpu")).limit_bytes == 123 * MiB


def test_on_the_cpu_the_host_limit_is_the_limit():
    assert find_target(PlanOptions(device="cpu", host_limit="2GiB")).limit_bytes == 2 * GiB


def test_a_host_limit_above_what_there_is_means_all_of_it():
    found = find_target(PlanOptions(device="cpu", host_limit="1000TiB"))
    assert found.host_limit_bytes == found.limit_bytes == Host.detect().ram_limit_bytes


@pytest.mark.parametrize(
    ("device", "processes", "warnings"),
    [
        ("auto", 1, ["2 of 3 GPUs stand idle, because there is only work for 1 process. Try: processes=3"]),
        ("cuda", 2, ["1 of 3 GPUs stands idle, because there is only work for 2 processes. Try: processes=3"]),
        ("auto", 3, []),
        ("cuda:0", 1, []),
    ],
)
def test_gpus_that_stand_idle_are_a_warning_unless_one_was_chosen(gpu, device, processes, warnings):
    gpu.setattr(torch, "accelerator", SimpleNamespace(device_count=lambda: 3))
    options = PlanOptions(device=device)
    assert idle_gpus(options, find_target(options), processes) == warnings


def test_on_the_cpu_nothing_stands_idle():
    options = PlanOptions(device="cpu")
    assert not idle_gpus(options, find_target(options), 1)


def test_the_budget_is_fill_of_the_limit():
    assert find_target(PlanOptions(device="cpu", memory_limit="1GiB", fill=0.5)).budget_bytes == GiB // 2


def test_a_requested_limit_is_enforced_on_the_cpu():
    found = find_target(PlanOptions(device="cpu", memory_limit="1MiB"))
    with pytest.raises(torch.OutOfMemoryError), found.enforce():
        torch.zeros(MiB)
    with found.enforce(adopt=[torch.zeros(MiB // 8)]) as memory:
        assert memory.live_bytes == MiB // 2


def test_what_is_only_free_is_not_enforced():
    with find_target(PlanOptions(device="cpu")).enforce() as memory:
        assert memory is None


def test_a_limit_that_is_not_free_is_refused_and_names_who_holds_the_gpu(gpu):
    message = (
        r"memory_limit= is 10 GiB, but Test GPU \(cuda:0\) has only 1 GiB free \(python \(pid 4711\) holds 19 GiB\)"
    )
    with pytest.raises(DeviceBusy, match=message):
        find_target(PlanOptions(device="cuda", memory_limit="10GiB"))


def test_a_cap_that_lost_a_byte_to_rounding_is_not_refused(gpu):
    gpu.setattr(target, "_gpu_free", lambda device: (10 * GiB - 1, "the allocator's cap on this process"))
    assert find_target(PlanOptions(device="cuda", memory_limit="10GiB")).limit_bytes == 10 * GiB


def test_a_full_gpu_is_refused_and_names_who_holds_it(gpu):
    gpu.setattr(target, "_gpu_free", lambda device: (5 * MiB, ""))
    with pytest.raises(DeviceBusy, match=r"Test GPU \(cuda:0\) has only 5 MiB free \(python \(pid 4711\)"):
        find_target(PlanOptions(device="cuda"))


class TestRanks:
    """Two ranks on a machine with two GPUs, as seen by the second."""

    @pytest.fixture
    def calls(self, monkeypatch):
        """What torch is asked, in order."""
        calls = []
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_RANK", "1")
        module = SimpleNamespace(get_device_name=lambda device: "Test GPU")
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        accelerator = SimpleNamespace(
            current_accelerator=lambda **_: torch.device("cuda"),
            device_count=lambda: 2,
            current_device_index=lambda: 0,
            set_device_index=lambda index: calls.append(("set", index)),
            get_memory_info=lambda device: (calls.append(("free", device.index)), (3 * GiB, 4 * GiB))[1],
            memory_reserved=lambda device: (calls.append(("reserved", device.index)), 0)[1],
        )
        monkeypatch.setattr(torch, "accelerator", accelerator)
        monkeypatch.setattr(target, "process_limit_bytes", lambda device, total: total)
        monkeypatch.setattr(target, "gpu_holders", lambda index: calls.append(("holders", index)) or "")
        return calls

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_a_rank_chooses_its_gpu_before_it_asks_for_memory_and_asks_no_other(self, calls, device):
        assert find_target(PlanOptions(device=device)).device == torch.device("cuda", 1)
        assert calls[0] == ("set", 1) and {index for _, index in calls} == {1}

    def test_a_rank_without_a_gpu_is_told_before_anything_is_asked(self, calls, monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(DeviceBusy, match="processes=3 needs as many GPUs, and torch sees 2. Try: processes=2"):
            find_target(PlanOptions())
        assert not calls


def test_a_missing_device_is_refused():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(DeviceBusy, match="device='cuda' is not available, since torch .* sees no accelerator"):
        find_target(PlanOptions(device="cuda"))


def test_more_than_the_host_has_is_refused():
    with pytest.raises(BadOption, match="memory_limit= is 9000 TiB, but this host has"):
        find_target(PlanOptions(device="cpu", memory_limit="9000TiB"))


@pytest.mark.parametrize(
    ("capability", "triton", "reason"),
    [
        ((9, 0), True, ""),
        ((8, 0), True, ""),
        ((7, 5), True, "Test GPU has compute capability 7.5, and the kernels for packed rows need 8.0"),
        ((9, 0), False, "the kernels for packed rows need Triton, which is not installed"),
    ],
)
def test_which_cards_have_kernels_for_packed_rows(gpu, capability, triton, reason):
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu.setattr(target, "find_spec", lambda name: name if triton else None)
    found = find_target(PlanOptions())
    assert (found.why_no_kernels, found.has_kernels) == (reason, not reason)
