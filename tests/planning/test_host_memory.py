"""The host's part of a plan: measured on the real data, within the limit, and explained with its numbers."""

import re
import time
from dataclasses import replace

import pytest
import torch

from brimful.data.reader import StepRows
from brimful.errors import DoesNotFit
from brimful.machine.host import tree_bytes
from brimful.planning import host_memory as host_module
from brimful.planning.host_memory import FILL_HOST, HostPlanner, with_host
from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import find_target
from brimful.units import GiB, MiB
from tests.planning.small import Tagger, small_plan


class Texts(Tagger):
    """The tagger with a data set of its own."""

    def shape(self, row):
        return (len(row["ids"]),)

    def collate(self, rows):
        ids = torch.nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True)
        return {"ids": ids, "pixels": torch.stack([row["pixels"] for row in rows])}


class Data:
    """400 rows that each take this many seconds to fetch."""

    def __init__(self, seconds=0.0, numbers=1):
        self.seconds, self.numbers = seconds, numbers

    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return {"ids": torch.full((1 + index % 64,), index % 100), "pixels": torch.ones(self.numbers)}


OPTIONS = PlanOptions(device="cpu", memory_limit="64MiB")


@pytest.fixture(scope="module")
def plan():
    return small_plan(Texts(), memory_limit="64MiB", global_batch=16)


def host_plan(plan, rows, step_s=None, **options):
    """The plan's host side, were the device fast enough to train a step of the worst rows in `step_s`."""
    options = replace(OPTIONS, **options)
    if step_s is not None:
        plan = replace(plan, rows_per_s=plan.global_batch / step_s)
    return with_host(plan, Texts(), rows, find_target(options), options, lambda phrase: None)


def test_without_data_the_loader_is_unknown(plan):
    assert plan.host.workers is None and plan.host.prefetch is None
    assert plan.choice("workers").reason == "unknown: without data nothing could be read and timed"
    assert plan.host.pin_memory is False and plan.host.predicted_bytes > plan.measured_peak_bytes


def test_rows_that_come_fast_need_no_worker(plan):
    result = host_plan(plan, Data(), step_s=100.0)
    assert result.host.workers == 0 and result.choice("workers").basis == "measured"
    assert "a worker would cost RAM and gain nothing" in result.choice("workers").reason


def test_slow_rows_get_a_worker_that_was_timed_and_weighed(plan):
    result = host_plan(plan, Data(0.005), step_s=0.8)
    assert result.host.workers == 1 and result.host.prefetch == 2
    reason = result.choice("workers").reason
    assert "one worker reads a step in" in reason and "MiB" in reason


def test_a_worker_weighs_what_it_holds(plan):
    class Hoarder(Data):
        """Keeps 60 MiB in whatever process reads it, from the first row on."""

        hoard = None

        def __getitem__(self, index):
            if type(self).hoard is None:
                type(self).hoard = torch.ones(60 * MiB, dtype=torch.uint8)
            return super().__getitem__(index)

    def weighed(rows):
        planner = HostPlanner(plan, Texts(), Data(), find_target(OPTIONS), OPTIONS, lambda phrase: None)
        planner.rows = rows
        return planner.read(workers=1).worker_bytes

    little = weighed(Data())
    assert little < 50 * MiB
    assert 40 * MiB < weighed(Hoarder()) - little < 90 * MiB


def test_no_more_workers_than_cores_allow(plan, monkeypatch):
    monkeypatch.setattr(host_module.Host, "detect", classmethod(lambda cls: replace(HOST, cores=4)))
    result = host_plan(plan, Data(0.004), step_s=0.0128)
    assert result.host.workers == 3
    assert "4 cores for 1 process allow 3" in result.choice("workers").reason


def test_more_workers_where_one_does_not_keep_up(plan, monkeypatch):
    monkeypatch.setattr(host_module.Host, "detect", classmethod(lambda cls: replace(HOST, cores=64)))
    slow, slower = (host_plan(plan, Data(seconds), step_s=0.128).host.workers for seconds in (0.004, 0.016))
    assert 1 <= slow < slower


def test_reading_that_computes_gets_no_worker_on_a_cpu_that_trains(plan):
    class Busy(Data):
        def __getitem__(self, index):
            until = time.process_time() + 0.001
            while time.process_time() < until:
                pass
            return super().__getitem__(index)

    result = host_plan(plan, Busy(), step_s=0.016)
    assert result.host.workers == 0 and "training needs the same cores" in result.choice("workers").reason


def test_what_is_requested_is_kept(plan):
    result = host_plan(plan, Data(), step_s=100.0, workers=2, prefetch=3, pin_memory="off")
    assert (result.host.workers, result.host.prefetch, result.host.pin_memory) == (2, 3, False)
    assert [result.choice(name).basis for name in ("workers", "prefetch", "pin_memory")] == ["asked"] * 3


def test_no_workers_where_none_are_requested_even_if_reading_is_slow(plan):
    choice = host_plan(plan, Data(0.001), step_s=0.016, workers=0).choice("workers")
    assert choice.effective == 0 and choice.reason.startswith("as requested; ") and "gain nothing" not in choice.reason


def test_pinned_memory_is_not_used_without_a_gpu_even_if_requested_and_says_so(plan):
    choice = host_plan(plan, Data(), step_s=100.0, pin_memory="on").choice("pin_memory")
    assert (choice.requested, choice.effective) == (True, False) and "reads host memory directly" in choice.reason


@pytest.mark.parametrize(("requested", "pinned"), [("auto", True), ("off", False)])
def test_a_small_step_is_pinned_for_a_gpu_unless_that_is_switched_off(plan, monkeypatch, requested, pinned):
    monkeypatch.setattr(host_module, "_copy_s", lambda rows, device: 1e-6)
    monkeypatch.setattr(StepRows, "pin_memory", lambda rows: rows)
    options = replace(OPTIONS, pin_memory=requested)
    gpu = replace(find_target(options), device=torch.device("cuda"))
    choice = with_host(plan, Texts(), Data(), gpu, options, lambda phrase: None).choice("pin_memory")
    assert choice.effective is pinned


@pytest.mark.torture
def test_the_limit_takes_steps_ahead_before_workers(plan, monkeypatch):
    monkeypatch.setattr(host_module.Host, "detect", classmethod(lambda cls: replace(HOST, cores=64)))
    rows = Data(0.02, numbers=500_000)  # 100 MB a step, which is waited for
    free = host_plan(plan, rows, step_s=2.0)
    tight = replace(
        find_target(OPTIONS),
        host_limit_bytes=int((free.host.predicted_bytes - 50 * MiB) / FILL_HOST),
    )
    result = with_host(
        replace(plan, rows_per_s=plan.global_batch / 2.0), Texts(), rows, tight, OPTIONS, lambda phrase: None
    )
    assert (result.host.workers, result.host.prefetch) < (free.host.workers, free.host.prefetch)
    assert result.host.prefetch in (1, None)
    assert "of host RAM and" in result.choice("workers").reason
    assert result.host.predicted_bytes <= FILL_HOST * tight.host_limit_bytes


def test_a_limit_below_the_process_itself_is_refused_with_what_is_needed(plan):
    target = replace(find_target(OPTIONS), host_limit_bytes=tree_bytes() // 2)
    with pytest.raises(
        DoesNotFit, match="1 process takes .* of host RAM, and 90% of the limit is .* Try: host_limit="
    ) as refusal:
        with_host(plan, Texts(), None, target, OPTIONS, lambda phrase: None)
    assert refusal.value.needed_bytes > target.host_limit_bytes


def test_every_process_counts(plan):
    one, three = (host_plan(replace(plan, processes=n, deal=(16,) * n), None).host.predicted_bytes for n in (1, 3))
    assert three == pytest.approx(3 * one, rel=0.02)


def test_a_plan_with_data_measures_its_loader_and_saves_it(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIMFUL_CACHE", str(tmp_path))
    first = small_plan(Texts(), data=Data(), memory_limit="64MiB", global_batch=16, cache=True)
    again = small_plan(Texts(), data=Data(), memory_limit="64MiB", global_batch=16, cache=True)
    assert first.host.workers is not None and again.cached and again.host == first.host
    assert again.choice("workers") == first.choice("workers")


HOST = host_module.Host.detect()
assert HOST.ram_limit_bytes > GiB


def test_of_a_huge_step_only_the_first_rows_are_read_and_the_rest_is_in_proportion(plan, monkeypatch):
    monkeypatch.setattr(host_module, "ROWS", 256)

    class Counted(Data):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            return super().__getitem__(index)

    rows = Counted()
    huge = replace(plan, global_batch=1_000_000, deal=(1_000_000,))
    planner = HostPlanner(huge, Texts(), rows, find_target(OPTIONS), OPTIONS, lambda phrase: None)
    assert rows.read <= 9 * host_module.ROWS
    assert planner.trains_s > 100 * host_module.ROWS / plan.rows_per_s / 64


@pytest.mark.parametrize(("batch", "often"), [(401, "once or twice"), (1000, "2 or 3 times"), (2000, "5 times")])
def test_a_global_batch_of_more_rows_than_there_are_is_a_warning(plan, batch, often):
    result = host_plan(replace(plan, global_batch=batch, deal=(batch,)), Data())
    assert result.warnings == (
        f"the global batch of {batch:,} rows exceeds the 400 rows of the data, so a step has each row {often}. "
        "Try: a smaller global_batch=",
    )


def test_a_global_batch_of_all_rows_is_none(plan):
    assert not host_plan(replace(plan, global_batch=400, deal=(400,)), Data()).warnings


def test_a_host_limit_is_shown_as_requested(plan):
    choice = host_plan(plan, Data(), host_limit="8GiB").choice("host_limit")
    assert (choice.requested, choice.effective, choice.source) == (8 * GiB, 8 * GiB, "you")


def test_a_host_limit_above_what_there_is_is_lowered_in_sight(plan):
    result = host_plan(plan, Data(), host_limit="1000TiB")
    choice = result.choice("host_limit")
    assert choice.cells[1] == "1000 TiB" and choice.effective == result.host.limit_bytes == HOST.ram_limit_bytes
    assert choice.source == "measured" and HOST.ram_limited_by in choice.reason
    (warning,) = result.warnings
    assert warning.startswith("host_limit= is 1000 TiB, and there are ")


def test_without_a_host_limit_there_is_no_such_choice(plan):
    assert "host_limit" not in {choice.name for choice in host_plan(plan, Data()).choices}


def test_the_time_of_a_step_is_that_of_its_real_rows_and_of_reading_them(plan):
    """Rows of 32.5 on average, of the 64 that were timed."""
    result = host_plan(replace(plan, simulation_slowdown=1.0), Data(), step_s=10.0)
    assert 2.5 < result.step_s < 10.0


def test_a_limit_that_is_simulated_makes_a_step_slower(plan):
    slow, fast = (host_plan(replace(plan, simulation_slowdown=s), Data(), step_s=10.0).step_s for s in (3.0, 1.0))
    assert slow == pytest.approx(3 * fast, rel=0.1)


def test_the_reason_for_the_workers_names_the_time_of_the_step_that_the_plan_predicts(plan):
    slowed = host_plan(replace(plan, simulation_slowdown=3.0), Data(), step_s=10.0)
    shown_s = float(re.search(r"of the ([\d.]+) s that it is predicted to train", slowed.choice("workers").reason)[1])
    assert shown_s == pytest.approx(slowed.step_s, rel=0.05)


def test_slow_rows_make_a_step_slow_unless_workers_read_them(plan):
    alone = host_plan(plan, Data(0.005), step_s=1e-3, workers=0)
    helped = host_plan(plan, Data(0.005), step_s=1e-3, workers=4)
    assert alone.step_s > 16 * 0.005 > helped.step_s


def test_without_data_the_time_of_a_step_is_unknown(plan):
    assert plan.step_s is None
