"""The largest size is found without an OOM, whatever memory grows with and however few rows fit."""

import pytest
from torch import nn

from brimful.planning.probe import Prober
from tests.planning.small import Normed, Pairs, Tagger, small_plan


def test_growth_with_the_square_of_the_rows_is_found():
    plan = small_plan(Pairs(), memory_limit="64MiB", global_batch=20000, allow_inexact=True)
    small = [probe for probe in plan.memory_model.probes if probe.rows <= 8]
    slope = (small[-1].peak_bytes - small[0].peak_bytes) / (small[-1].rows - small[0].rows)
    straight = (plan.budget_bytes - small[0].peak_bytes) / slope
    assert straight > 5 * plan.largest_micro_batch, "a straight line through small batches is wrong by a factor"
    assert plan.largest_predicted_peak_bytes == pytest.approx(plan.largest_measured_peak_bytes, rel=0.03)
    assert plan.ooms == 0


@pytest.mark.parametrize("limit", ["600KiB", "900KiB", "1200KiB", "1600KiB"])
def test_a_limit_of_a_few_rows_is_met_without_an_oom(limit):
    assert small_plan(memory_limit=limit).ooms == 0


class OneShape(Tagger):
    """Rows of one length: only more of them show what more of them cost."""

    worst_shape = ()

    def dummy(self, rows, shape):
        return super().dummy(rows, (64,))


@pytest.mark.parametrize("task", [Tagger, OneShape])
@pytest.mark.parametrize(("limit", "rows"), [("560KiB", 2), ("560KiB", 16), ("600KiB", 16), ("700KiB", 16)])
def test_where_hardly_a_row_fits_the_model_knows_what_more_rows_cost(task, limit, rows):
    plan = small_plan(task(), memory_limit=limit, global_batch=rows)
    assert plan.one_more_predicted_peak_bytes > plan.budget_bytes >= plan.largest_measured_peak_bytes
    model = plan.memory_model
    assert model.peak_bytes(16, plan.shape) > 2 * model.peak_bytes(1, plan.shape)


def test_a_size_is_not_given_up_for_what_does_not_grow_with_the_rows():
    plan = small_plan(Normed(), memory_limit="70KiB", global_batch=16)
    assert (plan.largest_micro_batch, plan.ooms) == (16, 0)


class Deep(Tagger):
    """Six wide blocks, of which checkpointing keeps a small part."""

    def model(self):
        model = super().model()
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
        model.body = nn.ModuleList(blocks)
        return model


def test_the_whole_step_under_checkpointing_is_predicted_from_one_full_probe_at_fewer_rows(monkeypatch):
    monkeypatch.setattr(Prober, "_timed", lambda self, rows, *_: (1.0, None))  # more rows are always faster
    plan = small_plan(Deep(), memory_limit="40MiB", global_batch=100)
    assert (plan.levers.checkpointing, plan.largest_micro_batch) == ("on", 100)
    assert plan.largest_predicted_peak_bytes == pytest.approx(plan.largest_measured_peak_bytes, rel=0.03)
