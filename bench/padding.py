"""The share of padding: fixed batches, Hugging Face's group-by-length, and rows split over all their lengths.

Padding is counted over source and target together: 1 − tokens / (rows × padded lengths). Every way has the same number of
micro-batches per step, 8 of 32 rows on average, and goes through as many steps of 256 rows.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from brimful.data.batches import Mix, StepSampler
from brimful.data.store import Store
from brimful.memory.split import split_by_memory

GLOBAL_BATCH, MICRO_BATCHES = 256, 8


def shares(real: Path, folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    lengths = real_lengths(real, folder)
    sampler = StepSampler(len(lengths), GLOBAL_BATCH, lengths=lengths.__getitem__)
    drawn = [sampler.step(number * GLOBAL_BATCH).rows for number in range(steps)]
    size = GLOBAL_BATCH // MICRO_BATCHES
    fixed = [step[start : start + size] for step in drawn for start in range(0, GLOBAL_BATCH, size)]
    yield {"bench": "padding", "way": f"fixed batches of {size}", "padding": share(lengths, fixed)}
    yield {"bench": "padding", "way": "HF group_by_length", "padding": share(lengths, grouped(lengths, size, steps))}
    for wanted in (4, 8, 16):
        yield {
            "bench": "padding",
            "way": "Brimful",
            **figures(lengths, [in_parts(lengths, step, wanted) for step in drawn]),
        }
    for group_of in (10, 50):
        mixed = StepSampler(len(lengths), GLOBAL_BATCH, lengths=lengths.__getitem__, mix=Mix(group_of))
        parts = [in_parts(lengths, mixed.step(number * GLOBAL_BATCH).rows, MICRO_BATCHES) for number in range(steps)]
        yield {"bench": "padding", "way": f"Brimful, --mix window:{group_of}", **figures(lengths, parts)}
    same = all(Counter(step.tolist()) == Counter(np.concatenate(in_parts(lengths, step, 8)).tolist()) for step in drawn)
    yield {"bench": "padding", "way": "rows of every step as without sorting", "same": same}


def real_lengths(real: Path, folder: Path) -> np.ndarray:
    """Tokens of every row, with a tokenizer of the model's size that was trained on them."""
    tokenizer, store = folder / "real-tokenizer", folder / "real-store"
    command = [sys.executable, "-m", "brimful", "data"]
    if not tokenizer.exists():
        subprocess.run([*command, "tokenizer", real, "--output", tokenizer], check=True, stdout=subprocess.DEVNULL)
    if not store.exists():
        line: list[Any] = [*command, "tokenize", real, "--tokenizer", tokenizer, "--output", store]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    rows = Store.open(store)
    return rows.shapes(range(len(rows)))


def grouped(lengths: np.ndarray, size: int, steps: int) -> list[np.ndarray]:
    """As `group_by_length=True` of HF's Trainer draws them: sorted by source within windows of 50 batches."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    sampler = LengthGroupedSampler(size, lengths=lengths[:, 0].tolist())
    drawn = [np.array(list(sampler)) for _ in range(1 + steps * GLOBAL_BATCH // len(lengths))]
    return [part[start : start + size] for part in drawn for start in range(0, len(part), size)]


def in_parts(lengths: np.ndarray, rows: np.ndarray, wanted: int) -> list[np.ndarray]:
    """The step split into about `wanted` micro-batches, by a search for the overhead that gives as many."""
    shapes = [tuple(row) for row in lengths[rows].tolist()]
    low, high, best = 0.0, 2e4, None
    for _ in range(12):
        price = (low + high) / 2
        best = split_by_memory(shapes, lambda count, shape, whole=False: count * sum(shape), 1e12, overhead=price)
        if len(best) == wanted:
            break
        low, high = (price, high) if len(best) > wanted else (low, price)
    return [rows[group] for group in best or []]


def figures(lengths: np.ndarray, steps: list[list[np.ndarray]]) -> dict[str, Any]:
    groups = [group for step in steps for group in step]
    return {"micro_batches": round(len(groups) / len(steps), 2), "padding": share(lengths, groups)}


def share(lengths: np.ndarray, groups: list[np.ndarray]) -> float:
    tokens = sum(int(lengths[group].sum()) for group in groups)
    padded = sum(len(group) * int(lengths[group].max(axis=0).sum()) for group in groups)
    return round(1 - tokens / padded, 4)
