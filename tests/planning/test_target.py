"""The device and its limit: what was asked, what is free, and who holds the rest."""

from types import SimpleNamespace

import pytest
import torch

from brimful.errors import DeviceBusy
from brimful.memory.ledger import simulated_memory
from brimful.planning import target
from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import find_target
from brimful.units import GiB, MiB


@pytest.fixture
def card(monkeypatch):
    """A card with 1 GiB free of 20, the rest held by another process."""
    monkeypatch.setattr(target, "_find_device", lambda asked: torch.device("cuda", 0))
    monkeypatch.setattr(target, "_card_free", lambda device: (1 * GiB, "what is free of 20 GiB"))
    monkeypatch.setattr(target, "gpu_holders", lambda index: "python (pid 4711) holds 19 GiB")
    module = SimpleNamespace(get_device_name=lambda device: "Test Card")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return monkeypatch


def test_the_cpus_limit_is_what_the_host_has_available():
    assert find_target(PlanOptions(device="cpu")).limit_bytes > 64 * MiB


def test_a_simulated_memory_block_is_the_limit_inside_it():
    with simulated_memory("123MiB"):
        assert find_target(PlanOptions(device="cpu")).limit_bytes == 123 * MiB


def test_the_host_limit_serves_on_the_cpu():
    assert find_target(PlanOptions(device="cpu", host_limit="2GiB")).limit_bytes == 2 * GiB


def test_the_budget_is_fill_of_the_limit():
    assert find_target(PlanOptions(device="cpu", memory_limit="1GiB", fill=0.5)).budget_bytes == GiB // 2


def test_a_limit_that_is_not_free_is_refused_and_names_who_holds_the_card(card):
    with pytest.raises(
        DeviceBusy, match=r"--memory-limit 10 GiB: only 1 GiB are free on Test Card.*python \(pid 4711\) holds 19 GiB"
    ):
        find_target(PlanOptions(device="cuda", memory_limit="10GiB"))


def test_a_cap_that_lost_a_byte_to_rounding_is_not_refused(card):
    card.setattr(target, "_card_free", lambda device: (10 * GiB - 1, "the cap set on this process"))
    assert find_target(PlanOptions(device="cuda", memory_limit="10GiB")).limit_bytes == 10 * GiB


def test_a_full_card_is_refused_and_names_who_holds_it(card):
    card.setattr(target, "_card_free", lambda device: (5 * MiB, ""))
    with pytest.raises(DeviceBusy, match=r"Test Card \(cuda:0\) is full: 5 MiB are free: python \(pid 4711\)"):
        find_target(PlanOptions(device="cuda"))


def test_a_device_that_is_not_there_is_refused():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(DeviceBusy, match="--device cuda: torch .* sees no accelerator"):
        find_target(PlanOptions(device="cuda"))
