"""`store.json`: what a token store says about itself, and the checksums that find a flipped byte.

It is written last, so a folder without it is an unfinished store. It carries its own sha256, and for every other file its
size and a sha256 for each 64 MiB: a check of 2.5 GB takes 2 s (1.57 GiB/s measured) and tells file and block.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from brimful.errors import BadData
from brimful.units import MiB

VERSION = 1
"""Of the format: another one is refused."""
NAME = "store.json"
BLOCK_BYTES = 64 * MiB
_PIECE_BYTES = MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """One file of the store as it was written."""

    name: str
    """Within the store: `tokens-00000.arrow`, `tokenizer/tokenizer.json`."""
    size_bytes: int
    sha256: tuple[str, ...]
    """Of each block of 64 MiB."""
    rows: int = 0
    """Of a tokens or index file."""

    @classmethod
    def of(cls, folder: Path, name: str, *, rows: int = 0) -> "FileFacts":
        """Reads the whole file."""
        path = folder / name
        return cls(name=name, size_bytes=path.stat().st_size, sha256=tuple(block_hashes(path)), rows=rows)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "FileFacts":
        return cls(**{**content, "sha256": tuple(content["sha256"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeta:
    """Everything in `store.json`. Lengths and tokens count the eos that ends each side."""

    sides: tuple[str, ...]
    dtype: str
    """`uint16`, or `int32` where the vocabulary exceeds 65,536."""
    rows: int
    tokens: dict[str, int]
    """By side, over all rows."""
    longest: dict[str, int]
    """By side, tokens of the longest."""
    max_tokens: dict[str, int]
    """By side, where longer ones were cut, the eos counted."""
    eos_id: int
    pad_id: int | None
    """None where the tokenizer has none."""
    vocab_size: int
    tokenizer_fingerprint: str
    sources: tuple[str, ...] = ()
    """The files it was packed from."""
    rows_in: int
    dropped: dict[str, int]
    """Rows of the source that are not in here, by reason."""
    truncated: dict[str, int]
    """Rows cut, by side."""
    files: tuple[FileFacts, ...]
    version: int = VERSION

    @property
    def fingerprint(self) -> str:
        """Changes with the tokens, their order, the sides and the special ids, not with where they came from."""
        content = {
            "sides": self.sides, "dtype": self.dtype, "rows": self.rows, "eos": self.eos_id, "pad": self.pad_id,
            "vocab": self.vocab_size, "files": [[one.name, one.sha256] for one in self.files if one.rows],
        }  # fmt: skip
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]

    @property
    def size_bytes(self) -> int:
        """Of all files on disk, this one left out."""
        return sum(one.size_bytes for one in self.files)

    def to_text(self) -> str:
        content = asdict(self)
        return json.dumps({"sha256": _seal(content), **content}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "StoreMeta":
        """From a store's folder; the caller made sure that `store.json` is there."""
        path = folder / NAME
        try:
            content = json.loads(path.read_bytes())
            version = content["version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadData(f"{path} cannot be read ({type(error).__name__}); pack the rows again") from None
        if version != VERSION:
            raise BadData(
                f"{path} is of format version {version} and this Brimful reads version {VERSION}; "
                "pack the rows again with `brimful data pack`, or use the Brimful that made it"
            )
        return cls._of(content, path)

    @classmethod
    def _of(cls, content: dict[str, Any], path: Path) -> "StoreMeta":
        seal = content.pop("sha256", None)
        if seal != _seal(content) or content.keys() != {one.name for one in fields(cls)}:
            raise BadData(f"{path} was changed after it was written: its checksum differs; pack the rows again")
        files = tuple(FileFacts.from_json(one) for one in content["files"])
        tuples = {name: tuple(content[name]) for name in ("sides", "sources")}
        return cls(**{**content, **tuples, "files": files})


def block_hashes(path: Path) -> Iterator[str]:
    """Read in pieces of 1 MiB, so that checking costs no memory."""
    piece = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while True:
            digest, left = hashlib.sha256(), BLOCK_BYTES
            while left and (size := file.readinto(piece[: min(left, _PIECE_BYTES)])):
                digest.update(piece[:size])
                left -= size
            if left < BLOCK_BYTES:
                yield digest.hexdigest()
            if left:
                return


def check_files(folder: Path, files: Sequence[FileFacts], *, contents: bool) -> None:
    """Every file is there with its size and, if asked for, with its checksums."""
    for one in files:
        path = folder / one.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise BadData(f"{path} is missing from the token store; copy it again or pack the rows again") from None
        if size != one.size_bytes:
            how = "truncated" if size < one.size_bytes else "too long"
            raise BadData(
                f"{path} is {how}: {size:,} bytes instead of {one.size_bytes:,}; copy it again or pack the rows again"
            )
    for one in files if contents else ():
        for block, (found, written) in enumerate(zip(block_hashes(folder / one.name), one.sha256, strict=True)):
            if found != written:
                raise BadData(
                    f"{folder / one.name} is damaged in block {block} (bytes {block * BLOCK_BYTES:,} to "
                    f"{min((block + 1) * BLOCK_BYTES, one.size_bytes):,}): its checksum differs; "
                    "copy it again or pack the rows again"
                )


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
