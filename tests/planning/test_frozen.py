"""What freezing saves, on models small enough to count it by hand."""

import gc

import torch
from torch import nn

from brimful.memory.context import StepContext
from brimful.memory.ledger import simulated_memory
from brimful.planning.levers import frozen_choice
from brimful.task import Loss, Task

CPU = torch.device("cpu")


class Two(Task):
    """A layer of 64 → 256, GELU, a layer of 256 → 16; nothing else has weights."""

    worst_shape = (64,)

    def model(self):
        return nn.Sequential(nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 16, bias=False))

    def loss(self, model, batch):
        return Loss(model(batch).sum(), len(batch))

    def dummy(self, rows, shape):
        return torch.randn(rows, *shape)


def rig(task, freeze=(0,), optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)):
    """Stepped once, so that the optimizer has its state."""
    torch.manual_seed(0)
    model = task.model()
    for place in freeze:
        model[place].requires_grad_(False)
    made = StepContext(
        task=task,
        model=model,
        optimizer=optimizer([param for param in model.parameters() if param.requires_grad]),
        device=CPU,
        autocast=None,
    )
    made.step([task.dummy(2, task.worst_shape)], 2)
    return made


def test_where_all_weights_train_there_is_nothing_to_tell():
    assert frozen_choice(rig(Two(), freeze=()), (64,), 8) is None


def test_the_figures_add_up():
    choice = frozen_choice(rig(Two()), (64,), 32)
    weights = 64 * 256 * 4
    a_row = (64 + 256) * 4  # what the first layer multiplied, and what went into GELU
    assert weights == 64 * 1024 and 32 * a_row == 40 * 1024
    assert (choice.name, choice.requested, choice.effective, choice.basis) == (
        "frozen",
        None,
        "80% of the weights",
        "measured",
    )
    assert choice.reason.startswith(
        "saves 64 KiB of gradients and 64 KiB of optimizer state (counted), "
        "and 40 KiB of activations at 32 rows of 64 (predicted from 2"
    )


def test_adamw_keeps_twice_the_weights():
    choice = frozen_choice(rig(Two(), optimizer=torch.optim.AdamW), (64,), 32)
    assert "64 KiB of gradients and 128 KiB of optimizer state" in choice.reason


def test_a_frozen_head_saves_its_input():
    """The layers below still train, so their activations stay; what the head multiplied is no longer needed."""
    choice = frozen_choice(rig(Two(), freeze=(2,)), (64,), 32)
    assert choice.effective == "20% of the weights"
    assert "16 KiB of gradients" in choice.reason
    assert "32 KiB of activations" in choice.reason


class Inner(Two):
    """The head's input is kept by what makes it anyway."""

    def model(self):
        return nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 16, bias=False))


def test_a_frozen_part_whose_input_is_kept_by_others_saves_no_activations():
    assert "and 0 B of activations" in frozen_choice(rig(Inner(), freeze=(2,)), (64,), 32).reason


class Normed(Two):
    """With statistics that a forward changes, and numbers that it draws."""

    def model(self):
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 1))


def test_everything_is_as_before():
    made = rig(Normed())
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    trains = [param.requires_grad for param in made.model.parameters()]
    random_state = torch.get_rng_state()
    assert frozen_choice(made, (64,), 8) is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.model.state_dict().items())
    assert [param.requires_grad for param in made.model.parameters()] == trains
    assert all(param.grad is None for param in made.model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


class Whole(Two):
    """With a table of whole numbers among its frozen weights."""

    def model(self):
        model = super().model()
        model[0].table = nn.Parameter(torch.zeros(64, dtype=torch.int32), requires_grad=False)
        return model


def test_nothing_that_was_measured_lives_on():
    """A softmax keeps its own output: packed as it is, it would hold its graph, and the graph it, for ever."""

    class Weighing(Two):
        def model(self):
            return nn.Sequential(nn.Linear(64, 256, bias=False), nn.Softmax(-1), nn.Linear(256, 16, bias=False))

    made = rig(Weighing())
    before = _living()
    assert frozen_choice(made, (64,), 8) is not None
    assert _living() == before


def _living():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def test_weights_that_cannot_train_leave_the_activations_unknown():
    made = rig(Whole())
    choice = frozen_choice(made, (64,), 8)
    assert "activations" not in choice.reason and choice.reason.endswith("of optimizer state (counted)")
    assert not any(param.requires_grad for param in made.model[0].parameters())


def test_without_the_memory_to_measure_them_activations_are_unknown():
    made = rig(Two())
    with simulated_memory("1KiB") as memory:
        choice = frozen_choice(made, (64,), 8)
    assert memory.ooms
    assert "activations" not in choice.reason
    assert not made.model[0].weight.requires_grad


def test_under_autocast_half_as_much_is_held():
    made = rig(Two())
    made.autocast = torch.bfloat16
    assert "20 KiB of activations" in frozen_choice(made, (64,), 32).reason
