"""The figures of a step: what counts is the rows as they are; and the peak that a CPU's ledger gives to a step."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from brimful.data.reader import StepRows
from brimful.memory.ledger import active_peak_bytes, reset_active_peak, simulated_memory
from brimful.memory.model import Polynomial
from brimful.step.distributed import SingleProcess
from brimful.step.result import StepResult
from brimful.step.stepper import Stepper
from brimful.training import metrics as module
from brimful.training.metrics import FlopModel, Speedometer
from brimful.units import KiB
from tests.step.small import Words, steps_of_rows

LENGTHS = np.array([[3, 1], [5, 2], [100, 40], [7, 4]])


class Rows(list):
    """Rows that tell their lengths."""

    def shapes(self, indices):
        return LENGTHS[np.asarray(indices)]


def step_rows(indices, groups, shapes):
    return StepRows(
        start=0, step_rows=len(indices), indices=np.array(indices, dtype=np.int64), groups=groups, shapes=shapes, parts=[], collated=False
    )  # fmt: skip


ROWS = step_rows([0, 1, 3], [[0, 2], [1]], [(7, 4), (5, 2)])


def result(**changes):
    facts = {
        "step": 1, "loss": 2.0, "terms": {"loss": 2.0}, "log": {}, "rows": 6, "count": 7.0, "applied": True, "grad_norm": 1.0, "micro_batches": 2,
        "largest_micro_batch": 2, "ooms": 0, "ooms_of_all": 0, "set_aside": (), "seconds": 0.5, "peak_bytes": 10,
    }  # fmt: skip
    return StepResult(**{**facts, **changes})


def meter(rows=None, group=None, flops=None, peak_flops=None, limit_bytes=None, host_memory=None):
    rows = Rows() if rows is None else rows
    return Speedometer(
        rows, group or SingleProcess(), flops=flops, peak_flops=peak_flops, limit_bytes=limit_bytes, host_memory=host_memory
    )  # fmt: skip


class Two(SingleProcess):
    """The other rank did the same."""

    size = 2

    def gather(self, values):
        return [list(values), list(values)]


def _of_rank(own, **changes):
    """The numbers of another rank: this one's but for a few."""
    return [*own._replace(**changes)]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


FLOPS = FlopModel(polynomial=Polynomial({(1, 0): 10.0, (0, 1): 100.0}))


def test_tokens_are_those_of_the_rows_not_of_the_padded_batch():
    assert meter().figures(ROWS, result(), 0.0, steps_left=1)["tokens"] == 3 + 1 + 5 + 2 + 7 + 4


def test_a_loss_that_counts_rows_has_no_tokens():
    found = meter().figures(ROWS, result(count=6.0), 0.0, steps_left=1)
    assert (found["tokens"], found["tokens_per_s"]) == (None, None)


def test_speed_counts_the_wait_for_data():
    found = meter(limit_bytes=99).figures(ROWS, result(), 1.5, steps_left=1)
    assert (found["rows_per_s"], found["tokens_per_s"]) == (6 / 2.0, 22 / 2.0)
    assert (found["seconds"], found["data_wait_s"], found["peak_bytes"], found["limit_bytes"]) == (0.5, 1.5, 10, 99)


def test_mfu_is_the_rows_arithmetic_over_what_the_device_could_have_done():
    found = meter(flops=FLOPS, peak_flops=10_000.0).figures(ROWS, result(), 1.5, steps_left=1)
    assert found["mfu"] == pytest.approx((10 * (3 + 5 + 7) + 100 * (1 + 2 + 4)) / 0.5 / 10_000)


@pytest.mark.parametrize("how", [{"flops": FLOPS}, {"peak_flops": 1e4}], ids=["no peak", "no formula"])
def test_mfu_is_unknown_where_either_side_is(how):
    assert meter(**how).figures(ROWS, result(), 0.0, steps_left=1)["mfu"] is None


def test_mfu_is_never_above_everything():
    assert meter(flops=FLOPS, peak_flops=1_000.0).figures(ROWS, result(), 0.0, steps_left=1)["mfu"] is None


def test_figures_are_those_of_all_processes():
    class Other(Two):
        def gather(self, values):
            return [list(values), _of_rank(values, length=78.0, flops=150.0)]

    found = meter(group=Other(), flops=FLOPS, peak_flops=10_000.0).figures(ROWS, result(), 0.5, steps_left=1)
    assert (found["tokens"], found["tokens_per_s"]) == (100, 100.0)
    assert found["mfu"] == pytest.approx((850 + 150) / 0.5 / 20_000)


def test_a_process_without_rows_has_figures_too():
    found = meter(flops=FLOPS, peak_flops=1e4).figures(step_rows([], [], []), result(), 0.0, steps_left=1)
    assert (found["tokens"], found["tokens_per_s"], found["mfu"]) == (None, None, None)


def test_rows_that_do_not_tell_their_lengths_count_as_long_as_their_micro_batch():
    assert meter(rows=[]).figures(ROWS, result(), 0.0, steps_left=1)["tokens"] == 2 * (7 + 4) + (5 + 2)


@pytest.mark.parametrize("shapes", [[(3, 2)], lambda indices: np.ones((len(indices), 3))], ids=["a list", "others"])
def test_a_data_set_with_shapes_of_its_own_kind_does_not_end_the_run(shapes):
    class Own(list):
        pass

    rows = Own()
    rows.shapes = shapes
    assert meter(rows=rows, flops=FLOPS, peak_flops=1e4).figures(ROWS, result(), 0.0, steps_left=1)["tokens"] == 29


def test_rows_without_lengths_have_no_tokens():
    found = meter(rows=[]).figures(step_rows([0, 1], [[0, 1]], [()]), result(), 0.0, steps_left=1)
    assert (found["tokens"], found["tokens_per_s"]) == (None, None)


def test_the_time_left_is_told_from_the_median_of_the_last_steps(clock):
    found, watch = [], meter()
    for took in [100.0, 1.0, 2.0, *[50.0] * 30, *[3.0] * module.ETA_STEPS]:
        clock[0] += took
        found.append(watch.figures(ROWS, result(), 0.0, steps_left=10)["eta_s"])
    assert found[:3] == [1000.0, 505.0, 20.0]
    assert found[-1] == 30.0
    clock[0] += 5.0
    assert watch.figures(ROWS, result(), 0.0, steps_left=0)["eta_s"] == 0.0


def test_the_time_left_leaves_out_what_came_before_the_first_step_and_what_is_no_step(clock):
    watch = meter()
    clock[0] += 1000.0  # a plan, the first evaluation
    watch.begin()
    clock[0] += 3.0
    assert watch.figures(ROWS, result(), 0.0, steps_left=10)["eta_s"] == 30.0
    with watch.paused():
        clock[0] += 400.0
        with watch.paused():  # a hook saves after an evaluation
            clock[0] += 200.0
    clock[0] += 3.0
    assert watch.figures(ROWS, result(), 0.0, steps_left=10)["eta_s"] == 30.0


def test_a_pause_ends_with_an_error_in_it(clock):
    watch = meter()
    with pytest.raises(ValueError), watch.paused():
        clock[0] += 50.0
        raise ValueError
    clock[0] += 2.0
    assert watch.figures(ROWS, result(), 0.0, steps_left=1)["eta_s"] == 2.0


def test_the_parts_of_the_time_add_up_to_the_step_and_what_came_before_it(clock):
    watch = meter(group=Two())
    with watch.paused():
        clock[0] += 30.0
    clock[0] += 7.0
    facts = result(seconds=4.0, communication_s=1.0, meanwhile_s=0.25)
    times = watch.figures(ROWS, facts, 0.5, steps_left=1, agreed_s=0.125)["times"]
    assert times == {"compute_s": 3.0, "data_s": 0.75, "communication_s": 1.125, "other_s": 2.125}
    assert sum(times.values()) == 7.0


def test_the_exchange_of_the_figures_is_communication(clock):
    class Slow(Two):
        def gather(self, values):
            clock[0] += 0.5
            return super().gather(values)

    watch = meter(group=Slow())
    for _ in range(2):  # what it takes is known once it is over, so it belongs to the step after
        clock[0] += 1.0
        times = watch.figures(ROWS, result(seconds=1.0), 0.0, steps_left=1)["times"]
    assert times == {"compute_s": 1.0, "data_s": 0.0, "communication_s": 0.5, "other_s": 0.0}


def test_padding_and_time_are_told_of_every_rank_and_on_average(clock):
    class Slower(Two):
        def gather(self, values):
            changes = {"busy_s": 3.0, "data_s": 0.5, "communication_s": 0.25, "real_positions": 10.0, "positions": 40.0}
            return [list(values), _of_rank(values, **changes)]

    watch = meter(group=Slower())
    clock[0] += 4.0
    rows = replace(ROWS, real_positions=30, positions=40)
    found = watch.figures(rows, result(seconds=1.0), 1.5, steps_left=1)
    assert [rank["padding"] for rank in found["ranks"]] == [0.25, 0.75]
    assert [rank["times"] for rank in found["ranks"]] == [
        {"compute_s": 1.0, "data_s": 1.5, "communication_s": 0.0, "other_s": 1.5},
        {"compute_s": 3.0, "data_s": 0.5, "communication_s": 0.25, "other_s": 0.25},
    ]
    assert found["times"] == {"compute_s": 2.0, "data_s": 1.0, "communication_s": 0.125, "other_s": 0.875}
    assert found["padding"] == 0.5


def test_one_process_does_not_communicate(clock):
    assert meter().figures(ROWS, result(), 0.0, steps_left=1, agreed_s=1.0)["times"]["communication_s"] == 0.0


def test_the_parts_are_never_negative(clock):
    """A device may still have computed while the next rows were read, and then both count."""
    times = meter().figures(ROWS, result(seconds=4.0, meanwhile_s=2.0), 1.0, steps_left=1)["times"]
    assert times["other_s"] == 0.0


def test_rows_read_ahead_are_waited_for_by_the_step_that_trains_on_them():
    watch = meter()
    waits = [watch.figures(ROWS, result(meanwhile_s=s), 0.5, steps_left=1)["data_wait_s"] for s in (2.0, 0.0)]
    assert waits == [0.5, 2.5]


def test_memory_is_told_of_every_rank_and_the_highest_of_all():
    class Larger(Two):
        def gather(self, values):
            return [
                list(values),
                _of_rank(values, peak_bytes=30.0, reserved_bytes=50.0, limit_bytes=100.0),
            ]

    facts = result(peak_bytes=20, reserved_bytes=None, micro_batches=3)
    found = meter(group=Larger(), limit_bytes=99).figures(ROWS, facts, 0.0, steps_left=1)
    assert (found["peak_bytes"], found["reserved_bytes"], found["limit_bytes"]) == (30, 50, 99)
    memory = ("rank", "peak_bytes", "reserved_bytes", "limit_bytes", "micro_batches")
    assert [[rank[name] for name in memory] for rank in found["ranks"]] == [[0, 20, None, 99, 3], [1, 30, 50, 100, 3]]


def test_memory_that_no_device_counts_is_unknown():
    found = meter().figures(ROWS, result(peak_bytes=None), 0.0, steps_left=1)
    assert (found["peak_bytes"], found["reserved_bytes"]) == (None, None)


def test_padding_is_the_share_of_all_positions_that_no_row_needs():
    class Other(Two):
        def gather(self, values):
            return [list(values), _of_rank(values, real_positions=70.0, positions=80.0)]

    rows = replace(ROWS, real_positions=20, positions=40)
    assert meter(group=Other()).figures(rows, result(), 0.0, steps_left=1)["padding"] == pytest.approx(1 - 90 / 120)


@pytest.mark.parametrize(
    ("real", "positions"),
    [(None, 40), (None, None), (0, 0)],
    ids=["no lengths", "no rows read here", "rows of one size"],
)
def test_padding_is_unknown_where_lengths_are(real, positions):
    rows = replace(ROWS, real_positions=real, positions=positions)
    assert meter().figures(rows, result(), 0.0, steps_left=1)["padding"] is None


def test_tokens_are_the_rows_own_if_the_task_tells_their_lengths():
    rows = replace(ROWS, real_positions=20, positions=40)
    assert meter(rows=[]).figures(rows, result(), 0.0, steps_left=1)["tokens"] == 20


def test_the_hosts_memory_is_that_of_the_last_sample():
    watch = meter()
    assert watch.figures(ROWS, result(), 0.0, steps_left=1)["host_bytes"] is None
    watch = meter(host_memory=SimpleNamespace(host_bytes=5, machine_bytes=7))
    found = watch.figures(ROWS, result(), 0.0, steps_left=1)
    assert (found["host_bytes"], found["machine_bytes"]) == (5, 7)


def test_all_figures_take_one_exchange():
    class Counting(Two):
        exchanges = 0

        def gather(self, values):
            Counting.exchanges += 1
            return super().gather(values)

        def gather_objects(self, value):
            pytest.fail("a second exchange")

    meter(group=Counting(), flops=FLOPS, peak_flops=1e4).figures(ROWS, result(), 0.0, steps_left=1)
    assert Counting.exchanges == 1


def test_outside_of_a_limit_there_is_no_peak():
    reset_active_peak()
    assert active_peak_bytes() is None


def test_a_peak_counts_from_where_it_was_set_back():
    with simulated_memory("1MiB") as memory:
        kept = torch.zeros(4 * KiB, dtype=torch.uint8)
        large = torch.zeros(32 * KiB, dtype=torch.uint8)
        del large
        assert active_peak_bytes() == 36 * KiB
        reset_active_peak()
        assert active_peak_bytes() == 4 * KiB
        small = torch.zeros(8 * KiB, dtype=torch.uint8)
        del small, kept
        assert active_peak_bytes() == 12 * KiB
        assert memory.peak_bytes == 36 * KiB


def test_of_two_limits_the_tighter_one_tells_the_peak():
    with simulated_memory("1MiB") as outer:
        before = torch.zeros(64 * KiB, dtype=torch.uint8)
        with simulated_memory("512KiB"):
            inner = torch.zeros(8 * KiB, dtype=torch.uint8)
            assert active_peak_bytes() == 8 * KiB
            reset_active_peak()
            del inner, before
        assert active_peak_bytes() == outer.recent_peak_bytes == 72 * KiB


def test_the_peak_of_a_step_is_that_step_s_own():
    task = Words(dtype=torch.float32)
    model = task.model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    rows = [row for step in steps_of_rows(2, 30) for row in step]
    with simulated_memory("64MiB"):
        large, small = stepper.step(rows), stepper.step(rows[:1])
    assert small.peak_bytes < large.peak_bytes / 4
