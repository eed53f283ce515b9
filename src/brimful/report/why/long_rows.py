"""Rows of a run by length: which one was the long one, in which file and line, and how many a shorter limit would truncate.

The token store of a run knows the length of every row (ten million in 0.3 s, a million at a time) and the raw files they came from.
Only a run with such a store can name its rows; of others nothing is claimed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.report.run_figures import RunFigures, part

if TYPE_CHECKING:
    from brimful.data.store import Store

FEW = 0.01
"""A length that more than this share of the rows reaches is not that of one long row."""
CHUNK_ROWS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRow:
    """A row that is longer than almost all others."""

    row: int
    """Its index in the token store, from 0."""
    lengths: tuple[int, ...]
    alike: int
    """Rows at least as long, this one included."""
    file: str
    """Where it is: a raw file if its line is known, else the token store."""
    line: int | None
    """Of the raw file, from 1; None if rows were dropped, a line gave several, or they come from several files."""


def find_long_row(run: RunFigures, shape: Sequence[int]) -> LongRow | None:
    """The row that made a padded micro-batch this long; None if that is unknown, or if it is not about a few rows."""
    store = _store(run)
    if store is None or len(store.length_fields) != len(shape) or not len(store):
        return None
    means = store.mean_lengths
    axis = max(range(len(shape)), key=lambda axis: shape[axis] / max(1.0, means[axis]))
    first, alike = -1, 0
    found: tuple[int, ...] = ()
    for start, sizes in _sizes(store):
        long_enough = (sizes[:, axis] >= shape[axis]).nonzero()[0]
        if len(long_enough) and first < 0:
            first, found = start + int(long_enough[0]), tuple(map(int, sizes[long_enough[0]]))
        alike += len(long_enough)
    if first < 0 or alike > max(1, FEW * len(store)):
        return None
    meta, sources = store.meta, store.meta.sources
    one_each = not any(meta.dropped.values()) and meta.rows == meta.rows_in  # else a line gave no row, or several
    in_lines = len(sources) == 1 and Path(sources[0]).suffix == ".jsonl" and one_each
    return LongRow(
        row=first, lengths=found, alike=alike, file=sources[0] if in_lines else str(store.path), line=first + 1 if in_lines else None
    )  # fmt: skip


def longest_lengths(run: RunFigures) -> tuple[int, ...] | None:
    """The longest of each field in the run's token store; None without one."""
    store = _store(run)
    return None if store is None or not len(store) else store.longest


def share_longer(run: RunFigures, limits: Sequence[int]) -> float | None:
    """The share of the rows that are longer than these limits in some field; None if lengths are unknown."""
    store = _store(run)
    if store is None or len(store.length_fields) != len(limits) or not len(store):
        return None
    return sum(int((sizes > list(limits)).any(axis=1).sum()) for _, sizes in _sizes(store)) / len(store)


def has_store(run: RunFigures) -> bool:
    """Whether the run was trained on a token store that is still there."""
    return _store_path(run) is not None


def _store_path(run: RunFigures) -> Path | None:
    path = part(run.request, "prepared").get("data")
    if not isinstance(path, str) or "\0" in path or not (run.record.root / path / "store.json").is_file():
        return None
    return run.record.root / path


def _store(run: RunFigures) -> "Store | None":
    path = _store_path(run)
    if path is None:
        return None
    try:
        from brimful.data.store import Store  # pyarrow takes 60 ms

        return Store.open(path, verify=False)
    except Exception:  # damaged, or of another version: then its rows are not named
        return None


def _sizes(store: "Store") -> Iterator[tuple[int, Any]]:
    import numpy as np

    for start in range(0, len(store), CHUNK_ROWS):
        yield start, store.shapes(np.arange(start, min(start + CHUNK_ROWS, len(store))))
