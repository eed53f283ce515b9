"""What a sweep is asked for, once the file is read: datasets, encoders, methods, heads, trainings and seeds.

The values left out are those of the work this is for: a head 256–128 with dropout 0.1, AdamW 1e-4 with weight decay 1e-5,
batches of 512, StepLR 10/0.9, up to 500 epochs with patience 10. Nothing here needs torch or RDKit: a spec is checked, and
its runs are counted, before either is loaded. `read` takes these from a file and checks them; `grid` lays them out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
