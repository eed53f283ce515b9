"""The kernels against the plain implementation in float64, and compiled blocks against the same blocks uncompiled."""

import pytest
import torch
import torch.nn.functional as F

from brimful.memory.context import to_device
from brimful.memory.layout import PACKED
from brimful.packing.attention import attention
from brimful.packing.cross_entropy import linear_cross_entropy
from brimful.packing.sequence import boundaries
from brimful.packing.t5 import compile_blocks
from brimful.tasks.language import LanguageOptions, Pretrain

pytestmark = pytest.mark.gpu

ROWS = [5, 70, 1, 130, 256]


def distance(one, other):
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def on_gpu(lengths, size):
    rows = boundaries(lengths, size)
    return type(rows)(*(tensor.cuda() for tensor in rows))


@pytest.mark.parametrize(
    "keys, has_bias, heads, kv_heads, dim, options",
    [
        (None, True, 4, 4, 64, {}),
        (None, True, 4, 4, 64, {"causal": True}),
        ([64, 3, 20, 9, 200], False, 4, 4, 64, {}),
        (None, False, 8, 2, 128, {"causal": True}),
        (None, False, 4, 2, 64, {"causal": True, "window": 50, "softcap": 2.0}),
    ],
    ids=["encoder", "decoder", "cross", "grouped", "window and softcap"],
)
def test_kernels_compute_attention_and_its_gradients(keys, has_bias, heads, kv_heads, dim, options):
    torch.manual_seed(0)
    size, other = sum(ROWS) + 37, sum(keys or ROWS) + 37
    queries, others = on_gpu(ROWS, size), on_gpu(keys or ROWS, other)
    shapes = ((size, heads, dim), (other, kv_heads, dim), (other, kv_heads, dim))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    inputs += [torch.randn(heads, 511, device="cuda")] if has_bias else []
    weight = torch.randn(size, heads, dim, device="cuda", dtype=torch.bfloat16)
    weight[sum(ROWS) :] = 0

    def run(dtype=None):
        leaves = [one.to(dtype or one.dtype).requires_grad_() for one in inputs]
        bias = leaves[3] if has_bias else None
        out = attention(*leaves[:3], queries, others, scale=dim**-0.5, bias=bias, **options)
        return [out, *torch.autograd.grad((out * weight).sum(), leaves)]

    for kernel, reference in zip(run(), run(torch.float64), strict=True):
        assert distance(kernel, reference) < 5e-3


def test_gradients_with_dropout_are_those_of_the_same_draw():
    torch.manual_seed(0)
    rows = on_gpu([100, 200], 300)
    inputs = [torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    steps = [torch.randn(300, 4, 64, device="cuda") for _ in inputs]
    weight = torch.randn(300, 4, 64, device="cuda")

    def value(move):
        torch.manual_seed(7)
        moved = [(one + move * step).to(torch.bfloat16) for one, step in zip(inputs, steps, strict=True)]
        return (attention(*moved, rows, scale=0.125, dropout=0.1).float() * weight).sum()

    gradients = torch.autograd.grad(value(0.0), inputs)
    slope = sum((gradient.float() * step).sum() for gradient, step in zip(gradients, steps, strict=True)).item()
    with torch.no_grad():
        assert ((value(0.1) - value(-0.1)) / 0.2).item() == pytest.approx(slope, rel=0.05)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"softcap": 5.0, "logit_scale": 0.5}])
def test_the_kernel_computes_the_loss_and_its_gradients(options):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 96, device="cuda", dtype=torch.bfloat16) for size in (1000, 5003))
    labels = torch.randint(0, 5003, (1000,), device="cuda")
    labels[::7] = -100

    def run(dtype, plain=True):
        leaves = [one.to(dtype).requires_grad_() for one in (hidden, weight)]
        if not plain:
            total = linear_cross_entropy(*leaves, labels, chunk=300, **options)
        else:
            logits = F.linear(*leaves).to(torch.promote_types(dtype, torch.float32)) * options.get("logit_scale", 1.0)
            cap = options.get("softcap")
            logits = cap * torch.tanh(logits / cap) if cap else logits
            smoothing = options.get("label_smoothing", 0.0)
            total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        return [total, *torch.autograd.grad(total, leaves)]

    kernel, same_precision, exact = run(torch.bfloat16, plain=False), run(torch.bfloat16), run(torch.float64)
    for one, other, reference in zip(kernel, same_precision, exact, strict=True):
        assert distance(one, reference) < 1.2 * distance(other, reference) + 1e-4


def test_compiled_blocks_compute_what_plain_ones_do():
    task = Pretrain(LanguageOptions(model="chatlm-tiny"))
    torch.manual_seed(0)
    model = task.model().cuda().eval()
    batch = to_device(PACKED.dummy(task, 8, (20, 50)), torch.device("cuda"))

    def run():
        with torch.autocast("cuda", torch.bfloat16):
            total = task.loss(model, batch).sum
        return [
            total,
            *torch.autograd.grad(total, [model.shared.weight, model.decoder.block[1].layer[0].SelfAttention.q.weight]),
        ]

    plain = run()
    compile_blocks(model, True)
    for compiled, other in zip(run(), plain, strict=True):
        assert distance(compiled, other) < 5e-2
