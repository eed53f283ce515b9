"""Preference training that goes wrong, and training that only looks so: what the run warns of."""

import math
import random

import pytest

from brimful.tasks import preference_signals
from brimful.tasks.preference_signals import AT_CHANCE, COLLAPSED, SPIKED, below
from tests.report.why import loss_curves
from tests.tasks.pair_runs import Pairs, events


def watch(steps=400, rows=64, notes=None, start=1, **figures):
    """Kinds with the step at which each began, of a run with these figures: functions of the step."""
    notes, found = {} if notes is None else notes, {}
    base = {"loss": lambda step: 0.69, "lr": lambda step: 1e-6, "applied": lambda step: True, **figures}
    for step in range(start, steps + 1):
        values = {name: figure(step) for name, figure in base.items()}
        for kind in preference_signals.watch(notes, {"step": step, "rows": rows, **values}):
            found.setdefault(kind, step)
    return found


def noise(seed, size):
    draw = random.Random(seed)
    values = [draw.gauss(0, size) for _ in range(10_000)]
    return lambda step: values[step]


def test_chosen_replies_that_become_unlikely_are_found():
    rough = noise(1, 0.1)
    found = watch(logp_chosen=lambda step: -1.2 - min(1.0, step / 200) + rough(step), accuracy=lambda step: 0.9)
    assert list(found) == [COLLAPSED] and 70 <= found[COLLAPSED] <= 150


RUINED = (
    -0.00, -0.01, -0.17, -0.16, -0.22, -0.32, -0.44, -0.36, -0.42, -0.63, -0.67, -1.27, -1.96, -3.12, -3.45, -4.50, -3.65, -4.16, -3.45,
    -4.51, -2.86, -3.34, -3.32, -2.36, -2.04, -2.64, -2.24, -1.56, -2.53, -2.15,
)  # fmt: skip
"""Chosen replies in a run of a tiny model whose learning rate was too high."""


def test_a_fall_within_one_window_is_no_noise():
    found = watch(steps=len(RUINED), logp_chosen=lambda step: RUINED[step - 1], accuracy=lambda step: 1.0)
    assert found == {COLLAPSED: 20}


@pytest.mark.parametrize("fall", [0.0, 0.3, -0.5])
def test_those_that_stay_likely_are_not(fall):
    rough = noise(2, 0.1)
    assert not watch(logp_chosen=lambda step: -1.2 - fall * step / 400 + rough(step), accuracy=lambda step: 0.9)


def test_steps_that_say_little_warn_of_nothing():
    rough = noise(3, 2.0)
    assert not watch(logp_chosen=lambda step: -3 + rough(step), accuracy=lambda step: 0.8)


def test_one_window_with_long_rows_is_no_collapse_for_ever():
    notes = {}
    watch(steps=100, notes=notes, logp_chosen=lambda step: -1.0)
    watch(steps=110, start=101, notes=notes, logp_chosen=lambda step: -2.0)
    assert COLLAPSED in notes["problems"]
    watch(steps=120, start=111, notes=notes, logp_chosen=lambda step: -1.0)
    assert not notes["problems"]


@pytest.mark.parametrize("healthy", loss_curves.HEALTHY, ids=lambda one: one.__name__)
def test_healthy_losses_do_not_spike(healthy):
    draw = random.Random(5)
    for _ in range(10):
        losses, rates = healthy(draw)
        assert not watch(len(losses), loss=lambda at: losses[at - 1], lr=lambda at: rates[at - 1])  # noqa: B023


def test_losses_that_diverge_do():
    draw = random.Random(6)
    for _ in range(10):
        losses, rates = loss_curves.diverged(draw)
        assert SPIKED in watch(len(losses), loss=lambda at: losses[at - 1], lr=lambda at: rates[at - 1])  # noqa: B023


@pytest.mark.parametrize(("accuracy", "said"), [(0.5, True), (0.48, True), (0.58, False), (0.75, False)])
def test_an_accuracy_at_chance_is_told_apart_from_a_low_one(accuracy, said):
    draw = random.Random(7)
    shares = [sum(draw.random() < accuracy for _ in range(64)) / 64 for _ in range(401)]
    assert (AT_CHANCE in watch(accuracy=lambda step: shares[step])) is said


def test_few_pairs_say_nothing_about_chance():
    assert not watch(steps=400, rows=4, accuracy=lambda step: 0.5)
    assert not watch(steps=59, rows=1000, accuracy=lambda step: 0.5)


def test_a_run_of_1000_pairs_and_5_epochs_can_be_at_chance():
    assert 60 <= watch(steps=78, accuracy=lambda step: 0.5)[AT_CHANCE] <= 70


def test_what_a_model_has_not_learnt_yet_is_no_chance():
    """It begins as the reference, which tells no pair apart."""
    assert not watch(steps=100, rows=1000, accuracy=lambda step: 0.5 if step <= 30 else 0.6)
    warmup = {"lr": lambda step: 1e-8 * min(step, 200)}
    assert not watch(steps=400, rows=1000, accuracy=lambda step: 0.5 if step <= 200 else 0.6, **warmup)


@pytest.mark.parametrize(("count", "right"), [(4000, 2000), (4000, 2100), (4000, 2150), (2000, 1000), (500, 200)])
def test_the_bound_is_above_the_binomial_probability(count, right):
    """P(X ≤ right) for a share of 0.55, added up."""
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * math.log(0.55) + (count - k) * math.log(0.45)
        for k in range(right + 1)
    ]  # fmt: skip
    exact = sum(map(math.exp, logs))
    assert not below(right / count, count, 0.55) or exact < 1e-4


def test_a_step_that_was_skipped_or_is_nan_does_not_count():
    assert not watch(loss=lambda step: math.nan, logp_chosen=lambda step: -step, accuracy=lambda step: 0.5)
    assert not watch(applied=lambda step: False, logp_chosen=lambda step: -step, accuracy=lambda step: 0.5)


def test_a_run_that_forgets_how_to_answer_warns_once_and_stops(tmp_path, causal):
    one = Pairs("qwen2", causal.model, tmp_path)
    run, ending = one.train("collapses", lr=0.05, max_steps=60, valid=str(one.file), eval_every=10, patience=2)
    notes = [note for note in events(run, "note") if "signal" in note]
    kinds = [note["signal"] for note in notes]
    assert COLLAPSED in kinds and len(set(kinds)) == len(kinds) and notes[0]["level"] == "warning"
    losses = [one["loss"] for one in events(run, "eval")]
    assert losses == sorted(losses, reverse=True)  # every evaluation would have been the best so far
    collapsed = next(note["step"] for note in notes if note["signal"] == COLLAPSED)
    assert (ending.reason, ending.step) == ("patience", collapsed + 10)
    assert ending.best.step == collapsed - 10
    assert "last good checkpoint" in events(run, "end")[-1]["sentence"]
    log = events(run, "step")[-1]["log"]
    assert {"rewards/chosen", "rewards/rejected", "margin", "accuracy", "kl", "logp_chosen"} <= log.keys()
