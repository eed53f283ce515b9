"""What can be asked of a pack, and how large its pieces may be within the memory asked for."""

from dataclasses import dataclass

from brimful.data.pack.encode import PIECE_BYTES
from brimful.data.store.write import FILE_ROWS
from brimful.errors import BadOption
from brimful.units import GiB, KiB, MiB, flag_bytes, show_bytes

PIECES_IN_FLIGHT = 4
"""Handed to the threads that tokenise and not yet joined."""
READING_BYTES = 96 * MiB
"""For the chunks that are read, joined and written; measured."""
BYTES_PER_TEXT_BYTE = 48
"""What encodings take: 130 bytes a token, at least three bytes of text a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How to pack."""

    columns: str | None = None
    """Which columns make up which side, where the found ones are not meant: `prompt=question,response=answer`."""
    max_tokens: tuple[int, ...] = (256,)
    """Where a side is cut, its eos counted: one for all sides, or one for each."""
    keep_end: tuple[str, ...] | None = None
    """Sides that lose their beginning where they are too long, not their end. None: the prompts of conversations do."""
    host_limit_bytes: int = GiB
    max_bad: float = 0.0
    """The share of broken rows to put up with."""
    overwrite: bool = False
    """Replace a token store that is there already."""
    file_rows: int = FILE_ROWS
    """Rows after which a new file begins."""

    def __post_init__(self) -> None:
        problems = []
        if not self.max_tokens or min(self.max_tokens) < 2:
            given = ",".join(map(str, self.max_tokens)) or "nothing"
            problems.append(f"--max-tokens {given}: give at least 2, one token and the eos, such as 256")
        if not 0 <= self.max_bad <= 1:
            problems.append(f"--max-bad {self.max_bad}: give a share from 0 to 1, such as 0.01")
        if self.host_limit_bytes <= 0:
            problems.append(f"--host-limit {self.host_limit_bytes}: give a size, such as 1GiB")
        if problems:
            raise BadOption("; ".join(problems))


def piece_size(host_limit_bytes: int, taken_bytes: int) -> int:
    """Bytes of text to tokenise at a time, so that all pieces in flight fit what the process may still take."""
    least = 16 * KiB
    room = host_limit_bytes - taken_bytes - READING_BYTES
    size = room // (PIECES_IN_FLIGHT * BYTES_PER_TEXT_BYTE)
    if size < least:
        needed = taken_bytes + READING_BYTES + PIECES_IN_FLIGHT * BYTES_PER_TEXT_BYTE * least
        raise BadOption(
            f"--host-limit {flag_bytes(host_limit_bytes)} is too small: Python, libraries and tokenizer take "
            f"{show_bytes(taken_bytes)} and packing needs some more; give {flag_bytes(needed)} or more"
        )
    return min(PIECE_BYTES, size)


def kept_ends(asked: tuple[str, ...] | None, sides: tuple[str, ...], *, conversations: bool) -> tuple[bool, ...]:
    """By side, whether its end is kept: in a conversation the question comes last."""
    names = (("prompt",) if conversations else ()) if asked is None else asked
    if unknown := [name for name in names if name not in sides]:
        raise BadOption(f"--keep-end {','.join(unknown)}: the rows have the sides {', '.join(sides)}")
    return tuple(side in names for side in sides)


def by_side(values: tuple[int, ...], sides: tuple[str, ...]) -> tuple[int, ...]:
    if len(values) not in (1, len(sides)):
        raise BadOption(
            f"--max-tokens {','.join(map(str, values))}: the rows have {len(sides)} sides ({', '.join(sides)}); "
            "give one number for all, or one for each"
        )
    return values * len(sides) if len(values) == 1 else values
