"""Prepares and checks what heads are trained on, before the first step: molecules, splits, features, labels.

Splits come before features, so that they do not depend on encoders and a slow encoder sees only the molecules in use. A
molecule that an encoder cannot take is left out for that encoder, counted and listed. Features are standardised with the
mean and deviation of the ID training molecules alone; features of only 0 and 1 stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption
from brimful.molecules.dataset import NOT_UTF8, Column, Molecules, Progress, column_from, read_molecules
from brimful.molecules.features.compute import Features, compute_features
from brimful.molecules.features.encoder import Encoder
from brimful.molecules.methods import only_bits
from brimful.molecules.published import read_published
from brimful.molecules.spec import PARTS, DatasetSpec
from brimful.molecules.splits import Split, as_text, make_split, trimmed
from brimful.units import show_count

if TYPE_CHECKING:
    from brimful.molecules.heads import Rows

CLIP = 10.0
"""Features are clipped to this many deviations from the mean: one descriptor of a salt must not dominate a batch."""
MOST_CLASSES = 100
"""A label column with more values is a measurement, not a class."""
MISSING = frozenset(("-", "?", "na", "n/a", "#n/a", "<na>", "nan", "none", "null", "inf", "-inf"))
"""Words for a label that was not measured, in any case, besides a blank."""
_LISTED = 5
"""The most classes that a remark names."""
_CHUNK_ROWS = 4096
"""Standardised at a time: in between they are float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One dataset under one split."""

    spec: DatasetSpec
    molecules: Molecules
    split: Split
    labels: npt.NDArray[np.int64] | None
    """[molecules, tasks]: the class, −1 where it is unknown."""
    classes: tuple[int, ...]
    """The number of classes of each task."""
    label_problem: str
    """Why no classifier can be trained on the labels; empty where one can."""
    label_remarks: tuple[str, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        unread = self.molecules.unread
        sentences = []
        if unread:
            verb = "is" if len(unread) == 1 else "are"
            sentences.append(f"{show_count(len(unread), 'row')} cannot be read and {verb} left out")
        if encoding := sum(molecule.reason == NOT_UTF8 for molecule in unread):
            sentences.append(f"{encoding:,} of them because they are {NOT_UTF8} (try iconv -f gbk -t utf-8)")
        return (*sentences, *self.label_remarks, *self.split.remarks)

    def check_labels(self) -> None:
        """For methods that train a classifier."""
        if self.label_problem:
            raise BadData(self.label_problem)


def prepare(spec: DatasetSpec, cache: Path, progress: Progress) -> Prepared:
    """Read, examine, split."""
    if spec.published:
        molecules, split = read_published(spec.file, cache=cache, progress=progress)
        split = trimmed(split, molecules.facts, spec)
    else:
        columns = dict.fromkeys((*spec.label, *((spec.column,) if spec.column else ())))
        molecules = read_molecules(
            spec.file, smiles=spec.smiles, columns=tuple(columns), cache=cache, progress=progress
        )
        split = make_split(molecules, spec)
    return Prepared(spec=spec, molecules=molecules, split=split, **_labels(spec, molecules, split))


def rows_with_features(
    prepared: Prepared, encoder: Encoder, cache: Path, progress: Progress
) -> "tuple[Rows, Features, list[tuple[int, str]]]":
    """The rows to train on, their features, and the molecules left out: their rows in the file, and why."""
    import torch

    from brimful.molecules.heads import Rows

    used = prepared.split.used()
    molecules = prepared.molecules.take(used)
    features = compute_features(encoder, molecules, cache=cache, progress=progress)
    row_of = np.full(len(prepared.molecules), -1)
    row_of[used[features.kept]] = np.arange(len(features.kept))
    sides: dict[str, dict[str, Any]] = {}
    for side, parts in (("id", prepared.split.id), ("ood", prepared.split.ood)):
        rows = {name: row_of[getattr(parts, name)] for name in PARTS}
        sides[side] = {name: positions[positions >= 0].astype(np.int64) for name, positions in rows.items()}
        for name, positions in sides[side].items():
            if not len(positions):
                raise BadData(f"{prepared.spec.name}: {encoder.name} has features for no {side.upper()} molecule of {name}. Try: another encoder.")  # fmt: skip
    matrix = features.matrix[features.kept]
    matrix = matrix.astype(np.uint8) if only_bits(matrix) else _standardise(matrix, sides["id"]["train"])
    labels = None if prepared.labels is None else torch.from_numpy(prepared.labels[used[features.kept]])
    left_out = [(int(molecules.rows[index]), reason) for index, reason in features.failed.items()]
    return Rows(features=torch.from_numpy(np.ascontiguousarray(matrix)), labels=labels, **sides), features, left_out


def check_batch(prepared: Prepared, rows: "Rows", batch: int, *, sees_ood: bool) -> None:
    """A batch larger than the set would be the set itself in every step: fewer steps, another training."""
    for side, part in (("ID", rows.id), ("OOD", rows.ood)):
        available = len(part["train"])
        if batch > available and (side == "ID" or sees_ood):
            raise BadOption(
                f"[train] batch {batch:,} is larger than the {available:,} {side} training molecules of "
                f"{prepared.spec.name}. Try: at most {available:,}."
            )


def _standardise(matrix: Any, train: Any) -> Any:
    known = matrix[train].astype(np.float64)
    mean, deviation = known.mean(0), known.std(0)
    deviation[deviation < 1e-6 * np.maximum(1, np.abs(mean))] = 1  # a constant column must not be blown up
    result = np.empty(matrix.shape, dtype=np.float32)
    for start in range(0, len(matrix), _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        result[part] = np.clip((matrix[part] - mean) / deviation, -CLIP, CLIP)
    return result


# ---- Labels ----------------------------------------------------------------------------------------------------------------


def _labels(spec: DatasetSpec, molecules: Molecules, split: Split) -> dict[str, Any]:
    """The label fields of `Prepared`."""
    columns, counts, problems, remarks = [], [], [], []
    for name in spec.label:
        if name not in molecules.columns:
            raise BadData(f"{spec.name}: {spec.file.name} has no column {name!r} for label. Try: one of {', '.join(molecules.columns)}.")  # fmt: skip
        classes, values = _classes(molecules.columns[name])
        columns.append(classes)
        counts.append(len(values))
        problems += _class_problem(f"{spec.name}: label {name!r}", values, classes[split.id.train])
        remarks.append(f"label {name}: {_class_counts(molecules.columns[name], classes, values)}")
    return {
        "labels": np.stack(columns, 1) if columns else None,
        "classes": tuple(counts),
        "label_problem": " ".join(problems),
        "label_remarks": tuple(remarks),
    }


def _classes(column: Column) -> tuple[npt.NDArray[np.int64], list[str]]:
    """The class of each row, −1 where it is blank, and the values of the classes as the file writes them."""
    if column.dtype.kind != "f":
        blank = np.array([str(value).strip().lower() in MISSING for value in column], dtype=bool)
        if blank.any():
            column = column_from(np.where(blank, "", column))  # may be numbers without those words
    numbers = column.dtype.kind == "f"
    known = np.isfinite(column) if numbers else column != ""
    values, members = np.unique(column[known].astype(column.dtype if numbers else str), return_inverse=True)
    classes = np.full(len(column), -1, dtype=np.int64)
    classes[known] = members
    return classes, [as_text(value) if numbers else str(value) for value in values]


def _class_problem(label: str, values: Sequence[str], train: Any) -> list[str]:
    seen = np.unique(train[train >= 0])
    if len(seen) < 2:
        only = f"only {values[seen[0]]}" if len(seen) else "no value"
        return [f"{label} has {only} among the ID training molecules, and a classifier needs two classes. Try: another label or split."]  # fmt: skip
    if len(values) > MOST_CLASSES:
        return [
            f"{label} has {len(values):,} different values, more than {MOST_CLASSES} classes. Try: a column of classes."
        ]
    return []


def _class_counts(column: Column, classes: Any, values: Sequence[str]) -> str:
    """`0 (1,204), 1 (300), 996 blank`, with the words that counted as blank."""
    counts = np.bincount(classes[classes >= 0], minlength=len(values))
    parts = [f"{value} ({count:,})" for value, count in list(zip(values, counts, strict=True))[:_LISTED]]
    parts += [f"{len(values) - _LISTED:,} other values"] if len(values) > _LISTED else []
    words = sorted({str(value) for value in column[classes < 0]} - {"", "nan"})[:_LISTED]
    if blank := int((classes < 0).sum()):
        parts.append(f"{blank:,} blank" + (f" ({', '.join(words)})" if words else ""))
    return ", ".join(parts)
