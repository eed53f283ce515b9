"""Who goes where: molecules are ordered by a hash of themselves and the seed, and dealt from the top.

A hash instead of a random generator: the same molecules get the same order whatever the file's order, the library's
version or the machine, and a molecule added to the file moves no other.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from brimful.tasks.heads.splits.split import Part, Places


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
