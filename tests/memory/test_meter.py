"""On the CPU the meter is a ledger: the peak of each phase, counted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brimful.memory.context import FIRST_PHASES, MICRO_PHASES, StepContext
from brimful.memory.ledger import Ledger, active_limit_bytes
from brimful.memory.meter import Reading, has_peak_statistics, meter
from brimful.task import Loss, Task

CPU = torch.device("cpu")
WEIGHT_BYTES = 4 * (16 * 32 + 32 + 32 * 8 + 8)


class Classifier(Task):
    def loss(self, model, batch):
        x, y = batch
        return Loss(sum=F.cross_entropy(model(x), y, reduction="sum"), count=len(y))

    def dummy(self, rows, shape=()):
        return torch.randn(rows, 16), torch.randint(0, 8, (rows,))


def rig() -> StepContext:
    """A model that has stepped once, so that its optimizer state is there."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    made = StepContext(task=Classifier(), model=model, optimizer=optimizer, device=CPU, autocast=None)
    made.step([made.task.dummy(2, ())], 2)
    return made


def batches(count: int, rows: int = 4):
    return (Classifier().dummy(rows) for _ in range(count))


def held(rig: StepContext) -> list[torch.Tensor]:
    state = [value for states in rig.optimizer.state.values() for value in states.values()]
    return [*rig.model.parameters(), *state]


@pytest.mark.parametrize(
    ("micro_batches", "phases"),
    [(1, [*FIRST_PHASES, "optimizer", "idle"]), (3, [*FIRST_PHASES, *MICRO_PHASES, "optimizer", "idle"])],
)
def test_a_reading_has_the_phases_of_the_bare_step(micro_batches, phases):
    metered, ready = meter(CPU), rig()
    with metered:
        ready.step(batches(micro_batches), 4 * micro_batches, metered.phase)
    assert list(metered.reading().phases) == phases


def test_reserved_bytes_are_unknown_on_the_cpu():
    metered, ready = meter(CPU, reserved=True), rig()
    with metered:
        ready.step(batches(1), 4, metered.phase)
    assert metered.reading().reserved_bytes is None


def test_phases_and_peak_are_those_of_a_ledger():
    metered, ready = meter(CPU), rig()
    with metered:
        ready.step(batches(2), 8, metered.phase)
    with Ledger() as ledger:
        ready.step(batches(2), 8, ledger.phase)
    assert metered.reading().phases == ledger.phase_peaks
    assert metered.reading().peak_bytes == ledger.peak_bytes


def test_the_same_step_reads_the_same_twice():
    ready, readings = rig(), []
    for _ in range(2):
        metered = meter(CPU, adopt=held(ready))
        with metered:
            ready.step(batches(2), 8, metered.phase)
        readings.append(metered.reading())
    assert readings[0] == readings[1]


def read_with(rows: int) -> dict[str, int]:
    ready = rig()
    metered = meter(CPU, adopt=held(ready))
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
    ready = rig()
    metered = meter(CPU, adopt=held(ready))
    with metered:
        metered.phase("nothing happens")
    assert metered.reading().phases == {
        "nothing happens": 3 * WEIGHT_BYTES + 4 * 4
    }  # weights, two moments, four counters


def test_later_micro_batches_hold_the_gradients():
    ready = rig()
    metered = meter(CPU, adopt=held(ready))
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
