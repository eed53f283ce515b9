"""The features of a set of molecules: from the cache, or computed batch by batch into it.

`<cache>/<encoder>-<hash>/` has features.npy and manifest.json, and is complete or absent. The hash is over the encoder's
fingerprint and every SMILES (and the rows, for features from a file), so other molecules, options or weights get another
folder. While features are computed, finished batches are saved in `.<encoder>-<hash>.part`, so a killed run continues
after the last of them; a lock on that folder makes a second process wait for the first. A flipped byte in a matrix would
load silently, so the manifest has a checksum that is verified with every opening (100 MB in 0.1 s).

A batch is as large as its encoder prefers within 1 GiB; running out of memory halves it. The matrix is never in memory.
"""

import errno
import hashlib
import io
import json
import os
import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from brimful.errors import BadData, BadOption, DoesNotFit
from brimful.files import FileLock, atomic_path, sync
from brimful.molecules.dataset import Progress, silent
from brimful.molecules.features.encoder import Encoded, Encoder, Matrix
from brimful.units import GiB, show_bytes, show_count, show_rate, show_seconds

if TYPE_CHECKING:
    from brimful.molecules.dataset import Molecules

FORMAT = 1
MATRIX, MANIFEST = "features.npy", "manifest.json"
BATCH_BYTES = GiB
"""The most working memory of a batch."""
PROGRESS_EVERY_S = 1.0
LISTED = 3
"""The most molecules that a message names."""
_PIECE_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The features of a set of molecules, in its order, memory-mapped."""

    matrix: Matrix
    """float32, or uint8 for fingerprints; C order. The rows of failed molecules are NaN."""
    failed: Mapping[int, str]
    """Position among the molecules, and why there are no features."""
    encoder: str
    seconds: float
    """Measured, of the computation, now or by the run that filled the cache."""
    cached: bool
    remarks: tuple[str, ...] = ()
    """Sentences on molecules that were encoded, but not as one might expect."""

    @property
    def kept(self) -> Matrix:
        """Positions of the molecules that have features."""
        return np.setdiff1d(np.arange(len(self.matrix)), np.fromiter(self.failed, dtype=np.int64))


def compute_features(
    encoder: Encoder,
    molecules: "Molecules",
    *,
    cache: Path,
    batch_bytes: int = BATCH_BYTES,
    progress: Progress = silent,
) -> Features:
    """One row of numbers for each molecule, in their order, computed at most once."""
    if len(molecules) == 0:
        raise BadData(f"{molecules.source} has no molecules to compute features of. Try: another file.")
    entry = CacheEntry(Path(cache), encoder.name, _cache_key(encoder, molecules))
    features = entry.open()
    if features is None:
        with entry.building(progress):
            features = entry.open()  # another process may have finished while we waited
            if features is None:
                _Computation(encoder, molecules, entry, batch_bytes, progress).run()
                features = entry.open(cached=False)
                assert features is not None
    _report(features, molecules, progress)
    return features


def _report(features: Features, molecules: "Molecules", progress: Progress) -> None:
    rows, columns = features.matrix.shape
    size = show_bytes(features.matrix.nbytes)
    source = "from the cache" if features.cached else f"in {show_seconds(features.seconds)}"
    progress(f"{features.encoder}: {show_count(rows, 'molecule')} × {columns:,} features ({size}) {source}")
    for remark in features.remarks:
        progress(f"{features.encoder}: {remark}")
    if failed := features.failed:
        listed = [f"row {molecules.rows[index]} ({molecules.smiles[index]}): {reason}" for index, reason in list(failed.items())[:LISTED]]  # fmt: skip
        more = f"; and {len(failed) - LISTED:,} more" if len(failed) > LISTED else ""
        progress(f"{features.encoder}: {show_count(len(failed), 'molecule')} without features left out: {'; '.join(listed)}{more}")  # fmt: skip


class _Computation:
    """Batch after batch, continuing where an earlier run stopped."""

    def __init__(self, encoder: Encoder, molecules: "Molecules", entry: "CacheEntry", batch_bytes: int, progress: Progress) -> None:  # fmt: skip
        self.encoder, self.molecules, self.entry, self.progress = encoder, molecules, entry, progress
        self.batch = max(1, min(encoder.batch, batch_bytes // encoder.molecule_bytes))
        self.starts: list[int] = []
        self.failed: dict[int, str] = {}
        self.remarks: Counter[str] = Counter()
        self.columns, self.dtype = 0, np.dtype(np.float32)
        self.seconds = 0.0
        self._began_s = self._reported_s = time.monotonic()
        self._resumed = 0

    def run(self) -> None:
        done, total = 0, len(self.molecules)
        self.progress(f"{self.encoder.name}: computing features of {show_count(total, 'molecule')}")
        while done < total:
            batch = self.entry.saved_batch(done)
            if batch is None:
                batch = self._compute(done)
                self.entry.save_batch(batch)
            else:
                self._resumed += batch.stop - batch.start
            self._collect(batch)
            done = batch.stop
            self._report(done)
        if len(self.failed) == total:
            reason = next(iter(self.failed.values()))
            raise BadData(f"{self.encoder.name} failed on all {show_count(total, 'molecule')} of {self.molecules.source} ({reason}). Try: another encoder.")  # fmt: skip
        facts = {
            "failed": {str(index): reason for index, reason in self.failed.items()},
            "remarks": [f"{show_count(count, 'molecule')} {remark}" for remark, count in self.remarks.items()],
            "seconds": self.seconds,
        }
        dtype = np.dtype(np.float32) if self.failed else self.dtype  # uint8 has no NaN
        self.entry.publish(self.starts, facts, (total, self.columns), dtype)

    def _compute(self, start: int) -> "Batch":
        began_s = time.monotonic()
        encoded: Encoded | None = None
        while encoded is None:
            some = self.molecules.take(np.arange(start, min(start + self.batch, len(self.molecules))))
            encoded = self._try_encode(some)
        self._check(some, encoded, start)
        return Batch(start=start, encoded=encoded, seconds=time.monotonic() - began_s)

    def _try_encode(self, some: "Molecules") -> Encoded | None:
        """None after running out of memory with more than one molecule."""
        try:
            return self.encoder.encode(some)
        except Exception as error:
            from brimful.memory.oom import is_oom

            if not is_oom(error):
                raise
            if len(some) == 1:
                message = f"{self.encoder.name} ran out of memory on one molecule of {some.source}, row {some.rows[0]} ({some.smiles[0]}). Try: remove that row."  # fmt: skip
                raise DoesNotFit(message, needed_bytes=self.encoder.molecule_bytes) from error
        self.batch = len(some) // 2
        self.progress(f"{self.encoder.name}: out of memory, continuing with batches of {self.batch}")
        return None

    def _check(self, some: "Molecules", encoded: Encoded, start: int) -> None:
        """One row for each molecule, finite unless it failed."""
        matrix, name = encoded.matrix, self.encoder.name
        if matrix.ndim != 2 or len(matrix) != len(some):
            raise BadData(f"{name} returned the shape {matrix.shape} for {show_count(len(some), 'molecule')}. Try: molecules × features.")  # fmt: skip
        finite = np.atleast_1d(np.isfinite(matrix).all(axis=1))
        finite[list(encoded.failed)] = True
        if finite.all():
            return
        broken, seen, total = np.flatnonzero(~finite), start + len(some), len(self.molecules)
        listed = ", ".join(f"{some.rows[index]} ({some.smiles[index]})" for index in broken[:LISTED])
        more = f" and {len(broken) - LISTED:,} more" if len(broken) > LISTED else ""
        among = f"of {total:,} molecules" if seen == total else f"of the first {seen:,} of {total:,} molecules"
        also = " and from the features" if self.encoder.reads_rows else ""
        raise BadData(
            f"{name} is NaN or infinite in row{'s' * (len(broken) > 1)} {listed}{more} of {some.source} (counted from 0), "
            f"{len(broken):,} {among}. Try: fill them, or remove those rows from that file{also}."
        )

    def _collect(self, batch: "Batch") -> None:
        encoded = batch.encoded
        if len(encoded.failed) < len(encoded.matrix):
            if self.columns not in (0, encoded.matrix.shape[1]):
                raise BadData(
                    f"{self.encoder.name} gave {self.columns} features for the first molecules and "
                    f"{encoded.matrix.shape[1]} from molecule {batch.start} on. Try: return as many for all."
                )
            mixed = self.columns and encoded.matrix.dtype != self.dtype
            self.columns, self.dtype = encoded.matrix.shape[1], np.dtype(np.float32) if mixed else encoded.matrix.dtype
        self.starts.append(batch.start)
        self.failed |= {batch.start + index: reason for index, reason in sorted(encoded.failed.items())}
        self.remarks.update(encoded.remarks)
        self.seconds += batch.seconds

    def _report(self, done: int) -> None:
        """`chemnet: 1,200 of 7,200 molecules, 310/s, 20 s left`: the rate is measured, the rest predicted from it."""
        now_s, total = time.monotonic(), len(self.molecules)
        if done >= total or now_s - self._reported_s < PROGRESS_EVERY_S or done == self._resumed:
            return
        self._reported_s = now_s
        rate = (done - self._resumed) / (now_s - self._began_s)
        left = show_seconds((total - done) / rate)
        self.progress(f"{self.encoder.name}: {done:,} of {total:,} molecules, {show_rate(rate)}/s, {left} left")


# ---- The cache -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A finished batch, from molecule `start` on."""

    start: int
    encoded: Encoded
    seconds: float

    @property
    def stop(self) -> int:
        return self.start + len(self.encoded.matrix)


def _cache_key(encoder: Encoder, molecules: "Molecules") -> str:
    digest = hashlib.sha256(json.dumps([FORMAT, encoder.name, encoder.fingerprint()]).encode())
    digest.update("\0".join(molecules.smiles).encode())
    if encoder.reads_rows:
        digest.update(b"\0rows" + np.ascontiguousarray(molecules.rows, dtype=np.int64).tobytes())
    return digest.hexdigest()


class CacheEntry:
    """The folder of the features of one encoder and one set of molecules."""

    def __init__(self, cache: Path, encoder: str, key: str) -> None:
        self.encoder, self.key = encoder, key
        self.folder = cache / f"{re.sub(r'[^0-9A-Za-z.]+', '-', encoder).strip('-.')}-{key[:16]}"
        self.part = cache / f".{self.folder.name}.part"

    def open(self, *, cached: bool = True) -> Features | None:
        """None where there are none yet; `BadData` where the folder is damaged."""
        if not self.folder.exists():
            return None
        try:
            manifest = json.loads((self.folder / MANIFEST).read_bytes())
            self._verify(manifest)
            matrix = np.load(self.folder / MATRIX, mmap_mode="r", allow_pickle=False)
            if list(matrix.shape) != manifest["shape"] or str(matrix.dtype) != manifest["dtype"]:
                raise self._unusable(f"{MATRIX} does not match its manifest")
            return Features(
                matrix=matrix,
                failed={int(index): str(reason) for index, reason in manifest["failed"].items()},
                encoder=self.encoder,
                seconds=float(manifest["seconds"]),
                cached=cached,
                remarks=tuple(manifest["remarks"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unusable("it is incomplete or damaged") from error

    def _verify(self, manifest: dict[str, Any]) -> None:
        if manifest["key"] != self.key:
            raise self._unusable("it was made from other molecules or by another encoder")
        path = self.folder / MATRIX
        if path.stat().st_size != manifest["bytes"]:
            raise self._unusable(f"{MATRIX} has {path.stat().st_size:,} bytes instead of {manifest['bytes']:,}")
        if _crc32(path) != manifest["crc32"]:
            raise self._unusable(f"{MATRIX} has changed since it was written")

    def _unusable(self, why: str) -> BadData:
        return BadData(f"the cached features in {self.folder} cannot be used: {why}. Try: delete that folder.")

    @contextmanager
    def building(self, progress: Progress) -> Iterator[None]:
        """Holds the part folder. Filesystems without locks lose nothing but time: two processes do the same work and
        rename the same batches into the same places."""
        with self._writing():
            try:
                lock = FileLock(self.part, folder=True)
            except BlockingIOError:
                progress(f"{self.encoder}: another process computes these features, waiting for it")
                lock = FileLock(self.part, folder=True, wait=True)
        with lock:
            try:
                yield
            finally:
                with suppress(OSError):  # removed only if empty
                    self.part.rmdir()

    def saved_batch(self, start: int) -> Batch | None:
        """The batch that begins there, if an earlier run finished one."""
        try:
            with np.load(self.part / f"{start:09}.npz", allow_pickle=False) as file:
                facts = json.loads(file["facts"].tobytes())
                failed = {int(index): reason for index, reason in facts["failed"].items()}
                encoded = Encoded(matrix=file["matrix"], failed=failed, remarks=facts["remarks"])
            return Batch(start=start, encoded=encoded, seconds=facts["seconds"])
        except (OSError, ValueError, KeyError, BadZipFile, EOFError, zlib.error):
            return None

    def save_batch(self, batch: Batch) -> None:
        facts = {
            "failed": {str(index): reason for index, reason in batch.encoded.failed.items()},
            "remarks": dict(batch.encoded.remarks),
            "seconds": batch.seconds,
        }
        content = io.BytesIO()
        np.savez(content, matrix=batch.encoded.matrix, facts=np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8))
        with self._writing():
            self.part.mkdir(exist_ok=True)
            with atomic_path(self.part / f"{batch.start:09}.npz") as draft:
                draft.write_bytes(content.getbuffer())

    def publish(self, starts: list[int], facts: dict[str, Any], shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        """Join the batches into one matrix in a folder beside, and rename it when it is complete."""
        draft = self.part / f"whole.{os.getpid()}"
        with self._writing():
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            self._join(draft / MATRIX, starts, shape, dtype)
            manifest = {
                "format": FORMAT,
                "encoder": self.encoder,
                "key": self.key,
                "shape": list(shape),
                "dtype": str(dtype),
                "bytes": (draft / MATRIX).stat().st_size,
                "crc32": _crc32(draft / MATRIX),
            }
            (draft / MANIFEST).write_text(json.dumps(manifest | facts, indent=1))
            sync(draft / MATRIX)
            sync(draft / MANIFEST)
            try:
                draft.rename(self.folder)
            except OSError as error:  # the same features, by a process on a filesystem without locks
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        shutil.rmtree(self.part, ignore_errors=True)

    def _join(self, path: Path, starts: list[int], shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        """Plain writes instead of a writable memory map: a full disk is then an error and not a dead process."""
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for start in starts:
                batch = self.saved_batch(start)
                if batch is None:
                    raise OSError(errno.EIO, f"a finished batch in {self.part} cannot be read back")
                file.write(_rows_to_write(batch.encoded, shape[1], dtype).tobytes())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            raise BadOption(f"features cannot be written to {self.folder.parent}: {why}. Try: free space there, or another cache=.") from error  # fmt: skip


def _rows_to_write(encoded: Encoded, columns: int, dtype: np.dtype[Any]) -> Matrix:
    """NaN where there are no features."""
    if encoded.matrix.shape[1] != columns:  # nothing in this batch could be encoded
        return np.full((len(encoded.matrix), columns), np.nan, dtype)
    rows: Matrix = np.array(encoded.matrix, dtype=dtype, order="C")
    if encoded.failed:
        rows[list(encoded.failed)] = np.nan
    return rows


def _crc32(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc32 = zlib.crc32(piece, crc32)
    return crc32
