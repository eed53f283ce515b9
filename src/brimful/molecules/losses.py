"""The losses of energy heads, for many runs at once: energies [runs, ID rows] and [runs, OOD rows] to a loss per run.

`dpo` looks at all pairs, so its matrix grows with the square of the batch: 1,030 MB at 8,192 rows a side on a CPU. It is
summed here a few rows at a time, and the same pass yields the gradient (the row and column sums of the pairs' slopes), so
that nothing of the matrix is kept for the backward: memory is linear in the batch, 65,536 × 65,536 pairs included.

`hinge` needs no matrix at all. With one side sorted, the pairs that violate the margin are a range for each row of the
other side, and their sum a difference of prefix sums. The hard share is the same with a higher threshold, found by halving.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PAIRS_AT_ONCE = 1 << 24
"""Elements of the pair matrix that exist at one time, over all runs: 64 MiB of fp32 for each of the pass's few temporaries."""
ON_CPU = 1 << 20
"""On a CPU: 2.6 s for 8,192 × 8,192 pairs, against 3.8 at four times and 4.8 at a quarter of it (two busy cores)."""
HALVINGS = 40
"""Steps that find the hard pairs' threshold: to 10⁻¹² of the range of the energies."""


def dpo(in_dist: Tensor, out_dist: Tensor, beta: Tensor) -> Tensor:
    """Mean over all pairs of softplus(−β (E_ood − E_id)), per run."""
    return _AllPairs.apply(in_dist, out_dist, beta)


class _AllPairs(torch.autograd.Function):
    """The mean, and its gradient in the same pass."""

    @staticmethod
    def forward(ctx: Any, in_dist: Tensor, out_dist: Tensor, beta: Tensor) -> Tensor:
        runs, rows = in_dist.shape
        most = ON_CPU if in_dist.device.type == "cpu" else PAIRS_AT_ONCE
        at_once = max(1, most // (runs * out_dist.shape[1]))
        total = in_dist.new_zeros(runs, dtype=torch.float64)
        of_id, of_ood = torch.empty_like(in_dist), torch.zeros_like(out_dist)
        slope = beta[:, None, None]
        for begin in range(0, rows, at_once):
            pairs = slope * (in_dist[:, begin : begin + at_once, None] - out_dist[:, None, :])
            total += F.softplus(pairs).sum((1, 2), dtype=torch.float64)
            steep = pairs.sigmoid_()
            of_id[:, begin : begin + at_once] = steep.sum(2)
            of_ood -= steep.sum(1)
        count = rows * out_dist.shape[1]
        ctx.save_for_backward(of_id * (beta / count)[:, None], of_ood * (beta / count)[:, None])
        return (total / count).to(in_dist.dtype)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        of_id, of_ood = ctx.saved_tensors
        return of_id * slopes[0][:, None], of_ood * slopes[0][:, None], None


def bce(in_dist: Tensor, out_dist: Tensor) -> Tensor:
    """Binary cross-entropy of the energy as a logit, both sides of equal weight."""
    return (F.softplus(in_dist).mean(1) + F.softplus(-out_dist).mean(1)) / 2


def mse(in_dist: Tensor, out_dist: Tensor) -> Tensor:
    """Squared distance from 0 for ID and from 1 for OOD, both sides of equal weight."""
    return (in_dist.square().mean(1) + (out_dist - 1).square().mean(1)) / 2


def hinge(in_dist: Tensor, out_dist: Tensor, margin: Tensor, hard: Tensor | None = None) -> Tensor:
    """Mean of max(0, margin − (E_ood − E_id)) over the hardest share of all pairs, per run; over all of them without one,
    which spares the search for the share: 300 small kernels."""
    shifted = in_dist + margin[:, None]
    ordered, _ = out_dist.sort(dim=1)
    pairs = in_dist.shape[1] * out_dist.shape[1]
    if hard is None:
        wanted, low = margin.new_full(margin.shape, pairs), torch.zeros_like(margin)
        high = low
    else:
        wanted = (hard * pairs).round().clamp(min=1)
        low, high = _threshold(shifted.detach(), ordered.detach(), wanted)
    sums = F.pad(ordered.double().cumsum(1), (1, 0))
    over_high, count = _beyond(shifted, ordered.detach(), sums, high)
    if hard is None:
        return (over_high / wanted).to(in_dist.dtype)
    over_low, more = _beyond(shifted, ordered.detach(), sums, low)
    share = torch.where(more > count, (wanted - count) / (more - count), 0)  # of the pairs that violate alike
    return ((over_high + share * (over_low - over_high)) / wanted).to(in_dist.dtype)


def _beyond(shifted: Tensor, ordered: Tensor, sums: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the violations larger than the threshold, and how many they are."""
    below = torch.searchsorted(ordered, (shifted.detach() - threshold[:, None]).contiguous())
    return (below * shifted.double() - sums.gather(1, below)).sum(1), below.sum(1)


def _threshold(shifted: Tensor, ordered: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Two violations next to each other: more pairs than wanted exceed the first, no more than wanted the second. 0 and 0
    where fewer pairs violate at all."""
    low = torch.zeros_like(wanted)
    high = (shifted.amax(1) - ordered[:, 0]).clamp(min=0).to(wanted.dtype)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        more = torch.searchsorted(ordered, (shifted - middle[:, None]).contiguous()).sum(1) > wanted
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return low, torch.where(low > 0, high, 0)


def square(in_dist: Tensor, out_dist: Tensor) -> Tensor:
    """E_id² + E_ood², what `lam` weighs: it keeps energies from growing without bound."""
    return in_dist.square().mean(1) + out_dist.square().mean(1)


def energy_loss(objective: str, in_dist: Tensor, out_dist: Tensor, options: Mapping[str, Tensor]) -> Tensor:
    """The loss of each run; options are one number a run."""
    losses: dict[str, Callable[[], Tensor]] = {
        "dpo": lambda: dpo(in_dist, out_dist, options["beta"]),
        "bce": lambda: bce(in_dist, out_dist),
        "mse": lambda: mse(in_dist, out_dist),
        "hinge": lambda: hinge(in_dist, out_dist, options["margin"], options.get("hard")),
    }
    return losses[objective]() + options["lam"] * square(in_dist, out_dist)


def classifier_loss(
    objective: str, logits: Tensor, labels: Tensor, exposed: Tensor | None, options: Mapping[str, Tensor]
) -> Tensor:
    """Cross-entropy over the labels that are known, [runs, rows, tasks, classes]; `-oe` also on OOD rows' logits."""
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
