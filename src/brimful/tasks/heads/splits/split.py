"""A split: six lists of places in the molecules, and sentences that say how they came about."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
