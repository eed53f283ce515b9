"""Everything that heads are trained on, made ready and checked before the first step: molecules, splits, features, labels.

Splits come before features, so that they do not depend on encoders and a slow encoder sees the molecules in use alone.
A molecule that an encoder cannot take leaves that encoder's rows, is counted and listed. Real-valued features are brought to
mean 0 and deviation 1 by the ID training molecules, which are all that may be known; fingerprints stay 0 and 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from brimful.errors import BadData, BadOption
from brimful.tasks.heads.features import Encoder, Features, features_of
from brimful.tasks.heads.molecules.facts import Facts, facts_of
from brimful.tasks.heads.molecules.molecules import Molecules, read_molecules
from brimful.tasks.heads.molecules.published import read_published
from brimful.tasks.heads.spec.asked import DatasetSpec
from brimful.tasks.heads.splits import Split, SplitOptions, make_split, trimmed
from brimful.units import show_count

if TYPE_CHECKING:
    from brimful.tasks.heads.packed.job import Rows

Say = Callable[[str], object]
FURTHEST = 10.0
"""Features further from the mean than so many deviations are cut there: one descriptor of a salt must not rule a batch."""
MOST_CLASSES = 100
"""A label column with more values than this is a measurement, not a class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One dataset under one split."""

    asked: DatasetSpec
    molecules: Molecules
    facts: Facts
    split: Split
    labels: np.ndarray[Any, np.dtype[np.int64]] | None
    """[molecules, tasks]: the class, −1 where it is not known."""
    classes: tuple[int, ...]
    """Of each task."""

    @property
    def remarks(self) -> tuple[str, ...]:
        unread = len(self.molecules.unread)
        said = (f"{show_count(unread, 'row')} cannot be read and {'is' if unread == 1 else 'are'} left out",)
        return (*(said if unread else ()), *self.split.remarks)


def prepare(asked: DatasetSpec, cache: Path, say: Say) -> Prepared:
    """Read, look at, split."""
    if asked.published:
        molecules, split = read_published(asked.file, cache=cache, say=say)
    else:
        wanted = dict.fromkeys((*asked.label, *((asked.column,) if asked.column else ())))
        molecules = read_molecules(asked.file, smiles=asked.smiles, columns=tuple(wanted), cache=cache, say=say)
    facts = facts_of(molecules, cache=cache, say=say)
    if not asked.published:
        options = SplitOptions(
            kind=cast(Any, asked.split), column=asked.column, ood=asked.ood, train=asked.train, valid=asked.valid,
            test=asked.test, seed=asked.split_seed,
        )  # fmt: skip
        split = make_split(molecules, facts, options)
    else:
        split = trimmed(split, facts, train=asked.train, valid=asked.valid, test=asked.test, seed=asked.split_seed)
    labels, classes = _labels(asked, molecules, split)
    return Prepared(asked=asked, molecules=molecules, facts=facts, split=split, labels=labels, classes=classes)


def rows_of(
    prepared: Prepared, encoder: Encoder, cache: Path, say: Say
) -> "tuple[Rows, Features, Sequence[tuple[int, str]]]":
    """The rows to train on, their features, and the molecules left out: their rows in the file, and why."""
    import torch

    from brimful.tasks.heads.packed.job import Rows

    used = prepared.split.used()
    molecules = prepared.molecules.take(used)
    features = features_of(encoder, molecules, cache=cache, say=say)
    place = np.full(len(prepared.molecules), -1)
    place[used[features.kept]] = np.arange(len(features.kept))
    sides = {}
    for side, part in (("id", prepared.split.id), ("ood", prepared.split.ood)):
        sides[side] = {name: _there(place[getattr(part, name)]) for name in ("train", "valid", "test")}
        for name, rows in sides[side].items():
            if not len(rows):
                raise BadData(
                    f"{prepared.asked.name}: {encoder.name} has features for no {side.upper()} molecule of {name}; use another encoder"
                )
    matrix = features.matrix[features.kept]
    if matrix.dtype != np.uint8:
        matrix = _standardised(matrix, sides["id"]["train"])
    labels = None if prepared.labels is None else torch.from_numpy(prepared.labels[used[features.kept]])
    left_out = [(int(molecules.rows[position]), reason) for position, reason in features.failed.items()]
    return Rows(features=torch.from_numpy(np.ascontiguousarray(matrix)), labels=labels, **sides), features, left_out


def check_batch(prepared: Prepared, rows: "Rows", batch: int, *, sees_ood: bool) -> None:
    """A batch larger than the set would be the set itself, over and over: fewer steps, another training."""
    for side, part in (("ID", rows.id), ("OOD", rows.ood)):
        there = len(part["train"])
        if batch > there and (side == "ID" or sees_ood):
            raise BadOption(
                f"[train] batch {batch:,} is larger than the {there:,} {side} training molecules of {prepared.asked.name}; "
                f"give at most {there:,}"
            )


def _there(rows: Any) -> Any:
    return rows[rows >= 0].astype(np.int64)


def _standardised(matrix: Any, train: Any) -> Any:
    known = matrix[train].astype(np.float64)
    mean, deviation = known.mean(0), known.std(0)
    deviation[deviation < 1e-6 * np.maximum(1, np.abs(mean))] = 1  # a constant column says nothing, and must not shout
    return np.clip((matrix - mean) / deviation, -FURTHEST, FURTHEST).astype(np.float32)


def _labels(asked: DatasetSpec, molecules: Molecules, split: Split) -> tuple[Any, tuple[int, ...]]:
    if not asked.label:
        return None, ()
    columns, classes = [], []
    for name in asked.label:
        found, count = _classes(asked, name, molecules.columns, split)
        columns.append(found)
        classes.append(count)
    return np.stack(columns, 1), tuple(classes)


def _classes(asked: DatasetSpec, name: str, columns: Mapping[str, Any], split: Split) -> tuple[Any, int]:
    """A column as numbers of classes, −1 where it is blank."""
    if name not in columns:
        raise BadData(f"{asked.name}: {asked.file.name} has no column {name!r} for label; it has {', '.join(columns)}")
    values = columns[name]
    known = values == values if values.dtype.kind == "f" else np.array([bool(str(one).strip()) for one in values])
    there = np.unique(values[known].astype(values.dtype if values.dtype.kind == "f" else str))
    seen = np.unique(values[split.id.train][known[split.id.train]].astype(there.dtype))
    if len(seen) < 2:
        what = f"only {seen[0]}" if len(seen) else "nothing"
        raise BadData(
            f"{asked.name}: label {name!r} has {what} among the ID training molecules, and a classifier needs two classes; choose another label or split"
        )
    if len(there) > MOST_CLASSES:
        raise BadData(
            f"{asked.name}: label {name!r} has {len(there):,} different values, more than the {MOST_CLASSES} classes a label may have; it looks like a measurement"
        )
    found = np.searchsorted(there, values.astype(there.dtype)).clip(0, len(there) - 1)
    return np.where(known, found, -1).astype(np.int64), len(there)
