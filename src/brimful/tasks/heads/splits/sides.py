"""Which molecules are in distribution and which are out of it, for each kind of split.

    scaffold  ID: scaffolds that occur often, OOD: rare ones. The count that parts them is the one that leaves the smaller
              side largest (3 molecules on HIV: 20,577 ID, 18,961 OOD), and never parts scaffolds of one count: which of
              them came first in the alphabet would be a pattern to learn.
    size      ID: the third with the most heavy atoms, OOD: the third with the fewest, as in DrugOOD and GOOD; the third
              between them is left out, and no number of atoms is on both sides.
    column    ID: the frequent values, OOD: the rare ones or those named.
    random    a coin a molecule: the control, on which no method may be better than .5.

Molecules without a ring have no scaffold. As one group they would be the second largest of HIV, all ID, and counting rings
would tell them (AUROC .72 instead of .69): the scaffold split leaves them out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption
from brimful.tasks.heads.molecules.facts import Facts
from brimful.tasks.heads.molecules.molecules import Molecules
from brimful.tasks.heads.splits.deal import draw
from brimful.tasks.heads.splits.options import SplitOptions
from brimful.tasks.heads.splits.split import Places
from brimful.units import show_count

_LISTED = 8
"""Values named in a message at most."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The molecules of each side, each molecule once."""

    id: Places
    ood: Places
    groups: npt.NDArray[np.object_] | None = None
    """By place: names of which two OOD parts must not share one; None where parts may share anything but molecules."""
    remarks: tuple[str, ...]


def sides_of(molecules: Molecules, facts: Facts, options: SplitOptions) -> Sides:
    """As the options ask."""
    if options.kind == "column":
        return _by_column(molecules, facts, options)
    once = distinct(facts.canonical, np.arange(len(molecules)))
    repeated = _left_out(len(molecules) - len(once), "in the file before")
    made = {"scaffold": _by_scaffold, "size": _by_size, "random": _at_random}[options.kind](
        facts, once, options, molecules.source
    )
    return Sides(id=made.id, ood=made.ood, groups=made.groups, remarks=(*made.remarks, *repeated))


def distinct(canonical: npt.NDArray[np.object_], among: Places) -> Places:
    """The first row of each molecule."""
    first: dict[str, int] = {}
    for place in among:
        first.setdefault(canonical[place], int(place))
    return np.array(sorted(first.values()), dtype=np.int64)


def often_from(names: Iterable[str]) -> int | None:
    """The count from which a name is frequent, such that the smaller side is largest; None where all occur equally often."""
    by_count: Counter[int] = Counter()
    for count in Counter(names).values():
        by_count[count] += count
    levels, total, below, best = sorted(by_count), sum(by_count.values()), 0, (0, 0)
    for level, following in pairwise(levels):
        below += by_count[level]
        best = max(best, (min(below, total - below), -following))
    return -best[1] or None


def _by_scaffold(facts: Facts, once: Places, options: SplitOptions, source: str) -> Sides:
    ringed = once[facts.scaffold[once] != ""]
    level = often_from(facts.scaffold[ringed])
    if level is None:
        none = "none of its molecules has a ring" if not len(ringed) else "all its scaffolds occur equally often"
        raise BadData(f"{source}: {none}, so no scaffold is rare; take the split 'size' or 'random'")
    counts = Counter(facts.scaffold[ringed])
    often = np.array([counts[name] >= level for name in facts.scaffold[ringed]])
    of_id = sum(count >= level for count in counts.values())
    remark = (
        f"ID has the {of_id:,} scaffolds of {level} molecules or more ({often.sum():,} molecules), "
        f"OOD the {len(counts) - of_id:,} of fewer ({(~often).sum():,})"
    )
    acyclic = _left_out(len(once) - len(ringed), "without a ring, hence without a scaffold")
    return Sides(id=ringed[often], ood=ringed[~often], groups=facts.scaffold, remarks=(remark, *acyclic))


def _by_size(facts: Facts, once: Places, options: SplitOptions, source: str) -> Sides:
    atoms = facts.heavy_atoms[once]
    third = (len(once) - 1) // 3
    most, least = np.sort(atoms)[third], np.sort(atoms)[len(once) - 1 - third]
    if most == least:  # the whole middle third is of one size: the next one begins the other side
        most, least = (most, most + 1) if atoms.max() > most else (most - 1, most)
    ood, ids = once[atoms <= most], once[atoms >= least]
    if not len(ood) or not len(ids):
        raise BadData(
            f"{source}: all its molecules have {atoms.max()} heavy atoms, so none is smaller; take another split"
        )
    remark = f"ID has the molecules of {least} heavy atoms or more ({len(ids):,}), OOD those of {most} or fewer ({len(ood):,})"
    between = _left_out(len(once) - len(ids) - len(ood), "of a size between them")
    return Sides(id=ids, ood=ood, remarks=(remark, *between))


def _at_random(facts: Facts, once: Places, options: SplitOptions, source: str) -> Sides:
    heads = np.array([draw(facts.canonical[place], options.seed, "side")[0] % 2 == 0 for place in once], dtype=bool)
    return Sides(
        id=once[heads],
        ood=once[~heads],
        remarks=("ID and OOD are drawn at random: an AUROC beyond .5 is chance or a mistake",),
    )


def _by_column(molecules: Molecules, facts: Facts, options: SplitOptions) -> Sides:
    values = _values(molecules, options.column or "")
    filled = np.flatnonzero(values != "")
    ood_values, how = _ood_values(molecules.source, values[filled], options)
    is_ood = np.isin(values[filled].astype(str), sorted(ood_values))
    both = set(facts.canonical[filled[is_ood]]) & set(facts.canonical[filled[~is_ood]])
    alone = np.array([facts.canonical[place] not in both for place in filled], dtype=bool)
    ids, ood = (distinct(facts.canonical, filled[alone & side]) for side in (~is_ood, is_ood))
    return Sides(
        id=ids,
        ood=ood,
        groups=values,
        remarks=(
            f"OOD has {how} of {options.column!r} ({len(ood):,} molecules), ID the others ({len(ids):,})",
            *_left_out(len(molecules) - len(filled), f"without a value of {options.column!r}"),
            *_left_out(len(both), "with values of both sides"),
            *_left_out(int(alone.sum()) - len(ids) - len(ood), "in the file before, on the same side"),
        ),
    )


def _ood_values(source: str, values: npt.NDArray[np.object_], options: SplitOptions) -> tuple[set[str], str]:
    """The values that are OOD, and how to call them in a sentence."""
    counts = Counter(values)
    if options.ood:
        named = {as_text(value) for value in options.ood}
        unknown = sorted(named - set(counts))
        if unknown or named == set(counts):
            problem = f"no value {', '.join(map(repr, unknown))}" if unknown else "no value left for ID"
            raise BadOption(f"{source}: the column {options.column!r} has {problem}; its values are {_listed(counts)}")
        return named, f"the value{'s' if len(named) > 1 else ''} {', '.join(sorted(named)[:_LISTED])}"
    level = often_from(values)
    if level is None:
        raise BadData(
            f"{source}: no value of the column {options.column!r} is rarer than another, it has {_listed(counts) or 'none'}; "
            "name the ones that are OOD with `ood`"
        )
    rare = {value for value, count in counts.items() if count < level}
    return rare, f"{show_count(len(rare), 'value')} of fewer than {level:,} rows"


def _values(molecules: Molecules, column: str) -> npt.NDArray[np.object_]:
    if column not in molecules.columns:
        there = ", ".join(list(molecules.columns)[:_LISTED]) or "none besides its SMILES"
        raise BadOption(f"{molecules.source} has no column {column!r} to split by; it has {there}")
    return np.array([as_text(value) for value in molecules.columns[column]], dtype=object)


def as_text(value: Any) -> str:
    """A value as the file and the spec both write it: 1, 1.0 and "1" are one value, NaN is blank."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value).strip()
    return "" if np.isnan(number) else f"{number:.15g}"


def _listed(counts: Counter[Any]) -> str:
    named = [f"{value} ({count:,})" for value, count in counts.most_common(_LISTED)]
    more = [f"{len(counts) - _LISTED} more"] if len(counts) > _LISTED else []
    return ", ".join([*named, *more])


def _left_out(count: int, why: str) -> Sequence[str]:
    return [f"{show_count(count, 'molecule')} left out: {why}"] if count else []
