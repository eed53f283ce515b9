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


class Deep(Tagger):
    """Twelve blocks, whose activations are most of the memory."""

    name = "deep"

    def model(self):
        model = super().model()
        model.body = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.GELU()) for _ in range(12))
        return model


def test_fewer_checkpointed_blocks_fit_fewer_rows():
    settings = "off", "every-3", "every-2", "on"
    plans = [small_plan(Deep(), checkpointing=value, global_batch=500, memory_limit="8MiB") for value in settings]
    largest = [plan.largest_micro_batch for plan in plans]
    assert largest == sorted(set(largest))
    assert [plan.levers.checkpointing for plan in plans] == list(settings)
    assert all(plan.choice("checkpointing").basis == "asked" for plan in plans)


@pytest.fixture
def speeds(monkeypatch):
    """Rows/s by setting of checkpointing, which the number of wrapped blocks of `Deep` tells."""

    def use(**rates):
        def fastest(step_rows, largest, seconds, *_, **__):
            blocks = seconds.__self__.prober.context.model.body
            wrapped = sum("forward" in vars(block) for block in blocks)
            rate = rates[{0: "off", 4: "every_3", 6: "every_2", 12: "on"}[wrapped]]
            timing = Timing(largest, -(-step_rows // largest), rate, 0.1)
            return Speed(timing, (timing,))

        monkeypatch.setattr("brimful.planning.micro_batch.find_fastest", fastest)

    return use


def limit_for(share):
    """The limit whose budget fits this share of a step of 16 rows of `Deep` without checkpointing."""
    return round(share * small_plan(Deep(), global_batch=16, memory_limit="64MiB").measured_peak_bytes / 0.85)


def test_the_fewest_blocks_that_save_a_micro_batch_are_tried(speeds):
    speeds(off=100.0, every_3=150.0, on=120.0)
    plan = small_plan(Deep(), global_batch=16, memory_limit=limit_for(0.9))
    assert (plan.levers.checkpointing, plan.accumulation) == ("every-3", 1)
    choice = plan.choice("checkpointing")
    assert choice.reason.startswith("120 rows/s with it at 16 rows, 150 rows/s with every-3 at 16 rows, 100 without")
    assert (choice.requested, choice.basis) == (None, "measured")


def test_more_blocks_are_taken_where_a_third_of_them_is_not_enough(speeds):
    speeds(off=100.0, every_2=150.0, on=120.0)
    plan = small_plan(Deep(), global_batch=16, memory_limit=limit_for(0.8))
    assert {str(one.setting) for one in plan.tried} == {
        "padded fp32", "padded fp32 checkpointed", "padded fp32 checkpointed every-2",
    }  # fmt: skip


def test_fewer_blocks_that_are_slower_are_not_chosen(speeds):
    speeds(off=100.0, every_3=90.0, on=80.0)
    plan = small_plan(Deep(), global_batch=16, memory_limit=limit_for(0.9))
    assert plan.levers.checkpointing == "off"
    assert plan.choice("checkpointing").reason.endswith("90 rows/s with every-3 at 16 rows, 100 without")


def test_a_micro_batch_that_needs_checkpointing_has_it_on_as_few_blocks_as_it_needs(speeds):
    speeds(off=100.0, every_2=90.0, on=70.0)
    plan = small_plan(Deep(), global_batch=16, micro_batch=16, memory_limit=limit_for(0.8))
    assert plan.levers.checkpointing == "every-2"
    assert plan.choice("checkpointing").reason.startswith("without it at most ")


def test_a_deterministic_plan_checkpoints_all_blocks_or_none():
    plan = small_plan(Deep(), global_batch=16, micro_batch=16, memory_limit=limit_for(0.8), deterministic=True)
    assert plan.levers.checkpointing == "on"


def test_too_few_blocks_to_leave_some_out_are_refused():
    with pytest.raises(BadOption, match='checkpointing="every-2" is not possible: the model has only 2 blocks. Try: '):
        small_plan(checkpointing="every-2")


def test_checkpointing_without_repeated_blocks_is_refused_in_one_clause():
    class OneLayer(Tagger):
        def model(self):
            return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100))

    with pytest.raises(
        BadOption, match='^checkpointing="on" is not possible: the model has no method for it and no repeated'
    ):
        small_plan(OneLayer(), checkpointing="on")


def test_a_hook_of_the_task_switches_all_blocks():
    class Hooked(Tagger):
        def checkpointing(self, model, on):
            return True

    with pytest.raises(BadOption, match="it is switched by the task's own hook, for all blocks or none. Try: "):
        small_plan(Hooked(), checkpointing="every-3")


def test_a_table_has_every_setting_of_checkpointing():
    plan = small_plan(Deep(), global_batch=16, memory_limit="64MiB", table=True, plan_seconds=1000)
    assert {one.setting.checkpointing for one in plan.tried} == {"off", "every-3", "every-2", "on"}


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
