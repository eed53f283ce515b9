"""Splits as published: a DrugOOD JSON file or a GOOD folder, used as they are.

Both have five parts: ID training, validation and test, OOD validation and test. Neither has OOD molecules to train on, so
part of the OOD validation molecules become them, by domain and as near to three in four as that goes. The test molecules are
the published ones. What the leak check finds is told and not mended.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from brimful.errors import BadData
from brimful.tasks.heads.molecules.drugood import read_drugood
from brimful.tasks.heads.molecules.facts import Facts, Say, facts_of
from brimful.tasks.heads.molecules.five_parts import FIVE, FiveParts
from brimful.tasks.heads.molecules.good import read_good
from brimful.tasks.heads.molecules.molecules import Molecules, molecules_of
from brimful.tasks.heads.splits.deal import grouped, in_order
from brimful.tasks.heads.splits.leakage import leaks, salts
from brimful.tasks.heads.splits.split import Part, Places, Split

_FOR_TRAINING = 0.75
"""Of the OOD validation molecules: about 2000 to 600."""


def is_published(path: str | Path) -> bool:
    """Whether this is for `read_published` and not for `read_molecules`."""
    return Path(path).is_dir() or Path(path).suffix in (".json", ".pt")


def read_published(
    path: str | Path, *, cache: Path | None = None, say: Say = lambda phrase: None
) -> tuple[Molecules, Split]:
    """The molecules, with the columns `part` and `domain` besides the published ones, and their split."""
    path = Path(path)
    if not path.exists():
        raise BadData(f"{path} does not exist; name a DrugOOD JSON file or a GOOD folder")
    given = read_drugood(path) if path.suffix == ".json" else read_good(path)
    columns = {**given.columns, "part": given.part, "domain": given.domain}
    molecules = molecules_of(given.source, given.smiles, columns=columns, cache=cache, say=say)
    return molecules, _split(given, molecules, facts_of(molecules, cache=cache, say=say))


def _split(given: FiveParts, molecules: Molecules, facts: Facts) -> Split:
    places = {name: np.flatnonzero(molecules.columns["part"] == name) for name in FIVE}
    empty = [name for name, found in places.items() if not len(found)]
    if empty:
        raise BadData(f"{given.source} has no molecule that can be read in {', '.join(empty)}; get or write it again")
    train, valid, how = _part_valid(places["ood_val"], molecules)
    split = Split(
        kind=given.kind,
        id=Part(train=places["train"], valid=places["iid_val"], test=places["iid_test"]),
        ood=Part(train=train, valid=valid, test=places["ood_test"]),
    )
    found = leaks(split, facts)
    warned = [f"as published: {sentence}" for sentence in found] or ["checked: no molecule in two parts"]
    return replace(split, remarks=(*given.remarks, how, *warned, *salts(split, facts)))


def _part_valid(places: Places, molecules: Molecules) -> tuple[Places, Places, str]:
    """OOD molecules to train on and to validate with, and how they were parted."""
    if len(places) < 2:
        raise BadData(f"{molecules.source} has {len(places)} OOD validation molecule, and training needs some of them")
    groups = grouped(places, molecules.columns["domain"], 0, "published")
    goal = _FOR_TRAINING * len(places)
    if len(groups) == 1:
        ordered, cut = in_order(places, molecules.smiles, 0, "published"), int(goal)
        train, valid, by = ordered[:cut], ordered[cut:], "at random: all are of one domain"
    else:
        cuts = np.cumsum([len(group) for group in groups[:-1]])
        count = int(np.abs(cuts - goal).argmin()) + 1
        train, valid = np.concatenate(groups[:count]), np.concatenate(groups[count:])
        by = f"by domain: {count:,} and {len(groups) - count:,} of them"
    told = f"{len(train):,} of the {len(places):,} published OOD validation molecules are the OOD training part, {by}"
    return train, valid, told
