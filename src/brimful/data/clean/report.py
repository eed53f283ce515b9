"""What a clean did, as a value: rows in, rows out, and every dropped row under one reason."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.data.check.report import Place
from brimful.data.clean.prepare import REASONS
from brimful.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanReport:
    """The numbers add up, or it cannot be made."""

    output: str
    columns: dict[str, str]
    reason: str
    """Why these columns."""
    rows_in: int
    dropped: dict[str, int]
    """By reason, all of them."""
    files: dict[str, int]
    """By split, the rows of its file, read back from the file."""
    places: dict[str, tuple[Place, ...]]
    """By reason, the first few rows that were dropped."""
    resumed_rows: int
    """Rows that an interrupted clean had read already."""
    notes: tuple[str, ...]
    seconds: float
    """Of this run."""
    stage_s: dict[str, float]
    """Of it: reading and preparing, finding duplicates, ordering and writing."""
    peak_bytes: int
    """Measured ten times a second: memory beyond what was taken at the start; mapped files left out."""

    def __post_init__(self) -> None:
        if set(self.dropped) != set(REASONS) or self.rows_in != self.rows_out + sum(self.dropped.values()):
            raise InternalError(
                f"clean lost count: {self.rows_in:,} rows in, {self.rows_out:,} out, dropped {self.dropped}; nothing was written"
            )

    @property
    def rows_out(self) -> int:
        return sum(self.files.values())

    @property
    def rows_per_s(self) -> float | None:
        """Unknown for a run that went on with another's work."""
        return None if self.resumed_rows or self.seconds <= 0 else self.rows_in / self.seconds

    def to_json(self) -> dict[str, Any]:
        """The names that scripts rely on."""
        return {
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": self.dropped,
            "columns": self.columns,
            "reason": self.reason,
            "files": {
                split: {"path": str(Path(self.output) / f"{split}.parquet"), "rows": rows}
                for split, rows in self.files.items()
            },
            "places": {reason: [place.to_json() for place in places] for reason, places in self.places.items()},
            "resumed_rows": self.resumed_rows,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "stage_s": {stage: round(seconds, 3) for stage, seconds in self.stage_s.items()},
            "rows_per_s": None if self.rows_per_s is None else round(self.rows_per_s, 1),
            "peak_bytes": self.peak_bytes,
            "output": self.output,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "CleanReport":
        derived = ("rows_out", "rows_per_s")
        values = {name: value for name, value in content.items() if name not in derived}
        values["files"] = {split: file["rows"] for split, file in content["files"].items()}
        values["places"] = {
            reason: tuple(Place(**one) for one in places) for reason, places in content["places"].items()
        }
        return cls(**values | {"notes": tuple(content["notes"])})
