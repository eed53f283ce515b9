"""`manifest.json`: what a checkpoint consists of, so that a missing file, a short one and a flipped byte are found.

It is written last, so a folder without it was never finished; it carries its own sha256, so that it can be believed.
A `BadCheckpoint` raised here says only what is wrong: `optimizer.pt is missing`; the caller adds where and what to do.

Checkpoints are put in order by `serial`, not by step: a run that went back to step 200 and saved step 250 goes on from
there, although a step 400 of its former course lies beside it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brimful.errors import BadCheckpoint
from brimful.files import write_atomic
from brimful.machine.host import Host
from brimful.units import MiB

# The sha256 of every file of a checkpoint, block by block, with several threads.
#
# Only a hash finds a flipped byte: torch.load and safetensors both load it without a word. One hash for each 64 MiB, as
# in a token store, lets threads share a file (sha256 leaves Python free meanwhile), and most of a checkpoint is one file,
# the optimizer's. Measured from the page cache: 1.5 GiB/s with one thread, 3.0 with two on two idle cores; the base chat
# model with its AdamW state, 2.2 GB, costs 1.4 s of one core.


BLOCK_BYTES = 64 * MiB
_PIECE_BYTES = MiB
_MOST_THREADS = 8
"""Hash 12 GiB/s at that speed, which few disks can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """One file of a checkpoint as it was written."""

    name: str
    """Within the checkpoint, with `/`: `model/config.json`."""
    size_bytes: int
    sha256: tuple[str, ...]
    """Of each block of 64 MiB."""


def read_facts(folder: Path, names: Sequence[str]) -> tuple[FileFacts, ...]:
    """Size and hashes of these files, in the order given; reads them whole."""
    sizes = [(folder / name).stat().st_size for name in names]
    blocks = [range(-(-size // BLOCK_BYTES)) for size in sizes]
    work = [(folder / name, block) for name, numbers in zip(names, blocks, strict=True) for block in numbers]
    with ThreadPoolExecutor(min(_MOST_THREADS, Host.detect().cores)) as pool:
        hashes = pool.map(lambda one: _hash_block(*one), work)
        return tuple(
            FileFacts(name=name, size_bytes=size, sha256=tuple(next(hashes) for _ in numbers))
            for name, size, numbers in zip(names, sizes, blocks, strict=True)
        )


def _hash_block(path: Path, block: int) -> str:
    """In pieces of 1 MiB, so that hashing costs no memory."""
    piece = memoryview(bytearray(_PIECE_BYTES))
    digest, left = hashlib.sha256(), BLOCK_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(block * BLOCK_BYTES)
        while left and (size := file.readinto(piece[: min(left, _PIECE_BYTES)])):
            digest.update(piece[:size])
            left -= size
    return digest.hexdigest()


VERSION = 1
"""Of the format: another one is refused."""
NAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything in `manifest.json`."""

    step: int
    serial: int
    """The how-manieth save of this run it was, from 1."""
    created: str
    """UTC, for people; nothing is decided by a clock."""
    files: tuple[FileFacts, ...]
    facts: dict[str, Any]
    """What the training adds: anything JSON can say."""
    version: int = VERSION

    @property
    def size_bytes(self) -> int:
        """Of all files on the disk, this one left out."""
        return sum(one.size_bytes for one in self.files)

    @classmethod
    def write(cls, folder: Path, *, step: int, serial: int, facts: Mapping[str, Any]) -> "Manifest":
        """Hash every file below the folder and put the manifest beside them, on the disk when this returns."""
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        created = datetime.now(UTC).isoformat(timespec="seconds")
        plain = json.loads(json.dumps(dict(facts)))  # as it will be read: a key 2 comes back, and is sealed, as "2"
        manifest = cls(step=step, serial=serial, created=created, files=read_facts(folder, names), facts=plain)
        content = asdict(manifest)
        write_atomic(folder / NAME, json.dumps({"sha256": _seal(content), **content}, indent=1) + "\n")
        return manifest

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """What a folder says it is; its files are not looked at."""
        try:
            content = json.loads((folder / NAME).read_bytes())
            version = content["version"]
        except FileNotFoundError:
            why = f"it has no {NAME}" if folder.is_dir() else "there is no such folder"
            raise BadCheckpoint(why) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadCheckpoint(f"its {NAME} cannot be read ({type(error).__name__})") from None
        if version != VERSION:
            raise BadCheckpoint(f"its {NAME} is of version {version!r} and this Brimful reads version {VERSION}")
        return cls._of(content)

    @classmethod
    def _of(cls, content: dict[str, Any]) -> "Manifest":
        seal = content.pop("sha256", None)
        if seal != _seal(content) or content.keys() != {one.name for one in fields(cls)}:
            raise BadCheckpoint(f"its {NAME} was changed after it was written: its checksum differs")
        files = tuple(FileFacts(**{**one, "sha256": tuple(one["sha256"])}) for one in content["files"])
        return cls(**{**content, "files": files})

    def check(self, folder: Path, *, contents: bool) -> None:
        """Every file is there with its size and, if asked for, with its checksums."""
        for one in self.files:
            _check_size(folder, one)
        if contents:
            for written, found in zip(self.files, _read_back(folder, self.files), strict=True):
                _check_hashes(written, found)


def _check_size(folder: Path, one: FileFacts) -> None:
    try:
        size_bytes = (folder / one.name).stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise BadCheckpoint(f"{one.name} is missing") from None
    except OSError as error:
        raise BadCheckpoint(f"{one.name} cannot be read ({error.strerror})") from None
    if size_bytes != one.size_bytes:
        how = "truncated" if size_bytes < one.size_bytes else "too long"
        raise BadCheckpoint(f"{one.name} is {how}: {size_bytes:,} bytes instead of {one.size_bytes:,}")


def _read_back(folder: Path, files: tuple[FileFacts, ...]) -> tuple[FileFacts, ...]:
    try:
        return read_facts(folder, [one.name for one in files])
    except OSError as error:
        raise BadCheckpoint(f"{error.filename or folder} cannot be read ({error.strerror})") from None


def _check_hashes(written: FileFacts, found: FileFacts) -> None:
    for block, (before, now) in enumerate(zip(written.sha256, found.sha256, strict=True)):
        if before != now:
            first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, written.size_bytes)
            raise BadCheckpoint(f"{written.name} is damaged between bytes {first:,} and {last:,}: its checksum differs")


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
