"""What a sweep consists of, and the grid of runs that follows: datasets × encoders × methods × settings × seeds.

`spec_file` reads a SweepSpec from TOML. The defaults are those of the experiments behind the preference losses: a head of
256–128 with dropout 0.1, AdamW at 1e-4 with weight decay 1e-5, batches of 512, StepLR 10/0.9, up to 500 epochs with
patience 10. Nothing here needs torch, NumPy or RDKit.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brimful.errors import BadOption
from brimful.files import sha256
from brimful.units import show_count

if TYPE_CHECKING:
    from brimful.molecules.methods import Method

SPLITS = ("scaffold", "size", "column", "random")
PUBLISHED = "published"
"""The split of a file that comes with its own."""
ACTIVATIONS = ("relu", "gelu", "silu", "tanh")
PARTS = ("train", "valid", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Where a sweep runs. Nothing here changes its results."""

    device: str = "auto"
    """cpu, cuda, cuda:1 or xpu. Default: the first accelerator, else the CPU."""
    memory_limit: str | None = None
    """Cap on memory, such as 20GiB: reserved bytes on a GPU, a simulated limit on the CPU."""
    fill: float = 0.85
    """The share of the limit to use."""
    pack: int | None = None
    """Train at most this many runs at once. Default: as many as make it faster."""
    processes: int | None = None
    """Processes that share the runs, one for each GPU or CPU core. Default: 1 on a GPU; on the CPU one per core when each
    has at least six heads to train."""
    ray: str | None = None
    """Run on a Ray cluster: auto (the cluster this machine belongs to), an address, or local (start one here)."""

    def __post_init__(self) -> None:
        problems = []
        if self.pack is not None and self.pack < 1:
            problems.append(f"pack={self.pack} must be at least 1")
        if self.processes is not None and self.processes < 1:
            problems.append(f"processes={self.processes} must be at least 1")
        if not 0 < self.fill <= 1:
            problems.append(f"fill={self.fill:g} must be above 0 and at most 1")
        if problems:
            raise BadOption("; ".join(problems) + ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A small network on the features of one molecule."""

    hidden: tuple[int, ...] = (256, 128)
    """Widths of the hidden layers; none makes a linear head."""
    activation: str = "relu"
    dropout: float = 0.1
    """After each hidden layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """How a head is trained: AdamW with a stepped learning rate."""

    lr: float = 1e-4
    weight_decay: float = 1e-5
    batch: int = 512
    """Molecules of each side in a step."""
    epochs: int = 500
    patience: int = 10
    """Epochs without a better validation AUROC before a run stops."""
    clip: float = 1.0
    """Maximum norm of a run's gradient; 0 disables clipping."""
    step_size: int = 10
    """Epochs between two reductions of the learning rate."""
    gamma: float = 0.9
    """Factor of a reduction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """One file of molecules under one split."""

    name: str
    file: Path
    split: str
    smiles: str = "smiles"
    column: str | None = None
    """The column that the column split uses."""
    ood: tuple[str | float, ...] = ()
    """Its values that are out of distribution. Default: the rare ones."""
    train: int | None = None
    """Molecules of each side. Default, also for `valid` and `test`: in proportion to what is available."""
    valid: int | None = None
    test: int | None = None
    split_seed: int = 0
    label: tuple[str, ...] = ()
    """Columns of classes for classifier heads."""

    @property
    def published(self) -> bool:
        return self.split == PUBLISHED

    @property
    def sizes(self) -> dict[str, int | None]:
        """The requested number of molecules of each part."""
        return {part: getattr(self, part) for part in PARTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """An encoder as `load_encoder` takes it, with absolute paths, and the name that results carry."""

    name: str
    config: str | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSpec:
    """A method with a value for each of its options."""

    method: "Method"
    options: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """The grid. Lists in the file are expanded: each head, training and method here is one choice."""

    source: Path
    datasets: tuple[DatasetSpec, ...]
    encoders: tuple[EncoderSpec, ...]
    methods: tuple[MethodSpec, ...]
    seeds: tuple[int, ...]
    heads: tuple[HeadSpec, ...] = (HeadSpec(),)
    trainings: tuple[TrainSpec, ...] = (TrainSpec(),)
    positive: Literal["ood", "id"] = "ood"
    device: str | None = None
    memory_limit: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the grid."""

    dataset: DatasetSpec
    encoder: EncoderSpec
    method: "Method"
    options: Mapping[str, float]
    """All options of the method."""
    head: HeadSpec | None
    """None, like `train`, where nothing is trained."""
    train: TrainSpec | None
    settings: Mapping[str, Any]
    """The value of every key that varies within the grid, so that tables show only what can be compared."""
    seed: int

    @property
    def deterministic(self) -> bool:
        """Whether every seed gives the same result."""
        return self.head is None

    @property
    def data(self) -> str:
        """The key of the rows that it reads."""
        return f"{self.dataset.name}/{self.encoder.name}"

    @property
    def settings_text(self) -> str:
        """`lr=0.001 beta=1 hidden=256-128`"""
        return " ".join(f"{key}={_show_value(value)}" for key, value in self.settings.items())

    @property
    def run(self) -> str:
        """A file name. It ends with a hash of the configuration: another lr is another run."""
        words = (self.dataset.name, self.encoder.name, self.method.name, self.settings_text)
        readable = "-".join(re.sub(r"[^\w.=+-]+", "_", word) for word in words if word)[:120]
        return f"{readable}-seed{self.seed}-{self._hash()}"

    @property
    def key(self) -> str:
        """Identifies the run whatever else is in the grid."""
        return f"{self.data}/{self.method.name}/{self._hash()}/{self.seed}"

    def _hash(self) -> str:
        """Files count by name, so that a folder can be moved; labels count only for methods that read them."""
        dataset = dataclasses.asdict(self.dataset)
        if not self.method.reads_labels:
            dataset["label"] = ()
        config = self.encoder.config
        encoder = {"name": config} if isinstance(config, str) else config
        content = {
            "dataset": dataset,
            "encoder": {**encoder, "name": Path(encoder["name"]).name},
            "method": self.method.name,
            "options": dict(self.options),
            "head": self.head and dataclasses.asdict(self.head),
            "train": self.train and dataclasses.asdict(self.train),
            "seed": self.seed,
            "settings": None,
        }
        return sha256(json.dumps(content, sort_keys=True, default=lambda path: path.name))[:10]


def grid(spec: SweepSpec) -> list[Cell]:
    """Every run of a sweep in a fixed order: datasets outermost, seeds innermost."""
    variants = list(_variants(spec))
    return [
        Cell(dataset=dataset, encoder=encoder, seed=seed, **variant)
        for dataset, encoder, variant, seed in itertools.product(spec.datasets, spec.encoders, variants, spec.seeds)
    ]


def show_grid(spec: SweepSpec) -> str:
    """`3 datasets × 2 encoders × 4 methods × 10 seeds = 240 runs`"""
    methods, variants = len({choice.method.name for choice in spec.methods}), len(list(_variants(spec)))
    total = len(spec.datasets) * len(spec.encoders) * variants * len(spec.seeds)
    parts = [
        show_count(len(spec.datasets), "dataset"),
        show_count(len(spec.encoders), "encoder"),
        show_count(methods, "method") + (f" in {variants:,} settings" if variants != methods else ""),
        show_count(len(spec.seeds), "seed"),
    ]
    return f"{' × '.join(parts)} = {show_count(total, 'run')}"


def _variants(spec: SweepSpec) -> Iterator[dict[str, Any]]:
    """Everything of a cell but its dataset, encoder and seed. Methods that train nothing are not multiplied."""
    varying = [
        *_varying([dataclasses.asdict(head) for head in spec.heads]),
        *_varying([dataclasses.asdict(training) for training in spec.trainings]),
    ]
    for choice in spec.methods:
        own = _varying([other.options for other in spec.methods if other.method.name == choice.method.name])
        fixed = {"method": choice.method, "options": choice.options}
        if choice.method.objective is None:
            yield {**fixed, "head": None, "train": None, "settings": {key: choice.options[key] for key in own}}
            continue
        for head, train in itertools.product(spec.heads, spec.trainings):
            values = {**dataclasses.asdict(head), **dataclasses.asdict(train), **choice.options}
            yield {**fixed, "head": head, "train": train, "settings": {key: values[key] for key in (*varying, *own)}}


def _varying(choices: list[Any]) -> list[str]:
    return [key for key in choices[0] if any(choice[key] != choices[0][key] for choice in choices)]


def _show_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
