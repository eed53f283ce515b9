"""Packed steps on CUDA tensors without bytes: none of the CPU among them, no precisions mixed up, no number read by the host.

`estimation.fake_cuda` makes a CUDA device of a few lines of C++, so this runs where there is no GPU. Attention returns what its
fake implementation says; `test_kernels_interpreted.py` tests what it computes.
"""

from importlib.util import find_spec

import pytest
import torch

from brimful.estimation import fake_cuda
from brimful.memory.context import StepContext
from brimful.memory.layout import FixedSize, PackedLayout
from brimful.packing import causal, causal_head, pairs
from brimful.planning.levers import checkpointing
from brimful.task import Loss, Task, map_tensors
from brimful.tasks.language import LanguageOptions, Pretrain
from tests.packing.families import build, draw_rows

if find_spec("triton") is None:
    pytest.skip("needs Triton: pip install -e '.[dev]' on Linux", allow_module_level=True)

CUDA = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _compiler():
    if isinstance(why := fake_cuda.load_shim(), str):
        pytest.skip(why)


@pytest.fixture(autouse=True)
def _loss_without_a_kernel(monkeypatch):
    """It is no operation of torch's, so it has no fake implementation."""

    def cross_entropy(logits, words, labels, ignore_index, smoothing, scale, softcap, wanted, factor=None):
        assert logits.device == labels.device and logits.dtype in (BF16, FP16)
        assert factor is None or (factor.device, factor.dtype) == (logits.device, FP32)
        return torch.empty(len(labels), dtype=FP32, device=logits.device)

    monkeypatch.setattr("brimful.packing.triton_kernels.cross_entropy", cross_entropy)


class Given(Task):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss


def step(model, loss, batch, *, autocast=BF16, every=0):
    """Forward and backward of a micro-batch."""
    with fake_cuda.fake_device(CUDA, has_bf16=True) as mode:
        model._apply(lambda tensor: torch.empty_like(tensor, device=CUDA)).train()
        mode.allow_non_fake_inputs = False
        causal_head._proved[model] = True  # else the first step reads what its proof says
        task = Given(loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        context = StepContext(task=task, model=model, optimizer=optimizer, device=CUDA, autocast=autocast)
        on_card = map_tensors(batch, lambda tensor: mode.from_tensor(tensor).to(CUDA))
        with checkpointing(task, model).set(every):
            (term,) = context.forward_backward(on_card, 2.0).values()
    assert (term.sum.dtype, term.sum.device) == (FP32, CUDA)
    for param in model.parameters():
        assert param.grad is None or (param.grad.device, param.grad.dtype) == (CUDA, param.dtype)


@pytest.fixture(scope="module")
def t5():
    return Pretrain(LanguageOptions(model="chatlm-tiny"))


@pytest.mark.parametrize("weights, autocast, every", [(FP32, BF16, 0), (BF16, BF16, 1), (FP32, FP16, 2)])
@pytest.mark.parametrize("fixed", [None, FixedSize((64, 128), 5)], ids=["as packed", "fixed size"])
def test_t5(t5, weights, autocast, every, fixed):
    rows = [t5.dummy_row(shape) for shape in ((20, 30), (3, 66), (10, 2))]
    step(t5.model().to(weights), t5.loss, PackedLayout(fixed).collate(t5, rows), autocast=autocast, every=every)


@pytest.mark.parametrize("every", [0, 1], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3", "gpt2", "cohere2", "phi3"])
def test_causal_models(name, every):
    labels = [row * (row % 2) - 100 * (1 - row % 2) for row in draw_rows()]
    step(build(name, FP32), causal.loss, causal.pack(draw_rows(), (128,), labels=labels), every=every)


def replies():
    rows = draw_rows(lengths=(9, 30, 17))
    return [row[:5] for row in rows], [row[:7] for row in rows], [row[2:5] for row in rows]


def test_pairs_of_a_causal_model():
    def loss(model, batch):
        return Loss(sum=pairs.causal_log_probabilities(model, batch).square().sum(), count=3)

    step(build("qwen2", FP32), loss, pairs.pack_causal(*replies(), 100, fill=0))


def test_pairs_of_a_t5(t5):
    def loss(model, batch):
        return Loss(sum=pairs.t5_log_probabilities(model, batch).square().sum(), count=3)

    step(t5.model(), loss, pairs.pack_t5(*replies(), (64, 64), fill=0, start=0))
