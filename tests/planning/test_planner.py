"""`plan`: what it takes, what it returns, what it leaves behind, which plans it reuses, and what it refuses."""

import gc
import inspect
import os
import random
import re
import weakref
from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pytest
import torch

import brimful
from brimful.errors import BadOption, DoesNotFit, TaskError
from brimful.planning import planner, target
from brimful.planning.plan_options import PlanOptions
from brimful.planning.planner import plan
from brimful.task import Task
from tests.planning.small import LIMIT, Normed, Tagger, Texts, small_plan, texts


class TestThePlan:
    def test_no_oom_on_the_way(self, tagger_plan):
        assert tagger_plan.ooms == 0

    def test_the_prediction_was_right(self, tagger_plan):
        plan = tagger_plan
        assert plan.predicted_peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.03)
        assert plan.largest_predicted_peak_bytes == pytest.approx(plan.largest_measured_peak_bytes, rel=0.03)

    def test_the_budget_holds_and_one_row_more_would_break_it(self, tagger_plan):
        plan = tagger_plan
        assert max(plan.largest_measured_peak_bytes, plan.measured_peak_bytes) <= plan.budget_bytes
        assert plan.one_more_predicted_peak_bytes > plan.budget_bytes

    def test_the_largest_size_runs_under_the_limit_and_twice_as_many_rows_do_not(self, tagger_plan):
        task = Tagger()
        model = task.model()
        optimizer = task.optimizer(model)

        def step(rows):
            for _ in range(2):  # gradients of the first are held during the second
                task.loss(model, task.dummy(rows, task.worst_shape)).sum.backward()
            optimizer.step()
            optimizer.zero_grad()

        step(1)
        with brimful.simulated_memory(LIMIT):
            step(tagger_plan.largest_micro_batch)
        with pytest.raises(torch.OutOfMemoryError), brimful.simulated_memory(LIMIT):
            step(2 * tagger_plan.largest_micro_batch)

    def test_the_global_batch_is_exact(self, tagger_plan):
        plan = tagger_plan
        assert plan.global_batch == 50
        assert plan.micro_batch * (plan.accumulation - 1) < 50 <= plan.micro_batch * plan.accumulation

    def test_250_rows_on_3_processes_are_84_83_83(self):
        plan = small_plan(global_batch=250, processes=3)
        assert plan.deal == (84, 83, 83)
        assert plan.accumulation == -(-84 // plan.micro_batch)

    @pytest.mark.parametrize(
        "options", [{"micro_batch": 7}, {"precision": "bf16"}, {"fill": 0.5}, {"global_batch": 33}], ids=str
    )
    def test_what_is_set_is_kept(self, options):
        plan = small_plan(**options)
        (name, value), *_ = options.items()
        assert (plan.levers.precision if name == "precision" else getattr(plan, name)) == value

    def test_a_model_of_fixed_input_size_is_planned_by_rows_alone(self):
        class Fixed(Tagger):
            def loss(self, model, batch):
                assert batch["ids"].shape[1] == 64, "only 64 tokens"
                return super().loss(model, batch)

        plan = small_plan(Fixed())
        assert {probe.shape for probe in plan.memory_model.probes} == {(64,)}
        assert any("only the worst shape" in warning for warning in plan.warnings)

    def test_lengths_may_be_a_list(self):
        assert small_plan(lengths=[32], memory_limit="600KiB").shape == (32,)

    def test_a_class_is_a_task(self):
        assert small_plan(Tagger, global_batch=2).task == "tagger"


ROWS = texts(*range(3, 33), 32, 31, 7)


@pytest.fixture(scope="module")
def from_list():
    return small_plan(Texts(), data=ROWS)


class TestData:
    class Reading(Texts):
        def rows(self, data):
            return ROWS if data == "rows.txt" else []

    def test_a_task_without_dummy_is_probed_with_rows_of_the_data(self, from_list):
        assert from_list.shape == (32,) and from_list.ooms == 0
        assert {probe.shape for probe in from_list.memory_model.probes} <= {(len(row),) for row in ROWS}
        assert from_list.predicted_peak_bytes == pytest.approx(from_list.measured_peak_bytes, rel=0.03)
        assert from_list.one_more_predicted_peak_bytes is None or (
            from_list.one_more_predicted_peak_bytes > from_list.budget_bytes
        )

    def test_a_loss_that_counts_tokens_is_exact_on_rows_of_different_lengths(self, from_list):
        assert from_list.choice("exactness").effective == "exact"

    @pytest.mark.parametrize("kind", ["path", "dataset", "datasets"])
    def test_data_may_be_a_path_or_any_dataset(self, from_list, kind, tmp_path):
        if kind == "datasets":
            datasets = pytest.importorskip("datasets")
            data = datasets.Dataset.from_dict({"ids": [row.tolist() for row in ROWS]})

            class Task(Texts):
                def shape(self, row):
                    return (len(row["ids"]),)

                def collate(self, rows):
                    return super().collate([torch.tensor(row["ids"]) for row in rows])

            task = Task()
        elif kind == "path":
            task, data = self.Reading(), "rows.txt"
        else:

            class Data(torch.utils.data.Dataset):
                def __len__(self):
                    return len(ROWS)

                def __getitem__(self, index):
                    return ROWS[index]

            task, data = Texts(), Data()
        plan = small_plan(task, data=data)
        assert plan.shape == (32,) and plan.host.workers is not None
        assert plan.largest_micro_batch == from_list.largest_micro_batch

    def test_the_callers_task_is_not_changed(self):
        task = Texts()
        before = dict(vars(task))
        small_plan(task, data=ROWS, global_batch=2)
        assert vars(task) == before

    def test_a_task_with_dummy_is_planned_for_the_longest_row(self):
        class WithRows(Tagger):
            def shape(self, row):
                return (len(row["ids"]),)

            def collate(self, rows):
                return {"ids": Texts().collate([row["ids"] for row in rows]).clamp(min=0)}

        rows = [{"ids": ids} for ids in texts(10, 20, 33)]
        assert small_plan(WithRows(), data=rows, global_batch=4).shape == (33,)

    @pytest.mark.parametrize("with_dummy", [True, False])
    def test_rows_of_a_task_without_shape_are_not_all_read(self, with_dummy):
        class Images:
            def __init__(self):
                self.read = set()

            def __len__(self):
                return 10_000

            def __getitem__(self, index):
                self.read.add(index)
                return torch.full((64,), index % 100)

        class NoShape(Texts):
            shape, worst_shape = Task.shape, (64,)

        if with_dummy:
            NoShape.dummy = lambda self, rows, shape: torch.randint(0, 100, (rows, *shape))
        images = Images()
        assert small_plan(NoShape(), data=images, global_batch=4).shape == (64,)
        assert len(images.read) < 1_000

    def test_neither_dummy_nor_data_is_refused(self):
        with pytest.raises(TaskError, match=r"no dummy\(\).*give data, or define dummy"):
            small_plan(Texts())

    def test_no_rows_are_refused(self):
        with pytest.raises(TaskError, match="data= has no rows"):
            small_plan(Texts(), data=[])
        with pytest.raises(TaskError, match="empty.txt has no rows"):
            small_plan(self.Reading(), data="empty.txt")

    def test_a_plain_mean_over_tokens_is_weighted_by_rows_and_the_plan_says_so(self):
        class Mean(Texts):
            def loss(self, model, batch):
                return self.token_losses(model, batch).sum() / (batch >= 0).sum()

        plan = small_plan(Mean(), data=ROWS, micro_batch=4)
        choice = plan.choice("exactness")
        assert choice.effective == "weighted by rows" and "plain mean weighted by rows" in choice.reason
        assert any("return (mean, count)" in warning for warning in plan.warnings)


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
        plan(task, model=model, optimizer=optimizer, memory_limit=LIMIT, cache=False)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not any(module.training for module in model.modules())
        assert all(p.grad is None for p in model.parameters())

    def test_optimizer_state(self, trained):
        task, model, optimizer = trained
        before = [{k: torch.as_tensor(v).clone() for k, v in state.items()} for state in optimizer.state.values()]
        plan(task, model=model, optimizer=optimizer, memory_limit=LIMIT, cache=False)
        after = list(optimizer.state.values())
        assert len(before) == len(after) > 0
        for old, new in zip(before, after, strict=True):
            assert all(torch.equal(old[key], torch.as_tensor(new[key])) for key in old)

    def test_a_fresh_optimizer_stays_fresh(self):
        task = Tagger()
        model = task.model()
        optimizer = task.optimizer(model)
        plan(task, model=model, optimizer=optimizer, memory_limit=LIMIT, cache=False)
        assert not optimizer.state

    def test_random_state(self):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        expected = random.random(), np.random.rand(), torch.rand(3)
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        plan(Tagger(), memory_limit=LIMIT, device="cpu", cache=False)
        assert (random.random(), np.random.rand()) == expected[:2]
        assert torch.equal(torch.rand(3), expected[2])

    def test_a_lever_is_switched_off_again(self):
        task = Tagger()
        model = task.model()
        plan(task, model=model, memory_limit=LIMIT, cache=False, checkpointing="on")
        assert not any("forward" in vars(module) for module in model.modules())

    def test_also_after_a_failure(self, trained):
        task, model, optimizer = trained
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(DoesNotFit):
            plan(task, model=model, optimizer=optimizer, memory_limit="40KiB", cache=False)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    def test_an_error_holds_no_model(self):
        made = []

        class Watched(Tagger):
            def model(self):
                model = super().model()
                made.append(weakref.ref(model))
                return model

        with pytest.raises(DoesNotFit) as caught:
            plan(Watched(), memory_limit="300KiB", device="cpu", cache=False)
        gc.collect()
        assert caught.value
        _, real = made  # the first is on the meta device and weighs nothing
        assert real() is None


class TestBadTasks:
    def test_dummy_and_loss_that_disagree(self):
        class Disagrees(Tagger):
            def dummy(self, rows, shape):
                return {"tokens": torch.zeros(rows, *shape, dtype=torch.long)}

        with pytest.raises(TaskError, match=r"loss\(\) failed on a probe batch of 2 rows of 64 at .*: KeyError: 'ids'"):
            small_plan(Disagrees())

    def test_a_dummy_of_the_wrong_number_of_rows(self):
        class Wrong(Tagger):
            def dummy(self, rows, shape):
                return super().dummy(rows + 1, shape)

        with pytest.raises(TaskError, match=r"dummy\(2, .*returned 3 rows"):
            small_plan(Wrong())

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_loss_that_is_not_finite_at_the_first_probe(self, value):
        class Broken(Tagger):
            def loss(self, model, batch):
                loss = super().loss(model, batch)
                return brimful.Loss(loss.sum * value, loss.count)

        with pytest.raises(TaskError, match=rf"loss\(\) is {value} before any training"):
            small_plan(Broken())

    def test_a_loss_that_counts_nothing(self):
        class Empty(Tagger):
            def loss(self, model, batch):
                return brimful.Loss(super().loss(model, batch).sum, 0)

        with pytest.raises(TaskError, match="counted 0"):
            small_plan(Empty())

    def test_a_mean_given_as_the_sum(self):
        class Mean(Tagger):
            def loss(self, model, batch):
                loss = super().loss(model, batch)
                return brimful.Loss(loss.sum / loss.count, len(batch["ids"]))

        with pytest.raises(TaskError, match="seems to be a mean"):
            small_plan(Mean())

    def test_a_worst_shape_that_is_a_number(self):
        class Number(Tagger):
            worst_shape = 16

        with pytest.raises(TaskError, match=r"worst_shape is 16\. Try: a tuple"):
            small_plan(Number())

    def test_a_chunked_loss_that_names_no_layouts(self):
        class Chunked(Tagger):
            chunked_loss = True

        with pytest.raises(TaskError, match=r"chunked_loss is True\. Try: a tuple of layouts"):
            small_plan(Chunked())

    def test_a_name_is_not_a_task(self):
        with pytest.raises(TaskError, match=r"plan\(\) was called with a str"):
            plan("mine.py:task")

    def test_an_optimizer_that_fails(self):
        class Lbfgs(Tagger):
            def optimizer(self, model):
                return torch.optim.LBFGS(model.parameters())

        with pytest.raises(TaskError, match=r"optimizer\(\) failed"):
            small_plan(Lbfgs())

    def test_a_global_batch_without_a_row_for_each_process(self):
        class Empty(Tagger):
            global_batch = 0

        with pytest.raises(TaskError, match="global_batch=0 gives 1 processes less than a row each"):
            small_plan(Empty())

    def test_an_optimizer_without_its_model(self):
        model = Tagger().model()
        with pytest.raises(BadOption, match="optimizer= needs its model"):
            plan(Tagger(), optimizer=torch.optim.SGD(model.parameters()))


class TestTooSmallALimit:
    def test_smaller_than_the_weights(self):
        with pytest.raises(DoesNotFit, match="weights and gradients alone take") as caught:
            small_plan(memory_limit="64KiB")
        assert caught.value.needed_bytes > 64 * 1024

    def test_smaller_than_the_optimizer_state_suggests_room_for_a_row(self):
        with pytest.raises(DoesNotFit, match="before any row") as caught:
            small_plan(memory_limit="200KiB")
        assert small_plan(memory_limit=suggested(caught.value)).largest_micro_batch == 1

    def test_smaller_than_one_row_suggests_a_limit_that_suffices(self):
        with pytest.raises(DoesNotFit, match="1 row of 64 needs ") as caught:
            small_plan(memory_limit="430KiB", checkpointing="off")
        for limit in (suggested(caught.value), caught.value.needed_bytes):
            assert small_plan(memory_limit=limit, checkpointing="off").largest_micro_batch == 1


def suggested(error):
    (limit,) = re.findall(r'memory_limit="(\S+)"', str(error))
    return limit


class TestSavedPlans:
    class Wider(Tagger):
        def model(self):
            model = super().model()
            model.head = torch.nn.Linear(64, 101)
            return model

    def saved(self, task=None, **options):
        """A plan that takes no time to speak of: what decides is the key."""
        return small_plan(task, **{"cache": True, "global_batch": 2, "memory_limit": "2MiB", **options})

    def test_a_hit_runs_no_probe_and_is_the_same_plan(self):
        first, phrases = self.saved(), []
        second = self.saved(progress=phrases.append)
        assert second.cached and not first.cached
        assert not phrases
        assert second.to_json() | {"cached": False} == first.to_json()

    def test_a_changed_key_makes_a_new_plan(self):
        self.saved()
        changes = [
            {"memory_limit": "3MiB"}, {"fill": 0.8}, {"global_batch": 3}, {"micro_batch": 2}, {"checkpointing": "off"},
            {"precision": "bf16"}, {"lengths": (32,)}, {"processes": 2}, {"task": self.Wider()},
        ]  # fmt: skip
        assert [change for change in changes if self.saved(**change).cached] == []

    def test_the_same_limit_in_other_units_is_a_hit(self):
        self.saved(memory_limit="2MiB")
        assert self.saved(memory_limit=2 * 2**20).cached

    def test_another_torch_is_a_miss(self, monkeypatch):
        self.saved()
        monkeypatch.setattr(torch, "__version__", "9.9")
        assert not self.saved().cached

    def test_without_the_cache_nothing_is_read_or_written(self):
        self.saved(cache=False)
        assert not planner.cache_folder().exists()
        self.saved()
        assert not self.saved(cache=False).cached

    def test_a_plan_for_what_was_free_is_reused_only_while_it_is(self, monkeypatch):
        free = [10 * 2**20]
        monkeypatch.setattr(target, "_host_free", lambda *_: (free[0], "what is free"))
        self.saved(memory_limit=None)
        assert self.saved(memory_limit=None).cached
        free[0] = 9 * 2**20
        assert not self.saved(memory_limit=None).cached
        free[0] = 20 * 2**20
        assert not self.saved(memory_limit=None).cached

    def test_a_broken_file_is_replaced(self):
        key = self.saved().key
        (planner.cache_folder() / f"{key}.json").write_text("{")
        assert not self.saved().cached
        assert self.saved().cached

    def test_a_folder_that_cannot_be_written_is_a_warning(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("BRIMFUL_CACHE", str(tmp_path / "file"))
        assert any("could not be saved" in warning for warning in self.saved().warnings)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs RLIMIT_FSIZE")
    def test_a_full_disk_leaves_no_half_file_and_the_plan_is_returned(self):
        import resource
        import signal

        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            plan = self.saved()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert plan.micro_batch >= 1
        assert any("could not be saved" in warning for warning in plan.warnings)
        assert not list(planner.cache_folder().iterdir())


def test_the_keywords_of_plan_are_the_fields_of_its_options():
    """With the same types and defaults, so that an option added in one place cannot be forgotten in the other."""
    hints, signature = get_type_hints(plan), inspect.signature(plan)
    own = {"task", "data", "model", "optimizer", "quiet", "progress"}
    keywords = {name: (hints[name], one.default) for name, one in signature.parameters.items() if name not in own}
    option_hints = get_type_hints(PlanOptions)
    assert keywords == {one.name: (option_hints[one.name], one.default) for one in fields(PlanOptions)}


def test_no_lengths_for_rows_without_any_are_no_mistake():
    result = plan(Normed(), lengths=(), memory_limit=LIMIT, global_batch=4, device="cpu", cache=False)
    assert result.shape == ()


def test_a_lazy_model_is_refused_with_what_to_do():
    class Lazy(Tagger):
        def model(self):
            return torch.nn.Sequential(torch.nn.LazyLinear(4))

    with pytest.raises(
        TaskError, match=r"the weights of LazyLinear \('0'\) have no shape before a first forward. Try: run a"
    ):
        small_plan(Lazy())
