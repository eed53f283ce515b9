"""Triton compiles the kernels for cards that are not here, down to machine code. Nothing runs: `Card` stands for the driver."""

import os
from importlib.util import find_spec

import pytest
import torch

from brimful.errors import TaskError
from brimful.packing.sequence import boundaries

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton that compiles: pip install -e '.[dev]' on Linux", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from brimful.packing import triton_kernels

KiB = 1024
A100, RTX4090, H200 = (("cuda", one, 32) for one in (80, 89, 90))
B200, RTX5090, MI300X = ("cuda", 100, 32), ("cuda", 120, 32), ("hip", "gfx942", 64)
SHARED = {A100: 163 * KiB, RTX4090: 99 * KiB, H200: 227 * KiB, B200: 227 * KiB, RTX5090: 99 * KiB, MI300X: 64 * KiB}
"""The shared memory that a program may use."""


class Card(DriverBase):
    """A card as Triton's launcher sees it. Kernels that would run are added to a list."""

    def __init__(self, card, shared_bytes=None):
        self.target, self.shared_bytes, self.utils = GPUTarget(*card), shared_bytes or SHARED[card], self
        self.launched = []

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return id(self)  # compiled code is kept by device

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": self.shared_bytes}

    def load_binary(self, name, kernel, shared, device):
        assert kernel[:4] == b"\x7fELF"
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.launched.append((metadata.name, metadata.num_stages))

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError

    get_active_torch_device = get_benchmarker = None


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Makes a card the current one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_kernels, "_setting", {})

    def use(card, shared_bytes=None):
        monkeypatch.setattr(driver, "_active", one := Card(card, shared_bytes))
        return one

    return use


def train(
    heads=4, kv_heads=4, dim=64, radius=None, sinks=False, dtype=torch.bfloat16, table=torch.float32,
    causal=True, window=0, softcap=0.0, dropout=0.0,
):  # fmt: skip
    """Attention forward and backward, without results."""
    rows = boundaries([5, 70, 130], 256)
    q, k, v = (torch.zeros(256, h, dim, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    bias = None if radius is None else torch.zeros(heads, 2 * radius - 1, dtype=table, requires_grad=True)
    sink = torch.zeros(heads, dtype=dtype, requires_grad=True) if sinks else None
    seed = torch.zeros(1, dtype=torch.int64) if dropout else None
    out, _ = triton_kernels.packed_attention(
        q, k, v, bias, sink, seed, *rows, *rows, dim**-0.5, causal, window, softcap, dropout
    )
    out.sum().backward()


KERNELS = ["_forward", "_query_gradient", "_key_gradient"]
T5 = {"radius": 129, "dropout": 0.1}
GEMMA = {"kv_heads": 2, "dim": 256, "window": 4096, "softcap": 50.0}


@pytest.mark.parametrize(
    "card, options",
    [
        (H200, T5),
        (H200, GEMMA),
        (A100, T5),
        (B200, {}),
        (RTX5090, {"kv_heads": 2, "dim": 128, "dropout": 0.6}),
        (MI300X, T5),
        (RTX4090, {**T5, "causal": False}),
        (RTX4090, {"radius": 129, "dim": 128, "table": torch.bfloat16}),
        (RTX4090, {"causal": False, "dropout": 0.1, "dtype": torch.float16}),
        (RTX4090, {"kv_heads": 2, "window": 128, "sinks": True}),
        (RTX4090, {"dim": 80}),
    ],
    ids=[
        "T5 on an H200", "Gemma on an H200", "T5 on an A100", "GPT-2 on a B200",
        "Qwen on an RTX 5090", "T5 on an MI300X", "encoder", "T5 11B in bf16", "cross in fp16",
        "GPT-OSS", "Phi",
    ],
)  # fmt: skip
def test_attention_compiles_and_fits(card, options, use):
    used = use(card)
    train(**options)
    names = [name for name, _ in used.launched]
    assert names == (KERNELS if "radius" not in options else [*KERNELS, "_bias_gradient"])


def test_a_card_with_little_shared_memory_runs_fewer_stages_and_remembers_it(use):
    card = use(RTX4090)
    train(**GEMMA)
    train(**GEMMA)
    first = card.launched[:3]
    assert first == [(name, 1) for name in KERNELS]
    assert card.launched == 2 * first


def test_heads_that_no_setting_fits_are_refused(use):
    use(RTX4090, 20 * KiB)
    with pytest.raises(
        TaskError, match="heads of 128 does not fit the shared memory of this card. Try: layout='padded'"
    ):
        train(dim=128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("factor", [None, torch.zeros(()), torch.zeros(8)], ids=["sum", "scaled", "by token"])
def test_the_loss_compiles(dtype, factor, use):
    used = use(A100)
    logits, labels = torch.zeros(8, 5008, dtype=dtype), torch.zeros(8, dtype=torch.int64)
    for smoothing, softcap, gradient in ((0.0, None, False), (0.1, 5.0, True)):
        triton_kernels.cross_entropy(logits, 5003, labels, -100, smoothing, 0.5, softcap, gradient, factor)
    assert [name for name, _ in used.launched] == ["_cross_entropy"] * 2
