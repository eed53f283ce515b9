"""An exponential moving average of the weights, kept for evaluation and for the model that is saved.

It is torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`, to the bit: the first update copies the weights, each
later one moves the average `1 − decay` of the way to them. Only weights that are trained have an average; buffers and
frozen weights are the model's own.

The tensors are kept in the optimizer's state, under a name where others have a parameter. What is true of that state is then
true of them: the plan's probes count their bytes, checkpoints hold them, a resumed run has the same bits. A copy of T5 base
in another place would have to be told to each of these.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from brimful.errors import DoesNotFit
from brimful.memory.oom import OutOfMemory, attempt
from brimful.units import show_bytes

AVERAGE: Any = "average"
"""Its key in `Optimizer.state`, where torch keeps what is not of one parameter as it is."""
UPDATES = "updates"


def add_average(optimizer: Optimizer) -> None:
    """Make room for the average in the optimizer's state."""
    params = _trained(optimizer)
    device = next((param.device for param in params), torch.device("cpu"))
    tensors = attempt(lambda: {str(place): _empty(param) for place, param in enumerate(params)}, device)
    if isinstance(tensors, OutOfMemory):
        needed = sum(param.numel() * _dtype(param).itemsize for param in params)
        raise DoesNotFit(
            f"ema= takes {show_bytes(needed)} for the averages of the weights, and {device} has no room for them beside "
            "the weights. Try: without ema=, or a higher memory_limit=.",
            needed_bytes=needed,
        )
    optimizer.state[AVERAGE] = {UPDATES: 0, **tensors}


class WeightAverage:
    """The average in the state of an optimizer that `add_average` was called with."""

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        self.decay = decay
        self._optimizer, self._params = optimizer, _trained(optimizer)

    @property
    def updates(self) -> int:
        """Optimizer steps in the average."""
        return int(self._state[UPDATES])

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step that was applied. Allocates nothing."""
        averages = self._averages
        if self.updates == 0:
            torch._foreach_copy_(averages, self._params)
        elif all(average.dtype == param.dtype for average, param in zip(averages, self._params, strict=True)):
            torch._foreach_lerp_(averages, self._params, 1 - self.decay)
        else:  # lerp takes one dtype only
            torch._foreach_mul_(averages, self.decay)
            torch._foreach_add_(averages, self._params, alpha=1 - self.decay)
        self._state[UPDATES] += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In here the model has the averages as its weights. Before the first update it has its own.

        Nothing is copied, except weights of low precision: their averages are rounded into as many bytes as the gradients
        take in a step, and there are no gradients now.
        """
        weights = [param.data for param in self._params]
        averages = self._averages if self.updates else weights
        try:
            for param, average in zip(self._params, averages, strict=True):
                param.data = average.to(param.dtype)
            yield
        finally:
            for param, weight in zip(self._params, weights, strict=True):
                param.data = weight

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[AVERAGE]
        return state

    @property
    def _averages(self) -> list[torch.Tensor]:
        return [self._state[str(place)] for place in range(len(self._params))]


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]


def _empty(param: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(param, dtype=_dtype(param), requires_grad=False)


def _dtype(param: torch.Tensor) -> torch.dtype:
    """At least float32: in bfloat16, a decay of 0.999 would round every update to nothing."""
    return torch.promote_types(param.dtype, torch.float32)
