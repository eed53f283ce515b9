"""A split: six lists of places in the molecules, and sentences that say how they came about."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import combinations, pairwise, product
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption
from brimful.molecules.dataset import Facts, Molecules
from brimful.units import show_count

# What can be asked of a split.


Kind = Literal["scaffold", "size", "column", "random"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """One split of one dataset."""

    kind: Kind
    column: str | None = None
    """Its values are the domains of `column`."""
    ood: tuple[Any, ...] = ()
    """The values of it that are OOD; the rare ones where none is named."""
    train: int | None = None
    """Molecules on each side; None takes a share of what there is."""
    valid: int | None = None
    test: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in KINDS:
            problems.append(f"split is {self.kind!r} and must be one of {', '.join(KINDS)}")
        if self.kind == "column" and not self.column:
            problems.append("split 'column' needs the name of a column: set `column`")
        if self.kind != "column" and (self.column or self.ood):
            problems.append(f"`column` and `ood` belong to the split 'column', not to {self.kind!r}; leave them out")
        for name in ("train", "valid", "test"):
            count = getattr(self, name)
            if count is not None and count < 1:
                problems.append(f"`{name}` is {count} and must be at least 1")
        if self.seed < 0:
            problems.append(f"the split's seed is {self.seed} and must not be negative")
        if problems:
            raise BadOption("; ".join(problems))

    @property
    def asked(self) -> tuple[int | None, int | None, int | None]:
        return self.train, self.valid, self.test


Places = npt.NDArray[np.int64]
PARTS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The molecules of one side."""

    train: Places
    valid: Places
    test: Places

    @property
    def sizes(self) -> tuple[int, int, int]:
        return len(self.train), len(self.valid), len(self.test)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Both sides."""

    kind: str
    """`scaffold`, `size`, `column`, `random`, or the domain of a published split."""
    id: Part
    ood: Part
    remarks: tuple[str, ...] = ()
    """Sentences: how the sides were drawn, what was checked, what was left out."""

    def parts(self) -> Mapping[str, Places]:
        """All six by name: `ID train` … `OOD test`."""
        return {
            f"{side} {name}": getattr(part, name)
            for side, part in (("ID", self.id), ("OOD", self.ood))
            for name in PARTS
        }

    def used(self) -> Places:
        """Every molecule in use, once, in the file's order: those that need features."""
        return np.unique(np.concatenate(list(self.parts().values())))


# Who goes where: molecules are ordered by a hash of themselves and the seed, and dealt from the top.
#
# A hash instead of a random generator: the same molecules get the same order whatever the file's order, the library's
# version or the machine, and a molecule added to the file moves no other.


def in_order(places: Places, keys: Sequence[str] | npt.NDArray[np.object_], seed: int, purpose: str) -> Places:
    """These places in a random order that hangs on the key of each, the seed and the purpose alone."""
    drawn = sorted((draw(str(keys[place]), seed, purpose), int(place)) for place in places)
    return np.array([place for _, place in drawn], dtype=np.int64)


def draw(key: str, seed: int, purpose: str) -> bytes:
    """A random number of this key."""
    return blake2b(f"{seed}\0{purpose}\0{key}".encode(), digest_size=12).digest()


def deal(ordered: Places, sizes: Sequence[int]) -> Part:
    """The first for training, the next for validation, the next for testing."""
    train, valid, test = np.split(ordered[: sum(sizes)], np.cumsum(sizes)[:2])
    return Part(train=train, valid=valid, test=test)


def deal_groups(groups: Iterable[Places], sizes: Sequence[int]) -> Part | None:
    """Whole groups, so that no two parts share one; None where the groups do not allow these sizes.

    A group goes to the first part that has room for all of it. Groups too large for any come last and are cut: what is
    over belongs to nobody.
    """
    room = list(sizes)
    dealt: list[list[Places]] = [[] for _ in sizes]
    large: list[Places] = []
    for group in groups:
        part = next((part for part, left in enumerate(room) if len(group) <= left), None)
        if part is None:
            large.append(group)
        else:
            dealt[part].append(group)
            room[part] -= len(group)
    return _cut(large, room, dealt)


def deal_few(groups: Sequence[Places], sizes: Sequence[int]) -> Part | None:
    """As above for a few large groups: the largest first, each to the part that lacks most. The parts' mixtures differ."""
    return _cut(groups, list(sizes), [[] for _ in sizes])


def _cut(groups: Sequence[Places], room: list[int], dealt: list[list[Places]]) -> Part | None:
    for group in sorted(groups, key=len, reverse=True):
        part = int(np.argmax(room))
        dealt[part].append(group[: room[part]])
        room[part] -= len(dealt[part][-1])
    if any(room):
        return None
    train, valid, test = (np.concatenate(part) for part in dealt)
    return Part(train=train, valid=valid, test=test)


def grouped(places: Places, names: npt.NDArray[np.object_], seed: int, purpose: str) -> list[Places]:
    """Places of one name together, the groups in random order, the places of a group as given."""
    groups: dict[str, list[int]] = {}
    for place in places:
        groups.setdefault(str(names[place]), []).append(int(place))
    return [np.array(groups[name], dtype=np.int64) for name in sorted(groups, key=lambda one: draw(one, seed, purpose))]


# Which molecules are in distribution and which are out of it, for each kind of split.
#
#     scaffold  ID: scaffolds that occur often, OOD: rare ones. The count that parts them is the one that leaves the smaller
#               side largest (3 molecules on HIV: 20,577 ID, 18,961 OOD), and never parts scaffolds of one count: which of
#               them came first in the alphabet would be a pattern to learn.
#     size      ID: the third with the most heavy atoms, OOD: the third with the fewest, as in DrugOOD and GOOD; the third
#               between them is left out, and no number of atoms is on both sides.
#     column    ID: the frequent values, OOD: the rare ones or those named.
#     random    a coin a molecule: the control, on which no method may be better than .5.
#
# Molecules without a ring have no scaffold. As one group they would be the second largest of HIV, all ID, and counting rings
# would tell them (AUROC .72 instead of .69): the scaffold split leaves them out.


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


# How many molecules of each side are for training, validation and testing.
#
# What was asked for is given or refused. Where nothing was asked for, both sides get the same numbers, in the proportions
# of the published experiments (2000 : 600 : 1000), no more than those, and no more than the smaller side has.


USUAL = (2000, 600, 1000)
Sizes = tuple[int, int, int]


def sizes_for(
    options: SplitOptions, *, id_count: int, ood_count: int, spare: int = 0, source: str
) -> tuple[Sizes, str]:
    """The numbers for each side, and the sentence that says so. A share leaves `spare` molecules of a side alone."""
    room = min(id_count, ood_count) - sum(count or 0 for count in options.asked)
    free = [name for name, count in zip(PARTS, options.asked, strict=True) if count is None]
    usual = sum(count for name, count in zip(PARTS, USUAL, strict=True) if name in free)
    share = min(1.0, (room - spare) / usual) if free else 1.0
    sizes = tuple(count or int(most * share) for most, count in zip(USUAL, options.asked, strict=True))
    if room < 0 or min(sizes) < 1:
        raise BadData(
            f"{source}: the {options.kind} split finds {id_count:,} ID and {ood_count:,} OOD molecules, too few for "
            f"{_told(options.asked)}; lower the numbers or take another split"
        )
    how = "the usual number" if share == 1 else "a share of the smaller side"
    why = f" ({', '.join(free)} by default: {how})" if free else ""
    train, valid, test = sizes
    return (train, valid, test), (
        f"each side has {train:,} training, {valid:,} validation and {test:,} test molecules{why}"
    )


def trimmed(
    split: Split,
    facts: Facts,
    *,
    train: int | None = None,
    valid: int | None = None,
    test: int | None = None,
    seed: int = 0,
) -> Split:
    """A published split with as many molecules of each part as asked for; parts that were not asked for stay whole."""
    asked = (train, valid, test)
    wanted = dict(zip(split.parts(), asked * 2, strict=True))
    short = [f"{name} has {len(at):,}" for name, at in split.parts().items() if len(at) < (wanted[name] or 0)]
    if short:
        raise BadData(f"this published split has too few molecules for {_told(asked)}: {', '.join(short)}; lower it")
    if not any(asked):
        return split
    drawn = {
        name: in_order(places, facts.canonical, seed, name)[: wanted[name]] for name, places in split.parts().items()
    }
    sides = {side: Part(**{name: drawn[f"{side} {name}"] for name in PARTS}) for side in ("ID", "OOD")}
    return replace(
        split, id=sides["ID"], ood=sides["OOD"], remarks=(*split.remarks, f"drawn of each side: {_told(asked)}")
    )


def _told(asked: tuple[int | None, ...]) -> str:
    """`train 2,000, test 1,000`."""
    named = [f"{name} {count:,}" for name, count in zip(PARTS, asked, strict=True) if count is not None]
    return ", ".join(named) or "training, validation and testing"


# What a split forbids on both sides, looked for in the finished lists and not in how they were made.
#
#     always     no molecule (canonical SMILES, stereochemistry aside) in two of the six parts
#     scaffold   no scaffold on both sides, and none in two parts of the OOD side: a head would only have to remember it
#     size       no number of heavy atoms on both sides
#
# A split made here that breaks one is an error; a published one is used as published, and what was found is told.
#
# Salts and charge states of one molecule are different molecules here: their SMILES and fingerprints differ. How many lie in
# two parts is told and no error: 65 on the scaffold split of Tox21, found in 0.3 s, since only what has a charge or a
# counter-ion is read again.


_CHECKED = {
    "scaffold": ", no scaffold on both sides or in two OOD parts",
    "size": ", no heavy-atom count on both sides",
}
_CHARGED_OR_MIXED = re.compile(r"\.|\[[^]]*[+-]")


def check_leakage(split: Split, facts: Facts) -> tuple[str, ...]:
    """The sentence of what was checked; what is where it must not be is an error that names an example."""
    found = leaks(split, facts)
    if found:
        raise BadData(f"this {split.kind} split leaks: {found[0]}")
    return (f"checked: no molecule in two parts{_CHECKED.get(split.kind, '')}", *salts(split, facts))


def leaks(split: Split, facts: Facts) -> tuple[str, ...]:
    """A sentence for each kind of thing that two parts share and must not: the worst pair of them, with an example."""
    names = list(split.parts())
    ids, ood = names[:3], names[3:]
    found = [_shared(split, facts.canonical, "molecule", combinations(names, 2))]
    if split.kind == "scaffold":
        pairs = [*product(ids, ood), *combinations(ood, 2)]
        found.append(_shared(split, facts.scaffold, "scaffold", pairs))
    if split.kind == "size":
        found.append(_shared(split, facts.heavy_atoms, "heavy-atom count", product(ids, ood)))
    return tuple(sentence for sentence in found if sentence)


def salts(split: Split, facts: Facts) -> tuple[str, ...]:
    """A sentence where a molecule is in two parts as another salt or charge state: how many are, and an example."""
    parts = {name: set(facts.canonical[places].tolist()) for name, places in split.parts().items()}
    charged = {one for molecules in parts.values() for one in molecules if _CHARGED_OR_MIXED.search(one)}
    parents = _parents(charged) if charged else {}
    forms: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, molecules in parts.items():
        for one in molecules:
            forms[parents.get(one, one)].append((one, name))
    apart = {
        parent: there for parent, there in forms.items() if all(len(set(each)) > 1 for each in zip(*there, strict=True))
    }
    if not apart:
        return ()
    pairs = combinations(sorted(apart[min(apart)]), 2)
    (one, here), (other, there) = next((a, b) for a, b in pairs if a[0] != b[0] and a[1] != b[1])
    are = f"{show_count(len(apart), 'molecule')} {'is' if len(apart) == 1 else 'are'}"
    return (f"{are} in two parts as another salt or charge state, such as {one!r} in {here} and {other!r} in {there}",)


def _parents(molecules: Iterable[str]) -> dict[str, str]:
    """The largest fragment of each, uncharged."""
    from rdkit import Chem, rdBase
    from rdkit.Chem.MolStandardize import rdMolStandardize

    largest, neutral = rdMolStandardize.LargestFragmentChooser(), rdMolStandardize.Uncharger()
    with rdBase.BlockLogs():
        read = {one: Chem.MolFromSmiles(one) for one in molecules}
        return {
            one: Chem.MolToSmiles(neutral.uncharge(largest.choose(molecule)), isomericSmiles=False)
            for one, molecule in read.items()
            if molecule is not None
        }


def _shared(split: Split, values: npt.NDArray[Any], what: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Empty where nothing is shared. Molecules without a ring share no scaffold: they have none."""
    sets = {name: set(values[places].tolist()) - {""} for name, places in split.parts().items()}
    shared = [(sets[one] & sets[other], one, other) for one, other in pairs]
    both, one, other = max(shared, key=lambda found: len(found[0]))
    if not both:
        return ""
    verb = "is" if len(both) == 1 else "are"
    more = sum(bool(found) for found, _, _ in shared) - 1
    also = f"; {show_count(more, 'other pair')} of parts share{'s' * (more == 1)} some" if more else ""
    return f"{show_count(len(both), what)} {verb} in {one} and in {other}, such as {min(both)!r}{also}"


# A split from molecules and options: sides, sizes, the deal, and a look for leaks.


def make_split(molecules: Molecules, facts: Facts, options: SplitOptions) -> Split:
    """Deterministic: the same molecules and options give the same six lists."""
    if not len(molecules):
        raise BadData(f"{molecules.source} has no molecules to split")
    sides = sides_of(molecules, facts, options)
    ordered = in_order(sides.ood, facts.canonical, options.seed, "OOD")
    groups = grouped(ordered, sides.groups, options.seed, "OOD groups") if sides.groups is not None else None
    sizes, told = sizes_for(
        options,
        id_count=len(sides.id),
        ood_count=len(sides.ood),
        spare=_spare(options, groups),
        source=molecules.source,
    )
    ood, how = _deal_ood(ordered, groups, sizes, options, molecules.source)
    ids = deal(in_order(sides.id, facts.canonical, options.seed, "ID"), sizes)
    made = Split(kind=options.kind, id=ids, ood=ood, remarks=(*sides.remarks, told, *how))
    return replace(made, remarks=(*made.remarks, *check_leakage(made, facts)))


def _spare(options: SplitOptions, groups: list[Places] | None) -> int:
    """What cutting groups can lose at most: each part cuts one of them, and keeps at least one molecule of it."""
    return len(PARTS) * (max(map(len, groups), default=1) - 1) if options.kind == "scaffold" and groups else 0


def _deal_ood(
    ordered: Places, groups: list[Places] | None, sizes: Sizes, options: SplitOptions, source: str
) -> tuple[Part, tuple[str, ...]]:
    """By groups where there are any. A column may have too few values for that, scaffolds may not."""
    if groups is None:
        return deal(ordered, sizes), ()
    by_scaffold = options.kind == "scaffold"
    dealt = deal_groups(groups, sizes) or (None if by_scaffold else deal_few(groups, sizes))
    if dealt is not None:  # scaffolds are looked for again by the leak check, which then says so
        return dealt, () if by_scaffold else (f"no two OOD parts share a value of {options.column!r}",)
    if by_scaffold:
        raise BadData(
            f"{source}: its {len(groups):,} OOD scaffolds do not allow {sum(sizes):,} molecules in three parts that share "
            "none; lower train, valid and test a little"
        )
    return deal(ordered, sizes), (f"the OOD parts share values of {options.column!r}: there are too few to part them",)
