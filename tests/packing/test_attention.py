"""Attention inside packed rows, against attention of each row alone, written out."""

import pytest
import torch

from brimful.errors import TaskError
from brimful.packing import attention as attention_module
from brimful.packing.attention import attention
from brimful.packing.sequence import boundaries

LENGTHS = [5, 1, 17, 8]


def alone(q, k, v, queries, keys, *, scale, causal=False, bias=None):
    """Every row by itself, in the words of the formula."""
    out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
    at = bt = 0
    for length, others in zip(queries, keys, strict=True):
        one, other = slice(at, at + length), slice(bt, bt + others)
        for head in range(q.shape[1]):
            scores = q[one, head] @ k[other, head // group].T * scale
            distance = torch.arange(others)[None, :] - torch.arange(length)[:, None]
            if bias is not None:
                scores = scores + bias[head, distance + (bias.shape[1] - 1) // 2]
            if causal:
                scores = scores.masked_fill(distance > 0, float("-inf"))
            out[one, head] = scores.softmax(-1) @ v[other, head // group]
        at, bt = at + length, bt + others
    return out


def tensors(queries, keys, heads=4, kv_heads=4, dim=8):
    torch.manual_seed(0)
    sizes = ((sum(queries) + 6, heads), (sum(keys) + 6, kv_heads), (sum(keys) + 6, kv_heads))
    return [torch.randn(*size, dim, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_packed_rows_attend_as_they_do_alone(causal, kv_heads):
    q, k, v = tensors(LENGTHS, LENGTHS, kv_heads=kv_heads)
    bias = torch.randn(4, 2 * 32 - 1, dtype=torch.float64, requires_grad=True)
    rows = boundaries(LENGTHS, len(q))
    packed = attention(q, k, v, rows, scale=0.3, causal=causal, bias=bias)
    expected = alone(q, k, v, LENGTHS, LENGTHS, scale=0.3, causal=causal, bias=bias)
    assert torch.allclose(packed, expected, rtol=0, atol=1e-13)
    weight = torch.randn_like(packed)
    gradients, wanted = (torch.autograd.grad((one * weight).sum(), (q, k, v, bias)) for one in (packed, expected))
    for gradient, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(gradient, other, rtol=0, atol=1e-12)


def test_rows_of_a_decoder_attend_to_their_own_source():
    source = [3, 9, 1, 4]
    q, k, v = tensors(LENGTHS, source)
    packed = attention(q, k, v, boundaries(LENGTHS, len(q)), boundaries(source, len(k)), scale=1.0)
    assert torch.allclose(packed, alone(q, k, v, LENGTHS, source, scale=1.0), rtol=0, atol=1e-13)


def test_tokens_after_the_last_row_are_zero():
    q, k, v = tensors(LENGTHS, LENGTHS)
    assert attention(q, k, v, boundaries(LENGTHS, len(q)), scale=1.0)[sum(LENGTHS) :].abs().max() == 0


def test_dropout_keeps_the_mean():
    rows = boundaries([64] * 8, 512)
    q, k = (torch.randn(512, 4, 8) for _ in range(2))
    torch.manual_seed(0)
    out = attention(q, k, torch.ones(512, 4, 8), rows, scale=0.1, dropout=0.25)
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    assert out.std().item() > 0.01


@pytest.mark.parametrize("dim", [8, 5])
def test_sinks_take_their_share_of_the_weights(dim):
    q, k, _ = tensors(LENGTHS, LENGTHS, kv_heads=2)
    v, sinks = torch.randn(len(k), 2, dim, dtype=torch.float64), torch.randn(4, dtype=torch.float64, requires_grad=True)
    out = attention(q, k, v, boundaries(LENGTHS, len(q)), scale=0.3, causal=True, window=6, sinks=sinks)
    expected, at = torch.zeros_like(out), 0
    for length in LENGTHS:
        one = slice(at, at + length)
        for head in range(4):
            scores = q[one, head] @ k[one, head // 2].T * 0.3
            seen = torch.ones(length, length).tril().bool() & torch.ones(length, length).triu(-5).bool()
            weights = scores.exp() * seen
            share = weights / (weights.sum(1, keepdim=True) + sinks[head].exp())
            expected[one, head] = share @ v[one, head // 2]
        at += length
    assert torch.allclose(out, expected, rtol=0, atol=1e-13)
    gradient, wanted = (torch.autograd.grad(one.square().sum(), sinks)[0] for one in (out, expected))
    assert torch.allclose(gradient, wanted, rtol=0, atol=1e-12)


def test_autocast_applies_to_queries_and_keys_with_rotary_positions():
    """They come in fp32, and kernels are for bf16."""
    q, k, v = (side.detach().float() for side in tensors(LENGTHS, LENGTHS))
    rows = boundaries(LENGTHS, len(q))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v.bfloat16(), rows, scale=0.3, causal=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), rows, scale=0.3, causal=True))


def test_tiles_cover_every_token_once():
    rows = boundaries([70, 1, 64, 130], 300)
    covered = torch.zeros(300, dtype=torch.int64)
    for row, first in rows.tiles.tolist():
        start, end = (0, 300) if row < 0 else (int(rows.starts[row]), int(rows.starts[row + 1]))
        covered[start + first : min(start + first + 64, end)] += 1
    assert covered.tolist() == [1] * 300


def test_rows_longer_than_the_sequence_are_refused():
    with pytest.raises(TaskError, match="20 tokens do not fit a sequence of 16"):
        boundaries([10, 10], 16)


def test_without_triton_a_gpu_runs_the_plain_implementation(monkeypatch):
    """As on Windows."""
    monkeypatch.setattr(attention_module, "has_kernels", lambda device, dtype: True)
    monkeypatch.setattr(attention_module, "kernel_attention", attention_module._without_triton)
    q, k, v = tensors(LENGTHS, LENGTHS)
    rows, options = boundaries(LENGTHS, len(q)), {"scale": 0.3, "causal": True, "window": 6, "softcap": 2.0}
    in_place_of_kernels = attention(q, k, v, rows, **options)
    monkeypatch.undo()
    assert torch.equal(in_place_of_kernels, attention(q, k, v, rows, **options))
