"""The fastest split is found by climbing, checkpointing is used where it pays, and every choice has its reason."""

import pytest
from torch import nn

from brimful.errors import BadOption, DoesNotFit, InexactSplit
from brimful.planning.speed import Speed, Timing, find_fastest
from brimful.task import Loss
from tests.planning.small import Normed, Pairs, Tagger, small_plan


def curve(rates):
    """Seconds for a micro-batch of this many rows, given rows/s at some sizes."""
    timed = []

    def seconds(rows):
        timed.append(rows)
        nearest = min(rates, key=lambda n: abs(n - rows))
        return rows / rates[nearest]

    return seconds, timed


def test_the_largest_wins_while_speed_grows():
    seconds, _ = curve({32: 400, 16: 200, 8: 100})
    speed = find_fastest(256, 32, seconds, 0.0)
    assert speed.chosen.rows == 32
    assert speed.rising


def test_a_smaller_size_wins_when_it_is_faster_and_the_largest_is_not_timed_for_long():
    seconds, timed = curve({64: 50, 32: 60, 16: 80, 8: 75})
    speed = find_fastest(64, 64, seconds, 0.0)
    assert speed.chosen.rows == 16
    assert timed == [32, 64, 16, 8]
    assert not speed.rising


def test_equal_speed_goes_to_less_memory():
    seconds, _ = curve({32: 100, 16: 99.5, 8: 60})
    assert find_fastest(32, 32, seconds, 0.0).chosen.rows == 16


def test_sizes_are_equal_splits_of_the_step():
    seconds, timed = curve({32: 100})
    find_fastest(250, 30, seconds, 0.0)
    assert set(timed) <= {28, 14, 7, 4, 2, 1}


def test_the_optimizers_time_counts_once_a_step():
    seconds, _ = curve({10: 100})
    assert find_fastest(20, 10, seconds, 0.8, only=True).chosen.rows_per_s == 20 / (2 * 0.1 + 0.8)


def test_the_reason_names_the_others():
    seconds, _ = curve({32: 400, 16: 200, 8: 100})
    assert "fastest: 400 rows/s (200 with 16 rows" in find_fastest(32, 32, seconds, 0.0).reason


@pytest.mark.parametrize("checkpointing", ["on", "off"])
def test_checkpointing_stays_as_requested(checkpointing):
    plan = small_plan(checkpointing=checkpointing)
    assert plan.levers.checkpointing == checkpointing
    assert plan.choice("checkpointing").basis == "asked"


def test_checkpointing_fits_more_rows():
    on, off = (small_plan(checkpointing=value, global_batch=500) for value in ("on", "off"))
    assert on.largest_micro_batch > off.largest_micro_batch


def test_checkpointing_that_was_never_run_is_not_called_measured():
    choice = small_plan(memory_limit="64MiB").choice("checkpointing")
    assert (choice.reason, choice.basis) == ("the whole step fits without it", "predicted")


def test_checkpointing_that_is_slower_in_the_end_is_not_chosen(monkeypatch):
    speeds = iter((100.0, 200.0, 50.0))  # without; with it at the first size; with it at what then fits

    def fastest(step_rows, largest, *_, **__):
        timing = Timing(largest, -(-step_rows // largest), next(speeds), 0.1)
        return Speed(timing, (timing,))

    monkeypatch.setattr("brimful.planning.micro_batch.find_fastest", fastest)
    plan = small_plan(memory_limit="600KiB", global_batch=16)
    assert (plan.levers.checkpointing, plan.rows_per_s) == ("off", 100.0)
    assert plan.choice("checkpointing").reason == "50 rows/s with it at 1 row, 100 without"


def test_a_model_that_came_checkpointed_cannot_be_switched_off():
    class Checkpointed(Tagger):
        def model(self):
            model = super().model()
            model.is_gradient_checkpointing = True
            return model

    with pytest.raises(BadOption, match='checkpointing="off" is not possible: the model came with it on'):
        small_plan(Checkpointed(), checkpointing="off")


def test_a_fixed_micro_batch_above_the_step_is_shown_with_the_effective_one():
    choice = small_plan(memory_limit="64MiB", global_batch=8, micro_batch=32).choice("micro_batch")
    assert (choice.requested, choice.effective) == (32, 8)


def test_a_fixed_micro_batch_that_cannot_fit_is_refused_with_the_largest_that_does():
    with pytest.raises(BadOption, match=r"micro_batch=500 is predicted to need .* Try: micro_batch=\d+"):
        small_plan(global_batch=1000, micro_batch=500, checkpointing="off")


def test_a_fixed_micro_batch_where_not_even_one_row_fits_is_told_so():
    class Wide(Pairs):
        def model(self):
            return nn.Linear(16, 20_000)

        def loss(self, model, batch):
            return Loss(model(batch).square().sum(), len(batch))

    with pytest.raises(DoesNotFit, match="1 row needs"):
        small_plan(Wide(), memory_limit=5_200_000, micro_batch=8)


def test_a_loss_across_rows_is_kept_whole():
    plan = small_plan(Pairs(), memory_limit="64MiB", global_batch=500)
    assert (plan.micro_batch, plan.accumulation) == (500, 1)


def test_a_loss_across_rows_that_does_not_fit_whole_is_refused():
    with pytest.raises(InexactSplit, match="looks across rows.*allow_inexact=True"):
        small_plan(Pairs(), memory_limit="64MiB")


def test_a_micro_batch_that_would_split_a_loss_across_rows_is_named_as_the_cause():
    with pytest.raises(
        InexactSplit, match="micro_batch=8 would split the 32 rows of a step. Try: micro_batch=32, or allow"
    ):
        small_plan(Pairs(), memory_limit="64MiB", global_batch=32, micro_batch=8)


def test_a_split_that_changes_the_result_is_refused_before_anything_is_probed_for_it():
    shown = []
    with pytest.raises(InexactSplit):
        small_plan(Pairs(), memory_limit="64MiB", global_batch=32, micro_batch=8, progress=shown.append)
    assert not [phrase for phrase in shown if phrase.startswith(("probe", "time", "verify"))]


def test_a_loss_across_rows_is_split_if_allowed_with_a_warning():
    plan = small_plan(Pairs(), memory_limit="64MiB", allow_inexact=True)
    assert plan.accumulation > 1
    assert any("looks across rows" in warning for warning in plan.warnings)


def test_batch_norm_is_split_as_little_as_memory_allows_with_a_warning():
    plan = small_plan(Normed(), memory_limit="64MiB", global_batch=64)
    assert (plan.micro_batch, plan.accumulation) == (64, 1)
    assert "fewest splits" in plan.choice("micro_batch").reason
    assert any("BatchNorm" in warning for warning in plan.warnings)
