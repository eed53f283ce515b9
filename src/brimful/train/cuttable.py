"""May these rows be cut? Looked at with a few real ones at the first step, so that no run finds out hours later.

A plan's fit has asked already. Rows are collated whole and in halves, so a model that looks at padding is found as well as
a loss that looks across rows; where the collate draws random numbers, no two batches are alike and one is sliced.
"""

import torch

from brimful.errors import Inexact
from brimful.memory.bare import Rig, tensors_of
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import RandomState
from brimful.plan.exact import Exactness, NothingCounted, check_exactness
from brimful.train.events import Events
from brimful.train.share import Share

SOME_ROWS = 4
"""So many rows are compared with their halves."""
CHECKS = 3
"""So many steps try, where the comparison itself runs out of memory."""


class Cuttable:
    """Knows whether a step may be cut, and says so once."""

    def __init__(self, rig: Rig, events: Events, *, known: bool, allow_inexact: bool) -> None:
        self._rig, self._events, self._allow_inexact = rig, events, allow_inexact
        self._left = 0 if known else CHECKS
        self._found: Exactness | None = None
        self._told = False

    def look(self, step: int, share: Share) -> None:
        """Compare a few rows of this step, unless that has been done."""
        some = max(share.rows.groups or [share.indices], key=len)[:SOME_ROWS]
        if self._left == 0 or len(some) < 2:
            return
        random_state = RandomState(self._rig.device)
        try:
            found = attempt(lambda: _compare(self._rig, share, some), self._rig.device)
        except NothingCounted:
            return  # the next step's rows may have something
        finally:
            random_state.restore()
        if isinstance(found, OutOfMemory):
            self._left -= 1
            self._events.add("note", step, "whether a step may be cut could not be checked: memory ran out")
            return
        self._left, self._found = 0, found
        if not found.exact:
            self._events.add("note", step, f"{found.sentence}; as long as a step runs whole, that does not matter")

    def check(self, step: int, parts: int) -> None:
        """A step is about to be cut, or shared by processes. Refuses a loss that looks across rows."""
        if parts < 2 or self._told or self._found is None or self._found.exact:
            return
        if self._found.looks_across_rows and not self._allow_inexact:
            raise Inexact(
                f"{self._found.sentence}; step {step} would be cut into {parts}: give it the memory to run whole, or say "
                "allow_inexact=True"
            )
        self._told = True
        self._events.add("note", step, f"the step is cut although {self._found.sentence}", inexact=True)


def _compare(rig: Rig, share: Share, some: list[int]) -> Exactness:
    whole, half = share.rows.batch(some), len(some) // 2
    if not share.rows.collates:
        return check_exactness(rig, whole)
    again = tensors_of(share.rows.batch(some))
    if not all(torch.equal(one, other) for one, other in zip(tensors_of(whole), again, strict=True)):
        return check_exactness(rig, whole)
    return check_exactness(rig, whole, [share.rows.batch(some[:half]), share.rows.batch(some[half:])])
