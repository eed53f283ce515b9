"""A run that stops because nothing gets better: when, with which checkpoint, and the same after a resume."""

import pytest
import torch
from torch import nn

import brimful
from brimful.errors import BadOption, BadRun
from brimful.training.events import read_events
from brimful.training.patience import Patience


class Passes(brimful.Task):
    """One weight that grows by 0.01 a step and passes its best value, 0.2, at step 20. The loss says how far away it is."""

    global_batch = 4

    def model(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model, batch):
        weight = model.weight.sum()
        away = (weight - 0.2).abs().detach()
        return brimful.Loss(sum=len(batch) * (away - weight + weight.detach()), count=len(batch))

    def evaluate(self, model, rows, context):
        return {"score": -abs(float(model.weight.detach()) - 0.2)}


class Complains(Passes):
    """Something is wrong between steps 8 and 29, although the score gets better."""

    def watch(self, notes, step):
        notes["steps"] = notes.get("steps", 0) + 1
        assert notes["steps"] == step["step"], "kept over a resume"
        return {"odd": "it is odd. Try: lr="} if 8 <= step["step"] < 30 else {}


ROWS = [torch.ones(1)] * 40


def train(run, task=None, **how):
    how = {"valid": ROWS, "best": "score", "eval_every": 4, "max_steps": 60, **how}
    how = {
        "schedule": "constant",
        "warmup": 0,
        "clip_norm": 0,
        "weight_decay": 0.0,
        "save_every": 5,
        "cache": False,
        **how,
    }
    return brimful.train(task or Passes(), ROWS, run=run, device="cpu", workers=0, quiet=True, **how)


def events(run, kind):
    return [one for one in read_events(run / "events.jsonl") if one["event"] == kind]


class Stop(brimful.Hook):
    """An error after a step, which saves and ends the run."""

    def __init__(self, step):
        self.step = step

    def after_step(self, loop, result):
        if loop.step == self.step:
            raise BadRun("stopped here")


def test_a_run_stops_after_so_many_evaluations_without_a_better_one(tmp_path):
    ending = train(tmp_path / "run", patience=3)
    assert (ending.reason, ending.step, ending.best.step) == ("patience", 32, 20)
    (end,) = events(tmp_path / "run", "end")
    best = tmp_path / "run" / "checkpoints" / "step-00000020"
    assert end["reason"] == "patience" and end["best"] == str(best) and best.is_dir()
    assert end["sentence"] == (
        f"stopped after step 32: 3 evaluations without a better score; the last good checkpoint is {best}"
    )
    assert (tmp_path / "run" / "best").resolve() == best / "model"


def test_without_patience_a_run_goes_on(tmp_path):
    assert train(tmp_path / "run").reason == "finished"


def test_a_last_step_is_a_finished_run(tmp_path):
    ending = train(tmp_path / "run", patience=3, max_steps=32)
    assert (ending.reason, ending.step) == ("finished", 32)


def test_without_rows_to_evaluate_on_the_training_loss_is_judged(tmp_path):
    ending = train(tmp_path / "run", valid=None, best="loss", patience=2)
    assert ending.reason == "patience" and ending.best.metric == "training loss"
    assert (ending.best.step, ending.step) == (24, 32)
    assert (tmp_path / "run" / "checkpoints" / "step-00000024").is_dir()
    assert "2 windows without a better training loss" in events(tmp_path / "run", "end")[0]["sentence"]


@pytest.mark.parametrize("at", [6, 10, 11])
@pytest.mark.parametrize("valid", [True, False])
def test_interrupted_and_resumed_it_stops_at_the_same_step(tmp_path, at, valid):
    how = {"patience": 2} if valid else {"patience": 2, "valid": None, "best": "loss"}
    whole = train(tmp_path / "whole", Complains(), **how)
    with pytest.raises(BadRun, match="stopped here"):
        train(tmp_path / "run", Complains(), hooks=[Stop(at)], **how)
    resumed = train(tmp_path / "run", Complains(), resume=True, **how)
    assert (resumed.reason, resumed.step, resumed.best) == (whole.reason, whole.step, whole.best)
    notes = [one for one in events(tmp_path / "run", "note") if "signal" in one]
    assert len(notes) == 1, "told once, also over a resume"


def test_nothing_is_better_while_the_task_says_that_something_is_wrong(tmp_path):
    run = tmp_path / "run"
    ending = train(run, Complains(), patience=3)
    assert (ending.reason, ending.step, ending.best.step) == ("patience", 16, 4)
    (note,) = [one for one in events(run, "note") if "signal" in one]
    assert (note["signal"], note["level"], note["step"], note["sentence"]) == (
        "odd",
        "warning",
        8,
        "it is odd. Try: lr=",
    )
    assert "a warning that still holds (odd)" in events(run, "end")[0]["sentence"]


def test_without_patience_a_warning_changes_nothing(tmp_path):
    ending = train(tmp_path / "run", Complains())
    assert (ending.reason, ending.best.step) == ("finished", 20)


def test_a_stopped_run_is_resumed_only_with_more_patience(tmp_path):
    train(tmp_path / "run", patience=2)
    with pytest.raises(
        BadRun, match=r"stopped by patience=2: 2 evaluations without a better score .* larger patience="
    ):
        train(tmp_path / "run", patience=2, resume=True)
    ending = train(tmp_path / "run", patience=4, resume=True)
    assert (ending.reason, ending.step, ending.best.step) == ("patience", 36, 20)


def test_a_run_without_a_good_checkpoint_says_so(tmp_path):
    class Never(Passes):
        def watch(self, notes, step):
            return {"bad": "all of it is bad"}

    ending = train(tmp_path / "run", Never(), patience=1)
    assert (ending.reason, ending.best) == ("patience", None)
    assert events(tmp_path / "run", "end")[0]["sentence"].endswith("no checkpoint was good")


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_patience_is_a_number_of_evaluations(tmp_path, value):
    with pytest.raises(BadOption, match="patience=.* must be a whole number of at least 1"):
        train(tmp_path / "run", patience=value)


def test_a_kept_state_does_not_change_with_later_steps():
    patience = Patience(most=1)
    kept = patience.state_dict()
    patience.after_step(Complains(), {"step": 1, "loss": 1.0})
    assert kept["notes"] == {} and patience.state_dict()["notes"] == {"steps": 1}
