"""What a split forbids on both sides, looked for in the finished lists and not in how they were made.

    always     no molecule (canonical SMILES, stereochemistry aside) in two of the six parts
    scaffold   no scaffold on both sides, and none in two parts of the OOD side: a head would only have to remember it
    size       no number of heavy atoms on both sides

A split made here that breaks one is an error; a published one is used as published, and what was found is told.

Salts and charge states of one molecule are different molecules here: their SMILES and fingerprints differ. How many lie in
two parts is told and no error: 65 on the scaffold split of Tox21, found in 0.3 s, since only what has a charge or a
counter-ion is read again.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import numpy.typing as npt

from brimful.errors import BadData
from brimful.tasks.heads.molecules.facts import Facts
from brimful.tasks.heads.splits.split import Split
from brimful.units import show_count

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
