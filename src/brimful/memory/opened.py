"""What a forward is opened with: autocast, and attention whose kernels need no preparation where shapes vary.

cuDNN's attention, which torch prefers on Hopper cards and later, builds a plan for every shape it meets and keeps it for as
long as the process lives. Rows of varying length meet a new shape in every micro-batch. Measured on T5 base and an H200,
48 rows: 218 ms a micro-batch and 4.7 MiB of host RAM that never come back, against 84 ms and nothing with torch's own
kernels; on a shape met before, both take the same. A run of ten thousand steps would have ended with the host's memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def opened(device: torch.device, autocast: torch.dtype | None, *, cudnn_attention: bool = False) -> Iterator[None]:
    """For a forward; `autocast` None computes in the weights' own precision."""
    precision = nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast)
    with attention(cudnn=cudnn_attention), precision:
        yield


@contextmanager
def attention(*, cudnn: bool) -> Iterator[None]:
    """Without cuDNN's kernels in here, or as torch is set. A backward that computes blocks again needs the forward's."""
    if cudnn or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
