"""Small made-up molecules, rows, jobs and results: a run takes milliseconds, and runs differ from each other."""

import numpy as np
import torch

from brimful.molecules.dataset import Facts, Molecules
from brimful.molecules.feature_store import FeatureStore
from brimful.molecules.heads import HeadShape, Job, Rows
from brimful.molecules.methods import METHODS
from brimful.molecules.results import COLUMNS
from brimful.molecules.spec import TrainSpec

CPU = torch.device("cpu")
BY_OBJECTIVE = {method.objective.name: method for method in METHODS.values() if method.objective}


def defaults(options):
    """The default value of each option of a method."""
    return {name: option.default for name, option in options.items()}


def molecules(smiles, *, rows=None, rows_in=None, columns=None, source="some.csv", scaffold=None, atoms=None):
    """Molecules that RDKit has not seen; what is not given is the same for all."""
    count = len(smiles)
    texts = np.array(list(smiles), dtype=object)
    facts = Facts(
        canonical=texts,
        scaffold=np.array(scaffold or ["S"] * count, dtype=object),
        heavy_atoms=np.array(atoms or [9] * count),
        rings=np.ones(count, dtype=np.int64),
    )
    rows = np.arange(count) if rows is None else rows
    rows_in = count if rows_in is None else rows_in
    return Molecules(source=source, smiles=texts, rows=rows, columns=columns or {}, rows_in=rows_in, facts=facts)


def rows(seed=0, *, train=(40, 40), held=15, inputs=48, bits=False, classes=()):
    """OOD rows are shifted a little, so that there is something to learn; `train` has the rows of ID and of OOD."""
    rng = np.random.default_rng(seed)
    parts, place = {"id": {}, "ood": {}}, 0
    for side, trained in zip(parts, train, strict=True):
        for part, count in (("train", trained), ("valid", held), ("test", held)):
            parts[side][part] = np.arange(place, place + count)
            place += count
    outside = np.arange(place) >= sum(map(len, parts["id"].values()))
    if bits:
        share = np.where(outside[:, None] & (np.arange(inputs) < inputs // 4), 0.16, 0.05)
        features = torch.from_numpy((rng.random((place, inputs)) < share).astype(np.uint8))
    else:
        features = torch.from_numpy((rng.normal(size=(place, inputs)) + 0.2 * outside[:, None]).astype(np.float32))
    labels = None
    if classes:
        labels = torch.from_numpy(np.stack([rng.integers(-1, count, place) for count in classes], 1))
    return Rows(features=features, labels=labels, **parts)


def store(**named):
    """`store(a=rows(), b=rows(1))`"""
    return FeatureStore(named or {"a": rows()}, CPU)


def job(seed=0, objective="dpo", data="a", *, inputs=48, hidden=(16, 8), classes=(), activation="relu", dropout=0.1, options=None, **training):  # fmt: skip
    """A run of two or three steps per epoch."""
    numbers = {"lr": 1e-3, "batch": 16, "epochs": 4, "patience": 4} | training
    return Job(
        name=f"{data}-{objective}-{seed}-" + "-".join(f"{key}{value}" for key, value in training.items()),
        data=data,
        objective=BY_OBJECTIVE[objective].objective,
        options=defaults(BY_OBJECTIVE[objective].training_options) | (options or {}),
        seed=seed,
        shape=HeadShape(inputs=inputs, hidden=hidden, classes=classes, activation=activation),
        training=TrainSpec(**numbers),
        dropout=dropout,
    )


def run_all(runner):
    """All runs at their end, by name."""
    return {one.job.name: one for finished in runner.run() for one in finished}


def assert_same(ours, theirs, within=0.0):
    """The same runs, whatever they shared their steps with."""
    assert set(ours) == set(theirs)
    for name, one in ours.items():
        other = theirs[name]
        assert (one.epochs, one.best_epoch, one.diverged) == (other.epochs, other.best_epoch, other.diverged), name
        assert torch.allclose(one.weights, other.weights, rtol=0, atol=within), name
        assert np.allclose(one.curve, other.curve, rtol=0, atol=max(within, 1e-9)), name
        assert np.allclose(one.losses, other.losses, rtol=0, atol=max(within, 1e-9)), name


def result_row(method, seed=0, auroc=0.7, **changes):
    """A row of a sweep that never ran; the other figures follow the AUROC."""
    kind = "trivial" if method in ("rings", "heavy-atoms", "nearest-train") else "energy"
    figures = {"auroc": auroc, "aupr": auroc, "aupr_ood": auroc, "aupr_id": auroc}
    worse = None if auroc is None else 1 - auroc
    row = {
        "dataset": "hiv-scaffold", "split": "scaffold", "encoder": "–" if kind == "trivial" else "ecfp",
        "method": method, "settings": "", "seed": seed, "kind": kind, **figures, "fpr95": worse, "fpr95_ood": worse,
        "fpr95_id": worse, "positive": "ood", "epochs": None if kind == "trivial" else 40,
        "best_epoch": None if kind == "trivial" else 30, "valid_auroc": None if kind == "trivial" else 0.7,
        "n_id_test": 1000, "n_ood_test": 900, "seconds": 1.5, "deterministic": kind == "trivial",
        "run": f"{method}-{seed}",
    }  # fmt: skip
    assert set(changes) <= set(COLUMNS) == set(row)
    return {**row, **changes}


def result_rows(method, values, **changes):
    """One run per value, the seeds counted from 0."""
    return [result_row(method, seed, value, **changes) for seed, value in enumerate(values)]
