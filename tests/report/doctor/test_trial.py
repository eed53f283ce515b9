"""What runs in the child processes, on the CPU."""

import torch

from brimful.report.doctor import trial


def test_a_device_that_computes_is_found_correct():
    result = trial.try_card("cpu", 0)
    assert result["correct"] and result["bf16_correct"] and result["seconds"] > 0


def test_a_device_that_computes_wrong_is_found(monkeypatch):
    real = torch.Tensor.__matmul__
    calls = []

    def flawed(left, right):
        calls.append(1)
        return real(left, right) + (len(calls) > 1)  # the first product is the expected one

    monkeypatch.setattr(torch.Tensor, "__matmul__", flawed)
    assert not trial.try_card("cpu", 0)["correct"]


def test_whatever_a_device_raises_is_the_answer():
    assert "error" in trial.try_card("cuda", 99)


def test_torchs_build_and_devices_are_told_without_a_context(monkeypatch):
    facts = trial.torch_facts()
    assert facts["version"] == torch.__version__ and facts["cuda"] == torch.version.cuda
    assert isinstance(facts["gpus"], list) and facts["gloo"]
