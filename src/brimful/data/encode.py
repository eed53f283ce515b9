"""Texts to tokens: each side tokenised whole, cut to its limit, ended by exactly one eos.

The tokenizer's own truncation is not used: it keeps what it cuts off, and counts neither rows nor tokens. Its encodings
take some 130 bytes a token until they are read, so a chunk is tokenised in pieces of half a megabyte of text (about
1,000 rows of chat, 15 MB of encodings): smaller pieces cost time, larger ones only memory.

A text of more than 262,144 characters (a whole book in one field) is first cut to its beginning, or to its end where
that is what is kept: it holds far more tokens than are kept, and one such row does not take gigabytes.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from brimful.data.store import FILE_ROWS, NAME, FileFacts, check_files, column_numbers, write_synced
from brimful.errors import BadData, BadOption
from brimful.units import GiB, KiB, MiB, flag_bytes, show_bytes

# The folder a pack is made in: `.OUTPUT.part` beside the output, locked, able to go on, renamed when all is done.
#
# `progress.json` lists the files that are whole, with their checksums, and how far in the source they reach. A pack that
# was killed goes on behind the last of them when source, tokenizer and options are the same, and gives the same store as
# one that ran through.


PROGRESS = "progress.json"


@dataclass(kw_only=True)
class Counts:
    """How far a pack has come, in rows and tokens; lists are per side."""

    chunks: int = 0
    rows_in: int = 0
    broken: int = 0
    empty: int = 0
    rows_out: int = 0
    cut: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    first_broken: list[Any] | None = None
    """File, line and reason of the first row that could not be read."""

    @property
    def dropped(self) -> dict[str, int]:
        return {"broken": self.broken, "empty": self.empty}

    def add_sides(self, **lists: list[int]) -> None:
        for name, values in lists.items():
            before = getattr(self, name) or [0] * len(values)
            setattr(self, name, [one + other for one, other in zip(before, values, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What an earlier pack left that can be used: nothing, where `files` is empty."""

    counts: Counts
    files: tuple[FileFacts, ...] = ()
    discarded: str = ""
    """Why what was there is of no use; empty where nothing was there."""


@contextmanager
def part_folder(output: Path) -> Iterator[Path]:
    """The folder, for one process at a time. Left behind on an error if there is something in it to go on with."""
    part = output.with_name(f".{output.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDONLY)
    try:
        _lock(descriptor, part, output)
        try:
            yield part
        except BaseException:
            if not (part / PROGRESS).exists():
                shutil.rmtree(part, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def begun(part: Path, key: dict[str, Any]) -> Begun:
    """What is in there from an earlier pack of the same rows; everything else in the folder is removed."""
    found = _read(part, key)
    whole = {one.name for one in found.files}
    for path in part.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in whole | ({PROGRESS} if whole else set()):
            path.unlink()
    return found


def save(part: Path, key: dict[str, Any], counts: Counts, files: list[FileFacts]) -> None:
    """After each whole file."""
    content = {"key": key, "counts": asdict(counts), "files": [asdict(one) for one in files]}
    write_synced(part / PROGRESS, json.dumps(content))


def check_output(output: Path, *, overwrite: bool) -> None:
    """An existing output is refused, or replaced if that was asked for and it is a token store."""
    if not output.exists() and not output.is_symlink():
        return
    if output.is_dir() and not any(output.iterdir()):
        return
    if not (output / NAME).is_file():
        kind = "folder that is not a token store" if output.is_dir() else "file"
        raise BadOption(f"--output {output} is an existing {kind}; name another folder")
    if not overwrite:
        raise BadOption(f"--output {output} is an existing token store; name another folder, or add --overwrite")


def publish(part: Path, output: Path, *, overwrite: bool) -> None:
    """Rename the finished folder to the output; an old store goes when the new one is in its place."""
    check_output(output, overwrite=overwrite)
    old = output.with_name(f".{output.name}.old")
    _remove_store(old)  # of a pack that was killed right here
    if (output / NAME).is_file():
        output.rename(old)
    part.rename(output)
    (output / PROGRESS).unlink(missing_ok=True)
    _remove_store(old)
    descriptor = os.open(output.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_store(folder: Path) -> None:
    if (folder / NAME).is_file():
        shutil.rmtree(folder, ignore_errors=True)


def _lock(descriptor: int, part: Path, output: Path) -> None:
    """Held until the descriptor is closed; the folder may have been renamed by its owner since it was opened."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.fstat(descriptor).st_ino == part.stat().st_ino
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT):
            raise
        same = False
    if not same:
        raise BadOption(f"--output {output}: another brimful data pack is writing there; wait for it, or name another")


def _read(part: Path, key: dict[str, Any]) -> Begun:
    path = part / PROGRESS
    if not path.is_file():
        return Begun(counts=Counts())
    try:
        content = json.loads(path.read_bytes())
        files = tuple(FileFacts.from_json(one) for one in content["files"])
        differ = [name for name in key if content["key"].get(name) != key[name]]
        if differ:
            return Begun(counts=Counts(), discarded=f"it was made with another {' and '.join(differ)}")
        check_files(part, files, contents=True)
        return Begun(counts=Counts(**content["counts"]), files=files)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Begun(counts=Counts(), discarded=f"its {PROGRESS} cannot be read")
    except BadData as error:
        return Begun(counts=Counts(), discarded=str(error).partition(";")[0])


PIECE_BYTES = 512 * KiB
LONG_CHARACTERS = 2**18


@dataclass(slots=True)
class Encoded:
    """Rows as tokens, one after the other, and what was counted on the way: per side, in the order of the sides."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    """A line a row, a column a side; the eos counts."""
    empty: int
    """Rows left out because a side had no text or no token."""
    cut: list[int] = field(default_factory=list)
    """Rows cut."""
    lost: list[int] = field(default_factory=list)
    """Tokens cut off. Of a text longer than `LONG_CHARACTERS` only those in its beginning are counted."""
    characters: list[int] = field(default_factory=list)
    """Of the rows kept, before cutting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """What turns a piece of rows into tokens; used by several threads at once."""

    tokenizer: Tokenizer
    max_tokens: tuple[int, ...]
    """By side, the eos counted."""
    keep_end: tuple[bool, ...]
    """By side, whether it loses its beginning instead of its end."""
    eos_id: int
    dtype: str

    def __call__(self, rows: pa.RecordBatch) -> Encoded:
        filled = rows.filter(_with_text(rows))
        columns = [column.to_pylist() for column in filled.columns]
        sides = len(columns)
        ids = self._ids([text for row in zip(*columns, strict=True) for text in row])
        if not all(ids):  # a text of nothing but what the normaliser removes
            kept = [n for n in range(filled.num_rows) if all(ids[n * sides : (n + 1) * sides])]
            ids = [one for n in kept for one in ids[n * sides : (n + 1) * sides]]
            filled = filled.take(pa.array(kept, pa.int64()))
        found = self._flat(ids, empty=rows.num_rows - filled.num_rows)
        found.characters = [pc.sum(pc.utf8_length(column)).as_py() or 0 for column in filled.columns]
        return found

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Of each text all tokens, or more than are kept."""
        encode = self.tokenizer.encode_batch_fast
        heads = [
            text if len(text) <= LONG_CHARACTERS else text[self._kept(number, LONG_CHARACTERS)]
            for number, text in enumerate(texts)
        ]
        ids = [encoding.ids for encoding in encode(heads, add_special_tokens=False)]
        for number, (text, head) in enumerate(zip(texts, heads, strict=True)):
            if head is not text and len(ids[number]) < 2 * max(self.max_tokens):
                ids[number] = encode([text], add_special_tokens=False)[0].ids
        return ids

    def _kept(self, number: int, length: int) -> slice:
        """What is kept of a text that is longer, which is the so many-th of all sides of all rows."""
        return slice(-length, None) if self.keep_end[number % len(self.keep_end)] else slice(0, length)

    def _flat(self, ids: list[list[int]], *, empty: int) -> Encoded:
        sides = len(self.max_tokens)
        cut, lost = [0] * sides, [0] * sides
        for number, one in enumerate(ids):
            side = number % sides
            over = len(one) + 1 - self.max_tokens[side]
            if over > 0:
                cut[side] += 1
                lost[side] += over
                one[:] = one[self._kept(number, len(one) - over)]
            one.append(self.eos_id)
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), self.dtype, int(lengths.sum(dtype=np.int64)))
        return Encoded(tokens, lengths.reshape(-1, sides), empty, cut, lost)


def pieces(rows: pa.RecordBatch, *, piece_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows, cut where their text exceeds another `piece_bytes`; one piece at least."""
    sizes = np.zeros(rows.num_rows, dtype=np.int64)
    for column in rows.columns:
        sizes += column_numbers(pc.binary_length(column))
    ends = np.cumsum(sizes)
    targets = np.arange(piece_bytes, ends[-1] if len(ends) else 0, piece_bytes)
    cuts = np.searchsorted(ends, targets, side="right")
    edges = [0, *(cut for cut in np.unique(cuts).tolist() if cut), rows.num_rows]
    for first, last in pairwise(edges):
        yield rows.slice(first, last - first)


def joined(parts: list[Encoded]) -> Encoded:
    """The pieces of one chunk together."""

    def total(name: str) -> list[int]:
        return [sum(values) for values in zip(*(getattr(part, name) for part in parts), strict=True)]

    return Encoded(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        sum(part.empty for part in parts),
        total("cut"), total("lost"), total("characters"),
    )  # fmt: skip


def _with_text(rows: pa.RecordBatch) -> pa.Array:
    """Which rows have more than white space on every side."""
    keep = pa.array(np.ones(rows.num_rows, dtype=bool))
    for column in rows.columns:
        keep = pc.and_(keep, pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0))
    return keep


# What can be asked of a pack, and how large its pieces may be within the memory asked for.


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
