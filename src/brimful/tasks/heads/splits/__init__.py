"""In-distribution (ID) and out-of-distribution (OOD) molecules, each for training, validation and testing.

    options   which split, how many molecules, which seed
    sides     which molecules are ID and which OOD, one function for each kind of split
    sizes     how many of each side go where
    deal      who goes where, in an order that hangs on the molecule and the seed alone
    leakage   what must not be on both sides, looked for afterwards in what was dealt

A split does not know the encoders: every method and every encoder meets the same molecules.
"""

from brimful.tasks.heads.splits.leakage import check_leakage, leaks
from brimful.tasks.heads.splits.make import make_split
from brimful.tasks.heads.splits.options import KINDS, SplitOptions
from brimful.tasks.heads.splits.sizes import trimmed
from brimful.tasks.heads.splits.split import Part, Split

__all__ = ["KINDS", "Part", "Split", "SplitOptions", "check_leakage", "leaks", "make_split", "trimmed"]
