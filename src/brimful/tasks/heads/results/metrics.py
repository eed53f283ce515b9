"""How well scores tell out-of-distribution (OOD) molecules from in-distribution (ID) ones: AUROC, AUPR and FPR95.

A score is higher for what looks out of distribution. AUROC is the same whichever side is called positive; AUPR and FPR95
are not, and papers differ: ODIN holds 95 % of ID, Outlier Exposure 95 % of OOD. So both are always computed, and `positive`
only chooses which pair goes by the plain names:

    positive   aupr                              fpr95
    "ood"      precision of calling OOD          share of ID wrongly called OOD, where ≥ 95 % of OOD is called so
    "id"       precision of calling ID           share of OOD wrongly called ID, where ≥ 95 % of ID is called so

Equal scores cannot be told apart, so they stand or fall together: half a pair in AUROC, one threshold in the others. With
fingerprints that is no rarity (a ring count has about ten values), and breaking ties by position would reward whichever
side is listed first. Everything is counted in integers and divided once, in O(n log n); the figures are scikit-learn's.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption

Side = Literal["ood", "id"]
Floats = npt.NDArray[np.float64]

_NAMES = {"id": "in-distribution", "ood": "out-of-distribution"}


def auroc(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike) -> float:
    """The chance that an OOD molecule scores higher than an ID one; an equal pair counts half."""
    inside, outside = np.sort(_checked(id_scores, "id")), _checked(ood_scores, "ood")
    below = int(np.searchsorted(inside, outside, "left").sum())
    not_above = int(np.searchsorted(inside, outside, "right").sum())
    return (below + not_above) / (2 * len(inside) * len(outside))


def aupr(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike, positive: Side = "ood") -> float:
    """Average precision: at every distinct threshold, the precision times the recall gained there."""
    wanted, others = _sides(id_scores, ood_scores, positive)
    thresholds, counts = np.unique(wanted, return_counts=True)
    hits = np.cumsum(counts[::-1])[::-1]  # of `wanted` at or above each threshold
    false = len(others) - np.searchsorted(np.sort(others), thresholds, "left")
    return float(np.sum(counts * (hits / (hits + false))) / len(wanted))


def fpr95(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike, positive: Side = "ood") -> float:
    """The share of the other side that is called positive too, at the highest threshold that calls ≥ 95 % of `positive` so.

    `positive="ood"`: of the thresholds t with at least 95 % of the OOD scores ≥ t, take the highest; the figure is the
    share of ID scores ≥ t. `positive="id"`: of the thresholds t with at least 95 % of the ID scores ≤ t, take the lowest;
    the figure is the share of OOD scores ≤ t. Nothing is interpolated. Lower is better.
    """
    wanted, others = _sides(id_scores, ood_scores, positive)
    needed = -(-95 * len(wanted) // 100)  # in integers: 0.95 × n can land on either side of a whole number
    threshold = np.partition(wanted, len(wanted) - needed)[len(wanted) - needed]
    return int(np.count_nonzero(others >= threshold)) / len(others)


def all_metrics(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike, positive: Side = "ood") -> dict[str, float]:
    """AUROC, and AUPR and FPR95 in both conventions; the plain names are those of `positive`."""
    _check_side(positive)
    both = {
        f"{name}_{side}": metric(id_scores, ood_scores, side)
        for name, metric in (("aupr", aupr), ("fpr95", fpr95))
        for side in ("ood", "id")
    }
    chosen = {name: both[f"{name}_{positive}"] for name in ("aupr", "fpr95")}
    return {"auroc": auroc(id_scores, ood_scores), **chosen, **both}


def _sides(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike, positive: Side) -> tuple[Floats, Floats]:
    """The positive side and the other one, turned so that higher speaks for the positive side."""
    _check_side(positive)
    inside, outside = _checked(id_scores, "id"), _checked(ood_scores, "ood")
    return (outside, inside) if positive == "ood" else (-inside, -outside)


def _check_side(positive: str) -> None:
    if positive not in _NAMES:
        raise BadOption(f'positive = "{positive}" names no side: use "ood" or "id"')


def _checked(values: npt.ArrayLike, side: Side) -> Floats:
    scores = np.asarray(values, dtype=np.float64)
    assert scores.ndim == 1, f"one score a molecule, not an array of shape {scores.shape}"
    if len(scores) == 0:
        raise BadData(
            f"there are no {_NAMES[side]} scores, so nothing can be told apart: give the split molecules on both sides"
        )
    unknown = int(np.count_nonzero(np.isnan(scores)))
    if unknown:
        raise BadData(
            f"{unknown} of {len(scores)} {_NAMES[side]} scores are not a number: look for NaN or very large values in the "
            "features, or train with a lower lr"
        )
    return scores
