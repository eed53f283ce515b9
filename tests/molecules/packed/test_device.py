"""Every tensor of a step lies on the run's device. The meta device refuses to mix with the CPU just as a card does."""

import numpy as np
import pytest
import torch

from brimful.molecules.feature_store import Shelf
from brimful.molecules.job import HeadShape, Job, Rows
from brimful.molecules.pack import Pack, State, validation_scores
from brimful.molecules.spec import METHODS, TrainSpec

META = torch.device("meta")
SIDE = {"train": np.arange(32), "valid": np.arange(32, 40), "test": np.arange(40, 50)}


@pytest.fixture
def on_meta(monkeypatch):
    """What is read back to the host is zeros; everything else stays where it is."""
    read = torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda one: torch.zeros(one.shape, dtype=one.dtype) if one.is_meta else read(one)
    )
    monkeypatch.setattr(torch.Tensor, "tolist", lambda one: np.zeros(one.shape).tolist())


@pytest.mark.parametrize(
    ("methods", "classes"), [(("dpo", "bce", "mse", "hinge"), ()), (("msp", "msp-oe", "energy-oe"), (2, 3))]
)
def test_a_step_and_a_validation_stay_on_the_device(methods, classes, on_meta):
    other = {name: part + 50 for name, part in SIDE.items()}
    rows = Rows(features=torch.rand(100, 16), labels=torch.zeros(100, 2, dtype=torch.int64), id=SIDE, ood=other)
    jobs = [
        Job(
            name=name, data="a", objective=METHODS[name].objective, options=METHODS[name].trained, seed=1,
            shape=HeadShape(inputs=16, hidden=(8, 4), classes=classes), training=TrainSpec(batch=16),
        )
        for name in methods
    ]  # fmt: skip
    pack = Pack(State.new(jobs, META), Shelf({"a": rows}, META))
    for _ in range(3):
        pack.step()
    assert pack.state.weights.is_meta and len(validation_scores(pack, range(len(jobs)))) == len(jobs)
    assert pack.state.take([0]).joined(pack.state).weights.shape[0] == 1 + len(jobs)
