"""The head: a small network from features to an energy, or to the logits of a classifier.

Dropout is handed in as factors, so that a run's masks are its own (`chance`) and the network is a pure function that
`torch.func` can stack. Weights begin as `nn.Linear` begins them, from a generator of the run's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What heads must share to be stacked."""

    inputs: int
    hidden: tuple[int, ...] = (256, 128)
    classes: tuple[int, ...] = ()
    """Of each task of a classifier; none for a head that gives one energy."""
    activation: str = "relu"

    @property
    def outputs(self) -> int:
        """All tasks have as many logits as the one with the most classes."""
        return len(self.classes) * max(self.classes) if self.classes else 1

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., tasks, classes]; those that a task does not have are −inf."""
        most = max(self.classes)
        found = outputs.unflatten(-1, (len(self.classes), most))
        if min(self.classes) == most:
            return found
        spare = torch.arange(most, device=found.device) >= torch.tensor(self.classes, device=found.device)[:, None]
        return found.masked_fill(spare, -torch.inf)


class Layer(nn.Module):
    """A linear layer whose weights lie [inputs, outputs], as sums over set bits read them; it begins as `nn.Linear` does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        linear = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Head(nn.Module):
    """Layers with an activation and dropout between them."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        sizes = (shape.inputs, *shape.hidden, shape.outputs)
        self.layers = nn.ModuleList(Layer(inputs, outputs) for inputs, outputs in pairwise(sizes))
        self.activation = ACTIVATIONS[shape.activation]()

    def forward(self, x: Tensor, factors: Sequence[Tensor] = (), *, after_first: bool = False) -> Tensor:
        """`factors`: dropout's, one tensor for each hidden layer, or none at all. `after_first`: `x` is what the first
        layer gave, which sparse features reach more cheaply."""
        x = x if after_first else self.layers[0](x)
        for place, layer in enumerate(self.layers[1:]):
            x = self.activation(x)
            x = layer(x * factors[place] if factors else x)
        return x


def made(shape: HeadShape, seed: int) -> Head:
    """A new head with the weights of this seed; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Head(shape)
