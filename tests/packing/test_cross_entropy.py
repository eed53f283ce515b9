"""The loss in chunks against torch's own on all logits."""

import pytest
import torch
import torch.nn.functional as F

from brimful.packing.cross_entropy import linear_cross_entropy, linear_token_losses


def inputs(dtype=torch.float64, tokens=50, words=37, dim=8):
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(size, dtype=dtype, requires_grad=True) for size in ((tokens, dim), (words, dim), (words,))
    )
    labels = torch.randint(0, words, (tokens,))
    labels[::7] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("softcap, scale", [(None, 1.0), (3.0, 0.5)])
def test_loss_and_gradients_are_those_of_the_plain_loss(chunk, smoothing, softcap, scale):
    hidden, weight, bias, labels = inputs()
    chunked = linear_cross_entropy(
        hidden, weight, labels, bias, label_smoothing=smoothing, logit_scale=scale, softcap=softcap, chunk=chunk
    )
    logits = F.linear(hidden, weight, bias) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    plain = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-13)
    for mine, other in zip(
        *(torch.autograd.grad(one / 3, (hidden, weight, bias)) for one in (chunked, plain)), strict=True
    ):
        assert (mine - other).norm() <= 1e-12 * other.norm()


def test_a_tied_head_adds_its_gradient_to_that_of_the_embedding():
    _, weight, _, labels = inputs()
    tokens = torch.randint(0, 37, (50,))
    chunked = linear_cross_entropy(F.embedding(tokens, weight), weight, labels, chunk=9)
    plain = F.cross_entropy(F.linear(F.embedding(tokens, weight), weight), labels, reduction="sum")
    mine, other = (torch.autograd.grad(one, weight)[0] for one in (chunked, plain))
    assert (mine - other).norm() <= 1e-12 * other.norm()


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, _, labels = inputs()
    linear_cross_entropy(hidden, weight.detach(), labels).backward()
    assert hidden.grad is not None


def test_the_sum_is_at_least_fp32():
    hidden, weight, _, labels = inputs(torch.bfloat16)
    total = linear_cross_entropy(hidden, weight, labels, chunk=7)
    assert total.dtype == torch.float32
    plain = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
    assert total.item() == pytest.approx(plain.item(), rel=1e-5)


def test_in_fp16_the_loss_scale_reaches_the_gradient_before_it_is_rounded():
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[20.0], [0.0]], requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        total = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    (total * 2.0**16).backward()  # without the factor, exp(-20) = 2e-9 is zero in fp16
    assert weight.grad[1].item() == pytest.approx(2.0**16 * 2.06e-9, rel=0.01)


def test_a_second_backward_is_refused():
    hidden, weight, _, labels = inputs()
    total = linear_cross_entropy(hidden, weight, labels)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        total.backward()


@pytest.mark.parametrize("trained_head", [True, False])
@pytest.mark.parametrize("chunk", [3, 64])
def test_losses_by_token_have_the_gradients_of_any_function_of_them(trained_head, chunk):
    torch.manual_seed(0)
    hidden = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.float64, requires_grad=trained_head)
    bias = torch.randn(30, dtype=torch.float64, requires_grad=trained_head)
    labels = torch.randint(30, (20,))
    labels[::4] = -100
    factors = torch.randn(20, dtype=torch.float64)
    wanted = [hidden, weight, bias] if trained_head else [hidden]

    def value(losses):
        return (losses * factors).sum().exp() + losses.square().sum()

    plain = F.cross_entropy(30 * torch.tanh(F.linear(hidden, weight, bias) * 0.5 / 30), labels, reduction="none")
    found = linear_token_losses(hidden, weight, labels, bias, logit_scale=0.5, softcap=30.0, chunk=chunk)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(value(found), wanted), torch.autograd.grad(value(plain), wanted), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
