"""Packed causal models against the same rows alone, in transformers' own forward."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from brimful.errors import TaskError
from brimful.packing import causal
from brimful.planning.levers import checkpointing
from brimful.task import Task

SHAPE = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1),
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "sliding window": MistralConfig(**SHAPE, sliding_window=20),
    "window and softcap": Gemma2Config(**SHAPE, head_dim=8, sliding_window=20, attn_logit_softcapping=0.3),
}

IN_FP32 = {"window and softcap"}
"""Computes its norms and its softmax in fp32, whatever the weights are in."""


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double().eval()


def draw_rows(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 250, length) for length in rng.integers(1, 60, 7)]


def loss_alone(model, rows):
    """Each row by itself in the model's own forward."""
    total = 0.0
    for row in map(torch.as_tensor, rows):
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        total += F.cross_entropy(logits, row[1:], reduction="sum")
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_have_the_loss_and_gradient_that_they_have_alone(name):
    model, rows = build(CONFIGS[name]), draw_rows(1)
    within = 1e-6 if name in IN_FP32 else 1e-12
    packed, alone = causal.loss(model, causal.pack(rows, (512,))), loss_alone(model, rows)
    assert packed.sum.item() == pytest.approx(alone.item(), rel=within)
    assert packed.count == sum(len(row) - 1 for row in rows)
    params = list(model.parameters())
    for mine, other in zip(*(torch.autograd.grad(one, params) for one in (packed.sum, alone)), strict=True):
        assert (mine - other).norm() <= within * max(other.norm(), 1e-3)


def test_labels_of_a_row_are_never_predicted_from_the_row_before():
    batch = causal.pack([np.array([5, 6, 7]), np.array([8, 9])], (8,))
    assert batch["labels"].tolist() == [6, 7, -100, 9, -100, -100, -100, -100]
    assert batch["position_ids"].tolist()[:5] == [0, 1, 2, 0, 1]


def test_masked_labels_are_not_learnt():
    batch = causal.pack([np.array([5, 6, 7])], (4,), labels=[np.array([-100, -100, 7])])
    assert batch["labels"].tolist() == [-100, 7, -100, -100]
    assert batch["count"] == 1


def test_a_row_without_tokens_changes_nothing():
    model, rows = build(CONFIGS["gpt2"]), draw_rows(5)
    params = list(model.parameters())
    losses = [
        causal.loss(model, causal.pack(some, (512,))).sum
        for some in (rows, [*rows[:3], np.array([], dtype=int), *rows[3:]])
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-13)
    for mine, other in zip(*(torch.autograd.grad(loss, params) for loss in losses), strict=True):
        assert (mine - other).norm() <= 1e-12 * max(other.norm(), 1e-3)


def test_rows_with_more_tokens_than_their_shapes_are_refused():
    with pytest.raises(TaskError, match=r"rows of 5 tokens do not fit a sequence of 4. Try: .* shape\(row\)"):
        causal.pack([np.array([5, 6, 7]), np.array([8, 9])], (4,))


def test_other_labels_than_tokens_are_refused():
    with pytest.raises(TaskError, match="row 1 of a packed batch has 2 tokens and 3 labels. Try: "):
        causal.pack([np.array([5, 6]), np.array([8, 9])], (8,), labels=[np.array([5, 6]), np.array([8, 9, 1])])


def test_the_model_keeps_its_own_attention():
    model = build(CONFIGS["llama"])
    before = model.config._attn_implementation
    causal.loss(model, causal.pack(draw_rows(2), (512,)))
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpointed_blocks_run_again_inside_their_rows(name):
    model, batch = build(CONFIGS[name]), causal.pack(draw_rows(4), (512,))
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    params = list(model.parameters())
    plain = torch.autograd.grad(causal.loss(model, batch).sum, params)
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()
    again = torch.autograd.grad(causal.loss(model, batch).sum, params)
    assert all(map(torch.equal, plain, again))
    assert model.config._attn_implementation != causal.INTERFACE


@pytest.mark.parametrize("every", [2, 3])
def test_some_checkpointed_blocks_repeat_their_dropout(every):
    config = GPT2Config(vocab_size=256, n_embd=32, n_layer=5, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1)
    model, batch = build(config).train(), causal.pack(draw_rows(4), (512,))

    def gradients():
        torch.manual_seed(0)
        return torch.autograd.grad(causal.loss(model, batch).sum, list(model.parameters()))

    plain = gradients()
    with checkpointing(Task(), model).set(every):
        assert all(map(torch.equal, plain, gradients()))


def test_a_model_with_other_attention_is_refused():
    sizes = {**SHAPE, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = build(GptOssConfig(**sizes, head_dim=8))
    with pytest.raises(TaskError, match="cannot attend to packed rows: it uses s_aux"):
        causal.loss(model, causal.pack(draw_rows(3), (512,)))
