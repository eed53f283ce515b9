"""Every way to tell out-of-distribution molecules, by name: what is trained for it, and how a molecule is scored.

Several methods share one training: `msp`, `odin`, `energy` and `mc-dropout` read the same classifier, so a grid with all
four trains it once. The score is higher for what looks out of distribution, whatever the method.

    kind         trained on                              score
    energy       ID and OOD training molecules           the head's energy
    classifier   labels of the ID training molecules     of its outputs; `-oe` versions also see OOD training molecules
    distance     nothing; ID training features are kept  distance from them
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["energy", "classifier", "distance"]
Objective = Literal["dpo", "bce", "mse", "hinge", "classify", "classify-oe", "classify-energy-oe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method: its options are numbers, with their defaults."""

    name: str
    kind: Kind
    objective: Objective | None = None
    """What the head is trained for; None where nothing is trained."""
    trained: Mapping[str, float] = field(default_factory=dict)
    """Options of the training, with their defaults."""
    scored: Mapping[str, float] = field(default_factory=dict)
    """Options of the score: they share a trained head."""

    @property
    def needs_labels(self) -> bool:
        return self.kind == "classifier"

    @property
    def sees_ood(self) -> bool:
        """Whether OOD training molecules take part in the training."""
        return self.objective not in (None, "classify")

    @property
    def options(self) -> dict[str, float]:
        return {**self.trained, **self.scored}


_EXPOSED = {"weight": 0.5}
_ODIN = {"temperature": 1000.0, "epsilon": 0.0014}

METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(name="dpo", kind="energy", objective="dpo", trained={"beta": 0.1, "lam": 0.01}),
        Method(name="bce", kind="energy", objective="bce", trained={"lam": 0.0}),
        Method(name="mse", kind="energy", objective="mse", trained={"lam": 0.0}),
        Method(name="hinge", kind="energy", objective="hinge", trained={"margin": 1.0, "hard": 1.0, "lam": 0.01}),
        Method(name="msp", kind="classifier", objective="classify"),
        Method(name="odin", kind="classifier", objective="classify", scored=_ODIN),
        Method(name="energy", kind="classifier", objective="classify", scored={"temperature": 1.0}),
        Method(name="mc-dropout", kind="classifier", objective="classify", scored={"samples": 20}),
        Method(name="msp-oe", kind="classifier", objective="classify-oe", trained=_EXPOSED),
        Method(name="odin-oe", kind="classifier", objective="classify-oe", trained=_EXPOSED, scored=_ODIN),
        Method(
            name="mc-dropout-oe", kind="classifier", objective="classify-oe", trained=_EXPOSED, scored={"samples": 20}
        ),
        Method(
            name="energy-oe",
            kind="classifier",
            objective="classify-energy-oe",
            trained={"weight": 0.1, "margin_in": -5.0, "margin_out": -1.0},
            scored={"temperature": 1.0},
        ),
        Method(name="mahalanobis", kind="distance"),
        Method(name="knn", kind="distance", scored={"k": 5}),
        Method(name="lof", kind="distance", scored={"neighbours": 20}),
    )
}
