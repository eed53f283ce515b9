"""What one run is: its data, its objective, its head and its numbers. Nothing here depends on what else is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from brimful.molecules.spec import Objective, TrainSpec

# The head: a small network from features to an energy, or to the logits of a classifier.
#
# Dropout is handed in as factors, so that a run's masks are its own (`chance`) and the network is a pure function that
# `torch.func` can stack. Weights begin as `nn.Linear` begins them, from a generator of the run's own.


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


# Everything random in a run as a function of its seed and a counter: order of the rows, dropout, nothing else.
#
# A generator's numbers depend on who asked before; in a pack that would be the other runs. Here a number is the hash of
# (seed, what for, when, where), so a run draws the same order and the same dropout alone, among a hundred others, after a
# resume, on a CPU and on a card. The hash is splitmix64's finaliser: two multiplications, three shifts, in whole numbers that
# wrap around on every device. One hash gives four 16-bit lots, which is what dropout needs: at 120 runs the masks of
# 512 pairs and 384 units are 12 million hashes a step.


_GOLDEN = -7046029254386353131  # 2⁶⁴ / golden ratio, as a signed number
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685
ORDER, DROPOUT, SAMPLES = 1, 2, 3
"""What numbers are drawn for."""
LOTS = 1 << 16


def mixed(values: Tensor) -> Tensor:
    """splitmix64's finaliser of whole numbers. Shifts of signed numbers copy the sign, hence the masks."""
    values = (values ^ ((values >> 30) & (2**34 - 1))) * _FIRST
    values = (values ^ ((values >> 27) & (2**37 - 1))) * _SECOND
    return values ^ ((values >> 31) & (2**33 - 1))


def key(*parts: Tensor | int) -> Tensor:
    """One number from several: seed, purpose, time …; they broadcast."""
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    found = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        found = mixed(found * 31 + part + _GOLDEN)
    return found


def orders(keys: Tensor, counts: Tensor, longest: int) -> Tensor:
    """For each key (a shuffling) the numbers 0 … count − 1 in random order, [keys, longest]; what lies beyond is padding."""
    places = torch.arange(longest, device=keys.device)
    drawn = mixed(keys[:, None] + places * _GOLDEN)
    drawn = torch.where(places < counts[:, None], drawn, torch.iinfo(torch.int64).max)
    return drawn.argsort(dim=1, stable=True)


def lots(keys: Tensor, rows: int, units: int) -> Tensor:
    """For each key, rows × units numbers from −2¹⁵ to 2¹⁵ − 1, all alike likely, as int16."""
    width = -(-units // 4)
    places = torch.arange(rows * width, device=keys.device) * _GOLDEN
    drawn = mixed(keys[:, None] + places).view(torch.int16)
    return drawn.view(len(keys), rows, 4 * width)[:, :, :units]


def kept(keys: Tensor, rows: int, units: int, dropout: Tensor) -> Tensor:
    """Dropout's factors, [keys, rows, units]: 0 with a run's probability, else what keeps the mean."""
    dropped = (dropout.double() * LOTS).round().clamp(max=LOTS - 1).to(torch.int32)
    stays = lots(keys, rows, units) >= (dropped - LOTS // 2).to(torch.int16)[:, None, None]
    return stays * (LOTS / (LOTS - dropped)).to(torch.float32)[:, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One dataset's rows of one encoder's features, and which are for what. Indices point into `features`."""

    features: Tensor
    """[rows, inputs], float32 or, for fingerprints of 0 and 1, uint8."""
    labels: Tensor | None = None
    """[rows, tasks], int64, −1 where a label is not known."""
    id: Mapping[str, np.ndarray]
    """train, valid, test"""
    ood: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One head to be trained."""

    name: str
    """Unique in a sweep, and a file's name."""
    data: str
    """The key of its `Rows`."""
    objective: Objective
    options: Mapping[str, float] = field(default_factory=dict)
    seed: int
    shape: HeadShape
    training: TrainSpec = field(default_factory=TrainSpec)
    dropout: float = 0.1

    @property
    def kin(self) -> tuple[Any, ...]:
        """Jobs with the same one can share a pack."""
        return self.shape, self.training.batch

    @property
    def sees_ood(self) -> bool:
        return self.objective != "classify"
