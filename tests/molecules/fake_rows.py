"""Result rows of a sweep that never ran, with figures chosen by the test."""

from brimful.molecules.results import COLUMNS


def row(method, seed=0, auroc=0.7, **changes):
    """One run; the other figures follow the AUROC."""
    kind = "trivial" if method in ("rings", "heavy-atoms", "nearest-train") else "energy"
    figures = {"auroc": auroc, "aupr": auroc, "aupr_ood": auroc, "aupr_id": auroc}
    worse = None if auroc is None else 1 - auroc
    made = {
        "dataset": "hiv-scaffold", "split": "scaffold", "encoder": "–" if kind == "trivial" else "ecfp",
        "method": method, "settings": "", "seed": seed, "kind": kind, **figures, "fpr95": worse, "fpr95_ood": worse,
        "fpr95_id": worse, "positive": "ood", "epochs": None if kind == "trivial" else 40,
        "best_epoch": None if kind == "trivial" else 30, "valid_auroc": None if kind == "trivial" else 0.7,
        "n_id_test": 1000, "n_ood_test": 900, "seconds": 1.5, "deterministic": kind == "trivial",
        "run": f"{method}-{seed}",
    }  # fmt: skip
    assert set(changes) <= set(COLUMNS) == set(made)
    return {**made, **changes}


def seeds(method, values, **changes):
    """One run a value, the seeds counted from nought."""
    return [row(method, seed, value, **changes) for seed, value in enumerate(values)]
