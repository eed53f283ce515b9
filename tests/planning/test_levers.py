"""Checkpointing attaches to the model by whatever way there is, changes no gradient, and comes off without a trace."""

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from brimful.memory.ledger import Ledger
from brimful.planning.levers import checkpointing, cudnn_attention, repeated_blocks
from brimful.planning.plan import Plan
from brimful.planning.planner import plan as make_plan
from brimful.step.stepper import Stepper
from brimful.task import Task
from tests.planning.small import Normed, Tagger


def gradients(task, model, on):
    torch.manual_seed(0)
    batch = task.dummy(4, task.worst_shape)
    with checkpointing(task, model).set(on):
        task.loss(model, batch).sum.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def test_the_gradient_is_the_same_to_the_bit():
    task = Tagger()
    model = task.model()
    assert all(map(torch.equal, gradients(task, model, False), gradients(task, model, True)))


def test_repeated_blocks_of_a_module_list_are_found():
    assert len(repeated_blocks(Tagger().model())) == 2


def test_blocks_of_two_stacks_are_found_once_each():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 1, 8) for _ in range(2))
            self.decoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 1, 8) for _ in range(3))

    found = repeated_blocks(Two())
    assert len(found) == len(set(map(id, found))) == 5


def test_batch_norm_in_the_blocks_is_not_offered():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
    lever = checkpointing(Normed(), model)
    assert not lever.offered
    assert "BatchNorm" in lever.how


def test_no_blocks_says_why():
    assert "no repeated blocks" in checkpointing(Task(), nn.Linear(2, 2)).how


def test_the_tasks_own_hook_comes_first():
    class Hooked(Tagger):
        switched: list = []  # noqa: RUF012

        def checkpointing(self, model, on):
            self.switched.append(on)
            return True

    task = Hooked()
    with checkpointing(task, task.model()).set(True):
        pass
    assert task.switched == [False, True, False]


def t5():
    config = T5Config(vocab_size=50, d_model=16, d_ff=16, d_kv=8, num_heads=2, num_layers=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def peak(model):
    ids = torch.randint(2, 50, (4, 16))
    with Ledger() as ledger:
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    return ledger.peak_bytes


def test_a_frozen_hugging_face_encoder_costs_no_more_after_on_and_off():
    model = t5()
    model.encoder.requires_grad_(False)
    model.shared.requires_grad_(False)
    before = peak(model)
    lever = checkpointing(Task(), model)
    with lever.set(True):
        on = peak(model)
    assert peak(model) == before > on


def test_a_model_that_came_with_it_on_stays_so():
    model = t5()
    model.gradient_checkpointing_enable()
    lever = checkpointing(Task(), model)
    assert lever.already_on and not lever.offered


def test_cudnn_attention_is_off_where_shapes_vary_on_a_card():
    card, cpu = torch.device("cuda"), torch.device("cpu")
    assert cudnn_attention("auto", card, (256, 256))[0] == "off"
    assert cudnn_attention("auto", card, ()) == ("on", "left to torch: all rows have one shape")
    assert cudnn_attention("auto", cpu, (256,))[0] == "on"
    assert [cudnn_attention(asked, card, (256,)) for asked in ("on", "off")] == [
        ("on", "as asked for"),
        ("off", "as asked for"),
    ]


def test_the_plan_says_so_and_a_step_follows_it():
    task = Tagger()
    plan = make_plan(task, device="cpu", memory_limit="64MiB", cache=False, cudnn_attention="off")
    assert plan.levers.cudnn_attention == "off"
    assert Plan.from_json(plan.to_json()).levers == plan.levers
    model, notes = task.model(), []
    seen = []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    stepper = Stepper(model, task.optimizer(model), task, plan, on_event=lambda event: notes.append(event.sentence))
    stepper.step(task.dummy(4, task.worst_shape))
    assert seen and not any(seen)
    assert "cuDNN's attention is off: as planned" in notes


def test_a_plan_from_before_there_was_a_choice_leaves_it_to_torch():
    plan = make_plan(Tagger(), device="cpu", memory_limit="64MiB", cache=False, cudnn_attention="off").to_json()
    del plan["levers"]["cudnn_attention"]
    assert Plan.from_json(plan).levers.cudnn_attention == "on"
