"""The contract of a task: what has a default, and what a task that lacks a part says."""

import dataclasses

import pytest
import torch
from torch import nn

from brimful.errors import TaskError
from brimful.task import Loss, Task


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
            "task Bare does not read data itself: leave DATA out to fit its worst shape, or define rows(data)",
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
