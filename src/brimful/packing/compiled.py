"""`torch.compile` for the blocks of a model: one compiled function for all blocks of a kind, and for all sizes.

Compiling the blocks of T5 base takes 15 to 45 s, by the host. The result stays on disk, so later processes only load it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from brimful.files import cache_folder
from brimful.packing.attention import leave_uncompiled

VARIANTS = 64
"""Versions of one function: encoder and decoder blocks, with and without gradients, in training and evaluation. After torch's
own limit of 8 it runs uncompiled, without an error."""


def code_folder() -> Path:
    """Where torch keeps compiled code."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_folder("compiled"))


def compiled(function: Callable[..., Any], backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """The function compiled at its first call, with sizes left open."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(code_folder()))  # before torch reads it
    import torch._dynamo
    import torch.fx.experimental._config

    leave_uncompiled()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    # Sizes that are equal in the first call by chance, such as the tokens of both sides, must not be taken for always equal.
    torch.fx.experimental._config.use_duck_shape = False
    result: Callable[..., Any] = torch.compile(
        function, dynamic=True, backend=backend, options=_options() if backend == "inductor" else None
    )
    return result


def _options() -> dict[str, Any]:
    """Without a fusion that depends on the size: it made torch 2.11 compile T5's blocks a second time, in 17 s."""
    from torch._inductor import config

    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}
