"""How many broken rows a command puts up with: none, unless `--max-bad` says which share."""

from dataclasses import dataclass, field

from brimful.data.source import Broken, Chunk
from brimful.errors import BadData, BadOption


@dataclass
class Patience:
    """Counts rows that could not be read; loses itself at the first one where none is allowed."""

    max_bad: float = 0.0
    rows_in: int = 0
    broken: int = 0
    first: Broken | None = field(default=None)

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad <= 1:
            raise BadOption(f"--max-bad {self.max_bad}: give a share from 0 to 1, such as 0.01")

    def add(self, chunk: Chunk) -> None:
        """Rows of one more chunk."""
        self.rows_in += chunk.rows_in
        self.broken += len(chunk.broken)
        if chunk.broken and self.first is None:
            self.first = chunk.broken[0]
        if self.first is not None and self.max_bad == 0:
            raise BadData(f"{self.first}; repair that row, or have such rows dropped and counted with --max-bad 0.01")

    def close(self) -> None:
        """All rows were read: is the share of broken ones within what was allowed?"""
        if self.broken > self.max_bad * self.rows_in:
            raise BadData(
                f"{self.broken:,} of {self.rows_in:,} rows are broken, more than --max-bad {self.max_bad:g}; the first is {self.first}"
            )
