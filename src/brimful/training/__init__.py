"""A training run: the one loop around the exact step, its folder, checkpoints, evaluation, and the processes it runs in.

    session      `train`: data, plan, model and loader put together, then the loop
    loop         the training loop and its hooks
    checkpoint   where a checkpoint becomes durable; state: what is in it
    run          the run's folder and the request it keeps
    launch       the processes of `brimful train`, and how they end

`train` and `Hook` load on first use, because `options`, `run` and `launch` must not import torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brimful.training.loop import Hook as Hook
    from brimful.training.session import train as train

__all__ = ["Hook", "train"]


def __getattr__(name: str) -> object:
    if name == "train":
        from brimful.training.session import train

        return train
    if name == "Hook":
        from brimful.training.loop import Hook

        return Hook
    raise AttributeError(f"module 'brimful.training' has no attribute {name!r}")
