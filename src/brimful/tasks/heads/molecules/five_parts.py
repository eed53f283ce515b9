"""What a published split gives, whatever its format: the rows of five parts, one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass

from brimful.tasks.heads.molecules.table import Column

FIVE = ("train", "iid_val", "iid_test", "ood_val", "ood_test")
"""The parts, as DrugOOD calls them."""


@dataclass(frozen=True, kw_only=True)
class FiveParts:
    """The rows of all five parts, one after the other."""

    source: str
    kind: str
    """What parts the sides: `scaffold`, `size`, `assay`, `protein` …"""
    smiles: Column
    part: Column
    """Of each row, one of `FIVE`."""
    domain: Column
    """Of each row, as text."""
    columns: Mapping[str, Column]
    remarks: tuple[str, ...] = ()
