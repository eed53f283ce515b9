"""What RDKit says of each molecule, aligned with the molecules, and kept on disk.

RDKit takes 0.3 ms a molecule: 12 s of one core for the 41,127 rows of HIV, which come back from the cache in 0.3 s, the
file included. The cache is keyed by every SMILES and RDKit's version, so that another file or another RDKit never meets
facts that are not its own.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, in_one_line
from brimful.tasks.heads.molecules.examine import Found, examine, rdkit_version

if TYPE_CHECKING:
    from brimful.tasks.heads.molecules.molecules import Molecules

_FORMAT = 1
"""Of the cached table and of what is asked of RDKit."""

Say = Callable[[str], object]
Indices = npt.NDArray[np.int64] | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of molecules, in their order."""

    canonical: npt.NDArray[np.object_]
    """Canonical SMILES without stereochemistry: equal for what counts as the same molecule."""
    scaffold: npt.NDArray[np.object_]
    """Bemis–Murcko scaffold as SMILES; empty for a molecule without a ring."""
    heavy_atoms: npt.NDArray[np.int64]
    rings: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.canonical)

    def take(self, indices: Indices) -> "Facts":
        """Of the molecules at these places."""
        at = np.asarray(indices, dtype=np.int64)
        return Facts(
            canonical=self.canonical[at],
            scaffold=self.scaffold[at],
            heavy_atoms=self.heavy_atoms[at],
            rings=self.rings[at],
        )


def facts_of(molecules: "Molecules", *, cache: Path | None = None, say: Say = lambda phrase: None) -> Facts:
    """Those that came with reading the molecules; asked of RDKit where they were made otherwise."""
    if molecules.facts is not None:
        return molecules.facts
    facts, unread = examined(list(molecules.smiles), cache=cache, say=say)
    if unread:
        place, reason = next(iter(unread.items()))
        raise BadData(f"{molecules.source}: RDKit cannot use {molecules.smiles[place]!r} ({reason}); leave it out")
    return facts


def examined(
    smiles: Sequence[str], *, cache: Path | None = None, say: Say = lambda phrase: None
) -> tuple[Facts, Mapping[int, str]]:
    """Facts of all these SMILES, and why those that cannot be used cannot, by their place; their facts mean nothing."""
    path = cache / f"facts-{_key(smiles)}.parquet" if cache else None
    columns = _read(path, len(smiles)) if path else None
    if columns is None:
        columns = _columns(examine(smiles, say))
        if path:
            _keep(path, columns, say)
    unread = {place: str(reason) for place, reason in enumerate(columns["reason"]) if reason}
    facts = Facts(
        canonical=np.array(columns["canonical"], dtype=object),
        scaffold=np.array(columns["scaffold"], dtype=object),
        heavy_atoms=np.array(columns["heavy_atoms"], dtype=np.int64),
        rings=np.array(columns["rings"], dtype=np.int64),
    )
    return facts, unread


def _columns(found: list[Found]) -> dict[str, list[Any]]:
    return {name: [getattr(one, name) for one in found] for name in Found._fields}


def _key(smiles: Sequence[str]) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {rdkit_version()} {len(smiles)}\n".encode())
    digest.update("\n".join(smiles).encode())
    return digest.hexdigest()[:24]


def _read(path: Path, rows: int) -> dict[str, list[Any]] | None:
    """The cached table; None where there is none, or what is there is damaged and has to be made again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError):
        return None
    whole = table.num_rows == rows and table.column_names == list(Found._fields)
    return {name: table[name].to_pylist() for name in table.column_names} if whole else None


def _keep(path: Path, columns: dict[str, list[Any]], say: Say) -> None:
    """Whole or not at all: another sweep may read it at the same time, or write it. A full disk is told and no error."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), draft, compression="zstd")
        draft.replace(path)
    except (pa.ArrowException, OSError) as error:
        say(f"what RDKit said is not kept for the next time: {in_one_line(error)}")
        with suppress(OSError):
            draft.unlink(missing_ok=True)
