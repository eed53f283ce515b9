"""Decisions of the loop that need no training: which evaluation is the best one."""

import math

import pytest

from brimful.train.checkpoint import Best
from brimful.train.loop import Loop


def at(step: int, best: Best | None = None, best_by: str = "loss") -> Loop:
    """A loop that stands there; everything else of it is not asked for."""
    loop = Loop.__new__(Loop)
    loop.step, loop.best, loop.best_by = step, best, best_by
    return loop


def test_the_first_evaluation_is_the_best_so_far():
    loop = at(10)
    assert loop._is_best(-2.5)
    assert loop.best == Best(step=10, metric="loss", score=-2.5)


@pytest.mark.parametrize(("score", "better"), [(-2.4, True), (-2.5, False), (-2.6, False)])
def test_only_a_better_one_takes_its_place(score, better):
    before = Best(step=10, metric="loss", score=-2.5)
    loop = at(20, before)
    assert loop._is_best(score) is better
    assert loop.best == (Best(step=20, metric="loss", score=score) if better else before)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_the_best(score):
    loop = at(10)
    assert not loop._is_best(score)
    assert loop.best is None


def test_another_figure_starts_anew():
    """A run resumed with --best bleu: a loss of -2.5 and a BLEU of 0.1 cannot be compared."""
    loop = at(20, Best(step=10, metric="loss", score=-2.5), best_by="bleu")
    assert loop._is_best(0.1)
    assert loop.best == Best(step=20, metric="bleu", score=0.1)
