"""Which rows came before: exactly, or nearly.

Exact: rows with the same digest; the first stays. Near: rows that share a band of their sketch lie in one bucket, and
each is compared, by its sketch, with the first row of its bucket; a similarity of `near` or more drops it. Only the first
row of each bucket is ever compared against, so a bucket of a million rows costs a million comparisons. That first row may
itself have been dropped for a still earlier one, as in any clustering by chains. Replies of one conversation (one line)
are not compared, since each holds the ones before it. Every comparison depends on the rows
alone: neither threads nor chunks nor an interruption change what is dropped.

DuckDB groups, one band after the other: 1.0 s a band for 10 million rows within 300 MiB, where NumPy takes 6.5 s and all
of the column in memory. The sketches lie in a memory-mapped file, which counts as nobody's memory.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from brimful.data.clean.segments import replace_text
from brimful.data.clean.similarity import HASHES, Bytes, Slots, alike
from brimful.errors import MissingExtra

EXACT, NEAR = 1, 2
"""Why a row was dropped; 0: it stays."""
_PAIRS = 65_536
"""Compared at a time: 16 MiB of sketches."""
_FIRST = 3
"""Pairs that are remembered to be shown."""


@dataclass(kw_only=True)
class Found:
    """What was dropped so far, and by which steps."""

    dropped: Bytes
    """A byte a row."""
    steps: int = 0
    """0: nothing yet; 1: exact duplicates; 1 + n: and those of n bands."""
    firsts: dict[int, list[tuple[int, int, float]]] = field(default_factory=lambda: {EXACT: [], NEAR: []})
    """By kind, the first few: row, the earlier row, their similarity."""

    def drop(self, kind: int, slots: Slots, heads: Slots, similarity: npt.NDArray[np.float64]) -> None:
        self.dropped[slots] = kind
        order = np.argsort(slots)[:_FIRST]
        new = [(int(slots[place]), int(heads[place]), float(similarity[place])) for place in order]
        self.firsts[kind] = sorted([*self.firsts[kind], *new])[:_FIRST]

    def save(self, folder: Path) -> None:
        """The bytes first, then the line that says they count."""
        name = f"dropped-{self.steps:03}"
        with (folder / name).open("wb") as file:
            file.write(self.dropped.data)
        replace_text(folder / "found.json", json.dumps({"file": name, "steps": self.steps, "firsts": self.firsts}))
        for older in folder.glob("dropped-*"):
            if older.name != name:
                older.unlink()

    @classmethod
    def read(cls, folder: Path, rows: int) -> "Found":
        """Where an interrupted run came to."""
        if not (folder / "found.json").exists():
            return cls(dropped=np.zeros(rows, dtype=np.uint8))
        content = json.loads((folder / "found.json").read_text())
        dropped = np.fromfile(folder / content["file"], dtype=np.uint8)
        firsts = {int(kind): [tuple(pair) for pair in pairs] for kind, pairs in content["firsts"].items()}
        return cls(dropped=dropped, steps=content["steps"], firsts=firsts)


class Dedup:
    """Over marks (parquet: slot, digest_0, digest_1, band_0, …) and signatures (128 bytes a row) of these rows."""

    def __init__(
        self, folder: Path, marks: Sequence[Path], signatures: Path, *, rows: int, memory_bytes: int, threads: int
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._rows, self._signatures = folder, rows, signatures
        self._marks = "[" + ", ".join(_quoted(path) for path in marks) + "]"
        self._connection = connect(folder / "spill", memory_bytes=memory_bytes, threads=threads)

    def run(self, *, near: float | None, bands: int, progress: Callable[[str], object]) -> Found:
        """All steps that are not done yet."""
        found = Found.read(self._folder, self._rows)
        for step in range(found.steps, 1 + bands):
            if step == 0:
                progress("looking for duplicates")
                self._exact(found)
            else:
                progress(f"looking for near duplicates, band {step} of {bands}")
                assert near is not None
                self._near(found, f"band_{step - 1}", near)
            found.steps = step + 1
            found.save(self._folder)
        return found

    def where(self, slots: Sequence[int]) -> dict[int, tuple[int, int]]:
        """The place of the file among the files, and the line, of a few rows."""
        numbers = ", ".join(map(str, slots)) or "NULL"
        rows = self._connection.execute(
            f"SELECT slot, file, line FROM read_parquet({self._marks}) WHERE slot IN ({numbers})"
        )
        return {slot: (file, line) for slot, file, line in rows.fetchall()}

    def close(self) -> None:
        self._connection.close()

    def _exact(self, found: Found) -> None:
        for slots, heads in self._pairs("digest_0, digest_1"):
            found.drop(EXACT, slots, heads, np.ones(len(slots)))

    def _near(self, found: Found, band: str, near: float) -> None:
        signatures: Bytes = np.memmap(self._signatures, dtype=np.uint8, mode="r").reshape(-1, HASHES)
        for slots, heads in self._pairs(band, "NOT (file = head_file AND line = head_line)"):
            open_ = found.dropped[slots] == 0
            slots, heads = slots[open_], heads[open_]
            similarity = alike(signatures[slots], signatures[heads])
            hit = similarity >= near
            found.drop(NEAR, slots[hit], heads[hit], similarity[hit])

    def _pairs(self, columns: str, which: str = "true") -> Iterator[tuple[Slots, Slots]]:
        """Each row that is not the first with its values in these columns, and that first row."""
        pairs, marks = self._folder / "pairs.parquet", f"read_parquet({self._marks})"
        run(
            self._connection,
            f"COPY (WITH heads AS (SELECT {columns}, min(slot) AS head, arg_min(file, slot) AS head_file, "
            f"arg_min(line, slot) AS head_line FROM {marks} GROUP BY {columns} HAVING count(*) > 1) "
            f"SELECT slot, head FROM {marks} JOIN heads USING ({columns}) WHERE slot <> head AND {which}) "
            f"TO {_quoted(pairs)} (FORMAT parquet, ROW_GROUP_SIZE {_PAIRS})",
        )
        with pq.ParquetFile(pairs) as file:
            for batch in file.iter_batches(_PAIRS, use_threads=False):
                yield batch.column(0).to_numpy(), batch.column(1).to_numpy()
        pairs.unlink()


def need_duckdb() -> Any:
    """The module, or the command that installs it."""
    try:
        import duckdb
    except ImportError:
        raise MissingExtra("duckdb", "data") from None
    return duckdb


def connect(spill: Path, *, memory_bytes: int, threads: int) -> Any:
    """DuckDB in memory that keeps to a limit and puts the rest into a folder."""
    settings = {
        "memory_limit": f"{memory_bytes // 1024}KiB",
        "threads": threads,
        "temp_directory": str(spill),
        "preserve_insertion_order": False,
    }
    return need_duckdb().connect(config=settings)


def run(connection: Any, query: str) -> None:
    """Ctrl-C reaches DuckDB first, which makes an error of its own of it."""
    try:
        connection.execute(query)
    except Exception as error:
        if "interrupted" in str(error).lower():
            raise KeyboardInterrupt from None
        raise


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
