"""What a sweep is asked for, once the file is read: datasets, encoders, methods, heads, trainings and seeds.

The values left out are those of the work this is for: a head 256–128 with dropout 0.1, AdamW 1e-4 with weight decay 1e-5,
batches of 512, StepLR 10/0.9, up to 500 epochs with patience 10. Nothing here needs torch or RDKit: a spec is checked, and
its runs are counted, before either is loaded. `read` takes these from a file and checks them; `grid` lays them out.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from brimful.errors import BadOption
from brimful.units import show_count

# Where and how fast a sweep runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Where a sweep runs; nothing here changes its results."""

    device: str = "auto"
    """cpu, cuda, cuda:1 or xpu; the first accelerator unless given."""
    memory_limit: str | None = None
    """Cap on memory, such as 20GiB: a card's reserved bytes, or a virtual limit on the CPU."""
    fill: float = 0.85
    """The share of the limit to use."""
    pack: int | None = None
    """Train at most so many runs at once; as many as pay unless given."""
    processes: int | None = None
    """Cards of this box to share the runs, a process for each; one unless given. On the CPU processes of one core each:
    as many as there are cores unless given, where there are six heads or more for each."""
    ray: str | None = None
    """Run on a Ray cluster instead: auto for the one this machine belongs to, an address, or local to start one here."""

    def __post_init__(self) -> None:
        problems = []
        if self.pack is not None and self.pack < 1:
            problems.append(f"--pack {self.pack}: give at least 1")
        if self.processes is not None and self.processes < 1:
            problems.append(f"--processes {self.processes}: give at least 1")
        if not 0 < self.fill <= 1:
            problems.append(f"--fill {self.fill:g}: give a share of the limit, more than 0 and at most 1")
        if problems:
            raise BadOption("; ".join(problems))


# Every way to tell out-of-distribution molecules, by name: what is trained for it, and how a molecule is scored.
#
# Several methods share one training: `msp`, `odin`, `energy` and `mc-dropout` read the same classifier, so a grid with all
# four trains it once. The score is higher for what looks out of distribution, whatever the method.
#
#     kind         trained on                              score
#     energy       ID and OOD training molecules           the head's energy
#     classifier   labels of the ID training molecules     of its outputs; `-oe` versions also see OOD training molecules
#     distance     nothing; ID training features are kept  distance from them


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


SPLITS = ("scaffold", "size", "column", "random")
PUBLISHED = "published"
"""The split of a file that brings its own."""
ACTIVATIONS = ("relu", "gelu", "silu", "tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A small network on the features of one molecule."""

    hidden: tuple[int, ...] = (256, 128)
    """Widths of the layers between features and output; none is a linear head."""
    activation: str = "relu"
    dropout: float = 0.1
    """After each hidden layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """How a head is trained: AdamW, with the learning rate falling in steps."""

    lr: float = 1e-4
    weight_decay: float = 1e-5
    batch: int = 512
    """Molecules of a side in a step."""
    epochs: int = 500
    patience: int = 10
    """Epochs without a better validation AUROC before a run stops."""
    clip: float = 1.0
    """The norm that a run's gradients are brought down to; 0 does not clip."""
    step_size: int = 10
    """Epochs between two falls of the learning rate."""
    gamma: float = 0.9
    """What is left of the learning rate after a fall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """One file of molecules under one split."""

    name: str
    file: Path
    split: str
    smiles: str = "smiles"
    column: str | None = None
    """What the column split tells domains by."""
    ood: tuple[str | float, ...] = ()
    """The column's values that are out of distribution; the rare ones unless given."""
    train: int | None = None
    """Molecules of each side; a share of what there is unless given. The same for valid and test."""
    valid: int | None = None
    test: int | None = None
    split_seed: int = 0
    label: tuple[str, ...] = ()
    """Columns of classes that a classifier head is trained on."""

    @property
    def published(self) -> bool:
        return self.split == PUBLISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderChoice:
    """An encoder as `load_encoder` takes it, files made absolute, under the name that results carry."""

    name: str
    asked: str | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodChoice:
    """A method with the value of each of its options, those left out included."""

    name: str
    options: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """The grid. What was a list in the file is spread out here: each head, training and method is one choice."""

    source: Path
    datasets: tuple[DatasetSpec, ...]
    encoders: tuple[EncoderChoice, ...]
    methods: tuple[MethodChoice, ...]
    seeds: tuple[int, ...]
    heads: tuple[HeadSpec, ...] = (HeadSpec(),)
    trainings: tuple[TrainSpec, ...] = (TrainSpec(),)
    positive: Literal["ood", "id"] = "ood"
    device: str | None = None
    memory_limit: str | int | None = None


# The runs that a spec asks for: datasets × encoders × methods × settings × seeds, in an order that never changes.
#
# `settings` names what varies within the grid and nothing else, so a table has a column only where there is something to
# compare. What is not trained does not multiply: `knn` under three learning rates would be one result written three times.


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
