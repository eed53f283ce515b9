"""What this process could hold in all, less what it took for something else."""

import pytest
import torch

from brimful.memory import meter
from brimful.memory.ledger import Ledger
from brimful.memory.meter import (
    AvailableMemory,
    allocated_bytes,
    allocator_retries,
    available_bytes,
    process_limit_bytes,
)

CPU, CUDA, MPS, XPU = (torch.device(kind) for kind in ("cpu", "cuda", "mps", "xpu"))


# On the CPU


def test_without_a_limit_nothing_is_known_about_the_cpu():
    assert available_bytes(CPU) is None
    assert allocated_bytes(CPU) is None
    assert AvailableMemory(CPU).now() is None
    assert AvailableMemory(CPU).taken() == 0


def test_a_ledger_without_a_limit_tells_nothing():
    with Ledger():
        assert available_bytes(CPU) is None
        assert allocated_bytes(CPU) is None


def test_the_room_of_the_cpu_is_its_virtual_limit():
    with Ledger(10_000) as ledger:
        assert available_bytes(CPU) == 10_000
        ledger.limit_bytes = 7_000
        assert available_bytes(CPU) == 7_000


def test_what_is_held_does_not_lower_the_room():
    with Ledger(10_000):
        kept = torch.zeros(100)
        assert (available_bytes(CPU), allocated_bytes(CPU)) == (10_000, 400)
        del kept


def test_the_smallest_limit_counts_and_what_is_held_against_it():
    with Ledger(10_000):
        earlier = torch.zeros(25)
        with Ledger(5_000):
            later = torch.zeros(100)
            with Ledger(20_000):
                assert (available_bytes(CPU), allocated_bytes(CPU)) == (5_000, 400)
        assert (available_bytes(CPU), allocated_bytes(CPU)) == (10_000, 500)
        del earlier, later


def test_before_the_first_step_all_of_the_room_is_trainings():
    with Ledger(10_000):
        kept = torch.zeros(100)
        assert AvailableMemory(CPU).now() == 10_000
        del kept


def test_what_is_alive_when_it_settles_is_trainings():
    with Ledger(10_000):
        weights = torch.zeros(100)
        here = AvailableMemory(CPU)
        here.settle()
        assert (here.now(), here.taken()) == (10_000, 0)
        del weights


def test_what_is_taken_later_is_missing_until_it_is_given_back():
    with Ledger(10_000):
        weights = torch.zeros(100)
        here = AvailableMemory(CPU)
        here.settle()
        other = torch.zeros(500)
        assert (here.now(), here.taken()) == (8_000, 2_000)
        del other
        assert (here.now(), here.taken()) == (10_000, 0)
        del weights


def test_settling_while_something_else_is_held_does_not_make_it_trainings():
    with Ledger(10_000):
        weights = torch.zeros(100)
        here = AvailableMemory(CPU)
        here.settle()
        other = torch.zeros(500)
        here.settle()
        assert here.taken() == 2_000
        del weights, other


def test_the_least_that_was_ever_alive_between_two_steps_is_trainings():
    with Ledger(10_000):
        weights = torch.zeros(100)
        other = torch.zeros(500)
        here = AvailableMemory(CPU)
        here.settle()
        assert here.taken() == 0
        del other
        here.settle()
        other = torch.zeros(500)
        assert here.taken() == 2_000
        del weights, other


def test_less_than_what_is_trainings_is_not_negative():
    with Ledger(10_000):
        weights = torch.zeros(100)
        here = AvailableMemory(CPU)
        here.settle()
        del weights
        assert (here.now(), here.taken()) == (10_000, 0)


def test_what_a_step_holds_at_the_moment_is_not_taken_by_something_else():
    with Ledger(10_000):
        weights = torch.zeros(100)
        here = AvailableMemory(CPU)
        here.settle()
        gradients, other = torch.zeros(100), torch.zeros(500)
        assert (here.now(besides=400), here.taken(besides=400)) == (8_000, 2_000)
        del weights, gradients, other


def test_holding_less_than_a_step_is_said_to_is_not_negative():
    with Ledger(10_000):
        here = AvailableMemory(CPU)
        here.settle()
        assert (here.now(besides=400), here.taken(besides=400)) == (10_000, 0)


def test_settling_without_a_limit_is_forgotten():
    here = AvailableMemory(CPU)
    here.settle()
    with Ledger(10_000):
        kept = torch.zeros(100)
        assert here.now() == 10_000
        del kept


# On a card, with what torch would say put into its mouth


@pytest.fixture
def card(monkeypatch):
    """A card of 80,000 bytes: 30,000 free, 20,000 reserved by this process, of which 15,000 are allocated."""
    figures = {"free": 30_000, "reserved": 20_000, "allocated": 15_000, "fraction": 1.0, "total": 80_000}
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (figures["free"], figures["total"]))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: figures["reserved"])
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: figures["allocated"])
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: figures["fraction"])
    return figures


@pytest.mark.parametrize("device", [CUDA, XPU])
def test_the_room_of_a_card_is_what_is_free_and_what_torch_holds_of_it(card, device):
    assert available_bytes(device) == 50_000
    assert allocated_bytes(device) == 15_000


def test_the_room_of_a_card_ends_at_the_cap_of_the_process(card):
    card["fraction"] = 0.5
    assert available_bytes(CUDA) == 40_000
    card["fraction"] = 0.75
    assert available_bytes(CUDA) == 50_000


def test_only_cuda_has_a_cap(card):
    card["fraction"] = 0.5
    assert (process_limit_bytes(CUDA, 80_000), process_limit_bytes(XPU, 80_000)) == (40_000, 80_000)


def test_what_another_process_takes_is_missing_from_the_room(card):
    card["free"] = 5_000
    assert available_bytes(CUDA) == 25_000


def test_what_this_process_took_for_something_else_is_missing_from_the_room(card):
    here = AvailableMemory(CUDA)
    here.settle()
    card.update(free=24_000, reserved=26_000, allocated=21_000)
    assert (here.now(), here.taken()) == (44_000, 6_000)


def test_a_cache_that_grew_costs_no_room(card):
    here = AvailableMemory(CUDA)
    here.settle()
    card.update(free=10_000, reserved=40_000)
    assert here.now() == 50_000


def test_nothing_is_known_about_mps():
    assert (available_bytes(MPS), allocated_bytes(MPS), AvailableMemory(MPS).now()) == (None, None, None)


def test_the_allocators_retries_are_those_that_cuda_counts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {"num_alloc_retries": 3})
    assert allocator_retries(CUDA) == 3


def test_a_card_that_was_never_used_has_no_retries(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
    assert allocator_retries(CUDA) == 0


@pytest.mark.parametrize("device", [CPU, MPS, XPU])
def test_other_devices_count_no_retries(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {"num_alloc_retries": 3})
    assert allocator_retries(device) == 0


@pytest.mark.gpu
def test_on_a_real_card_an_allocation_is_taken_and_given_back():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    here, retries = AvailableMemory(device), allocator_retries(device)
    here.settle()
    before = here.now()
    taken = torch.zeros(2**28, dtype=torch.uint8, device=device)
    assert here.taken() == 2**28
    assert before - here.now() == pytest.approx(2**28, abs=2**24)
    del taken
    assert here.taken() == 0
    assert allocator_retries(device) == retries
    assert meter.process_limit_bytes(device, 100) == 100
