"""Evaluation: the exact mean over all rows however they are cut and shared out, and a training that never notices."""

import random
import threading

import numpy as np
import pytest
import torch

from brimful.errors import BadOption, DoesNotFit, TaskError, UserError
from brimful.memory.ledger import simulated_memory
from brimful.step.distributed import SingleProcess
from brimful.step.stepper import Stepper
from brimful.task import Loss, loss_terms
from brimful.training.evaluate import Evaluator, choose
from brimful.units import KiB
from tests.step.small import TwoTerms, Words, steps_of_rows

CPU = torch.device("cpu")
ROWS = [row for rows in steps_of_rows(steps=5, rows=12) for row in rows]


def evaluator(task, model, rows=ROWS, **options):
    return Evaluator(task, model, rows, device=CPU, **options)


def plain_loss(task, model, rows=ROWS):
    """All rows in one batch."""
    with torch.no_grad():
        batch = task.collate(rows)
        terms = loss_terms(task, task.loss(model.eval(), batch), model=model, batch=batch, needs_grad=False)
    return sum(float(term.sum / term.count) for term in terms.values())


@pytest.mark.parametrize("kind", [Words, TwoTerms])
@pytest.mark.parametrize("limit", [None, "600KiB", "100KiB"])
def test_the_mean_loss_is_that_of_all_rows_at_once_for_any_cut(kind, limit):
    task = kind()
    model = task.model()
    with simulated_memory(limit or "1GiB") as memory:
        memory.adopt(model.parameters())
        found = evaluator(task, model).run()
    assert found.loss == pytest.approx(plain_loss(task, model), rel=1e-12)
    assert found.rows == 60
    assert found.batches > (4 if limit == "100KiB" else 1)


def test_several_terms_are_told_apart():
    task = TwoTerms()
    found = evaluator(task, task.model()).run()
    assert set(found.terms) == {"words", "rows"}
    assert found.loss == sum(found.terms.values())
    assert found.perplexity is None
    assert found.count == 60 + sum(len(row["words"]) for row in ROWS)


def test_one_term_has_a_perplexity():
    task = Words()
    found = evaluator(task, task.model()).run()
    assert found.perplexity == pytest.approx(np.exp(found.loss))
    assert found.count == sum(len(row["words"]) for row in ROWS)


def test_a_loss_that_counts_rows_has_no_perplexity():
    class Scored(Words):
        def loss(self, model, batch):
            return model(batch["words"]).square().mean()

    assert evaluator(Scored(), Words().model()).run().perplexity is None


def test_an_infinite_perplexity_is_none():
    class Huge(Words):
        def loss(self, model, batch):
            return Loss(torch.tensor(1e6 * len(batch["words"])), len(batch["words"]))

    found = evaluator(Huge(), Words().model()).run()
    assert (found.loss, found.perplexity) == (1e6, None)


def test_the_rows_are_chosen_by_the_seed_and_stay_the_same():
    task = Words()
    model = task.model()
    first = evaluator(task, model, max_rows=10, seed=3)
    again = evaluator(task, model, max_rows=10, seed=3)
    other = evaluator(task, model, max_rows=10, seed=4)
    assert first.rows.indices == again.rows.indices != other.rows.indices
    assert (
        first.run().loss
        == first.run().loss
        == pytest.approx(plain_loss(task, model, [ROWS[place] for place in first.rows.indices]), rel=1e-12)
    )


@pytest.mark.parametrize(("rows", "most", "count"), [(5, None, 5), (5, 9, 5), (5, 5, 5), (10**9, 4, 4)])
def test_a_choice_is_ascending_and_without_repeats(rows, most, count):
    chosen = list(choose(rows, most, seed=1))
    assert len(chosen) == len(set(chosen)) == count
    assert chosen == sorted(chosen)


def test_training_goes_on_bit_for_bit_after_an_evaluation():
    def trained(evaluate):
        task = Words(dropout=0.3)
        model = task.model()
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-2), task)
        watch, noise = evaluator(task, model), []
        for rows in steps_of_rows(steps=4):
            stepper.step(rows)
            if evaluate:
                watch.run()
            noise.append((random.random(), np.random.rand(), float(torch.rand(()))))
        assert model.training
        return noise, [param.detach().clone() for param in model.parameters()]

    (plain_noise, plain), (noise, weights) = trained(False), trained(True)
    assert noise == plain_noise
    assert all(torch.equal(one, other) for one, other in zip(plain, weights, strict=True))


def test_a_collate_that_draws_draws_the_same_each_time():
    class Masked(Words):
        def collate(self, rows):
            batch = super().collate(rows)
            batch["labels"][torch.rand(batch["labels"].shape) < random.random()] = -100
            return batch

    task = Masked()
    model = task.model()
    watch = evaluator(task, model)
    first = watch.run().loss
    torch.rand(1), random.random()
    assert watch.run().loss == first != evaluator(task, model, seed=1).run().loss


def test_gradients_that_wait_are_left_alone():
    task = Words()
    model = task.model()
    task.loss(model, task.collate(ROWS[:4])).sum.backward()
    before = [param.grad.clone() for param in model.parameters()]
    evaluator(task, model).run()
    assert all(torch.equal(one, param.grad) for one, param in zip(before, model.parameters(), strict=True))


class Hungry(Words):
    """Takes more on real rows than on dummies, so that no probe could have known."""

    def loss(self, model, batch):
        if batch["id"].max() > 20:
            torch.zeros(len(batch["words"]), 4000)
        return super().loss(model, batch)


def test_out_of_memory_is_survived_counted_and_told():
    task, told = Hungry(), []
    model = task.model()
    with simulated_memory(400 * KiB) as memory:
        memory.adopt(model.parameters())
        found = evaluator(task, model, note=told.append).run()
    assert found.loss == pytest.approx(plain_loss(task, model), rel=1e-12)
    assert found.ooms == memory.ooms == len(told) > 0


def test_a_row_that_does_not_fit_is_named_by_its_place_in_the_data():
    task = Words()
    model = task.model()
    rows = [*ROWS[:5], {"words": torch.ones(5000, dtype=torch.long), "id": 5}]
    watch = evaluator(task, model, rows)
    watch._forward.fit((40,))
    with simulated_memory(300 * KiB) as memory:
        memory.adopt(model.parameters())
        with pytest.raises(DoesNotFit, match="evaluation: row 5 of 5000 does not fit"):
            watch.run()


class Team:
    """Two processes as two threads that meet at every agreement."""

    def __init__(self, size=2):
        self.size, self.barrier, self.table = size, threading.Barrier(size, timeout=20), {}

    def member(self, rank):
        team = self

        class Member(SingleProcess):
            def gather_objects(self, value):
                team.table[rank] = value
                team.barrier.wait()
                found = [team.table[one] for one in range(team.size)]
                team.barrier.wait()
                return found

            def gather(self, values):
                return self.gather_objects(list(values))

        member = Member()
        member.rank, member.size = rank, self.size
        return member

    def run(self, work):
        found = [None] * self.size

        def one(rank):
            try:
                found[rank] = work(rank, self.member(rank))
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.mark.parametrize(("rows", "size"), [(ROWS, 2), (ROWS[:2], 3)])
def test_processes_share_the_rows_and_agree(rows, size):
    task = TwoTerms()
    models = [task.model() for _ in range(size)]
    found = Team(size).run(lambda rank, group: evaluator(task, models[rank], rows, group=group).run())
    assert {one.loss for one in found} == {found[0].loss}
    assert found[0].loss == pytest.approx(plain_loss(task, models[0], rows), rel=1e-12)
    assert found[0].rows == len(rows)


def test_where_one_process_fails_all_stop_with_its_sentence():
    class Failing(Words):
        def loss(self, model, batch):
            if batch["id"].min() < 0:
                raise ValueError("a bad row")
            return super().loss(model, batch)

    task = Failing()
    models = [task.model(), task.model()]
    rows = [ROWS[0], {**ROWS[1], "id": -1}, *ROWS[2:4]]
    first, second = Team().run(lambda rank, group: evaluator(task, models[rank], rows, group=group)._loss())
    assert isinstance(second, TaskError) and "a bad row" in str(second)
    assert isinstance(first, UserError) and str(first) == str(second)


class Measured(Words):
    def evaluate(self, model, rows, context):
        assert not model.training and not torch.is_grad_enabled()
        found = context.share(len(rows), lambda places: [rows[place]["id"] for place in places])
        assert found == [row["id"] for row in rows]
        context.cache["seen"] = context.cache.get("seen", 0) + 1
        return {"ids": sum(found), "seen": context.cache["seen"]}


@pytest.mark.parametrize("size", [1, 2])
def test_a_task_measures_more_on_some_of_the_rows(size):
    task = Measured()
    models = [task.model() for _ in range(size)]

    def twice(rank, group):
        watch = evaluator(task, models[rank], max_rows=20, generate_rows=7, group=group)
        return watch.run(), watch.run(), watch

    for first, again, watch in Team(size).run(twice):
        ids = [ROWS[place]["id"] for place in watch.rows.indices]
        assert first.generate_rows == 7 and first.metrics["ids"] == again.metrics["ids"]
        assert first.metrics["ids"] != sum(ids[:7]), "some of them, not the first of them"
        assert again.metrics["seen"] == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), ValueError("no")])
@pytest.mark.parametrize("inside_share", [False, True])
def test_an_error_in_a_tasks_own_scores_is_one_message_on_all_ranks(error, inside_share):
    class Failing(Words):
        def evaluate(self, model, rows, context):
            if context.group.rank == 0 and not inside_share:
                raise error

            def ids(places):
                if context.group.rank == 0:
                    raise error
                return list(places)

            return {"ids": sum(context.share(len(rows), ids))}

    task = Failing()
    models = [task.model(), task.model()]

    def run(rank, group):
        with pytest.raises(UserError) as failure:
            evaluator(task, models[rank], group=group).run()
        assert group.gather_objects(rank) == [0, 1], "the ranks are still in step"
        return str(failure.value)

    first, second = Team().run(run)
    assert first == second and first.startswith("task Failing: evaluate() ")


def test_no_rows_for_it_means_it_is_not_asked():
    task = Measured()
    assert evaluator(task, task.model(), generate_rows=0).run().metrics == {}


def test_the_result_is_json():
    import json

    task = Words()
    found = json.loads(json.dumps(evaluator(task, task.model()).run().to_json()))
    assert found["forward"]["evaluation"]["batches"] == found["batches"] > 0
    assert found["peak_bytes"] is None


def test_a_loss_that_counts_nothing_is_the_tasks_fault():
    class Nothing(Words):
        def loss(self, model, batch):
            return Loss(torch.zeros(()), 0)

    with pytest.raises(TaskError, match="counted nothing"):
        evaluator(Nothing(), Words().model()).run()


def test_mistakes_are_told_before_any_work():
    task = Words()
    with pytest.raises(TaskError, match="no rows to evaluate on"):
        evaluator(task, task.model(), [])
    with pytest.raises(BadOption, match="max_rows=0"):
        evaluator(task, task.model(), max_rows=0)


def test_an_error_in_the_users_code_names_the_part():
    class Broken(Words):
        def collate(self, rows):
            raise KeyError("ids")

        def dummy(self, rows, shape):
            return Words().dummy(rows, shape)

    with pytest.raises(TaskError, match=r"collate\(\) failed at .*test_evaluate.py:\d+: KeyError"):
        evaluator(Broken(), Words().model()).run()
