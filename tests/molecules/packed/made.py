"""Rows and jobs that are made up: small enough that a run takes milliseconds, different enough that runs do not agree."""

import numpy as np
import torch

from brimful.molecules.feature_store import Shelf
from brimful.molecules.job import HeadShape, Job, Rows
from brimful.molecules.spec import METHODS, TrainSpec

CPU = torch.device("cpu")
BY_OBJECTIVE = {method.objective: method for method in METHODS.values() if method.objective}


def rows(seed=0, *, train=(40, 40), held=15, inputs=48, bits=False, classes=()):
    """OOD rows lie a little aside, so that there is something to learn; `train` has the rows of ID and of OOD."""
    drawn = np.random.default_rng(seed)
    parts, place = {"id": {}, "ood": {}}, 0
    for side, trained in zip(parts, train, strict=True):
        for part, count in (("train", trained), ("valid", held), ("test", held)):
            parts[side][part] = np.arange(place, place + count)
            place += count
    outside = np.arange(place) >= sum(map(len, parts["id"].values()))
    if bits:
        share = np.where(outside[:, None] & (np.arange(inputs) < inputs // 4), 0.16, 0.05)
        features = torch.from_numpy((drawn.random((place, inputs)) < share).astype(np.uint8))
    else:
        features = torch.from_numpy((drawn.normal(size=(place, inputs)) + 0.2 * outside[:, None]).astype(np.float32))
    labels = None
    if classes:
        labels = torch.from_numpy(np.stack([drawn.integers(-1, count, place) for count in classes], 1))
    return Rows(features=features, labels=labels, **parts)


def shelf(**named):
    """`shelf(a=rows(), b=rows(1))`"""
    return Shelf(named or {"a": rows()}, CPU)


def job(seed=0, objective="dpo", data="a", *, inputs=48, hidden=(16, 8), classes=(), activation="relu", dropout=0.1, options=None, **training):  # fmt: skip
    """A run of two or three steps an epoch."""
    numbers = {"lr": 1e-3, "batch": 16, "epochs": 4, "patience": 4} | training
    return Job(
        name=f"{data}-{objective}-{seed}-" + "-".join(f"{key}{value}" for key, value in training.items()),
        data=data,
        objective=objective,
        options=BY_OBJECTIVE[objective].trained | (options or {}),
        seed=seed,
        shape=HeadShape(inputs=inputs, hidden=hidden, classes=classes, activation=activation),
        training=TrainSpec(**numbers),
        dropout=dropout,
    )


def ended(runner):
    """All runs at their end, by name."""
    return {one.job.name: one for found in runner.run() for one in found}


def same(ours, theirs, within=0.0):
    """The same run, whatever it shared its steps with."""
    assert set(ours) == set(theirs)
    for name, one in ours.items():
        other = theirs[name]
        assert (one.epochs, one.best_epoch, one.diverged) == (other.epochs, other.best_epoch, other.diverged), name
        assert torch.allclose(one.weights, other.weights, rtol=0, atol=within), name
        assert np.allclose(one.curve, other.curve, rtol=0, atol=max(within, 1e-9)), name
        assert np.allclose(one.losses, other.losses, rtol=0, atol=max(within, 1e-9)), name
