"""The molecules of one file: those RDKit can read, in the file's order, and a list of those it cannot.

A SMILES that cannot be read is listed with RDKit's reason and left out. It is never replaced: a lone carbon atom in its
place would be trained on as if it had been measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData
from brimful.tasks.heads.molecules.facts import Facts, Indices, Say, examined
from brimful.tasks.heads.molecules.table import Column, read_table


@dataclass(frozen=True, slots=True)
class Unread:
    """A row that is left out, and why."""

    row: int
    """Counted from 0, without the header."""
    smiles: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.smiles!r} ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class Molecules:
    """Molecules that can be used."""

    source: str
    """The file, for messages."""
    smiles: npt.NDArray[np.object_]
    """As written, without blanks around it."""
    rows: npt.NDArray[np.int64]
    """The row of each in the file, counted from 0, without the header."""
    columns: Mapping[str, Column]
    """The file's other columns, aligned."""
    rows_in: int
    """Rows of the file."""
    unread: tuple[Unread, ...] = ()
    facts: Facts | None = None
    """What RDKit said while it read them; `facts_of` gives it, or asks."""

    def __len__(self) -> int:
        return len(self.smiles)

    def take(self, indices: Indices) -> "Molecules":
        """The molecules at these places. What was left out of the file stays listed."""
        at = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            smiles=self.smiles[at],
            rows=self.rows[at],
            columns={name: column[at] for name, column in self.columns.items()},
            facts=self.facts.take(at) if self.facts is not None else None,
        )


def read_molecules(
    file: str | Path,
    *,
    smiles: str = "smiles",
    columns: Sequence[str] = (),
    cache: Path | None = None,
    say: Say = lambda phrase: None,
) -> Molecules:
    """All molecules of a csv, tsv (also .gz) or parquet file, with these columns, or all where none is named."""
    table = read_table(Path(file), smiles=smiles, columns=columns)
    return molecules_of(
        str(file),
        table.smiles,
        columns=table.columns,
        rows=table.rows,
        broken=[Unread(row, "", why) for row, why in table.broken],
        cache=cache,
        say=say,
    )


def molecules_of(
    source: str,
    smiles: Iterable[Any],
    *,
    columns: Mapping[str, Column],
    rows: npt.NDArray[np.int64] | None = None,
    broken: Sequence[Unread] = (),
    cache: Path | None = None,
    say: Say = lambda phrase: None,
) -> Molecules:
    """From SMILES at hand; the rows are counted where they are not given."""
    written = np.array([str(one).strip() for one in smiles], dtype=object)
    rows = np.arange(len(written)) if rows is None else rows
    facts, reasons = examined(list(written), cache=cache, say=say)
    unread = [*broken, *(Unread(int(rows[place]), written[place], reason) for place, reason in reasons.items())]
    kept = np.array([place for place in range(len(written)) if place not in reasons], dtype=np.int64)
    if not len(kept):
        first = f", the first in {min(unread, key=lambda one: one.row)}" if unread else ""
        raise BadData(f"{source} has no molecule that RDKit can read{first}; is the column of SMILES the right one?")
    return Molecules(
        source=source,
        smiles=written[kept],
        rows=rows[kept],
        columns={name: column[kept] for name, column in columns.items()},
        rows_in=len(written) + len(broken),
        unread=tuple(sorted(unread, key=lambda one: one.row)),
        facts=facts.take(kept),
    )
