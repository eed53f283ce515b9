"""The loss from hidden states, against the logits of the model's own forward."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from brimful.errors import TaskError
from brimful.packing import causal, causal_head
from tests.packing.families import EXACT, TABLE, build, difference, draw_rows, gradients, in_float64, loss_alone

ROOM = 128


def packed_loss(model, rows, **options):
    return causal.loss(model, causal.pack(rows, (ROOM,)), **options).sum


@pytest.mark.parametrize("name", TABLE)
def test_a_plain_head_runs_without_its_logits(name):
    model = build(name, **({"output_router_logits": False} if name == "mixtral balanced" else {}))
    with mock.patch.object(causal_head, "linear_cross_entropy", wraps=causal_head.linear_cross_entropy) as used:
        causal.padded_loss(model, causal.pad(draw_rows()))
    assert used.call_count == 1


@pytest.mark.parametrize("name", EXACT)
def test_one_row_has_the_logits_of_the_models_own_forward(name):
    """By the gradient of the hidden states, which every logit is part of."""
    model, row = build(name), torch.as_tensor(draw_rows()[2])
    _, decoder = causal.model_parts(model)
    hidden = 10 * torch.randn(len(row), decoder(row[None], use_cache=False).last_hidden_state.shape[-1]).double()
    hidden.requires_grad_()
    with in_float64():
        chunked = causal_head.head_loss(model, decoder, hidden, row)
        own = F.cross_entropy(causal_head._own_logits(model, decoder, hidden), row, reduction="sum")
    assert chunked.item() == pytest.approx(own.item(), rel=1e-12)
    some, others = (torch.autograd.grad(one, hidden) for one in (chunked, own))
    assert difference(some, others) < 1e-12


class Shifted(LlamaForCausalLM):
    """Its logits are made in a way that no other family has."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.tanh() * torch.linspace(1, 2, output.logits.shape[-1]).double()
        return output


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_unknown_head_runs_as_the_model_runs_it(smoothing):
    model, rows = Shifted(build("llama").config).double().eval(), draw_rows()
    with mock.patch.object(causal_head, "chunk_size", return_value=50):
        loss = packed_loss(model, rows, label_smoothing=smoothing)
        some = gradients(loss, model)
    alone = 0.0
    for row in map(torch.as_tensor, rows):
        logits = model(row[None], use_cache=False).logits[0, :-1]
        alone += F.cross_entropy(logits, row[1:], reduction="sum", label_smoothing=smoothing)
    assert loss.item() == pytest.approx(alone.item(), rel=1e-12)
    assert difference(some, gradients(alone, model)) < 1e-12
    with torch.no_grad():
        assert packed_loss(model, rows, label_smoothing=smoothing).item() == pytest.approx(alone.item(), rel=1e-12)


def test_a_hook_on_the_head_is_run():
    model, rows = build("llama"), draw_rows()
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    halved, alone = packed_loss(model, rows), loss_alone(model, rows)
    assert halved.item() == pytest.approx(alone.item(), rel=1e-12)
    handle.remove()
    assert packed_loss(model, rows).item() == pytest.approx(loss_alone(model, rows).item(), rel=1e-12)


def test_a_new_head_is_used():
    model, rows = build("llama"), draw_rows()
    packed_loss(model, rows)
    model.set_output_embeddings(torch.nn.Linear(32, 64, bias=True).double())
    assert packed_loss(model, rows).item() == pytest.approx(loss_alone(model, rows).item(), rel=1e-12)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_the_gradient_of_a_tied_head_is_added_to_that_of_the_embedding(name):
    model, rows = build(name, tie_word_embeddings=True), draw_rows()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with in_float64():
        some, others = (gradients(one(model, rows), model) for one in (packed_loss, loss_alone))
    assert difference(some, others) < 1e-12


def test_the_decoder_runs_again_after_a_failure():
    model = build("llama")
    with mock.patch.object(model.lm_head, "forward", side_effect=ValueError), pytest.raises(ValueError):
        packed_loss(model, draw_rows())
    assert packed_loss(model, draw_rows()).item() == pytest.approx(loss_alone(model, draw_rows()).item(), rel=1e-12)


def test_a_head_that_does_not_use_the_decoder_is_refused():
    class Elsewhere(LlamaForCausalLM):
        def forward(self, input_ids, **kwargs):
            return mock.Mock(logits=torch.zeros(*input_ids.shape, 64))

    model = Elsewhere(build("llama").config).double().eval()
    with pytest.raises(TaskError, match="computes its logits in a way that cannot be run in chunks. Try: "):
        packed_loss(model, draw_rows())


def test_rows_without_anything_to_train_have_no_loss():
    for model in (build("llama"), Shifted(build("llama").config).double().eval()):
        rows = draw_rows()[1:3]
        loss = causal.padded_loss(model, causal.pad(rows, [0 * row - 100 for row in rows]))
        assert (loss.sum.item(), loss.count) == (0.0, 0)
        assert max(one.abs().max() for one in gradients(loss.sum, model) if one is not None) == 0
