"""Decisions of the loop that need no training: which evaluation is the best one, and which checkpoint may go."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from brimful.step.distributed import SingleProcess
from brimful.task import Task
from brimful.training import state
from brimful.training.checkpoint import Best, Checkpoints
from brimful.training.events import Journal
from brimful.training.loop import Hook, Loop
from brimful.training.patience import Patience
from tests.training.saved import names, writer


def at(step: int, best: Best | None = None, best_by: str = "loss") -> Loop:
    """A loop that stands there; everything else of it is not asked for."""
    loop = Loop.__new__(Loop)
    loop.step, loop.best, loop.best_by, loop.patience = step, best, best_by, Patience()
    return loop


def test_the_first_evaluation_is_the_best_so_far():
    loop = at(10)
    assert loop._is_best(-2.5, loop.best_by)
    assert loop.best == Best(step=10, metric="loss", score=-2.5)


@pytest.mark.parametrize(("score", "better"), [(-2.4, True), (-2.5, False), (-2.6, False)])
def test_only_a_better_one_takes_its_place(score, better):
    before = Best(step=10, metric="loss", score=-2.5)
    loop = at(20, before)
    assert loop._is_best(score, loop.best_by) is better
    assert loop.best == (Best(step=20, metric="loss", score=score) if better else before)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_the_best(score):
    loop = at(10)
    assert not loop._is_best(score, loop.best_by)
    assert loop.best is None


def test_another_figure_starts_anew():
    """A run resumed with --best bleu: a loss of -2.5 and a BLEU of 0.1 cannot be compared."""
    loop = at(20, Best(step=10, metric="loss", score=-2.5), best_by="bleu")
    assert loop._is_best(0.1, loop.best_by)
    assert loop.best == Best(step=20, metric="bleu", score=0.1)


def saving(folder, monkeypatch, hook) -> Loop:
    """A loop that writes checkpoints of no model."""
    monkeypatch.setattr(state, "write", lambda folder, position, **_: writer(position.step)(folder))
    monkeypatch.setattr(state, "needed_bytes", lambda model, optimizer, names: 20_000)
    loop = at(0)
    loop.checkpoints, loop.hooks, loop.journal = Checkpoints(folder, keep=2, note=pytest.fail), (hook,), Journal(None)
    loop.stepper, loop.task, loop.base = SimpleNamespace(group=SingleProcess(), model=None), Task(), None
    loop.speedometer = SimpleNamespace(paused=nullcontext)
    loop.optimizer = loop.rows = loop.loss = None
    return loop


def test_the_former_best_goes_when_the_new_one_is_saved_and_linked(tmp_path, monkeypatch):
    there = []

    class Look(Hook):
        def after_save(self, loop, folder):
            there.append(names(tmp_path))

    loop = saving(tmp_path, monkeypatch, Look())
    for step, is_best in ((30, True), (40, False), (50, False), (60, True)):
        loop.step = step
        loop.best = Best(step=step, metric="loss", score=step) if is_best else loop.best
        loop._position = state.Position(
            step=step, loader={"samples": 0}, ranks=(None,), best=loop.best, data="", optimizer="", settings=[]
        )
        loop.save()
    assert "step-00000030" in there[-1], "a link may lead to it until here"
    assert names(tmp_path) == ["best.json", "step-00000050", "step-00000060"]
    assert Checkpoints(tmp_path).best() == loop.best
