"""The kernels against the plain implementation in float64, and compiled blocks against the same blocks uncompiled."""

import copy
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

from brimful.memory.context import StepContext, to_device
from brimful.memory.layout import PACKED
from brimful.packing import attention as kernels
from brimful.packing import causal
from brimful.packing.attention import attention
from brimful.packing.cross_entropy import linear_cross_entropy, linear_token_losses
from brimful.packing.sequence import boundaries
from brimful.packing.t5 import compile_blocks
from brimful.planning.exactness import check_kernels
from brimful.planning.levers import checkpointing
from brimful.task import Task
from brimful.tasks.language import LanguageOptions, Pretrain
from tests.packing.families import EXACT, build, draw_rows, gradients

pytestmark = pytest.mark.gpu(emulated=False)

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


@pytest.mark.parametrize(
    "heads, kv_heads, dim, values, options",
    [
        (14, 2, 64, 64, {}),
        (4, 1, 256, 256, {}),
        (8, 4, 256, 256, {"window": 50, "softcap": 2.0}),
        (4, 4, 80, 80, {}),
        (4, 4, 96, 96, {"window": 50}),
        (8, 2, 64, 64, {"window": 50, "sinks": True}),
        (4, 4, 192, 128, {}),
        (4, 2, 8, 8, {}),
    ],
    ids=["qwen2.5", "gemma", "gemma2", "phi", "phi3", "gpt-oss", "deepseek", "tiny"],
)
def test_kernels_compute_the_attention_of_causal_families(heads, kv_heads, dim, values, options):
    torch.manual_seed(0)
    size, options = sum(ROWS) + 37, dict(options)
    rows = on_gpu(ROWS, size)
    shapes = ((size, heads, dim), (size, kv_heads, dim), (size, kv_heads, values))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    inputs += [torch.randn(heads, device="cuda", dtype=torch.bfloat16)] if options.pop("sinks", False) else []
    weight = torch.randn(size, heads, values, device="cuda", dtype=torch.bfloat16)
    weight[sum(ROWS) :] = 0

    def run(dtype):
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        sinks = leaves[3] if len(leaves) > 3 else None
        out = attention(*leaves[:3], rows, scale=dim**-0.5, causal=True, sinks=sinks, **options)
        return [out, *torch.autograd.grad((out * weight).sum(), leaves)]

    for kernel, reference in zip(run(torch.bfloat16), run(torch.float64), strict=True):
        assert distance(kernel, reference) < 1e-2


def test_gradients_without_strides_are_read_right():
    """As of a sum, and of heads that lie across the tokens."""
    rows = on_gpu([100, 200], 300)
    inputs = [torch.randn(300, 64, 4, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]

    def run(dtype):
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        return torch.autograd.grad(attention(*leaves, rows, scale=0.125, causal=True).sum(), leaves[2:])

    assert distance(run(torch.bfloat16)[0], run(torch.float64)[0]) < 1e-2


def causal_gradients(model, batch, autocast):
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        total = causal.loss(model, batch).sum
    return total.item(), torch.cat([one.flatten().double() for one in gradients(total, model) if one is not None])


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16 weights"])
@pytest.mark.parametrize("name", EXACT)
def test_packed_families_run_in_the_kernels(name, autocast):
    rows = draw_rows()
    batch = to_device(causal.pack(rows, (128,)), torch.device("cuda"))
    model = build(name, torch.float32).cuda()
    if not autocast:  # rounded at once, so that both runs have these weights; drawn in bf16 they would be others
        model = model.to(torch.bfloat16)
    exact_loss, exact = causal_gradients(copy.deepcopy(model).float(), batch, False)
    with mock.patch.object(kernels, "packed_attention", wraps=kernels.packed_attention) as used:
        loss, packed = causal_gradients(model, batch, autocast)
    assert used.call_count == model.config.get_text_config().num_hidden_layers
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        alone = sum(
            F.cross_entropy(model(row[None], use_cache=False).logits[0, :-1].float(), row[1:], reduction="sum")
            for row in (torch.as_tensor(row).cuda() for row in rows[1:])
        )
    own = torch.cat([one.flatten().double() for one in gradients(alone, model) if one is not None])
    assert loss == pytest.approx(exact_loss, rel=2e-2)
    assert distance(packed, exact) < 1.5 * distance(own, exact) + 2e-2


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt-oss"])
def test_checkpointed_blocks_run_again_inside_their_rows_in_autograds_thread(name):
    model = build(name, torch.bfloat16).cuda().train()
    batch = to_device(causal.pack(draw_rows(), (128,)), torch.device("cuda"))
    plain = causal_gradients(model, batch, False)[1]
    with checkpointing(Task(), model).set(1):
        assert distance(causal_gradients(model, batch, False)[1], plain) < 1e-3


def test_a_packed_step_does_not_wait_for_the_gpu():
    model = build("qwen2", torch.bfloat16).cuda()
    labels = [row * (row % 2) - 100 * (1 - row % 2) for row in draw_rows()]
    batch = to_device(causal.pack(draw_rows(), (256,), labels=labels), torch.device("cuda"))
    causal.loss(model, batch).sum.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        causal.loss(model, batch).sum.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_compiled_causal_blocks_compute_what_plain_ones_do_for_all_sizes(name):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = build(name, torch.float32).cuda()
    batches = [
        to_device(causal.pack(draw_rows(number, lengths), (room,)), torch.device("cuda"))
        for number, (room, lengths) in enumerate(((128, (30, 5, 40)), (256, (9, 60, 60, 3, 50)), (192, (60, 60))))
    ]
    plain = [causal_gradients(model, batch, True)[1] for batch in batches]
    causal.compile_blocks(model, True)
    graphs = []
    for batch, other in zip(batches, plain, strict=True):
        assert distance(causal_gradients(model, batch, True)[1], other) < 5e-2
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == graphs[2]
    assert not counters["graph_break"]


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


@pytest.mark.parametrize("trained_head", [True, False], ids=["trained head", "frozen head"])
def test_the_kernel_computes_losses_by_token_and_gradients_of_any_function_of_them(trained_head):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 96, device="cuda", dtype=torch.bfloat16) for size in (1000, 5003))
    labels = torch.randint(0, 5003, (1000,), device="cuda")
    labels[::7] = -100
    factors = torch.randn(1000, device="cuda")

    def run(dtype, plain=True):
        leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(trained_head)]
        if plain:
            logits = F.linear(*leaves).to(torch.promote_types(dtype, torch.float32))
            losses = F.cross_entropy(logits, labels, reduction="none")
        else:
            losses = linear_token_losses(*leaves, labels, chunk=300)
        value = (losses * factors).sum() + losses.square().sum()
        return [losses, *torch.autograd.grad(value, leaves[: 1 + trained_head])]

    kernel, same_precision, exact = run(torch.bfloat16, plain=False), run(torch.bfloat16), run(torch.float64)
    for one, other, reference in zip(kernel, same_precision, exact, strict=True):
        assert distance(one, reference) < 1.5 * distance(other, reference) + 1e-3


def test_a_position_bias_of_bf16_weights_is_rounded_once():
    torch.manual_seed(0)
    rows = on_gpu(ROWS, sum(ROWS))
    q, k, v = (torch.randn(sum(ROWS), 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    table = (20 * torch.randn(4, 511, device="cuda")).bfloat16()
    out = attention(q, k, v, rows, scale=0.125, bias=table)
    exact = attention(q.double(), k.double(), v.double(), rows, scale=0.125, bias=table.double())
    assert distance(out, exact) < 5e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_card_that_has_the_tensors():
    rows = boundaries(ROWS, sum(ROWS))
    rows = type(rows)(*(tensor.to("cuda:1") for tensor in rows))
    q = torch.randn(sum(ROWS), 4, 64, device="cuda:1", dtype=torch.bfloat16)
    out = attention(q, q, q, rows, scale=0.125, causal=True)
    exact = attention(*[q.double()] * 3, rows, scale=0.125, causal=True)
    assert out.device == q.device and distance(out, exact) < 5e-3


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt-oss"])
def test_planning_finds_that_the_kernels_agree_with_plain_operations(name):
    class Rows(Task):
        def pack(self, rows, tokens):
            return causal.pack(rows, tokens)

        def shape(self, row):
            return (len(row),)

        def loss(self, model, batch):
            return causal.loss(model, batch)

    model = build(name, torch.float32).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = StepContext(
        task=Rows(), model=model, optimizer=optimizer, device=torch.device("cuda"), autocast=torch.bfloat16
    )
    assert check_kernels(context, draw_rows()) == ""


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
