"""Synthetic loss curves, healthy and not, with their learning rates: what `loss_checks` must leave alone and what it must find."""

import math
import random
from collections.abc import Callable

Curve = tuple[list[float], list[float]]
"""The loss and the learning rate of each step."""
LR = 1e-3


def cosine(steps: int, warmup: int = 0, floor: float = 0.1) -> list[float]:
    after = max(1, steps - warmup)
    return [
        LR * (step / warmup if step <= warmup else floor + (1 - floor) * (1 + math.cos(math.pi * (step - warmup) / after)) / 2)
        for step in range(1, steps + 1)
    ]  # fmt: skip


def wsd(steps: int, decay: float = 0.2) -> list[float]:
    start = (1 - decay) * steps
    return [LR if step <= start else LR * (1 - 0.9 * (step - start) / (steps - start)) for step in range(1, steps + 1)]


def restarts(steps: int, cycles: int) -> list[float]:
    length = math.ceil(steps / cycles)
    return (cosine(length, floor=0.02) * cycles)[:steps]


def noisy(levels: list[float], rng: random.Random, noise: float, correlation: float = 0.0) -> list[float]:
    """Noise is a share of the level, skewed to the upper side as losses are, with a spike once in 300 steps."""
    losses, last = [], 0.0
    for level in levels:
        last = correlation * last + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
        spike = 1 + 2 * rng.random() if rng.random() < 1 / 300 else 1
        losses.append(level * math.exp(noise * last - noise**2 / 2) * spike)
    return losses


def falling(rng: random.Random) -> Curve:
    """From scratch: a power law down to a floor."""
    steps = rng.choice((120, 300, 1000, 2500))
    start, pace = rng.uniform(2, 12), rng.uniform(0.4, 1.2)
    floor = start * rng.uniform(0.05, 0.6)
    levels = [floor + (start - floor) / (1 + step / rng.uniform(9, 10)) ** pace for step in range(steps)]
    return noisy(levels, rng, rng.choice((0.01, 0.03, 0.1, 0.2))), cosine(steps, warmup=steps // 50)


def warming_up(rng: random.Random) -> Curve:
    """A slow start, with a loss that rises a little while the rate does."""
    steps, start = rng.choice((200, 600, 2000)), rng.uniform(5, 11)
    warmup = steps // rng.choice((5, 10, 20))
    levels = [
        start * (1 + 0.06 * math.sin(math.pi * step / warmup))
        if step < warmup
        else start * (0.3 + 0.7 * math.exp(-4 * (step - warmup) / steps))
        for step in range(steps)
    ]
    return noisy(levels, rng, rng.choice((0.01, 0.05, 0.15))), cosine(steps, warmup=warmup)


def constant_then_down(rng: random.Random) -> Curve:
    """WSD: a slow fall, then a fast one."""
    steps, level = rng.choice((300, 1000, 3000)), rng.uniform(2, 4)
    levels = []
    for step in range(steps):
        base = level * (1 + 1.5 / (1 + step / 15))
        levels.append(base if step < 0.8 * steps else base * (1 - 0.12 * math.sqrt((step / steps - 0.8) / 0.2)))
    return noisy(levels, rng, rng.choice((0.01, 0.04, 0.1))), wsd(steps)


def restarting(rng: random.Random) -> Curve:
    """Warm restarts: the loss goes up with each jump of the rate and comes down again."""
    steps, cycles = rng.choice((400, 1200, 2400)), rng.choice((3, 4, 6))
    length, start = math.ceil(steps / cycles), rng.uniform(3, 8)
    levels = []
    for step in range(steps):
        base = start * (0.3 + 0.7 / (1 + step / (steps / 12)))
        phase = (step % length) / length
        levels.append(base * (1 + (0.25 * math.exp(-6 * phase) if step >= length else 0.0)))
    return noisy(levels, rng, rng.choice((0.01, 0.05, 0.1))), restarts(steps, cycles)


def fine_tuning(rng: random.Random) -> Curve:
    """From trained weights: a fall of 5 to 30 %, mostly early, under much noise."""
    steps, start, fall = rng.choice((150, 400, 1500)), rng.uniform(0.8, 2.5), rng.uniform(0.05, 0.3)
    levels = [start * (1 - fall * (1 - math.exp(-6 * step / steps))) for step in range(steps)]
    return noisy(levels, rng, rng.choice((0.05, 0.2, 0.4, 0.6))), cosine(steps, warmup=steps // 30)


def epochs(rng: random.Random) -> Curve:
    """A step down with every pass over the data."""
    steps, passes, start = rng.choice((300, 900)), rng.choice((3, 5)), rng.uniform(1.5, 4)
    levels = [start * 0.75 ** (step * passes // steps) * (1 + 0.5 / (1 + step / 10)) for step in range(steps)]
    return noisy(levels, rng, rng.choice((0.03, 0.1, 0.25))), cosine(steps, warmup=10)


def to_zero(rng: random.Random) -> Curve:
    """A classifier that learns its rows: near zero, all is noise."""
    steps = rng.choice((200, 800))
    levels = [0.7 * math.exp(-step / (steps / rng.uniform(7, 8))) + 0.004 for step in range(steps)]
    return noisy(levels, rng, rng.choice((0.2, 0.5, 0.8))), cosine(steps)


def preference(rng: random.Random) -> Curve:
    """From ln 2 down a little."""
    steps, end = rng.choice((200, 1000)), rng.uniform(0.45, 0.64)
    levels = [end + (0.693 - end) * math.exp(-5 * step / steps) for step in range(steps)]
    return noisy(levels, rng, rng.choice((0.03, 0.1, 0.2))), cosine(steps, warmup=10)


def negative(rng: random.Random) -> Curve:
    """A log-likelihood of densities falls below zero."""
    steps = rng.choice((300, 1000))
    return [2 - 5 * (1 - math.exp(-5 * step / steps)) + rng.gauss(0, 0.3) for step in range(steps)], cosine(steps)


def grouped_rows(rng: random.Random) -> Curve:
    """Neighbouring steps have similar rows."""
    steps, start = rng.choice((300, 1000)), rng.uniform(2, 6)
    levels = [start * (0.4 + 0.6 / (1 + step / 30)) for step in range(steps)]
    return noisy(levels, rng, rng.choice((0.05, 0.15)), correlation=0.3), cosine(steps, warmup=10)


HEALTHY: tuple[Callable[[random.Random], Curve], ...] = (
    falling, warming_up, constant_then_down, restarting, fine_tuning, epochs, to_zero, preference, negative, grouped_rows
)  # fmt: skip


def diverged(rng: random.Random) -> Curve:
    """Falls, then climbs above where it began."""
    steps, start = rng.choice((200, 600, 2000)), rng.uniform(3, 9)
    turn = rng.uniform(0.3, 0.7) * steps
    low = 0.5 * start
    levels = [
        low + (start - low) * math.exp(-5 * step / turn)
        if step < turn
        else low + (step - turn) / (steps - turn) * start
        for step in range(steps)
    ]
    return noisy(levels, rng, rng.choice((0.02, 0.1, 0.2))), cosine(steps, warmup=10)


def swinging(rng: random.Random) -> Curve:
    """Up and down by 40 %, five to nine times."""
    steps, swings = rng.choice((400, 1000)), rng.randint(5, 9)
    levels = [
        3 * (1 + 0.8 * math.exp(-20 * step / steps)) * (1 + 0.4 * math.sin(2 * math.pi * swings * step / steps))
        for step in range(steps)
    ]
    return noisy(levels, rng, rng.choice((0.02, 0.1))), [LR] * steps


def alternating(rng: random.Random) -> Curve:
    """Overshoots in every step."""
    steps = rng.choice((150, 500))
    levels = [2 * (1 + 0.5 * (-1) ** step) for step in range(steps)]
    return noisy(levels, rng, 0.05), [LR] * steps


def flat(rng: random.Random) -> Curve:
    """Learns nothing."""
    steps, level = rng.choice((400, 1500)), rng.uniform(0.5, 9)
    return noisy([level] * steps, rng, rng.choice((0.01, 0.03))), cosine(steps, warmup=10)


SICK: dict[Callable[[random.Random], Curve], str] = {
    diverged: "loss-diverging", swinging: "loss-swinging", alternating: "loss-swinging", flat: "loss-flat"
}  # fmt: skip
