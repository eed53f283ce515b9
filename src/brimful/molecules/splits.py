"""In-distribution (ID) and out-of-distribution (OOD) molecules, each for training, validation and testing.

    scaffold  ID: frequent scaffolds, OOD: rare ones. The threshold leaves the smaller side as large as possible (3
              molecules on HIV: 20,577 ID, 18,961 OOD) and never separates scaffolds of one frequency. Molecules without
              a ring are left out: as one group they would be the second largest of HIV, all ID, and counting rings
              would identify them (AUROC .72 instead of .69).
    size      ID: the third with the most heavy atoms, OOD: the third with the fewest, as in DrugOOD and GOOD. The middle
              third is left out, and no number of atoms is on both sides.
    column    ID: the frequent values of a column, OOD: the rare ones or those named.
    random    a coin per molecule: the control, on which no method should be better than .5.

A split depends on the molecules and `split_seed` alone. Molecules are ordered by a hash of themselves and the seed, not
by a random generator, so the order of the file, the library's version and the machine do not matter, and a molecule added
to the file moves no other. The finished split is then checked for leaks.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption
from brimful.molecules.dataset import Facts, Molecules
from brimful.molecules.spec import PARTS, DatasetSpec
from brimful.units import show_count

Positions = npt.NDArray[np.int64]
"""Indices into Molecules."""
Sizes = tuple[int, int, int]
USUAL = (2000, 600, 1000)
"""Molecules of each side in the published experiments, for training, validation and testing."""
_LISTED = 8
"""The most values that a message names."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The molecules of one side."""

    train: Positions
    valid: Positions
    test: Positions

    @property
    def sizes(self) -> Sizes:
        return len(self.train), len(self.valid), len(self.test)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Both sides."""

    kind: str
    """`scaffold`, `size`, `column`, `random`, or the domain of a published split."""
    id: Parts
    ood: Parts
    remarks: tuple[str, ...] = ()
    """How the sides were chosen, what was checked, what was left out."""

    def parts(self) -> Mapping[str, Positions]:
        """All six by name: `ID train` … `OOD test`."""
        return {
            f"{side} {name}": getattr(parts, name)
            for side, parts in (("ID", self.id), ("OOD", self.ood))
            for name in PARTS
        }

    def used(self) -> Positions:
        """Every molecule in use, once, in the file's order: those that need features."""
        return np.unique(np.concatenate(list(self.parts().values())))


def make_split(molecules: Molecules, spec: DatasetSpec) -> Split:
    """Deterministic: the same molecules and spec give the same six lists."""
    if not len(molecules):
        raise BadData(f"{molecules.source} has no molecules to split. Try: another file.")
    canonical, seed = molecules.facts.canonical, spec.split_seed
    pools = pools_of(molecules, spec)
    ood_order = in_order(pools.ood, canonical, seed, "OOD")
    groups = grouped(ood_order, pools.groups, seed, "OOD groups") if pools.groups is not None else None
    sizes, size_remark = _sizes(spec, pools, _group_loss(spec, groups), molecules.source)
    ood, deal_remarks = _deal_ood(ood_order, groups, sizes, spec, molecules.source)
    ids = deal(in_order(pools.id, canonical, seed, "ID"), sizes)
    split = Split(kind=spec.split, id=ids, ood=ood, remarks=(*pools.remarks, size_remark, *deal_remarks))
    return replace(split, remarks=(*split.remarks, *check_leaks(split, molecules.facts)))


# ---- Which molecules belong to which side ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pools:
    """The molecules of each side, each molecule once."""

    id: Positions
    ood: Positions
    groups: npt.NDArray[np.object_] | None = None
    """By position: names that no two OOD parts may share. None: parts may share anything but molecules."""
    remarks: tuple[str, ...]


def pools_of(molecules: Molecules, spec: DatasetSpec) -> Pools:
    if spec.split == "column":
        return _by_column(molecules, spec)
    distinct = first_of_each(molecules.facts.canonical, np.arange(len(molecules)))
    choose = {"scaffold": _by_scaffold, "size": _by_size, "random": _at_random}[spec.split]
    pools = choose(molecules, distinct, spec)
    repeats = _left_out(len(molecules) - len(distinct), "in the file before")
    return replace(pools, remarks=(*pools.remarks, *repeats))


def first_of_each(canonical: npt.NDArray[np.object_], positions: Positions) -> Positions:
    """The first row of each molecule."""
    first: dict[str, int] = {}
    for index in positions:
        first.setdefault(canonical[index], int(index))
    return np.array(sorted(first.values()), dtype=np.int64)


def frequent_from(names: Iterable[str]) -> int | None:
    """The count from which a name is frequent, such that the smaller side is largest. None: all are equally frequent."""
    by_count: Counter[int] = Counter()
    for count in Counter(names).values():
        by_count[count] += count
    levels, total, below, best = sorted(by_count), sum(by_count.values()), 0, (0, 0)
    for level, following in pairwise(levels):
        below += by_count[level]
        best = max(best, (min(below, total - below), -following))
    return -best[1] or None


def _by_scaffold(molecules: Molecules, distinct: Positions, spec: DatasetSpec) -> Pools:
    scaffolds = molecules.facts.scaffold
    ringed = distinct[scaffolds[distinct] != ""]
    level = frequent_from(scaffolds[ringed])
    if level is None:
        why = "none of its molecules has a ring" if not len(ringed) else "all its scaffolds occur equally often"
        raise BadData(f'{molecules.source}: {why}, so no scaffold is rare. Try: split = "size" or "random".')
    counts = Counter(scaffolds[ringed])
    frequent = np.array([counts[name] >= level for name in scaffolds[ringed]])
    id_scaffolds = sum(count >= level for count in counts.values())
    remark = (
        f"ID has the {id_scaffolds:,} scaffolds of {level} molecules or more ({frequent.sum():,} molecules), "
        f"OOD the {len(counts) - id_scaffolds:,} of fewer ({(~frequent).sum():,})"
    )
    acyclic = _left_out(len(distinct) - len(ringed), "without a ring, hence without a scaffold")
    return Pools(id=ringed[frequent], ood=ringed[~frequent], groups=scaffolds, remarks=(remark, *acyclic))


def _by_size(molecules: Molecules, distinct: Positions, spec: DatasetSpec) -> Pools:
    atoms = molecules.facts.heavy_atoms[distinct]
    third = (len(distinct) - 1) // 3
    most, least = np.sort(atoms)[third], np.sort(atoms)[len(distinct) - 1 - third]
    if most == least:  # the whole middle third is of one size: the next size begins the other side
        most, least = (most, most + 1) if atoms.max() > most else (most - 1, most)
    ood, ids = distinct[atoms <= most], distinct[atoms >= least]
    if not len(ood) or not len(ids):
        raise BadData(f"{molecules.source}: all molecules have {atoms.max()} heavy atoms. Try: another split.")
    remark = f"ID has the molecules of {least} heavy atoms or more ({len(ids):,}), OOD those of {most} or fewer ({len(ood):,})"  # fmt: skip
    between = _left_out(len(distinct) - len(ids) - len(ood), "of a size in between")
    return Pools(id=ids, ood=ood, remarks=(remark, *between))


def _at_random(molecules: Molecules, distinct: Positions, spec: DatasetSpec) -> Pools:
    canonical = molecules.facts.canonical
    is_id = np.array(
        [_random_bytes(canonical[index], spec.split_seed, "side")[0] % 2 == 0 for index in distinct], dtype=bool
    )
    remark = "ID and OOD are drawn at random: an AUROC other than .5 is chance or a mistake"
    return Pools(id=distinct[is_id], ood=distinct[~is_id], remarks=(remark,))


def _by_column(molecules: Molecules, spec: DatasetSpec) -> Pools:
    canonical = molecules.facts.canonical
    if spec.column is None or spec.column not in molecules.columns:
        available = ", ".join(list(molecules.columns)[:_LISTED]) or "its other splits, it has only SMILES"
        raise BadOption(f"{molecules.source} has no column {spec.column!r} to split by. Try: one of {available}.")
    texts = [as_text(value) for value in molecules.columns[spec.column]]
    values: npt.NDArray[np.object_] = np.array(texts, dtype=object)
    filled = np.flatnonzero(values != "")
    ood_values, phrase = _ood_values(molecules.source, values[filled], spec)
    is_ood = np.isin(values[filled].astype(str), sorted(ood_values))
    both = set(canonical[filled[is_ood]]) & set(canonical[filled[~is_ood]])
    on_one_side = np.array([canonical[index] not in both for index in filled], dtype=bool)
    ids, ood = (first_of_each(canonical, filled[on_one_side & side]) for side in (~is_ood, is_ood))
    return Pools(
        id=ids,
        ood=ood,
        groups=values,
        remarks=(
            f"OOD has {phrase} of {spec.column!r} ({len(ood):,} molecules), ID the others ({len(ids):,})",
            *_left_out(len(molecules) - len(filled), f"without a value of {spec.column!r}"),
            *_left_out(len(both), "with values of both sides"),
            *_left_out(int(on_one_side.sum()) - len(ids) - len(ood), "in the file before, on the same side"),
        ),
    )


def _ood_values(source: str, values: npt.NDArray[np.object_], spec: DatasetSpec) -> tuple[set[str], str]:
    """The values that are OOD, and how a sentence calls them."""
    counts = Counter(values)
    if spec.ood:
        named = {as_text(value) for value in spec.ood}
        missing = sorted(named - set(counts))
        if missing or named == set(counts):
            problem = f"no value {', '.join(map(repr, missing))}" if missing else "no value left for ID"
            raise BadOption(f"{source}: the column {spec.column!r} has {problem}. Try: some of {_listed(counts)}.")
        return named, f"the value{'s' if len(named) > 1 else ''} {', '.join(sorted(named)[:_LISTED])}"
    level = frequent_from(values)
    if level is None:
        raise BadData(
            f"{source}: no value of the column {spec.column!r} is rarer than another, it has {_listed(counts) or 'none'}. "
            "Try: name the OOD values with ood."
        )
    rare = {value for value, count in counts.items() if count < level}
    return rare, f"{show_count(len(rare), 'value')} of fewer than {level:,} rows"


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


# ---- How many, and which of them go to which part --------------------------------------------------------------------------


def _sizes(spec: DatasetSpec, pools: Pools, group_loss: int, source: str) -> tuple[Sizes, str]:
    """The size of each part and a sentence that says so. Requested sizes are kept or refused; by default both sides have
    the usual sizes, or the same proportions of what the smaller side has."""
    requested = spec.sizes
    available = min(len(pools.id), len(pools.ood)) - sum(count or 0 for count in requested.values())
    default = [name for name in PARTS if requested[name] is None]
    usual = sum(count for name, count in zip(PARTS, USUAL, strict=True) if name in default)
    scale = min(1.0, (available - group_loss) / usual) if default else 1.0
    sizes = tuple(requested[name] or int(count * scale) for name, count in zip(PARTS, USUAL, strict=True))
    if available < 0 or min(sizes) < 1:
        raise BadData(
            f"{source}: the {spec.split} split has {len(pools.id):,} ID and {len(pools.ood):,} OOD molecules, too few for "
            f"{_show_sizes(spec)}. Try: smaller numbers, or another split."
        )
    how = "the usual number" if scale == 1 else "in proportion to the smaller side"
    why = f" ({', '.join(default)} by default: {how})" if default else ""
    train, valid, test = sizes
    remark = f"each side has {train:,} training, {valid:,} validation and {test:,} test molecules{why}"
    return (train, valid, test), remark


def _show_sizes(spec: DatasetSpec) -> str:
    """`train 2,000, test 1,000`"""
    named = [f"{name} {count:,}" for name, count in spec.sizes.items() if count is not None]
    return ", ".join(named) or "training, validation and testing"


def _group_loss(spec: DatasetSpec, groups: list[Positions] | None) -> int:
    """The most that truncated groups can lose: each part truncates one of them and keeps at least one molecule of it."""
    return len(PARTS) * (max(map(len, groups), default=1) - 1) if spec.split == "scaffold" and groups else 0


def trimmed(split: Split, facts: Facts, spec: DatasetSpec) -> Split:
    """A published split with the requested number of molecules in each part; other parts stay whole."""
    requested = {f"{side} {name}": count for side in ("ID", "OOD") for name, count in spec.sizes.items()}
    short = [
        f"{name} has {len(positions):,}"
        for name, positions in split.parts().items()
        if len(positions) < (requested[name] or 0)
    ]
    if short:
        raise BadData(f"this published split has too few molecules for {_show_sizes(spec)}: {', '.join(short)}. Try: smaller numbers.")  # fmt: skip
    if not any(requested.values()):
        return split
    drawn = {
        name: in_order(positions, facts.canonical, spec.split_seed, name)[: requested[name]]
        for name, positions in split.parts().items()
    }
    ids, ood = (Parts(**{name: drawn[f"{side} {name}"] for name in PARTS}) for side in ("ID", "OOD"))
    return replace(split, id=ids, ood=ood, remarks=(*split.remarks, f"drawn from each side: {_show_sizes(spec)}"))


def in_order(positions: Positions, keys: Sequence[str] | npt.NDArray[np.object_], seed: int, purpose: str) -> Positions:
    """In a random order that depends on the key of each, the seed and the purpose alone."""
    drawn = sorted((_random_bytes(str(keys[index]), seed, purpose), int(index)) for index in positions)
    return np.array([index for _, index in drawn], dtype=np.int64)


def _random_bytes(key: str, seed: int, purpose: str) -> bytes:
    return blake2b(f"{seed}\0{purpose}\0{key}".encode(), digest_size=12).digest()


def grouped(positions: Positions, names: npt.NDArray[np.object_], seed: int, purpose: str) -> list[Positions]:
    """Positions of one name together, the groups in random order, the positions of a group in the order of the argument."""
    groups: dict[str, list[int]] = {}
    for index in positions:
        groups.setdefault(str(names[index]), []).append(int(index))
    order = sorted(groups, key=lambda name: _random_bytes(name, seed, purpose))
    return [np.array(groups[name], dtype=np.int64) for name in order]


def deal(ordered: Positions, sizes: Sequence[int]) -> Parts:
    """The first for training, the next for validation, the next for testing."""
    train, valid, test = np.split(ordered[: sum(sizes)], np.cumsum(sizes)[:2])
    return Parts(train=train, valid=valid, test=test)


def _deal_ood(
    ordered: Positions, groups: list[Positions] | None, sizes: Sizes, spec: DatasetSpec, source: str
) -> tuple[Parts, tuple[str, ...]]:
    """By groups where there are any. A column may have too few values for that; scaffolds may not."""
    if groups is None:
        return deal(ordered, sizes), ()
    by_scaffold = spec.split == "scaffold"
    parts = deal_groups(groups, sizes) or (None if by_scaffold else _deal_large(groups, list(sizes), [[], [], []]))
    if parts is not None:  # for scaffolds the leak check says the same
        return parts, () if by_scaffold else (f"no two OOD parts share a value of {spec.column!r}",)
    if by_scaffold:
        raise BadData(
            f"{source}: its {len(groups):,} OOD scaffolds do not allow {sum(sizes):,} molecules in three parts that share "
            "none. Try: slightly smaller train, valid and test."
        )
    return deal(ordered, sizes), (f"the OOD parts share values of {spec.column!r}: there are too few to separate them",)


def deal_groups(groups: Iterable[Positions], sizes: Sequence[int]) -> Parts | None:
    """Whole groups, so that no two parts share one. None: the groups do not allow these sizes.

    A group goes to the first part that has room for all of it. Groups too large for any part come last and are truncated.
    """
    room = list(sizes)
    dealt: list[list[Positions]] = [[] for _ in sizes]
    large: list[Positions] = []
    for group in groups:
        part = next((part for part, left in enumerate(room) if len(group) <= left), None)
        if part is None:
            large.append(group)
        else:
            dealt[part].append(group)
            room[part] -= len(group)
    return _deal_large(large, room, dealt)


def _deal_large(groups: Sequence[Positions], room: list[int], dealt: list[list[Positions]]) -> Parts | None:
    """The largest group first, each to the part with the most room, truncated to it."""
    for group in sorted(groups, key=len, reverse=True):
        part = int(np.argmax(room))
        dealt[part].append(group[: room[part]])
        room[part] -= len(dealt[part][-1])
    if any(room):
        return None
    train, valid, test = (np.concatenate(part) for part in dealt)
    return Parts(train=train, valid=valid, test=test)


# ---- Leaks, searched for in the finished lists and not in how they were made -----------------------------------------------
#
#     always     no molecule (canonical SMILES, without stereochemistry) in two of the six parts
#     scaffold   no scaffold on both sides, and none in two parts of the OOD side: a head could memorise it
#     size       no number of heavy atoms on both sides
#
# A leak in a split made here is an error; a published split is used as it is, with a remark. Salts and charge states of
# one molecule count as different molecules, since their SMILES and fingerprints differ. How many are in two parts is a
# remark: 65 on the scaffold split of Tox21, found in 0.3 s, since only molecules with a charge or counter-ion are re-read.

_CHECKED = {
    "scaffold": ", no scaffold on both sides or in two OOD parts",
    "size": ", no heavy-atom count on both sides",
}
_CHARGED_OR_MIXED = re.compile(r"\.|\[[^]]*[+-]")


def check_leaks(split: Split, facts: Facts) -> tuple[str, ...]:
    """The remarks on what was checked; a leak is an error that names an example."""
    if sentences := leaks(split, facts):
        raise BadData(f"this {split.kind} split leaks: {sentences[0]}. Try: another split_seed.")
    return (f"checked: no molecule in two parts{_CHECKED.get(split.kind, '')}", *salts(split, facts))


def leaks(split: Split, facts: Facts) -> tuple[str, ...]:
    """A sentence for each kind of thing that two parts share and must not: the worst pair, with an example."""
    names = list(split.parts())
    ids, ood = names[:3], names[3:]
    sentences = [_shared(split, facts.canonical, "molecule", combinations(names, 2))]
    if split.kind == "scaffold":
        pairs = [*product(ids, ood), *combinations(ood, 2)]
        sentences.append(_shared(split, facts.scaffold, "scaffold", pairs))
    if split.kind == "size":
        sentences.append(_shared(split, facts.heavy_atoms, "heavy-atom count", product(ids, ood)))
    return tuple(sentence for sentence in sentences if sentence)


def _shared(split: Split, values: npt.NDArray[Any], noun: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Empty where nothing is shared. Molecules without a ring share no scaffold: they have none."""
    sets = {name: set(values[positions].tolist()) - {""} for name, positions in split.parts().items()}
    shared = [(sets[one] & sets[other], one, other) for one, other in pairs]
    both, one, other = max(shared, key=lambda entry: len(entry[0]))
    if not both:
        return ""
    verb = "is" if len(both) == 1 else "are"
    more = sum(bool(values) for values, _, _ in shared) - 1
    also = f"; {show_count(more, 'other pair')} of parts share{'s' * (more == 1)} some" if more else ""
    return f"{show_count(len(both), noun)} {verb} in {one} and in {other}, such as {min(both)!r}{also}"


def salts(split: Split, facts: Facts) -> tuple[str, ...]:
    """A sentence where a molecule is in two parts as another salt or charge state: how many are, and an example."""
    parts = {name: set(facts.canonical[positions].tolist()) for name, positions in split.parts().items()}
    charged = {smiles for molecules in parts.values() for smiles in molecules if _CHARGED_OR_MIXED.search(smiles)}
    parents = _parents(charged) if charged else {}
    forms: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, molecules in parts.items():
        for smiles in molecules:
            forms[parents.get(smiles, smiles)].append((smiles, name))
    apart = {
        parent: places
        for parent, places in forms.items()
        if all(len(set(each)) > 1 for each in zip(*places, strict=True))
    }
    if not apart:
        return ()
    pairs = combinations(sorted(apart[min(apart)]), 2)
    (one, here), (other, there) = next((a, b) for a, b in pairs if a[0] != b[0] and a[1] != b[1])
    count = f"{show_count(len(apart), 'molecule')} {'is' if len(apart) == 1 else 'are'}"
    return (
        f"{count} in two parts as another salt or charge state, such as {one!r} in {here} and {other!r} in {there}",
    )


def _parents(molecules: Iterable[str]) -> dict[str, str]:
    """The largest fragment of each, uncharged."""
    from rdkit import Chem, rdBase
    from rdkit.Chem.MolStandardize import rdMolStandardize

    largest, neutral = rdMolStandardize.LargestFragmentChooser(), rdMolStandardize.Uncharger()
    with rdBase.BlockLogs():
        read = {smiles: Chem.MolFromSmiles(smiles) for smiles in molecules}
        return {
            smiles: Chem.MolToSmiles(neutral.uncharge(largest.choose(molecule)), isomericSmiles=False)
            for smiles, molecule in read.items()
            if molecule is not None
        }
