"""The Triton kernels in Triton's interpreter, on CPU tensors, against the plain implementation in float64.

`test_kernels_interpreted.py` runs this file in a process of its own, because Triton decides at import whether to interpret. By
hand: `TRITON_INTERPRET=1 python -m pytest tests/packing/kernel_cases.py`.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from triton.runtime import interpreter

from brimful.memory.layout import FixedSize, PackedLayout
from brimful.packing import attention as attention_module
from brimful.packing import causal, cross_entropy, pairs, triton_kernels
from brimful.packing.attention import attention
from brimful.packing.cross_entropy import linear_cross_entropy, linear_token_losses
from brimful.packing.sequence import boundaries
from brimful.tasks.language import LanguageOptions, Pretrain
from tests.packing.families import build, draw_rows

ROWS = [5, 70, 1, 130]
EXACT, ROUNDED = 1e-5, 1e-2
"""Relative differences that fp32 and bf16 may have from float64."""


@pytest.fixture(autouse=True)
def _kernels_on_the_cpu(monkeypatch):
    for module in (attention_module, cross_entropy):
        monkeypatch.setattr(module, "has_kernels", lambda device, dtype: dtype != torch.float64)
    monkeypatch.setattr(triton_kernels, "SPLITS", 2)  # programs run one after the other here


@pytest.fixture(autouse=True)
def _products_of_bf16(monkeypatch):
    """The interpreter holds bf16 as whole numbers. It multiplies those in `tl.dot`, and cuts digits off where GPUs round."""
    product, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def dot(self, a, b, *rest):
        return product(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def apart(one, other):
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def with_gradients(inputs, dtype, weight, **options):
    """The output of attention, and the gradients of all its inputs."""
    leaves = {
        name: value.to(dtype).requires_grad_() if value.is_floating_point() else value for name, value in inputs.items()
    }
    out = attention(**leaves, **options)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return [out, *torch.autograd.grad((out * weight.to(out.dtype)).sum(), wanted)]


def compare(inputs, dtype, used, **options):
    torch.manual_seed(1)
    weight = torch.randn(*inputs["q"].shape[:2], inputs["v"].shape[2])
    weight[used:] = 0
    found, exact = (with_gradients(inputs, one, weight, **options) for one in (dtype, torch.float64))
    for name, one, other in zip(["out", *inputs], found, exact, strict=True):
        assert apart(one, other) < (EXACT if dtype == torch.float32 else ROUNDED), name
    assert found[0][used:].abs().sum() == 0


def draw(lengths, keys=None, heads=2, kv_heads=2, dim=16, values=None, dtype=torch.float32):
    torch.manual_seed(0)
    size, other = sum(lengths) + 37, sum(keys or lengths) + 37
    shapes = {"q": (size, heads, dim), "k": (other, kv_heads, dim), "v": (other, kv_heads, values or dim)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "dtype, radius, heads, kv_heads, dim, options",
    [
        (torch.float32, 129, 1, 1, 16, {}),
        (torch.float32, 129, 2, 2, 16, {"causal": True}),
        (torch.bfloat16, 20, 2, 1, 16, {"causal": True, "window": 50, "softcap": 2.0}),
        (torch.float32, None, 4, 2, 24, {"causal": True}),
        (torch.bfloat16, None, 2, 1, 8, {"causal": True, "window": 50}),
        (torch.float32, None, 2, 1, 16, {"causal": True, "window": 2, "softcap": 2.0}),
        (torch.float32, None, 2, 2, 16, {"softcap": 5.0}),
    ],
    ids=["encoder", "decoder", "all in bf16", "grouped", "window in bf16", "window of two", "softcap"],
)
def test_attention_and_its_gradients(dtype, radius, heads, kv_heads, dim, options):
    inputs = draw(ROWS, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    if radius is not None:
        inputs["bias"] = torch.randn(heads, 2 * radius - 1).to(dtype)
    compare(inputs, dtype, sum(ROWS), queries=boundaries(ROWS, sum(ROWS) + 37), scale=dim**-0.5, **options)


@pytest.mark.parametrize("radius", [2, 65, 66, 130])
@pytest.mark.parametrize("causal_rows", [True, False], ids=["causal", "both sides"])
def test_the_gradient_of_the_position_bias_for_any_radius(radius, causal_rows):
    rows = [135, 66]
    inputs = draw(rows, heads=1, kv_heads=1, dim=8)
    inputs["bias"] = torch.randn(1, 2 * radius - 1)
    places = boundaries(rows, sum(rows) + 37)
    compare(inputs, torch.float32, sum(rows), queries=places, scale=1.0, causal=causal_rows)


@pytest.mark.parametrize(
    "queries, keys, dtype",
    [
        (ROWS, [64, 3, 20, 9], torch.float32),
        ([3, 1, 65], [1, 128, 63], torch.bfloat16),
        ([7, 0, 70], [5, 4, 0], torch.float32),
        ([64, 128], [128, 64], torch.float32),
    ],
    ids=["shorter", "longer in bf16", "empty", "whole tiles"],
)
def test_attention_to_rows_of_other_lengths(queries, keys, dtype):
    inputs = draw(queries, keys, dtype=dtype)
    sizes = sum(queries) + 37, sum(keys) + 37
    places = {"queries": boundaries(queries, sizes[0]), "keys": boundaries(keys, sizes[1])}
    compare(inputs, dtype, sum(queries), scale=0.25, **places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sinks_and_narrow_values(dtype):
    """GPT-OSS; DeepSeek."""
    inputs = draw(ROWS, kv_heads=1, values=8, dtype=dtype)
    inputs["sinks"] = torch.randn(2).to(dtype)
    rows = boundaries(ROWS, sum(ROWS) + 37)
    compare(inputs, dtype, sum(ROWS), queries=rows, scale=0.25, causal=True, window=50)


@pytest.mark.parametrize("tokens", [32, 16])
def test_fewer_tokens_of_the_other_side_at_a_time(tokens, monkeypatch):
    """As on cards with little shared memory, with wide heads."""
    lengths = [5, 100]
    inputs = draw(lengths, kv_heads=1)
    inputs["bias"] = torch.randn(2, 2 * 20 - 1)
    monkeypatch.setattr(triton_kernels, "SETTINGS", [{}, {"N": tokens}])
    settings = {(name, 16, torch.device("cpu")): 1 for name in ("_forward", "_query_gradient", "_key_gradient")}
    monkeypatch.setattr(triton_kernels, "_setting", settings)
    rows = boundaries(lengths, sum(lengths) + 37)
    compare(inputs, torch.float32, sum(lengths), queries=rows, scale=0.25, causal=True, window=50, softcap=2.0)


def test_heads_that_lie_across_the_tokens_and_gradients_without_strides():
    rows = boundaries([30, 70], 100)
    inputs = [torch.randn(100, 16, 2).transpose(1, 2) for _ in range(3)]

    def run(dtype):
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        return torch.autograd.grad(attention(*leaves, rows, scale=0.25, causal=True).sum(), leaves)

    for one, other in zip(run(torch.float32), run(torch.float64), strict=True):
        assert (one.double() - other).norm() < 1e-4


def kept_weights(seed, rows, heads, dropout):
    """Attention with the numbers 0, 1, 2 … of a row as keys and values of one: what each query keeps of each key."""
    length = int(rows.starts[-1])
    q = torch.zeros(length, heads, 64)
    values = torch.eye(64).repeat(length // 64, 1)[:, None].expand(length, heads, 64)
    torch.manual_seed(seed)
    return attention(q, q, values, rows, scale=1.0, dropout=dropout) * 64


def test_dropout_keeps_the_right_share_of_weights_whatever_the_row_head_and_seed():
    rows = boundaries([64] * 8, 512)
    kept = kept_weights(0, rows, 4, 0.1)
    values = kept.unique()
    assert torch.allclose(values, torch.tensor([0.0, 1 / 0.9]), atol=1e-5)
    mask = (kept > 0).float().view(8, 64, 4, 64)
    assert mask.mean().item() == pytest.approx(0.9, abs=0.003)
    for dim in range(4):  # each row, query, head and key
        others = [one for one in range(4) if one != dim]
        assert mask.mean(others).sub(0.9).abs().max() < 0.03
    sets = mask.transpose(1, 2).flatten(0, 1).flatten(1)  # one for each row and head
    sets = torch.cat([sets, (kept_weights(1, rows, 4, 0.1) > 0).float().view(8, 64, 4, 64)[:1].flatten()[None, :4096]])
    assert (torch.corrcoef(sets) - torch.eye(len(sets))).abs().max() < 0.08


def test_one_seed_gives_one_mask():
    rows = boundaries([64], 64)
    assert torch.equal(kept_weights(3, rows, 2, 0.5), kept_weights(3, rows, 2, 0.5))
    assert not torch.equal(kept_weights(3, rows, 2, 0.5), kept_weights(4, rows, 2, 0.5))


@pytest.mark.parametrize("dropout", [0.1, 0.6])  # the second is more than a signed integer holds
def test_backward_drops_what_forward_dropped(dropout):
    """The output is linear in the values, and a moved input changes it as its gradient says."""
    torch.manual_seed(0)
    lengths = [20, 66]
    size = sum(lengths) + 5
    rows = boundaries(lengths, size)
    inputs = [torch.randn(size, 1, 16) for _ in range(3)] + [torch.randn(1, 2 * 30 - 1)]
    steps = [torch.randn_like(one) for one in inputs]
    weight = torch.randn(size, 1, 16)

    def value(moved):
        torch.manual_seed(7)
        return (attention(*moved[:3], rows, bias=moved[3], scale=0.25, dropout=dropout) * weight).sum().double()

    leaves = [one.requires_grad_() for one in inputs]
    gradients = torch.autograd.grad(value(leaves), leaves)
    for number, (gradient, step) in enumerate(zip(gradients, steps, strict=True)):
        with torch.no_grad():
            ends = [
                value([one + side * 1e-2 * step if at == number else one for at, one in enumerate(inputs)])
                for side in (1, -1)
            ]
        slope = ((ends[0] - ends[1]) / 2e-2).item()
        assert slope == pytest.approx((gradient * step).sum().item(), rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_operations_are_registered_as_torch_wants_them(bias):
    """Schema, fake tensors, autograd and tracing with open sizes: what `torch.compile` relies on."""
    lengths = [5, 70]
    rows = boundaries(lengths, 80)
    q, k, v = (torch.randn(80, 2, 16, requires_grad=True) for _ in range(3))
    table = torch.randn(2, 2 * 20 - 1, requires_grad=True) if bias else None
    sinks = None if bias else torch.randn(2, requires_grad=True)
    arguments = (q, k, v, table, sinks, None, *rows, *rows, 0.25, True, 0, 0.0, 0.0)
    torch.library.opcheck(triton_kernels.packed_attention, arguments)


HEADS = [
    {},
    {"label_smoothing": 0.1},
    {"softcap": 5.0, "logit_scale": 0.5},
    {"label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 2.0},
]


def plain_losses(hidden, weight, bias, labels, label_smoothing=0.0, softcap=None, logit_scale=1.0):
    logits = F.linear(hidden, weight, bias) * logit_scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)


def draw_head(words, tokens=20, dim=8):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(tokens, dim), torch.randn(words, dim), torch.randn(words)
    labels = torch.randint(0, words, (tokens,))
    labels[::7] = -100
    labels[3], labels[4] = words - 1, 0
    return (hidden, weight, bias), labels


@pytest.mark.parametrize("options", HEADS, ids=["plain", "smoothing", "softcap", "all"])
@pytest.mark.parametrize(
    "words, dtype",
    [(37, torch.float32), (4099, torch.float32), (37, torch.bfloat16), (37, torch.float16)],
    ids=["one tile", "two tiles", "bf16", "fp16"],
)
def test_loss_and_gradients_over_a_vocabulary(words, dtype, options):
    tensors, labels = draw_head(words)
    tensors = [one.to(dtype) for one in tensors]
    exact = [one.double().requires_grad_() for one in tensors]
    leaves = [one.requires_grad_() for one in tensors]
    total = linear_cross_entropy(*leaves[:2], labels, leaves[2], chunk=9, **options)
    plain = plain_losses(*exact, labels, **options).sum()
    assert total.dtype == torch.float32
    gradients = (torch.autograd.grad(one / 3, of) for one, of in ((total, leaves), (plain, exact)))
    for one, other in [(total, plain), *zip(*gradients, strict=True)]:
        assert apart(one, other) < (EXACT if dtype == torch.float32 else ROUNDED)


@pytest.mark.parametrize("trained_head", [True, False], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("options", [HEADS[0], HEADS[2]], ids=["plain", "softcap"])
def test_losses_by_token_and_gradients_of_any_function_of_them(trained_head, options):
    tensors, labels = draw_head(37)
    factors = torch.randn(len(labels))
    exact = [one.double() for one in tensors]

    def run(function, hidden, weight, bias):
        wanted = [hidden, weight, bias] if trained_head else [hidden]
        for one in wanted:
            one.requires_grad_()
        losses = function(hidden, weight, bias)
        value = (losses * factors).sum().exp() + losses.square().sum()
        return [losses, *torch.autograd.grad(value, wanted)]

    found = run(lambda h, w, b: linear_token_losses(h, w, labels, b, chunk=9, **options), *tensors)
    plain = run(lambda h, w, b: plain_losses(h, w, b, labels, **options), *exact)
    assert not found[0][labels == -100].any()
    for one, other in zip(found, plain, strict=True):
        assert apart(one, other) < 1e-5


def test_words_that_a_bias_rules_out():
    (hidden, weight, bias), labels = draw_head(37)
    bias[5:9] = -torch.inf
    labels = labels.where((labels < 5) | (labels > 8), 3)
    total = linear_cross_entropy(hidden.requires_grad_(), weight, labels, bias)
    plain = plain_losses(hidden, weight, bias, labels).sum()
    assert total.item() == pytest.approx(plain.item(), rel=1e-6)
    assert apart(*(torch.autograd.grad(one, hidden)[0] for one in (total, plain))) < EXACT


def test_a_tied_head_without_any_counted_label():
    weight = torch.randn(37, 8, requires_grad=True)
    hidden = F.embedding(torch.arange(20), weight)
    linear_cross_entropy(hidden, weight, torch.full((20,), -100)).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def loss_and_gradients(total, model):
    params = [one for one in model.parameters() if one.requires_grad]
    found = torch.autograd.grad(total, params, allow_unused=True)
    return total.item(), torch.cat([one.flatten() for one in found if one is not None])


def compare_models(run, model, monkeypatch):
    """Loss and gradients with the kernels and with plain operations, both in fp32."""
    loss, found = loss_and_gradients(run(), model)
    for module in (attention_module, cross_entropy):
        monkeypatch.setattr(module, "has_kernels", lambda device, dtype: False)
    plain_loss, plain = loss_and_gradients(run(), model)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert apart(found, plain) < 1e-4


def test_a_t5_trains_in_the_kernels(monkeypatch):
    """Encoder, decoder, attention to the prompt and chunked loss, with empty rows and tiles, since the size is fixed."""
    task = Pretrain(LanguageOptions(model="chatlm-tiny"))
    torch.manual_seed(0)
    model = task.model().eval()
    rows = [task.dummy_row(shape) for shape in ((20, 30), (3, 66), (10, 2))]
    batch = PackedLayout(FixedSize((64, 128), 5)).collate(task, rows)
    compare_models(lambda: task.loss(model, batch).sum, model, monkeypatch)


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt-oss"])
def test_causal_models_train_in_the_kernels(name, monkeypatch):
    model = build(name, torch.float32)
    batch = causal.pack(draw_rows(), (128,))
    compare_models(lambda: causal.loss(model, batch).sum, model, monkeypatch)


def test_pairs_that_share_a_prompt_train_in_the_kernels(monkeypatch):
    model = build("qwen2", torch.float32)
    rows = [np.asarray(row) for row in draw_rows()]
    parts = [row[:5] for row in rows], [row[:7] for row in rows], [row[2:5] for row in rows]
    batch = pairs.pack_causal(*parts, 100, fill=0)
    compare_models(lambda: pairs.causal_log_probabilities(model, batch).square().sum(), model, monkeypatch)
