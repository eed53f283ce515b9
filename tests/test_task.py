"""The contract of a task: what has a default, and what a task that lacks a part says."""

import dataclasses
from types import MappingProxyType

import pytest
import torch
from torch import nn

from brimful.errors import TaskError
from brimful.task import Loss, Task, terms_of, totals_of


class Bare(Task):
    """Defines nothing."""


def test_a_task_is_called_like_its_class():
    assert Bare.name == Bare().name == "Bare"


def test_a_task_keeps_the_name_it_gives_itself():
    class Named(Task):
        name = "my-task"

    assert Named().name == "my-task"


def test_a_variant_of_a_named_task_is_not_called_like_its_parent():
    class Named(Task):
        name = "my-task"

    class Variant(Named): ...

    assert Variant().name == "Variant"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda task: task.model(), "task Bare has no model(): define one that returns a torch.nn.Module"),
        (
            lambda task: task.loss(nn.Identity(), None),
            "task Bare has no loss(model, batch): define one that returns brimful.Loss(sum, count)",
        ),
        (
            lambda task: task.dummy(2, (8,)),
            "task Bare has no dummy(rows, shape): define one that returns a batch of that shape",
        ),
        (
            lambda task: task.rows("rows.parquet"),
            "task Bare does not read data itself: define rows(data); without it, `brimful plan` takes its worst shape and no DATA",
        ),
    ],
    ids=["model", "loss", "dummy", "rows"],
)
def test_a_missing_part_is_named_with_what_to_define(call, sentence):
    with pytest.raises(TaskError) as missing:
        call(Bare())
    assert str(missing.value) == sentence


def test_the_default_optimizer_leaves_frozen_weights_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).requires_grad_(False)
    model[1].requires_grad_(True)
    optimizer = Bare().optimizer(model)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [
        id(p) for p in model[1].parameters()
    ]


def test_the_default_optimizer_is_adamw_not_fused_on_the_cpu():
    optimizer = Bare().optimizer(nn.Linear(2, 1))
    assert type(optimizer) is torch.optim.AdamW
    assert not optimizer.param_groups[0]["fused"]


def test_rows_collate_into_one_batch():
    batch = Bare().collate([{"x": torch.tensor([1, 2]), "y": 3}, {"x": torch.tensor([4, 5]), "y": 6}])
    assert batch["x"].tolist() == [[1, 2], [4, 5]]
    assert batch["y"].tolist() == [3, 6]


def test_a_row_is_as_long_as_the_worst_one_unless_the_task_says_otherwise():
    class Text(Task):
        worst_shape = (128, 64)

    assert Text().shape("any row") == (128, 64)


def test_no_task_has_checkpointing_of_its_own_unless_it_says_so():
    assert Bare().checkpointing(nn.Linear(1, 1), True) is False


def test_a_loss_cannot_be_changed():
    loss = Loss(sum=torch.tensor(6.0), count=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loss.count = 1


def one(value: float = 2.0, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, requires_grad=True)


def test_a_single_loss_is_the_term_called_loss():
    loss = Loss(one(), 3)
    assert terms_of(Bare(), loss) == {"loss": loss}


def test_several_losses_keep_their_names_and_order():
    terms = {"tokens": Loss(one(), 3), "router": Loss(one(), torch.tensor(4))}
    found = terms_of(Bare(), MappingProxyType(terms))
    assert list(found.items()) == list(terms.items())
    assert type(found) is dict


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_sum_of_one_element_is_one_number(shape):
    assert list(terms_of(Bare(), Loss(one(2.0, *shape), torch.ones(shape)))) == ["loss"]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (one(), "Tensor"),
        ((one(), 3), "tuple"),
        (None, "NoneType"),
        ({}, "dict"),
        ({"a": one()}, "dict"),
        (2.0, "float"),
    ],
)
def test_what_is_no_loss_is_refused_with_what_to_return(given, kind):
    with pytest.raises(TaskError) as refused:
        terms_of(Bare(), given)
    assert str(refused.value) == (
        f"task Bare: its loss returned a {kind}; return brimful.Loss(sum=…, count=…), or several by name together with "
        "counts(batch)"
    )


@pytest.mark.parametrize(
    "total", [torch.tensor(2.0), one(2.0, 3), 2.0, one(2.0, 0)], ids=["cut off", "3", "float", "0"]
)
def test_a_sum_that_cannot_be_trained_is_refused(total):
    with pytest.raises(TaskError) as refused:
        terms_of(Bare(), Loss(total, 3))
    assert str(refused.value) == (
        "task Bare: Loss.sum must be one number that depends on the model's trainable weights"
    )


def test_a_term_that_is_at_fault_is_named():
    with pytest.raises(TaskError) as refused:
        terms_of(Bare(), {"tokens": Loss(one(), 1), "router": Loss(torch.tensor(1.0), 1)})
    assert str(refused.value).startswith("task Bare: 'router': Loss.sum must be one number")


def test_a_sum_without_a_graph_will_do_where_nothing_is_trained():
    assert list(terms_of(Bare(), Loss(torch.tensor(2.0), 3), to_train=False)) == ["loss"]


def test_even_where_nothing_is_trained_a_sum_is_one_number():
    with pytest.raises(TaskError):
        terms_of(Bare(), Loss(torch.ones(3), 3), to_train=False)


@pytest.mark.parametrize("count", [None, torch.ones(2)], ids=["none", "two"])
def test_a_count_that_is_not_one_number_is_refused(count):
    with pytest.raises(TaskError) as refused:
        terms_of(Bare(), Loss(one(), count))
    assert str(refused.value) == (f"task Bare: Loss.count must be one number, what the sum runs over; it is {count!r}")


@pytest.mark.parametrize("count", ["5", [5], {"n": 5}], ids=str)
def test_a_count_that_is_no_number_is_refused(count):
    with pytest.raises(TaskError):
        terms_of(Bare(), Loss(one(), count))


def test_totals_are_plain_numbers_by_name():
    found = totals_of(Bare(), {"tokens": torch.tensor(12), "rows": 3, "pairs": torch.tensor([0.5])})
    assert found == {"tokens": 12.0, "rows": 3.0, "pairs": 0.5}
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize(("given", "kind"), [(None, "NoneType"), ({}, "dict"), (5, "int"), ([("a", 1)], "list")])
def test_what_names_no_counts_is_refused(given, kind):
    with pytest.raises(TaskError) as refused:
        totals_of(Bare(), given)
    assert str(refused.value) == (
        f"task Bare: its counts(batch) returned a {kind}; return a number for each term of the loss"
    )


@pytest.mark.parametrize("count", [torch.ones(2), None, "many"], ids=["two", "none", "text"])
def test_a_total_that_is_not_one_number_is_refused(count):
    with pytest.raises(TaskError):
        totals_of(Bare(), {"tokens": count})
