"""Everything that heads are trained on, made ready and checked before the first step: molecules, splits, features, labels.

Splits come before features, so that they do not depend on encoders and a slow encoder sees the molecules in use alone.
A molecule that an encoder cannot take leaves that encoder's rows, is counted and listed. Features are brought to mean 0
and deviation 1 by the ID training molecules, which are all that may be known; those of nothing but 0 and 1 stay so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from brimful.errors import BadData, BadOption
from brimful.molecules.dataset import NOT_UTF8, Column, Facts, Molecules, column_of, facts_of, read_molecules
from brimful.molecules.features.compute import features_of
from brimful.molecules.features.encoder import Encoder, Features, only_bits
from brimful.molecules.published import read_published
from brimful.molecules.spec import DatasetSpec
from brimful.molecules.splits import Split, SplitOptions, as_text, make_split, trimmed
from brimful.units import show_count

if TYPE_CHECKING:
    from brimful.molecules.job import Rows

Say = Callable[[str], object]
FURTHEST = 10.0
"""Features further from the mean than so many deviations are cut there: one descriptor of a salt must not rule a batch."""
MOST_CLASSES = 100
"""A label column with more values than this is a measurement, not a class."""
MISSING = frozenset(("-", "?", "na", "n/a", "#n/a", "<na>", "nan", "none", "null", "inf", "-inf"))
"""What stands for a label that was not measured, in any case, besides nothing at all."""
_NAMED = 5
"""Classes of a label that its remark names at most."""
_ROWS = 4096
"""Standardised at a time: in between they are float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One dataset under one split."""

    asked: DatasetSpec
    molecules: Molecules
    facts: Facts
    split: Split
    labels: np.ndarray[Any, np.dtype[np.int64]] | None
    """[molecules, tasks]: the class, −1 where it is not known."""
    classes: Sequence[int]
    """Of each task; where no classifier can be trained, asking for them is the error that says why."""
    label_remarks: tuple[str, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        return (*_unread(self.molecules), *self.label_remarks, *self.split.remarks)


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
    labels, classes, told = _labels(asked, molecules, split)
    return Prepared(
        asked=asked, molecules=molecules, facts=facts, split=split, labels=labels, classes=classes, label_remarks=told
    )


def rows_of(
    prepared: Prepared, encoder: Encoder, cache: Path, say: Say
) -> "tuple[Rows, Features, Sequence[tuple[int, str]]]":
    """The rows to train on, their features, and the molecules left out: their rows in the file, and why."""
    import torch

    from brimful.molecules.job import Rows

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
    matrix = matrix.astype(np.uint8) if only_bits(matrix) else _standardised(matrix, sides["id"]["train"])
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
    found = np.empty(matrix.shape, dtype=np.float32)
    for start in range(0, len(matrix), _ROWS):
        part = slice(start, start + _ROWS)
        found[part] = np.clip((matrix[part] - mean) / deviation, -FURTHEST, FURTHEST)
    return found


def _unread(molecules: Molecules) -> list[str]:
    count = len(molecules.unread)
    told = [f"{show_count(count, 'row')} cannot be read and {'is' if count == 1 else 'are'} left out"] if count else []
    if garbled := sum(one.reason == NOT_UTF8 for one in molecules.unread):
        told.append(f"{garbled:,} of them for being {NOT_UTF8}: convert the file, as with iconv -f gbk -t utf-8")
    return told


class _NoClasses(Sequence[int]):
    """In place of classes that no classifier can be trained on: methods that read no labels never ask for them."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __len__(self) -> int:
        raise BadData(self._why)

    def __getitem__(self, place: Any) -> Any:
        raise BadData(self._why)


def _labels(asked: DatasetSpec, molecules: Molecules, split: Split) -> tuple[Any, Sequence[int], tuple[str, ...]]:
    """The labels, how many classes each has, and a remark on each."""
    if not asked.label:
        return None, (), ()
    columns, classes, problems, remarks = [], [], [], []
    for name in asked.label:
        if name not in molecules.columns:
            there = ", ".join(molecules.columns)
            raise BadData(f"{asked.name}: {asked.file.name} has no column {name!r} for label; it has {there}")
        found, values = _classes(molecules.columns[name])
        columns.append(found)
        classes.append(len(values))
        problems += _problem(f"{asked.name}: label {name!r}", values, found[split.id.train])
        remarks.append(f"label {name}: {_counted(molecules.columns[name], found, values)}")
    return np.stack(columns, 1), _NoClasses("; ".join(problems)) if problems else tuple(classes), tuple(remarks)


def _classes(column: Column) -> tuple[Any, list[str]]:
    """A column as numbers of classes, −1 where it is blank, and the classes as the file writes them."""
    if column.dtype.kind != "f":
        blank = np.array([str(one).strip().lower() in MISSING for one in column], dtype=bool)
        if blank.any():
            column = column_of(np.where(blank, "", column))  # of numbers, once the words between them are gone
    numbers = column.dtype.kind == "f"
    known = np.isfinite(column) if numbers else column != ""
    values, places = np.unique(column[known].astype(column.dtype if numbers else str), return_inverse=True)
    found = np.full(len(column), -1, dtype=np.int64)
    found[known] = places
    return found, [as_text(one) if numbers else str(one) for one in values]


def _problem(label: str, values: Sequence[str], train: Any) -> list[str]:
    """Why no classifier can learn this label, if so."""
    seen = np.unique(train[train >= 0])
    if len(seen) < 2:
        what = f"only {values[seen[0]]}" if len(seen) else "nothing"
        why = f"{what} among the ID training molecules, and a classifier needs two classes"
        return [f"{label} has {why}; choose another label or split"]
    if len(values) > MOST_CLASSES:
        why = f"{len(values):,} different values, more than the {MOST_CLASSES} classes a label may have"
        return [f"{label} has {why}; it looks like a measurement"]
    return []


def _counted(column: Column, found: Any, values: Sequence[str]) -> str:
    """`0 (1,204), 1 (300), 996 blank`, with the words that were taken for blanks."""
    counts = np.bincount(found[found >= 0], minlength=len(values))
    told = [f"{value} ({count:,})" for value, count in list(zip(values, counts, strict=True))[:_NAMED]]
    told += [f"{len(values) - _NAMED:,} other values"] if len(values) > _NAMED else []
    words = sorted({str(one) for one in column[found < 0]} - {"", "nan"})[:_NAMED]
    if blank := int((found < 0).sum()):
        told.append(f"{blank:,} blank" + (f" ({', '.join(words)})" if words else ""))
    return ", ".join(told)
