"""What tells early that preference training goes wrong: the rules behind the warnings of `dpo`.

A model can separate the replies of a pair by making both less likely: the loss falls and the accuracy rises while the model
forgets how to answer. Wrong labels, or a learning rate that is too low, give a loss that looks normal. After every
`WINDOW` steps these rules look at the figures that the loss has logged:

    chosen-collapsed     the log-probability of chosen replies is 0.5 per token below that of the first steps, which makes
                         each token 1.65 times less likely; by the median of a window, and by six errors of the fall. The
                         noise is that from one step to the next: a fall within a window is no noise
    loss-spiked          two windows in a row are above the lowest one by what `training.levels` calls a rise that matters
    accuracy-at-chance   of the last 4,000 pairs so few are told apart that an accuracy of 0.55 would give so few once in
                         10,000 cases (Chernoff's bound of the binomial distribution: half of 1,840 pairs), after 60 updates
                         at least. Windows in the first 30 updates or in warmup do not count: a model begins at 0.5

Imports no torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from brimful.training.levels import OF_LEVEL, SURE, Level, follows_rate, rise_matters

COLLAPSED, SPIKED, AT_CHANCE = "chosen-collapsed", "loss-spiked", "accuracy-at-chance"
WINDOW = 10
"""Steps."""
START = 5
"""The first steps, before training has changed much."""
FALL = 0.5
"""Nats per token."""
ABOVE_CHANCE, RARE = 0.55, 1e-4
CHANCE_PAIRS, CHANCE_STEPS, CHANCE_START = 4000, 60, 30
USUAL = 40
"""Windows that say how large the error of one usually is."""
TOKENS_LOGP, ACCURACY = "logp_chosen", "accuracy"


def watch(notes: dict[str, Any], step: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong after this step. `notes` keeps the figures of the window, and what windows before it showed."""
    if not notes:
        notes |= {"window": [], "errors": [], "logp_errors": [], "accuracies": [], "problems": {}}
        notes |= dict.fromkeys(("start", "start_logp", "start_error", "lowest", "last"))
    if not step["applied"] or not math.isfinite(step["loss"]):
        return dict(notes["problems"])
    window = notes["window"]
    window.append([step["step"], step["loss"], step["lr"], step["rows"], step.get(TOKENS_LOGP), step.get(ACCURACY)])
    if notes["start"] is None and len(window) == START:
        notes["start"], logp = _level(window, 1), _level(window, 4)
        notes["start_logp"] = None if logp is None else max(logp[0], window[0][4])
    if len(window) == WINDOW:
        problems = [_collapsed(notes), _spiked(notes), _at_chance(notes, step["step"])]
        notes["problems"] = dict(one for one in problems if one is not None)
        notes["window"] = []
    return dict(notes["problems"])


def _level(window: Sequence[Sequence[Any]], column: int) -> list[Any] | None:
    """A `Level` as the list of its fields, which a checkpoint can hold; None if the figure is unknown."""
    points = [(one[0], one[column], one[2]) for one in window if one[column] is not None and math.isfinite(one[column])]
    if len(points) < START:
        return None
    level = Level.of(points)
    return [level.loss, level.error, level.lr, level.first, level.last]


def _collapsed(notes: dict[str, Any]) -> tuple[str, str] | None:
    """The start is that of the first step if the next ones are lower: a high rate may ruin a model within them."""
    now, start = _level(notes["window"], 4), notes["start_logp"]
    if now is None or start is None:
        return None
    noise = _noise([one[4] for one in notes["window"] if one[4] is not None and math.isfinite(one[4])])
    if notes["start_error"] is None:  # of the first window: five steps would tell too little
        notes["start_error"] = noise * math.sqrt(WINDOW / START)
    error = max(noise, _usual(notes, "logp_errors", noise))
    if start - now[0] < max(FALL, SURE * math.hypot(error, max(error, notes["start_error"]))):
        return None
    return COLLAPSED, (
        f"the log-probability of chosen replies has fallen from {start:.2f} to {now[0]:.2f} per token, so the model forgets "
        "how to answer. Try: a lower lr=, or a higher beta="
    )


def _noise(values: Sequence[float]) -> float:
    """The error of their median, as far as they differ from one step to the next."""
    differences = [second - first for first, second in pairwise(values)]
    return 1.25 * 1.4826 * median(map(abs, differences)) / math.sqrt(2 * len(values))


def _usual(notes: dict[str, Any], name: str, error: float) -> float:
    """The mean error of the last windows. One from ten steps is rough, so at least this much is assumed."""
    notes[name] = [*notes[name], error][-USUAL:]
    return float(sum(notes[name]) / len(notes[name]))


def _spiked(notes: dict[str, Any]) -> tuple[str, str] | None:
    now = _level(notes["window"], 1)
    if now is None or notes["start"] is None:
        return None
    usual = _usual(notes, "errors", now[1])
    last, notes["last"] = notes["last"], now
    lowest = notes["lowest"]
    if lowest is None or now[0] < lowest[0]:
        notes["lowest"] = now
    if lowest is None or last == lowest:
        return None
    low, start, recent = Level(*lowest), Level(*notes["start"]), (Level(*last), Level(*now))
    low = replace(low, error=max(low.error, usual))
    progress = max(0.0, start.loss - low.loss)
    rises = all(rise_matters(low, one.loss, max(one.error, usual), progress=progress) for one in recent)
    above_start = all(one.loss > start.loss + OF_LEVEL * abs(start.loss) for one in recent)
    if not rises or (follows_rate(low, recent) and not above_start):
        return None
    return SPIKED, (
        f"the loss has risen from {low.loss:.4g} around step {(low.first + low.last) // 2} to {now[0]:.4g}. "
        "Try: a lower lr=, or a longer warmup="
    )


def _at_chance(notes: dict[str, Any], updates: int) -> tuple[str, str] | None:
    window, accuracies = notes["window"], notes["accuracies"]
    known = [one for one in window if one[5] is not None and math.isfinite(one[5])]
    if updates <= CHANCE_START or window[-1][2] > window[0][2]:
        return None
    accuracies.append([sum(one[3] for one in known), sum(one[3] * one[5] for one in known)])
    while sum(pairs for pairs, _ in accuracies[1:]) >= CHANCE_PAIRS:
        accuracies.pop(0)
    pairs, right = (sum(column) for column in zip(*accuracies, strict=True))
    if not pairs or updates < CHANCE_STEPS or not below(right / pairs, pairs, ABOVE_CHANCE):
        return None
    return AT_CHANCE, (
        f"the model tells chosen from rejected in {right / pairs:.1%} of the last {pairs:,} pairs, which is no better than "
        "chance. Try: check that chosen and rejected are not mixed up, or a higher lr="
    )


def below(share: float, count: float, bound: float) -> bool:
    """Whether a true share of `bound` would give so small a share of `count` in less than one of 10,000 cases.

    P(X ≤ share·n) ≤ exp(−n·KL(share ‖ bound)), for a share below the bound.
    """
    if share >= bound:
        return False
    parts = ((share, bound), (1 - share, 1 - bound))
    divergence = sum(p * math.log(p / q) for p, q in parts if p > 0)
    return count * divergence >= -math.log(RARE)
