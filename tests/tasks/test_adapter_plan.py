"""Plans of models with a frozen base: its weights count, gradients and optimizer state of it do not exist."""

import pytest
import torch

import brimful
from tests.tasks.adapted import Adapted, Rows, make_base

pytest.importorskip("peft")


class Longer(Adapted):
    global_batch = 32
    worst_shape = (48,)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    sizes = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    return make_base(tmp_path_factory.mktemp("base") / "llama", "llama", std=0.02, **sizes)


@pytest.mark.parametrize(
    ("load_in", "dtype", "checkpointing"),
    [
        (None, torch.float32, "off"),
        (None, torch.bfloat16, "on"),
        ("4bit", torch.bfloat16, "off"),
        ("8bit", torch.bfloat16, "off"),
    ],
)
def test_the_peak_of_a_step_is_predicted_within_3_percent(base, load_in, dtype, checkpointing):
    if load_in:
        pytest.importorskip("bitsandbytes")
    plan = brimful.plan(
        Longer(base, "r=4", load_in, dtype), memory_limit="16MiB", device="cpu", cache=False, layout="padded", compile="off",
        checkpointing=checkpointing, deterministic=True, workers=0,
    )  # fmt: skip
    assert 1 <= plan.micro_batch < 32
    assert plan.measured_peak_bytes <= plan.fill * plan.limit_bytes
    assert abs(plan.predicted_peak_bytes / plan.measured_peak_bytes - 1) < 0.03


def test_the_plan_says_what_the_frozen_base_saves(base):
    plan = brimful.plan(
        Longer(base, "r=4"), data=Rows(), device="cpu", cache=False, layout="padded", compile="off", memory_limit="64MiB",
        deterministic=True, workers=0,
    )  # fmt: skip
    frozen = next(choice for choice in plan.choices if choice.name == "frozen")
    assert "of gradients" in frozen.reason and "of optimizer state" in frozen.reason


@pytest.mark.parametrize(
    ("saved", "load_in", "device", "precision", "dtype"),
    [
        ("bfloat16", None, "cuda", None, "bfloat16"),
        ("bfloat16", None, "cpu", None, "float32"),
        ("bfloat16", None, "cuda", "fp32", "float32"),
        ("bfloat16", None, "cpu", "bf16", "bfloat16"),
        ("float32", None, "cuda", None, "float32"),
        ("float32", "4bit", "cuda", None, "bfloat16"),
        ("float32", "4bit", "cuda", "fp32", "float32"),
    ],
)
def test_the_dtype_of_the_base_follows_device_and_precision(
    tmp_path, monkeypatch, saved, load_in, device, precision, dtype
):
    from brimful.tasks.language import Sft, SftOptions

    if load_in:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    folder = make_base(tmp_path / "base", dtype=getattr(torch, saved))
    task = Sft(SftOptions(model=str(folder), lora="r=4", load_in=load_in))
    task.use_device(torch.device(device), precision)
    assert task.base_dtype is getattr(torch, dtype)
    assert task.precision == ("bf16" if dtype == "bfloat16" else "auto")


def test_a_plan_on_the_cpu_has_a_base_in_float32_whatever_gpu_there_is(tmp_path, monkeypatch):
    from brimful.tasks.language import Sft, SftOptions

    class Tried(Sft):
        def model(self):
            model = super().model()
            dtypes.append(model.get_input_embeddings().weight.dtype)
            return model

    dtypes = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    folder = make_base(tmp_path / "base", dtype=torch.bfloat16)
    task = Tried(SftOptions(model=str(folder), lora="r=4", max_tokens=16))
    brimful.plan(task, device="cpu", cache=False, memory_limit="64MiB", deterministic=True, workers=0, global_batch=4)
    assert set(dtypes) == {torch.float32}
