"""Packed models with PEFT's adapters around them, and with 4-bit heads."""

from unittest import mock

import pytest
import torch

from brimful.errors import TaskError
from brimful.packing import causal, causal_head
from brimful.planning.levers import checkpointing
from brimful.task import Task
from tests.packing.families import build, difference, draw_rows, gradients, loss_alone

peft = pytest.importorskip("peft")

BATCH = causal.pack(draw_rows(), (128,))
ADAPTERS = {
    "lora": {"target_modules": "all-linear"},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "lora on the head": {"target_modules": ["q_proj", "lm_head"]},
    "trained copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}


def adapted(family="llama", **options):
    torch.manual_seed(0)
    model = peft.get_peft_model(build(family), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter += 0.2 * torch.randn_like(parameter)  # else the adapter changes nothing yet
    return model


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapted_models_have_the_loss_and_gradient_that_rows_have_alone(name):
    model = adapted(**ADAPTERS[name])
    packed, alone = causal.loss(model, BATCH).sum, loss_alone(model, draw_rows())
    padded = causal.padded_loss(model, causal.pad(draw_rows())).sum
    assert packed.item() == pytest.approx(alone.item(), rel=1e-12)
    assert padded.item() == pytest.approx(alone.item(), rel=1e-12)
    some, others, more = (gradients(one, model) for one in (packed, alone, padded))
    assert max(difference(some, others), difference(more, others)) < 1e-12


def test_the_adapter_of_a_head_can_be_switched_off():
    for options in (ADAPTERS["lora on the head"], ADAPTERS["trained copy of the head"]):
        model = adapted(**options)
        on = causal.loss(model, BATCH).sum.item()
        with model.disable_adapter():
            off, alone = causal.loss(model, BATCH).sum.item(), loss_alone(model, draw_rows()).item()
        assert off == pytest.approx(alone, rel=1e-12) and abs(on - off) > 0.1


def test_a_trained_copy_of_the_head_runs_without_its_logits():
    with mock.patch.object(causal_head, "linear_cross_entropy", wraps=causal_head.linear_cross_entropy) as used:
        causal.loss(adapted(**ADAPTERS["trained copy of the head"]), BATCH)
    assert used.call_count == 1


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_checkpointed_blocks_with_adapters_run_again_inside_their_rows(family):
    model = adapted(family, target_modules="all-linear", lora_dropout=0.1).train()

    def run():
        torch.manual_seed(0)
        return gradients(causal.loss(model, BATCH).sum, model)

    plain, lever = run(), checkpointing(Task(), model)
    assert lever.blocks == model.config.num_hidden_layers
    for every in (1, 2):
        with lever.set(every):
            assert difference(run(), plain) == 0


def test_prompt_tuning_is_refused():
    model = peft.get_peft_model(build("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(TaskError, match="PromptTuningConfig puts learnt tokens before each row.* Try: LoRA"):
        causal.loss(model, BATCH)


@pytest.mark.parametrize("head", [False, True], ids=["blocks", "blocks and head"])
def test_4_bit_models_have_the_loss_and_gradient_that_rows_have_alone(head):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = build("llama", dtype=torch.float32, hidden_size=64, intermediate_size=64)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and (head or name != "lm_head"):
                bias = child.bias is not None
                quantized = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias, compute_dtype=torch.float32, quant_type="nf4"
                )
                quantized.load_state_dict(child.state_dict())
                setattr(parent, name, quantized)
    model = model.requires_grad_(False).to("cpu")
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, options)
    packed, alone = causal.loss(model, BATCH).sum, loss_alone(model, draw_rows())
    assert packed.item() == pytest.approx(alone.item(), rel=1e-5)
    assert difference(gradients(packed, model), gradients(alone, model)) < 1e-4
    assert (model.get_output_embeddings().weight.dtype == torch.uint8) == head
    assert model.get_base_model().model.layers[1].mlp.up_proj.weight.dtype == torch.uint8
