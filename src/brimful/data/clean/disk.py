"""Room on the disk: predicted from what was read so far, and one sentence when it does not suffice.

The first chunk tells how much text a byte of input becomes; from then on every segment corrects the prediction. A full
disk shows in three ways: an OSError, DuckDB that cannot put its memory aside, and Arrow with an errno in its text.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from brimful.errors import BadData
from brimful.machine.space import Space
from brimful.units import show_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DUCKDB_SAYS = ("No space left", "max_temp_directory_size", "File too large", "quota exceeded")
_SEGMENT_SHARE, _OUTPUT_SHARE = 0.8, 0.7
"""Of the text, what segments and outputs take at most; 0.65 and 0.6 of the generated rows."""
_ROW_BYTES = 64
"""Digest, numbers, and what DuckDB puts aside."""


def still_needed(*, rows: int, text_bytes: int, sketch_bytes: int, read_share: float) -> float:
    """What is yet to be written, after so many rows and bytes of text were prepared. A prediction."""
    read_share = min(1.0, read_share) or 1.0
    segments = _SEGMENT_SHARE * text_bytes + rows * (_ROW_BYTES + sketch_bytes)
    return segments * (1 / read_share - 1) + _OUTPUT_SHARE * text_bytes / read_share


def check_room(folder: Path, needed_bytes: float) -> None:
    """Refuse early rather than fill the disk for an hour and fail then."""
    space = Space.around(folder)
    if space is not None and needed_bytes > space.free_bytes:
        raise BadData(_sentence(folder, needed_bytes, space.free_bytes))


@contextmanager
def full_disk_told(folder: Path, needed_bytes: Callable[[], float]) -> Iterator[None]:
    """Turn a full disk, however it shows, into one sentence. What was done so far stays."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        space = Space.around(folder)
        raise BadData(_sentence(folder, needed_bytes(), space.free_bytes if space else None)) from error


def is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return type(error).__module__.lstrip("_").startswith("duckdb") and any(said in str(error) for said in _DUCKDB_SAYS)


def _sentence(folder: Path, needed_bytes: float, free_bytes: int | None) -> str:
    return (
        f"the disk of {folder} is too full: cleaning needs about {show_bytes(needed_bytes)} more there (predicted) "
        f"and {show_bytes(free_bytes)} is free; make room and run the same again to go on, or give another --output"
    )
