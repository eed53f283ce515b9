"""The runs that a spec asks for: datasets × encoders × methods × settings × seeds, in an order that never changes.

`settings` names what varies within the grid and nothing else, so a table has a column only where there is something to
compare. What is not trained does not multiply: `knn` under three learning rates would be one result written three times.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.tasks.heads.spec.asked import DatasetSpec, EncoderChoice, HeadSpec, MethodChoice, SweepSpec, TrainSpec
from brimful.tasks.heads.spec.methods import METHODS, Method
from brimful.units import show_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    dataset: DatasetSpec
    encoder: EncoderChoice
    method: Method
    options: Mapping[str, float]
    """Of the method, all of them."""
    head: HeadSpec | None
    """None, like `train`, where nothing is trained."""
    train: TrainSpec | None
    settings: Mapping[str, Any]
    """The effective value of every key that varies within the grid."""
    seed: int

    @property
    def deterministic(self) -> bool:
        """Whether every seed gives the same."""
        return self.head is None

    @property
    def reads_labels(self) -> bool:
        return self.method.needs_labels or self.method.name == "mahalanobis"  # the one distance that knows classes

    @property
    def settings_text(self) -> str:
        return show_settings(self.settings)

    @property
    def run(self) -> str:
        """A file's name. Its last part is a hash of all that the run was asked for: another lr is another run."""
        words = (self.dataset.name, self.encoder.name, self.method.name, self.settings_text)
        readable = "-".join(re.sub(r"[^\w.=+-]+", "_", word) for word in words if word)[:120]
        return f"{readable}-seed{self.seed}-{self._hash()}"

    @property
    def keys(self) -> tuple[str, ...]:
        """What the run was asked for, whatever else is in the grid; then as earlier versions had it, label included."""
        hashes = dict.fromkeys((self._hash(), self._hash(labelled=True)))
        return tuple(f"{self.dataset.name}/{self.encoder.name}/{self.method.name}/{one}/{self.seed}" for one in hashes)

    def _hash(self, *, labelled: bool = False) -> str:
        """Files go by their names: a folder may be moved and its sweep still be finished."""
        asked = dataclasses.asdict(self) | {"settings": None, "method": self.method.name, "encoder": self._encoder()}
        if not (self.reads_labels or labelled):
            asked["dataset"]["label"] = ()
        text = json.dumps(asked, sort_keys=True, default=lambda path: path.name)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def _encoder(self) -> dict[str, Any]:
        asked = self.encoder.asked
        given = {"name": asked} if isinstance(asked, str) else asked
        return {**given, "name": Path(given["name"]).name}


def grid(spec: SweepSpec) -> list[Cell]:
    """Every run of a sweep: the seeds innermost, the datasets outermost."""
    variants = list(_variants(spec))
    return [
        Cell(dataset=dataset, encoder=encoder, seed=seed, **variant)
        for dataset, encoder, variant, seed in itertools.product(spec.datasets, spec.encoders, variants, spec.seeds)
    ]


def show_grid(spec: SweepSpec) -> str:
    """`3 datasets × 2 encoders × 4 methods × 10 seeds = 240 runs`, before anything is run."""
    methods, variants = len({choice.name for choice in spec.methods}), len(list(_variants(spec)))
    total = len(spec.datasets) * len(spec.encoders) * variants * len(spec.seeds)
    parts = [
        show_count(len(spec.datasets), "dataset"),
        show_count(len(spec.encoders), "encoder"),
        show_count(methods, "method") + (f" in {variants:,} settings" if variants != methods else ""),
        show_count(len(spec.seeds), "seed"),
    ]
    return f"{' × '.join(parts)} = {show_count(total, 'run')}"


def show_settings(settings: Mapping[str, Any]) -> str:
    """`lr=0.001 beta=1 hidden=256-128`"""
    return " ".join(f"{key}={_shown(value)}" for key, value in settings.items())


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _variants(spec: SweepSpec) -> Iterator[dict[str, Any]]:
    """Everything of a cell but its dataset, encoder and seed."""
    heads = _varying([dataclasses.asdict(one) for one in spec.heads])
    trains = _varying([dataclasses.asdict(one) for one in spec.trainings])
    for choice in spec.methods:
        method, own = METHODS[choice.name], _varying([one.options for one in spec.methods if one.name == choice.name])
        if method.kind == "distance":
            yield _variant(method, choice, None, None, {key: choice.options[key] for key in own})
            continue
        for head, train in itertools.product(spec.heads, spec.trainings):
            values = {**dataclasses.asdict(head), **dataclasses.asdict(train), **choice.options}
            yield _variant(method, choice, head, train, {key: values[key] for key in (*heads, *trains, *own)})


def _variant(method: Method, choice: MethodChoice, head: HeadSpec | None, train: TrainSpec | None, settings: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    return {"method": method, "options": choice.options, "head": head, "train": train, "settings": settings}


def _varying(choices: list[Any]) -> list[str]:
    return [key for key in choices[0] if any(one[key] != choices[0][key] for one in choices)]
