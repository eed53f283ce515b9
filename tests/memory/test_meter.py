"""Peaks of each phase (on the CPU counted by a ledger), and what is available on a device."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brimful.memory.context import StepContext
from brimful.memory.ledger import Ledger, active_limit_bytes
from brimful.memory.meter import (
    AvailableMemory,
    Reading,
    allocated_bytes,
    allocator_retries,
    available_bytes,
    has_peak_statistics,
    memory_peaks,
    meter,
    process_limit_bytes,
    trim_heap,
)
from brimful.memory.model import FIRST_PHASES, MICRO_PHASES
from brimful.task import Loss, Task
from brimful.units import MiB

WEIGHT_BYTES = 4 * (16 * 32 + 32 + 32 * 8 + 8)


class Classifier(Task):
    def loss(self, model, batch):
        x, y = batch
        return Loss(sum=F.cross_entropy(model(x), y, reduction="sum"), count=len(y))

    def dummy(self, rows, shape=()):
        return torch.randn(rows, 16), torch.randint(0, 8, (rows,))


def stepped() -> StepContext:
    """A model that has stepped once, so that its optimizer state is there."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    made = StepContext(task=Classifier(), model=model, optimizer=optimizer, device=CPU, autocast=None)
    made.step([made.task.dummy(2, ())], 2)
    return made


def batches(count: int, rows: int = 4):
    return (Classifier().dummy(rows) for _ in range(count))


def tensors(context: StepContext) -> list[torch.Tensor]:
    state = [value for states in context.optimizer.state.values() for value in states.values()]
    return [*context.model.parameters(), *state]


@pytest.mark.parametrize(
    ("micro_batches", "phases"),
    [(1, [*FIRST_PHASES, "optimizer", "idle"]), (3, [*FIRST_PHASES, *MICRO_PHASES, "optimizer", "idle"])],
)
def test_a_reading_has_the_phases_of_the_step(micro_batches, phases):
    metered, ready = meter(CPU), stepped()
    with metered:
        ready.step(batches(micro_batches), 4 * micro_batches, metered.phase)
    assert list(metered.reading().phases) == phases


def test_reserved_bytes_are_unknown_on_the_cpu():
    metered, ready = meter(CPU, reserved=True), stepped()
    with metered:
        ready.step(batches(1), 4, metered.phase)
    assert metered.reading().reserved_bytes is None


def test_phases_and_peak_are_those_of_a_ledger():
    metered, ready = meter(CPU), stepped()
    with metered:
        ready.step(batches(2), 8, metered.phase)
    with Ledger() as ledger:
        ready.step(batches(2), 8, ledger.phase)
    assert metered.reading().phases == ledger.phase_peaks
    assert metered.reading().peak_bytes == ledger.peak_bytes


def test_the_same_step_reads_the_same_twice():
    ready, readings = stepped(), []
    for _ in range(2):
        metered = meter(CPU, adopt=tensors(ready))
        with metered:
            ready.step(batches(2), 8, metered.phase)
        readings.append(metered.reading())
    assert readings[0] == readings[1]


def read_with(rows: int) -> dict[str, int]:
    ready = stepped()
    metered = meter(CPU, adopt=tensors(ready))
    with metered:
        ready.step(batches(2, rows), 2 * rows, metered.phase)
    return metered.reading().phases


def test_more_rows_read_higher_in_every_phase_of_a_micro_batch():
    few, many = read_with(4), read_with(64)
    assert all(few[name] < many[name] for name in (*FIRST_PHASES, *MICRO_PHASES))


def test_nothing_of_a_micro_batch_but_its_rows_is_left_for_the_optimizer():
    few, many = read_with(4), read_with(64)
    assert many["optimizer"] - few["optimizer"] <= (64 - 4) * (16 * 4 + 8)


def test_adopted_tensors_are_part_of_every_phase():
    ready = stepped()
    metered = meter(CPU, adopt=tensors(ready))
    with metered:
        metered.phase("nothing happens")
    assert metered.reading().phases == {
        "nothing happens": 3 * WEIGHT_BYTES + 4 * 4
    }  # weights, two moments, four counters


def test_later_micro_batches_hold_the_gradients():
    ready = stepped()
    metered = meter(CPU, adopt=tensors(ready))
    with metered:
        ready.step(batches(2), 8, metered.phase)
    phases = metered.reading().phases
    assert phases["forward"] - phases["first_forward"] >= WEIGHT_BYTES


def test_the_limit_is_the_ledgers():
    metered = meter(CPU, limit_bytes=1000)
    with metered, pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1000)


def test_what_is_there_already_may_exceed_the_limit_and_leaves_no_meter_running():
    with pytest.raises(torch.OutOfMemoryError), meter(CPU, limit_bytes=100, adopt=[torch.zeros(1000)]):
        pytest.fail("the step must not begin")
    assert active_limit_bytes() is None


def test_the_peak_is_that_of_the_highest_phase():
    assert Reading({"forward": 3, "head": 7, "optimizer": 5}, None).peak_bytes == 7


@pytest.mark.parametrize(("device", "keeps"), [("cuda", True), ("xpu", True), ("cpu", False), ("mps", False)])
def test_which_devices_keep_peaks_by_themselves(device, keeps):
    assert has_peak_statistics(torch.device(device)) is keeps


CPU, CUDA, MPS, XPU = (torch.device(kind) for kind in ("cpu", "cuda", "mps", "xpu"))


# On the CPU


def test_without_a_limit_nothing_is_known_about_the_cpu():
    assert available_bytes(CPU) is None
    assert allocated_bytes(CPU) is None
    assert AvailableMemory(CPU).training_bytes() is None
    assert AvailableMemory(CPU).other_bytes() == 0


def test_a_ledger_without_a_limit_tells_nothing():
    with Ledger():
        assert available_bytes(CPU) is None
        assert allocated_bytes(CPU) is None


def test_the_cpu_has_its_simulated_limit_available():
    with Ledger(10_000) as ledger:
        assert available_bytes(CPU) == 10_000
        ledger.limit_bytes = 7_000
        assert available_bytes(CPU) == 7_000


def test_allocating_does_not_lower_what_is_available():
    with Ledger(10_000):
        kept = torch.zeros(100)
        assert (available_bytes(CPU), allocated_bytes(CPU)) == (10_000, 400)
        del kept


def test_the_smallest_limit_counts_and_what_is_allocated_under_it():
    with Ledger(10_000):
        earlier = torch.zeros(25)
        with Ledger(5_000):
            later = torch.zeros(100)
            with Ledger(20_000):
                assert (available_bytes(CPU), allocated_bytes(CPU)) == (5_000, 400)
        assert (available_bytes(CPU), allocated_bytes(CPU)) == (10_000, 500)
        del earlier, later


def test_before_the_first_step_everything_is_available_to_training():
    with Ledger(10_000):
        kept = torch.zeros(100)
        assert AvailableMemory(CPU).training_bytes() == 10_000
        del kept


def test_what_is_allocated_between_steps_belongs_to_training():
    with Ledger(10_000):
        weights = torch.zeros(100)
        here = AvailableMemory(CPU)
        here.record_idle()
        assert (here.training_bytes(), here.other_bytes()) == (10_000, 0)
        del weights


def test_a_later_allocation_is_missing_until_it_is_freed():
    with Ledger(10_000):
        weights = torch.zeros(100)
        here = AvailableMemory(CPU)
        here.record_idle()
        other = torch.zeros(500)
        assert (here.training_bytes(), here.other_bytes()) == (8_000, 2_000)
        del other
        assert (here.training_bytes(), here.other_bytes()) == (10_000, 0)
        del weights


def test_recording_again_does_not_adopt_other_allocations():
    with Ledger(10_000):
        weights = torch.zeros(100)
        here = AvailableMemory(CPU)
        here.record_idle()
        other = torch.zeros(500)
        here.record_idle()
        assert here.other_bytes() == 2_000
        del weights, other


def test_the_least_ever_allocated_between_two_steps_belongs_to_training():
    with Ledger(10_000):
        weights = torch.zeros(100)
        other = torch.zeros(500)
        here = AvailableMemory(CPU)
        here.record_idle()
        assert here.other_bytes() == 0
        del other
        here.record_idle()
        other = torch.zeros(500)
        assert here.other_bytes() == 2_000
        del weights, other


def test_freeing_what_belongs_to_training_gives_no_negative_bytes():
    with Ledger(10_000):
        weights = torch.zeros(100)
        here = AvailableMemory(CPU)
        here.record_idle()
        del weights
        assert (here.training_bytes(), here.other_bytes()) == (10_000, 0)


def test_what_a_step_holds_is_excluded():
    with Ledger(10_000):
        weights = torch.zeros(100)
        here = AvailableMemory(CPU)
        here.record_idle()
        gradients, other = torch.zeros(100), torch.zeros(500)
        assert (here.training_bytes(excluding=400), here.other_bytes(excluding=400)) == (8_000, 2_000)
        del weights, gradients, other


def test_excluding_more_than_is_allocated_gives_no_negative_bytes():
    with Ledger(10_000):
        here = AvailableMemory(CPU)
        here.record_idle()
        assert (here.training_bytes(excluding=400), here.other_bytes(excluding=400)) == (10_000, 0)


def test_recording_without_a_limit_has_no_effect():
    here = AvailableMemory(CPU)
    here.record_idle()
    with Ledger(10_000):
        kept = torch.zeros(100)
        assert here.training_bytes() == 10_000
        del kept


# On a card, with made-up figures from torch


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
def test_a_card_has_available_what_is_free_and_what_torch_reserved(card, device):
    assert available_bytes(device) == 50_000
    assert allocated_bytes(device) == 15_000


def test_a_card_has_no_more_available_than_the_limit_of_the_process(card):
    card["fraction"] = 0.5
    assert available_bytes(CUDA) == 40_000
    card["fraction"] = 0.75
    assert available_bytes(CUDA) == 50_000


def test_only_cuda_has_a_limit_for_a_process(card):
    card["fraction"] = 0.5
    assert (process_limit_bytes(CUDA, 80_000), process_limit_bytes(XPU, 80_000)) == (40_000, 80_000)


def test_what_another_process_takes_is_not_available(card):
    card["free"] = 5_000
    assert available_bytes(CUDA) == 25_000


def test_what_this_process_allocated_for_other_things_is_not_available(card):
    here = AvailableMemory(CUDA)
    here.record_idle()
    card.update(free=24_000, reserved=26_000, allocated=21_000)
    assert (here.training_bytes(), here.other_bytes()) == (44_000, 6_000)


def test_a_cache_that_grew_stays_available(card):
    here = AvailableMemory(CUDA)
    here.record_idle()
    card.update(free=10_000, reserved=40_000)
    assert here.training_bytes() == 50_000


def test_nothing_is_known_about_mps():
    assert (available_bytes(MPS), allocated_bytes(MPS), AvailableMemory(MPS).training_bytes()) == (None, None, None)


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


GLIBC = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "malloc_trim")


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not GLIBC, reason="the C library cannot trim")
def test_freed_heap_is_returned_to_the_system():
    del [bytearray(4 * MiB)][:]  # from now on blocks of 1 MiB lie in the heap
    blocks = [bytearray(b"x" * MiB) for _ in range(128)]
    pins = blocks[::8]
    del blocks
    before = anonymous_bytes()
    trim_heap()
    assert before - anonymous_bytes() > 64 * MiB
    assert len(pins) == 16


def test_allocated_and_reserved_peaks_come_from_one_query(monkeypatch):
    answers = iter([{"allocated_bytes.all.peak": 3 * MiB, "reserved_bytes.all.peak": 5 * MiB, "other": 1}])
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: next(answers))
    assert memory_peaks(torch.device("cuda:0")) == (3 * MiB, 5 * MiB)
