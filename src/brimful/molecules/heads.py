"""One run: its head, its data, its random numbers and its loss. Nothing here depends on what else is trained.

Losses take many runs at once: energies [runs, ID rows] and [runs, OOD rows] to a loss per run.

`dpo` looks at all pairs, so its matrix grows with the square of the batch: 1,030 MB at 8,192 rows per side on a CPU. It is
summed a few rows at a time, and the same pass yields the gradient (row and column sums of the pairs' slopes), so nothing of
the matrix is kept for the backward: memory is linear in the batch, up to 65,536 × 65,536 pairs.

`hinge` needs no matrix. With one side sorted, the pairs that violate the margin are a range for each row of the other
side, and their sum is a difference of prefix sums. The hardest share of the pairs is the same with a higher threshold,
found by bisection.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.molecules.methods import Objective
from brimful.molecules.spec import TrainSpec

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The shape of a head. Heads must share it to be stacked."""

    inputs: int
    hidden: tuple[int, ...] = (256, 128)
    classes: tuple[int, ...] = ()
    """The number of classes of each task of a classifier; empty for a head with one output, the energy."""
    activation: str = "relu"

    @property
    def outputs(self) -> int:
        """All tasks have as many logits as the one with the most classes."""
        return len(self.classes) * max(self.classes) if self.classes else 1

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., tasks, classes]; −inf for classes that a task does not have."""
        most = max(self.classes)
        logits = outputs.unflatten(-1, (len(self.classes), most))
        if min(self.classes) == most:
            return logits
        unused = torch.arange(most, device=logits.device) >= torch.tensor(self.classes, device=logits.device)[:, None]
        return logits.masked_fill(unused, -torch.inf)


class Layer(nn.Module):
    """A linear layer with weights [inputs, outputs], the layout that sums over set bits read; initialised as nn.Linear."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        linear = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Head(nn.Module):
    """Layers with an activation and dropout between them.

    Dropout factors are an argument, so that a run's masks are its own and the network is a pure function for `torch.func`.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        sizes = (shape.inputs, *shape.hidden, shape.outputs)
        self.layers = nn.ModuleList(Layer(inputs, outputs) for inputs, outputs in pairwise(sizes))
        self.activation = ACTIVATIONS[shape.activation]()

    def forward(self, x: Tensor, factors: Sequence[Tensor] = (), *, after_first: bool = False) -> Tensor:
        """`factors`: dropout's, one tensor for each hidden layer, or none. `after_first`: `x` is the output of the first
        layer, which sparse features compute more cheaply."""
        x = x if after_first else self.layers[0](x)
        for place, layer in enumerate(self.layers[1:]):
            x = self.activation(x)
            x = layer(x * factors[place] if factors else x)
        return x


def new_head(shape: HeadShape, seed: int) -> Head:
    """A head with the initial weights of this seed. The state of the global generator does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Head(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One dataset with one encoder's features, and which rows are for what. Indices point into `features`."""

    features: Tensor
    """[rows, inputs], float32 or, for fingerprints of 0 and 1, uint8."""
    labels: Tensor | None = None
    """[rows, tasks], int64, −1 where a label is unknown."""
    id: Mapping[str, np.ndarray]
    """train, valid, test"""
    ood: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One head to train."""

    name: str
    """Unique in a sweep."""
    data: str
    """The key of its `Rows`."""
    objective: Objective
    options: Mapping[str, float] = field(default_factory=dict)
    seed: int
    shape: HeadShape
    training: TrainSpec = field(default_factory=TrainSpec)
    dropout: float = 0.1

    @property
    def pack_key(self) -> tuple[Any, ...]:
        """Jobs with the same key can share a pack."""
        return self.shape, self.training.batch


# ---- Random numbers --------------------------------------------------------------------------------------------------------
#
# The numbers of a generator depend on what was drawn before, in a pack by other runs. Here a number is the hash of
# (seed, purpose, time, position), so a run draws the same order and the same dropout alone, among a hundred others, after a
# resume, on a CPU and on a GPU. The hash is splitmix64's finaliser: two multiplications and three shifts in integers that
# wrap around on every device. One hash gives four 16-bit numbers, enough for dropout: at 120 runs the masks of 512 pairs and
# 384 units are 12 million hashes per step.

ORDER, DROPOUT, SAMPLES = 1, 2, 3
"""Purposes of random numbers."""
_GOLDEN = -7046029254386353131  # 2⁶⁴ / golden ratio, as a signed number
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685
_RANGE = 1 << 16


def splitmix64(values: Tensor) -> Tensor:
    """The finaliser of splitmix64. Shifts of signed numbers copy the sign, hence the masks."""
    values = (values ^ ((values >> 30) & (2**34 - 1))) * _FIRST
    values = (values ^ ((values >> 27) & (2**37 - 1))) * _SECOND
    return values ^ ((values >> 31) & (2**33 - 1))


def random_key(*parts: Tensor | int) -> Tensor:
    """One number from several (seed, purpose, time …), which broadcast."""
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    key = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        key = splitmix64(key * 31 + part + _GOLDEN)
    return key


def permutations(keys: Tensor, counts: Tensor, longest: int) -> Tensor:
    """For each key the numbers 0 … count − 1 in random order, [keys, longest]; what comes after them is padding."""
    positions = torch.arange(longest, device=keys.device)
    drawn = splitmix64(keys[:, None] + positions * _GOLDEN)
    drawn = torch.where(positions < counts[:, None], drawn, torch.iinfo(torch.int64).max)
    return drawn.argsort(dim=1, stable=True)


def random_int16(keys: Tensor, rows: int, units: int) -> Tensor:
    """For each key, rows × units numbers, uniform over int16."""
    width = -(-units // 4)
    positions = torch.arange(rows * width, device=keys.device) * _GOLDEN
    drawn = splitmix64(keys[:, None] + positions).view(torch.int16)
    return drawn.view(len(keys), rows, 4 * width)[:, :, :units]


def dropout_factors(keys: Tensor, rows: int, units: int, dropout: Tensor) -> Tensor:
    """[keys, rows, units]: 0 with a run's probability, else what keeps the mean."""
    dropped = (dropout.double() * _RANGE).round().clamp(max=_RANGE - 1).to(torch.int32)
    kept = random_int16(keys, rows, units) >= (dropped - _RANGE // 2).to(torch.int16)[:, None, None]
    return kept * (_RANGE / (_RANGE - dropped)).to(torch.float32)[:, None, None]


# ---- Losses ----------------------------------------------------------------------------------------------------------------

PAIRS_AT_ONCE = 1 << 24
"""Elements of the pair matrix that exist at one time, over all runs: 64 MiB of fp32 for each temporary tensor."""
PAIRS_AT_ONCE_CPU = 1 << 20
"""2.6 s for 8,192 × 8,192 pairs, against 3.8 s at four times and 4.8 s at a quarter of it (two busy cores)."""
BISECTIONS = 40
"""Steps that find the threshold of the hard pairs, to 10⁻¹² of the range of the energies."""


def energy_loss(objective: str, in_dist: Tensor, out_dist: Tensor, options: Mapping[str, Tensor]) -> Tensor:
    """The loss of each run; options are one number per run. `lam` keeps energies from growing without bound."""
    loss = ENERGY_LOSSES[objective](in_dist, out_dist, options)
    if "lam" not in options:
        return loss
    return loss + options["lam"] * (in_dist.square().mean(1) + out_dist.square().mean(1))


def dpo(in_dist: Tensor, out_dist: Tensor, beta: Tensor) -> Tensor:
    """Mean over all pairs of softplus(−β (E_ood − E_id)), per run."""
    return _AllPairs.apply(in_dist, out_dist, beta)


class _AllPairs(torch.autograd.Function):
    """The mean, and its gradient in the same pass."""

    @staticmethod
    def forward(ctx: Any, in_dist: Tensor, out_dist: Tensor, beta: Tensor) -> Tensor:
        runs, rows = in_dist.shape
        most = PAIRS_AT_ONCE_CPU if in_dist.device.type == "cpu" else PAIRS_AT_ONCE
        at_once = max(1, most // (runs * out_dist.shape[1]))
        total = in_dist.new_zeros(runs, dtype=torch.float64)
        id_grad, ood_grad = torch.empty_like(in_dist), torch.zeros_like(out_dist)
        slope = beta[:, None, None]
        for begin in range(0, rows, at_once):
            pairs = slope * (in_dist[:, begin : begin + at_once, None] - out_dist[:, None, :])
            total += F.softplus(pairs).sum((1, 2), dtype=torch.float64)
            slopes = pairs.sigmoid_()
            id_grad[:, begin : begin + at_once] = slopes.sum(2)
            ood_grad -= slopes.sum(1)
        count = rows * out_dist.shape[1]
        ctx.save_for_backward(id_grad * (beta / count)[:, None], ood_grad * (beta / count)[:, None])
        return (total / count).to(in_dist.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        id_grad, ood_grad = ctx.saved_tensors
        return id_grad * grads[0][:, None], ood_grad * grads[0][:, None], None


def bce(in_dist: Tensor, out_dist: Tensor) -> Tensor:
    """Binary cross-entropy of the energy as a logit, both sides with equal weight."""
    return (F.softplus(in_dist).mean(1) + F.softplus(-out_dist).mean(1)) / 2


def mse(in_dist: Tensor, out_dist: Tensor) -> Tensor:
    """Squared distance from 0 for ID and from 1 for OOD, both sides with equal weight."""
    return (in_dist.square().mean(1) + (out_dist - 1).square().mean(1)) / 2


def hinge(in_dist: Tensor, out_dist: Tensor, margin: Tensor, hard: Tensor | None = None) -> Tensor:
    """Mean of max(0, margin − (E_ood − E_id)) over the hardest share of all pairs, per run.

    Without a share it is the mean over all of them, which saves the search for the threshold: 300 small kernels.
    """
    shifted = in_dist + margin[:, None]
    ordered, _ = out_dist.sort(dim=1)
    pairs = in_dist.shape[1] * out_dist.shape[1]
    if hard is None:
        wanted, low = margin.new_full(margin.shape, pairs), torch.zeros_like(margin)
        high = low
    else:
        wanted = (hard * pairs).round().clamp(min=1)
        low, high = _hard_threshold(shifted.detach(), ordered.detach(), wanted)
    sums = F.pad(ordered.double().cumsum(1), (1, 0))
    over_high, count = _violations_above(high, shifted, ordered.detach(), sums)
    if hard is None:
        return (over_high / wanted).to(in_dist.dtype)
    over_low, more = _violations_above(low, shifted, ordered.detach(), sums)
    share = torch.where(more > count, (wanted - count) / (more - count), 0)  # of the pairs with equal violations
    return ((over_high + share * (over_low - over_high)) / wanted).to(in_dist.dtype)


def _violations_above(threshold: Tensor, shifted: Tensor, ordered: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the violations above a threshold, and their number."""
    below = torch.searchsorted(ordered, (shifted.detach() - threshold[:, None]).contiguous())
    return (below * shifted.double() - sums.gather(1, below)).sum(1), below.sum(1)


def _hard_threshold(shifted: Tensor, ordered: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Two adjacent violations: more pairs than wanted exceed the first, no more than wanted the second. 0 and 0 where
    fewer pairs violate the margin at all."""
    low = torch.zeros_like(wanted)
    high = (shifted.amax(1) - ordered[:, 0]).clamp(min=0).to(wanted.dtype)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        more = torch.searchsorted(ordered, (shifted - middle[:, None]).contiguous()).sum(1) > wanted
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return low, torch.where(low > 0, high, 0)


ENERGY_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]] = {
    "dpo": lambda in_dist, out_dist, options: dpo(in_dist, out_dist, options["beta"]),
    "bce": lambda in_dist, out_dist, options: bce(in_dist, out_dist),
    "mse": lambda in_dist, out_dist, options: mse(in_dist, out_dist),
    "hinge": lambda in_dist, out_dist, options: hinge(in_dist, out_dist, options["margin"], options.get("hard")),
}
"""By the name of an `Objective`, from the energies of both sides and one number per run for each option."""


def classifier_loss(
    objective: str, logits: Tensor, labels: Tensor, exposed: Tensor | None, options: Mapping[str, Tensor]
) -> Tensor:
    """Cross-entropy over the known labels, [runs, rows, tasks, classes]; `-oe` also reads the logits of OOD rows."""
    loss = cross_entropy(logits, labels)
    if objective == "classify":
        return loss
    assert exposed is not None
    if objective == "classify-oe":
        used = exposed.isfinite()
        uniform = torch.where(used, -exposed.log_softmax(-1), 0).sum(-1) / used.sum(-1)
        return loss + options["weight"] * uniform.mean((1, 2))
    inside, outside = -logits.logsumexp(-1), -exposed.logsumexp(-1)
    low = (inside - options["margin_in"][:, None, None]).clamp(min=0).square().mean((1, 2))
    high = (options["margin_out"][:, None, None] - outside).clamp(min=0).square().mean((1, 2))
    return loss + options["weight"] * (low + high)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over known labels (others are −1), per run."""
    known = labels >= 0
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -torch.where(known, chosen, 0).sum((1, 2)) / known.sum((1, 2)).clamp(min=1)
