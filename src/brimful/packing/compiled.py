"""`torch.compile` for the blocks of a model: one compiled function for all blocks of a kind, and for all sizes.

Compiling the blocks of T5 base takes about 20 s. The result stays on disk, so later processes only load it.
"""

import os
from collections.abc import Callable
from typing import Any

from brimful.files import cache_folder

VARIANTS = 64
"""Versions of one function: encoder and decoder blocks, with and without gradients, in training and evaluation. After torch's
own limit of 8 it runs uncompiled, without an error."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled at its first call, with sizes left open."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("compiled")))  # before torch reads it
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    result: Callable[..., Any] = torch.compile(function, dynamic=True)
    return result
