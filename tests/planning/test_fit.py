"""A fit runs without OOM, predicts what it measures, returns what ran, and leaves no trace."""

import gc
import json
import random
import re
import weakref

import numpy as np
import pytest
import torch

import brimful
from brimful.errors import BadOption, DoesNotFit, InexactSplit, TaskError
from brimful.planning.plan import Plan
from brimful.planning.planner import plan as make_plan
from brimful.planning.survey import Speed, Timing
from tests.planning.small import Normed, Pairs, Tagger

LIMIT = "4MiB"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(Tagger(), memory_limit=LIMIT, device="cpu", cache=False)


def test_no_oom_on_the_way(plan):
    assert plan.ooms == 0


def test_the_prediction_was_right(plan):
    assert plan.predicted_peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.03)
    assert plan.largest_predicted_peak_bytes == pytest.approx(plan.largest_measured_peak_bytes, rel=0.03)


def test_the_budget_holds_and_one_row_more_would_break_it(plan):
    assert plan.largest_measured_peak_bytes <= plan.budget_bytes
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.one_more_predicted_peak_bytes > plan.budget_bytes


def test_the_largest_size_really_runs_under_the_limit_and_twice_as_many_rows_do_not(plan):
    task = Tagger()
    model = task.model()
    optimizer = task.optimizer(model)

    def step(rows):
        for _ in range(2):  # gradients of the first wait during the second
            loss = task.loss(model, task.dummy(rows, task.worst_shape))
            loss.sum.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    with brimful.simulated_memory(LIMIT):
        step(plan.largest_micro_batch)
    with pytest.raises(torch.OutOfMemoryError), brimful.simulated_memory(LIMIT):
        step(2 * plan.largest_micro_batch)


def test_the_global_batch_is_exact(plan):
    assert plan.global_batch == 50
    assert plan.micro_batch * (plan.accumulation - 1) < 50 <= plan.micro_batch * plan.accumulation


def test_250_rows_on_3_processes_are_84_83_83():
    plan = make_plan(Tagger(), memory_limit=LIMIT, device="cpu", cache=False, global_batch=250, processes=3)
    assert plan.deal == (84, 83, 83)
    assert plan.accumulation == -(-84 // plan.micro_batch)


def test_a_plan_survives_its_json(plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_every_choice_has_a_reason_and_a_basis(plan):
    names = [choice.name for choice in plan.choices]
    assert {
        "device",
        "memory_limit",
        "global_batch",
        "micro_batch",
        "accumulation",
        "checkpointing",
        "precision",
    } <= set(names)
    assert all(choice.reason and choice.basis in ("measured", "predicted", "asked") for choice in plan.choices)


@pytest.mark.parametrize("checkpointing", ["on", "off"])
def test_checkpointing_stays_as_fixed(checkpointing):
    plan = make_plan(Tagger(), memory_limit=LIMIT, device="cpu", cache=False, checkpointing=checkpointing)
    assert plan.levers.checkpointing == checkpointing
    assert plan.choice("checkpointing").basis == "asked"


def test_checkpointing_fits_more_rows(plan):
    on = make_plan(Tagger(), memory_limit=LIMIT, device="cpu", cache=False, checkpointing="on", global_batch=500)
    off = make_plan(Tagger(), memory_limit=LIMIT, device="cpu", cache=False, checkpointing="off", global_batch=500)
    assert on.largest_micro_batch > off.largest_micro_batch


@pytest.mark.parametrize("asked", [{"micro_batch": 7}, {"precision": "bf16"}, {"fill": 0.5}, {"global_batch": 33}])
def test_what_is_fixed_stays_fixed(asked):
    plan = make_plan(Tagger(), memory_limit=LIMIT, device="cpu", cache=False, **asked)
    (name, value), *_ = asked.items()
    assert (plan.levers.precision if name == "precision" else getattr(plan, name)) == value


def test_a_fixed_micro_batch_above_the_step_is_shown_with_what_it_became():
    plan = make_plan(Tagger(), memory_limit="64MiB", device="cpu", cache=False, global_batch=8, micro_batch=32)
    choice = plan.choice("micro_batch")
    assert (choice.requested, choice.effective) == (32, 8)


def test_a_fixed_micro_batch_that_cannot_fit_is_refused_with_what_would():
    with pytest.raises(BadOption, match=r"--micro-batch 500: .* at most \d+ fit"):
        make_plan(
            Tagger(),
            memory_limit=LIMIT,
            device="cpu",
            cache=False,
            global_batch=1000,
            micro_batch=500,
            checkpointing="off",
        )


def test_the_square_of_the_rows_is_found():
    plan = make_plan(Pairs(), memory_limit="64MiB", device="cpu", cache=False, global_batch=20000, allow_inexact=True)
    small = [probe for probe in plan.memory_model.probes if probe.rows <= 8]
    slope = (small[-1].peak_bytes - small[0].peak_bytes) / (small[-1].rows - small[0].rows)
    straight = (plan.budget_bytes - small[0].peak_bytes) / slope
    assert straight > 5 * plan.largest_micro_batch, "a straight line through small batches is wrong by a factor"
    assert plan.largest_predicted_peak_bytes == pytest.approx(plan.largest_measured_peak_bytes, rel=0.03)
    assert plan.ooms == 0


def test_a_loss_across_rows_is_kept_whole():
    plan = make_plan(Pairs(), memory_limit="512MiB", device="cpu", cache=False, global_batch=500)
    assert (plan.micro_batch, plan.accumulation) == (500, 1)


def test_a_loss_across_rows_that_would_have_to_be_cut_is_refused():
    with pytest.raises(InexactSplit, match="looks across rows.*--allow-inexact"):
        make_plan(Pairs(), memory_limit="64MiB", device="cpu", cache=False)


def test_a_loss_across_rows_is_cut_when_allowed_with_a_warning():
    plan = make_plan(Pairs(), memory_limit="64MiB", device="cpu", cache=False, allow_inexact=True)
    assert plan.accumulation > 1
    assert any("looks across rows" in warning for warning in plan.warnings)


def test_batch_norm_warns_and_goes_on():
    plan = make_plan(Normed(), memory_limit=LIMIT, device="cpu", cache=False)
    assert any("BatchNorm" in warning for warning in plan.warnings)


def test_data_gives_the_longest_lengths(tmp_path):
    class WithRows(Tagger):
        def rows(self, data):
            return [list(range(10)), list(range(33))]

        def shape(self, row):
            return (len(row),)

    assert make_plan(WithRows(), data="x", memory_limit=LIMIT, device="cpu", cache=False).shape == (33,)


def test_lengths_may_come_as_a_list():
    assert make_plan(Tagger(), lengths=[32], memory_limit="600KiB", device="cpu", cache=False).shape == (32,)


def test_a_model_of_fixed_input_size_is_fitted_by_rows_alone():
    class Fixed(Tagger):
        def loss(self, model, batch):
            assert batch["ids"].shape[1] == 64, "only 64 tokens"
            return super().loss(model, batch)

    plan = make_plan(Fixed(), memory_limit=LIMIT, device="cpu", cache=False)
    assert {probe.shape for probe in plan.memory_model.probes} == {(64,)}
    assert any("only the worst shape" in warning for warning in plan.warnings)


class TestNothingIsLeftBehind:
    @pytest.fixture
    def trained(self):
        torch.manual_seed(1)
        task = Normed()
        model = task.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            task.loss(model, task.dummy(8, ())).sum.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        return task, model, optimizer

    def test_weights_buffers_and_modes(self, trained):
        task, model, optimizer = trained
        before = {name: value.clone() for name, value in model.state_dict().items()}
        make_plan(task, model=model, optimizer=optimizer, memory_limit=LIMIT, cache=False)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not any(module.training for module in model.modules())
        assert all(p.grad is None for p in model.parameters())

    def test_optimizer_state(self, trained):
        task, model, optimizer = trained
        before = [{k: torch.as_tensor(v).clone() for k, v in state.items()} for state in optimizer.state.values()]
        make_plan(task, model=model, optimizer=optimizer, memory_limit=LIMIT, cache=False)
        after = list(optimizer.state.values())
        assert len(before) == len(after) > 0
        for old, new in zip(before, after, strict=True):
            assert all(torch.equal(old[key], torch.as_tensor(new[key])) for key in old)

    def test_a_fresh_optimizer_stays_fresh(self):
        task = Tagger()
        model = task.model()
        optimizer = task.optimizer(model)
        make_plan(task, model=model, optimizer=optimizer, memory_limit=LIMIT, cache=False)
        assert not optimizer.state

    def test_random_state(self):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        expected = random.random(), np.random.rand(), torch.rand(3)
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        make_plan(Tagger(), memory_limit=LIMIT, device="cpu", cache=False)
        assert (random.random(), np.random.rand()) == expected[:2]
        assert torch.equal(torch.rand(3), expected[2])

    def test_a_lever_is_switched_off_again(self):
        task = Tagger()
        model = task.model()
        make_plan(task, model=model, memory_limit=LIMIT, cache=False, checkpointing="on")
        assert not any("forward" in vars(module) for module in model.modules())

    def test_also_after_a_failure(self, trained):
        task, model, optimizer = trained
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(DoesNotFit):
            make_plan(task, model=model, optimizer=optimizer, memory_limit="40KiB", cache=False)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    def test_an_error_holds_no_model(self):
        made = []

        class Watched(Tagger):
            def model(self):
                model = super().model()
                made.append(weakref.ref(model))
                return model

        with pytest.raises(DoesNotFit) as caught:
            make_plan(Watched(), memory_limit="300KiB", device="cpu", cache=False)
        gc.collect()
        assert caught.value
        _, real = made  # the first is on the meta device and weighs nothing
        assert real() is None


class TestBadTasks:
    def test_dummy_and_loss_that_disagree(self):
        class Disagrees(Tagger):
            def dummy(self, rows, shape):
                return {"tokens": torch.zeros(rows, *shape, dtype=torch.long)}

        with pytest.raises(TaskError, match="its loss failed on a dummy batch of 2 rows of 64: KeyError: 'ids'"):
            make_plan(Disagrees(), memory_limit=LIMIT, device="cpu", cache=False)

    def test_a_dummy_of_the_wrong_number_of_rows(self):
        class Wrong(Tagger):
            def dummy(self, rows, shape):
                return super().dummy(rows + 1, shape)

        with pytest.raises(TaskError, match=r"dummy\(2, .*gave a batch of 3 rows"):
            make_plan(Wrong(), memory_limit=LIMIT, device="cpu", cache=False)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_loss_that_is_no_number_at_the_first_probe(self, value):
        class Broken(Tagger):
            def loss(self, model, batch):
                loss = super().loss(model, batch)
                return brimful.Loss(loss.sum * value, loss.count)

        with pytest.raises(TaskError, match=f"its loss is {value} at the first probe"):
            make_plan(Broken(), memory_limit=LIMIT, device="cpu", cache=False)

    def test_a_loss_that_is_no_loss(self):
        class Bare(Tagger):
            def loss(self, model, batch):
                return super().loss(model, batch).sum

        with pytest.raises(TaskError, match="returned a Tensor; return brimful.Loss"):
            make_plan(Bare(), memory_limit=LIMIT, device="cpu", cache=False)

    def test_a_loss_that_counts_nothing(self):
        class Empty(Tagger):
            def loss(self, model, batch):
                return brimful.Loss(super().loss(model, batch).sum, 0)

        with pytest.raises(TaskError, match="counted 0"):
            make_plan(Empty(), memory_limit=LIMIT, device="cpu", cache=False)


class TestTooSmallALimit:
    def test_smaller_than_the_weights(self):
        with pytest.raises(DoesNotFit, match="the weights and gradients take") as caught:
            make_plan(Tagger(), memory_limit="64KiB", device="cpu", cache=False)
        assert caught.value.needed_bytes > 64 * 1024

    def test_smaller_than_the_optimizer_state(self):
        with pytest.raises(DoesNotFit, match="before any row.*--memory-limit"):
            make_plan(Tagger(), memory_limit="200KiB", device="cpu", cache=False)

    def test_smaller_than_the_optimizer_state_advises_room_for_a_row(self):
        with pytest.raises(DoesNotFit, match="before any row") as caught:
            make_plan(Tagger(), memory_limit="200KiB", device="cpu", cache=False)
        (limit,) = re.findall(r"--memory-limit (\S+) or more", str(caught.value))
        assert make_plan(Tagger(), memory_limit=limit, device="cpu", cache=False).largest_micro_batch == 1

    def test_smaller_than_one_row_says_what_is_needed_and_that_suffices(self):
        with pytest.raises(DoesNotFit, match=r"1 row of 64 needs .*--memory-limit") as caught:
            make_plan(Tagger(), memory_limit="430KiB", device="cpu", cache=False, checkpointing="off", global_batch=1)
        needed = caught.value.needed_bytes
        assert make_plan(Tagger(), memory_limit=needed, device="cpu", cache=False, checkpointing="off", global_batch=1)


class TestWhatANewUserDoes:
    def test_a_mean_given_as_the_sum_is_recognised(self):
        class Mean(Tagger):
            def loss(self, model, batch):
                loss = super().loss(model, batch)
                return brimful.Loss(loss.sum / loss.count, len(batch["ids"]))

        with pytest.raises(TaskError, match="seems to be a mean"):
            make_plan(Mean(), memory_limit=LIMIT, device="cpu", cache=False)

    def test_a_shape_that_is_a_number_is_refused(self):
        class Number(Tagger):
            worst_shape = 16

        with pytest.raises(TaskError, match=r"worst_shape is 16; write a tuple"):
            make_plan(Number(), memory_limit=LIMIT, device="cpu", cache=False)

    def test_a_class_will_do_and_a_name_will_not(self):
        assert make_plan(Tagger, memory_limit=LIMIT, device="cpu", cache=False).task == "tagger"
        with pytest.raises(TaskError, match=r"fit takes a brimful\.Task, not a str"):
            make_plan("mine.py:task")

    def test_an_optimizer_at_fault_is_named(self):
        class Lbfgs(Tagger):
            def optimizer(self, model):
                return torch.optim.LBFGS(model.parameters())

        with pytest.raises(TaskError, match="its optimizer failed"):
            make_plan(Lbfgs(), memory_limit=LIMIT, device="cpu", cache=False)

    def test_more_than_the_host_has_is_refused(self):
        with pytest.raises(BadOption, match="--memory-limit 9000 TiB: this host has"):
            make_plan(Tagger(), memory_limit="9000TiB", device="cpu", cache=False)

    @pytest.mark.parametrize("limit", ["600KiB", "900KiB", "1200KiB", "1600KiB"])
    def test_a_limit_of_a_few_rows_is_met_without_an_oom(self, limit):
        assert make_plan(Tagger(), memory_limit=limit, device="cpu", cache=False).ooms == 0

    def test_the_limit_it_suggests_can_be_typed_and_suffices(self):
        with pytest.raises(DoesNotFit) as caught:
            make_plan(Tagger(), memory_limit="430KiB", device="cpu", cache=False, checkpointing="off")
        (limit,) = re.findall(r"--memory-limit (\S+) or more", str(caught.value))
        assert (
            make_plan(Tagger(), memory_limit=limit, device="cpu", cache=False, checkpointing="off").largest_micro_batch
            == 1
        )


class TestFewestCuts:
    def test_batch_norm_is_cut_as_little_as_memory_allows(self):
        plan = make_plan(Normed(), memory_limit="64MiB", device="cpu", cache=False, global_batch=64)
        assert (plan.micro_batch, plan.accumulation) == (64, 1)
        assert "fewest cuts" in plan.choice("micro_batch").reason

    def test_a_model_that_came_checkpointed_cannot_be_asked_off(self):
        class Checkpointed(Tagger):
            def model(self):
                model = super().model()
                model.is_gradient_checkpointing = True
                return model

        with pytest.raises(BadOption, match="--checkpointing off: the model came with it on"):
            make_plan(Checkpointed(), memory_limit=LIMIT, device="cpu", cache=False, checkpointing="off")

    def test_a_task_without_a_row_per_process_is_refused(self):
        class Empty(Tagger):
            global_batch = 0

        with pytest.raises(TaskError, match="its global_batch of 0 rows"):
            make_plan(Empty(), memory_limit=LIMIT, device="cpu", cache=False)


def test_checkpointing_that_was_never_run_is_not_called_measured():
    plan = make_plan(Tagger(), memory_limit="64MiB", device="cpu", cache=False)
    assert plan.choice("checkpointing").reason == "the whole step fits without it"
    assert plan.choice("checkpointing").basis == "predicted"


class OneShape(Tagger):
    """Rows of one length: only more of them tell what more of them cost."""

    worst_shape = ()

    def dummy(self, rows, shape):
        return super().dummy(rows, (64,))


class TestWhereHardlyARowFits:
    @pytest.mark.parametrize("task", [Tagger, OneShape])
    @pytest.mark.parametrize(("limit", "rows"), [("560KiB", 2), ("560KiB", 16), ("600KiB", 16), ("700KiB", 16)])
    def test_the_model_knows_what_more_rows_cost(self, task, limit, rows):
        plan = make_plan(task(), memory_limit=limit, device="cpu", cache=False, global_batch=rows)
        assert plan.one_more_predicted_peak_bytes > plan.budget_bytes >= plan.largest_measured_peak_bytes
        model = plan.memory_model
        assert model.peak_bytes(16, plan.shape) > 2 * model.peak_bytes(1, plan.shape)

    def test_a_size_is_not_given_up_for_what_does_not_grow_with_the_rows(self):
        plan = make_plan(Normed(), memory_limit="70KiB", device="cpu", cache=False, global_batch=16)
        assert (plan.largest_micro_batch, plan.ooms) == (16, 0)

    def test_checkpointing_that_is_slower_in_the_end_is_not_chosen(self, monkeypatch):
        speeds = iter((100.0, 200.0, 50.0))  # without; with it at the first size; with it at what then fits

        def find_fastest(step_rows, largest, *_, **__):
            timing = Timing(largest, -(-step_rows // largest), next(speeds), 0.1)
            return Speed(timing, (timing,))

        monkeypatch.setattr("brimful.planning.search.find_fastest", find_fastest)
        plan = make_plan(Tagger(), memory_limit="600KiB", device="cpu", cache=False, global_batch=16)
        assert (plan.levers.checkpointing, plan.rows_per_s) == ("off", 100.0)
        assert plan.choice("checkpointing").reason == "50 rows/s with it at 1 row, 100 without"
