"""Weights in bf16 if the user asks for them: what is converted, what it saves, and what the plan says."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from brimful.errors import BadOption
from brimful.packing import causal
from brimful.planning.levers import with_weights
from brimful.planning.plan import Plan
from brimful.planning.planner import plan
from brimful.step.stepper import Stepper
from brimful.task import Loss, Task
from tests.planning.small import Tagger, small_plan


class Llama(Task):
    """With rotary frequencies in a buffer, and a head tied to its embedding."""

    worst_shape = (32,)
    global_batch = 8

    def model(self):
        return AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
            )
        )  # fmt: skip

    def dummy_row(self, shape):
        return torch.randint(2, 100, shape).numpy()

    def collate(self, rows):
        return torch.stack([torch.as_tensor(row) for row in rows])

    def dummy(self, rows, shape):
        return torch.randint(2, 100, (rows, *shape))

    def pack(self, rows, tokens):
        return causal.pack(rows, tokens)

    def loss(self, model, batch):
        if isinstance(batch, dict):
            return causal.loss(model, batch)
        logits, labels = model(input_ids=batch).logits[:, :-1], batch[:, 1:]
        return Loss(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel())


def test_weights_are_converted_and_buffers_are_not():
    model = with_weights(Llama(), "bf16").model()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_tied_weights_stay_tied():
    model = with_weights(Llama(), "bf16").initial_model()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_that_must_be_float32_stay_so():
    class Strict(Tagger):
        def model(self):
            model = super().model()
            model._keep_in_fp32_modules_strict = {"head"}
            return model

    model = with_weights(Strict(), "bf16").model()
    assert (model.head.weight.dtype, model.embed.weight.dtype) == (torch.float32, torch.bfloat16)


def test_the_callers_task_is_not_changed():
    task = Tagger()
    with_weights(task, "bf16").model()
    assert next(task.model().parameters()).dtype == torch.float32


def test_half_precision_of_a_task_can_be_widened():
    class Half(Tagger):
        def model(self):
            return super().model().half()

    assert {param.dtype for param in with_weights(Half(), "fp32").model().parameters()} == {torch.float32}


def test_the_plan_says_what_was_requested_what_it_saves_and_what_it_costs():
    result = small_plan(weights="bf16")
    choice = result.choice("weights")
    count = sum(param.numel() for param in Tagger().model().parameters())
    assert (choice.requested, choice.effective, choice.basis) == ("bf16", "bf16", "asked")
    kib = f"{2 * count / 1024:.2f}".rstrip("0").rstrip(".")
    assert choice.reason.startswith(
        f"as requested; against fp32 it saves {kib} KiB of weights, {kib} KiB of gradients, "
    )
    assert any("rounded away" in warning for warning in result.warnings)
    assert Plan.from_json(result.to_json()).levers.weights == "bf16"


def test_the_precision_follows_the_weights():
    choice = small_plan(weights="bf16").choice("precision")
    assert (choice.requested, choice.effective, choice.reason) == (None, "bf16", "that of the weights")


def test_the_fixed_part_is_halved():
    full, half = (small_plan(weights=value, micro_batch=1, precision="bf16") for value in ("fp32", "bf16"))
    count = sum(param.numel() for param in Tagger().model().parameters())
    saved = full.memory_model.peak_bytes(1, (1,)) - half.memory_model.peak_bytes(1, (1,))
    assert saved > 2 * 3.5 * count  # of weights, gradients and both states of AdamW


def test_nothing_chooses_bf16_weights_by_itself():
    result = small_plan(table=True, memory_limit="64MiB")
    assert result.levers.weights is None
    assert not any(choice.name == "weights" for choice in result.choices)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_both_layouts_can_be_planned_with_bf16_weights(layout):
    result = plan(Llama(), weights="bf16", layout=layout, memory_limit="64MiB", device="cpu", cache=False)
    assert (result.layout, result.levers.weights, result.choice("exactness").effective) == (layout, "bf16", "exact")


def test_a_model_of_the_callers_is_not_converted():
    with pytest.raises(
        BadOption, match="weights='bf16' cannot be combined with model=, which is yours. Try: convert it"
    ):
        small_plan(model=Tagger().model(), weights="bf16")


def test_a_step_says_that_the_model_is_not_the_one_planned_for():
    task, notes = Tagger(), []
    result, model = small_plan(task, weights="bf16"), Tagger().model()
    Stepper(model, task.optimizer(model), task, result, on_event=lambda event: notes.append(event.sentence))
    assert any("the model has no bf16 weights, for which the plan was made" in note for note in notes)
