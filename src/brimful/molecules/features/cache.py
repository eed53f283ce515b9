"""Features on disk: `<cache>/<encoder>-<hash>/{features.npy, manifest.json}`, whole or not there at all.

The hash is over the encoder's fingerprint and every SMILES (and the rows, for features that come from a file), so other
molecules, other options or other weights are another folder. While features are computed, finished batches lie in
`.<encoder>-<hash>.part`, one file each, renamed into place: a killed run goes on behind the last of them. The part folder
is locked by the kernel: a second process waits and takes what the first has made. One flipped byte in a matrix loads
silently, so the manifest carries a checksum, which is read with every opening (100 MB in 0.1 s).
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from brimful.files import sync
from brimful.errors import BadData, BadOption
from brimful.molecules.features.encoder import Encoded, Encoder, Features, Matrix

if TYPE_CHECKING:
    from brimful.molecules.dataset import Molecules

FORMAT = 1
MATRIX, MANIFEST = "features.npy", "manifest.json"
_PIECE_BYTES = 2**24
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A batch that is done and on disk, from `start` on."""

    start: int
    encoded: Encoded
    seconds: float

    @property
    def stop(self) -> int:
        return self.start + len(self.encoded.matrix)


def file_hash(path: Path) -> str:
    """Of its content: a file that was touched and not changed is the same file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key_of(encoder: Encoder, molecules: "Molecules") -> str:
    """What the features depend on, as one hash."""
    digest = hashlib.sha256(json.dumps([FORMAT, encoder.name, encoder.fingerprint()]).encode())
    digest.update("\0".join(molecules.smiles).encode())
    if encoder.reads_rows:
        digest.update(b"\0rows" + np.ascontiguousarray(molecules.rows, dtype=np.int64).tobytes())
    return digest.hexdigest()


class Place:
    """Where the features of one encoder and one set of molecules lie, or will lie."""

    def __init__(self, cache: Path, encoder: str, key: str) -> None:
        self.encoder, self.key = encoder, key
        self.folder = cache / f"{re.sub(r'[^0-9A-Za-z.]+', '-', encoder).strip('-.')}-{key[:16]}"
        self.part = cache / f".{self.folder.name}.part"

    def open(self, *, cached: bool = True) -> Features | None:
        """The features, if they are there; `BadData` where what is there is not what it should be."""
        if not self.folder.exists():
            return None
        try:
            said = json.loads((self.folder / MANIFEST).read_bytes())
            self._check(said)
            matrix = np.load(self.folder / MATRIX, mmap_mode="r", allow_pickle=False)
            if list(matrix.shape) != said["shape"] or str(matrix.dtype) != said["dtype"]:
                raise self._unusable(f"{MATRIX} is not the matrix that its manifest describes")
            return Features(
                matrix=matrix,
                failed={int(position): str(reason) for position, reason in said["failed"].items()},
                encoder=self.encoder,
                seconds=float(said["seconds"]),
                cached=cached,
                remarks=tuple(said["remarks"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unusable("it is incomplete or damaged") from error

    def _check(self, said: dict[str, Any]) -> None:
        if said["key"] != self.key:
            raise self._unusable("it was made from other molecules or by another encoder")
        path = self.folder / MATRIX
        if path.stat().st_size != said["bytes"]:
            raise self._unusable(f"{MATRIX} has {path.stat().st_size:,} bytes and should have {said['bytes']:,}")
        if _checksum(path) != said["crc32"]:
            raise self._unusable(f"{MATRIX} has changed since it was written")

    def _unusable(self, why: str) -> BadData:
        return BadData(
            f"the cached features in {self.folder} cannot be used: {why}; delete that folder to compute them anew"
        )

    @contextmanager
    def building(self, say: Callable[[str], object]) -> Iterator[None]:
        """Hold the part folder. Another process may have finished meanwhile: `open` again inside."""
        while True:
            with self._written():
                self.part.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.part, os.O_RDONLY)
            try:
                self._lock(descriptor, say)
                if self._is_there(descriptor):
                    yield
                    return
            finally:
                with suppress(OSError):  # only if nothing was finished
                    self.part.rmdir()
                os.close(descriptor)

    def _lock(self, descriptor: int, say: Callable[[str], object]) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{self.encoder}: another process computes these features; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            # Without locks two processes do the work twice, and rename the same batches into the same places.

    def _is_there(self, descriptor: int) -> bool:
        """Whether the folder that was locked is still the one under this name: its owner removes it when done."""
        try:
            return os.fstat(descriptor).st_ino == self.part.stat().st_ino
        except FileNotFoundError:
            return False

    def chunk_at(self, start: int) -> Chunk | None:
        """The batch that begins there, if an earlier run finished one."""
        for path in self.part.glob(f"{start:09}.npz"):
            try:
                with np.load(path, allow_pickle=False) as file:
                    said = json.loads(file["said"].tobytes())
                    failed = {int(position): reason for position, reason in said["failed"].items()}
                    encoded = Encoded(matrix=file["matrix"], failed=failed, remarks=said["remarks"])
                return Chunk(start=start, encoded=encoded, seconds=said["seconds"])
            except (OSError, ValueError, KeyError, BadZipFile, EOFError, zlib.error):
                return None
        return None

    def keep(self, chunk: Chunk) -> None:
        """Write a finished batch."""
        facts = {
            "failed": {str(position): reason for position, reason in chunk.encoded.failed.items()},
            "remarks": dict(chunk.encoded.remarks),
            "seconds": chunk.seconds,
        }
        content = io.BytesIO()
        np.savez(content, matrix=chunk.encoded.matrix, said=np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8))
        with self._written():
            self.part.mkdir(exist_ok=True)
            whole = self.part / f"{chunk.start:09}.npz"
            beside = whole.with_suffix(f".{os.getpid()}")
            beside.write_bytes(content.getbuffer())
            beside.rename(whole)

    def publish(self, starts: list[int], facts: dict[str, Any], shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        """Join the batches into one matrix, in a folder beside, and give it its name when it is whole."""
        beside = self.part / f"whole.{os.getpid()}"
        with self._written():
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            crc32 = self._join(beside / MATRIX, starts, shape, dtype)
            own = {
                "format": FORMAT,
                "encoder": self.encoder,
                "key": self.key,
                "shape": list(shape),
                "dtype": str(dtype),
            }
            size = {"bytes": (beside / MATRIX).stat().st_size, "crc32": crc32}
            (beside / MANIFEST).write_text(json.dumps(own | size | facts, indent=1))
            sync(beside / MATRIX)
            sync(beside / MANIFEST)
            with suppress(FileExistsError):  # the same features, by a process on a filesystem without locks
                _rename(beside, self.folder)
        shutil.rmtree(self.part, ignore_errors=True)

    def _join(self, path: Path, starts: list[int], shape: tuple[int, int], dtype: np.dtype[Any]) -> int:
        """Plain writes and no writable map: a full disk is then an error and not a dead process."""
        head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, head)
            for start in starts:
                chunk = self.chunk_at(start)
                if chunk is None:
                    raise OSError(errno.EIO, f"a finished batch in {self.part} cannot be read back")
                file.write(_rows(chunk.encoded, shape[1], dtype).tobytes())
        return _checksum(path)

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            raise BadOption(
                f"features cannot be written to the cache {self.folder.parent} ({why}); free space there, or name another folder"
            ) from error


def _rows(encoded: Encoded, columns: int, dtype: np.dtype[Any]) -> Matrix:
    """The rows of a batch as they go into the matrix: NaN where there are no features."""
    failed = list(encoded.failed)
    if encoded.matrix.shape[1] != columns:  # nothing in this batch could be encoded
        return np.full((len(encoded.matrix), columns), np.nan, dtype)
    rows: Matrix = np.array(encoded.matrix, dtype=dtype, order="C")
    if failed:
        rows[failed] = np.nan
    return rows


def _rename(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise FileExistsError(str(folder)) from error


def _checksum(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc32 = zlib.crc32(piece, crc32)
    return crc32
