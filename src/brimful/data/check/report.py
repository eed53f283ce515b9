"""What `check` found, as a value: counts that add up, the first places of each problem, lengths."""

from dataclasses import dataclass
from typing import Any

from brimful.data.check.histogram import Lengths
from brimful.data.read.columns import Layout

UNUSABLE = ("broken", "empty", "over_long")
REASONS = (*UNUSABLE, "duplicate")
"""Why a row is dropped; the first that applies is the one that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a problem was met."""

    file: str
    line: int
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What a pass over the files found."""

    files: tuple[str, ...]
    layout: Layout
    rows_in: int
    dropped: dict[str, int]
    """By reason, all four of them."""
    places: dict[str, tuple[Place, ...]]
    """By reason, the first few."""
    examples: tuple[dict[str, str], ...]
    characters: dict[str, Lengths]
    """By side, over all rows that could be read."""
    tokens: dict[str, Lengths]
    """Likewise with the eos that is appended; empty without a tokenizer."""
    conversations: int | None
    """How many the rows come from; None where rows are not replies in conversations."""
    max_bad: float
    seconds: float

    @property
    def rows_out(self) -> int:
        """Rows that can be used."""
        return self.rows_in - sum(self.dropped.values())

    @property
    def bad_share(self) -> float:
        """Rows that cannot be used, of all; a duplicate could be."""
        return sum(self.dropped[reason] for reason in UNUSABLE) / max(1, self.rows_in)

    def complaint(self) -> str | None:
        """One sentence where more rows cannot be used than `--max-bad` allows."""
        if self.bad_share <= self.max_bad:
            return None
        reasons = [reason for reason in UNUSABLE if self.dropped[reason]]
        counts = ", ".join(f"{self.dropped[reason]:,} {reason.replace('_', '-')}" for reason in reasons)
        first = self.places[reasons[0]][0]
        return (
            f"{round(self.bad_share * self.rows_in):,} of {self.rows_in:,} rows cannot be used ({counts}), more than --max-bad {self.max_bad:g}; "
            f"the first is {first.file}, line {first.line}: {first.why}"
        )

    def to_json(self) -> dict[str, Any]:
        """The names that scripts rely on."""
        return {
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": self.dropped,
            "columns": self.layout.columns,
            "kind": self.layout.kind,
            "reason": self.layout.reason,
            "files": list(self.files),
            "conversations": self.conversations,
            "bad_share": self.bad_share,
            "max_bad": self.max_bad,
            "examples": list(self.examples),
            "places": {reason: [place.to_json() for place in places] for reason, places in self.places.items()},
            "characters": {side: lengths.to_json() for side, lengths in self.characters.items()},
            "tokens": {side: lengths.to_json() for side, lengths in self.tokens.items()},
            "seconds": round(self.seconds, 3),
        }
