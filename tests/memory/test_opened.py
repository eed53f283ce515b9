"""cuDNN's attention is out of the way where it was asked to be, and torch's setting is as before afterwards."""

import pytest
import torch

from brimful.memory.context import attention_kernels, forward_context

CPU = torch.device("cpu")
enabled = torch.backends.cuda.cudnn_sdp_enabled


def test_a_forward_runs_without_it_unless_asked_for():
    with forward_context(CPU, None):
        assert not enabled()
    with forward_context(CPU, None, cudnn_attention=True):
        assert enabled()
    assert enabled()


def test_autocast_is_opened_as_asked():
    with forward_context(CPU, torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    with forward_context(CPU, None):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_an_error_leaves_the_setting_as_it_was():
    with pytest.raises(ValueError, match="x"), attention_kernels(cudnn=False):
        raise ValueError("x")
    assert enabled()


def test_one_inside_another_and_one_that_was_off_before():
    with attention_kernels(cudnn=False):
        with attention_kernels(cudnn=False):
            pass
        assert not enabled()
        with attention_kernels(cudnn=True):
            assert not enabled()  # left as it is, and a caller's wish is that of the outer block
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with attention_kernels(cudnn=False):
            pass
        assert not enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
