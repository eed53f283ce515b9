"""A few histories give that of any size, and its peaks."""

import json

import numpy as np
import pytest

from brimful.memory.history import FIRST_STEP, SECOND_STEP, HistoriesDiffer, History, SymbolicHistory
from brimful.units import MiB


def history(rows: int, length: int, *, extra: bool = False) -> History:
    """Two steps of a model with 4 MiB of weights: an activation per token, gradients, a state of the optimizer.

    The second step has two micro-batches, as every traced history.
    """
    events: list[tuple[int, int]] = []
    kinds, origins, marks = [], [], []

    def allocate(size: int, kind: str) -> int:
        events.append((len(kinds), size))
        kinds.append(kind)
        origins.append(f"made {kind}")
        return len(kinds) - 1

    def free(index: int) -> None:
        events.append((index, -1))

    def mark(phase: str) -> None:
        marks.append((len(events), phase))

    def micro_batch(prefix: str, gradients: list[int]) -> None:
        mark(f"{prefix}forward")
        kept = allocate(1024 * rows * length, "activations")
        scores = allocate(64 * rows * length * length, "activations")
        if extra:
            free(allocate(512, "activations"))
        mark(f"{prefix}head")
        pairs = allocate(4096 * rows * rows, "loss")
        free(pairs)
        mark(f"{prefix}early")
        if not gradients:
            gradients.append(allocate(4 * MiB, "gradients"))
        mark(f"{prefix}late")
        free(scores)
        free(kept)

    mark("build")
    allocate(4 * MiB, "parameters")
    for step, batches in ((FIRST_STEP, 1), (SECOND_STEP, 2)):
        mark(step)
        gradients: list[int] = []
        for number in range(batches):
            micro_batch("first_" if number == 0 else "", gradients)
        mark("optimizer")
        if step == FIRST_STEP:
            allocate(8 * MiB, "optimizer")
        free(gradients[0])
        mark("idle")
    return History(rows, (length,), events, marks, kinds, origins)


SIZES = [(2, 64), (3, 64), (5, 32), (2, 48), (3, 40), (5, 56)]


@pytest.fixture(scope="module")
def symbolic():
    return SymbolicHistory.fit([history(*size) for size in SIZES])


@pytest.mark.parametrize("size", [(2, 64), (7, 96), (64, 512), (1, 8)])
def test_the_sizes_of_an_unseen_step_are_those_of_its_own_history(symbolic, size):
    rows, length = size
    np.testing.assert_array_equal(symbolic.sizes(rows, (length,)), history(rows, length).sizes)


def test_nothing_is_unexplained_if_every_size_is_a_product_of_rows_and_lengths(symbolic):
    assert symbolic.unexplained == 0.0


def test_the_peak_is_worked_out_by_hand(symbolic):
    """128 rows of 16: weights, state and gradients are 16 MiB, activations 2 + 2 MiB, pairs 64 MiB."""
    peaks = symbolic.peaks(128, (16,), accumulates=True, reserved=False)
    assert peaks.allocated_bytes == (4 + 8 + 4 + 2 + 2 + 64) * MiB
    assert peaks.phase == "head"


def test_without_accumulation_no_gradients_are_held_in_the_forward(symbolic):
    peaks = symbolic.peaks(128, (16,), accumulates=False, reserved=False)
    assert peaks.allocated_bytes == (4 + 8 + 2 + 2 + 64) * MiB
    assert peaks.phase == "first_head"
    assert set(peaks.phases) == {"first_forward", "first_head", "first_early", "first_late", "optimizer"}


def test_a_small_step_peaks_where_gradients_and_activations_meet(symbolic):
    peaks = symbolic.peaks(2, (16,), accumulates=False, reserved=False)
    assert peaks.allocated_bytes - (4 + 8 + 4) * MiB == 2 * 1024 * 16 + 2 * 64 * 16 * 16


def test_kinds_add_up_to_the_peak(symbolic):
    peaks = symbolic.peaks(128, (16,), accumulates=True, exchange_bytes=64 * MiB, reserved=False)
    assert sum(peaks.kinds.values()) == peaks.allocated_bytes
    assert peaks.kinds == {
        "parameters": 4 * MiB,
        "optimizer": 8 * MiB,
        "gradients": 4 * MiB,
        "activations": 4 * MiB,
        "loss": 64 * MiB,
        "exchange": 64 * MiB,
    }


def test_the_largest_blocks_are_named(symbolic):
    peaks = symbolic.peaks(128, (16,), accumulates=True, reserved=False, largest=2)
    assert [(block.bytes, block.kind, block.origin) for block in peaks.largest] == [
        (64 * MiB, "loss", "made loss"),
        (8 * MiB, "optimizer", "made optimizer"),
    ]


def test_shards_divide_weights_gradients_and_state_but_no_activations(symbolic):
    peaks = symbolic.peaks(128, (16,), accumulates=True, shards=4, reserved=False)
    assert peaks.allocated_bytes == (16 // 4 + 4 + 64) * MiB


def test_reserved_bytes_are_at_least_the_allocated_ones(symbolic):
    for expandable in (False, True):
        peaks = symbolic.peaks(64, (512,), accumulates=True, expandable=expandable)
        assert peaks.reserved_bytes >= peaks.allocated_bytes


def test_a_limit_below_what_is_needed_does_not_fit(symbolic):
    needed = symbolic.peaks(128, (16,), accumulates=True).reserved_bytes
    assert symbolic.peaks(128, (16,), accumulates=True, limit_bytes=needed).fits
    assert not symbolic.peaks(128, (16,), accumulates=True, limit_bytes=(4 + 8 + 64) * MiB).fits


def test_histories_of_another_order_are_refused():
    with pytest.raises(HistoriesDiffer):
        SymbolicHistory.fit([history(2, 64), history(3, 64, extra=True)])


def test_a_history_survives_json():
    one = history(3, 40)
    assert History.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_lengths_are_known_only_if_more_than_one_was_traced(symbolic):
    assert symbolic.varies_lengths
    assert not SymbolicHistory.fit([history(rows, 64) for rows in (2, 3, 5)]).varies_lengths
