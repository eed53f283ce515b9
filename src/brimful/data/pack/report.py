"""What a pack did, as numbers: rows and tokens that add up, lengths, time, memory, disk."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from brimful.data.store import Store

PERCENTILES = (50, 90, 99)
_AT_ONCE = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of all rows."""

    column: str
    """Of the files."""
    characters: int
    """Before cutting."""
    tokens: int
    """In the store, the eos of each row counted."""
    max_tokens: int
    keeps_end: bool
    """Whether a cut takes its beginning instead of its end."""
    truncated: int
    """Rows cut to `max_tokens`."""
    lost_tokens: int
    """Cut off."""
    mean: float
    percentiles: dict[str, int]
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """The result of `pack`. `rows_in` is `rows_out` plus everything in `dropped`, or there is no report."""

    store: str
    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    sides: dict[str, Side]
    layout_reason: str
    requested_max_tokens: tuple[int, ...]
    first_broken: str | None
    """The first row that could not be read."""
    sources: int
    """Files read."""
    tokenizer: str
    vocab_size: int
    dtype: str
    seconds: float
    rows_per_s: float
    """Rows read a second, those of an earlier, interrupted pack left out."""
    peak_bytes: int
    """Measured: the anonymous and shared memory of the process at its highest; 0 where the kernel does not tell."""
    start_bytes: int
    """The same before the first row was read: Python, libraries, tokenizer."""
    host_limit_bytes: int
    size_bytes: int
    """On disk."""
    resumed_rows: int
    """Rows in the store that an interrupted pack had written."""
    started_over: str
    """Why what an interrupted pack had left could not be used; empty where there was nothing."""
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        sides = content.pop("sides")
        for name in ("tokens", "truncated", "lost_tokens", "characters", "max_tokens"):
            content[name] = {side: about[name] for side, about in sides.items()}
        content["columns"] = {side: about["column"] for side, about in sides.items()}
        content["lengths"] = {
            side: {"mean": about["mean"], **about["percentiles"], "longest": about["longest"]}
            for side, about in sides.items()
        }
        return content


def length_percentiles(store: Store) -> list[dict[str, int]]:
    """By side, the lengths that 50, 90 and 99 % of the rows do not exceed: counted, a hundred thousand rows at a time."""
    counts = [np.zeros(longest + 1, dtype=np.int64) for longest in store.longest]
    for first in range(0, len(store), _AT_ONCE):
        shapes = store.shapes(np.arange(first, min(len(store), first + _AT_ONCE)))
        for number, count in enumerate(counts):
            count += np.bincount(shapes[:, number], minlength=len(count))
    return [{f"p{share}": _percentile(count, share) for share in PERCENTILES} for count in counts]


def _percentile(count: npt.NDArray[np.int64], share: int) -> int:
    """The smallest length that is not exceeded by `share` percent of the rows."""
    below = np.cumsum(count)
    return int(np.searchsorted(below, share / 100 * below[-1]))
