"""What a split forbids on both sides, looked for in the finished lists and not in how they were made.

    always     no molecule (canonical SMILES, stereochemistry aside) in two of the six parts
    scaffold   no scaffold on both sides, and none in two parts of the OOD side: a head would only have to remember it
    size       no number of heavy atoms on both sides

A split made here that breaks one is an error; a published one is used as published, and what was found is told.
"""

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


def check_leakage(split: Split, facts: Facts) -> tuple[str, ...]:
    """The sentence of what was checked; what is where it must not be is an error that names an example."""
    found = leaks(split, facts)
    if found:
        raise BadData(f"this {split.kind} split leaks: {found[0]}")
    return (f"checked: no molecule in two parts{_CHECKED.get(split.kind, '')}",)


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
