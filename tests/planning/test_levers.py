"""Checkpointing changes no gradient and comes off without a trace; what frozen weights save is counted and measured."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from brimful.errors import BadOption, DoesNotFit
from brimful.memory.context import StepContext
from brimful.memory.ledger import Ledger, simulated_memory
from brimful.planning import levers, micro_batch
from brimful.planning.host_memory import FILL_HOST, HostPlanner, with_host
from brimful.planning.levers import OFFLOAD, checkpointing, compiling, cudnn_attention, frozen_choice, repeated_blocks
from brimful.planning.plan import Plan
from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import find_target
from brimful.step.stepper import Stepper
from brimful.task import Loss, Task
from brimful.units import GiB
from tests.planning.small import Normed, Tagger, small_plan


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


def test_checkpointing_inside_compilation_leaves_it_on():
    task, model = Tagger(), Tagger().model()
    compiled, checkpointed = compiling(task, model), checkpointing(task, model)
    with compiled.set(True):
        before = model.body[0].forward
        with checkpointed.set(True):
            assert model.body[0].forward is not before
        assert model.body[0].forward is before
    assert not any("forward" in vars(block) for block in model.body)


class Deep(Tagger):
    """Five blocks with dropout."""

    name = "deep"

    def model(self):
        model = super().model()
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3)) for _ in range(5))
        model.body = nn.ModuleList(blocks)
        return model


@pytest.mark.parametrize("every", [2, 3, OFFLOAD])
def test_the_gradient_of_some_checkpointed_blocks_is_the_same_to_the_bit(every):
    task = Deep()
    model = task.model().double()
    assert all(map(torch.equal, gradients(task, model, 0), gradients(task, model, every)))
    assert not any("forward" in vars(block) for block in model.body)


@pytest.mark.parametrize(("every", "again"), [(0, 0), (3, 2), (2, 3), (1, 5), (OFFLOAD, 5)])
def test_every_nth_block_runs_again(every, again):
    task = Deep()
    model, calls = task.model(), []
    for block in model.body:
        block[0].register_forward_hook(lambda *_: calls.append(1))
    gradients(task, model, every)
    assert len(calls) == 5 + again


@pytest.mark.parametrize(("every", "again"), [(3, 2), (2, 2), (1, 4), (OFFLOAD, 4)])
def test_every_nth_block_of_a_hugging_face_model_runs_again(every, again):
    model, calls = t5(), []
    for block in (*model.encoder.block, *model.decoder.block):
        block.layer[0].register_forward_hook(lambda *_: calls.append(1))
    with checkpointing(Task(), model).set(every):
        peak(model)
    assert len(calls) == 4 + again
    assert not model.is_gradient_checkpointing


def test_in_between_settings_need_blocks_that_are_switched_one_by_one():
    class Hooked(Deep):
        def checkpointing(self, model, on):
            return True

    assert checkpointing(Deep(), Deep().model()).settings == ("off", "every-3", "every-2", "on")
    assert checkpointing(Tagger(), Tagger().model()).settings == ("off", "on")
    assert checkpointing(Hooked(), Hooked().model()).settings == ("off", "on")
    assert checkpointing(Task(), t5()).settings == ("off", "every-3", "every-2", "on")


def test_the_inputs_of_offloaded_blocks_are_all_that_goes_to_the_host():
    """One tensor of each block. What a block keeps inside is made again in backward, where it is needed."""
    task, model = Deep(), Deep().model()
    lever = checkpointing(task, model)
    for rows in (4, 2):  # not two micro-batches at once: those of the first are gone
        with lever.set(OFFLOAD):
            task.loss(model, task.dummy(rows, task.worst_shape)).sum.backward()
    assert lever.copies.sizes == (4 * 64 * 64 * 4,) * 5
    assert lever.copies.bytes_at(0.5) == 5 * 2 * 64 * 64 * 4


INPUT_BYTES = 5 * 64 * 64 * 4
"""Of the five blocks of `Deep`, for a row of 64 tokens."""
OPTIONS = PlanOptions(device="cpu")


@pytest.fixture
def apart(monkeypatch):
    """A model whose memory is taken not to be the host's."""
    monkeypatch.setattr(levers, "_is_apart", lambda model: True)


def test_offloading_on_a_cpu_is_refused_with_the_reason():
    with pytest.raises(BadOption, match="is not possible: the CPU is no CUDA GPU, whose memory is apart from host RAM"):
        small_plan(Deep(), checkpointing="offload")


def test_what_offloading_takes_of_host_ram_is_predicted_and_shown(apart):
    plan = small_plan(Deep(), memory_limit="64MiB", global_batch=16, micro_batch=8, checkpointing="offload")
    assert plan.offloaded_bytes == 8 * INPUT_BYTES
    assert "it moves 640 KiB to host RAM (predicted)" in plan.choice("checkpointing").reason
    assert Plan.from_json(plan.to_json()).offloaded_bytes == plan.offloaded_bytes
    assert small_plan(Deep(), memory_limit="64MiB", global_batch=16, checkpointing="on").offloaded_bytes == 0


def test_the_host_s_prediction_has_what_is_offloaded(apart):
    plan = small_plan(Deep(), memory_limit="64MiB", global_batch=16, micro_batch=8, checkpointing="offload")
    planned = [
        with_host(replace(plan, offloaded_bytes=size), Deep(), None, find_target(OPTIONS), OPTIONS, lambda phrase: None)
        for size in (0, 10 * GiB)
    ]
    assert planned[1].host.predicted_bytes - planned[0].host.predicted_bytes == pytest.approx(10 * GiB, rel=0.01)


def test_offloading_more_than_host_ram_holds_is_refused(apart):
    plan = replace(small_plan(Deep(), memory_limit="64MiB", checkpointing="offload"), offloaded_bytes=10 * GiB)
    target = replace(find_target(OPTIONS), host_limit_bytes=8 * GiB)
    with pytest.raises(DoesNotFit, match=r"\(10 GiB of it for offloaded inputs\).* a smaller micro_batch="):
        with_host(plan, Deep(), None, target, OPTIONS, lambda phrase: None)


def test_host_ram_bounds_the_rows_of_a_micro_batch_that_offloads(apart, monkeypatch):
    monkeypatch.setattr(micro_batch, "tree_bytes", lambda: GiB)
    sizes = {"memory_limit": "64MiB", "global_batch": 64, "checkpointing": "offload"}
    monkeypatch.setattr(HostPlanner, "_bytes", lambda *_: 0)
    room = round((GiB + 4.5 * INPUT_BYTES) / FILL_HOST)
    assert small_plan(Deep(), **sizes).largest_micro_batch > 4
    assert small_plan(Deep(), **sizes, host_limit=room).largest_micro_batch == 4
    with pytest.raises(DoesNotFit, match='checkpointing="offload" moves 80 KiB to host RAM for 1 row'):
        small_plan(Deep(), **sizes, host_limit=GiB)


def test_a_step_follows_a_plan_with_every_second_block():
    task, notes = Deep(), []
    plan = small_plan(task, memory_limit="64MiB", global_batch=4, checkpointing="every-2")
    model = task.model()
    Stepper(model, task.optimizer(model), task, plan, on_event=lambda event: notes.append(event.sentence))
    assert ["forward" in vars(block) for block in model.body] == [True, False, True, False, True]
    assert "gradient checkpointing is every-2, as planned (over 5 repeated blocks)" in notes


def test_a_container_of_blocks_is_no_block_though_it_is_of_their_class():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())) for _ in range(3)))
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), blocks, nn.Linear(2, 2))) == list(blocks)


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
    assert not lever.available
    assert "BatchNorm" in lever.reason


def test_no_blocks_says_why():
    assert "no repeated blocks" in checkpointing(Task(), nn.Linear(2, 2)).reason


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
    assert lever.already_on and not lever.available


def test_cudnn_attention_is_off_where_shapes_vary_on_a_card():
    card, cpu = torch.device("cuda"), torch.device("cpu")
    assert cudnn_attention("auto", card, (256, 256))[0] == "off"
    assert cudnn_attention("auto", card, ()) == ("on", "left to torch: all rows have one shape")
    assert cudnn_attention("auto", cpu, (256,))[0] == "on"
    assert [cudnn_attention(asked, card, (256,)) for asked in ("on", "off")] == [
        ("on", "as requested"),
        ("off", "as requested"),
    ]


def test_the_plan_says_so_and_a_step_follows_it():
    task = Tagger()
    plan = small_plan(task, memory_limit="64MiB", global_batch=4, cudnn_attention="off")
    assert plan.levers.cudnn_attention == "off"
    assert Plan.from_json(plan.to_json()).levers == plan.levers
    model, notes = task.model(), []
    seen = []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    stepper = Stepper(model, task.optimizer(model), task, plan, on_event=lambda event: notes.append(event.sentence))
    stepper.step(task.dummy(4, task.worst_shape))
    assert seen and not any(seen)
    assert "cuDNN's attention is off: as planned" in notes


class Two(Task):
    """A layer of 64 → 256, GELU, a layer of 256 → 16; nothing else has weights."""

    worst_shape = (64,)

    def model(self):
        return nn.Sequential(nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 16, bias=False))

    def loss(self, model, batch):
        return Loss(model(batch).sum(), len(batch))

    def dummy(self, rows, shape):
        return torch.randn(rows, *shape)


def stepped(task, freeze=(0,), optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)):
    """Stepped once, so that the optimizer has its state."""
    torch.manual_seed(0)
    model = task.model()
    for place in freeze:
        model[place].requires_grad_(False)
    context = StepContext(
        task=task,
        model=model,
        optimizer=optimizer([param for param in model.parameters() if param.requires_grad]),
        device=torch.device("cpu"),
        autocast=None,
    )
    context.step([task.dummy(2, task.worst_shape)], 2)
    return context


def test_where_all_weights_train_there_is_nothing_to_tell():
    assert frozen_choice(stepped(Two(), freeze=()), (64,), 8) is None


def test_the_figures_add_up():
    choice = frozen_choice(stepped(Two()), (64,), 32)
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
    choice = frozen_choice(stepped(Two(), optimizer=torch.optim.AdamW), (64,), 32)
    assert "64 KiB of gradients and 128 KiB of optimizer state" in choice.reason


def test_a_frozen_head_saves_its_input():
    """The layers below still train, so their activations stay; what the head multiplied is no longer needed."""
    choice = frozen_choice(stepped(Two(), freeze=(2,)), (64,), 32)
    assert choice.effective == "20% of the weights"
    assert "16 KiB of gradients" in choice.reason
    assert "32 KiB of activations" in choice.reason


class Inner(Two):
    """The head's input is kept by what makes it anyway."""

    def model(self):
        return nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 16, bias=False))


def test_a_frozen_part_whose_input_is_kept_by_others_saves_no_activations():
    assert "and 0 B of activations" in frozen_choice(stepped(Inner(), freeze=(2,)), (64,), 32).reason


class TwoNormed(Two):
    """With statistics that a forward changes, and numbers that it draws."""

    def model(self):
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 1))


def test_everything_is_as_before():
    context = stepped(TwoNormed())
    before = {name: tensor.clone() for name, tensor in context.model.state_dict().items()}
    trains = [param.requires_grad for param in context.model.parameters()]
    random_state = torch.get_rng_state()
    assert frozen_choice(context, (64,), 8) is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in context.model.state_dict().items())
    assert [param.requires_grad for param in context.model.parameters()] == trains
    assert all(param.grad is None for param in context.model.parameters())
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

    context = stepped(Weighing())
    before = _living()
    assert frozen_choice(context, (64,), 8) is not None
    assert _living() == before


def _living():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def test_weights_that_cannot_train_leave_the_activations_unknown():
    context = stepped(Whole())
    choice = frozen_choice(context, (64,), 8)
    assert "activations" not in choice.reason and choice.reason.endswith("of optimizer state (counted)")
    assert not any(param.requires_grad for param in context.model[0].parameters())


def test_without_the_memory_to_measure_them_activations_are_unknown():
    context = stepped(Two())
    with simulated_memory("1KiB") as memory:
        choice = frozen_choice(context, (64,), 8)
    assert memory.ooms
    assert "activations" not in choice.reason
    assert not context.model[0].weight.requires_grad


def test_under_autocast_half_as_much_is_held():
    context = stepped(Two())
    context.autocast = torch.bfloat16
    assert "20 KiB of activations" in frozen_choice(context, (64,), 32).reason
