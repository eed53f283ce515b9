"""Attention leaves cuDNN's kernels once batches prove to come in many shapes, on a card, and not against a wish."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from brimful.step.checks import MANY, Shapes
from brimful.step.interface import Events
from brimful.step.stepper import Stepper
from brimful.task import Loss


def run(shapes, device="cuda", asked=False):
    rig, events = SimpleNamespace(device=torch.device(device), cudnn_attention=True), Events(None)
    watch = Shapes(rig, events, asked=asked)
    switched = []
    for number, shape in enumerate(shapes):
        batch = {"x": torch.empty(*shape), "y": torch.empty(shape[0])}
        assert watch.noted(number, batch) is batch
        switched.append(rig.cudnn_attention)
    return switched, [event.sentence for event in events.kept]


def test_many_shapes_switch_it_off_and_say_so_once():
    on, notes = run([(4, 10 + number) for number in range(MANY + 5)])
    assert on == [True] * MANY + [False] * 5
    assert len(notes) == 1 and f"{MANY + 1} shapes" in notes[0]


@pytest.mark.parametrize("how", [{"device": "cpu"}, {"asked": True}])
def test_elsewhere_and_against_a_wish_nothing_happens(how):
    on, notes = run([(4, 10 + number) for number in range(MANY + 5)], **how)
    assert all(on) and not notes


def test_few_shapes_again_and_again_are_no_reason():
    on, notes = run([(rows, 10) for rows in (8, 4, 2)] * 20)
    assert all(on) and not notes


def test_a_checkpoint_remembers_it_unless_it_is_asked_for_now():
    def stepper(device="cuda", asked=False):
        model = nn.Linear(3, 1)
        made = Stepper(model, torch.optim.SGD(model.parameters()), lambda model, batch: Loss(model(batch).sum(), 1))
        made._rig.device = torch.device(device)
        made._shapes = Shapes(made._rig, made._events, asked=asked)
        return made

    first = stepper()
    assert first.state_dict()["many_shapes"] is False
    first._shapes.switch_off()
    for how, on in (({}, False), ({"device": "cpu"}, True), ({"asked": True}, True)):
        later = stepper(**how)
        later.load_state_dict(first.state_dict())
        assert later._rig.cudnn_attention is on
    old = {name: value for name, value in first.state_dict().items() if name != "many_shapes"}
    later = stepper()
    later.load_state_dict(old)
    assert later._rig.cudnn_attention
